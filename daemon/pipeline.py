"""The save plan on worker threads: pread, checksum, encode, aligned write, all under one byte budget.

A chunk costs two buffers, taken from a pool that holds `memory_budget` bytes at most, however many parts are being written. Owns the
part file, through `shared/part_writer.py`, from its creation to its sync; journals nothing and knows no catalog.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from crc32c import crc32c

from ckptd.shared.binary import align
from ckptd.shared.codec import Codec
from ckptd.shared.errors import IntegrityError
from ckptd.shared.fs import FileSystem, read_exactly
from ckptd.shared.manifest import PartEntry
from ckptd.shared.part import Chunk, PartIndex
from ckptd.shared.part_writer import ONE_FILE, PartWriter, Spread
from ckptd.shared.plan import ChunkRange, Plan, chunk_ranges, with_values
from ckptd.shared.request import Request
from ckptd.shared.segment import SegmentHeader, read_document

T = TypeVar("T")


@dataclass(slots=True)
class Buffers:
    """Two page-aligned buffers of one chunk: raw bytes in, stored bytes out."""

    raw: mmap.mmap
    stored: mmap.mmap


class Plans:
    """Plans that were decoded and found sound, by their signature: a structure seldom changes, and ten thousand items take 50 ms."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[Plan, int]] = OrderedDict()

    def decode(self, signature: bytes, document: bytes) -> Plan:
        """`signature` is that of `document`. Raises IntegrityError."""
        with self._lock:
            if signature in self._known:
                self._known.move_to_end(signature)
                return self._known[signature][0]
        plan = Plan.decode(document)
        with self._lock:
            if signature not in self._known:
                self._known[signature] = plan, len(document)
                self._size += len(document)
            while self._size > self._most and len(self._known) > 1:
                self._size -= self._known.popitem(last=False)[1][1]
        return plan


_plans = Plans(most=32 << 20)  # bytes of documents; decoded they take several times that


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """A sealed slot, its documents read and verified."""

    fd: int
    header: SegmentHeader
    plan: Plan
    plan_document: bytes
    request: Request
    ranges: list[ChunkRange]

    @classmethod
    def read(cls, fd: int, header: SegmentHeader) -> SealedSlot:
        """Raises IntegrityError for documents that are damaged, or a plan that is not sound."""
        document = read_document(fd, header, header.plan, "plan")
        if hashlib.sha256(document).digest() != header.signature:
            raise IntegrityError(f"plan document of {header.job} step {header.step} is not the one that was sealed")
        plan = _plans.decode(header.signature, document)
        request = Request.decode(read_document(fd, header, header.request, "request"))
        values = (header.values.offset, header.values.length)
        if values[0] < plan.data_length or plan.data_length > header.capacity:
            raise IntegrityError(f"documents of {header.job} step {header.step} lie over its tensors")
        return cls(fd, header, plan, document, request, chunk_ranges(with_values(plan.regions, values), header.chunk_size))

    def pread(self, chunk: ChunkRange, buffer: memoryview) -> None:
        if read_exactly(self.fd, buffer, self.header.data_offset + chunk.offset) < chunk.length:
            raise IntegrityError("the segment has been cut short: that copy in memory is lost")


class Pipeline:
    """Worker threads and buffers, shared by all parts under way. `busy_since` tells the watchdog whether a thread makes progress."""

    def __init__(self, fs: FileSystem, threads: int, memory_budget: int, chunk_size: int, spread: Spread = ONE_FILE) -> None:
        self._fs, self._spread = fs, spread
        self._threads = threads
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="ckptd-worker")
        self._buffer_size = align(chunk_size)
        self._tokens = asyncio.Semaphore(min(2 * threads, memory_budget // (2 * self._buffer_size)))
        self._free: list[Buffers] = []
        self._out = 0
        self.bytes_read = self.bytes_written = self.chunks_done = 0

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)

    @asynccontextmanager
    async def _buffers(self, size: int) -> AsyncIterator[Buffers]:
        """Two of `size` bytes or more."""
        async with self._tokens:
            if size > self._buffer_size:  # of a slot that an earlier daemon made, with larger chunks
                yield Buffers(mmap.mmap(-1, size), mmap.mmap(-1, size))
                return
            buffers = self._free.pop() if self._free else Buffers(mmap.mmap(-1, self._buffer_size), mmap.mmap(-1, self._buffer_size))
            self._out += 1
            try:
                yield buffers
            finally:
                self._out -= 1
                self._free.append(buffers)
                if self._out == 0:  # idle: give the pages back, keep the address space
                    for idle in self._free:
                        idle.raw.madvise(mmap.MADV_DONTNEED)
                        idle.stored.madvise(mmap.MADV_DONTNEED)

    async def _each(self, ranges: Sequence[ChunkRange], work: Callable[[int, Buffers], T]) -> list[T]:
        """`work` on every chunk, as many at once as there are threads; the first failure ends it and is raised once all have stopped."""
        results: dict[int, T] = {}
        numbers, size = iter(range(len(ranges))), align(max((chunk.length for chunk in ranges), default=0))
        failed = False

        async def worker() -> None:
            nonlocal failed
            for number in numbers:
                if failed:
                    return
                async with self._buffers(size) as buffers:
                    try:
                        results[number] = await self.run(lambda n=number, b=buffers: work(n, b))  # type: ignore[misc]
                        self.chunks_done += 1
                    except BaseException:
                        failed = True
                        raise

        outcomes = await asyncio.gather(*(worker() for _ in range(min(self._threads, len(ranges)))), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if len(results) != len(ranges):  # every planned chunk is accounted for, or nothing is
            raise IntegrityError(f"{len(results)} of {len(ranges)} chunks have a result")
        return [results[number] for number in range(len(ranges))]

    async def checksum(self, slot: SealedSlot) -> list[int]:
        """crc32c of each chunk of a sealed slot."""

        def work(number: int, buffers: Buffers) -> int:
            chunk = slot.ranges[number]
            with memoryview(buffers.raw) as whole, whole[: chunk.length] as raw:
                slot.pread(chunk, raw)
                return crc32c(raw)

        return await self._each(slot.ranges, work)

    async def write_part(self, slot: SealedSlot, checks: list[int], codec: Codec, directory: int, tag: str, nonce: bytes) -> PartEntry:
        """Write one part durably into `directory`: created, filled, synced, the directory synced. On failure its files are removed.

        Raises IntegrityError if memory no longer holds what `checks` says, else OSError.
        """
        header = slot.header
        assert header.step is not None
        index = PartIndex(
            job=header.job, attempt=header.attempt, step=header.step, rank=header.rank, world_size=header.world_size, tag=tag,
            signature=header.signature, plan=slot.plan_document, request=slot.request.encode(),
            values=(header.values.offset, header.values.length), chunk_size=header.chunk_size, chunks=[],
        )  # fmt: skip
        writer = PartWriter(self._fs, directory, nonce, codec, self._spread)

        def work(number: int, buffers: Buffers) -> Chunk:
            chunk = slot.ranges[number]
            with memoryview(buffers.raw) as raw, memoryview(buffers.stored) as stored:
                slot.pread(chunk, raw[: chunk.length])
                written = writer.chunk(chunk, raw, stored)
            if written.raw_crc != checks[number]:
                raise IntegrityError(f"chunk {number} of {header.job} step {header.step} has changed in memory since it was sealed")
            return written

        try:
            await self.run(lambda: writer.create(index, slot.ranges, len(index.plan) + len(index.request)))
            chunks = await self._each(slot.ranges, work)
            entry = await self.run(lambda: writer.finish(index, chunks, items=len(slot.plan.items)))
        except BaseException:
            await self.run(writer.discard)
            raise
        self.bytes_read += entry.raw_bytes
        self.bytes_written += entry.bytes
        return entry

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
