"""Tests the judgement of `ckptd status --check` on reports alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.commands import health
from ckptd.daemon.commands.doctor_check import WARNING
from ckptd.daemon.commands.doctor_costs import CheckpointSizes, check_job
from ckptd.daemon.commands.report import status_text
from ckptd.daemon.job.stored_checkpoint import LITTLE_ROOM
from tests.support.cases import each_case
from tests.support.reports import job_report, status_report


class Clock:
    """A clock that stands still. `report` and `job` make reports at its time."""

    def __init__(self) -> None:
        self.now = 100_000.0

    def job(self, name: str = "gpt", **changes: Any) -> dict[str, Any]:
        """Return the report of a job that has run for an hour and saves every minute."""
        return {
            "job": name,
            "ranks_connected": 2,
            "running_seconds": 3600.0,
            "last_durable": self.durable(60.0),
            "last_error": None,
            "room_for": 20,
            "damaged": {},
            **changes,
        }

    def durable(self, age: float | None) -> dict[str, Any]:
        made = None if age is None else self.now - age
        since = None if made is None else self.now - made
        return {"attempt": 1, "step": 7, "tag": "step-00000007", "age_seconds": since}

    def failed(self, age: float, step: int | None = 8) -> dict[str, Any]:
        return {"step": step, "reason": "the disk is full", "age_seconds": age}

    def report(self, *jobs: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return {
            "ready": True,
            "root": "/ckpts",
            "uptime_seconds": 7200.0,
            "event_loop_lag_seconds": 0.002,
            "disk_free_bytes": 10**12,
            "stage": None,
            "descriptors": {"accepting_paused": None},
            "jobs": list(jobs),
            **changes,
        }


CLOCK = Clock()


def found(*jobs: dict[str, Any], max_age: float | None = None, **changes: Any) -> list[str]:
    """Return the kinds of the problems of a report."""
    report = CLOCK.report(*jobs, **changes)
    return [problem.what for problem in health.problems(report, max_age=max_age)]


def test_a_daemon_that_is_well_has_no_problem() -> None:
    report = CLOCK.report(CLOCK.job(), CLOCK.job("llama", last_durable=CLOCK.durable(200)))
    wrong = health.problems(report, max_age=1800)
    assert health.health_json(wrong) == {"ok": True, "problems": []}
    assert health.health_text(wrong, report) == (
        "ok: the daemon of /ckpts is ready, 2 jobs run, each with a checkpoint of the last 3 min"
    )
    assert health.health_text([], CLOCK.report(CLOCK.job())) == (
        "ok: the daemon of /ckpts is ready, 1 job runs, with a checkpoint of the last 1 min"
    )
    assert health.health_text([], CLOCK.report(CLOCK.job(last_durable=None))) == (
        "ok: the daemon of /ckpts is ready, 1 job runs"
    )
    assert health.health_text([], CLOCK.report()) == (
        "ok: the daemon of /ckpts is ready, 0 jobs run"
    )


@each_case(
    ("changes", "expected"),
    [
        ({"ready": False}, ["not-ready"]),
        ({"event_loop_lag_seconds": 1.0}, []),
        ({"event_loop_lag_seconds": 1.1}, ["loop"]),
        ({"disk_free_bytes": None}, ["root"]),
        ({"disk_free_bytes": None, "uptime_seconds": 0.5}, []),  # not measured yet
        ({"disk_free_bytes": None, "root": "s3://bucket/runs"}, []),  # never known
        ({"descriptors": {"accepting_paused": "no descriptor is left"}}, ["clients"]),
        ({"stage": {"problem": "", "refused": {}}}, []),
        ({"stage": {"problem": "no answer", "refused": {"gpt/x": "too long"}}}, ["stage"] * 2),
    ],
)
def test_problems_of_the_daemon(changes: dict[str, Any], expected: list[str]) -> None:
    assert found(CLOCK.job(), **changes) == expected


@each_case(
    ("changes", "expected"),
    [
        ({"last_durable": CLOCK.durable(1800)}, []),
        ({"last_durable": CLOCK.durable(1801)}, ["old"]),
        ({"last_durable": CLOCK.durable(None)}, []),  # of unknown age
        ({"last_durable": None}, ["old"]),
        ({"last_durable": None, "running_seconds": 1800}, []),
        # It has just continued after two days.
        ({"last_durable": CLOCK.durable(172_800), "running_seconds": 60}, []),
        # A daemon that does not know when the job began goes by its own start.
        ({"last_durable": None, "running_seconds": None}, ["old"]),
        # It does not run.
        ({"last_durable": CLOCK.durable(172_800), "ranks_connected": 0}, []),
    ],
)
def test_the_age_of_the_newest_checkpoint(changes: dict[str, Any], expected: list[str]) -> None:
    assert found(CLOCK.job(**changes), max_age=1800) == expected
    assert found(CLOCK.job(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"room_for": 5}, []),
        ({"room_for": 4}, ["room"]),
        ({"room_for": None}, []),
        ({"room_for": 2, "ranks_connected": 0}, []),
    ],
)
def test_the_room_for_more_checkpoints(changes: dict[str, Any], expected: list[str]) -> None:
    assert found(CLOCK.job(**changes)) == expected
    assert health.problems(CLOCK.report(CLOCK.job(room_for=2)), min_room=2) == []


@pytest.mark.parametrize("room", [LITTLE_ROOM - 1, LITTLE_ROOM])
def test_every_warning_of_little_room_begins_with_the_same_number(room: int) -> None:
    little = room < LITTLE_ROOM
    files = {"accepting_paused": None, "used": 25, "limit": 1024, "clients": 2, "clients_fit": 256}
    memory = {"used_bytes": 10, "quota_bytes": 100, "segments": 2}
    status = status_report(
        job_report(room_for=room), descriptors=files, shared_memory=memory, private=False
    )
    assert bool(health.problems(status)) == little
    assert ("LITTLE ROOM" in status_text(status)) == little
    size = CheckpointSizes(created="", nbytes=10, raw_bytes=10, largest=10, ranks=1)
    assert (check_job("gpt", [], size, 10 * room).level == WARNING) == little
    alerts = Path(__file__).parents[3] / "docs" / "monitoring" / "ckptd-alerts.yml"
    assert f"ckptd_room_checkpoints < {LITTLE_ROOM}\n" in alerts.read_text()


@pytest.mark.parametrize(("unlocked", "told"), [(0, False), (12_000_000_000, True)])
def test_status_tells_of_slots_that_are_not_page_locked(unlocked: int, told: bool) -> None:
    files = {"accepting_paused": None, "used": 25, "limit": 1024, "clients": 2, "clients_fit": 256}
    memory = {"used_bytes": 10, "quota_bytes": 100, "segments": 2}
    text = status_text(
        status_report(
            job_report(unlocked_bytes=unlocked),
            descriptors=files,
            shared_memory=memory,
            private=False,
        )
    )
    assert ("NOT LOCKED" in text, "12.0 GB of its slots" in text) == (told, told)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"last_error": CLOCK.failed(59)}, ["failed"]),
        ({"last_error": CLOCK.failed(61)}, []),  # a newer one has been saved since
        ({"last_error": CLOCK.failed(61), "last_durable": None}, ["failed"]),
        ({"last_error": CLOCK.failed(5, None), "ranks_connected": 0}, ["failed"]),
    ],
)
def test_only_a_failure_after_the_newest_checkpoint_counts(
    changes: dict[str, Any], expected: list[str]
) -> None:
    assert found(CLOCK.job(**changes)) == expected


def test_each_problem_is_one_printable_line() -> None:
    job = CLOCK.job(
        last_durable=CLOCK.durable(7200),
        last_error=CLOCK.failed(5),
        room_for=1,
        damaged={"step-00000003.a0001": "its\x1b manifest\nis cut short"},
    )
    report = CLOCK.report(job, ready=False)
    wrong = health.problems(report, max_age=1800)
    assert [problem.job for problem in wrong] == ["", "gpt", "gpt", "gpt", "gpt"]
    assert health.health_text(wrong, report).split("\n") == [
        "the daemon is not ready: it is stopping",
        "job gpt: its newest durable checkpoint is 2 h 0 min old, and the limit is 30 min",
        "job gpt: 1 more checkpoint of its size fits on the disk, and 5 must fit: make room, or "
        "keep fewer checkpoints",
        "job gpt: the last save of step 8 failed 5 s ago: the disk is full",
        "gpt/step-00000003.a0001 is damaged: its\\x1b manifest\\nis cut short. recover() passes it "
        "over: look at the disk, then delete it with `ckptd forget`",
    ]


def test_a_checkpoint_that_this_user_may_not_read_is_a_problem_and_nothing_to_delete() -> None:
    why = "cannot read the manifest of gpt/step-00000003.a0001: Permission denied"
    report = CLOCK.report(CLOCK.job(denied={"step-00000003.a0001": why}))
    (problem,) = health.problems(report)
    assert (problem.what, problem.message) == (
        "denied",
        f"job gpt: {why}. recover() goes back to no older checkpoint meanwhile",
    )


def test_a_trainer_that_is_refused_is_a_problem() -> None:
    refused = [
        {"job": job, "message": "process 7 has been refused for 3 min: it is full"}
        for job in ("gpt", "")
    ]
    wrong = health.problems(CLOCK.report(CLOCK.job(), refused=refused))
    assert [(one.what, one.job, one.message) for one in wrong] == [
        ("refused", "gpt", "job gpt: process 7 has been refused for 3 min: it is full"),
        ("refused", "", "process 7 has been refused for 3 min: it is full"),
    ]


def test_memory_of_another_root_is_a_problem_until_somebody_decides() -> None:
    held = {
        "job": "gpt", "attempt": 2, "step": 40, "identity": "8ad934a8" * 4, "root": "/ckpts",
        "bytes": 5,
    }  # fmt: skip
    (problem,) = health.problems(CLOCK.report(CLOCK.job(), foreign_memory=[held]))
    assert (problem.what, problem.job, problem.message) == (
        "memory",
        "gpt",
        "job gpt: step 40 of attempt 2 is in memory for another root, 8ad934a8, than the one at "
        "/ckpts now, and runs of this job are refused: mount the right root there and restart the "
        "daemon, or decide with CKPTD_FOREIGN_MEMORY",
    )


@pytest.mark.parametrize(
    ("ranks", "values", "what"),
    [(2, 3, ["non-finite"]), (0, 3, []), (2, 0, []), (2, None, [])],
)
def test_a_job_that_runs_with_nan_is_a_problem(
    ranks: int, values: int | None, what: list[str]
) -> None:
    found = health.problems(CLOCK.report(CLOCK.job(non_finite=values, ranks_connected=ranks)))
    assert [one.what for one in found] == what
    assert all("3 values of parameters and optimizer state in" in one.message for one in found)


@pytest.mark.parametrize(("ranks", "what"), [(2, ["replicas"]), (0, [])])
def test_a_job_that_runs_without_its_copies_is_a_problem(ranks: int, what: list[str]) -> None:
    off = CLOCK.job(replicas_off="rank 3: no room (node-b)", ranks_connected=ranks)
    found = health.problems(CLOCK.report(off, CLOCK.job(replicas_off=None, ranks_connected=2)))
    assert [problem.what for problem in found] == what
    assert [problem.message for problem in found] == [
        "job gpt: its nodes make no more copies in the memory of other nodes until its next "
        "attempt: rank 3: no room (node-b)"
    ] * len(what)


@pytest.mark.parametrize(("ranks", "what"), [(2, ["overdue"]), (0, [])])
def test_a_job_that_runs_and_is_overdue_is_a_problem(ranks: int, what: list[str]) -> None:
    late = {"seconds": 75.0, "usual_seconds": 1.0, "message": "last saved 1 min ago"}
    report = CLOCK.report(CLOCK.job(overdue=late, ranks_connected=ranks))
    found = health.problems(report)
    assert [problem.what for problem in found] == what
    assert [problem.message for problem in found] == ["job gpt: last saved 1 min ago"] * len(what)
