"""Worker threads that process the chunks of a slot with a bounded number of
page-aligned buffers.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from ckptd.daemon.tasks import all_of
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.binary import align
from ckptd.shared.formats.plan import ChunkRange

T = TypeVar("T")

Buffers = Sequence[mmap.mmap]
"""The buffers for one chunk. Each has room for a chunk of the daemon's chunk size, or
for a larger one that an earlier daemon made.
"""


class Workers:
    """A pool of `threads` worker threads.

    Each chunk that is processed takes `buffers` buffers.

    The buffers in use take at most `memory` bytes, with two exceptions: one chunk can
    always be processed, and the larger chunks of a slot that an earlier daemon made
    take larger buffers. `chunks_done` counts the chunks that have been processed.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        memory: int,
        chunk_size: int,
        buffers: int,
        nice: int = 0,
        cpus: set[int] | None = None,
    ) -> None:
        """nice: the nice value of the threads, from which their I/O priority follows
        (ioprio_set(2)).

        cpus: the CPUs on which the threads may run, or None for all that the process
        may use.
        """
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, name, _set_up_thread, (nice, cpus))
        self.chunks_done = 0
        self._buffers, self._buffer_size = buffers, align(chunk_size)
        self._tokens = asyncio.Semaphore(
            max(1, min(2 * threads, memory // (buffers * self._buffer_size)))
        )
        self._free: list[Buffers] = []
        self._taken = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run a call on one of the threads, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)

    async def each(
        self,
        ranges: Sequence[ChunkRange],
        work: Callable[[int, Buffers], T],
        done: Callable[[int], None] = lambda length: None,
        *,
        whole: bool = True,
        at_once: int | None = None,
    ) -> list[T]:
        """Call `work` with the number and the buffers of each chunk, on several
        threads. Return the results in the order of the chunks.

        `at_once` is the most threads that do so, by default all. `done` is called with
        the length of each chunk that is finished, on the event loop. With `whole` off,
        the buffers need not have room for a whole chunk. After a failure no other chunk
        is begun, and the error is raised once all threads have stopped. Raises
        IntegrityError if a chunk has no result.
        """
        results: dict[int, T] = {}
        numbers, size = (
            iter(range(len(ranges))),
            align(max((chunk.length for chunk in ranges), default=0)) if whole else 0,
        )
        failed = False

        async def worker() -> None:
            nonlocal failed
            for number in numbers:
                if failed:
                    return
                async with self._borrowed(size) as buffers:
                    try:
                        results[number] = await self.run(lambda n=number, b=buffers: work(n, b))  # type: ignore[misc]
                        self.chunks_done += 1
                        done(ranges[number].length)
                    except BaseException:
                        failed = True
                        raise

        await all_of(
            [worker() for _ in range(min(at_once or self.threads, self.threads, len(ranges)))]
        )
        # A missing chunk fails all: every planned chunk must be accounted for.
        if len(results) != len(ranges):
            raise IntegrityError(f"there are {len(results)} results for {len(ranges)} chunks")
        return [results[number] for number in range(len(ranges))]

    @asynccontextmanager
    async def _borrowed(self, size: int) -> AsyncIterator[Buffers]:
        """Context manager.

        Lends the buffers for one chunk, each of `size` bytes or more, and waits until
        the budget allows them.
        """
        async with self._tokens:
            if size > self._buffer_size:  # a slot that an earlier daemon made, with larger chunks
                yield self._new(size)
                return
            buffers = self._free.pop() if self._free else self._new(self._buffer_size)
            self._taken += 1
            try:
                yield buffers
            finally:
                self._taken -= 1
                self._free.append(buffers)
                # idle: return the pages to the kernel, but keep the address space
                if self._taken == 0:
                    for idle in self._free:
                        for buffer in idle:
                            buffer.madvise(mmap.MADV_DONTNEED)

    def _new(self, size: int) -> Buffers:
        # Private, because the pages of a shared mapping stay in memory after
        # MADV_DONTNEED.
        made = [
            mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(self._buffers)
        ]
        for buffer in made:
            with suppress(OSError):  # a kernel without huge pages
                # A direct write then has few long segments: 0.71 instead of 0.87 s for
                # 1.4 GB.
                buffer.madvise(mmap.MADV_HUGEPAGE)
        return made

    def close(self) -> None:
        """Cancel the calls that have not begun. Do not wait for the others."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def _set_up_thread(nice: int, cpus: set[int] | None) -> None:
    """Give the calling thread this nice value, unless its own is higher, and these
    CPUs. Ignore what a container forbids.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
    if cpus is not None:
        with suppress(OSError):
            os.sched_setaffinity(thread, cpus)
