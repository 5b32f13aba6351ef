"""Pauses Python's garbage collector while a large document is built or decoded.

A plan of 100,000 tensors makes a million small objects that all stay. The collector
goes over all objects of the process again and again while they are made, and took four
fifths of the time.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_resume = False


def _after_fork() -> None:
    """End the pauses of the parent's other threads in a forked child, which does not
    have these threads.
    """
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _resume:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Context manager.

    While any thread holds it, the collector does not run by itself. It stays off if the
    caller had switched it off.
    """
    global _pauses, _resume
    with _lock:
        _pauses += 1
        if _pauses == 1:
            _resume = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses = max(0, _pauses - 1)  # it is 0 already if the process has forked since
            if _pauses == 0 and _resume:
                gc.enable()
