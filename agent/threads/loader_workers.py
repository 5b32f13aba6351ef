"""Lets the worker processes of a DataLoader outlive a SIGTERM that is meant for the
training.

torchrun ends its children by a signal to their process groups, and Slurm and systemd
signal all processes. The workers of a DataLoader get it too, and die of it. The training
then gets "DataLoader worker is killed by signal" in the middle of the step that it was
to end and save. A DataLoader itself ends its workers by SIGTERM as well. The two are
told apart by the process that has sent the signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any

from torch.utils.data import get_worker_info

from ckptd.shared.errors import InvalidRequest

_TERM = {signal.SIGTERM}
_LOOK_SECONDS = 5.0
"""Seconds between two checks that the training process is alive."""


def outlive_sigterm(worker: int = 0) -> None:
    """Have this worker process of a DataLoader ignore SIGTERM from any process but its
    parent, so that the training can end the step in which a signal to all processes
    comes, and save it.

    Pass it to the loader as `worker_init_fn`, or call it in yours. `ckptd.Batches` and
    the integrations do this by themselves.

    worker: the number of the worker, which is ignored.

    Raises InvalidRequest in a process that is no such worker.
    """
    if get_worker_info() is None:
        raise InvalidRequest(
            "outlive_sigterm() is called outside the workers of a DataLoader: pass it to the "
            "loader, DataLoader(..., worker_init_fn=ckptd.outlive_sigterm)"
        )
    # Only `sigtimedwait` tells the sender, and it gets the signal only if the main thread
    # blocks it. A thread of a library that does not block it takes it instead, and then
    # this handler is what keeps the process alive.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.register_at_fork(after_in_child=_take_sigterm)


def _end_with_parent() -> None:
    """End this process at a SIGTERM of the training process, or once that is gone.

    With the start method forkserver, the training is not the parent by `os.getppid`.
    """
    training = parent_process()
    assert training is not None
    while True:
        found = signal.sigtimedwait(_TERM, _LOOK_SECONDS)
        if (found is not None and found.si_pid == training.pid) or not training.is_alive():
            os._exit(0)  # as a worker does without ckptd


def _take_sigterm() -> None:
    """Have a forked child of a worker end at SIGTERM, as any process does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM)


@contextmanager
def sigterm_held() -> Iterator[None]:
    """Context manager. Block SIGTERM while the workers of a loader are started.

    They inherit that, and so outlive a SIGTERM that comes before their first call of
    `outlive_sigterm`. This process gets the signal afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class OutlivingInit:
    """A `worker_init_fn` that calls `outlive_sigterm`, and then the caller's own.

    given: the caller's `worker_init_fn`, or None.
    """

    def __init__(self, given: Callable[[int], Any] | None) -> None:
        self.given = given

    def __call__(self, worker: int) -> None:
        outlive_sigterm()
        if self.given is not None:
            self.given(worker)


def workers_outlive_sigterm(loader: Any) -> None:
    """Have the workers that a loader starts from now on call `outlive_sigterm`.

    Does nothing if the loader has no workers, or is of a kind without `worker_init_fn`.
    """
    given = getattr(loader, "worker_init_fn", loader)
    if given is loader or not getattr(loader, "num_workers", 0):
        return
    if not isinstance(given, OutlivingInit):
        loader.worker_init_fn = OutlivingInit(given)
