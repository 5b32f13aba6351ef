"""Checks sealed slots and writes them as parts: reads, checksums, encodes and writes
chunks within a budget of bytes.

The work runs on worker threads. The buffers take at most `memory_budget` bytes, however
many parts are being written: a chunk takes one buffer to be checked, and two to be
written. The pipeline owns the files of a part, through `shared/formats/part_writer.py`,
from their creation until they are durable. It journals nothing and knows no catalog.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from crc32c import crc32c

from ckptd.daemon.chunks.workers import Buffers, Workers
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.binary import PIECE
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.non_finite import Learned, NonFinite
from ckptd.shared.formats.part import Chunk, PartIndex
from ckptd.shared.formats.part_writer import PartWriter
from ckptd.shared.formats.plan import ChunkRange, Plan, chunk_ranges, with_values
from ckptd.shared.formats.reuse import (
    NOTHING,
    ChunkCheck,
    StoredPart,
    choose,
    is_steady,
    new_hasher,
    unchanged,
)
from ckptd.shared.formats.segment import (
    SegmentHeader,
    read_check,
    read_document,
    read_pieces,
)
from ckptd.shared.formats.snapshot_request import SnapshotRequest

T = TypeVar("T")


class Plans:
    """A cache of plans that were decoded and found sound, by signature, with the places
    whose values should be finite.

    Their documents take at most `most` bytes, unless only one is kept.

    A structure seldom changes, and decoding a plan of ten thousand items takes 50 ms.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[Plan, Learned | None, int]] = OrderedDict()

    def decode(self, signature: bytes, document: bytes) -> tuple[Plan, Learned | None]:
        """Return the plan of `document`, which has this signature, and the places whose
        values should be finite, or None if the plan names none.

        Raises IntegrityError if it is not a sound plan.
        """
        with self._lock:
            if signature in self._known:
                self._known.move_to_end(signature)
                return self._known[signature][:2]
        plan = Plan.decode(document)
        learned = Learned.of(plan)
        with self._lock:
            if signature not in self._known:
                self._known[signature] = plan, learned, len(document)
                self._size += len(document)
            while self._size > self._most and len(self._known) > 1:
                self._size -= self._known.popitem(last=False)[1][2]
        return plan, learned


_plans = Plans(most=32 << 20)  # bytes of documents; a decoded plan takes several times as many

_MOST_COUNTS = 10_000
"""The most counts of one part that are kept for the next one. A chunk without a known
count is counted again.
"""
_NICE_WRITERS = 5
"""The nice value of the threads that write. The training comes first, and so do the
checksums: without them, damage would go unnoticed.

With 10, a writer whose write has ended waits so long for a core that the disk is idle:
on 2 cores, a raw save took 18 % longer. With 5, it takes 5 % longer.
"""


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """A sealed slot whose documents were read and verified.

    `fd` is a descriptor of its segment. `plan_document` is the plan as it was sealed.
    `learned` are the places whose values are counted, None if the plan names none.
    `ranges` are all chunks of the slot, in order. `crcs` are their checksums from the
    check area, or None if it has none.
    """

    fd: int
    header: SegmentHeader
    plan: Plan
    learned: Learned | None
    plan_document: bytes
    request: SnapshotRequest
    ranges: list[ChunkRange]
    crcs: list[int] | None

    @classmethod
    def read(cls, fd: int, header: SegmentHeader) -> SealedSlot:
        """Read and verify the documents of a sealed slot, and read its check area.

        Raises IntegrityError if a document is damaged or the plan is not sound.
        """
        document = read_document(fd, header, header.plan, "plan")
        if hashlib.sha256(document).digest() != header.signature:
            raise IntegrityError(
                f"plan document of {header.job} step {header.step} is not the one that was sealed"
            )
        plan, learned = _plans.decode(header.signature, document)
        request = SnapshotRequest.decode(read_document(fd, header, header.request, "request"))
        values = (header.values.offset, header.values.length)
        if values[0] < plan.data_length or plan.data_length > header.capacity:
            raise IntegrityError(
                f"documents of {header.job} step {header.step} overlap its tensors"
            )
        ranges = chunk_ranges(with_values(plan.regions, values), header.chunk_size)
        crcs = read_check(fd, header)
        return cls(
            fd,
            header,
            plan,
            learned,
            document,
            request,
            ranges,
            crcs if crcs is not None and len(crcs) == len(ranges) else None,
        )

    def compare(self, number: int, sealed: int, found: int) -> None:
        """Raise IntegrityError if the crc32c that was `found` for the chunk of this
        number is not that of the seal.
        """
        if sealed != found:
            raise IntegrityError(
                f"chunk {number} of {self.header.job} step {self.header.step} has changed in "
                f"memory since it was sealed"
            )

    def check(
        self,
        chunk: ChunkRange,
        buffer: memoryview,
        *,
        with_digest: bool,
        non_finite: Counter[int] | None = None,
    ) -> ChunkCheck:
        """Read a chunk through `buffer`, and return its checksum, with its digest on
        request.

        A buffer that is as long as the chunk holds its bytes afterwards. `non_finite`, if
        given, gets how many values are not finite, by the numbers of their tensors. They
        are counted while the bytes are in the CPU's cache.
        """
        crc, hasher, at = 0, new_hasher() if with_digest else None, chunk.offset
        for piece in read_pieces(self.fd, self.header, chunk.offset, chunk.length, buffer):
            crc = crc32c(piece, crc)
            if hasher is not None:
                hasher.update(piece)
            if non_finite is not None and self.learned is not None:
                non_finite.update(self.learned.count(piece, at))
            at += len(piece)
        return ChunkCheck(crc, b"" if hasher is None else hasher.digest())

    def digest(self, chunk: ChunkRange, buffer: memoryview) -> bytes:
        """Read a chunk through `buffer`, and return its digest."""
        hasher = new_hasher()
        for piece in read_pieces(self.fd, self.header, chunk.offset, chunk.length, buffer):
            hasher.update(piece)
        return hasher.digest()


class Pipeline:
    """Two sets of worker threads: one reads and checks shared memory, the other encodes
    and writes parts.

    The second set waits for the disk. It has twice as many threads as the first set, so
    that some threads can write while others encode. The first set never waits for the
    disk, so that slots are still checked when the disk hangs. `bytes_read` and
    `bytes_written` count the raw and the stored bytes of all parts written so far.
    """

    def __init__(
        self, threads: int, memory_budget: int, chunk_size: int, cpus: set[int] | None = None
    ) -> None:
        """cpus: the CPUs on which the threads may run, or None for all that the daemon
        may use.
        """
        self._memory = Workers(
            "ckptd-memory", threads, memory_budget // 4, min(PIECE, chunk_size), 1, cpus=cpus
        )
        self._writers = Workers(
            "ckptd-write", 2 * threads, memory_budget * 3 // 4, chunk_size, 2, _NICE_WRITERS, cpus
        )
        self.bytes_read = self.bytes_written = 0

    @property
    def chunks_done(self) -> int:
        """The number of chunks checked or written so far.

        While a save is under way, its growth shows that the threads make progress.
        """
        return self._memory.chunks_done + self._writers.chunks_done

    @property
    def writers(self) -> int:
        """The number of threads that encode and write."""
        return self._writers.threads

    async def run(self, function: Callable[[], T]) -> T:
        """Run a call on the threads that read shared memory, and return its result.

        The call must not wait for the disk.
        """
        return await self._memory.run(function)

    async def checksum(self, slot: SealedSlot, *, with_digests: bool = False) -> list[ChunkCheck]:
        """Return the checksum of each chunk of a sealed slot, in order.

        Raises IntegrityError if the segment has been cut short.
        """

        def work(number: int, buffers: Buffers) -> ChunkCheck:
            with memoryview(buffers[0]) as piece:
                return slot.check(slot.ranges[number], piece, with_digest=with_digests)

        return await self._memory.each(slot.ranges, work, whole=False)

    async def write_part(
        self,
        slot: SealedSlot,
        writer: PartWriter,
        tag: str,
        wait_for_checks: Callable[[], Awaitable[list[ChunkCheck]]],
        written: Callable[[int], None] = lambda length: None,
        before: StoredPart | None = None,
        at_once: int | None = None,
        *,
        with_digests: bool = False,
    ) -> tuple[PartEntry, StoredPart]:
        """Write one part durably.

        Return its entry for the manifest, and what a later part needs to link its
        files.

        Chunks that are those of the part `before` are not written again, if that part
        was steady. Then the first chunk is written only when the checksums are known.
        At most `at_once` threads work on the part, by default all.

        `wait_for_checks` returns the checksums of the seal, or waits for `checksum` to
        compute them. `written` is called on the event loop with the raw bytes of each
        chunk that has been written. With `with_digests`, a later part can link the
        files of this one.

        After a failure the files are removed. Raises IntegrityError if the written
        bytes of a chunk do not have its checksum, OSError if the part cannot be
        written, and what `wait_for_checks` raises.
        """
        header = slot.header
        assert header.step is not None
        index = PartIndex(
            job=header.job, attempt=header.attempt, step=header.step, rank=header.rank,
            world_size=header.world_size, tag=tag, signature=header.signature,
            plan=slot.plan_document, request=slot.request.encode(), values=(header.values.offset,
            header.values.length), chunk_size=header.chunk_size, chunks=[],
        )  # fmt: skip

        non_finite = dict[int, Counter[int]]()

        def work(number: int, buffers: Buffers) -> tuple[Chunk, bytes]:
            chunk, counts = writer.ranges[number], Counter[int]()
            with memoryview(buffers[0]) as raw, memoryview(buffers[1]) as stored:
                check = slot.check(
                    chunk, raw[: chunk.length], with_digest=with_digests, non_finite=counts
                )
                if counts:
                    non_finite[chunk.offset] = counts
                return writer.chunk(chunk, raw, stored, check.crc), check.digest

        reuse, digests = NOTHING, dict[int, bytes]()
        if before is not None and before.steady:
            checks = await self._with_digests(slot, before, await wait_for_checks())
            reuse = choose(before, slot.ranges, checks)
            digests = {
                chunk.offset: check.digest for chunk, check in zip(slot.ranges, checks, strict=True)
            }
        try:
            await self._writers.run(
                lambda: writer.create(
                    index, slot.ranges, len(index.plan) + len(index.request), reuse
                )
            )
            written(
                sum(chunk.length for chunk in slot.ranges)
                - sum(chunk.length for chunk in writer.ranges)
            )
            found = await self._writers.each(writer.ranges, work, written, at_once=at_once)
            if before is not None and len(writer.ranges) < len(slot.ranges):
                non_finite |= await self._non_finite_of_linked(slot, before, writer.ranges)
            by_offset = {chunk.raw_offset: chunk for chunk, _ in found}
            digests |= {chunk.raw_offset: digest for chunk, digest in found}
            chunks = [
                by_offset.get(chunk.offset) or reuse.chunks[chunk.offset].chunk
                for chunk in slot.ranges
            ]
            checks = await wait_for_checks()
            for number, (chunk, check) in enumerate(zip(chunks, checks, strict=True)):
                slot.compare(number, check.crc, chunk.raw_crc)

            def finish() -> PartEntry:
                count = None if slot.learned is None else NonFinite.of(non_finite.values())
                counted = msgspec.structs.replace(index, non_finite=count)
                return writer.finish(counted, chunks, items=len(slot.plan.items))

            entry = await self._writers.run(finish)
        except BaseException:
            await self._writers.run(writer.discard)
            raise
        self.bytes_read += entry.raw_bytes
        self.bytes_written += entry.new_bytes
        steady = is_steady(before, slot.ranges, checks)
        return entry, writer.stored(
            [digests[chunk.offset] for chunk in slot.ranges],
            steady=steady,
            non_finite=non_finite
            if slot.learned is not None and sum(map(len, non_finite.values())) <= _MOST_COUNTS
            else None,
        )

    async def _non_finite_of_linked(
        self, slot: SealedSlot, before: StoredPart, written: Sequence[ChunkRange]
    ) -> dict[int, Counter[int]]:
        """Return how many values are not finite in the chunks that are linked, all but
        those in `written`.

        They are known if the part `before` has the same plan, and counted again otherwise.
        """
        if slot.learned is None:
            return {}
        offsets = {chunk.offset for chunk in written}
        linked = [chunk for chunk in slot.ranges if chunk.offset not in offsets]
        if before.signature == slot.header.signature and before.non_finite is not None:
            known = before.non_finite
            return {c.offset: known[c.offset] for c in linked if c.offset in known}

        def work(number: int, buffers: Buffers) -> Counter[int]:
            counts = Counter[int]()
            with memoryview(buffers[0]) as piece:
                slot.check(linked[number], piece, with_digest=False, non_finite=counts)
            return counts

        found = await self._memory.each(linked, work, whole=False)
        return {chunk.offset: counts for chunk, counts in zip(linked, found, strict=True) if counts}

    async def _with_digests(
        self, slot: SealedSlot, before: StoredPart, checks: list[ChunkCheck]
    ) -> list[ChunkCheck]:
        """Return the checksums with the digests of all chunks that have the crc32c of
        the chunk there in the part `before`.

        A chunk whose digest in that part is not known gets none. A chunk that has
        changed since the seal gets another digest than there. It is therefore written,
        and then compared with its checksum.
        """
        same = unchanged(before, slot.ranges, checks)
        numbers = [
            number
            for number, place in same.items()
            if before.digests[place] and not checks[number].digest
        ]

        def work(position: int, buffers: Buffers) -> bytes:
            with memoryview(buffers[0]) as piece:
                return slot.digest(slot.ranges[numbers[position]], piece)

        digests = await self._memory.each(
            [slot.ranges[number] for number in numbers], work, whole=False
        )
        made = dict(zip(numbers, digests, strict=True))
        return [
            ChunkCheck(check.crc, made.get(number, check.digest))
            for number, check in enumerate(checks)
        ]

    def close(self) -> None:
        self._memory.close()
        self._writers.close()
