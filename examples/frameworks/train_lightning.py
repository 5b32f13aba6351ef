"""Trains a small model with Lightning, and continues after any kill.

    CKPTD_ROOT=/tmp/ckpts python examples/frameworks/train_lightning.py --steps 60 --losses losses

Kill it (`kill -9`) and start it again with the same command. After each optimizer step
it appends the step and the loss to the file of --losses, and at the end a hash of the
parameters. Each loss is, bit for bit, the one of a run that was not killed. `attach` is
all that ckptd needs. With `torchrun --nproc-per-node 2` it trains with DDP.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ckptd.integrations.lightning import attach

SAMPLES, BATCH, ACCUMULATED = 112, 4, 2


class Classifier(L.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, 4),
        )

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10_000)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Losses(Callback):
    """The callback that appends the mean loss of each optimizer step to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._parts.append(outputs["loss"].detach())
        if trainer.fit_loop._should_accumulate():
            return
        loss = float(torch.stack(self._parts).double().mean())
        self._parts = []
        if trainer.is_global_zero:
            append(self._path, f"{trainer.global_step} {loss.hex()}")


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--every", type=int, default=5)
    given = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    model = Classifier()
    average = EMAWeightAveraging(decay=0.9)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=given.steps,
        max_epochs=-1,
        accumulate_grad_batches=ACCUMULATED,
        val_check_interval=5,
        log_every_n_steps=2,
        logger=CSVLogger(given.losses.parent, name="logs"),
        callbacks=[Losses(given.losses), EarlyStopping("val_loss", patience=10**6), average],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    attach(trainer, every_n_steps=given.every)
    trainer.fit(
        model,
        DataLoader(data(SAMPLES, 1), batch_size=BATCH, shuffle=True),
        DataLoader(data(16, 2), batch_size=8),
    )
    if trainer.is_global_zero:
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        append(given.losses, f"hash {digest.hexdigest()}")


if __name__ == "__main__":
    main()
