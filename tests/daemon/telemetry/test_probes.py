"""Tests when a daemon counts as well and as ready."""

from __future__ import annotations

from ckptd.daemon.telemetry.figures import MetricsBoard, Phase
from ckptd.daemon.telemetry.probes import MAX_LAG_SECONDS, health, readiness


def test_a_loop_that_is_late_is_well_up_to_the_limit() -> None:
    board = MetricsBoard(0.0, 1.0)
    assert health(board, 1.0) == (True, "the event loop runs, 0.0 s late")
    assert health(board, 1.0 + MAX_LAG_SECONDS)[0]
    well, why = health(board, 8.5)
    assert not well
    assert why.startswith("the event loop is 7.5 s late, and at most 5 s are well:")
    board.beat(8.5)
    board.beat(9.5)
    assert health(board, 9.5) == (True, "the event loop runs, 0.0 s late")


def test_a_daemon_is_ready_between_its_start_and_its_end() -> None:
    board, told = MetricsBoard(0.0, 1.0), dict[Phase, tuple[bool, str]]()
    assert board.phase is Phase.STARTING
    for phase in Phase:
        board.phase = phase
        told[phase] = readiness(board)
    assert {phase: ready for phase, (ready, _) in told.items()} == {
        Phase.STARTING: False,
        Phase.READY: True,
        Phase.ENDING: False,
    }
    assert told[Phase.ENDING][1].startswith("the daemon is ending")
