"""All rigs, one table: `python -m tests.crash.trust --minutes 20 [--seed N]`, or `make trust MINUTES=20`; `--short` is what CI runs.

Each kind prints how much was tried, how much of it was lost, and its seed. The last line adds them up; the exit code says whether it is 0.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context

import torch

from tests.crash import calls, damage, guards, machine, power, states

LANES = 2
FOREVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Row:
    """`unit`: what was counted; `absent`: why it could not be tried here."""

    kind: str
    unit: str
    tried: int
    problems: list[str]
    seed: int | None = None
    seconds: float = 0.0
    absent: str = ""


def _simulated(count: int, seconds: float, seed: int) -> Row:
    return Row("simulated disk", "states", *states.run(count, seed, seconds), seed)


def _power(count: int, seconds: float, seed: int) -> Row:
    hit, problems = power.run(count, seed, seconds)
    return Row("power cuts of ext4", f"cuts at {len(hit)} points", hit.total(), problems, seed)


def _calls(count: int, seconds: float, seed: int) -> Row:
    ends, problems = calls.run(count, seed, seconds, calls.ALL if count == FOREVER else calls.DURABLE)
    kills = sum(number for (fault, how), number in ends.items() if "SIGKILL" in fault and how == "died")
    return Row("n-th system call", f"faults, {kills} SIGKILLs", ends.total(), problems, seed)


def _machine(count: int, seconds: float, seed: int) -> Row:
    end, tried, problem = time.monotonic() + seconds, 0, ""
    while tried < count and time.monotonic() < end and not problem:
        taken, problem = machine.run(min(400, count - tried), seed + tried)
        tried += taken.total()
    return Row("state machine", "steps", tried, [problem] if problem else [], seed)


def _journal(count: int, seconds: float, seed: int) -> Row:
    found = [damage.journal_bits(count), damage.journal_lengths(count)]
    return Row("journal, every bit and length", f"of {count:,d} bytes", *_sum(found))


def _checkpoint(count: int, seconds: float, seed: int) -> Row:
    with damage.checkpoint() as tag:
        found = [damage.manifest_bits(tag), damage.part_bits(tag, count, seed)]
    return Row("checkpoint, bits and lengths", "damaged files", *_sum(found), seed)


def _sum(found: list[damage.Found]) -> damage.Found:
    return sum(count for count, _ in found), [problem for _, problems in found for problem in problems]


def _guards(count: int, seconds: float, seed: int) -> Row:
    return Row("guards taken out", "mutants", *guards.run(jobs=1, part=(seed % LANES, LANES)))


Rig = Callable[[int, float, int], Row]
"""Tries so many, or for so many seconds, whichever is over first."""


def tasks(minutes: float | None, seed: int) -> list[tuple[Rig, int, float, int]]:
    """What to run, the longest first."""
    if minutes is None:
        counted: list[tuple[Rig, int]] = [
            (_machine, 2000), (_guards, 0), (_guards, 0), (_simulated, 10_000), (_simulated, 10_000), (_calls, 66), (_power, 60),
            (_journal, 4096), (_checkpoint, 4000),
        ]  # fmt: skip
        return [(rig, count, float("inf"), seed + number) for number, (rig, count) in enumerate(counted)]
    share = max(0.0, 60 * minutes - 300) * LANES / 6  # the rest takes five minutes of both lanes
    timed: list[Rig] = [_simulated, _simulated, _power, _calls, _machine, _machine]
    fixed: list[tuple[Rig, int]] = [(_guards, 0), (_guards, 0), (_journal, 4096 if minutes < 60 else 65_536), (_checkpoint, 20_000)]
    return [(rig, FOREVER, share, seed + number) for number, rig in enumerate(timed)] + [
        (rig, count, float("inf"), seed + number) for number, (rig, count) in enumerate(fixed)
    ]


def _try(rig: Rig, count: int, seconds: float, seed: int) -> Row:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    try:
        row = rig(count, seconds, seed)
    except (power.Unavailable, calls.Unavailable) as error:
        row = Row(rig.__name__.strip("_"), "", 0, [], seed, absent=str(error))
    return Row(row.kind, row.unit, row.tried, row.problems, row.seed, time.monotonic() - begun, row.absent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--minutes", type=float)
    group.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    options = parser.parse_args()
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {LANES} at once", flush=True)
    print(f"{'kind':32}{'tried':>10}{'lost':>6}{'seed':>12}{'seconds':>9}  what", flush=True)
    tried = lost = 0
    with ProcessPoolExecutor(LANES, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(_try, *task) for task in tasks(options.minutes, options.seed)]:
            row = future.result()
            seed = "" if row.seed is None else str(row.seed)
            what = f"not tried: {row.absent}" if row.absent else row.unit
            print(f"{row.kind:32}{row.tried:10,d}{len(row.problems):6}{seed:>12}{row.seconds:9.0f}  {what}", flush=True)
            for problem in row.problems:
                print(f"  {problem}")
            tried, lost = tried + row.tried, lost + len(row.problems)
    print(f"{tried:,d} tried, {lost} lost")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
