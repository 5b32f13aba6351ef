"""Publishes beats and figures on the board, from a task of the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ckptd.daemon.telemetry.figures import DaemonFigures, MetricsBoard

log = logging.getLogger("ckptd.telemetry")

PERIOD_SECONDS = 1.0
"""Seconds between two beats, and the least between two gatherings of figures."""
_MOST_SECONDS = 15.0
_SHARE = 0.001


def pause(took: float) -> float:
    """Return the seconds between two gatherings of figures that take this many seconds.

    They may take a thousandth of the loop's time, but figures are at most 15 s old.
    """
    return min(_MOST_SECONDS, max(PERIOD_SECONDS, took / _SHARE))


class Publisher:
    """Publishes on a board until its task is cancelled.

    DaemonFigures are gathered once `gather` is set.
    """

    def __init__(self, board: MetricsBoard) -> None:
        self._board = board
        self.gather: Callable[[], DaemonFigures] | None = None
        self._next = 0.0  # time of the next gathering, on the monotonic clock
        self._failed = False

    async def run(self) -> None:
        while True:
            self.publish(time.monotonic())
            await asyncio.sleep(PERIOD_SECONDS)

    def publish(self, now: float) -> None:
        """Publish that the loop runs, and new figures if it is time for them.

        An error is logged once. It ends neither the task nor the daemon, because saves
        need no metrics.
        """
        self._board.beat(now)
        if self.gather is None or now < self._next:
            return
        begun = time.perf_counter()
        try:
            self._board.figures = self.gather()
        except Exception:
            if not self._failed:
                log.exception("the metrics cannot be brought up to date; saving goes on")
            self._failed = True
        # Late by less than half of a period is on time.
        self._next = now + pause(time.perf_counter() - begun) - PERIOD_SECONDS / 2
