"""Tests that nothing which a nonsense client gets acknowledged fails to verify or to
load.
"""

from __future__ import annotations

from random import Random

from tests.crash import nonsense


def test_what_is_acknowledged_can_be_verified_and_loaded() -> None:
    tried, problems = nonsense.run(250, seed=20)
    assert problems == []
    assert tried[" sealed"] > 50
    assert tried[" refused"] > 100


def test_each_mutation_changes_some_case() -> None:
    assert len(nonsense.MUTATIONS) > 20
    for name, mutation in nonsense.MUTATIONS.items():
        cases = [
            nonsense.sound_case(Random(f"{name}/{number}"), 1 + number % 2, large=False)
            for number in range(20)
        ]
        assert any(
            mutation(Random(number), case) is not None for number, case in enumerate(cases)
        ), name
