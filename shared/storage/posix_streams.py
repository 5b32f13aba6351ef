"""Reads and writes single files of a POSIX root, as sources and sinks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.storage import locks
from ckptd.shared.system.fs import Buffer, FileSystem, page_aligned


class PosixSource:
    """An open file.

    Takes over the descriptor `fd`. With `leased`, the descriptor holds the lock of a
    lease.

    A forked child that closes a leased source does not release the lock, because the
    parent still needs it.
    """

    remote = False

    def __init__(self, fs: FileSystem, fd: int, *, leased: bool = False) -> None:
        self._fs, self._fd = fs, fd
        self._leaseholder = os.getpid() if leased else None
        self.size = fs.size(fd)

    def read(self, buffer: memoryview, offset: int) -> int:
        return self._fs.read(self._fd, buffer, offset)

    def view(self, offset: int, length: int) -> memoryview:
        buffer = memoryview(bytearray(length))
        return buffer[: self.read(buffer, offset)]

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if self._leaseholder == os.getpid():
            locks.unlock(fd)
        self._fs.close(fd)


class PosixSink:
    """A file that is being written, with O_DIRECT if the file system supports it.

    `directory` opens the directory of the file.
    """

    def __init__(
        self,
        fs: FileSystem,
        fd: int,
        name: str,
        directory: Callable[[], AbstractContextManager[int]],
        head: bytes | None = None,
    ) -> None:
        self._fs = fs
        self._fd = fd
        self._name = name
        self._directory = directory
        self._head = head
        self._lock = threading.Lock()
        self.size = ALIGN

    def append(self, data: Buffer) -> int:
        with self._lock:
            offset, self.size = self.size, self.size + len(data)
        self._fs.write(self._fd, data, offset)
        return offset

    def finish(self, head: bytes | None = None) -> None:
        head = head or self._head
        assert head is not None
        with page_aligned(head) as first:
            self._fs.write(self._fd, first, 0)
        self._fs.truncate(self._fd, self.size)  # free the room that was allocated and not used
        self._fs.sync(self._fd)
        fd, self._fd = self._fd, -1
        self._fs.close(fd)
        with self._directory() as directory:
            self._fs.sync_directory(directory)

    def discard(self) -> None:
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # the file is deleted even if closing it reports an error
            if fd >= 0:
                self._fs.close(fd)
        # If this fails, the file is left to a later sweep: by the daemon, from its
        # journal, or by the next save into the directory.
        with suppress(OSError), self._directory() as directory:
            self._fs.unlink(self._name, directory)
