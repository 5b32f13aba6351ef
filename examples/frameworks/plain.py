"""A plain training loop with `ckptd.training`: kill it whenever you like, and start it
again.

`python examples/frameworks/plain.py --steps 60 --losses losses.txt`, with CKPTD_ROOT set.
Each step appends its loss to the file, and the end a hash of the model.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"))
    options = parser.parse_args()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(200, 16))
    batches = ckptd.Batches(DataLoader(data, batch_size=8, shuffle=True, num_workers=1))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    state = {"model": model, "optim": optimizer, "scheduler": scheduler, "data": batches}

    with options.losses.open("a") as losses, ckptd.training(state, every=3) as run:
        for step, (batch,) in zip(run.steps(options.steps), batches, strict=False):
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(step, loss.item().hex(), file=losses, flush=True)
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        print("hash", digest.hexdigest(), file=losses, flush=True)


if __name__ == "__main__":
    main()
