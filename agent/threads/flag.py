"""A flag and a list of waiters, to wait for another thread in a way that Ctrl-C and
signal handlers cannot break.

`threading.Event` and `threading.Condition` take their lock in Python code. An exception
that a signal handler raises there leaves the lock held, and the next thread that needs
it waits for ever. The classes here hold no lock while Python code runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Waiters:
    """The threads that wait until a condition is true.

    `notify` makes all of them check their condition again.
    """

    def __init__(self) -> None:
        # A lock held by each waiter; that of an interrupted waiter may stay, and is
        # harmless.
        self._asleep: set[threading.Lock] = set()

    def wait_for(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until `condition()` is true, and return True.

        Return False after `timeout` seconds; None waits without a limit.
        """
        if condition():
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        own = threading.Lock()
        own.acquire()
        self._asleep.add(own)  # before the condition is checked again, so that no change is missed
        try:
            while not condition():
                left = (
                    -1.0
                    if deadline is None
                    else min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
                )
                if not own.acquire(timeout=left):
                    return bool(condition())
            return True
        finally:
            self._asleep.discard(own)

    def notify(self) -> None:
        """Wake all waiters. Call this after the change that they wait for."""
        for lock in tuple(self._asleep):
            try:
                lock.release()
            except RuntimeError:
                pass  # the waiter is awake already, and has not checked its condition yet


class Flag:
    """An event that is set or not, like `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiters = Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.notify()

    def clear(self) -> None:
        self._set = False

    def wait(
        self, timeout: float | None = None, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until the flag is set, and return True.

        Return False after `timeout` seconds; None waits without a limit. Return False
        also once `unless` returns True, which `wake` makes the waiters notice.
        """
        self._waiters.wait_for(lambda: self._set or unless(), timeout)
        return self._set

    def wake(self) -> None:
        """Have all waiters check their `unless` again."""
        self._waiters.notify()
