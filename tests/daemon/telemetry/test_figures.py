"""Tests the lag that the board shows, with a clock of the test."""

from __future__ import annotations

import pytest

from ckptd.daemon.telemetry.figures import MetricsBoard


def test_a_beat_in_time_has_no_lag() -> None:
    board = MetricsBoard(100.0, 1.0)
    assert (board.lag(100.0), board.lag(101.0)) == (0.0, 0.0)
    board.beat(101.0)
    assert board.lag(102.0) == 0.0


def test_a_late_beat_shows_by_how_much_until_the_next() -> None:
    board = MetricsBoard(100.0, 1.0)
    board.beat(103.5)
    assert (board.lag(103.5), board.lag(104.5)) == (2.5, 2.5)
    board.beat(104.5)
    assert board.lag(104.5) == 0.0


def test_the_lag_of_a_stuck_loop_grows() -> None:
    board = MetricsBoard(100.0, 1.0)
    board.beat(101.0)
    assert [board.lag(101.0 + seconds) for seconds in (1, 2, 11)] == pytest.approx([0, 1, 10])
