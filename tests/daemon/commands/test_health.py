"""Tests the judgement of `ckptd status --check` on reports alone, and once on a daemon."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands import health
from ckptd.daemon.commands.cli import main
from tests.support.daemons import Daemon


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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
        ({"room_for": 3}, []),
        ({"room_for": 2}, ["room"]),
        ({"room_for": None}, []),
        ({"room_for": 2, "ranks_connected": 0}, []),
    ],
)
def test_the_room_for_more_checkpoints(changes: dict[str, Any], expected: list[str]) -> None:
    assert found(CLOCK.job(**changes)) == expected
    assert health.problems(CLOCK.report(CLOCK.job(room_for=2)), min_room=2) == []


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
        "job gpt: 1 more checkpoint of its size fits on the disk, and 3 must fit: make room, or "
        "keep fewer checkpoints",
        "job gpt: the last save of step 8 failed 5 s ago: the disk is full",
        "gpt/step-00000003.a0001 is damaged: its\\x1b manifest\\nis cut short",
    ]


def test_the_exit_code_says_whether_all_is_well(daemon: Daemon) -> None:
    place = ["status", "--check", "--socket", str(daemon.home.socket)]
    agent = Agent("gpt", socket=daemon.home.socket)
    agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable", timeout=60)
    (job,) = daemon.status()["jobs"]
    assert 0 < job["running_seconds"] < 86_400
    well = CliRunner().invoke(main, place)
    assert well.exit_code == 0
    assert well.output.startswith("ok: ")
    assert well.output.count("\n") == 1
    fits = 10**15
    full = CliRunner().invoke(main, [*place, "--min-room", str(fits), "--json"])
    agent.close()
    assert full.exit_code == 1
    (problem,) = json.loads(full.output)["problems"]
    assert (problem["what"], problem["job"]) == ("room", "gpt")
    daemon.stop()
    gone = CliRunner().invoke(main, place)
    assert gone.exit_code == 14
    assert gone.output.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--max-age", "30m"], "add --check"),
        (["--min-room", "3"], "add --check"),
        (["--check", "--job", "gpt"], "leave out --job"),
        (["--check", "--max-age", "soon"], "'soon' is no time: expected more than 0, like 90s"),
        (["--check", "--max-age", "0"], "'0' is no time"),
        (["--check", "--min-room", "-1"], "is not in the range"),
    ],
)
def test_limits_that_make_no_sense_are_refused(typed: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["status", "/nowhere", *typed])
    assert done.exit_code == 2
    assert said in done.output
