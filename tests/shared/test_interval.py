"""Tests the intervals between saves that lose the least time, against brute force over
an exact model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.interval import (
    Costs,
    Failures,
    Intervals,
    SaveLevel,
    best_interval,
    choose,
    share_of_time,
)
from tests.shared.samples import steady
from tests.support.cases import each_case

# -- one level


def lost(interval: float, cost: float, mtbf: float) -> float:
    """Return the time that a second of work takes, with restarts that cost nothing:
    Daly's complete model (his equation 20).
    """
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


@each_case(
    ("cost", "mtbf"), [(0.01, 3600), (1, 3600), (60, 3600), (5, 86400), (600, 3600), (2000, 3600)]
)
def test_no_other_interval_loses_less(cost: float, mtbf: float) -> None:
    best = min(lost(second * 0.5, cost, mtbf) for second in range(1, 20_000))
    assert lost(best_interval(cost, mtbf), cost, mtbf) <= best * 1.001
    alone = choose([SaveLevel("storage", cost, mtbf)])
    assert (alone.interval, alone.every) == (best_interval(cost, mtbf), (1,))


def test_the_interval_is_youngs_for_small_costs_and_at_most_the_mtbf() -> None:
    assert best_interval(1e-6, 3600) == pytest.approx(math.sqrt(2e-6 * 3600), rel=1e-4)
    assert best_interval(7200, 3600) == best_interval(99999, 3600) == 3600


# -- several levels


def survived(seconds: float, rate: float) -> tuple[float, float]:
    """Return the chance that no failure comes, and the mean time until it comes or the
    seconds are over.
    """
    return math.exp(-rate * seconds), -math.expm1(-rate * seconds) / rate


def exact(choice: Intervals) -> float:
    """Return the time that is lost for each second of training, without an
    approximation.

    This is a Markov model as that of SCR. A unit of a level is `times` units of the level
    before, one after the other, and the cost of the level. `ends` is the chance that a
    unit is completed before a failure that needs a higher level, and `seconds` the time
    until then. A failure of the level itself starts the unit again.
    """
    rates = [1 / level.mtbf for level in choice.levels]
    ends, seconds, before = 1.0, 0.0, 0
    for number, level in enumerate(choice.levels):
        rate, higher = sum(rates[number:]), sum(rates[number + 1 :])
        if number == 0:
            parts = [
                (math.exp(-rate * choice.interval), -math.expm1(-rate * choice.interval) / rate)
            ]
        else:
            parts = [(ends, seconds)] * (choice.every[number] // before)
        before = choice.every[number]
        parts.append((math.exp(-rate * level.cost), -math.expm1(-rate * level.cost) / rate))
        reached, taken = 1.0, 0.0
        for success, time in parts:
            taken += reached * time
            reached *= success
        if reached < 1e-12:
            return math.inf
        again = (1 - reached) * (1 - higher / rate)
        ends, seconds = reached / (1 - again), (taken + again * level.restore) / (1 - again)
    return seconds / (choice.interval * choice.every[-1]) - 1


def brute_force(levels: Sequence[SaveLevel], intervals: Sequence[float]) -> Intervals:
    """Return the best of many choices by the exact model."""
    numbers = [1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 50, 64, 80, 100]
    tried = (
        Intervals(
            tuple(levels), interval, tuple(itertools.accumulate((1, *times), lambda a, b: a * b))
        )
        for interval in intervals
        for times in itertools.product(numbers, repeat=len(levels) - 1)
    )
    fit = (
        one for one in tried
        if all(i >= level.durable for i, level in zip(one.intervals, levels, strict=True))
    )  # fmt: skip
    return min(fit, key=exact)


MEMORY, STORAGE = SaveLevel("memory", 0.02, 3 * 3600), SaveLevel("storage", 2.0, 30 * 3600)


@each_case(
    "levels",
    [
        (MEMORY, STORAGE),
        (MEMORY, SaveLevel("storage", 2.0, 30 * 3600, durable=900.0)),
        (SaveLevel("memory", 5.0, 3600), SaveLevel("storage", 60.0, 7200)),
        (SaveLevel("memory", 1.0, 9000), SaveLevel("storage", 0.1, 3600)),
        (SaveLevel("memory", 1.0, 90000), SaveLevel("storage", 0.1, 3600, durable=60.0)),
        (
            SaveLevel("memory", 0.5, 900),
            SaveLevel("peer", 2.0, 7200),
            SaveLevel("storage", 20.0, 86400),
        ),
        (
            SaveLevel("memory", 0.5, 900),
            SaveLevel("peer", 2.0, 86400),
            SaveLevel("storage", 0.1, 7200),
        ),
    ],
)
def test_no_other_intervals_of_several_levels_lose_less(levels: tuple[SaveLevel, ...]) -> None:
    found = choose(levels)
    intervals = [found.interval * 1.05**power for power in range(-60, 61, 2 * len(levels) - 2)]
    best = brute_force(levels, intervals)
    assert exact(found) <= exact(best) * 1.02
    assert found.lost == pytest.approx(
        exact(found) + sum(level.durable / level.mtbf for level in levels), rel=0.12
    )


@steady
@given(
    st.lists(
        st.tuples(st.floats(1e-3, 50.0), st.floats(600, 1e6), st.floats(0, 2000)),
        min_size=1, max_size=3,
    ),
    st.floats(0, 20),
)  # fmt: skip
def test_a_choice_keeps_its_bounds_and_no_neighbour_is_better(
    levels: list[tuple[float, float, float]], least: float
) -> None:
    found = choose(
        [SaveLevel(str(n), cost, mtbf, durable) for n, (cost, mtbf, durable) in enumerate(levels)],
        least=least,
    )
    others = [found.scaled(0.5), found.scaled(2.0)]
    pairs = [pair for one in (found, *others) for pair in itertools.pairwise(one.every)]
    assert found.interval >= least
    assert [pair for pair in pairs if pair[1] % pair[0]] == []
    assert [
        level for level, interval in zip(found.levels, found.intervals, strict=True)
        if interval < level.durable * (1 - 1e-9)
    ] == []  # fmt: skip
    # An interval is Daly's, whose terms of higher order this sum does not have.
    possible = [one for one in others if one.interval >= least and found.lost < 0.2]
    assert [one for one in possible if one.lost < found.lost * 0.99] == []


def test_storage_gets_a_whole_multiple_of_the_snapshots() -> None:
    found = choose((MEMORY, STORAGE))
    alone = [best_interval(level.cost, level.mtbf) for level in (MEMORY, STORAGE)]
    assert found.every == (1, 32)
    assert found.intervals == pytest.approx(alone, rel=0.02)
    assert found.lost == pytest.approx(
        sum(math.sqrt(2 * level.cost / level.mtbf) for level in (MEMORY, STORAGE)), rel=0.01
    ), "the least loss of Benoit et al."


def test_given_numbers_are_kept() -> None:
    found = choose((MEMORY, STORAGE), every=(1, 4))
    assert found.every == (1, 4)
    assert found.interval > choose((MEMORY, STORAGE)).interval


# -- limits


def test_what_costs_nothing_is_done_as_often_as_possible() -> None:
    assert choose([SaveLevel("memory", 0.0, 3600)], least=5.0).interval == 5.0
    assert 0 < choose([SaveLevel("memory", 0.0, 3600)]).interval < 0.1
    free = choose((MEMORY, SaveLevel("storage", 0.0, 30 * 3600, durable=40.0)))
    assert free.every == (1, 2)
    assert free.intervals[1] >= 40.0


def test_a_cost_above_the_mtbf_gives_the_mtbf() -> None:
    found = choose((MEMORY, SaveLevel("storage", 9000.0, 3600.0)))
    assert found.intervals[1] == pytest.approx(3600, rel=0.05)
    assert found.lost > 2.0, "more time is lost than the training takes"


def test_a_level_that_no_failure_needs() -> None:
    every_failure_loses_the_node = choose((SaveLevel("memory", 0.02), STORAGE))
    assert every_failure_loses_the_node.every == (1, 1)
    assert every_failure_loses_the_node.interval == pytest.approx(best_interval(2.02, 30 * 3600))
    no_failure_loses_a_node = choose((MEMORY, SaveLevel("storage", 2.0)))
    assert no_failure_loses_a_node.interval == pytest.approx(
        best_interval(0.02, 3 * 3600), rel=1e-3
    )
    assert no_failure_loses_a_node.every[1] > 100_000


def test_storage_that_is_slower_than_its_interval_sets_it() -> None:
    slow = choose((MEMORY, SaveLevel("storage", 2.0, 30 * 3600, durable=3000.0)))
    assert slow.intervals[1] == pytest.approx(3000.0, rel=0.01)
    assert slow.interval == pytest.approx(best_interval(0.02, 3 * 3600), rel=0.02)
    assert slow.scaled(0.5).intervals[1] >= 3000.0
    assert slow.scaled(0.5).interval == slow.interval / 2


@pytest.mark.parametrize(("durable", "needed"), [(40.0, False), (50.0, True)])
def test_a_slow_save_needs_a_third_slot(durable: float, needed: bool) -> None:
    found = choose((MEMORY, SaveLevel("storage", 2.0, 30 * 3600, durable)))
    assert 40 < 2 * found.interval < 50
    assert found.needs_third_slot == needed


# -- a job


def test_failures_are_divided_if_both_figures_are_known() -> None:
    assert (Failures(3600, 36000).memory, Failures(3600, 36000).storage) == (4000.0, 36000)
    assert (Failures(3600).memory, Failures(3600).storage) == (3600, 3600)
    assert Failures(3600, 3600).memory == math.inf


def test_every_snapshot_goes_to_storage_until_the_cost_of_that_is_measured() -> None:
    failures = Failures(3 * 3600, 30 * 3600)
    (only,) = Costs(0.02, 40.0).levels(failures)
    assert only == SaveLevel("storage", 0.02, 3 * 3600, 40.0)
    memory, storage = Costs(0.02, 40.0, 2.02).levels(failures, restore=60.0)
    assert memory == SaveLevel("memory", 0.02, failures.memory)
    assert storage == SaveLevel("storage", 2.0, 30 * 3600, 40.0, 60.0)
    assert Costs(0.02, 40.0, 0.01).levels(failures)[1].cost == 0.0, "noise of the step times"


def test_a_choice_in_words() -> None:
    costs, failures = Costs(0.02, 40.0, 2.02), Failures(3 * 3600, 30 * 3600)
    found = choose(costs.levels(failures), step=0.5)
    assert str(found) == (
        "a snapshot to memory every 21.9 s (44 steps); each 30th to storage, every 10.9 min "
        "(1320 steps)"
    )
    assert found.steps == (44, 1320)
    assert str(choose([SaveLevel("storage", 1.0, 3600)])) == "a snapshot to storage every 84.2 s"
    slow = choose((SaveLevel("memory", 1.0), STORAGE), step=1000.0)
    assert str(slow) == (
        "a snapshot to memory every 33.3 min (2 steps); each of them to storage"
    ), "at least every second step is undisturbed"
    assert str(costs) == (
        "a snapshot to memory costs the training 20 ms, and one to storage 2.0 s, which is "
        "durable after 40.0 s"
    )
    assert str(Costs(0.02, 40.0)) == (
        "a snapshot holds the training for 20 ms; one to storage is durable after 40.0 s, and "
        "what it costs beside the training is not measured yet"
    )
    assert str(failures) == "a failure comes every 3.0 h, and one that loses a node every 30.0 h"
    assert str(Failures(3600)) == "a failure comes every 60.0 min, and may lose a node"
    assert [share_of_time(share) for share in (0, 1e-6, 0.0012, 0.03, 0.1234, 1.234)] == [
        "0 %", "less than 0.001 %", "0.12 %", "3.0 %", "12 %", "123 %",
    ]  # fmt: skip


def test_the_costs_of_saves_are_medians_of_what_they_tell() -> None:
    saves = [{"held_seconds": held, "durable_seconds": 2.0} for held in (0.1, 0.2, 9.0)]
    assert Costs.measured(saves) == Costs(0.2, 2.0)
    known = [*saves, {"lost_seconds": 3.0}, {"lost_seconds": 5.0}]
    assert Costs.measured(known) == Costs(0.2, 2.0, 4.0)
    assert Costs.measured([{}]) == Costs(0.0, 0.0)
