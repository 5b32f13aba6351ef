"""Watched tasks: an asyncio task that ends with an error is reported, never forgotten.

`on_failure` names the function that is told, once for each daemon. `watched` replaces `loop.create_task` wherever nobody awaits the task's
result. Without it, an error in a long-lived task would be noticed only by what the task does not do any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from ckptd.shared.errors import CkptdError, InternalError

log = logging.getLogger("ckptd.tasks")

T = TypeVar("T")
Failed = Callable[[BaseException], None]
"""Called on the event loop with the error of a task that failed."""


def _log_only(error: BaseException) -> None:
    """Do nothing more: a part that is used without a daemon, as in a test, has nothing to end."""


_failed: ContextVar[Failed] = ContextVar("ckptd.daemon.tasks", default=_log_only)


def on_failure(failed: Failed) -> None:
    """Have `failed` called for every watched task that the current task, or a task or callback that it starts, will start."""
    _failed.set(failed)


def watched(work: Coroutine[Any, Any, T], name: str, failed: Failed | None = None) -> asyncio.Task[T]:
    """Start a task and report its error. `name` says in the log what the task does, like "accepting connections".

    The error goes to `failed`, or else to the function that `on_failure` was given. An error that is not ckptd's own arrives as an
    InternalError that names the task. Cancelling the task is not an error. The task can be awaited as usual.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    report = failed or _failed.get()

    def done(task: asyncio.Task[T]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s failed", name, exc_info=error)
        report(error if isinstance(error, CkptdError) else _internal(name, error))

    task.add_done_callback(done)
    return task


def _internal(name: str, error: BaseException) -> InternalError:
    wrapped = InternalError(f"{name} failed: {error!r}; the daemon's log has the traceback, and a new start recovers what was saved")
    wrapped.__cause__ = error
    return wrapped
