"""The format of segments: header, check area and data area of a slot in shared memory
(FORMAT.md, section 2).

This module reads and writes open segments; it neither creates nor deletes their files.
The daemon creates each file and writes its first header. From then on, the trainer
alone writes headers and data. The check area is the trainer's until the seal, and then
the daemon's. The daemon reads with `pread`, so that a segment that was truncated causes
a short read and not a SIGBUS.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from crc32c import crc32c

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats.binary import (
    ALIGN,
    NO_STEP,
    PIECE,
    PREAMBLE,
    align,
    check_preamble,
    check_zero,
    preamble,
)
from ckptd.shared.formats.plan import MAX_CHUNK, MAX_DOCUMENT, MIN_CHUNK, most_chunks
from ckptd.shared.system.fs import read_exactly

SEGMENT_MAGIC, CHECK_MAGIC, ROOT_MAGIC = b"CKPTDSEG", b"CKPTDCHK", b"CKPTDROT"
PEER_REPLICA = 1 << 0
"""The feature bit of a segment that holds a peer replica. An earlier version leaves the
segment alone: it would take the ranks for ranks of its own node.
"""
CHECK_OFFSET = 2 * ALIGN
CHECK_HEADER = 64

_HEADER = struct.Struct("<16sQIIIIQ16sQQII128s32sQQIIQQIIQQII")
_CRC = struct.Struct("<I")
_CHECK = struct.Struct("<16sQII")
_MARK = struct.Struct("<16s16sI")
_MOST_OF_A_PLACE = ALIGN - _MARK.size - _CRC.size
assert _HEADER.size == 320


@lru_cache(maxsize=1)
def this_boot() -> bytes:
    """Return the 16 bytes that identify this boot of the kernel (random(4))."""
    return bytes.fromhex(
        Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    )


class SlotState(enum.IntEnum):
    FREE = 1
    FILLING = 2
    SEALED = 3


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of a document in the data area, in bytes from the start of that area,
    and its crc32c. Length 0 means no document.
    """

    offset: int = 0
    length: int = 0
    crc: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The header of a segment.

    `peer_replica` is True if the segment is for copies of a slot of another node. The
    fields other than `slot`, `capacity`, `generation` and `boot_id` are then those of
    that slot.
    """

    job: str
    attempt: int
    rank: int
    world_size: int
    slot: int
    capacity: int
    chunk_size: int
    generation: int = 1
    state: SlotState = SlotState.FREE
    step: int | None = None
    boot_id: bytes = field(default_factory=this_boot)
    signature: bytes = bytes(32)
    plan: Extent = Extent()
    request: Extent = Extent()
    values: Extent = Extent()
    peer_replica: bool = False

    @property
    def check_length(self) -> int:
        return align(CHECK_HEADER + 4 * most_chunks(self.capacity, self.chunk_size))

    @property
    def data_offset(self) -> int:
        return CHECK_OFFSET + self.check_length

    @property
    def file_length(self) -> int:
        """The length of the segment without its root mark."""
        return self.data_offset + align(self.capacity)

    def next(self, state: SlotState, **changes: object) -> SegmentHeader:
        """Return the header of the next generation.

        It has no signature and no documents, except those in `changes`.
        """
        blank = {"signature": bytes(32), "plan": Extent(), "request": Extent(), "values": Extent()}
        return replace(self, generation=self.generation + 1, state=state, **{**blank, **changes})  # type: ignore[arg-type]

    def encode(self) -> bytes:
        """Return one copy of the header, 4096 bytes."""
        extents = [
            n
            for e in (self.plan, self.request, self.values)
            for n in (e.offset, e.length, e.crc, 0)
        ]
        body = _HEADER.pack(
            preamble(SEGMENT_MAGIC, PEER_REPLICA if self.peer_replica else 0), self.generation,
            self.state, self.rank, self.world_size,
            self.attempt, NO_STEP if self.step is None else self.step, self.boot_id, self.capacity,
            self.check_length, self.chunk_size, self.slot, self.job.encode(), self.signature,
            *extents,
        )  # fmt: skip
        return (body + _CRC.pack(crc32c(body))).ljust(ALIGN, b"\0")

    @classmethod
    def decode(cls, data: bytes | memoryview) -> SegmentHeader:
        """Return the header in one copy.

        Raises IntegrityError if the copy is not valid, NewerFormat if a newer ckptd has
        written it.
        """
        if len(data) != ALIGN:
            raise IntegrityError("segment header is cut short")
        check_preamble(data, SEGMENT_MAGIC, "segment header", known=PEER_REPLICA, body=_HEADER.size)
        check_zero(data[_HEADER.size + 4 :], "segment header")
        (
            _,
            generation,
            state,
            rank,
            world,
            attempt,
            step,
            boot,
            capacity,
            check_length,
            chunk_size,
            slot,
            job,
            signature,
            *rest,
        ) = _HEADER.unpack_from(data)
        if any(rest[3::4]):
            raise IntegrityError("segment header: padding is not zero")
        extents = [Extent(*rest[i : i + 3]) for i in (0, 4, 8)]
        try:
            header = cls(
                job=job.rstrip(b"\0").decode(), attempt=attempt, rank=rank, world_size=world,
                slot=slot, capacity=capacity, chunk_size=chunk_size, generation=generation,
                state=SlotState(state), step=None if step == NO_STEP else step, boot_id=boot,
                signature=signature, plan=extents[0], request=extents[1], values=extents[2],
                peer_replica=bool(PREAMBLE.unpack_from(data)[3] & PEER_REPLICA),
            )  # fmt: skip
        except ValueError as error:
            raise IntegrityError(f"segment header is not valid: {error}") from None
        if (
            not MIN_CHUNK <= chunk_size <= MAX_CHUNK
            or capacity >= 1 << 62
            or check_length != header.check_length
        ):
            raise IntegrityError("segment header has impossible sizes")
        if any(e.offset + e.length > capacity or e.length > MAX_DOCUMENT for e in extents):
            raise IntegrityError("segment header names documents outside the slot")
        return header


def read_header(fd: int) -> SegmentHeader:
    """Return the header of the highest generation among the valid copies.

    If neither copy is valid, raises NewerFormat if a newer ckptd has written one of
    them, otherwise IntegrityError.
    """
    found: list[SegmentHeader] = []
    # The error itself is not stored: its traceback would keep this frame and the
    # caller's alive, and with them the mapping.
    kind, why = IntegrityError, ""
    for offset in (0, ALIGN):
        try:
            found.append(SegmentHeader.decode(os.pread(fd, ALIGN, offset)))
        except IntegrityError as error:
            if not why or isinstance(error, NewerFormat):
                kind, why = type(error), str(error)
    if not found:
        raise kind(why)
    return max(found, key=lambda header: header.generation)


def write_header(fd: int, header: SegmentHeader) -> None:
    """Write a header over the older copy, so that the generation before stays valid
    while this one is written. Raises OSError.
    """
    _write(fd, header.encode(), (header.generation % 2) * ALIGN)


def _write(fd: int, data: bytes, offset: int) -> None:
    written = os.pwrite(fd, data, offset)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes fitted into the segment")


def write_document(fd: int, header: SegmentHeader, offset: int, data: bytes) -> Extent:
    """Write a document at `offset` in the data area, and return its extent.

    The caller has checked that it fits. Raises OSError.
    """
    assert offset + len(data) <= header.capacity
    _write(fd, data, header.data_offset + offset)
    return Extent(offset, len(data), crc32c(data))


def read_pieces(
    fd: int, header: SegmentHeader, offset: int, length: int, buffer: memoryview
) -> Iterator[memoryview]:
    """Read `length` bytes of the data, from `offset` on, into `buffer`, and yield them
    piece by piece, each when it has been read.

    If `buffer` is shorter, it is used for one piece after another. Raises
    IntegrityError if the segment has been cut short, and OSError.
    """
    start, most = header.data_offset + offset, max(1, min(PIECE, len(buffer)))
    for at in range(0, length, most):
        place = at if len(buffer) >= length else 0
        piece = buffer[place : place + min(most, length - at)]
        if read_exactly(fd, piece, start + at) < len(piece):
            raise IntegrityError(
                f"the slot of step {header.step} has been cut short: that copy in memory is lost"
            )
        yield piece


def read_data(
    fd: int, header: SegmentHeader, offset: int, length: int, buffer: memoryview, crc: int = 0
) -> int:
    """Read data as `read_pieces` does, and return their crc32c, or that of all bytes
    since `crc` was 0. Raises the same.
    """
    for piece in read_pieces(fd, header, offset, length, buffer):
        crc = crc32c(piece, crc)
    return crc


def read_document(fd: int, header: SegmentHeader, extent: Extent, what: str) -> bytes:
    """Return the document at `extent`. `what` is its name in the error text.

    Raises IntegrityError if the document is cut short or does not match its checksum,
    or OSError.
    """
    buffer = bytearray(extent.length)
    if (
        read_exactly(fd, memoryview(buffer), header.data_offset + extent.offset) < extent.length
        or crc32c(buffer) != extent.crc
    ):
        raise IntegrityError(
            f"{what} document of job {header.job!r}, step {header.step}, is damaged in memory"
        )
    return bytes(buffer)


def encode_check(generation: int, chunk_size: int, crcs: list[int]) -> bytes:
    head = _CHECK.pack(preamble(CHECK_MAGIC), generation, len(crcs), chunk_size)
    entries = struct.pack(f"<{len(crcs)}I", *crcs)
    return (head + _CRC.pack(crc32c(entries, crc32c(head)))).ljust(CHECK_HEADER, b"\0") + entries


def write_check(fd: int, header: SegmentHeader, crcs: list[int]) -> None:
    data = encode_check(header.generation, header.chunk_size, crcs)
    assert len(data) <= header.check_length
    _write(fd, data, CHECK_OFFSET)


def read_check(fd: int, header: SegmentHeader) -> list[int] | None:
    """Return the crc32c of each chunk of the sealed slot from the check area.

    Return None if the check area has not been written for this seal, or if it is
    damaged.
    """
    data = os.pread(fd, header.check_length, CHECK_OFFSET)
    if len(data) < CHECK_HEADER:
        return None
    try:
        check_preamble(data, CHECK_MAGIC, "check area")
        check_zero(data[_CHECK.size + 4 : CHECK_HEADER], "check area")
    except IntegrityError:
        return None
    _, generation, count, chunk_size = _CHECK.unpack_from(data)
    if (
        generation != header.generation
        or chunk_size != header.chunk_size
        or CHECK_HEADER + 4 * count > len(data)
    ):
        return None
    entries = data[CHECK_HEADER : CHECK_HEADER + 4 * count]
    if _CRC.unpack_from(data, _CHECK.size)[0] != crc32c(entries, crc32c(data[: _CHECK.size])):
        return None
    return list(struct.unpack(f"<{count}I", entries))


@dataclass(frozen=True, slots=True)
class RootMark:
    """The mark of the root for which a segment was made.

    identity: the identity of the root, 32 hexadecimal digits. place: the path or the
    URL of the root at that time, or "" if that is too long.
    """

    identity: str
    place: str

    def encode(self) -> bytes:
        """Return the root mark as 4096 bytes."""
        place = os.fsencode(self.place)
        place = place if len(place) <= _MOST_OF_A_PLACE else b""
        head = _MARK.pack(preamble(ROOT_MAGIC), bytes.fromhex(self.identity), len(place))
        return (head + _CRC.pack(crc32c(place, crc32c(head))) + place).ljust(ALIGN, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> RootMark:
        """Return the root mark in these bytes.

        Raises IntegrityError if it is damaged, NewerFormat if a newer ckptd has written
        it.
        """
        head = _MARK.size + _CRC.size
        if len(data) != ALIGN:
            raise IntegrityError("root mark of a segment is cut short")
        _, identity, length = _MARK.unpack_from(data)
        place = data[head : head + length]
        if length > _MOST_OF_A_PLACE or _CRC.unpack_from(data, _MARK.size)[0] != crc32c(
            place, crc32c(data[: _MARK.size])
        ):
            raise IntegrityError("root mark of a segment does not match its checksum")
        check_preamble(data, ROOT_MAGIC, "root mark of a segment")
        check_zero(data[head + length :], "root mark of a segment")
        return cls(identity.hex(), os.fsdecode(place))


def write_root_mark(fd: int, header: SegmentHeader, mark: RootMark) -> None:
    """Write the root mark behind the data of a segment. Raises OSError."""
    _write(fd, mark.encode(), header.file_length)


def read_root_mark(fd: int, header: SegmentHeader) -> RootMark | None:
    """Return the root mark of a segment, or None if it has none.

    A segment of an earlier version has none. Raises IntegrityError if the root mark is
    damaged, NewerFormat if a newer ckptd has written it, and OSError.
    """
    data = os.pread(fd, ALIGN, header.file_length)
    return RootMark.decode(data) if data else None
