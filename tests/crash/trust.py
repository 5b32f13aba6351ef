"""Runs every rig that looks for lost checkpoints, and prints one table: `python -m
tests.crash.trust --minutes 20 [--seed N]`.

`make trust MINUTES=20` does the same. With `--minutes`, every rig gets its share of the
time, however short that is. `--long` is the amount by which a release is measured
(hours). Each task that ends prints a line: how much was tried, how much was lost, and
its seed. Then comes the table by kind, and a last line with the sums. The exit code is
1 if something was lost, and also if a rig tried nothing although this machine has what
it needs. A rig that saw no chain of deltas, although it looks for what happens to them,
is named, and the exit code is 1 if no rig saw any. When interrupted, it prints the table
of the tasks that have ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from random import Random
from typing import Any

import torch

from ckptd.shared.system import failpoints
from tests.crash import (
    calls,
    chains,
    comebacks,
    crowd,
    damage,
    gate,
    guards,
    hostile,
    hung,
    images,
    interrupts,
    limits,
    lives,
    machine,
    nodes,
    nonsense,
    notifications,
    peers,
    places,
    power,
    properties,
    reads,
    rollbacks,
    segments,
    starts,
    states,
    store_faults,
    users,
)  # fmt: skip
from tests.oracle import runner as oracle
from tests.support import interleavings, node_model, store_model
from tests.support.seen_chains import CHAINS

LANES = 2
FOREVER = 1 << 40
"""The count of a rig that is limited by its time alone."""
ROUND = len((*failpoints.AGENT, *failpoints.DAEMON)) ** 2 + 1
"""Number of deaths in which every failpoint comes after every other failpoint."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a rig has tried.

    hit: the names of the different things that were hit. kills: the number of SIGKILLs
    among the tries. chains: the number of checkpoints with chains of deltas that were
    there, or None if the rig has nothing to do with them. absent: the reason why the rig
    could not run.
    """

    kind: str
    unit: str
    tried: int
    problems: list[str]
    seeds: tuple[int, ...] = ()
    seconds: float = 0.0
    hit: dict[str, frozenset[Any]] = field(default_factory=dict)
    kills: int = 0
    chains: int | None = None
    absent: str = ""

    def __add__(self, other: Row) -> Row:
        return replace(
            self,
            tried=self.tried + other.tried,
            problems=self.problems + other.problems,
            seeds=self.seeds + other.seeds,
            seconds=self.seconds + other.seconds,
            hit={
                name: self.hit.get(name, frozenset()) | other.hit.get(name, frozenset())
                for name in {**self.hit, **other.hit}
            },
            kills=self.kills + other.kills,
            chains=None
            if self.chains is None and other.chains is None
            else (self.chains or 0) + (other.chains or 0),
            absent=self.absent and other.absent,
            unit=self.unit or other.unit,
        )

    def __str__(self) -> str:
        if self.absent:
            return f"{self.kind:30}{'-':>11}{'-':>6}{'-':>9}{'-':>12}  not tried: {self.absent}"
        seeds = (
            "-"
            if not self.seeds
            else str(self.seeds[0])
            if len(self.seeds) == 1
            else f"{min(self.seeds)}-{max(self.seeds)}"
        )
        what = ", ".join(
            [self.unit, *(f"{len(things)} {name}" for name, things in self.hit.items())]
        )
        what += f", {self.kills:,d} SIGKILLs" if self.kills else ""
        what += f", {self.chains:,d} with chains" if self.chains is not None else ""
        return (
            f"{self.kind:30}{self.tried:11,d}{len(self.problems):6}{self.seconds:9.0f}{seeds:>12}  "
            f"{what}"
        )


HEAD = f"{'kind':30}{'tried':>11}{'lost':>6}{'seconds':>9}{'seeds':>12}  what"


def _simulated(count: int, seconds: float, seed: int) -> Row:
    tried, problems, chains = states.run(count, seed, seconds)
    return Row("simulated disk", "states", tried, problems, chains=chains)


def _lives(count: int, seconds: float, seed: int, store: str | None = None) -> Row:
    done = lives.run(count, seed, seconds, places.where(store))
    hit = {"points": frozenset(done.hit) - {lives.ANY}, "pairs of them": frozenset(done.pairs)}
    kind = "deaths at failpoints" + (f", {store}" if store else "")
    deaths = done.hit.total()
    return Row(
        kind, "lives", deaths, done.problems, hit=hit, kills=deaths, chains=len(done.chained)
    )


def _power(count: int, seconds: float, seed: int) -> Row:
    done = power.run(count, seed, seconds)
    return Row(
        "power cuts of ext4",
        "cuts",
        done.hit.total(),
        done.problems,
        hit={"points": frozenset(done.hit) - {lives.ANY}},
        chains=len(done.chained),
    )


def _calls(count: int, seconds: float, seed: int) -> Row:
    ends, problems = calls.run(count, seed, seconds, calls.ALL if count > 66 else calls.DURABLE)
    kills = sum(
        number for (fault, how), number in ends.items() if "SIGKILL" in fault and how == "died"
    )
    return Row("n-th system call", "faults", ends.total(), problems, kills=kills)


def _gate(count: int, seconds: float, seed: int) -> Row:
    ends, problems = gate.run(count, seed, seconds)
    return Row(
        "disk that loses pages",
        f"snapshots, {ends.total() - ends['durable']} of them failed",
        ends.total(),
        problems,
    )


def _segments(count: int, seconds: float, seed: int) -> Row:
    kinds, problems = segments.run(count, seed, seconds)
    return Row("segments damaged", "damages", kinds.total(), problems)


def _machine(count: int, seconds: float, seed: int) -> Row:
    end, taken, problem, chance = time.monotonic() + seconds, Counter[str](), "", Random(seed)
    chains = steps = 0
    while steps < count and (left := end - time.monotonic()) > 0 and not problem:
        lives_of_100 = 400 if left > 60 else 200
        more, problem = machine.run(min(lives_of_100, count - steps), chance.getrandbits(32))
        chains += more.pop(CHAINS, 0)
        steps, taken = steps + more.total(), taken + more
    return Row(
        "state machine",
        "steps",
        steps,
        [problem] if problem else [],
        kills=taken["kill daemon"] + taken["kill trainer"],
        chains=chains,
    )


def _journal(count: int, seconds: float, seed: int) -> Row:
    """Try a journal of `count` bytes or, within `seconds`, larger and larger ones.

    A journal of twice the size takes four times as long.
    """
    found, size, end = (
        list[damage.Tally](),
        count if count < FOREVER else 256,
        time.monotonic() + seconds,
    )
    while True:
        begun = time.monotonic()
        found += [damage.journal_bits(size), damage.journal_lengths(size)]
        took = time.monotonic() - begun
        if count < FOREVER or time.monotonic() + 4 * took > end:
            return Row("journal, every bit and length", f"of {size:,d} bytes", *_sum(found))
        size *= 2


def _checkpoint(count: int, seconds: float, seed: int) -> Row:
    chance, end = Random(seed), time.monotonic() + seconds
    with damage.checkpoint() as tag:
        found, left = [damage.manifest_bits(tag)], count
        while left > 0 and (left == count or time.monotonic() < end):
            found.append(damage.part_bits(tag, min(200, left), chance.getrandbits(32)))
            left -= min(200, left)
    return Row("checkpoint, bits and lengths", "damaged files", *_sum(found))


def _sum(found: list[damage.Tally]) -> damage.Tally:
    return sum(count for count, _ in found), [
        problem for _, problems in found for problem in problems
    ]


def _guards(count: int, seconds: float, seed: int) -> Row:
    return Row(
        "guards taken out",
        "mutants",
        *guards.run(jobs=1, part=(seed % LANES, LANES), seconds=seconds, seed=seed),
    )


Counted = Callable[[int, int, float], tuple[Counter[str], list[str]]]
"""`run(count, number, seconds)` of a rig's module. It returns what was tried, by name,
and what was lost. `number` is the seed.

Names that begin with a space count the outcomes of tries, `CHAINS` that of checkpoints
with chains of deltas, for a rig that should see some. Names that begin with "not
tried" tell what this machine lacks.
"""


@dataclass(frozen=True, slots=True)
class Alike:
    """A rig whose module has a `run` with the signature of `Counted`.

    It needs no function of its own here.
    """

    kind: str
    unit: str
    run: Counted

    def __call__(self, count: int, seconds: float, seed: int) -> Row:
        tried, problems = self.run(count, seed, seconds)
        return Row(
            self.kind,
            self.unit,
            sum(n for name, n in tried.items() if not name.startswith((" ", "not tried"))),
            problems,
            chains=tried.get(CHAINS),
        )


@dataclass(frozen=True, slots=True)
class Rig:
    """`run` tries a given number of things, or as many as fit into a given time,
    whichever ends first.

    `long` has a count for each task; 0 stands for a rig that ends by itself. `shares`
    is the number of tasks when minutes are given.
    """

    run: Callable[[int, float, int], Row]
    long: tuple[int, ...]
    shares: int = 1


RIGS: dict[str, Rig] = {
    "guards": Rig(_guards, (0, 0), shares=2),
    "machine": Rig(_machine, 10 * (10_000,), shares=2),
    "simulated": Rig(_simulated, 50 * (20_000,), shares=2),
    "calls": Rig(_calls, (330,)),
    "lives": Rig(_lives, (*3 * (ROUND,), max(0, 10_000 - 3 * ROUND))),
    "lives-seaweed": Rig(partial(_lives, store="seaweed"), (500,)),
    "lives-memory": Rig(partial(_lives, store="memory"), (500,)),
    "power": Rig(_power, 4 * (500,)),
    "gate": Rig(_gate, (100,)),
    "segments": Rig(_segments, (1000,)),
    "journal": Rig(_journal, (65_536,)),
    "checkpoint": Rig(_checkpoint, (100_000,)),
    # A new rig with the same signature needs only a line here and the import above.
    "chains": Rig(Alike("chains of deltas", "saves and damages", chains.run), (300,)),
    "chains-seaweed": Rig(
        Alike(
            "chains of deltas, seaweed",
            "saves and damages",
            partial(chains.run, where=places.where("seaweed")),
        ),
        (100,),
    ),
    "crowd": Rig(Alike("trainers killed in a crowd", "SIGKILLs of trainers", crowd.run), (2000,)),
    "interrupts": Rig(
        Alike("interruptions of the agent", "interruptions", interrupts.run), (5000,)
    ),
    "users": Rig(Alike("another user of the node", "tries", users.run), (500,)),
    "limits": Rig(Alike("shortages", "tries", limits.run), (300,)),
    "nodes": Rig(
        Alike("nodes, daemons and ranks killed", "lives of a job on 3 nodes", nodes.run),
        (1000, 1000, 1000, 1000, 1000),
        shares=10,
    ),
    "store": Rig(
        Alike(
            "nodes that share an object store",
            "lives of a job on 3 nodes",
            partial(nodes.run, where=nodes.in_store),
        ),
        (200,),
    ),
    "peers": Rig(
        Alike("nodes lost, with copies on others", "lives of a job on 3 or 4 nodes", peers.run),
        (500, 500),
        shares=5,
    ),
    "peers-seaweed": Rig(
        Alike(
            "the same, in an object store",
            "lives of a job on 3 or 4 nodes",
            partial(peers.run, where=nodes.in_store),
        ),
        (100,),
    ),
    "faults": Rig(Alike("faults of an object store", "pairs", store_faults.run), (2000,)),
    "reads": Rig(Alike("memory that cannot be read", "daemons", reads.run), (500,)),
    "comebacks": Rig(
        Alike("daemons that come back with less", "daemons", comebacks.run), (480,), shares=2
    ),
    "rollbacks": Rig(Alike("rollbacks and callbacks", "calls", rollbacks.run), (1000,)),
    "nonsense": Rig(Alike("seals of nonsense", "seals", nonsense.run), (20_000,)),
    "notifications": Rig(
        Alike("reports to targets that misbehave", "rounds", notifications.run), (430,)
    ),
    "hostile": Rig(Alike("hostile files", "checkpoints", hostile.run), (5000,)),
    "hung": Rig(Alike("disk that hangs", "hangs", hung.run), (100,)),
    "starts": Rig(Alike("start on a disk that hangs", "starts", starts.run), (300,)),
    "oracle": Rig(
        Alike("recoveries against torch's own", "pairs of programs", oracle.run),
        (25_000, 25_000),
        shares=8,
    ),
    "oracle-ranks": Rig(
        Alike("recoveries on two ranks", "pairs of programs", oracle.run_spread), (2000,)
    ),
    "properties": Rig(Alike("properties, with fresh seeds", "properties", properties.run), (2000,)),
    "model-engine": Rig(
        Alike("orders of events in the engine", "lives", interleavings.run), (20_000,)
    ),
    "model-nodes": Rig(
        Alike("model of several nodes", "states and events", node_model.run), (10_000_000,)
    ),
    "model-store": Rig(
        Alike("model of a shared storage", "lives of a job", store_model.run), (20_000,)
    ),
}
"""The rigs, by the name that `--only` takes. The two tasks of `guards` come first: they
take halves by the parity of their seeds.
"""

Task = tuple[str, int, float, int]
"""The name of a rig, how many to try, for how many seconds, and the seed."""


def tasks(minutes: float | None, seed: int, only: Collection[str] = ()) -> list[Task]:
    """Return the tasks of all rigs, or of those in `only`.

    The time of all lanes is divided evenly. Without minutes, each rig has its long
    counts, and no limit.
    """
    chosen = {name: rig for name, rig in RIGS.items() if not only or name in only}
    counts = {
        name: rig.long if minutes is None else rig.shares * (FOREVER,)
        for name, rig in chosen.items()
    }
    seconds = (
        float("inf") if minutes is None else 60 * minutes * LANES / sum(map(len, counts.values()))
    )
    flat = [(name, count) for name, of_rig in counts.items() for count in of_rig]
    return [(name, count, seconds, seed + number) for number, (name, count) in enumerate(flat)]


def verdict(rows: Mapping[str, Row], expected: Collection[str]) -> tuple[list[str], int]:
    """Return the last lines and the exit code.

    `rows` has the sum of each rig that has ended; `expected` names all rigs that should
    have ended.
    """
    lost = sum(len(row.problems) for row in rows.values())
    idle = [
        name
        for name in expected
        if name not in rows or (not rows[name].tried and not rows[name].absent)
    ]
    bare = [name for name, row in rows.items() if row.tried and row.chains == 0]
    lines = [
        f"tried {nothing}: {', '.join(those)}; nothing is known of what they look for: give them "
        f"more time"
        for nothing, those in (("nothing", idle), ("no chain of deltas", bare))
        if those
    ]
    lines.append(f"{sum(row.tried for row in rows.values()):,d} tried, {lost} lost")
    without_chains = bool(bare) and not any(row.chains for row in rows.values())
    return lines, int(bool(lost or idle or without_chains))


def _try(name: str, count: int, seconds: float, seed: int) -> Row:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    try:
        row = RIGS[name].run(count, seconds, seed)
    except (images.Unavailable, calls.Unavailable) as error:
        row = Row(name, "", 0, [], absent=str(error))
    except Exception:
        row = Row(name, "ended by an error", 0, [traceback.format_exc()])
    return replace(
        row, seconds=time.monotonic() - begun, seeds=() if name == "journal" else (seed,)
    )


def _print(row: Row) -> None:
    print(row, *row.problems, sep="\n  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--minutes", type=float)
    group.add_argument("--long", action="store_true")
    parser.add_argument("--only", nargs="+", choices=sorted(RIGS), help="of its rigs")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "little"))
    options = parser.parse_args()
    chosen = tasks(options.minutes, options.seed, options.only or ())
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {LANES} at once", HEAD, sep="\n", flush=True)
    rows: dict[str, Row] = {}
    with ProcessPoolExecutor(LANES, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_try, *task): task[0] for task in chosen}
        try:
            for future in as_completed(futures):
                name, row = futures[future], future.result()
                _print(row)
                rows[name] = rows[name] + row if name in rows else row
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print("interrupted")
    print("", HEAD, *sorted(map(str, rows.values())), sep="\n")
    lines, code = verdict(rows, dict.fromkeys(name for name, *_ in chosen))
    print(*lines, sep="\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
