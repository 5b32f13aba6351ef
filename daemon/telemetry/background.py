"""Hands the events of the log to a thread, so that no save waits for the code that
reacts to them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckptd.daemon.log_events import Fact, event_of, facts_of

MAX_WAITING = 10_000
"""The most events that wait for a thread. Later ones are counted and left out."""
END_SECONDS = 2.0
"""Seconds that a daemon which ends waits for a thread."""
_BATCH = 500


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event that was logged at `time`, in Unix seconds."""

    time: float
    name: str
    level: int
    text: str
    facts: Mapping[str, Fact]

    @property
    def job(self) -> str:
        """The job that the event is about, or ""."""
        return str(self.facts.get("job", ""))


class BackgroundHandler(logging.Handler):
    """A handler that calls `take` with the events of the log, in a thread of its own.

    Lines that tell no event are left out. `missed` is the number of events that did not
    fit into the queue; the log tells it.
    """

    def __init__(self, name: str, level: int = logging.INFO, gather_seconds: float = 0.0) -> None:
        """name: the name of the thread. gather_seconds: how long the thread waits for
        more events after the first one, so that `take` gets them together.
        """
        super().__init__(level)
        self.missed = self._told_missed = 0
        self._gather_seconds = gather_seconds
        self._queue = queue.Queue[LoggedEvent | None](MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self, events: Sequence[LoggedEvent]) -> None:
        """Do the work for some events, in their order. It must not log events.

        Called without events when the time of `pause` is over.
        """
        raise NotImplementedError

    def pause(self) -> float | None:
        """Return the seconds after which `take` is called even if no event comes, or
        None if it need not be.
        """
        return None

    def end(self) -> None:
        """Do what is left to do, after the last events."""

    def emit(self, record: logging.LogRecord) -> None:
        if not (name := event_of(record)):
            return
        event = LoggedEvent(
            record.created, name, record.levelno, record.getMessage(), facts_of(record)
        )
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.missed += 1

    def close(self) -> None:
        """Wait until the thread has taken what is in the queue, but not for long."""
        super().close()
        end = time.monotonic() + END_SECONDS
        try:
            self._queue.put(None, timeout=END_SECONDS)
        except queue.Full:
            pass
        self._thread.join(max(0.0, end - time.monotonic()))
        self._tell_missed()

    def left(self) -> list[LoggedEvent]:
        """Return the events that `take` did not get before `close` returned, and take
        them out of the queue.
        """
        found = []
        with suppress(queue.Empty):
            while True:
                if (event := self._queue.get_nowait()) is not None:
                    found.append(event)
        return found

    @property
    def is_busy(self) -> bool:
        """True after `close` if the thread had not taken everything by then."""
        return self._thread.is_alive()

    def _tell_missed(self) -> None:
        if (missed := self.missed) > self._told_missed:
            logging.getLogger("ckptd.telemetry").warning(
                "%s has left out %d events, because %d others were waiting",
                self._thread.name, missed - self._told_missed, MAX_WAITING,
            )  # fmt: skip
            self._told_missed = missed

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._gathered()
            try:
                if batch or not ended:
                    self.take(batch)
                self._tell_missed()
                if ended:
                    self.end()
            except Exception:
                logging.getLogger("ckptd.telemetry").exception(
                    "%s has failed for %d events", self._thread.name, len(batch)
                )

    def _gathered(self) -> tuple[list[LoggedEvent], bool]:
        """Wait for the next events, at most for the time of `pause`. Return them, and
        whether they are the last ones.
        """
        batch: list[LoggedEvent] = []
        try:
            event = self._queue.get(timeout=self.pause())
        except queue.Empty:
            return batch, False
        end = time.monotonic() + self._gather_seconds
        while event is not None:
            batch.append(event)
            if len(batch) == _BATCH:
                return batch, False
            try:
                event = self._queue.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return batch, False
        return batch, True
