"""Runs blocking storage calls on threads of their own, so that a hung disk blocks
neither the event loop nor shared memory.

Other threads read shared memory and write the journal. A snapshot can therefore be
sealed, checked and recovered from memory while every thread here waits for the disk.

Reads have a deadline. Calls that change something have none, because a change that is
given up may still take effect later. It could, for example, publish a manifest whose
parts have been deleted meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import TypeVar

import aiofiles.os

from ckptd.shared.errors import StorageError

T = TypeVar("T")

_WAIT_FOR_THE_DISK = ("ckptd-storage", "ckptd-write", "ckptd-journal")
_END_SECONDS = 0.5
THREADS = 16
"""The number of calls that may run at once. They wait for the disk and take no
processor time.
"""


def hung_threads() -> list[str]:
    """Return the names of the threads that still wait for the disk after their pools
    were shut down.

    Python would wait for these threads before it exits.
    """
    waiting = [
        thread for thread in threading.enumerate() if thread.name.startswith(_WAIT_FOR_THE_DISK)
    ]
    for thread in waiting:
        thread.join(_END_SECONDS)  # an idle thread ends at once
    return [thread.name for thread in waiting if thread.is_alive()]


class StorageCalls:
    """A pool of threads for storage calls. `seconds` is the time that a read may take."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckptd-storage")

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call that changes something, wait for it however long it takes, and
        return its result.

        A read may use this, too, if its caller has a deadline of its own.
        """
        result: T = await aiofiles.os.wrap(call)(executor=self.pool)
        return result

    async def read(self, action: str, call: Callable[[], T]) -> T:
        """Run `call`, which changes nothing, and return its result.

        `action` reads like "list /ckpts/gpt".

        Raises StorageError (ETIMEDOUT), which names the action, if the call does not
        end within `seconds`.
        """
        async with self.deadline(action):
            return await self.run(call)

    @asynccontextmanager
    async def deadline(self, action: str) -> AsyncIterator[None]:
        """Context manager.

        Raise StorageError (ETIMEDOUT) if its block does not end within `seconds`.
        `action` is as in `read`.
        """
        try:
            async with asyncio.timeout(self.seconds):
                yield
        except TimeoutError:
            raise StorageError(
                f"cannot {action}: the storage has not answered for {self.seconds:g} s (is the "
                f"disk or mount stuck?)",
                errno.ETIMEDOUT,
            ) from None

    @asynccontextmanager
    async def entered(self, manager: AbstractContextManager[T]) -> AsyncIterator[T]:
        """Enter and leave a blocking context manager on a storage thread.

        Yields the value that the context manager yields.
        """
        stack = ExitStack()
        value = await self.run(lambda: stack.enter_context(manager))
        try:
            yield value
        finally:
            await self.run(stack.close)

    def close(self) -> None:
        """Cancel the calls that have not begun. Do not wait for the others."""
        self.pool.shutdown(wait=False, cancel_futures=True)
