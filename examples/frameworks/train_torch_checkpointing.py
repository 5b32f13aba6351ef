"""Trains a tiny network and saves it with a CheckpointManager of torch_checkpointing,
which ckptd is attached to. Kill it at any time and start it again: it resumes with the
same losses.

`CKPTD_ROOT=/ckpts python examples/frameworks/train_torch_checkpointing.py --steps 60`, or
`torchrun --nproc-per-node 2` instead of python. It needs `pip install
'.[torch-checkpointing]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch_checkpointing import CheckpointManager

import ckptd
from ckptd.integrations.torch_checkpointing import attach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"))
    parser.add_argument("--every", type=int, default=3, help="steps between two saves")
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(200, 16))
    sampler: DistributedSampler[object] | None = (
        DistributedSampler(data) if dist.is_initialized() else None
    )
    batches = ckptd.Batches(
        DataLoader(data, batch_size=8, sampler=sampler, shuffle=sampler is None)
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    forward = model if sampler is None else DistributedDataParallel(model)
    torch.manual_seed(rank)  # the dropout of each rank

    manager = CheckpointManager(CheckpointManager.Config.with_async_save())
    storage = attach(manager)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": batches}
    start = 0
    if newest := storage.newest():
        # This sets the random generators too.
        start = manager.load(newest, into={**state, "step": 0})["step"] + 1

    with options.losses.open("a") as losses:
        drawn = iter(batches)
        for step in range(start, options.steps):
            total = 0.0
            for _ in range(2):
                (batch,) = next(drawn)
                loss = (forward(batch) - batch).square().mean() / 2
                loss.backward()
                total += loss.item()
            with manager.lock():
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if rank == 0:
                print(step, total.hex(), file=losses, flush=True)
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                manager.save(f"run/step_{step}", {**state, "step": step})
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        if rank == 0:
            print("hash", digest.hexdigest(), file=losses, flush=True)
    manager.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
