"""Calls functions of the caller on threads of their own, so that they hold neither the
training nor what the daemon says.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable

log = logging.getLogger("ckptd.agent")

_LAST_SECONDS = 30.0
"""Seconds that a process waits at its end for the calls that have not returned."""


class Callbacks:
    """Calls functions one after the other, in the order of `call`, each on a thread of
    its own.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def call(self, work: Callable[[], object], name: str) -> None:
        """Call `work` once all earlier calls have returned.

        This returns at once. An exception is logged with `name`.
        """
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                work()
            except Exception:
                log.exception("%s", name)

        thread = threading.Thread(target=run, name="ckptd-callback", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no threads
            run()
            return
        self._last = thread  # only now, because a thread that was not started cannot be waited for
        _threads.add(thread)


def _wait_at_the_end() -> None:
    """Wait for the calls that have not returned, because their threads end with the
    process.
    """
    deadline = time.monotonic() + _LAST_SECONDS
    threads = list(_threads)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if late := sum(thread.is_alive() for thread in threads):
        log.warning(
            "on_failure, or a function of a future, has not returned after %g s, and ends with the "
            "process (calls: %d)",
            _LAST_SECONDS,
            late,
        )


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
atexit.register(_wait_at_the_end)
