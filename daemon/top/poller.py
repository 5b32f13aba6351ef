"""Asks a daemon for its status again and again, in a thread of its own, so that keys
work while the daemon does not answer.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import GATHER_SECONDS, read_history
from ckptd.daemon.top.contact import Contact
from ckptd.daemon.top.trends import Trend, Trends
from ckptd.shared.errors import CkptdError
from ckptd.shared.units import printable

MOST_SAVES = 2000
"""The number of saves that are read from the history at the start, of all jobs together."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a daemon, as far as it is known at one moment.

    history: why there is no history to read, or "".
    """

    contact: Contact = field(default_factory=Contact)
    trends: Mapping[str, Trend] = field(default_factory=dict)
    cpu: float | None = None
    history: str = ""


class Poller:
    """The questions to a daemon, one every `seconds`, and what the answers tell.

    `seen` is replaced after each answer. Call `start` once, and `stop` at the end.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[str, Any]],
        seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """ask: returns a status report, or raises CkptdError or OSError. clock: returns
        Unix seconds.
        """
        self.seen = Seen()
        self._ask, self._clock = ask, clock
        self._seconds = seconds
        self._trends = Trends()
        self._persisted = -1
        self._read_until: float | None = None
        self._asked: float | None = None
        self._ended = threading.Event()

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to ask. The thread ends with the process, or after `stop`.

        wake: is called after each answer.
        """
        threading.Thread(target=self._run, args=[wake], name="ckptd-top", daemon=True).start()

    def stop(self) -> None:
        """Stop asking."""
        self._ended.set()

    def waited(self) -> float:
        """Return the seconds for which the last question has no answer, or 0.0."""
        asked = self._asked
        return 0.0 if asked is None else max(0.0, self._clock() - asked)

    def ask_once(self) -> None:
        """Ask, and read what is new in the history. An error becomes part of `seen`, even
        one that nobody expects: the thread must outlive it.
        """
        before = self.seen
        asked = self._asked = self._clock()
        try:
            status = self._ask()
            contact = before.contact.answered(status, self._clock())
            self._trends.add_report(status)
            history = self._read(status)
        except Exception as error:
            contact, history = before.contact.failed(_problem(error), asked), before.history
        finally:
            self._asked = None
        self.seen = Seen(contact, self._trends.jobs(), self._trends.cpu, history)

    def _run(self, wake: Callable[[], None]) -> None:
        while not self._ended.wait(self._seconds):
            self.ask_once()
            wake()

    def _read(self, status: Mapping[str, Any]) -> str:
        """Read the saves that the history has since the last time. Return why that is
        not possible, or "".

        The daemon writes a save later than it counts it. So the history is read after a
        save until enough time is over, and once more after that: the next question may
        come much later.
        """
        file, persisted = status.get("history"), status["counters"]["persisted"]
        if file is None:
            return "the daemon keeps no history"
        if persisted != self._persisted:
            self._persisted = persisted
            self._read_until = self._clock() + 2 * GATHER_SECONDS
        elif self._read_until is None:
            return self.seen.history
        elif self._clock() > self._read_until:
            self._read_until = None
        try:
            self._trends.add_saves(self._saves(Path(file)))
        except (CkptdError, OSError, sqlite3.Error) as error:
            return printable(str(error))
        return ""

    def _saves(self, file: Path) -> Sequence[LoggedEvent]:
        if not file.exists():  # nothing has happened yet
            return []
        return read_history(file, names=["save.done"], since=self._trends.last, limit=MOST_SAVES)


def _problem(error: Exception) -> str:
    if isinstance(error, CkptdError | OSError):
        return str(error)
    return (
        f"its answer is not understood ({type(error).__name__}: {error}): "
        "install the same version of ckptd in both places"
    )
