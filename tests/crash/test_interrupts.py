"""Interrupts the agent a few dozen times, once in each way."""

from __future__ import annotations

from tests.crash import interrupts


def test_interrupted_calls_leak_nothing_and_never_hang() -> None:
    tried, problems = interrupts.run(36, 7)
    assert problems == []
    assert tried.total() == 36
