"""Measures how much training time a snapshot costs: its own call, and the slower steps
until it is durable.

`python -m benchmarks.steps [--rounds N]`. A model trains on the CPU, with all cores and
with all but one. Each round takes `STEPS` quiet steps, and then as many from a snapshot
on. Lost time is the time of the second half beyond so many quiet steps of the median
length.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.rows import Row, keep, settled
from ckptd.agent import Agent
from tests.support.daemons import home, running

STEPS = 4
WIDTH = 1024


class Training:
    """A model of 25 million parameters in fp32, and AdamW: 300 MB of state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(24)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(512, WIDTH)

    def step(self) -> float:
        """Take one step, and return its seconds."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begun


def lost(training: Training, save: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Return the seconds that a save costs the training, and those of a quiet step and
    of the call that saves: medians over the rounds.
    """
    found, quiet, helds = [], list[float](), list[float]()
    for number in range(rounds + 1):
        settled()
        before = [training.step() for _ in range(STEPS)]
        begun = time.perf_counter()
        save()
        held = time.perf_counter() - begun
        after = [training.step() for _ in range(STEPS)]
        if number:  # the first round warms up
            usual = median(before)
            quiet.append(usual)
            helds.append(held)
            found.append(held + sum(after) - len(after) * usual)
    return median(found), median(quiet), median(helds)


def of_ckptd(training: Training, rounds: int, *options: str) -> tuple[float, float, float]:
    """Return `lost` for snapshots by a daemon with these options."""
    with home() as place, running(place, "--keep-last", "1", *options):
        agent, state, numbers = (
            Agent("bench", socket=place.socket),
            {"m": training.model, "o": training.optimizer},
            iter(range(1 << 30)),
        )
        agent.prepare(state)
        found = lost(training, lambda: agent.snapshot(state, step=next(numbers)), rounds)
        agent.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="0", help="threads of the daemon")
    options = parser.parse_args()
    cores, rows = os.cpu_count() or 1, []
    for used in dict.fromkeys((cores, max(1, cores - 1))):
        torch.set_num_threads(used)
        training = Training()
        noise, *_ = lost(training, lambda: None, options.rounds)
        for codec in ("raw", "auto"):
            seconds, step, held = of_ckptd(
                training, options.rounds, "--codec", codec, "--threads", options.threads
            )
            rows.append(Row(
                name=f"lost step time, {codec}, {used} of {cores} cores "
                    f"train", value=seconds / step, unit="steps",
                limit=0.05 if used < cores else None,
                beside={
                    "ms "
                    "lost": 1000 * seconds, "ms "
                        "held": 1000 * held, "ms a "
                            "step": 1000 * step, "ms lost without a save": 1000 * noise,
                },
            ))  # fmt: skip
    keep(rows, "steps")


if __name__ == "__main__":
    main()
