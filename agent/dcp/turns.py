"""Gives the processes of a node turns at saving to one job through DCP, because a new
attempt ends the saves of the previous one.

Processes without a process group that each save their own path to one job begin an
attempt each.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from weakref import WeakValueDictionary

from ckptd.shared.location import located
from ckptd.shared.system import machine
from ckptd.shared.system.local_lock import LocalLock

log = logging.getLogger("ckptd.agent")

_LOOK_SECONDS = 0.02
_lock = threading.Lock()
_taken: WeakValueDictionary[str, LocalLock] = WeakValueDictionary()


class Turn:
    """A save's share in the turn of this process.

    The turn is over when all its saves have called `close`, or are gone after Ctrl-C.
    """

    def __init__(self, lock: LocalLock | None) -> None:
        self._lock = lock

    @property
    def held(self) -> bool:
        """True until `close`, if no other process of this user on this node can have a
        turn at the same job.
        """
        return self._lock is not None

    def close(self) -> None:
        """End this save's share."""
        self._lock = None


def take_turn(root: str, job: str, until: float) -> Turn:
    """Wait until no other process of this user on this node saves to the job through
    DCP, and return this save's share in the turn.

    Saves of one process share a turn, because they share an attempt. Returns a turn
    that is not held at the time `until`, or if locks cannot be made here.
    """
    name = f"dcp-{machine.root_digest(located(root) / job)}"
    while True:
        try:
            lock = _take(name)
        except OSError as error:
            log.debug(
                "saves of several processes to job %s do not wait for one another: %s", job, error
            )
            return Turn(None)
        if lock is not None or time.monotonic() > until:
            return Turn(lock)
        time.sleep(_LOOK_SECONDS)


def _take(name: str) -> LocalLock | None:
    with _lock:
        lock = _taken.get(name)
        if lock is None and (lock := LocalLock.take(name)) is not None:
            _taken[name] = lock
        return lock


def _after_fork() -> None:
    """Close the child's copies of the locks, which would outlive the parent."""
    global _lock
    _lock = threading.Lock()
    for lock in list(_taken.values()):
        lock.close()
    _taken.clear()


os.register_at_fork(after_in_child=_after_fork)
