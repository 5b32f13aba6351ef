"""Watched tasks: asyncio tasks whose errors are always logged and reported.

`on_failure` sets the function that gets the errors, once for each daemon. `watched`
replaces `loop.create_task` wherever no code awaits the task's result. Without it, an
error in a long-lived task would be noticed only because the task's work is no longer
done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

from ckptd.shared.errors import CkptdError, InternalError

log = logging.getLogger("ckptd.tasks")

T = TypeVar("T")
Failed = Callable[[BaseException], None]
"""A function that is called on the event loop with the error of a task that failed."""


def _log_only(error: BaseException) -> None:
    """Do nothing: the error is logged already, and code that is used without a daemon,
    as in a test, has nothing to end.
    """


_failed: ContextVar[Failed] = ContextVar("ckptd.daemon.tasks", default=_log_only)


def on_failure(failed: Failed) -> None:
    """Set the function that is called with the error of each watched task that fails.

    It applies to the watched tasks that the current task starts from now on, and for
    those that its own tasks and callbacks start.
    """
    _failed.set(failed)


def watched(
    work: Coroutine[Any, Any, T], name: str, failed: Failed | None = None
) -> asyncio.Task[T]:
    """Start a task whose error is logged and reported.

    Return the task, which can be awaited as usual.

    name: the work of the task, for the log, for example "accepting connections".
    failed: the function that gets the error; None means the one set by `on_failure`. An
    error that is not a CkptdError arrives as an InternalError that names the task.
    Cancelling the task is not an error.
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


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all of these at once, and return their results in order.

    If some fail, raise the first one's error once all have ended.
    """
    results: list[T] = []
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def _internal(name: str, error: BaseException) -> InternalError:
    wrapped = InternalError(
        f"{name} failed: {error!r}; the daemon's log has the traceback, and a new start recovers "
        f"what was saved"
    )
    wrapped.__cause__ = error
    return wrapped
