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
from tests.support.cases import each_case


@each_case(
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


@each_case(
    ("of_this_run", "longest", "seconds"),
    [
        ([120.0, 121.0], 1.0, 600.0),  # too few: a run loads its data first
        ([120.0, 121.0, 122.0], 1.0, 60.0),
        ([120.0, 150.0, 180.0], 30.0, 150.0),
        ([120.0, 121.0, 122.0], 200.0, 300.0),  # an evaluation took so long before
        ([120.0, 121.0, 122.0], 7200.0, 600.0),  # the disk was full for hours
    ],
)
def test_a_run_that_has_a_rhythm_is_known_to_be_late_soon(
    of_this_run: Sequence[float], longest: float, seconds: float
) -> None:
    assert limit([0.0, 60.0, 120.0], of_this_run, longest) == seconds


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
    made, overdue = job([10.0, 30.0, 50.0]), Overdue()
    overdue.look([made], 150.0)
    assert (told(caplog), overdue.late) == ([], {})
    overdue.look([made], 151.0)
    overdue.look([made], 200.0)
    assert told(caplog) == [("saves.overdue", "step-00000002.a0001", 101.0)]
    assert (overdue.late["gpt"].seconds, overdue.late["gpt"].usual) == (150.0, 20.0)
    save(made, 3, 210.0)
    overdue.look([made], 450.0)  # 1.5 times the 160 s that it has taken once
    assert (told(caplog), overdue.late) == ([], {})
    overdue.look([made], 451.0)
    assert told(caplog) == [("saves.overdue", "step-00000003.a0001", 241.0)]


def test_the_longest_time_is_that_of_this_run_alone() -> None:
    made, overdue = job([10.0, 30.0, 250.0]), Overdue()
    overdue.look([made], 260.0)
    made.attempt = 2
    for step, time in enumerate([300.0, 301.0, 302.0], start=10):
        tag = f"step-{step:08}.a0002"
        made.commit(StoredCheckpoint("gpt", tag, 2, step, step, 10, (), False, created=time))
    overdue.look([made], 362.5)
    assert overdue.late["gpt"].seconds == 60.5


@pytest.mark.parametrize("stopped", [[], [7]])
def test_a_rank_that_is_stopped_is_named(
    caplog: pytest.LogCaptureFixture, stopped: list[int]
) -> None:
    overdue = Overdue(lambda pid: pid in stopped)
    overdue.look([job([10.0, 11.0, 12.0])], 100.0)
    (text,) = caplog.messages
    assert text == (
        "job gpt: last saved 1 min ago, and usually every 1 s: "
        + (
            "rank 0 (pid 7) is stopped by a signal, such as SIGSTOP: continue it with `kill -CONT "
            "PID`, or end the run and start it again"
            if stopped
            else "a rank hangs, or the training takes no snapshots: look at the log of each rank, "
            "and at its stack with `py-spy dump --pid PID`"
        )
    )


def test_a_job_that_does_not_run_or_has_just_begun_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    created = [0.0, 60.0, 120.0]
    overdue = Overdue()
    overdue.look([job(created, 0.0), job([], 1.0), job(created, 90_000.0)], 90_500.0)
    assert (told(caplog), overdue.late) == ([], {})
    overdue.look([job(created, 90_000.0)], 90_601.0)
    assert told(caplog) == [("saves.overdue", "step-00000002.a0001", 601.0)]


def test_a_job_is_not_overdue_as_soon_as_one_of_its_ranks_was_started_again() -> None:
    made, overdue = job([10.0, 30.0, 50.0]), Overdue()
    made.ranks.join(Owner("gpt", 1, 1, 2, process=Process(8, 5000.0)))
    overdue.look([made], 5010.0)
    assert overdue.late == {}
    overdue.look([made], 5700.0)
    assert list(overdue.late) == ["gpt"]
