"""Measures how fast a directory is written and read, with one file that is deleted.

One thread uses large blocks, without the page cache where the file system can do that.
The daemon uses several threads, so it is at least about as fast.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptd.shared.system.fs import closing_at_end

BLOCK = 4 << 20
MOST_BYTES = 64 << 20
MOST_SECONDS = 3.0
"""After this time no further block is written, or read: a slow share is measured with
fewer. One block may take longer.
"""
_SHARE_OF_FREE = 10


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that were measured with a file of `nbytes`, in bytes per second.

    write: until the bytes are synced. read: from the storage, or from the page cache if
    `direct` is False and the file system keeps the bytes there.
    """

    nbytes: int
    write: float
    read: float
    direct: bool


def measure(directory: Path, clock: Callable[[], float] = time.perf_counter) -> Rates | None:
    """Measure a directory that exists. Return None if it has no room for a file.

    At most `MOST_BYTES` and a tenth of the free space are written. Raises OSError.
    """
    space = os.statvfs(directory)
    room = space.f_bavail * space.f_frsize // _SHARE_OF_FREE // BLOCK
    blocks = min(MOST_BYTES // BLOCK, room)
    if not blocks:
        return None
    try:
        return _measure(directory, blocks, clock, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return _measure(directory, blocks, clock, direct=False)


def _measure(directory: Path, blocks: int, clock: Callable[[], float], *, direct: bool) -> Rates:
    """Measure with at most so many blocks.

    direct: True to avoid the page cache. Raises OSError, with EINVAL if the file system
    refuses that, at the first open or later.
    """
    flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    with _scratch(directory) as file, mmap.mmap(-1, BLOCK) as block:
        block[:] = os.urandom(BLOCK)  # some file systems store zeros for nothing
        fd = os.open(file, flags | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with closing_at_end(fd):
            begun, written = clock(), 0
            while written < blocks * BLOCK and (not written or clock() < begun + MOST_SECONDS):
                written += os.write(fd, block)
                if not direct:  # a sync of all blocks could take very long
                    os.fsync(fd)
            if direct:
                os.fsync(fd)
            wrote = clock() - begun
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        fd = os.open(file, flags | os.O_RDONLY)
        with closing_at_end(fd):
            begun, got = clock(), 0
            while got < written and (not got or clock() < begun + MOST_SECONDS):
                if not (count := os.readv(fd, [block])):
                    break
                got += count
            read = clock() - begun
    return Rates(written, written / max(wrote, 1e-6), got / max(read, 1e-6), direct)


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Context manager. Yields the path of a file that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix=".ckptd-doctor-", dir=directory) as scratch:
        yield Path(scratch) / "rates"
