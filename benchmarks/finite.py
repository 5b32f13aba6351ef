"""Measures what it costs to count the values that are NaN or infinite: how much longer a
snapshot holds the training, and a part takes.

`python -m benchmarks.finite [--megabytes N] [--rounds N]`. The count is turned off by
plans that name no parameters. With and without it take turns, on the same bytes, which
are those of a trained model. A storage that drops what it gets shows the most that the
count can cost; the disk shows what it costs there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import defaultdict
from dataclasses import replace
from statistics import median
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.rows import Row, keep, settled
from benchmarks.throttled import sealed_slot, written
from benchmarks.trained import trained
from ckptd.agent import Agent
from ckptd.agent.plan import kept_plan
from ckptd.daemon.chunks.pipeline import Pipeline
from ckptd.shared.codecs.codec import encoder
from ckptd.shared.formats.non_finite import Learned, count_words
from ckptd.shared.formats.plan import DEFAULT_CHUNK, Item
from tests.support.daemons import home, running

DROPPED = 1e15
"""The bytes per second of a storage that never waits."""


def rates(megabytes: int) -> list[Row]:
    """Return how fast words of each size are counted, on one thread."""
    data, rows = os.urandom(megabytes * 1_000_000), list[Row]()
    for name, width, bits in (("bf16", 2, 0x7F80), ("fp32", 4, 0x7F80_0000)):
        begun = time.perf_counter()
        count_words(data, width, bits, bits)
        seconds = time.perf_counter() - begun
        rows.append(
            Row(name=f"count {name}, one thread", value=len(data) / seconds / 1e9, unit="GB/s")
        )
    return rows


def saves(megabytes: int, rounds: int) -> list[Row]:
    """Return how much longer a part takes with the count."""
    plain = sealed_slot(megabytes)
    length, count = plain.ranges[-1].offset + plain.ranges[-1].length, 300
    size = length // count // 64 * 16
    items = [
        Item(f"model.{n}", "float32", (size,), (0,), (size,), None, n * 4 * size)
        for n in range(count)
    ]
    learned = Learned.of(
        type(plain.plan)(regions=plain.plan.regions, items=items, aliases=[], metadata=None,
                         writer={}, learned=[(0, count)])
    )  # fmt: skip
    counted, rows = replace(plain, learned=learned), list[Row]()
    pipeline = Pipeline(2, 128 << 20, DEFAULT_CHUNK)
    with home() as place:
        disk = place.path / "disk"
        disk.mkdir()
        for codec in ("raw", "planes"):
            for name, storage in (("no storage", DROPPED), ("the disk", disk)):
                times = defaultdict[bool, list[float]](list)
                for number in range(rounds + 1):
                    for slot in (plain, counted):
                        settled()
                        seconds, _ = asyncio.run(written(pipeline, slot, encoder(codec), storage))
                        for file in disk.iterdir():
                            file.unlink()
                        if number:  # the first round warms up
                            times[slot is counted].append(seconds)
                rows.append(
                    Row(
                        name=f"part with count / without, {codec}, {name}",
                        value=median(times[True]) / median(times[False]),
                        unit="x",
                        beside={"with s": median(times[True]), "without s": median(times[False])},
                    )
                )
    pipeline.close()
    return rows


def held(rounds: int) -> Row:
    """Return how much longer a snapshot holds the training with the count."""
    model = nn.Module()
    for number, (_, tensor) in enumerate(trained().weights.items()):
        model.register_parameter(f"p{number}", nn.Parameter(tensor.clone()))
    state, times = {"model": model}, defaultdict[bool, list[float]](list)
    with home() as place, running(place):
        for number in range(rounds + 1):
            for counts in (False, True):
                off = patch.object(kept_plan, "learned_names", lambda state, names: None)
                with off if not counts else patch.dict({}):
                    agent = Agent(f"job{counts}", socket=place.socket)
                    for step in range(3):
                        with torch.no_grad():
                            next(model.parameters()).add_(1)
                        pending = agent.snapshot(state, step=10 * number + step)
                        pending.wait("durable", timeout=60)
                        if number and step:  # the first ones allocate and plan
                            times[counts].append(pending.stall)
                    agent.close()
    return Row(
        name="held with count / without",
        value=median(times[True]) / median(times[False]),
        unit="x",
        limit=1.03,
        beside={"with s": median(times[True]), "without s": median(times[False])},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = rates(options.megabytes)
    rows += saves(options.megabytes, options.rounds)
    keep([*rows, held(options.rounds)], "finite")


if __name__ == "__main__":
    main()
