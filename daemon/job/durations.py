"""Counts durations in buckets, for the histograms of the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

STALLS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SAVES = RECOVERY_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""The upper bounds of the buckets, in seconds."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram at one moment.

    `counts`: how many durations each bucket has, without those of the buckets below.
    The last bucket has no upper bound. `seconds`: the sum of all durations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    seconds: float


class Durations:
    """Durations, counted in buckets with these upper bounds. `seconds` is their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration. It belongs to the first bucket whose bound it does not
        exceed.
        """
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.seconds += seconds

    def distribution(self) -> Distribution:
        """Return the counts as they are now."""
        return Distribution(self._bounds, tuple(self._counts), self.seconds)
