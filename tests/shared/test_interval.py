"""Tests the interval between two saves that loses the least time."""

from __future__ import annotations

import math

import pytest

from ckptd.shared.interval import best_interval


def lost(interval: float, cost: float, mtbf: float) -> float:
    """Return the time that a second of work takes, with restarts that cost nothing:
    Daly's complete model (his equation 20).
    """
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


@pytest.mark.parametrize(
    ("cost", "mtbf"), [(0.01, 3600), (1, 3600), (60, 3600), (5, 86400), (600, 3600), (2000, 3600)]
)
def test_no_other_interval_loses_less(cost: float, mtbf: float) -> None:
    best = min(lost(second * 0.5, cost, mtbf) for second in range(1, 20_000))
    assert lost(best_interval(cost, mtbf), cost, mtbf) <= best * 1.001


def test_the_interval_is_youngs_for_small_costs_and_at_most_the_mtbf() -> None:
    assert best_interval(1e-6, 3600) == pytest.approx(math.sqrt(2e-6 * 3600), rel=1e-4)
    assert best_interval(7200, 3600) == best_interval(99999, 3600) == 3600
