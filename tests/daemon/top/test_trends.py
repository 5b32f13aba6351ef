"""Tests how costs are collected from the history and from reports."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.top.trends import MAX_POINTS, Trend, Trends
from tests.support.reports import job_report, status_report


def saved(time: float, held: Any = 0.1, job: str = "gpt", **facts: Any) -> LoggedEvent:
    return LoggedEvent(
        time, "save.done", logging.INFO, "", {"job": job, "held_seconds": held, **facts}
    )


def cost(step: int, seconds: float, attempt: int = 2) -> dict[str, Any]:
    told = {"step": step, "seconds": seconds, "usual": 0.05}
    return status_report(job_report(attempt=attempt, training_cost=told))


def test_saves_are_added_once_and_in_order() -> None:
    trends = Trends()
    trends.add_saves([saved(1.0, 0.1), saved(2.0, 0.2, bytes=7, durable_seconds=1.5)])
    trends.add_saves([saved(2.0, 0.2), saved(3.0, 0.3, job="llama")])
    assert trends.jobs() == {
        "gpt": Trend(held=(0.1, 0.2), nbytes=7.0, durable_seconds=1.5),
        "llama": Trend(held=(0.3,)),
    }
    assert trends.last == 3.0


@pytest.mark.parametrize("held", [None, "0.1", [0.1]])
def test_an_event_without_the_time_is_left_out(held: Any) -> None:
    trends = Trends()
    trends.add_saves([saved(1.0, held)])
    assert trends.jobs() == {}


def test_each_cost_counts_once_for_its_step_of_its_attempt() -> None:
    trends = Trends()
    for report in (cost(10, 0.1), cost(10, 0.1), cost(20, -0.2), cost(20, 0.3, attempt=3)):
        trends.add_report(report)
    trends.add_report(status_report(job_report()))
    assert trends.jobs()["gpt"].lost == (0.1, 0.0, 0.3)


def test_the_oldest_values_go_first() -> None:
    trends = Trends()
    trends.add_saves(saved(float(at + 1), float(at)) for at in range(MAX_POINTS + 5))
    held = trends.jobs()["gpt"].held
    assert (len(held), held[0], held[-1]) == (MAX_POINTS, 5.0, MAX_POINTS + 4.0)


def test_what_was_told_does_not_change() -> None:
    trends = Trends()
    trends.add_saves([saved(1.0)])
    before = trends.jobs()
    trends.add_saves([saved(2.0)])
    assert before == {"gpt": Trend(held=(0.1,))}


def test_the_processor_time_is_that_between_two_reports_of_one_process() -> None:
    trends, shares = Trends(), list[float | None]()
    for pid, uptime, used in ((1, 10, 2), (1, 20, 3), (1, 20, 3), (2, 1, 0.5), (2, 3, 0.9)):
        trends.add_report(status_report(pid=pid, uptime_seconds=uptime, cpu_seconds=used))
        shares.append(trends.cpu)
    assert shares == [None, 0.1, None, None, pytest.approx(0.2)]


def test_an_older_daemon_tells_no_processor_time() -> None:
    trends, report = Trends(), status_report()
    del report["cpu_seconds"]
    trends.add_report(report)
    assert trends.cpu is None
