"""A few dozen interruptions of the agent, of every kind that there is."""

from __future__ import annotations

from tests.crash import interrupts


def test_interrupted_calls_leak_nothing_and_never_hang() -> None:
    tried, problems = interrupts.run(36, 7)
    assert problems == []
    assert tried.total() == 36
