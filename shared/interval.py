"""Computes how often a training should be saved, and where to: to memory, and every n-th
time to storage.

The arithmetic is explained in docs/how-to/how-often.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ckptd.shared.units import count_text, ordinal, short_span_text

_LEAST_COST, _MOST_MTBF = 1e-6, 1e15
"""Bounds in seconds that keep every interval finite and above 0."""
_FEWEST_STEPS = 2
"""The fewest steps between two snapshots: the cost of a snapshot is measured by the
steps that no snapshot disturbs.
"""


def best_interval(cost: float, mtbf: float) -> float:
    """Return the seconds of training between two saves that lose the least time to
    saves and failures.

    `cost` is the time in seconds for which a save holds the training, and `mtbf` the
    mean seconds between two failures. The formula is equation 37 of J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22
    (2006). Its first term is J. W. Young's of 1974.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


@dataclass(frozen=True, slots=True)
class SaveLevel:
    """A place that snapshots go to, and the failures that need it. All times are in
    seconds.

    cost: the training time that a snapshot loses by going there, in addition to what it
    loses at the levels before. mtbf: the mean time between two failures after which
    this level has a snapshot and the levels before have none. durable: the time until a
    snapshot has arrived there; the next one does not start earlier. restore: the time
    that a recovery from there takes.
    """

    name: str
    cost: float
    mtbf: float = math.inf
    durable: float = 0.0
    restore: float = 0.0


@dataclass(frozen=True, slots=True)
class Intervals:
    """The chosen intervals: how often snapshots go to each level.

    levels: the first one gets every snapshot. interval: the seconds between two
    snapshots. every: one number for each level, which gets each n-th snapshot. Each
    number is a multiple of the one before, and the first is 1. step: the seconds that a
    step of the training takes, or 0.0 if that is not known.

    The text of a choice says it in words.
    """

    levels: tuple[SaveLevel, ...]
    interval: float
    every: tuple[int, ...]
    step: float = 0.0

    @property
    def intervals(self) -> tuple[float, ...]:
        """The seconds between two snapshots at each level."""
        return tuple(self.interval * every for every in self.every)

    @property
    def steps(self) -> tuple[int, ...] | None:
        """The steps between two snapshots at each level, or None if the time of a step
        is not known.
        """
        if not self.step:
            return None
        steps = max(1, round(self.interval / self.step))
        return tuple(steps * every for every in self.every)

    @property
    def lost_to_saves(self) -> tuple[float, ...]:
        """The time lost to the snapshots of each level, as a share of the training time."""
        pairs = zip(self.levels, self.intervals, strict=True)
        return tuple(level.cost / interval for level, interval in pairs)

    @property
    def lost_to_failures(self) -> tuple[float, ...]:
        """The time lost to the failures of each level, as a share of the training time.

        A failure loses half an interval on average, what was trained until the newest
        snapshot had arrived, and the time of the recovery. N. H. Vaidya, "Impact of
        checkpoint latency on overhead ratio of a checkpointing scheme", IEEE
        Transactions on Computers 46 (1997), shows that the time until a snapshot has
        arrived does not change the best interval.
        """
        pairs = zip(self.levels, self.intervals, strict=True)
        return tuple(
            (interval / 2 + level.durable + level.restore) / level.mtbf for level, interval in pairs
        )

    @property
    def lost(self) -> float:
        """The time that is lost in all, as a share of the training time."""
        return sum(self.lost_to_saves) + sum(self.lost_to_failures)

    @property
    def needs_third_slot(self) -> bool:
        """True if two snapshots to the first level are due while one is on its way to a
        later level.

        A rank with two slots can take one of them: the snapshot that is on its way has
        the other slot.
        """
        return any(level.durable > 2 * self.interval for level in self.levels[1:])

    def scaled(self, factor: float) -> Intervals:
        """Return the choice with other intervals, but none that is shorter than the time
        until a snapshot has arrived.
        """
        interval = max(self.interval * factor, self.levels[0].durable)
        least = (math.ceil(level.durable / interval - 1e-9) for level in self.levels)
        every = (max(pair) for pair in zip(self.every, least, strict=True))
        # Each number stays a multiple of the one before.
        rounded = accumulate(every, lambda before, number: -(-number // before) * before)
        return Intervals(self.levels, interval, tuple(rounded), self.step)

    @property
    def interval_texts(self) -> tuple[str, ...]:
        """The intervals in words, with their steps if these are known."""
        spans = [short_span_text(interval) for interval in self.intervals]
        if self.steps is None:
            return tuple(spans)
        counts = (count_text(steps, "step") for steps in self.steps)
        return tuple(f"{span} ({count})" for span, count in zip(spans, counts, strict=True))

    def __str__(self) -> str:
        spans = self.interval_texts
        first, *others = self.levels
        told = [f"a snapshot to {first.name} every {spans[0]}"]
        for level, number, span in zip(others, self.every[1:], spans[1:], strict=True):
            if number == 1:
                told.append(f"each of them to {level.name}")
            else:
                told.append(f"each {ordinal(number)} to {level.name}, every {span}")
        return "; ".join(told)


def choose(
    levels: Sequence[SaveLevel],
    *,
    step: float = 0.0,
    least: float = 0.0,
    every: Sequence[int] | None = None,
) -> Intervals:
    """Return how often to snapshot to each level, so that the least time is lost to
    saves and failures.

    levels: from the cheapest, which survives the fewest failures, to the dearest.
    step: the seconds that a step takes, or 0.0 if that is not known; no interval is
    shorter than two steps. least: the shortest interval that is possible, in seconds.
    every: the numbers of `Intervals.every`, if they are given; only the interval is chosen
    then.

    The time that is lost is the sum of what each level alone would lose. To first order
    each level therefore has the interval of Young and Daly for its own cost and its own
    failures, as A. Benoit, A. Cavelan, V. Le Fevre, Y. Robert and H. Sun show in
    "Towards optimal multi-level checkpointing", IEEE Transactions on Computers 66
    (2017): their least loss is the sum of sqrt(2 cost / mtbf) over the levels. SCR (A.
    Moody et al., SC 2010) and FTI (L. Bautista-Gomez et al., SC 2011) save to levels of
    this kind. Whole numbers are found by trying the two next to each ratio, because the
    loss is convex in the logarithms of the intervals.
    """
    least = max(least, _FEWEST_STEPS * step)
    tried = [tuple(every)] if every is not None else _near(_ideals(levels, least))
    found = (Intervals(tuple(levels), _interval(levels, one, least), one, step) for one in tried)
    return min(found, key=lambda choice: (choice.lost, choice.every))


def _ideals(levels: Sequence[SaveLevel], least: float) -> list[float]:
    """Return the best interval of each level, as if it need not be a multiple of the
    one before, but at least as long.

    A level whose best interval is shorter than that of the level before gets every
    snapshot of that level. Both then have one interval, for the sum of their costs and
    of their failures (pool adjacent violators).
    """
    pools: list[tuple[float, list[SaveLevel]]] = []
    for level in levels:
        pool = [level]
        ideal = _interval(pool, (1,), least)
        while pools and ideal < pools[-1][0]:
            pool = pools.pop()[1] + pool
            ideal = _interval(pool, (1,) * len(pool), least)
        pools.append((ideal, pool))
    return [ideal for ideal, pool in pools for _ in pool]


def _interval(levels: Sequence[SaveLevel], every: Sequence[int], least: float) -> float:
    """Return the best interval of the first level, if each level gets every n-th
    snapshot.

    A snapshot then costs c1 + c2/n2 + ... on average, and half of the interval is lost
    1/m1 + n2/m2 + ... times a second. This is Daly's problem with one cost and one rate
    of failures.
    """
    pairs = list(zip(levels, every, strict=True))
    cost = sum(max(level.cost, _LEAST_COST) / number for level, number in pairs)
    rate = sum(number / min(level.mtbf, _MOST_MTBF) for level, number in pairs)
    arrival = max(level.durable / number for level, number in pairs)
    return max(best_interval(cost, 1 / rate), arrival, least)


def _near(ideals: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the whole numbers that are next to the ratios of the ideal intervals."""
    found: list[tuple[int, ...]] = [(1,)]
    for ideal in ideals[1:]:
        found = [
            (*before, before[-1] * times)
            for before in found
            for ratio in [ideal / (before[-1] * ideals[0])]
            for times in {max(1, math.floor(ratio)), max(1, math.ceil(ratio))}
        ]
    return found


# -- a job of ckptd

THIRD_SLOT = (
    "saves take so long that snapshots to memory pause meanwhile, unless the daemon has slots = 3"
)
"""The meaning of `Intervals.needs_third_slot`, in words."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of a job, as the mean seconds between two of them.

    mtbf: between two failures of any kind. mtbf_node: between two failures that lose
    the memory of a node, which are some of them, or None if that is not known.
    """

    mtbf: float
    mtbf_node: float | None = None

    def __str__(self) -> str:
        told = f"a failure comes every {short_span_text(self.mtbf)}"
        if self.mtbf_node is None:
            return f"{told}, and may lose a node"
        return f"{told}, and one that loses a node every {short_span_text(self.mtbf_node)}"

    @property
    def storage(self) -> float:
        """The mean seconds between two failures that need storage."""
        return self.mtbf if self.mtbf_node is None else self.mtbf_node

    @property
    def memory(self) -> float:
        """The mean seconds between two failures after which memory is enough.

        If only `mtbf` is known, each level is planned as if all failures were of its
        kind.
        """
        if self.mtbf_node is None:
            return self.mtbf
        rate = 1 / self.mtbf - 1 / self.mtbf_node
        return 1 / rate if rate > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs of a job's snapshots, in seconds.

    held: the training time that a snapshot loses in memory. lost: the training time
    that a snapshot loses if it goes to storage, `held` included, or None if that has
    not been measured. durable: the time until a snapshot is durable on storage.
    """

    held: float
    durable: float
    lost: float | None = None

    @classmethod
    def measured(cls, saves: Sequence[Mapping[str, Any]]) -> Costs:
        """Return the medians of what saves have cost.

        saves: the facts of events `save.done`, at least one.
        """

        def known(key: str) -> list[float]:
            return [float(save[key]) for save in saves if key in save]

        lost = known("lost_seconds")
        return cls(
            held=statistics.median(known("held_seconds") or [0.0]),
            durable=statistics.median(known("durable_seconds") or [0.0]),
            lost=statistics.median(lost) if lost else None,
        )

    def __str__(self) -> str:
        held, durable = short_span_text(self.held), short_span_text(self.durable)
        if self.lost is None:
            return (
                f"a snapshot holds the training for {held}; one to storage is durable after "
                f"{durable}, and what it costs beside the training is not measured yet"
            )
        lost = short_span_text(max(self.lost, self.held))
        return (
            f"a snapshot to memory costs the training {held}, and one to storage {lost}, which is "
            f"durable after {durable}"
        )

    def levels(self, failures: Failures, restore: float = 0.0) -> tuple[SaveLevel, ...]:
        """Return the levels to choose between.

        As long as `lost` has not been measured, storage gets every snapshot.

        restore: the seconds that a recovery from storage takes.
        """
        if self.lost is None:
            return (SaveLevel("storage", self.held, failures.mtbf, self.durable, restore),)
        return (
            SaveLevel("memory", self.held, failures.memory),
            SaveLevel(
                "storage", max(0.0, self.lost - self.held), failures.storage, self.durable, restore
            ),
        )


def share_of_time(share: float) -> str:
    """Return a share in percent, with two digits that count."""
    percent = 100 * share
    if percent < 0.001:
        return "0 %" if percent == 0 else "less than 0.001 %"
    return f"{percent:#.2g} %" if percent < 9.95 else f"{percent:.0f} %"
