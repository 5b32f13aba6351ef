"""A part on its way: its files created, filled chunk by chunk from any thread, synced. Reading the chunks is the caller's affair."""

from __future__ import annotations

import errno
import hashlib
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from crc32c import crc32c

from ckptd.shared import names
from ckptd.shared.binary import ALIGN, align
from ckptd.shared.codec import RAW, Codec
from ckptd.shared.errors import InvalidConfig
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import FileSystem
from ckptd.shared.manifest import PartEntry
from ckptd.shared.part import Chunk, PartIndex, encode_end, encode_header, end_bound
from ckptd.shared.plan import DEFAULT_CHUNK, ChunkRange

MOST_FILES = 64
"""That a part is spread over at once."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Over how many files a part goes: `files_per_rank` at once, if it has as many chunks, and then as many more as it takes so that
    none is longer than `bytes_per_file` (0: no limit). The index is never divided."""

    files_per_rank: int = 1
    bytes_per_file: int = 0

    @classmethod
    def checked(cls, files_per_rank: int, bytes_per_file: int, chunk_size: int = DEFAULT_CHUNK) -> Spread:
        """Raises InvalidConfig."""
        if type(files_per_rank) is not int or not 1 <= files_per_rank <= MOST_FILES:
            raise InvalidConfig(f"files_per_rank is {files_per_rank!r}; expected 1 to {MOST_FILES}")
        if type(bytes_per_file) is not int or (bytes_per_file and bytes_per_file < 2 * chunk_size):
            raise InvalidConfig(
                f"bytes_per_file is {bytes_per_file!r}; expected 0 (no limit) or a number, at least that of two chunks, {2 * chunk_size}"
            )
        return cls(files_per_rank, bytes_per_file)


ONE_FILE = Spread()


@dataclass(slots=True, eq=False)
class _File:
    """`end`: where its next chunk goes; `reserved`: bytes that come after the last. `writing`: chunks on their way to it; `full`: it gets
    no more."""

    number: int
    fd: int
    reserved: int
    end: int = ALIGN
    writing: int = 0
    full: bool = False

    @property
    def used(self) -> int:
        return self.end + self.reserved


class PartWriter:
    """`create`, then `chunk` for every chunk of the packed slot, then `finish`; or `discard` at any time. Raises OSError.

    A file that is full is synced and closed at once, so that no more are open than are filled. `created` is called with the name of the
    first file as soon as that exists, so that the caller can lock the part.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: int,
        nonce: bytes,
        codec: Codec,
        spread: Spread = ONE_FILE,
        created: Callable[[str], None] | None = None,
    ) -> None:
        self._created = created
        self._fs, self._directory, self._nonce, self._codec, self._spread = fs, directory, nonce, codec, spread
        self._files: list[_File] = []
        self._filling: list[_File] = []
        self._placed: dict[int, int] = {}
        self._left = 0
        self._lock = threading.Lock()

    def create(self, index: PartIndex, ranges: list[ChunkRange], documents: int) -> None:
        """The files, with room for these chunks if none shrinks. `index` says whose they are; `documents`: length of plan and request."""
        self._index = index
        self._left = sum(align(chunk.length) for chunk in ranges)
        count = max(1, min(self._spread.files_per_rank, len(ranges)))
        for number in range(count):
            self._add(align(-(-self._left // count)), end_bound(len(ranges), documents) if number == 0 else 0)

    def _add(self, room: int, reserved: int = 0) -> _File:
        """One file more, with room for `room` bytes of chunks."""
        number = len(self._files)
        fd = self._fs.create(self._name(number), self._directory, direct=True)
        file = _File(number, fd, reserved)
        self._files.append(file)
        self._filling.append(file)
        if number == 0 and self._created is not None:
            self._created(self._name(0))
        room += file.used
        self._fs.allocate(fd, min(room, self._spread.bytes_per_file or room))
        if number > 0:
            self._write_header(file, [0])
        failpoint("persist.created")
        return file

    def _name(self, number: int) -> str:
        return names.part_file(self._index.rank, self._nonce, number)

    def chunk(self, chunk: ChunkRange, raw: memoryview, stored: memoryview) -> Chunk:
        """Encode and write the chunk whose bytes `raw` begins with; both buffers are page-aligned, with room for `align(chunk.length)`
        bytes, and hold anything afterwards."""
        crc = crc32c(raw[: chunk.length])
        encoded = self._codec.encode(raw[: chunk.length], chunk.element_size)
        length, number, buffer = chunk.length, RAW, raw
        if encoded is not None:
            length, number, buffer = len(encoded), self._codec.number, stored
            stored[:length] = encoded
        padded = align(length)
        buffer[length:padded] = bytes(padded - length)
        file, offset = self._place(chunk, padded)
        if failpoint("persist.writing"):
            self._fs.write(file.fd, buffer[: padded // 2 // ALIGN * ALIGN], offset)
            raise OSError(errno.EIO, "short write")
        self._fs.write(file.fd, buffer[:padded], offset)
        self._done_with(file)
        return Chunk(chunk.offset, chunk.length, offset, length, number, chunk.element_size, crc, crc32c(buffer[:length]))

    def _place(self, chunk: ChunkRange, length: int) -> tuple[_File, int]:
        """In the shortest file; or, if that would grow too long, in a new one that takes its turn."""
        full = None
        with self._lock:
            file, most = min(self._filling, key=lambda f: f.used), self._spread.bytes_per_file
            if most and file.used + length > most:
                over, file = file, self._add(align(-(-self._left // len(self._filling))))
                self._filling.remove(over)
                if over.number > 0:  # the index is still to come into the first
                    over.full, full = True, over
                    over.writing += 1
            offset, file.end = file.end, file.end + length
            file.writing += 1
            self._placed[chunk.offset] = file.number
            self._left -= align(chunk.length)
        if full is not None:
            self._done_with(full)
        return file, offset

    def _done_with(self, file: _File) -> None:
        with self._lock:
            file.writing -= 1
            over = file.full and file.writing == 0
        if over:
            self._close(file)

    def _close(self, file: _File) -> None:
        """It is whole: now it becomes durable."""
        self._fs.truncate(file.fd, file.end)
        self._fs.sync(file.fd)
        fd, file.fd = file.fd, -1
        self._fs.close(fd)

    def finish(self, index: PartIndex, chunks: list[Chunk], *, items: int) -> PartEntry:
        """Index, header and trailer; then the files are synced, and their directory. `index` lacks only the chunks."""
        placed = [self._placed[chunk.raw_offset] for chunk in chunks]
        first, *others = self._files
        lengths = [file.end for file in others]
        index = msgspec.structs.replace(index, chunks=chunks, files=lengths, placed=placed if others else [])
        document = index.encode()
        self._write_header(first, lengths)
        failpoint("persist.index")
        end = encode_end(first.end, document)
        self._write_aligned(first.fd, end, first.end)
        first.end += len(end)
        failpoint("persist.syncing")
        for file in self._files:
            if file.fd >= 0:
                self._close(file)
        self._fs.sync_directory(self._directory)
        failpoint("persist.synced")
        return PartEntry(
            rank=index.rank, file=self._name(0), bytes=sum(file.end for file in self._files), raw_bytes=sum(c.raw_length for c in chunks),
            items=items, index_sha256=hashlib.sha256(document).hexdigest(), files=len(self._files),
        )  # fmt: skip

    def _write_header(self, file: _File, lengths: list[int]) -> None:
        header = encode_header(msgspec.structs.replace(self._index, files=lengths), self._nonce, file.number)
        self._write_aligned(file.fd, header, 0)

    def _write_aligned(self, fd: int, data: bytes, offset: int) -> None:
        with mmap.mmap(-1, len(data)) as buffer:  # O_DIRECT wants aligned memory
            buffer[:] = data
            self._fs.write(fd, buffer, offset)

    def discard(self) -> None:
        """The files go, if there are any."""
        for file in self._files:
            fd, file.fd = file.fd, -1
            try:
                if fd >= 0:
                    self._fs.close(fd)
            except OSError:
                pass  # it goes all the same
            try:
                self._fs.unlink(self._name(file.number), self._directory)
            except OSError:
                pass  # whoever knows that it was begun sweeps it
