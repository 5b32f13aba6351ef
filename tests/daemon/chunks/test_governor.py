"""Tests how many threads the saves of a job get, from what they cost its training."""

from __future__ import annotations

from ckptd.daemon.chunks.governor import Governor
from ckptd.shared.wire.messages import TrainingCost


def cost(step: int, seconds: float) -> list[TrainingCost]:
    return [TrainingCost(step=step, seconds=seconds, usual=0.5)]


def after(
    governor: Governor,
    step: int,
    lost: float,
    *,
    seconds: float = 1.0,
    held: float = 0.1,
    every: float = 100.0,
) -> int:
    """Report a save that took so long, and what it has cost.

    Return the threads of the next save.
    """
    governor.saved(step, step * every, seconds, held)
    governor.observe(cost(step, lost))
    return governor.threads


def test_a_save_that_disturbs_the_training_is_followed_by_one_with_fewer_threads() -> None:
    governor = Governor(8)
    assert [after(governor, step, 0.5) for step in range(1, 6)] == [4, 2, 1, 1, 1]
    assert governor.cost == cost(5, 0.5)[0]


def test_a_save_that_disturbs_nobody_is_followed_by_one_with_more() -> None:
    governor = Governor(4)
    after(governor, 1, 0.9)
    after(governor, 2, 0.9)
    assert [after(governor, step, 0.1) for step in range(3, 8)] == [2, 3, 4, 4, 4]


def test_between_much_and_little_nothing_changes() -> None:
    governor = Governor(4)
    after(governor, 1, 0.9)
    assert [after(governor, step, 0.17) for step in range(2, 5)] == [2, 2, 2]


def test_what_the_call_held_is_not_the_fault_of_the_threads() -> None:
    assert after(Governor(4), 1, 3.0, held=3.0) == 4


def test_a_short_save_is_measured_by_a_step() -> None:
    """A step that was noisy by 20 ms says nothing about a save of 1 ms."""
    assert after(Governor(4), 1, 0.12, seconds=0.001) == 4


def test_saves_that_take_half_of_the_time_get_more_threads_whatever_they_cost() -> None:
    governor = Governor(8)
    for step in (1, 2, 3):
        after(governor, step, 5.0)
    assert governor.threads == 1
    assert [after(governor, step, 50.0, seconds=60.0) for step in range(4, 8)] == [2, 4, 8, 8]


def test_a_report_of_another_save_is_only_shown() -> None:
    governor = Governor(4)
    governor.observe([])
    governor.saved(2, 0.0, 1.0, 0.0)
    governor.observe(cost(1, 9.0))
    assert (governor.threads, governor.cost) == (4, cost(1, 9.0)[0])
    governor.observe(cost(2, 9.0))
    governor.observe(cost(2, 9.0))
    assert governor.threads == 2, "the same report counts once"


def test_of_several_ranks_the_one_that_has_lost_most_counts() -> None:
    governor = Governor(4)
    governor.saved(1, 0.0, 1.0, 0.0)
    governor.observe(cost(1, 0.0) + cost(1, 0.9) + cost(1, 0.1))
    assert (governor.threads, governor.cost) == (2, cost(1, 0.9)[0])
