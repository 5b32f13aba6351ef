"""Asks the daemon for its status once a second, once for all readers of the page.

Nobody is asked while the page has no reader. A reader that is slow gets the newest
document when it is ready for one, and misses those before: nothing is kept for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptd.daemon.page.overview import Answers, DaemonStatus, FoundProblem, SaveRates, overview
from ckptd.shared.errors import CkptdError

PERIOD_SECONDS = 1.0
RETRY_SECONDS = 5.0
"""A daemon that is gone is looked for no more often: that takes a search among all
processes.
"""


@dataclass(frozen=True, slots=True)
class DaemonView:
    """The daemon as the page sees it.

    ask: returns its status, or raises CkptdError; it may block. problems: what is wrong
    by a status. well: the sentence to say if nothing is.
    """

    ask: Callable[[], DaemonStatus]
    problems: Callable[[DaemonStatus], Sequence[FoundProblem]]
    well: Callable[[DaemonStatus], str]


class Feed:
    """The documents about the daemon, for any number of readers on one event loop.

    `history_mark` returns a number that changes with the history. `status` is the last
    answer of the daemon, or None.
    """

    def __init__(
        self,
        daemon: DaemonView,
        pool: Executor,
        history_mark: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._daemon, self._pool = daemon, pool
        self._history_mark, self._clock = history_mark, clock
        self._rates = SaveRates()
        self.status: dict[str, Any] | None = None
        self._asking: asyncio.Future[tuple[DaemonStatus, float]] | None = None
        self._asked = self._clock()
        self._answered: float | None = None
        self._silent_since: float | None = None
        self._why = ""
        self._problems: Sequence[FoundProblem] = ()
        self._well = ""
        self._readers = 0
        self._task: asyncio.Task[None] | None = None
        self._document, self._number = b"", 0
        self._newer = asyncio.Event()

    async def documents(self) -> AsyncGenerator[bytes, None]:
        """Yield the newest document as JSON, and each newer one when it is there."""
        self._readers += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(lambda _: self._wake())
        task, seen = self._task, 0
        try:
            while True:
                while self._number == seen:
                    if task.done():
                        task.result()  # raises what ended it
                    await self._newer.wait()
                seen = self._number
                yield self._document
        finally:
            self._readers -= 1
            if self._readers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None
                self._document, self._number = b"", 0

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        # Nobody asked during the pause before, so nothing is known about that time. A
        # question that still waits keeps a thread: it is not asked a second time.
        self._silent_since, self._why = None, ""
        if self._asking is not None and self._asking.done():
            self._asking = None
        due = self._clock()
        while True:
            begun = self._clock()
            if self._asking is None and begun >= due:
                self._asked = begun
                self._asking = loop.run_in_executor(self._pool, self._ask)
                self._asking.add_done_callback(_retrieve)
            if self._asking is not None:
                await asyncio.wait({self._asking}, timeout=PERIOD_SECONDS)
                if self._asking.done():
                    due = begun + (PERIOD_SECONDS if self._take(self._asking) else RETRY_SECONDS)
                    self._asking = None
            mark = await loop.run_in_executor(self._pool, self._history_mark)
            self._publish(mark)
            await asyncio.sleep(max(0.0, begun + PERIOD_SECONDS - self._clock()))

    def _ask(self) -> tuple[DaemonStatus, float]:
        """Return an answer of the daemon, and when it came. Runs in a thread."""
        return self._daemon.ask(), self._clock()

    def _take(self, asking: asyncio.Future[tuple[DaemonStatus, float]]) -> bool:
        """Take the answer of the daemon. Return False if there is none."""
        if self._silent_since is None:
            self._silent_since = self._asked
        try:
            status, now = asking.result()
            if not _same_daemon(self.status, status):
                self._rates = SaveRates()
            rated = self._rates.add(now, status)
            problems, well = self._daemon.problems(status), self._daemon.well(status)
        except (CkptdError, OSError) as error:
            self._why = str(error)
            return False
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self._why = (
                f"its answer is not understood ({error!r}), because it is of another version than "
                f"this page"
            )
            return False
        self._answered, self._silent_since = now, None
        self._why = ""
        self.status = rated
        self._problems, self._well = problems, well
        return True

    def _publish(self, mark: int) -> None:
        now, since = self._clock(), self._silent_since
        if since is None and self._asking is not None:
            since = self._asked
        answers = Answers(
            age=None if self._answered is None else now - self._answered,
            silent=0.0 if since is None else now - since,
            why=self._why,
        )
        shown = overview(self.status, self._problems, self._well, answers)
        # A browser's clock may differ from that of this node, which the history has.
        self._document = msgspec.json.encode({**shown, "history_mark": mark, "now": time.time()})
        self._number += 1
        self._wake()

    def _wake(self) -> None:
        """Let all readers look for a newer document, once."""
        newer, self._newer = self._newer, asyncio.Event()
        newer.set()


def _same_daemon(before: DaemonStatus | None, status: DaemonStatus) -> bool:
    """Return True if two successive answers are of one process."""
    if before is None or before.get("pid") != status.get("pid"):
        return False
    return bool(before.get("uptime_seconds", 0) <= status.get("uptime_seconds", 0))


def _retrieve(asking: asyncio.Future[tuple[DaemonStatus, float]]) -> None:
    """Keep asyncio from logging the error of a question whose readers have left."""
    if not asking.cancelled():
        asking.exception()
