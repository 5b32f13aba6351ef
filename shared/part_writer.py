"""A part file on its way: created, filled chunk by chunk from any thread, synced. Reading the chunks is the caller's affair."""

from __future__ import annotations

import errno
import hashlib
import mmap
import threading

import msgspec
from crc32c import crc32c

from ckptd.shared import names
from ckptd.shared.binary import ALIGN, align
from ckptd.shared.codec import RAW, Codec
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import FileSystem
from ckptd.shared.manifest import PartEntry
from ckptd.shared.part import Chunk, PartIndex, encode_end, encode_header
from ckptd.shared.plan import ChunkRange


class PartWriter:
    """`create`, then `chunk` for every chunk of the packed slot, then `finish`; or `discard` at any time. Raises OSError."""

    def __init__(self, fs: FileSystem, directory: int, nonce: bytes, codec: Codec) -> None:
        self._fs, self._directory, self._nonce, self._codec = fs, directory, nonce, codec
        self._file, self._fd = "", -1
        self._next = ALIGN
        self._lock = threading.Lock()

    def create(self, rank: int, bound: int) -> None:
        """The file, with room for `bound` bytes."""
        self._file = names.part_file(rank, self._nonce)
        self._fd = self._fs.create(self._file, self._directory, direct=True)
        self._fs.allocate(self._fd, bound)
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
        with self._lock:
            offset = self._next
            self._next += padded
        if failpoint("persist.writing"):
            self._fs.write(self._fd, buffer[: padded // 2 // ALIGN * ALIGN], offset)
            raise OSError(errno.EIO, "short write")
        self._fs.write(self._fd, buffer[:padded], offset)
        return Chunk(chunk.offset, chunk.length, offset, length, number, chunk.element_size, crc, crc32c(buffer[:length]))

    def finish(self, index: PartIndex, chunks: list[Chunk], *, items: int) -> PartEntry:
        """Index, header and trailer; then the file is synced, and its directory. `index` lacks only the chunks."""
        index = msgspec.structs.replace(index, chunks=chunks)
        document = index.encode()
        self._write_aligned(encode_header(index, self._nonce), 0)
        failpoint("persist.index")
        end = encode_end(self._next, document)
        self._write_aligned(end, self._next)
        length = self._next + len(end)
        self._fs.truncate(self._fd, length)
        failpoint("persist.syncing")
        self._fs.sync(self._fd)
        fd, self._fd = self._fd, -1
        self._fs.close(fd)
        self._fs.sync_directory(self._directory)
        failpoint("persist.synced")
        return PartEntry(
            rank=index.rank, file=self._file, bytes=length, raw_bytes=sum(c.raw_length for c in chunks), items=items,
            index_sha256=hashlib.sha256(document).hexdigest(),
        )  # fmt: skip

    def _write_aligned(self, data: bytes, offset: int) -> None:
        with mmap.mmap(-1, len(data)) as buffer:  # O_DIRECT wants aligned memory
            buffer[:] = data
            self._fs.write(self._fd, buffer, offset)

    def discard(self) -> None:
        """The file goes, if there is one."""
        if self._fd >= 0:
            self._fs.close(self._fd)
            self._fd = -1
        try:
            self._fs.unlink(self._file, self._directory)
        except OSError:
            pass  # whoever knows that it was begun sweeps it
