"""Answers the probes: whether the daemon is well, and whether it is ready."""

from __future__ import annotations

from ckptd.daemon.telemetry.figures import MetricsBoard, Phase

MAX_LAG_SECONDS = 5.0
"""The event loop may be so late before the daemon counts as unwell."""


def health(board: MetricsBoard, now: float) -> tuple[bool, str]:
    """Return True if the event loop runs, with a sentence that says so or says why not.

    now: the time of the monotonic clock.
    """
    lag = board.lag(now)
    if lag <= MAX_LAG_SECONDS:
        return True, f"the event loop runs, {lag:.1f} s late"
    return False, (
        f"the event loop is {lag:.1f} s late, and at most {MAX_LAG_SECONDS:.0f} s are well: "
        f"no client is answered. If this lasts, restart the daemon; the next one saves what is "
        f"in memory"
    )


def readiness(board: MetricsBoard) -> tuple[bool, str]:
    """Return True if clients are served, with a sentence that says so or says why not."""
    return board.phase is Phase.READY, board.phase.value
