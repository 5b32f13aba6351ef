"""The budget of a snapshot: the costs that three states tell, and functions that are timed
where they run. `test_command.py` measures a budget.
"""

from __future__ import annotations

import pytest

from ckptd.agent.bench import budget
from ckptd.agent.bench.budget import LIMITS, STEPS, Cost, StateSize, cost, timing

SIZES = StateSize(1, 0.004), StateSize(10_000, 2.56), StateSize(240, 500.0)


def seconds(call: float, tensor: float, megabyte: float) -> tuple[float, float, float]:
    one, many, large = (
        call + (size.tensors - 1) * tensor + (size.megabytes - 0.004) * megabyte for size in SIZES
    )
    return one, many, large


def test_three_states_tell_the_cost_of_a_call_of_a_tensor_and_of_a_megabyte() -> None:
    found = cost(SIZES, seconds(1e-3, 2e-6, 60e-6))
    assert (found.call, found.tensor, found.megabyte) == pytest.approx((1e-3, 2e-6, 60e-6))


def test_a_step_that_noise_makes_faster_for_more_tensors_costs_nothing_for_them() -> None:
    assert cost(SIZES, (2e-3, 1e-3, 1e-3)) == Cost(2e-3, 0.0, 0.0)


class _Steps:
    def work(self, numbers: list[int]) -> int:
        if not numbers:
            raise ValueError("no numbers")
        return sum(numbers)


def test_functions_are_timed_where_they_run_and_put_back() -> None:
    before = _Steps.work
    with timing({"work": (_Steps, "work")}) as times:
        assert _Steps().work([1, 2]) == 3
        first = times["work"]
        with pytest.raises(ValueError, match="no numbers"):
            _Steps().work([])
        assert 0 < first < times["work"]
    assert _Steps.work is before


def test_every_step_is_a_function_that_exists_and_has_a_limit() -> None:
    assert all(callable(getattr(owner, name)) for owner, name in STEPS.values())
    assert STEPS.keys() < LIMITS.keys()


def test_checksums_take_time_for_each_megabyte_only() -> None:
    found = budget._checksums()
    assert (found.cost.call, found.cost.tensor) == (0.0, 0.0)
    assert found.cost.megabyte > 0
