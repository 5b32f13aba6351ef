"""The steps that `benchmarks.where` times are those of the agent."""

from __future__ import annotations

from benchmarks.where import RECOVERY
from ckptd.agent.bench.budget import STEPS, timing


def test_each_step_is_a_function_of_the_agent() -> None:
    """They are named by texts, which neither an import nor a type checker compares."""
    for steps in (STEPS, RECOVERY):
        before = [getattr(owner, name) for owner, name in steps.values()]
        with timing(steps):
            during = [getattr(owner, name) for owner, name in steps.values()]
        assert all(callable(function) for function in before)
        assert not set(before) & set(during)
        assert [getattr(owner, name) for owner, name in steps.values()] == before
