"""Trains a tiny network in a loop with accelerate. Kill it at any time and start it
again: it resumes with the same losses.

`CKPTD_ROOT=/ckpts python examples/frameworks/accelerate_loop.py --steps 20`. It needs
`pip install '.[hf]'`. The name is not `accelerate.py`, because a script is imported
instead of a package with its name.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptd
from ckptd.integrations.accelerate import attach


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--every", type=int, default=3, help="steps between two snapshots")
    parser.add_argument("--workers", type=int, default=0)
    chosen = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs = torch.randn(45, 8, device="cpu", dtype=torch.float32)
    targets = inputs.sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = DataLoader(
        TensorDataset(inputs, targets), batch_size=4, shuffle=True, num_workers=chosen.workers
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    run = attach(accelerator, every_steps=chosen.every)

    def write(line: str) -> None:
        if chosen.losses is not None and accelerator.is_main_process:
            with chosen.losses.open("a") as file:
                file.write(line + "\n")

    total = 0.0
    for _epoch, step, (x, y) in run.batches(loader, epochs=1000, steps=chosen.steps):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.item()
        if accelerator.sync_gradients:
            write(f"{step} {total.hex()}")
            total = 0.0

    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    write(f"hash {hashed.hexdigest()}")
    ckptd.close()


if __name__ == "__main__":
    main()
