"""Trains a small model for the operator's hour, as a process of its own: one rank of one
or two, which are saved as a user's script would be.

`python -m tests.crash.hour_trainer --job gpt --diary FILE [--rank R --world N --store
FILE]`. The diary gets a line for each recovery and for each snapshot, with a digest of
the state, so that another process can tell whether the same bits came back. SIGUSR1
makes the loss NaN from then on. SIGUSR2 ends the snapshots, and begins them again. With
`--die-at`, the process kills itself at this step.
With `--recover`, it only recovers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptd.agent import Agent, Recovered

WIDTH = 192
STEP_SECONDS = 0.25
EVERY = 4


def digest(state: dict[str, Any]) -> str:
    """Return a digest of all weights and of all tensors of the optimizer."""
    found = hashlib.sha256()
    for tensor in state["model"].state_dict().values():
        found.update(tensor.numpy().tobytes())
    for moments in state["optim"].state_dict()["state"].values():
        for tensor in moments.values():
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:12]


def build() -> dict[str, Any]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters())}


def train_step(state: dict[str, Any], factor: float) -> None:
    loss = state["model"](torch.randn(8, WIDTH)).square().mean() * factor
    loss.backward()
    if dist.is_initialized():
        for parameter in state["model"].parameters():
            dist.all_reduce(parameter.grad)
    state["optim"].step()
    state["optim"].zero_grad()


class Now:
    """The changes that signals have made: the factor of the loss, and whether it is saved."""

    def __init__(self) -> None:
        self.factor, self.saves = 1.0, True

    def spoil(self) -> None:
        self.factor = float("nan")

    def toggle(self) -> None:
        self.saves = not self.saves


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.hour_trainer")
    parser.add_argument("--job", required=True)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--store", default="")
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--recover", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    now = Now()
    signal.signal(signal.SIGUSR1, lambda *_: now.spoil())
    signal.signal(signal.SIGUSR2, lambda *_: now.toggle())
    if options.world > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.store}",
            rank=options.rank,
            world_size=options.world,
        )

    def note(*words: object) -> None:
        if options.rank == 0:
            with options.diary.open("a") as file:
                file.write(" ".join(map(str, words)) + "\n")

    agent, state = Agent(options.job), build()
    recovered = agent.recover(state)
    first = _begun(recovered, state, note)
    if options.recover:
        os._exit(0)  # it has saved nothing, so there is nothing to close
    for step in range(first, 1 << 40):
        if step == options.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(state, now.factor)
        time.sleep(STEP_SECONDS)
        if step % EVERY == EVERY - 1 and now.saves:
            note("asked", agent.attempt, step, digest(state))
            agent.snapshot(state, step=step)


def _begun(recovered: Recovered | None, state: dict[str, Any], note: Any) -> int:
    if recovered is None:
        note("began")
        return 0
    note("recovered", recovered.attempt, recovered.step, digest(state), recovered.source)
    return (recovered.step or 0) + 1


if __name__ == "__main__":
    main()
