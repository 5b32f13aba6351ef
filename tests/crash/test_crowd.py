"""Runs the crowd for a few seconds, and tests the pure parts of its verdict.

`python -m tests.crash.crowd` kills more.
"""

from __future__ import annotations

from pathlib import Path

from tests.crash import crowd
from tests.crash.crowd import Sample
from tests.support.trainers import Diary


def test_healthy_jobs_do_not_notice_that_others_are_killed() -> None:
    hits, problems = crowd.run(8, 1, 60, jobs=3)
    assert problems == []
    assert hits.total() > 0


def samples(**values: list[int]) -> list[Sample]:
    """Return samples in which only these values change."""
    constant = {"descriptors": 20, "segments": 0, "resident": 40_000_000, "journal": 4 << 20}
    length = len(next(iter(values.values())))
    return [
        Sample(100 * n, **{**constant, **{name: series[n] for name, series in values.items()}})
        for n in range(length)
    ]


def test_growth_in_the_first_quarter_is_not_reported() -> None:
    assert crowd.growing(samples(resident=[30_000_000, *7 * [60_000_000]])) == []
    assert crowd.growing(samples(descriptors=[18, 19, *6 * [20]])) == []


def test_a_resource_that_grows_is_named() -> None:
    (problem,) = crowd.growing(samples(descriptors=[20, 20, 20, 21, 21, 22, 22, 23]))
    assert problem.startswith("descriptors grows")
    (problem,) = crowd.growing(samples(resident=[40_000_000 + 4_000_000 * n for n in range(8)]))
    assert problem.startswith("resident grows")
    (problem,) = crowd.growing(samples(journal=[(4 << 20) * (1 + n) for n in range(8)]))
    assert problem.startswith("journal grows")


def test_fewer_than_four_samples_report_no_growth() -> None:
    assert crowd.growing(samples(descriptors=[20, 21, 22])) == []


def test_a_recovery_of_less_than_was_acknowledged_is_a_problem(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")
    for word, attempt, step in (
        ("recovered", 0, -1),
        ("sealed", 1, 1),
        ("durable", 1, 1),
        ("sealed", 1, 2),
        ("recovered", 1, 2),
    ):
        diary.note(word, attempt, step)
    assert crowd.older(diary) == []
    diary.note("recovered", 1, 1)
    assert crowd.older(diary) == ["(1, 1) was recovered, and (1, 2) was acknowledged"]
