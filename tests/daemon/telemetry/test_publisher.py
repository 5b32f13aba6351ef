"""Tests when figures are gathered, and that an error in them ends nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, cast

import pytest

from ckptd.daemon.telemetry import publisher
from ckptd.daemon.telemetry.figures import DaemonFigures, MetricsBoard
from ckptd.daemon.telemetry.publisher import Publisher, pause
from tests.support.cases import each_case


@each_case(
    ("took", "seconds"), [(0.0, 1.0), (0.001, 1.0), (0.005, 5.0), (0.015, 15.0), (9.0, 15.0)]
)
def test_figures_take_a_thousandth_of_the_time(took: float, seconds: float) -> None:
    assert pause(took) == pytest.approx(seconds)


def test_figures_are_published_at_each_beat_and_none_before_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    board, made = MetricsBoard(0.0, 1.0), list[DaemonFigures]()
    found = Publisher(board)
    found.publish(1.0)
    assert board.figures is None
    assert board.lag(2.0) == 0.0

    def gather() -> DaemonFigures:
        made.append(cast(Any, len(made)))
        return made[-1]

    found.gather = gather
    for now, last in ((2.0, 0), (2.1, 0), (3.0, 1), (4.2, 2)):
        found.publish(now)
        assert board.figures == last, now


def test_figures_that_take_long_are_gathered_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.005] * 3)
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    board, asked = MetricsBoard(0.0, 1.0), list[float]()
    found = Publisher(board)
    for second in range(1, 13):
        found.gather = lambda now=second: cast(Any, asked.append(now))
        found.publish(float(second))
    assert asked == [1, 6, 11]


def test_an_error_is_logged_once_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    board = MetricsBoard(0.0, 1.0)
    found = Publisher(board)
    found.gather = lambda: cast(Any, [])[0]
    for now in (1.0, 2.0, 3.0):
        found.publish(now)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert board.lag(4.0) == 0.0
    found.gather = lambda: cast(Any, "figures")
    found.publish(4.0)
    assert cast(Any, board.figures) == "figures"


async def test_the_task_beats_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "PERIOD_SECONDS", 0.001)
    found, beats = Publisher(MetricsBoard(0.0, 1.0)), list[float]()
    monkeypatch.setattr(found, "publish", beats.append)
    task = asyncio.ensure_future(found.run())
    while len(beats) < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert beats == sorted(beats)
