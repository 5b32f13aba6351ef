"""Trains a tiny network and saves it with a CheckpointManager of torch_checkpointing,
which ckptd is attached to. Kill it at any time and start it again: it resumes with the
same losses.

`CKPTD_ROOT=/ckpts python examples/frameworks/train_torch_checkpointing.py --steps 60`. It
needs `pip install 'ckptd[torch-checkpointing]'`.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch_checkpointing import CheckpointManager

import ckptd
from ckptd.integrations.torch_checkpointing import attach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"))
    parser.add_argument("--every", type=int, default=3, help="steps between two saves")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(200, 16))
    batches = ckptd.Batches(DataLoader(data, batch_size=8, shuffle=True))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    manager = CheckpointManager(CheckpointManager.Config.with_async_save())
    storage = attach(manager)
    start = 0
    if newest := storage.newest():
        # None loads a whole item. The random generators are set by load() too.
        restored = manager.load(
            newest,
            into={
                "model": model.state_dict(),
                "optimizer": None,
                "scheduler": None,
                "data": None,
                "step": 0,
            },
        )
        optimizer.load_state_dict(restored["optimizer"])
        scheduler.load_state_dict(restored["scheduler"])
        batches.load_state_dict(restored["data"])
        start = restored["step"] + 1

    with options.losses.open("a") as losses:
        drawn = iter(batches)
        for step in range(start, options.steps):
            total = 0.0
            for _ in range(2):
                (batch,) = next(drawn)
                loss = (model(batch) - batch).square().mean() / 2
                loss.backward()
                total += loss.item()
            with manager.lock():
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(step, total.hex(), file=losses, flush=True)
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                manager.save(
                    f"run/step_{step}",
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(),
                        "data": batches.state_dict(),
                        "step": step,
                    },
                )
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        print("hash", digest.hexdigest(), file=losses, flush=True)
    manager.close()


if __name__ == "__main__":
    main()
