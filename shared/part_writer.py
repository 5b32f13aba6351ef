"""A part on its way: its files created, filled chunk by chunk from any thread, synced. Reading the chunks is the caller's affair."""

from __future__ import annotations

import errno
import hashlib
import mmap
import threading
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
        if not 1 <= files_per_rank <= MOST_FILES:
            raise InvalidConfig(f"files_per_rank is {files_per_rank}; expected 1 to {MOST_FILES}")
        if bytes_per_file and bytes_per_file < 2 * chunk_size:
            raise InvalidConfig(f"bytes_per_file is {bytes_per_file}; expected 0 (no limit) or at least two chunks, {2 * chunk_size}")
        return cls(files_per_rank, bytes_per_file)


ONE_FILE = Spread()


@dataclass(slots=True)
class _File:
    """`end`: where its next chunk goes; `reserved`: bytes that come after the last."""

    fd: int
    end: int = ALIGN
    reserved: int = 0


class PartWriter:
    """`create`, then `chunk` for every chunk of the packed slot, then `finish`; or `discard` at any time. Raises OSError."""

    def __init__(self, fs: FileSystem, directory: int, nonce: bytes, codec: Codec, spread: Spread = ONE_FILE) -> None:
        self._fs, self._directory, self._nonce, self._codec, self._spread = fs, directory, nonce, codec, spread
        self._rank = self._room = 0
        self._files: list[_File] = []
        self._placed: dict[int, int] = {}
        self._lock = threading.Lock()

    def create(self, rank: int, ranges: list[ChunkRange], documents: int) -> None:
        """The files, with room for these chunks if none shrinks. `documents`: length of plan and request."""
        self._rank = rank
        lengths = [align(chunk.length) for chunk in ranges]
        end, count = end_bound(len(ranges), documents), max(1, min(self._spread.files_per_rank, len(ranges)))
        self._room = sum(lengths) if count == 1 else sum(lengths) // count + max(lengths)
        for number in range(count):
            self._add(end if number == 0 else 0)

    def _add(self, reserved: int = 0) -> None:
        self._files.append(_File(-1, reserved=reserved))
        name = names.part_file(self._rank, self._nonce, len(self._files) - 1)
        file = self._files[-1]
        file.fd = self._fs.create(name, self._directory, direct=True)
        room = ALIGN + self._room + reserved
        self._fs.allocate(file.fd, min(room, self._spread.bytes_per_file or room))
        failpoint("persist.created")

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
        fd, offset = self._place(chunk, padded)
        if failpoint("persist.writing"):
            self._fs.write(fd, buffer[: padded // 2 // ALIGN * ALIGN], offset)
            raise OSError(errno.EIO, "short write")
        self._fs.write(fd, buffer[:padded], offset)
        return Chunk(chunk.offset, chunk.length, offset, length, number, chunk.element_size, crc, crc32c(buffer[:length]))

    def _place(self, chunk: ChunkRange, length: int) -> tuple[int, int]:
        """Descriptor and offset: in the shortest file, or in a new one if it would grow too long."""
        with self._lock:
            number = min(range(len(self._files)), key=lambda n: self._files[n].end + self._files[n].reserved)
            file, most = self._files[number], self._spread.bytes_per_file
            if most and file.end + file.reserved + length > most:
                self._add()
                number, file = len(self._files) - 1, self._files[-1]
            offset, file.end = file.end, file.end + length
            self._placed[chunk.offset] = number
        return file.fd, offset

    def finish(self, index: PartIndex, chunks: list[Chunk], *, items: int) -> PartEntry:
        """Index, header and trailer; then the files are synced, and their directory. `index` lacks only the chunks."""
        placed = [self._placed[chunk.raw_offset] for chunk in chunks]
        ends = [file.end for file in self._files]
        index = msgspec.structs.replace(index, chunks=chunks, files=ends[1:], placed=placed if len(ends) > 1 else [])
        document = index.encode()
        for number, file in enumerate(self._files):
            self._write_aligned(file.fd, encode_header(index, self._nonce, number), 0)
        failpoint("persist.index")
        end = encode_end(ends[0], document)
        self._write_aligned(self._files[0].fd, end, ends[0])
        ends[0] += len(end)
        for file, length in zip(self._files, ends, strict=True):
            self._fs.truncate(file.fd, length)
        failpoint("persist.syncing")
        for file in self._files:
            self._fs.sync(file.fd)
            fd, file.fd = file.fd, -1
            self._fs.close(fd)
        self._fs.sync_directory(self._directory)
        failpoint("persist.synced")
        return PartEntry(
            rank=index.rank, file=names.part_file(self._rank, self._nonce), bytes=sum(ends), raw_bytes=sum(c.raw_length for c in chunks),
            items=items, index_sha256=hashlib.sha256(document).hexdigest(), files=len(ends),
        )  # fmt: skip

    def _write_aligned(self, fd: int, data: bytes, offset: int) -> None:
        with mmap.mmap(-1, len(data)) as buffer:  # O_DIRECT wants aligned memory
            buffer[:] = data
            self._fs.write(fd, buffer, offset)

    def discard(self) -> None:
        """The files go, if there are any."""
        for number, file in enumerate(self._files):
            if file.fd >= 0:
                self._fs.close(file.fd)
                file.fd = -1
            try:
                self._fs.unlink(names.part_file(self._rank, self._nonce, number), self._directory)
            except OSError:
                pass  # whoever knows that it was begun sweeps it
