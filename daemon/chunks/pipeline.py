"""Checks sealed slots and writes them as parts: reads, checksums, encodes and writes
chunks within a budget of bytes.

The work runs on worker threads. The buffers take at most `memory_budget` bytes, however
many parts are being written: a chunk takes one buffer to be checked, and two to be
written. The pipeline owns the files of a part, through `shared/formats/part_writer.py`,
from their creation until they are durable. It journals nothing and knows no catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from ckptd.daemon.chunks.base_slot import BaseSlot
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.chunks.workers import Buffers, Workers
from ckptd.shared.codecs.delta import DELTA
from ckptd.shared.codecs.speeds import Speeds
from ckptd.shared.formats.binary import PIECE
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.non_finite import NonFinite
from ckptd.shared.formats.part import Chunk, PartIndex
from ckptd.shared.formats.part_writer import PartWriter
from ckptd.shared.formats.plan import ChunkRange
from ckptd.shared.formats.reuse import (
    MOST_SHARE,
    MOST_SHARE_FOR_BYTES,
    NOTHING,
    ChunkCheck,
    StoredPart,
    choose,
    is_steady,
    may_have_delta,
    unchanged,
)

T = TypeVar("T")


_TURNS = 8
"""A chunk that was not worth a delta is sampled again at one save in so many."""
_FIRST = 4
"""The least chunks that are sampled first. With 8 MiB each, a sample of one in eight takes
about a hundredth of the time of a save.
"""
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


def first_and_rest(numbers: list[int], turn: int) -> tuple[list[int], list[int]]:
    """Return the chunks that are sampled first, from all over the part, and the rest.

    The first ones are an eighth of `numbers`, but at least `_FIRST`. Which ones it is
    depends on `turn`, a number that changes from save to save.
    """
    apart = max(1, min(_TURNS, len(numbers) // _FIRST))
    first = numbers[turn % apart :: apart]
    chosen = set(first)
    return first, [number for number in numbers if number not in chosen]


class Pipeline:
    """Two sets of worker threads: one reads and checks shared memory, the other encodes
    and writes parts.

    The second set waits for the disk. It has twice as many threads as the first set, so
    that some threads can write while others encode. The first set never waits for the
    disk, so that slots are still checked when the disk hangs. `bytes_read` and
    `bytes_written` count the raw and the stored bytes of all parts written so far, and
    `chunks` their chunks, by how they are stored: "whole", "delta" or "linked".
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
        self.chunks = Counter[str]()

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
        base_slot: BaseSlot | None = None,
        most_deltas: int = 0,
        for_bytes: bool = False,
    ) -> tuple[PartEntry, StoredPart]:
        """Write one part durably.

        Return its entry for the manifest, and what a later part needs to link its
        files.

        Chunks that are those of the part `before` are not written again, if that part
        was steady. Then the first chunk is written only when the checksums are known.
        At most `at_once` threads work on the part, by default all. Chunks that change
        little are stored as deltas of the part `before`, as long as `base_slot` holds
        the bytes of that part, with at most `most_deltas` deltas in a chain: where the
        part is durable as soon, or with `for_bytes` where it becomes smaller.

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
                base, crc = writer.base_of(chunk), check.crc
                if base is not None and base_slot is not None:
                    read = partial(base_slot.read, chunk, stored, base.raw_crc)
                    delta = writer.delta(chunk, raw, stored, crc, read)
                    if delta is not None:
                        return delta, check.digest
                    # The buffer no longer has the bytes of the chunk.
                    crc = slot.check(chunk, raw[: chunk.length], with_digest=False).crc
                return writer.chunk(chunk, raw, stored, crc), check.digest

        reuse, digests = NOTHING, dict[int, bytes]()
        resisting: frozenset[int] = frozenset()
        most_share = MOST_SHARE_FOR_BYTES if for_bytes else MOST_SHARE
        if before is not None and (before.steady or base_slot is not None):
            checks, shares = None, dict[int, float]()
            if before.steady:
                checks = await self._with_digests(slot, before, await wait_for_checks())
                digests = {
                    chunk.offset: check.digest
                    for chunk, check in zip(slot.ranges, checks, strict=True)
                }
            if base_slot is not None:
                speeds = None if for_bytes else writer.speeds
                shares, resisting = await self._delta_shares(
                    slot, base_slot, before, most_share, speeds
                )
            # A long chain of many chunks takes a second.
            older, known = before, checks
            reuse = await self._memory.run(
                lambda: choose(older, slot.ranges, known, shares, most_deltas, most_share)
            )
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
                by_offset.get(chunk.offset) or reuse.chunks[chunk.offset].entry
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
        deltas = sum(chunk.codec == DELTA for chunk, _ in found)
        self.chunks.update(
            whole=len(found) - deltas, delta=deltas, linked=len(slot.ranges) - len(found)
        )
        steady = is_steady(before, slot.ranges, checks)
        return entry, writer.stored(
            [digests[chunk.offset] for chunk in slot.ranges],
            steady=steady,
            resisting=resisting | writer.in_vain,
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

    async def _delta_shares(
        self,
        slot: SealedSlot,
        base_slot: BaseSlot,
        before: StoredPart,
        most_share: float,
        speeds: Speeds | None,
    ) -> tuple[dict[int, float], frozenset[int]]:
        """Return the expected length of the delta of each chunk that is worth one, as a
        fraction of that of the chunk, by its number; and the offsets of the other chunks.

        `speeds`: those at which the delta must be durable as soon as the whole chunk, or
        None if it need only be smaller.

        Of the chunks that were not worth a delta in the part `before`, only each eighth
        is sampled again. Training changes most chunks too much at each step. Of the
        others, a few are sampled first, and the rest only if one of these is worth a
        delta: so samples take little time where none pays. A chunk whose delta is too
        long for any chain is not worth one. It would only lie in one file with chunks
        that have short deltas, and take so many of the bytes that the file is not linked.
        """
        assert slot.header.step is not None
        places = before.places(slot.ranges)
        turn = slot.header.step % _TURNS
        numbers = [
            number
            for number, chunk in enumerate(slot.ranges)
            if number in places
            and (chunk.offset not in before.resisting or number % _TURNS == turn)
        ]
        shares = dict[int, float]()

        def worth(number: int) -> float | None:
            """Return the expected share of a delta, or None if it is not worth it."""
            chunk, stored = slot.ranges[number], before.chunks[places[number]]
            found = base_slot.foreseen(slot, chunk)
            if found is None or not may_have_delta(stored, found.share, most_share):
                return None
            if speeds is not None and not speeds.delta_pays(*found, stored.whole_share):
                return None
            return found.share

        for group in first_and_rest(numbers, turn):

            def sample(position: int, _: Buffers, group: list[int] = group) -> float | None:
                return worth(group[position])

            ranges = [slot.ranges[number] for number in group]
            found = await self._memory.each(ranges, sample, whole=False)
            shares |= {n: share for n, share in zip(group, found, strict=True) if share is not None}
            if not shares:
                break
        worthy = {slot.ranges[number].offset for number in shares}
        return shares, frozenset(c.offset for c in slot.ranges if c.offset not in worthy)

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
