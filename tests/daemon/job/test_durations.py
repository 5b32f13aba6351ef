"""Tests how durations are counted in buckets."""

from __future__ import annotations

from ckptd.daemon.job.durations import SAVES, STALLS, Distribution, Durations


def test_a_duration_belongs_to_the_first_bucket_that_holds_it() -> None:
    found = Durations([1.0, 10.0])
    empty = found.distribution()
    for seconds in (0.0, 1.0, 1.5, 10.0, 11.0, 1e9):
        found.add(seconds)
    assert found.distribution() == Distribution((1.0, 10.0), (2, 2, 2), 1e9 + 23.5)
    assert empty == Distribution((1.0, 10.0), (0, 0, 0), 0.0)


def test_the_bounds_of_the_metrics_rise() -> None:
    assert (sorted(set(STALLS)), sorted(set(SAVES))) == ([*STALLS], [*SAVES])
