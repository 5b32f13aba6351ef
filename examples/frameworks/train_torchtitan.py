"""A run with the parts of torchtitan that ckptd saves: kill it whenever you like, and start
it again.

`python examples/frameworks/train_torchtitan.py --steps 60 --losses losses.txt`, with
CKPTD_ROOT set, or `torchrun --nproc-per-node 2` instead of python, which shards the model
with FSDP2. Each step appends its loss to the file, and the end a hash of the model. The
loop, the optimizers, the schedulers, the loader and the order of the calls are those of
torchtitan's Trainer, which needs a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from ckptd.integrations.torchtitan import CheckpointManager

WORDS, LENGTH, SAMPLES, BATCHES = 64, 12, 40, 2


class Sentences(IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Random tokens of one rank, in another order in each epoch, without end."""

    def __init__(self, rank: int, ranks: int) -> None:
        words = torch.Generator().manual_seed(0)
        self._rows = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=words)[rank::ranks]
        self._epoch = self._given = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            order = torch.Generator().manual_seed(self._epoch)
            for index in torch.randperm(len(self._rows), generator=order)[self._given :].tolist():
                self._given += 1
                row = self._rows[index]
                yield {"input": row[:-1]}, row[1:]
            self._epoch, self._given = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._given = state["epoch"], state["given"]


class Training:
    """The state of the training, which torchtitan's Trainer keeps in itself."""

    step = tokens = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = state["step"], state["ntokens_seen"]


def begin() -> None:
    """Begin the process group; without torchrun that of a single rank."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"))
    parser.add_argument("--exclude", action="append", default=[], help="exclude_from_loading")
    parser.add_argument("--load-step", type=int, default=-1)
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    begin()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def write(*values: object) -> None:
        if rank == 0:
            with options.losses.open("a") as losses:
                print(*values, file=losses, flush=True)

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(WORDS, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 64),
        torch.nn.ReLU(), torch.nn.Linear(64, WORDS),
    )  # fmt: skip
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    torch.manual_seed(rank)  # the dropout of each rank
    optimizers = default_adamw(lr=0.01)
    optimizers.implementation = "for-loop"
    optimizers = optimizers.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=5, total_steps=200, decay_type="cosine")
    schedulers = schedule.build(optimizers=optimizers, training_steps=options.steps)
    loader = ParallelAwareDataloader(Sentences(rank, ranks), rank, ranks, batch_size=4)
    training = Training()

    checkpoint = CheckpointManager.Config(
        enable=options.checkpoint, interval=3, load_step=options.load_step,
        exclude_from_loading=options.exclude,
    )  # fmt: skip
    manager = checkpoint.build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": training}, sd_adapter=None, base_folder=f"{options.losses}.outputs",
    )  # fmt: skip
    manager.load(step=checkpoint.load_step)
    batches = iter(loader)
    while training.step < options.steps:
        training.step += 1
        optimizers.zero_grad()
        total = torch.zeros(())
        for _ in range(BATCHES):
            inputs, labels = next(batches)
            training.tokens += labels.numel()
            found = model(inputs["input"].flatten())
            loss = torch.nn.functional.cross_entropy(found, labels.flatten()) / BATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        dist.all_reduce(total)
        write(training.step, float(total).hex())
        manager.save(training.step, last_step=training.step == options.steps)
    manager.close()

    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().numpy().tobytes())
    write("hash", digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
