"""The short version of `make kills`: every phase is hit, and nothing is lost."""

from __future__ import annotations

from tests.crash import kills


def test_random_kills_hit_every_phase_and_lose_nothing() -> None:
    result = kills.run(10, megabytes=48, seed=20, most=40)
    assert result.lost == []
    assert result.empty() == []
    assert result.recovered == result.kills >= 10
