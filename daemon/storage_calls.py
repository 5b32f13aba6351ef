"""Runs blocking storage calls on threads of their own, so that a disk that hangs holds up neither the event loop nor memory.

The threads that read shared memory and the thread that writes the journal are others: a snapshot is sealed, checked and recovered from
memory while every thread here waits for the disk.

Reads have a deadline. Calls that change something have none: a change that is given up may still take effect later, for example publish a
manifest whose parts have been deleted meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import TypeVar

from ckptd.shared.errors import StorageError

T = TypeVar("T")

_WAIT_FOR_THE_DISK = ("ckptd-storage", "ckptd-write", "ckptd-journal")
_END_SECONDS = 0.5
THREADS = 16
"""Calls under way at once. They wait for the disk and take no processor time."""


def hung_threads() -> list[str]:
    """Return the names of threads that still wait for the disk after their pools were shut down. The interpreter would wait for them."""
    waiting = [thread for thread in threading.enumerate() if thread.name.startswith(_WAIT_FOR_THE_DISK)]
    for thread in waiting:
        thread.join(_END_SECONDS)  # one that is idle ends at once
    return [thread.name for thread in waiting if thread.is_alive()]


class StorageCalls:
    """`seconds`: the deadline of a read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckptd-storage")

    async def run(self, call: Callable[[], T]) -> T:
        """Wait for a call that changes something, however long it takes. A look may use it too, if its caller has a deadline of its own."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, call)

    async def read(self, action: str, call: Callable[[], T]) -> T:
        """Wait for `call`, which changes nothing. Raises StorageError (ETIMEDOUT) at the deadline, saying what could not be done."""
        async with self.deadline(action):
            return await self.run(call)

    @asynccontextmanager
    async def deadline(self, action: str) -> AsyncIterator[None]:
        """Raise StorageError (ETIMEDOUT) unless the block ends within `seconds`. `action` reads like "list /ckpts/gpt"."""
        try:
            async with asyncio.timeout(self.seconds):
                yield
        except TimeoutError:
            raise StorageError(
                f"cannot {action}: the storage has not answered for {self.seconds:g} s (is the disk or mount stuck?)", errno.ETIMEDOUT
            ) from None

    @asynccontextmanager
    async def entered(self, manager: AbstractContextManager[T]) -> AsyncIterator[T]:
        """Enter and leave a blocking context manager on a storage thread."""
        stack = ExitStack()
        value = await self.run(lambda: stack.enter_context(manager))
        try:
            yield value
        finally:
            await self.run(stack.close)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
