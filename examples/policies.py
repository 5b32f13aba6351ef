"""Shows how to choose how often to save, in which files, and what to keep.

    python -m examples.policies ROOT

Every 10 steps a snapshot is taken. Every 20 steps one is saved to storage, in two
files. Retention keeps the two newest checkpoints, every 100th step, and the one with
the lowest loss. A checkpoint with a user tag stays until it is deleted. The script runs
a private daemon for ROOT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from ckptd import Agent, BestN, Checkpoint, EveryNSteps, LatestN, Schedule

STEPS = 260


def main(root: Path) -> None:
    # Settings of the daemon that the agent starts.
    os.environ.setdefault("CKPTD_FILES_PER_RANK", "2")
    os.environ.setdefault("CKPTD_BYTES_PER_FILE", "4G")
    agent = Agent("tiny", root=root, retention=[LatestN(2), EveryNSteps(100), BestN("loss", 1)])
    when = Schedule(every_steps=10, persist_every=2, agent=agent)

    torch.manual_seed(1)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    inputs = torch.randn(STEPS, 64, 16)
    taken = saved = 0
    for step in range(1, STEPS + 1):
        loss = nn.functional.mse_loss(
            model(inputs[step - 1]), inputs[step - 1].sum(-1, keepdim=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 140:
            optimizer.param_groups[0]["lr"] = 2.0  # from here on the loss only rises
        pending = when.snapshot(
            {"model": model, "optim": optimizer}, step=step, metrics={"loss": loss.item()}
        )
        if pending is not None:
            taken, saved = taken + 1, saved + pending.persist
            if pending.persist:
                # So that the same steps are kept each time; a real training would not
                # wait.
                pending.wait("durable")
    agent.snapshot({"model": model}, step=STEPS + 1, tag="for-evaluation").wait("durable")
    agent.close()
    print(f"{taken} snapshots, {saved} of them saved")

    for path in sorted((root / "tiny").glob("*/manifest.json")):
        with Checkpoint.open(root / "tiny", path.parent.name) as checkpoint:
            files = len(list(path.parent.glob("*.ckpt")))
            loss_then = checkpoint.metrics.get("loss")
            print(
                f"kept {path.parent.name}, in {files} files"
                + (f", loss {loss_then:.3g}" if loss_then is not None else "")
            )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
