"""A daemon that the tests of one worker use, one after another, if all they want of it is
to save and to load.

Each test has a job name of its own, and a test that leaves the daemon dirty fails: one
that has killed it, or whose agents are not closed. The next test then gets a new
daemon.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.shared.errors import CkptdError
from tests.support import tiers
from tests.support.daemons import Daemon, Home

MOST_TESTS = 300
"""A daemon is replaced after so many tests, because it never forgets a job."""


class Dirty(AssertionError):
    """Raised after a test that has left something in the shared daemon."""


@dataclass(slots=True)
class LentDaemon:
    """The shared daemon, for one test.

    job: the name of the test's job. earlier: the jobs of other tests. begun: the length
    of the log when the test began.
    """

    home: Home
    job: str
    earlier: frozenset[str]
    begun: int
    _daemon: Daemon

    @property
    def directory(self) -> Path:
        """The directory of the test's job."""
        return self.home.root / self.job

    def status(self) -> dict[str, Any]:
        """Return the status of the daemon, with the jobs of this test only."""
        status = self._daemon.status()
        return status | {"jobs": [job for job in status["jobs"] if job["job"] not in self.earlier]}

    def log_text(self) -> str:
        """Return what the daemon has logged since the test began, or "" if it has been
        replaced.
        """
        if not self.home.log.exists():
            return ""
        with self.home.log.open("rb") as file:
            file.seek(self.begun)
            return file.read().decode()


class SharedDaemon:
    """The daemon of one worker, which is started when a test first needs it."""

    def __init__(self, settle: float = 20.0) -> None:
        """settle: seconds in which a test's agents must have left the daemon."""
        self._settle = settle
        self._home = Home()
        self._daemon: Daemon | None = None
        self._tests = self._first = 0
        self._jobs = frozenset[str]()
        self._sockets = 0

    @contextmanager
    def lent(self) -> Iterator[LentDaemon]:
        """Context manager. Lend the daemon to one test. Raises Dirty if the test leaves
        something in it.
        """
        daemon = self._started()
        self._tests += 1
        begun = self._home.log.stat().st_size
        lent = LentDaemon(self._home, f"job-{self._tests}", self._jobs, begun, daemon)
        yield lent
        deadline = time.monotonic() + self._settle
        while (left := self._left(lent, daemon)) and time.monotonic() < deadline:
            if (code := daemon.process.poll()) is not None:
                left = f"it has ended with {code}"
                break
            time.sleep(0.02)  # the daemon closes the connection of the status
        if left:
            log = lent.log_text()
            self.close()
            raise Dirty(f"this test has left the shared daemon dirty: {left}. Its log:\n{log}")

    def _started(self) -> Daemon:
        if self._tests - self._first >= MOST_TESTS:
            self.close()
        if self._daemon is None:
            self._home, self._first = Home(), self._tests
            with tiers.shared():
                self._daemon = Daemon(self._home, forked=True).wait_ready()
            self._jobs, self._sockets = frozenset(), _sockets(self._daemon)
        return self._daemon

    def _left(self, lent: LentDaemon, daemon: Daemon) -> str:
        """Return what a test has left in the daemon, as text."""
        more = _sockets(daemon) - self._sockets  # before the status has a connection of its own
        try:
            jobs = daemon.status()["jobs"]
        except CkptdError as error:
            return f"it does not answer: {error!r}"
        found = [
            f"job {job['job']} has {name} {job[name]}"
            for job in jobs
            if job["job"] not in self._jobs
            for name in ("ranks", "saving", "pending", "waiting")
            if job[name]
        ]
        found += [f"the segment {path.name}" for path in lent.home.segment_files()]
        if more > 0:
            found.append(f"{more} connections")
        if not found:
            self._jobs = frozenset(job["job"] for job in jobs)
        return ", ".join(found)

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.close()
            self._daemon = None
        self._home.remove()


def add_log(report: pytest.TestReport, item: pytest.Item) -> None:
    """Add what the shared daemon has logged during a test that failed to its report."""
    lent = getattr(item, "funcargs", {}).get("shared_daemon")
    if report.failed and lent is not None and (text := lent.log_text()):
        report.sections.append(("Log of the shared daemon", text))


def _sockets(daemon: Daemon) -> int:
    """Return the number of sockets that the daemon has open."""
    found = 0
    with suppress(FileNotFoundError):
        for path in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found += os.readlink(path).startswith("socket:")
    return found
