"""The format of part files: header, index and trailer, and a reader that verifies all
it reads (FORMAT.md, section 3).

`Chunk` and `PartIndex` are plain values. Only `PartReader` does I/O, on sources that
many threads may read at once. `part_writer.py` writes part files.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated, Protocol

import msgspec
from crc32c import crc32c

from ckptd.shared import names
from ckptd.shared.codecs import codec
from ckptd.shared.codecs.delta import DELTA, MOST_DELTAS, DecodedDeltas, Delta
from ckptd.shared.codecs.planes import word_size
from ckptd.shared.errors import IntegrityError, damage_in
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
from ckptd.shared.formats.non_finite import NonFinite
from ckptd.shared.formats.plan import (
    MAX_CHUNK,
    MAX_CHUNKS,
    MAX_DOCUMENT,
    MIN_CHUNK,
    ChunkRange,
    Plan,
    Size,
    chunk_ranges,
    signature,
    with_values,
)
from ckptd.shared.system.storage_seam import Source

PART_MAGIC, END_MAGIC = b"CKPTDPRT", b"CKPTDEND"
TRAILER_SIZE = 64
SEVERAL_FILES, LINKED_FILES, DELTAS = 1, 2, 4
"""The feature bits in the preamble of a part that has data files, of a part file whose
part links files of older parts, and of a part file whose part has bases.
"""
_FEATURES = SEVERAL_FILES | LINKED_FILES | DELTAS
_HEADER = struct.Struct("<16s16sIIIIQ128s")
_TRAILER = struct.Struct("<16sQQQI16s")
_CRC = struct.Struct("<I")
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_MOST = msgspec.Meta(max_length=MAX_CHUNKS)


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The place of one chunk in its file, and the checksums to verify it by.

    raw_offset, raw_length: the chunk's range in the packed slot, in bytes. offset,
    stored_length: the chunk's range in the file that holds it, in bytes, without
    padding. codec: the number of the codec that encoded it. element_size: the size of
    the elements in it, in bytes. raw_crc, stored_crc: the crc32c of the raw bytes and
    of the stored bytes.
    """

    raw_offset: Size
    raw_length: Size
    offset: Size
    stored_length: Size
    codec: _U32
    element_size: Annotated[int, msgspec.Meta(ge=1, le=16)]
    raw_crc: _U32
    stored_crc: _U32


class Base(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of an older part, in a linked file, from which a chunk is decoded.

    file: the number of the linked file. offset, stored_length, codec, raw_crc,
    stored_crc: the same as in a `Chunk`. base: the number of its own base, counted from 1, or 0
    if it is whole.
    """

    file: _U32
    offset: Size
    stored_length: Size
    codec: _U32
    raw_crc: _U32
    stored_crc: _U32
    base: _U32


class Linked(msgspec.Struct, frozen=True, array_like=True):
    """The origin of a data file that is a file of an older part.

    number: its number as a data file of this part. nonce, step: those of the older
    part. origin: its number in the older part, or 0 if it was the part file there.
    """

    number: _U32
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    origin: _U32
    step: Size | None


class PartIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    job: Annotated[str, msgspec.Meta(max_length=128)]
    attempt: _U32
    step: Size | None
    rank: _U32
    world_size: _U32
    tag: Annotated[str, msgspec.Meta(max_length=256)]
    signature: bytes
    plan: bytes
    request: bytes
    values: tuple[Size, Size]
    chunk_size: Annotated[int, msgspec.Meta(ge=MIN_CHUNK, le=MAX_CHUNK)]
    chunks: Annotated[list[Chunk], _MOST]
    files: Annotated[list[Size], _MOST] = []
    placed: Annotated[list[_U32], _MOST] = []
    linked: Annotated[list[Linked], _MOST] = []
    bases: Annotated[list[Base], _MOST] = []
    based: Annotated[list[_U32], _MOST] = []
    non_finite: NonFinite | None = None

    def encode(self) -> bytes:
        # A struct of so many fields would get the header of a long map, even if it is short.
        kept = {
            field.name: value
            for field in msgspec.structs.fields(self)
            if (value := getattr(self, field.name)) or field.required
        }
        return msgspec.msgpack.encode(kept)


_FILES = threading.Semaphore(128)
"""Limits the local data files that the readers of this process keep open. A process
may have 1024 descriptors by default.
"""
_PROCESSORS = threading.Semaphore(os.cpu_count() or 1)
"""Limits the threads that add the deltas of chunks. More of them than processors get in
each other's way: each has many short calls to make, which take turns.
"""
_DELTA = Delta()
_INDEX_DECODER = msgspec.msgpack.Decoder(PartIndex)


def encode_header(index: PartIndex, nonce: bytes, number: int = 0) -> bytes:
    """Return the header of a file of a part, 4096 bytes.

    `number` is 0 for the part file, or the number of the data file.
    """
    step = NO_STEP if index.step is None else index.step
    start = preamble(
        PART_MAGIC,
        (SEVERAL_FILES if index.files else 0)
        | (LINKED_FILES if index.linked and number == 0 else 0)
        | (DELTAS if index.bases and number == 0 else 0),
    )
    body = _HEADER.pack(
        start, nonce, index.attempt, index.rank, index.world_size, number, step, index.job.encode()
    )
    return (body + _CRC.pack(crc32c(body))).ljust(ALIGN, b"\0")


def encode_end(index_offset: int, index: bytes) -> bytes:
    """Return index, padding and trailer, which fill the part file from `index_offset`
    to its end. `index_offset` is a multiple of 4096.
    """
    length = align(len(index) + TRAILER_SIZE)
    body = _TRAILER.pack(
        preamble(END_MAGIC),
        index_offset,
        len(index),
        index_offset + length,
        crc32c(index),
        bytes(16),
    )
    return index.ljust(length - TRAILER_SIZE, b"\0") + body + _CRC.pack(crc32c(body))


def end_bound(chunks: int, documents: int, links: int = 0, bases: int = 0) -> int:
    """Return an upper bound for the length of index and trailer in bytes.

    It holds even if each chunk is in a file of its own.

    `chunks`, `links` and `bases` are the numbers of chunks, of linked files and of
    bases; `documents` is the length of the plan and request documents together, in
    bytes.
    """
    return align(documents + 80 * chunks + 48 * links + 56 * bases + 2048 + TRAILER_SIZE)


class ChunkSource(Protocol):
    """A packed slot that can be read chunk by chunk, from a part file or from a sealed
    slot in memory.

    plan: the plan of the packed slot.
    values: offset and length of the values document in the packed slot, in bytes.
    ranges: the chunks, in the order of their numbers.
    remote: as of the source that the chunks are read from.
    """

    remote: bool

    @property
    def plan(self) -> Plan: ...

    @property
    def values(self) -> tuple[int, int]: ...

    @property
    def ranges(self) -> list[ChunkRange]: ...

    def read_chunk(self, number: int, raw: memoryview) -> None:
        """Read, decode and verify a chunk into `raw`, which has exactly the length of
        the chunk.

        Raises IntegrityError if the chunk is damaged, or OSError.
        """

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        """Read and verify a chunk straight into `pieces`, which have the length of the
        chunk together.

        Return False, and read nothing, if its stored form must be decoded as a whole.
        Raises IntegrityError if the chunk is damaged, or OSError.
        """


class PartReader:
    """A reader of one part, given its part file as an open source, which `close`
    closes.

    The constructor verifies header, trailer, index and plan, and the length and header
    of each data file. It does not verify the chunks. `index_sha256` is the digest of
    the index that the manifest holds, or None if it is not to be compared. `longest_chain`
    is the number of deltas in the longest chain, 0 if no chunk is a delta. `open_file`
    opens a file by its name beside the part. A data file is opened each time that a
    chunk is read from it, and closed afterwards, because there may be many. Remote
    files, which take no descriptor, stay open. So do the files of a part with deltas,
    because each of them has a little of every chunk. Without `open_file`, data files count as
    missing.

    Raises IntegrityError or NewerFormat, with `name` in the error text, or OSError.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        index_sha256: str | None = None,
        open_file: Callable[[str], Source] | None = None,
    ) -> None:
        self.name = name
        self._source = source
        self._open_file = open_file
        self.remote = source.remote
        self._open: dict[int, Source] = {}  # the data files that stay open
        self._opening = threading.Lock()
        self._keeps = False
        self._local = threading.local()
        with damage_in(name):
            self.index = self._read_index(index_sha256)
            self.plan = Plan.decode(self.index.plan)
            if self.index.values[1] > MAX_DOCUMENT:
                raise IntegrityError(
                    f"its values document has {self.index.values[1]:,d} bytes; expected at most "
                    f"{MAX_DOCUMENT:,d}"
                )
            regions = with_values(self.plan.regions, self.index.values)
            if sum(-(-region.length // self.index.chunk_size) for region in regions) != len(
                self.index.chunks
            ):
                # Checked before a list of that length is made.
                raise IntegrityError("its chunks do not cover the packed slot exactly")
            self.ranges = chunk_ranges(regions, self.index.chunk_size)
            self._check_chunks()
            self._check_bases()
        for number in range(1, len(self.index.files) + 1):
            self._check_data_file(number)
        self.values = self.index.values
        self._keeps = self.longest_chain > 0

    def check_codecs(self) -> None:
        """Raise NewerFormat if a chunk is encoded with a codec that this version does
        not know. No chunk is read.
        """
        with damage_in(self.name):
            used = {chunk.codec for chunk in self.index.chunks}
            for number in (used | {base.codec for base in self.index.bases}) - {DELTA}:
                codec.decoder(number)

    def close(self) -> None:
        while self._open:
            _, source = self._open.popitem()
            source.close()
            if not source.remote:
                _FILES.release()
        self._source.close()

    @property
    def nbytes(self) -> int:
        """The size of the part on storage in bytes, data files included."""
        return self._source.size + sum(self.index.files)

    @property
    def read_bytes(self) -> int:
        """The stored bytes of all chunks and bases together."""
        chunks = sum(chunk.stored_length for chunk in self.index.chunks)
        return chunks + sum(base.stored_length for base in self.index.bases)

    @property
    def linked_bytes(self) -> int:
        """The size of those data files that are files of older parts, in bytes."""
        return sum(self.index.files[link.number - 1] for link in self.index.linked)

    @contextmanager
    def _file(self, number: int) -> Iterator[Source]:
        if (known := self._source if number == 0 else self._open.get(number)) is not None:
            yield known
            return
        name = names.part_file(self.index.rank, self._nonce, number)
        try:
            if self._open_file is None:
                raise FileNotFoundError
            source = self._open_file(name)
        except FileNotFoundError:
            raise IntegrityError(f"{self.name}: its data file {name} is missing") from None
        with self._opening:
            if kept := number not in self._open and (
                source.remote or (self._keeps and _FILES.acquire(blocking=False))
            ):
                self._open[number] = source
        try:
            yield source
        finally:
            if not kept:
                source.close()

    def _check_data_file(self, number: int) -> None:
        with self._file(number) as source, damage_in(self.name):
            if source.size != self.index.files[number - 1]:
                raise IntegrityError(f"its data file {number} is not as long as the index says")
            if not self._has_header_of(number, _read(source, ALIGN, 0)):
                raise IntegrityError(f"its data file {number} belongs to another part")

    def _has_header_of(self, number: int, header: bytes) -> bool:
        link = self._links.get(number)
        if link is None:
            return header == encode_header(self.index, self._nonce, number)
        check_preamble(
            header, PART_MAGIC, f"header of data file {number}", known=_FEATURES, body=_HEADER.size
        )
        older = encode_header(
            msgspec.structs.replace(self.index, step=link.step), link.nonce, link.origin
        )
        # The preamble says whether the older part had data files, and so does the
        # checksum.
        start, crc = PREAMBLE.size, _HEADER.size
        return (
            header[start:crc] + header[crc + _CRC.size :]
            == older[start:crc] + older[crc + _CRC.size :]
        )

    def _read_index(self, index_sha256: str | None) -> PartIndex:
        size = self._source.size
        header = _read(self._source, ALIGN, 0)
        check_preamble(header, PART_MAGIC, "part header", known=_FEATURES, body=_HEADER.size)
        check_zero(header[_HEADER.size + 4 :], "part header")
        trailer = _read(self._source, TRAILER_SIZE, size - TRAILER_SIZE)
        check_preamble(trailer, END_MAGIC, "part trailer", body=_TRAILER.size)
        _, offset, length, whole, index_crc, zero = _TRAILER.unpack_from(trailer)
        check_zero(zero, "part trailer")
        if (
            whole != size
            or length > MAX_DOCUMENT
            or offset % ALIGN
            or offset + align(length + TRAILER_SIZE) != size
        ):
            raise IntegrityError("part trailer names an index at an impossible place")
        end = _read(self._source, size - offset - TRAILER_SIZE, offset)
        data = end[:length]
        check_zero(end[length:], "index")
        if crc32c(data) != index_crc or (
            index_sha256 is not None and hashlib.sha256(data).hexdigest() != index_sha256
        ):
            raise IntegrityError("index does not match its digest")
        try:
            index = _INDEX_DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise IntegrityError(f"index cannot be read: {error}") from None
        if (
            encode_header(index, header[16:32]) != header
            or signature(index.plan) != index.signature
        ):
            raise IntegrityError("header, index and plan belong to different snapshots")
        self._index_offset, self._nonce = offset, header[16:32]
        self._links = {link.number: link for link in index.linked}
        if (
            list(self._links) != sorted(self._links)
            or len(self._links) != len(index.linked)
            or not self._links.keys() <= set(range(1, len(index.files) + 1))
        ):
            raise IntegrityError(
                "its linked files are not data files, in the order of their numbers"
            )
        return index

    def _check_chunks(self) -> None:
        chunks = self.index.chunks
        if [(c.raw_offset, c.raw_length, c.element_size) for c in chunks] != [
            (r.offset, r.length, r.element_size) for r in self.ranges
        ]:
            raise IntegrityError("its chunks do not cover the packed slot exactly")
        if self.index.values[0] < self.plan.data_length:
            raise IntegrityError("its values document overlaps its tensors")
        files, placed = self.index.files, self.index.placed
        used = {*placed, *(base.file for base in self.index.bases)}
        if len(placed) != (len(chunks) if files else 0) or set(range(1, len(files) + 1)) != used - {
            0
        }:
            raise IntegrityError("its chunks are placed in other files than it has")
        ends = [ALIGN] * (1 + len(files))
        for number, chunk in sorted(
            zip(placed or itertools.repeat(0), chunks, strict=False),
            key=lambda entry: entry[1].offset,
        ):
            end = chunk.offset + align(chunk.stored_length)
            if number in self._links:  # the chunks of other parts may lie between its chunks
                sound = (
                    chunk.offset >= ALIGN and chunk.offset % ALIGN == 0 and end <= files[number - 1]
                )
            else:
                sound, ends[number] = chunk.offset == ends[number], end
            if (
                not sound
                or chunk.stored_length > MAX_CHUNK
                or (chunk.stored_length == 0) != (chunk.raw_length == 0)
            ):
                raise IntegrityError(f"its chunk at {chunk.offset} is misplaced")
        sizes = [self._index_offset, *files]
        if any(
            ends[number] != size for number, size in enumerate(sizes) if number not in self._links
        ):
            raise IntegrityError("its chunks do not fill the file")

    def _check_bases(self) -> None:
        chunks, bases, based = self.index.chunks, self.index.bases, self.index.based
        if len(based) != (len(chunks) if bases else 0) or max(based, default=0) > len(bases):
            raise IntegrityError("its chunks have other bases than it has")
        # The number of deltas among each base and those below it.
        below = [0]
        for number, base in enumerate(bases, 1):
            if (
                base.file not in self._links
                or base.offset < ALIGN
                or base.offset % ALIGN
                or not 0 < base.stored_length <= MAX_CHUNK
                or base.offset + align(base.stored_length) > self.index.files[base.file - 1]
                or base.base >= number
                or (base.codec == DELTA) != (base.base > 0)
            ):
                raise IntegrityError(f"its base {number} is misplaced")
            below.append(below[base.base] + 1 if base.base else 0)
        for chunk, base_number in zip(chunks, based or itertools.repeat(0), strict=False):
            if (chunk.codec == DELTA) != (base_number > 0):
                raise IntegrityError(f"its chunk at {chunk.offset} has no base, or needs none")
        self.longest_chain = max((below[number] + 1 for number in based if number), default=0)
        if self.longest_chain > MOST_DELTAS:
            raise IntegrityError(
                f"a chunk of it is a chain of {self.longest_chain} deltas; expected at most "
                f"{MOST_DELTAS}"
            )

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        deltas, whole = self._chain(number)
        chunk = self.index.chunks[number]
        if whole.codec != codec.RAW or whole.stored_length != chunk.raw_length:
            return False
        if deltas and any(len(piece) % word_size(chunk.element_size) for piece in pieces):
            return False
        self._add(number, deltas, pieces, self._read_raw(number, whole, pieces))
        return True

    def _read_raw(
        self, number: int, chunk: Chunk | Base, pieces: Sequence[memoryview]
    ) -> Iterator[memoryview]:
        """Read and verify a chunk, or a base of a chunk, that is stored as it is,
        straight into `pieces`. Yield each part of them once it is filled.
        """
        if self.remote:
            with self._stored_in(number, chunk) as (source, where):
                stored = self._stored(chunk, source, where)
            if chunk.raw_crc != chunk.stored_crc:
                raise IntegrityError(f"{where} holds other bytes than were saved")
            at = 0
            for piece in _cut(pieces):
                piece[:] = stored[at : at + len(piece)]
                at += len(piece)
                yield piece
            return
        crc, position, end = 0, chunk.offset, chunk.offset + align(chunk.stored_length)
        with self._stored_in(number, chunk) as (source, where):
            for piece in _cut(pieces):
                _read_into(piece, source, position, where)
                crc, position = crc32c(piece, crc), position + len(piece)
                yield piece
            padding = memoryview(bytearray(end - position))
            _read_into(padding, source, position, where)
        if crc != chunk.stored_crc:
            raise IntegrityError(f"{where} does not match its checksum")
        check_zero(padding, where)
        if crc != chunk.raw_crc:
            raise IntegrityError(f"{where} holds other bytes than were saved")

    def read_chunk(self, number: int, raw: memoryview) -> None:
        if self.read_pieces(number, [raw]):
            return
        deltas, whole = self._chain(number)
        self._add(number, deltas, [raw], self._decode_whole(number, whole, raw))

    def update_chunk(self, number: int, raw: memoryview, crc: int) -> bool:
        """Bring `raw`, which has the bytes of a chunk in an older part and this crc32c,
        up to date. Read only the deltas that came since.

        Return False, and read nothing, if the chunk is not a delta of these bytes.
        Raises IntegrityError if a delta is damaged, and OSError; then the content of
        `raw` is undefined.
        """
        deltas, whole = self._chain(number)
        known = [link.raw_crc for link in (whole, *deltas)]
        if crc not in known:
            return False
        newer = deltas[len(known) - 1 - known[::-1].index(crc) :]
        if newer:
            self._add(number, newer, [raw], _cut([raw]))
        return True

    def _add(
        self,
        number: int,
        deltas: Sequence[Chunk | Base],
        pieces: Sequence[memoryview],
        filled: Iterator[memoryview],
    ) -> None:
        """Add deltas of a chunk, its own the last one, and verify the result.

        `filled` fills `pieces` with the bytes that the deltas are added to, and yields
        each part that it has filled. The differences are added while this part is in
        the cache of a core.
        """
        if not deltas:
            for _ in filled:
                pass
            return
        where = self._where(number, deltas[-1])
        length, size = self.ranges[number].length, self.ranges[number].element_size
        stored = (self._stored_delta(number, delta) for delta in deltas)

        def decoded() -> Iterator[DecodedDeltas]:
            with damage_in(where):
                yield from _DELTA.decoded(stored, length, size)

        # A remote base is not awaited there.
        with nullcontext() if self.remote else _PROCESSORS:
            for differences in decoded():
                crc = 0
                for piece in filled:
                    differences.add_to(piece)
                    crc = crc32c(piece, crc)
                with damage_in(where):
                    differences.check()
                filled = _cut(pieces)
        if crc != deltas[-1].raw_crc:
            raise IntegrityError(f"{where} holds other bytes than were saved")

    def _chain(self, number: int) -> tuple[list[Chunk | Base], Chunk | Base]:
        """Return the deltas of a chunk, its own last, and the whole chunk that they are
        added to.
        """
        links: list[Chunk | Base] = [self.index.chunks[number]]
        below = self.index.based[number] if self.index.based else 0
        while below:
            links.append(self.index.bases[below - 1])
            below = self.index.bases[below - 1].base
        return links[-2::-1], links[-1]

    def _decode_whole(
        self, number: int, whole: Chunk | Base, raw: memoryview
    ) -> Iterator[memoryview]:
        """Read, decode and verify a chunk, or a base of a chunk, as `_read_raw` does."""
        if whole.codec == codec.RAW and whole.stored_length == len(raw):
            yield from self._read_raw(number, whole, [raw])
            return
        with self._stored_in(number, whole) as (source, where):
            stored = self._stored(whole, source, where)
        with damage_in(where):
            codec.decoder(whole.codec).decode(stored, raw, self.ranges[number].element_size)
        crc = 0
        for piece in _cut([raw]):
            crc = crc32c(piece, crc)
            yield piece
        if crc != whole.raw_crc:
            raise IntegrityError(f"{where} holds other bytes than were saved")

    def _stored_delta(self, number: int, delta: Chunk | Base) -> memoryview:
        """Read and verify the stored form of a delta of a chunk."""
        with self._stored_in(number, delta) as (source, where):
            # Not the buffer of the thread, which is used again for the next one.
            own = memoryview(bytearray(align(delta.stored_length)))
            return self._stored(delta, source, where, own)

    @contextmanager
    def _stored_in(
        self, number: int, stored: Chunk | Base | None = None
    ) -> Iterator[tuple[Source, str]]:
        """Context manager.

        Gives the open file that holds a chunk, or a base of the chunk, and the words
        that name what is `stored` there in an error.
        """
        chunk = stored or self.index.chunks[number]
        with self._file(self._file_of(number, chunk)) as source:
            yield source, self._where(number, chunk)

    def _file_of(self, number: int, stored: Chunk | Base) -> int:
        """Return the number of the file that holds a chunk, or a base of the chunk."""
        if isinstance(stored, Base):
            return stored.file
        return self.index.placed[number] if self.index.placed else 0

    def _where(self, number: int, stored: Chunk | Base) -> str:
        """Return the words that name a chunk, or a base of the chunk, in an error."""
        file = self._file_of(number, stored)
        of_file = f" of data file {file}" if file else ""
        return (
            f"{self.name}: chunk {number} (bytes {stored.offset} to "
            f"{stored.offset + stored.stored_length}{of_file})"
        )

    def _stored(
        self, chunk: Chunk | Base, source: Source, where: str, buffer: memoryview | None = None
    ) -> memoryview:
        """Read and verify the stored form of a chunk, as a whole, into `buffer`, or into
        one that this thread uses again. A remote source may return its own.
        """
        length = align(chunk.stored_length)
        if source.remote:
            stored = source.view(chunk.offset, length)
            if len(stored) < length:
                raise IntegrityError(f"{where} is cut short")
        else:
            stored = buffer or self._buffer(length)
            _read_into(stored, source, chunk.offset, where)
        if crc32c(stored[: chunk.stored_length]) != chunk.stored_crc:
            raise IntegrityError(f"{where} does not match its checksum")
        check_zero(stored[chunk.stored_length :], where)
        return stored[: chunk.stored_length]

    def _buffer(self, length: int) -> memoryview:
        """Return a buffer of this thread.

        Its content is undefined, and it is used again for the thread's next chunk.
        """
        found: bytearray = getattr(self._local, "buffer", bytearray())
        if len(found) < length:
            found = self._local.buffer = bytearray(length)
        return memoryview(found)[:length]


def _cut(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the pieces, divided so that each stays in the cache of a core."""
    for piece in pieces:
        for at in range(0, len(piece), PIECE):
            yield piece[at : at + PIECE]


def _read_into(buffer: memoryview, source: Source, offset: int, where: str) -> None:
    if source.read(buffer, offset) < len(buffer):
        raise IntegrityError(f"{where} is cut short")


def _read(source: Source, length: int, offset: int) -> bytes:
    buffer = bytearray(length)
    if offset < 0 or source.read(memoryview(buffer), offset) < length:
        raise IntegrityError("the file is cut short")
    return bytes(buffer)
