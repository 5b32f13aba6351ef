"""Writes one part: creates its files, fills them chunk by chunk from any thread, and
syncs them.

The caller provides the bytes of the chunks.
"""

from __future__ import annotations

import errno
import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from crc32c import crc32c

from ckptd.shared import names
from ckptd.shared.codecs.codec import RAW, Encoder
from ckptd.shared.codecs.delta import DELTA, Delta
from ckptd.shared.codecs.speeds import MOST_IN_VAIN, Speeds, Spent
from ckptd.shared.errors import InvalidConfig
from ckptd.shared.formats.binary import ALIGN, align
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.part import (
    Base,
    Chunk,
    Linked,
    PartIndex,
    encode_end,
    encode_header,
    end_bound,
)
from ckptd.shared.formats.plan import DEFAULT_CHUNK, ChunkRange
from ckptd.shared.formats.reuse import (
    NOTHING,
    BaseOffer,
    Linker,
    Reuse,
    StoredChunk,
    StoredFile,
    StoredPart,
)
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import page_aligned
from ckptd.shared.system.storage_seam import Creator, Sink

MOST_FILES = 64
"""The most files that a part can be spread over at once."""
_MOST_LONGER = 1.25
"""A delta is written unless it is so many times as long as its samples let expect."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The rule that spreads a part over files.

    files_per_rank: the number of files that are filled at once. A part with fewer
    chunks is spread over fewer files, one for each chunk. bytes_per_file: the most
    bytes in a file, or 0 for no limit. When a file would grow longer, a new file takes
    its place. The index is never divided, so that a long index can make the first file
    longer.
    """

    files_per_rank: int = 1
    bytes_per_file: int = 0

    @classmethod
    def checked(
        cls, files_per_rank: int, bytes_per_file: int, chunk_size: int = DEFAULT_CHUNK
    ) -> Spread:
        """Return a Spread with these values, which may come from a user.

        Raises InvalidConfig if `files_per_rank` is not an integer from 1 to MOST_FILES,
        or if `bytes_per_file` is neither 0 nor an integer of at least two chunks of
        `chunk_size` bytes.
        """
        if type(files_per_rank) is not int or not 1 <= files_per_rank <= MOST_FILES:
            raise InvalidConfig(f"files_per_rank is {files_per_rank!r}; expected 1 to {MOST_FILES}")
        if type(bytes_per_file) is not int or (bytes_per_file and bytes_per_file < 2 * chunk_size):
            raise InvalidConfig(
                f"bytes_per_file is {bytes_per_file!r}; expected 0 (no limit), or at least the "
                f"size of two chunks, {2 * chunk_size}"
            )
        return cls(files_per_rank, bytes_per_file)


ONE_FILE = Spread()


@dataclass(slots=True, eq=False)
class _File:
    """One file of a part that is being written.

    number: 0 for the part file, otherwise the number of the data file. reserved: an
    upper bound for the bytes that follow the last chunk. end: the length of the file
    once all calls that use it have written their chunks. writing: the number of calls
    that still use the file. full: True if the file gets no more chunks, and is to be
    finished when no call uses it any more. finished: True once the file is durable.
    """

    number: int
    sink: Sink
    reserved: int
    end: int = ALIGN
    writing: int = 0
    full: bool = False
    finished: bool = False

    @property
    def used(self) -> int:
        return self.end + self.reserved


@dataclass(slots=True, eq=False)
class _Group:
    """Chunks that are stored in the same files.

    filling: the files that are being filled. left: the bytes of the chunks that are
    still to be placed, with the length that each has before it is encoded.
    """

    filling: list[_File] = field(default_factory=list)
    left: int = 0


class PartWriter:
    """A writer of one part.

    Call `create`, then `chunk` for every chunk of `ranges`, then `finish`, or `discard`
    at any time.

    `creator` creates the files. Where the first bytes of an object must be written
    first, all chunks go to data files, and the part file, whose header depends on them,
    is created last. A data file that is full is finished as soon as its last chunk is
    written, to keep the number of open files small. `linker` links files of older
    parts; without one, all chunks are stored. `speeds` learns how fast chunks are encoded
    and written.

    Every method except `discard` raises OSError if a file cannot be created, written or
    synced.

    ranges: the chunks that are to be written. needed: the room for them in bytes.
    offers: the bases of those that may be stored as deltas, by their offsets in the
    packed slot. in_vain: the offsets of those whose deltas were made in vain.
    """

    def __init__(
        self,
        creator: Creator,
        nonce: bytes,
        encoder: Encoder,
        spread: Spread = ONE_FILE,
        linker: Linker | None = None,
        speeds: Speeds | None = None,
    ) -> None:
        self._creator = creator
        self._nonce = nonce
        self._encoder = encoder
        self._spread = spread
        self._delta = Delta()
        self._linker, self._apart = linker, NOTHING.apart
        # The files of older parts: all that may be linked, the numbers of those that are,
        # by their places there, and the places of those that cannot be.
        self._older: list[StoredFile] = []
        self._numbers, self._refused = dict[int, int](), set[int]()
        self._files: list[_File] = []
        self.ranges, self.needed = list[ChunkRange](), 0
        self.offers: dict[int, BaseOffer] = {}
        self.speeds = speeds or Speeds()
        self.in_vain = set[int]()
        # The time that deltas have taken in vain, and the most that they may take.
        self._lost, self._most_lost = 0.0, math.inf
        # The chunks that have changed, and those that are stored apart.
        self._groups = _Group(), _Group()
        # The linked chunks, and the number of the file of each other chunk, by their
        # offsets in the packed slot.
        self._unchanged: dict[int, StoredChunk] = {}
        self._placed: dict[int, int] = {}
        self._lock = threading.Lock()

    def create(
        self, index: PartIndex, ranges: list[ChunkRange], documents: int, reuse: Reuse = NOTHING
    ) -> None:
        """Link the files of the chunks that `reuse` keeps, create the files to begin with,
        and allocate room in them, as if no chunk shrinks but those that may be deltas.

        The files of a base are linked once there is a delta of it, so that none is linked
        in vain.

        Afterwards `ranges`, `needed` and `offers` are set. `index` holds the values for
        the headers of the files. `documents` is the length of the plan and request
        documents together, in bytes.
        """
        self._index, self._apart = index, reuse.apart
        reuse = self._link(reuse)
        self._unchanged = {
            offset: chunk.moved(self._numbers) for offset, chunk in reuse.chunks.items()
        }
        self.offers = reuse.offers
        self.ranges = [chunk for chunk in ranges if chunk.offset not in self._unchanged]
        whole = self.speeds.whole_seconds(
            sum(chunk.length for chunk in self.ranges), sum(map(self._whole, self.ranges))
        )
        self._most_lost = MOST_IN_VAIN * whole or math.inf
        links = len(reuse.files)
        bases = sum(
            chunk.length_of_chain
            for chunk in (
                *self._unchanged.values(), *(offer.base for offer in self.offers.values()),
            )
        )  # fmt: skip
        counts = [0, 0]
        self.needed = sum(map(self._room, self.ranges))
        for chunk in self.ranges:
            apart = chunk.offset in self._apart
            self._groups[apart].left += self._room(chunk)
            counts[apart] += 1
        least = 1 if self._creator.head_last else 0
        for group, count in zip(self._groups, (max(least, counts[0]), counts[1]), strict=True):
            count = min(self._spread.files_per_rank, count)
            for _ in range(count):
                end = (
                    0
                    if self._files or not self._creator.head_last
                    else end_bound(len(ranges), documents, links, bases)
                )
                self._add(group, align(-(-group.left // count)), end)

    def _whole(self, chunk: ChunkRange) -> float:
        """Return the bytes in which a chunk is expected to be stored whole."""
        offer = self.offers.get(chunk.offset)
        return chunk.length * (1.0 if offer is None else offer.base.whole_share)

    def _room(self, chunk: ChunkRange) -> int:
        """Return the room to allocate for a chunk: its own length, or twice what it is
        expected to take as a delta. A chunk that takes more makes its file longer.
        """
        offer = self.offers.get(chunk.offset)
        share = 1.0 if offer is None else min(1.0, 2 * offer.share)
        return align(math.ceil(share * chunk.length))

    def _link(self, reuse: Reuse) -> Reuse:
        """Link the files of the chunks that `reuse` keeps, and return what is left of it.

        After a file that cannot be linked, all begins again without it.
        """
        if self._linker is None:
            reuse = reuse.of(())
        self._older = reuse.files
        for position in sorted(_used(reuse.chunks.values())):
            if not self._link_file(position):
                self._unlink()
                return self._link(reuse.of(set(range(len(reuse.files))) - {position}))
        return reuse

    def _link_file(self, position: int) -> bool:
        """Link an older file. Return False if that is not possible."""
        assert self._linker is not None
        number = self._next_number()
        if not self._linker.link(self._older[position], self._name(number)):
            return False
        self._numbers[position] = number
        failpoint("persist.linked")
        return True

    def _link_base(self, base: StoredChunk) -> bool:
        """Link all files that a delta of this base needs. Return False, and link none, if
        that is not possible.
        """
        with self._lock:
            linked = list[int]()
            for position in sorted(_used([base]) - self._numbers.keys()):
                if not self._link_file(position):
                    self._refused.add(position)
                    self._unlink(linked)
                    return False
                linked.append(position)
        return True

    def _unlink(self, positions: Iterable[int] | None = None) -> None:
        """Remove the links of the older files at these places, by default all."""
        for position in list(self._numbers if positions is None else positions):
            assert self._linker is not None
            self._linker.remove(self._name(self._numbers.pop(position)))

    def _next_number(self) -> int:
        """Return the number of the next data file, after that of the last one."""
        part_file = self._creator.head_last and bool(self._files)
        return len(self._files) + len(self._numbers) + (0 if part_file else 1)

    def _add(self, group: _Group, room: int, reserved: int = 0) -> _File:
        """Create the next file, add it to the files of its group that are being filled,
        and return it.

        It gets room for `room` bytes of chunks and `reserved` bytes after them, but
        never more than `bytes_per_file`.
        """
        number = 0 if self._creator.head_last and not self._files else self._next_number()
        room += ALIGN + reserved
        file = self._create(number, min(room, self._spread.bytes_per_file or room), reserved)
        group.filling.append(file)
        return file

    def _create(
        self, number: int, size: int, reserved: int = 0, index: PartIndex | None = None
    ) -> _File:
        """Create a file of about `size` bytes.

        The header of a part file needs the complete `index`; without it, `_finish`
        writes it.
        """
        head = None
        if number > 0:  # a header says that there are data files, not how many
            head = encode_header(
                msgspec.structs.replace(self._index, files=[0]), self._nonce, number
            )
        elif index is not None:
            head = encode_header(index, self._nonce)
        file = _File(number, self._creator.create(self._name(number), size, head), reserved)
        self._files.append(file)
        failpoint("persist.created")
        return file

    def _name(self, number: int) -> str:
        return names.part_file(self._index.rank, self._nonce, number)

    def base_of(self, chunk: ChunkRange) -> Chunk | None:
        """Return the entry of the base that a chunk may be stored as a delta of, or None
        if there is none, if its files cannot be linked, or if too many deltas of this part
        were made in vain.
        """
        offer = self.offers.get(chunk.offset)
        with self._lock:
            if (
                offer is None
                or self._lost > self._most_lost
                or not self._refused.isdisjoint(_used([offer.base]))
            ):
                return None
            return offer.base.entry

    def chunk(self, chunk: ChunkRange, raw: memoryview, stored: memoryview, crc: int) -> Chunk:
        """Encode and write one chunk, and return its index entry.

        Many threads may call this at once, each with buffers of its own.

        `raw` begins with the bytes of the chunk, whose crc32c is `crc`; `stored` is for
        the encoded form. Both buffers must be page-aligned and have room for
        `align(chunk.length)` bytes. Their content is undefined afterwards.
        """
        with self.speeds.encoding() as spent:
            encoded = self._encoder.encode(
                raw[: chunk.length], chunk.element_size, stored[: chunk.length]
            )
        self.speeds.add_whole(spent, chunk.length, shrunk=encoded is not None)
        if encoded is None:
            return self._write(chunk, raw, chunk.length, RAW, crc)
        return self._write(chunk, stored, encoded, self._encoder.number, crc)

    def delta(
        self,
        chunk: ChunkRange,
        raw: memoryview,
        base: memoryview,
        crc: int,
        read: Callable[[], bool] = lambda: True,
    ) -> Chunk | None:
        """Write one chunk as a delta, and return its index entry, or None if there is no
        base, if its files cannot be linked, or if the delta is not as small as it was
        expected to be.

        The first bytes of `base` are those of the base that `base_of` has named, once
        `read` has returned True. All else is as with `chunk`.
        """
        whole, size, offer = raw[: chunk.length], chunk.element_size, self.offers[chunk.offset]
        most = _MOST_LONGER * offer.share * chunk.length + ALIGN
        with self.speeds.encoding() as spent:
            encoded = (
                self._delta.encode(whole, base[: chunk.length], size, whole) if read() else None
            )
        if encoded is None or encoded > most or not self._link_base(offer.base):
            self._made_in_vain(chunk, spent)
            return None
        self.speeds.add_delta(spent, chunk.length, self._delta.listed(whole, chunk.length, size))
        return self._write(chunk, raw, encoded, DELTA, crc)

    def _made_in_vain(self, chunk: ChunkRange, spent: Spent) -> None:
        with self._lock:
            self.in_vain.add(chunk.offset)
            self._lost += spent.seconds

    def _write(
        self, chunk: ChunkRange, buffer: memoryview, length: int, number: int, crc: int
    ) -> Chunk:
        """Write the stored form of a chunk, the first `length` bytes of `buffer`."""
        padded = align(length)
        buffer[length:padded] = bytes(padded - length)
        file = self._place(chunk, padded)
        if failpoint("persist.writing"):
            file.sink.append(buffer[: padded // 2 // ALIGN * ALIGN])
            raise OSError(errno.EIO, "short write")
        with self._encoder.writing(padded), self.speeds.writing(padded):
            offset = file.sink.append(buffer[:padded])
        self._done_with(file)
        stored_crc = crc if number == RAW else crc32c(buffer[:length])
        return Chunk(
            chunk.offset, chunk.length, offset, length, number, chunk.element_size, crc, stored_crc
        )

    def _place(self, chunk: ChunkRange, length: int) -> _File:
        """Return the file for a chunk that takes `length` bytes with its padding.

        This is the shortest of the files of its group that are being filled. If that
        file would grow longer than `bytes_per_file`, a new file takes its place.
        """
        full, group = None, self._groups[chunk.offset in self._apart]
        with self._lock:
            if not group.filling:
                # A chunk that was not announced, which may be the only one.
                self._add(group, align(length))
            file, most = min(group.filling, key=lambda f: f.used), self._spread.bytes_per_file
            if most and file.used + length > most:
                over, file = file, self._add(group, align(-(-group.left // len(group.filling))))
                group.filling.remove(over)
                if over.number > 0:  # the first file stays open for the index
                    over.full, full = True, over
                    over.writing += 1
            file.end += length
            file.writing += 1
            self._placed[chunk.offset] = file.number
            group.left -= self._room(chunk)
        if full is not None:
            self._done_with(full)
        return file

    def _done_with(self, file: _File) -> None:
        with self._lock:
            file.writing -= 1
            over = file.full and file.writing == 0
        if over:
            self._finish(file)

    def _finish(self, file: _File, head: bytes | None = None) -> None:
        file.sink.finish(head)
        file.finished = True

    def finish(self, index: PartIndex, chunks: list[Chunk], *, items: int) -> PartEntry:
        """Write header, index and trailer of the part file, and make the part durable.

        Return its entry for the manifest.

        `chunks` holds the entries that `chunk` returned, or those of the linked chunks,
        in the order of the packed slot. They and the numbers of their files complete
        `index`. The files are synced before their directory. `items` is the number of
        items in the plan.
        """
        self._stored = [self._stored_chunk(chunk) for chunk in chunks]
        bases, based = self._bases()
        placed = [chunk.file for chunk in self._stored]
        first = self._files[0] if self._creator.head_last else None
        others = self._files[1:] if first is not None else list(self._files)
        older = {number: self._older[position] for position, number in self._numbers.items()}
        sizes = {number: file.size for number, file in older.items()}
        sizes |= {file.number: file.end for file in others}
        lengths = [sizes[number] for number in sorted(sizes)]
        linked = [
            msgspec.structs.replace(older[number].origin, number=number) for number in sorted(older)
        ]
        index = msgspec.structs.replace(
            index, chunks=chunks, files=lengths, placed=placed if lengths else [], linked=linked,
            bases=bases, based=based,
        )  # fmt: skip
        document = index.encode()
        failpoint("persist.index")
        end = encode_end(first.end if first is not None else ALIGN, document)
        if first is not None:
            _append(first, end)
        failpoint("persist.syncing")
        for file in others:
            if not file.finished:
                self._finish(file)
        if first is None:
            first = self._create(0, ALIGN + len(end), index=index)
            _append(first, end)
            self._finish(first)
        else:
            self._finish(first, encode_header(index, self._nonce))
        failpoint("persist.synced")
        self._finished = index, first.end
        return PartEntry(
            rank=index.rank, file=self._name(0), bytes=first.end + sum(lengths),
            raw_bytes=sum(c.raw_length for c in chunks), items=items,
            index_sha256=hashlib.sha256(document).hexdigest(), files=1 + len(lengths),
            linked_bytes=sum(file.size for file in older.values()),
            non_finite=None if index.non_finite is None else index.non_finite.values,
            chain=max((chunk.length_of_chain - 1 for chunk in self._stored), default=0),
            read_bytes=_stored_bytes(chunks, bases) if bases else 0,
        )  # fmt: skip

    def _stored_chunk(self, chunk: Chunk) -> StoredChunk:
        """Return a chunk with its place and its chain."""
        if (known := self._unchanged.get(chunk.raw_offset)) is not None:
            return known
        base = None
        if chunk.codec == DELTA:
            base = self.offers[chunk.raw_offset].base.moved(self._numbers)
        return StoredChunk(chunk, self._placed[chunk.raw_offset], base)

    def _bases(self) -> tuple[list[Base], list[int]]:
        """Return `bases` and `based` of the index."""
        bases, based = list[Base](), list[int]()
        for chunk in self._stored:
            number = 0
            for link in reversed([] if chunk.base is None else list(chunk.base.chain())):
                old = link.entry
                bases.append(
                    Base(
                        link.file, old.offset, old.stored_length, old.codec, old.raw_crc,
                        old.stored_crc, number,
                    )
                )  # fmt: skip
                number = len(bases)
            based.append(number)
        return bases, based if bases else []

    def stored(
        self,
        digests: list[bytes],
        *,
        steady: bool,
        non_finite: dict[int, Counter[int]] | None = None,
        resisting: frozenset[int] = frozenset(),
    ) -> StoredPart:
        """Return what a later part needs to link the files of this one.

        `finish` must have returned.

        `digests`, `steady`, `non_finite` and `resisting` are as in StoredPart.
        """
        index, length = self._finished
        assert index.step is not None
        links = {link.number: link for link in index.linked}
        files = [
            StoredFile(
                index.tag,
                self._name(number),
                size,
                links.get(number) or Linked(0, self._nonce, number, index.step),
            )
            for number, size in enumerate([length, *index.files])
        ]
        return StoredPart(
            index.attempt, index.world_size, self._stored, digests, files, steady,
            index.signature, non_finite, resisting,
        )  # fmt: skip

    def discard(self) -> None:
        """Delete the files that were created, and the links. Errors are ignored."""
        for file in self._files:
            file.sink.discard()
        self._unlink()


def _used(chunks: Iterable[StoredChunk]) -> set[int]:
    """Return the places of the files that hold these chunks and their chains."""
    return {link.file for chunk in chunks for link in chunk.chain()}


def _append(file: _File, end: bytes) -> None:
    with page_aligned(end) as data:
        file.sink.append(data)
    file.end += len(end)


def _stored_bytes(chunks: list[Chunk], bases: list[Base]) -> int:
    return sum(chunk.stored_length for chunk in chunks) + sum(base.stored_length for base in bases)
