"""Tests when a job that trains on counts as no longer saved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.ranks import Owner, Process
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.log_events import event_of, facts_of
from ckptd.daemon.telemetry.overdue import Overdue, limit


@pytest.mark.parametrize(
    ("created", "seconds"),
    [
        ([], math.inf),
        ([0.0, 60.0], math.inf),
        ([0.0, 60.0, 120.0], 600.0),
        ([0.0, 1800.0, 3600.0, math.nan], 9000.0),
        ([90_000.0, 0.0, 1800.0, 3600.0, 91_800.0, 93_600.0], 9000.0),  # a pause of a day
    ],
)
def test_the_limit_follows_the_usual_interval(created: Sequence[float], seconds: float) -> None:
    assert limit(created) == seconds


def job(created: Sequence[float], started: float = 1.0) -> Job:
    made = Job("gpt", attempt=1)
    for step, time in enumerate(created):
        save(made, step, time)
    if started:
        made.ranks.join(Owner("gpt", 1, 0, 1, process=Process(7, started)))
    return made


def save(made: Job, step: int, created: float) -> None:
    tag = f"step-{step:08}.a0001"
    made.commit(StoredCheckpoint("gpt", tag, 1, step, step + 1, 10, (), False, created=created))


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = [
        (event_of(record), facts_of(record)["tag"], facts_of(record)["seconds"])
        for record in caplog.records
    ]
    caplog.clear()
    return found


def test_a_job_that_is_no_longer_saved_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    made, overdue = job([0.0, 60.0, 120.0]), Overdue()
    overdue.look([made], 720.0)
    assert told(caplog) == []
    overdue.look([made], 721.0)
    overdue.look([made], 2000.0)
    assert told(caplog) == [("saves.overdue", "step-00000002.a0001", 601.0)]
    save(made, 3, 2100.0)
    overdue.look([made], 2200.0)
    overdue.look([made], 9000.0)
    assert told(caplog) == [("saves.overdue", "step-00000003.a0001", 6900.0)]


def test_a_job_that_does_not_run_or_has_just_begun_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    created = [0.0, 60.0, 120.0]
    overdue = Overdue()
    overdue.look([job(created, 0.0), job([], 1.0), job(created, 90_000.0)], 90_500.0)
    assert told(caplog) == []
    overdue.look([job(created, 90_000.0)], 90_601.0)
    assert told(caplog) == [("saves.overdue", "step-00000002.a0001", 601.0)]
