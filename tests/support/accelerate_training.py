"""Trainings with accelerate for tests: a tiny one in this process, and a program with a
loop of its own, `python -m tests.support.accelerate_training DIRECTORY [KILL_AT]`, which
saves itself with `save_state`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptd.integrations.accelerate import TrainingRun, attach

STEPS = 17
"""The steps of the program. An epoch has 6 of them on one rank, and 3 on two."""


class Counter:
    """An object that is registered with the Accelerator."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Training:
    """A tiny training with accelerate."""

    def __init__(
        self, samples: int = 12, batch_size: int = 2, accumulated: int = 1, **options: Any
    ) -> None:
        from accelerate import Accelerator

        torch.manual_seed(1)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated, **options)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        data = TensorDataset(torch.randn(samples, 2, device="cpu", dtype=torch.float32))
        self.plain = DataLoader(data, batch_size=batch_size, shuffle=True)
        self.loader: Any = None
        self.counter = Counter()

    def prepare(self) -> Training:
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            self.model, self.optimizer, self.scheduler, self.plain
        )
        self.accelerator.register_for_checkpointing(self.counter)
        return self

    def train(self, run: TrainingRun, **options: Any) -> list[tuple[int, int]]:
        """Train. Return the epoch and the step of each batch."""
        seen = []
        for epoch, step, (x,) in run.batches(self.loader, **options):
            self.trained(x)
            seen.append((epoch, step))
        return seen

    def trained(self, x: torch.Tensor) -> None:
        """Train on one batch."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.counter.batches += 1

    def hashed(self) -> str:
        """Return a digest of the parameters and of the state of the optimizer."""
        found = hashlib.sha256()
        held = self.optimizer.state_dict()["state"]
        values = [value for one in held.values() for value in one.values()]
        for value in (*self.model.parameters(), *values):
            found.update(value.detach().numpy().tobytes())
        return found.hexdigest()


def main(directory: str, kill_at: int) -> None:
    """Train in a loop as one writes it for accelerate, and go on from the newest directory
    of `save_state`.
    """
    from accelerate import skip_first_batches
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    place = Path(directory)
    project = ProjectConfiguration(str(place), automatic_checkpoint_naming=True, total_limit=2)
    training = Training(
        24, 4, project_config=project,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    ).prepare()  # fmt: skip
    accelerator, loader, counter = training.accelerator, training.loader, training.counter
    attach(accelerator, save_state=True)
    rank = accelerator.process_index
    if (place / "checkpoints").exists():
        accelerator.load_state()
    while counter.batches < STEPS:
        epoch, done = divmod(counter.batches, len(loader))
        loader.set_epoch(epoch)
        for (x,) in skip_first_batches(loader, done):
            training.trained(x + torch.rand_like(x))  # random numbers that a training draws
            step = counter.batches
            with (place / f"log-{rank}").open("a") as file:
                file.write(f"{step} {training.hashed()}\n")
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 3 == 0:
                accelerator.save_state()
            if step == STEPS:
                break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
