"""Reads chunks of a source into memory first, so that what is read from there later is
one snapshot as a whole.

`ChunkMemory` keeps that memory from one snapshot of a job to the next. A chunk of a
part that has the checksums of the chunk that is kept is not read again.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from ckptd.agent.plan.layout import memory
from ckptd.agent.read.on_demand import PartOnDemand
from ckptd.agent.read.saved import Shard
from ckptd.agent.read.slot_source import PartWithSlot, SlotSource
from ckptd.shared.errors import IntegrityError, InvalidRequest
from ckptd.shared.formats.part import ChunkSource, PartReader
from ckptd.shared.formats.plan import ChunkRange, Plan
from ckptd.shared.formats.scatter import scatter

Readable = SlotSource | PartReader | PartWithSlot
_AT_ONCE = 4
"""The chunks whose deltas are read at the same time."""
Identity = tuple[int, ...]
"""The lengths and checksums by which a chunk of a part is known again."""


@dataclass(slots=True)
class KeptChunk:
    """The bytes of a chunk in memory.

    `identity`: None if the chunk must be read again, because its bytes came from a slot
    or a read has failed.
    """

    data: torch.Tensor
    identity: Identity | None = None


@dataclass(slots=True)
class ChunkMemory:
    """The memory of chunks, by rank and offset in the packed slot."""

    chunks: dict[tuple[int, int], KeptChunk] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(kept.data.nbytes for kept in self.chunks.values())


class StagedSource:
    """A `ChunkSource` over a slot or a part.

    A chunk that `stage` has read is given from memory, and any other from the slot or
    the part. `close` closes the slot or the part.
    """

    def __init__(self, inner: Readable, rank: int, kept: ChunkMemory) -> None:
        self.inner, self._rank = inner, rank
        self._kept = kept
        self.remote = inner.remote
        self._staged: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._checks: Sequence[int] | None = None

    @property
    def name(self) -> str:
        return f"rank {self._rank}" if isinstance(self.inner, SlotSource) else self.inner.name

    @property
    def plan(self) -> Plan:
        return self.inner.plan

    @property
    def values(self) -> tuple[int, int]:
        return self.inner.values

    @property
    def ranges(self) -> list[ChunkRange]:
        return self.inner.ranges

    @property
    def checks(self) -> Sequence[int]:
        """The crc32c of each chunk."""
        if isinstance(self.inner, SlotSource):
            return self.inner.checks
        if self._checks is None:
            self._checks = [chunk.raw_crc for chunk in _part(self.inner).index.chunks]
        return self._checks

    @property
    def signature(self) -> bytes:
        """The signature of the plan."""
        if isinstance(self.inner, SlotSource):
            return self.inner.header.signature
        return _part(self.inner).index.signature

    def stage(self, numbers: Iterable[int]) -> int:
        """Read and verify these chunks into memory, and return the number of bytes that
        were read. Raises IntegrityError, OSError.
        """
        with self._lock:
            self._check_open()
            reads: dict[int, KeptChunk] = {}
            for number in set(numbers).difference(self._staged):
                place = self.ranges[number]
                kept = self._kept.chunks.get((self._rank, place.offset))
                if kept is None or kept.data.nbytes != place.length:
                    kept = KeptChunk(torch.empty(place.length, dtype=torch.uint8, device="cpu"))
                    self._kept.chunks[self._rank, place.offset] = kept
                if kept.identity is None or kept.identity != self._identity(number):
                    reads[number] = kept
                else:
                    self._staged[number] = kept.data
            read = self._read(reads)
            for number, kept in reads.items():
                kept.identity = self._identity(number)
                self._staged[number] = kept.data
            return read

    def _read(self, chunks: dict[int, KeptChunk]) -> int:
        """Read these chunks into their memory: of a chunk whose base is there, only the
        deltas. Return the number of raw bytes.
        """
        before = {number: kept.identity for number, kept in chunks.items()}
        for kept in chunks.values():
            kept.identity = None  # until all is read
        based = [number for number, identity in before.items() if identity is not None]
        with ThreadPoolExecutor(_AT_ONCE, "ckptd-read") as threads:
            added = threads.map(lambda n: self._add_deltas(n, chunks[n], before[n]), based)
            done = {number for number, is_done in zip(based, added, strict=True) if is_done}
        scatter(
            self.inner,
            [
                (self.ranges[number].offset, memory(kept.data, kept.data.nbytes))
                for number, kept in chunks.items()
                if number not in done
            ],
        )
        return sum(kept.data.nbytes for kept in chunks.values())

    def _add_deltas(self, number: int, kept: KeptChunk, identity: Identity | None) -> bool:
        """Turn the kept bytes of a chunk into those of this snapshot if it has stored
        the differences. Return False if the chunk must be read as a whole.
        """
        if not isinstance(self.inner, PartReader) or identity is None:
            return False
        raw = memory(kept.data, kept.data.nbytes)
        try:
            return self.inner.update_chunk(number, raw, identity[1])
        except IntegrityError:
            return False

    def _identity(self, number: int) -> Identity | None:
        if isinstance(self.inner, SlotSource):
            return None
        chunk = _part(self.inner).index.chunks[number]
        return chunk.raw_length, chunk.raw_crc, chunk.stored_length, chunk.stored_crc, chunk.codec

    def read_chunk(self, number: int, raw: memoryview) -> None:
        if not self._read_staged(number, [raw]):
            self._check_open()
            self.inner.read_chunk(number, raw)

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        if self._read_staged(number, pieces):
            return True
        self._check_open()
        return self.inner.read_pieces(number, pieces)

    def _read_staged(self, number: int, pieces: Sequence[memoryview]) -> bool:
        data = self._staged.get(number)
        if data is None:
            return False
        address = data.data_ptr()
        for piece in pieces:
            if piece:
                # Unlike an assignment to a memoryview, it lets other threads run.
                target = ctypes.addressof(ctypes.c_char.from_buffer(piece))
                ctypes.memmove(target, address, len(piece))
                address += len(piece)
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest(
                "this checkpoint is closed: open it again; read a version before the next one"
            )

    def close(self) -> None:
        """Close the slot or the part. May be called again."""
        with self._lock:
            closed, self._closed = self._closed, True
            self._staged.clear()
        if not closed:
            self.inner.close()


def _part(source: PartReader | PartWithSlot) -> PartReader:
    return source.part if isinstance(source, PartWithSlot) else source


def staged_source(source: ChunkSource) -> StagedSource:
    """Return the StagedSource behind a source of a `Checkpoint`.

    Opens the part if it is opened on demand. Raises IntegrityError, OSError.
    """
    found = source.reader if isinstance(source, PartOnDemand) else source
    assert isinstance(found, StagedSource)
    return found


def chunks_of(shard: Shard) -> range:
    """Return the numbers of the chunks that hold a shard."""
    if not shard.item.length:
        return range(0)
    ranges, start = shard.source.ranges, attrgetter("offset")
    begin, end = shard.item.offset, shard.item.offset + shard.item.length
    first = bisect.bisect_right(ranges, begin, key=start) - 1
    return range(first, bisect.bisect_left(ranges, end, key=start))


def fingerprint(shard: Shard) -> tuple[object, ...]:
    """Return a value that is equal for two shards if their bytes are, as far as the
    checksums of their chunks tell.
    """
    item, source = shard.item, staged_source(shard.source)
    numbers = chunks_of(shard)
    into = item.offset - source.ranges[numbers[0]].offset if numbers else 0
    lengths = tuple(source.ranges[number].length for number in numbers)
    checks = tuple(source.checks[number] for number in numbers)
    return item.dtype, item.offsets, item.sizes, shard.stride, into, lengths, checks


def digest(sources: Iterable[ChunkSource]) -> str:
    """Return the sha256 of the plans and the checksums of all chunks, in hexadecimal
    digits. It is the same in memory and on storage.
    """
    total = hashlib.sha256()
    for source in map(staged_source, sources):
        total.update(source.signature)
        checks = source.checks
        total.update(struct.pack(f"<Q{len(checks)}I", len(checks), *checks))
    return total.hexdigest()


def slots_of(sources: Iterable[ChunkSource]) -> Iterator[SlotSource]:
    """Yield the slots among the sources, which are in memory alone."""
    for source in sources:
        if isinstance(source, StagedSource) and isinstance(source.inner, SlotSource):
            yield source.inner
