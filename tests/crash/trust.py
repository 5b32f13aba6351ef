"""All rigs, one table: `python -m tests.crash.trust --minutes 20 [--seed N]`, or `make trust MINUTES=20`.

`--short` is what CI runs, `--long` the counts that a release is measured by (hours). Every task that ends prints a line: how much was
tried, how much of it was lost, its seed. Then comes the table by kind, and a last line that adds it up; the exit code says whether nothing
was lost. Interrupted, it prints the table of what has ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from random import Random
from typing import Any

import torch

from ckptd.shared import failpoints
from tests.crash import calls, damage, gate, guards, images, lives, machine, power, segments, states

LANES = 2
FOREVER = 1 << 40
ROUND = len((*failpoints.AGENT, *failpoints.DAEMON)) ** 2 + 1
"""Lives in which every failpoint has been deadly after every other."""


@dataclass(frozen=True, slots=True)
class Row:
    """`hit`: the different things that were, with their name; `kills`: SIGKILLs among what was tried; `absent`: why it could not be."""

    kind: str
    unit: str
    tried: int
    problems: list[str]
    seeds: tuple[int, ...] = ()
    seconds: float = 0.0
    hit: dict[str, frozenset[Any]] = field(default_factory=dict)
    kills: int = 0
    absent: str = ""

    def __add__(self, other: Row) -> Row:
        return replace(
            self,
            tried=self.tried + other.tried,
            problems=self.problems + other.problems,
            seeds=self.seeds + other.seeds,
            seconds=self.seconds + other.seconds,
            hit={name: self.hit.get(name, frozenset()) | other.hit.get(name, frozenset()) for name in {**self.hit, **other.hit}},
            kills=self.kills + other.kills,
        )

    def __str__(self) -> str:
        if self.absent:
            return f"{self.kind:30}{'-':>11}{'-':>6}{'-':>9}{'-':>12}  not tried: {self.absent}"
        seeds = "-" if not self.seeds else str(self.seeds[0]) if len(self.seeds) == 1 else f"{min(self.seeds)}-{max(self.seeds)}"
        what = ", ".join([self.unit, *(f"{len(things)} {name}" for name, things in self.hit.items())])
        what += f", {self.kills:,d} SIGKILLs" if self.kills else ""
        return f"{self.kind:30}{self.tried:11,d}{len(self.problems):6}{self.seconds:9.0f}{seeds:>12}  {what}"


HEAD = f"{'kind':30}{'tried':>11}{'lost':>6}{'seconds':>9}{'seeds':>12}  what"


def _simulated(count: int, seconds: float, seed: int) -> Row:
    return Row("simulated disk", "states", *states.run(count, seed, seconds))


def _lives(count: int, seconds: float, seed: int) -> Row:
    done = lives.run(count, seed, seconds)
    hit = {"points": frozenset(done.hit) - {lives.ANY}, "pairs of them": frozenset(done.pairs)}
    return Row("deaths at failpoints", "lives", done.hit.total(), done.problems, hit=hit, kills=done.hit.total())


def _power(count: int, seconds: float, seed: int) -> Row:
    done = power.run(count, seed, seconds)
    return Row("power cuts of ext4", "cuts", done.hit.total(), done.problems, hit={"points": frozenset(done.hit) - {lives.ANY}})


def _calls(count: int, seconds: float, seed: int) -> Row:
    ends, problems = calls.run(count, seed, seconds, calls.ALL if count > 66 else calls.DURABLE)
    kills = sum(number for (fault, how), number in ends.items() if "SIGKILL" in fault and how == "died")
    return Row("n-th system call", "faults", ends.total(), problems, kills=kills)


def _gate(count: int, seconds: float, seed: int) -> Row:
    ends, problems = gate.run(count, seed, seconds)
    return Row("disk that loses pages", f"snapshots, {ends.total() - ends['durable']} of them failed", ends.total(), problems)


def _segments(count: int, seconds: float, seed: int) -> Row:
    kinds, problems = segments.run(count, seed, seconds)
    return Row("segments damaged", "damages", kinds.total(), problems)


def _machine(count: int, seconds: float, seed: int) -> Row:
    end, taken, problem, chance = time.monotonic() + seconds, Counter[str](), "", Random(seed)
    while taken.total() < count and time.monotonic() < end and not problem:
        more, problem = machine.run(min(400, count - taken.total()), chance.getrandbits(32))
        taken += more
    return Row("state machine", "steps", taken.total(), [problem] if problem else [], kills=taken["kill daemon"] + taken["kill trainer"])


def _journal(count: int, seconds: float, seed: int) -> Row:
    found = [damage.journal_bits(count), damage.journal_lengths(count)]
    return Row("journal, every bit and length", f"of {count:,d} bytes", *_sum(found))


def _checkpoint(count: int, seconds: float, seed: int) -> Row:
    with damage.checkpoint() as tag:
        found = [damage.manifest_bits(tag), damage.part_bits(tag, count, seed)]
    return Row("checkpoint, bits and lengths", "damaged files", *_sum(found))


def _sum(found: list[damage.Found]) -> damage.Found:
    return sum(count for count, _ in found), [problem for _, problems in found for problem in problems]


def _guards(count: int, seconds: float, seed: int) -> Row:
    return Row("guards taken out", "mutants", *guards.run(jobs=1, part=(seed % LANES, LANES)))


Rig = Callable[[int, float, int], Row]
"""Tries so many, or for so many seconds, whichever is over first."""

SHORT: list[tuple[Rig, int]] = [
    (_guards, 0), (_guards, 0), (_machine, 2000), (_simulated, 10_000), (_simulated, 10_000), (_calls, 66), (_lives, 200), (_power, 60),
    (_gate, 6), (_segments, 60),
    (_journal, 4096), (_checkpoint, 4000),
]  # fmt: skip
LONG: list[tuple[Rig, int]] = [
    (_guards, 0), (_guards, 0), (_journal, 65_536), (_checkpoint, 100_000), (_calls, 330), (_gate, 100), (_segments, 1000),
    *4 * [(_power, 500)], *3 * [(_lives, ROUND)], (_lives, max(0, 10_000 - 3 * ROUND)), *10 * [(_machine, 10_000)],
    *50 * [(_simulated, 20_000)],
]  # fmt: skip
TIMED: list[tuple[Rig, int]] = [
    (_simulated, FOREVER), (_simulated, FOREVER), (_machine, FOREVER), (_machine, FOREVER), (_lives, FOREVER), (_calls, FOREVER),
    (_power, FOREVER),
]  # fmt: skip
UNTIMED: list[tuple[Rig, int]] = [(_guards, 0), (_guards, 0), (_journal, 4096), (_checkpoint, 20_000), (_gate, 20), (_segments, 200)]
UNTIMED_SECONDS = 360


def tasks(minutes: float | None, counts: list[tuple[Rig, int]], seed: int) -> list[tuple[Rig, int, float, int]]:
    """What to run: `counts`, or what fits into so many minutes."""
    seconds = float("inf")
    if minutes is not None:
        counts, seconds = [*TIMED, *UNTIMED], max(0.0, 60 * minutes - UNTIMED_SECONDS) * LANES / len(TIMED)
    return [(rig, count, seconds if count == FOREVER else float("inf"), seed + number) for number, (rig, count) in enumerate(counts)]


def _try(rig: Rig, count: int, seconds: float, seed: int) -> Row:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    try:
        row = rig(count, seconds, seed)
    except (images.Unavailable, calls.Unavailable) as error:
        row = Row(rig.__name__.strip("_"), "", 0, [], absent=str(error))
    except Exception:
        row = Row(rig.__name__.strip("_"), "ended by an error", 0, [traceback.format_exc()])
    return replace(row, seconds=time.monotonic() - begun, seeds=() if rig in (_guards, _journal) else (seed,))


def _print(row: Row) -> None:
    print(row, *row.problems, sep="\n  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--minutes", type=float)
    group.add_argument("--short", action="store_true")
    group.add_argument("--long", action="store_true")
    parser.add_argument("--only", nargs="+", choices=sorted({rig.__name__.strip("_") for rig, _ in LONG}), help="of its rigs")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "little"))
    options = parser.parse_args()
    chosen = tasks(options.minutes, LONG if options.long else SHORT, options.seed)
    chosen = [task for task in chosen if not options.only or task[0].__name__.strip("_") in options.only]
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {LANES} at once", HEAD, sep="\n", flush=True)
    kinds: dict[str, Row] = {}
    with ProcessPoolExecutor(LANES, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_try, *task) for task in chosen]
        try:
            for future in as_completed(futures):
                row = future.result()
                _print(row)
                kinds[row.kind] = kinds[row.kind] + row if row.kind in kinds else row
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print("interrupted")
    lost = sum(len(row.problems) for row in kinds.values())
    print("", HEAD, *sorted(map(str, kinds.values())), sep="\n")
    print(f"{sum(row.tried for row in kinds.values()):,d} tried, {lost} lost")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
