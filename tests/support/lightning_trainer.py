"""A trainer with Lightning for tests, which are told its losses, its metrics and what is
left at the end.

    python -m tests.support.lightning_trainer VARIANT DIRECTORY [KILL_AT]

With KILL_AT it kills itself with SIGKILL in the middle of that step. Under torchrun, rank 0
writes the losses and kills itself; the variant "sharded" then trains with FSDP2, and the
others with DDP.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ckptd.integrations.lightning import attach


def data(samples: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


class Model(L.LightningModule):
    """A classifier with all that Lightning lets a module save beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        self.accuracy = torchmetrics.MeanMetric()
        self.seen = 0

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        self.seen += len(x)
        found = self.layers(x)
        loss = nn.functional.cross_entropy(found, y)
        self.accuracy((found.argmax(1) == y).float())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"},
        }


class TwoOptimizers(L.LightningModule):
    """Two models that train in turn, with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.2)

    def training_step(self, batch: Any, number: int) -> dict[str, Tensor]:
        total = torch.zeros(())
        for layer, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            loss = nn.functional.cross_entropy(layer(self.dropout(batch[0])), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            total = total + loss.detach()
        return {"loss": total}

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.one.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.other.parameters(), lr=0.1),
        ]


class Sharded(Model):
    """A model that FSDP2 shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.LayerNorm(8)  # FSDP2 does not shard the buffers of a BatchNorm

    def configure_model(self) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Pairs(Model):
    """A model that trains on the batches of two loaders, one of them shorter."""

    def training_step(self, batch: Any, number: int) -> Tensor:
        return super().training_step([torch.cat(part) for part in zip(*batch, strict=True)], number)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data(60))


class StatefulLoader:
    """A loader that saves its position itself."""

    def __init__(self) -> None:
        self._data, self._next = data(60), 0

    def __len__(self) -> int:
        return 15

    def __iter__(self) -> Iterator[Any]:
        self._next %= 15
        while self._next < 15:
            self._next += 1
            yield self._data[self._next * 4 - 4 : self._next * 4]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Data(L.LightningDataModule):
    """A data module with workers, a generator of its own, and a state."""

    def __init__(self, samples: int = 60, batch: int = 4, workers: int = 0) -> None:
        super().__init__()
        self._arguments = samples, batch, workers
        self.requests = 0

    def train_dataloader(self) -> Any:
        self.requests += 1
        samples, batch, workers = self._arguments
        return DataLoader(
            data(samples),
            batch_size=batch,
            shuffle=True,
            generator=torch.Generator().manual_seed(7),
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    def val_dataloader(self) -> Any:
        return DataLoader(data(12, 2), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"requests": self.requests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.requests += state["requests"] - 1


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(data(60), batch_size=4, shuffle=True, **options)


VARIANTS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "epochs": lambda: (Model(), {"datamodule": Data()}),
    "workers": lambda: (Model(), {"datamodule": Data(workers=2)}),
    "sharded": lambda: (Sharded(), {"datamodule": Data()}),
    "manual": lambda: (TwoOptimizers(), {"train_dataloaders": shuffled()}),
    "pairs": lambda: (
        Pairs(),
        {
            "train_dataloaders": [shuffled(), DataLoader(data(20, 3), batch_size=4, shuffle=True)],
            "val_dataloaders": Data().val_dataloader(),
        },
    ),
    "iterable": lambda: (
        Model(),
        {
            "train_dataloaders": DataLoader(Stream(), batch_size=4),
            "val_dataloaders": Data().val_dataloader(),
        },
    ),
    "stateful": lambda: (
        Model(),
        {
            "train_dataloaders": StatefulLoader(),
            "val_dataloaders": Data().val_dataloader(),
        },
    ),
    "longer": lambda: (Model(), {"datamodule": Data(64)}),
    "smaller-batch": lambda: (Model(), {"datamodule": Data(batch=2)}),
}
"""The model and the arguments of `fit`, by the name of the variant."""


class Lines(Callback):
    """The callback that appends the loss of each step to a file, and kills the process."""

    def __init__(self, directory: Path, kill_at: int) -> None:
        self._directory = directory
        self._kill_at = kill_at
        self._step = 0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
    ) -> None:
        self._step = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if not trainer.is_global_zero:
            return
        self.line(f"{self._step} {trainer.current_epoch} {number} {float(outputs['loss']).hex()}")
        if self._step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def line(self, text: str) -> None:
        with (self._directory / "losses").open("a") as file:
            file.write(text + "\n")


def state_of(trainer: Any, directory: str) -> str:
    """Return all weights, moments, schedulers and callbacks as a text."""
    found = [
        *trainer.lightning_module.state_dict().items(),
        *(sorted(one.state_dict()["state"].items()) for one in trainer.optimizers),
        *(one.scheduler.state_dict() for one in trainer.lr_scheduler_configs),
        # A ModelCheckpoint does not load its current score.
        *(
            {key: held for key, held in one.state_dict().items() if key != "current_score"}
            for one in trainer.callbacks
        ),
        getattr(trainer.lightning_module, "seen", None),
        sorted(trainer.callback_metrics.items()),
    ]
    torch.set_printoptions(precision=20, threshold=10**6)
    return repr(found).replace(directory, "")


def main(variant: str, directory: str, kill_at: str = "0") -> None:
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    model, arguments = VARIANTS[variant]()
    place = Path(directory)
    lines = Lines(place, int(kill_at))
    monitors: list[Callback] = [
        EarlyStopping("val_loss", patience=100),
        ModelCheckpoint(place / "best", monitor="val_loss", filename="{epoch}"),
    ]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy: Any = "ddp" if ranks > 1 else "auto"
    if variant == "sharded":
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=3,
        log_every_n_steps=1,
        logger=CSVLogger(place, name="logs"),
        callbacks=[lines, *([] if variant == "manual" else monitors)],
        enable_checkpointing=variant != "manual",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    attach(trainer, every_n_steps=5)
    trainer.fit(model, **arguments)
    text = state_of(trainer, directory)
    if not trainer.is_global_zero:
        return
    (place / "end").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    lines.line(f"end {trainer.global_step} {trainer.current_epoch} {digest}")


if __name__ == "__main__":
    main(*sys.argv[1:])
