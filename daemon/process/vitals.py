"""Measures whether the daemon is well: the lag of its event loop, free disk space and
memory. Feeds the systemd watchdog.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import psutil

from ckptd.daemon import log_events
from ckptd.daemon.composition import Components
from ckptd.daemon.process import notify
from ckptd.daemon.process.peers import is_stopped
from ckptd.daemon.telemetry.overdue import LOOK_SECONDS, Overdue
from ckptd.daemon.telemetry.refusals import Refusals

log = logging.getLogger("ckptd")

_PERIOD_SECONDS = 1.0
"""Between two measurements where systemd asks for no other period."""
_TIMES_LOST = 2
"""A root counts as lost if it is missing in so many measurements in a row, since it may
be replaced in two steps.
"""
_STUCK_SECONDS = 120.0
"""After this time without a written chunk, while a save is under way, the log says so,
and again each time that it has doubled.
"""

_HELD_UP_SECONDS = 5.0
"""The trainings have waited for a daemon that was held up so long. They are not overdue
before they had the time to save again.
"""


class Vitals:
    """The measurements of one daemon. `watch` takes them until it is cancelled.

    `lag` is the last delay of the event loop, in seconds. `disk_free` is the free space
    under the root in bytes, or None while the storage is gone or does not answer.
    `overdue` has the jobs that train on and are no longer saved, and `refusals` the
    living processes that this daemon refuses.
    """

    def __init__(
        self, parts: Components, started: float, lost_root: Callable[[], None] = lambda: None
    ) -> None:
        """started: the time at which the daemon started, on the monotonic clock.

        `lost_root` is called if the root is no longer there.
        """
        self._parts = parts
        self._started = started
        self._lost_root = lost_root
        self._seen_lost = 0
        self.lag = 0.0
        self.disk_free: int | None = None
        self.overdue = Overdue(is_stopped)
        self.refusals = Refusals()
        # The time at which the measurement of the disk that is under way began.
        self._measuring: float | None = None

    @property
    def uptime(self) -> float:
        """Seconds since the daemon started."""
        return time.monotonic() - self._started

    async def watch(self) -> None:
        """Measure, and tell systemd that all is well while the loop runs."""
        saver, pipelines = self._parts.saver, self._parts.pipelines
        period = notify.watchdog_seconds() or _PERIOD_SECONDS
        chunks, stuck_since, told = -1, time.monotonic(), _STUCK_SECONDS
        looked = time.monotonic()
        while True:
            self._measure_disk()
            before = time.monotonic()
            await asyncio.sleep(period)
            now = time.monotonic()
            self.lag = max(0.0, now - before - period)
            done = sum(pipeline.chunks_done for pipeline in pipelines)
            if not saver.busy or done != chunks:
                chunks, stuck_since, told = done, now, _STUCK_SECONDS
            # Memory is served in spite of a mount that hangs, so the daemon goes on.
            if now - stuck_since > told:
                told *= 2
                log_events.SAVE_STUCK.log(
                    log, "no chunk has been written for %.0f s", now - stuck_since,
                    seconds=now - stuck_since,
                )  # fmt: skip
            if self.lag > _HELD_UP_SECONDS:
                looked = now
            if now - looked > LOOK_SECONDS:
                looked = now
                self.overdue.look(self._parts.catalog.jobs.values(), time.time())
                self.refusals.look(now)
            notify.notify("WATCHDOG=1")

    def _measure_disk(self) -> None:
        """Start a measurement of the disk, unless one is under way.

        One that takes longer than `storage_timeout` means None.
        """
        if self._measuring is not None:
            if time.monotonic() > self._measuring + self._parts.config.storage_timeout:
                self.disk_free = None
            return
        self._measuring = time.monotonic()
        storage = self._parts.repository.storage
        call = asyncio.get_running_loop().run_in_executor(
            self._parts.calls.pool, lambda: (storage.free(), storage.is_lost())
        )
        call.add_done_callback(self._measured)

    def _measured(self, call: asyncio.Future[tuple[int | None, bool | None]]) -> None:
        self._measuring = None
        if call.cancelled():
            return
        self.disk_free, lost = call.result()
        self._seen_lost = self._seen_lost + 1 if lost else 0
        if self._seen_lost == _TIMES_LOST:
            self._lost_root()


def rss_bytes() -> int | None:
    """Return the bytes of memory that this process uses, or None if no descriptor is
    left to read them.
    """
    try:
        return int(psutil.Process().memory_info().rss)
    except OSError:
        return None
