"""A lock that lets in one public call at a time.

Other threads wait; a call inside another call of the same thread is refused.

A call inside another comes from a signal handler, or from a state_dict() that calls
ckptd. It would find half of the outer call's work done, and could wait for ever for a
lock that the interrupted call holds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType

from ckptd.agent.threads.flag import Waiters
from ckptd.shared.errors import Busy

# Seconds between two checks for a call of another thread that was interrupted before it
# could leave.
_LOOK_SECONDS = 0.05


class Nested(Busy):
    """Raised when a public call is made inside another one, in the same thread."""

    def __init__(self, name: str, outer: str) -> None:
        super().__init__(
            f"{name} was called while {outer} of the same thread is still running, from a signal "
            f"handler or from the state being saved: "
            f"set a flag in the handler, and call {name} once the running call has returned"
        )


class CallLock:
    """A lock for the public calls of one object, used as `with lock("snapshot"):`.

    It lets in one call at a time.

    `tidy`, if given, runs after a call has entered and again before it leaves.

    Ctrl-C can come between any two instructions, so a call may end without leaving the
    lock. Therefore the lock remembers the frame of the call that is in. A call whose
    frame has ended is over, and the next call takes the lock from it.
    """

    def __init__(self, tidy: Callable[[], None] = lambda: None) -> None:
        self._tidy = tidy
        self._running: _Call | None = None
        # Re-entrant: a signal handler may run inside `_take`, and either enters or is
        # refused.
        self._deciding = threading.RLock()
        self._left = Waiters()
        _locks.add(self)

    def __call__(self, name: str, timeout: float = threading.TIMEOUT_MAX) -> _Call:
        """Return a context manager for the call `name`.

        Entering it raises Nested if this thread is in another call, and TimeoutError
        after a wait of `timeout` seconds for another thread's call.
        """
        return _Call(self, name, timeout)

    @property
    def nested(self) -> str:
        """The name of the call that this thread is in, or "" if it is in none."""
        running = self._running
        return (
            running.name
            if running is not None
            and running.thread == threading.get_ident()
            and not running.over()
            else ""
        )

    def enter(self, call: _Call) -> None:
        deadline = time.monotonic() + call.timeout
        while not self._take(call):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"{call.name}() has waited {call.timeout:.1f} s for another thread's call"
                )
            self._left.wait_for(lambda: self._running is None, min(left, _LOOK_SECONDS))
        self._tidy()

    def _take(self, call: _Call) -> bool:
        with self._deciding:
            running = self._running
            if running is not None and not running.over():
                if running.thread == threading.get_ident():
                    raise Nested(f"{call.name}()", f"{running.name}()")
                return False
            self._running = call
            return True

    def leave(self, call: _Call) -> None:
        if self._running is call:
            try:
                self._tidy()
            finally:
                self._running = None
                self._left.notify()


class _Call:
    """A public call that runs or waits to run.

    `frame` is the frame of the function with the `with` statement.
    """

    def __init__(self, lock: CallLock, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self.thread = threading.get_ident()
        self.frame: FrameType | None = None
        self._lock = lock

    def __enter__(self) -> None:
        self.frame = sys._getframe(1)
        self._lock.enter(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.leave(self)
        self.frame = None

    def over(self) -> bool:
        """Return True if the function that entered has ended.

        Its local variables are then gone.

        Only a frame that has ended can be cleared. The stack of another thread must not
        be looked for with `sys._current_frames()`: before Python 3.12 that can collect
        garbage while it keeps every thread from starting or ending, and a finalizer
        that lets another thread run then stops the process for good.
        """
        frame = self.frame
        if frame is None:
            return True
        try:
            frame.clear()
        except RuntimeError:
            return False
        return True


def call_around() -> str:
    """Return the name of a public call that this thread is in, or "" if it is in none."""
    return next((lock.nested for lock in list(_locks) if lock.nested), "")


def _after_fork() -> None:
    """Forget the parent's calls in a forked child.

    Their frames are on the child's stack, but the calls are not its own.
    """
    global _locks
    _locks = weakref.WeakSet()


_locks: weakref.WeakSet[CallLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
