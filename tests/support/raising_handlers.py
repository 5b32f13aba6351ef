"""Signal handlers that raise, and failpoints at which a signal arrives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.api import SignalException

from ckptd.shared.system import failpoints


class Preempted(Exception):
    """Raised by a handler of the training's own."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "Preempted": lambda: Preempted("by the scheduler"),
    "SignalException": lambda: SignalException("of torchrun", signal.SIGTERM),
    "TimeoutError": lambda: TimeoutError("the time limit"),
    "a dead worker": lambda: RuntimeError(
        "DataLoader worker (pid 1) is killed by signal: Terminated. "
    ),
    "Ctrl-C": lambda: KeyboardInterrupt(),
}
"""The exceptions that signal handlers raise, by name. Ctrl-C is the control: ckptd has
always let it out.
"""


@contextmanager
def at_failpoint(name: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Have `act` called when this thread passes the failpoint for the first time.

    Yield a list, which gets the name of the failpoint before that call.
    """
    thread, passed = threading.get_ident(), list[str]()

    def once() -> bool:
        if threading.get_ident() == thread and failpoints._armed.pop(name, None) is not None:
            passed.append(name)
            act()
        return False

    failpoints._armed[name] = failpoints._Point(once, 0)
    try:
        yield passed
    finally:
        failpoints._armed.pop(name, None)
