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
"""After this time no further block is written: a slow share is measured with fewer."""
_SHARE_OF_FREE = 10


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured with a file of `nbytes`, in bytes per second.

    write: until the bytes are synced. read: from the storage, or from the page cache if
    `direct` is False and the file system keeps the bytes there.
    """

    nbytes: int
    write: float
    read: float
    direct: bool


def measure(directory: Path, clock: Callable[[], float] = time.perf_counter) -> Rates | None:
    """Measure a directory that exists. Return None if it has no room for a file.

    At most `MOST_BYTES` and a tenth of the free space are written, for `MOST_SECONDS` at
    most. Raises OSError.
    """
    space = os.statvfs(directory)
    room = space.f_bavail * space.f_frsize // _SHARE_OF_FREE // BLOCK
    blocks = min(MOST_BYTES // BLOCK, room)
    if not blocks:
        return None
    with _scratch(directory) as file, mmap.mmap(-1, BLOCK) as block:
        block[:] = os.urandom(BLOCK)  # some file systems store zeros for nothing
        fd, direct = _open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with closing_at_end(fd):
            begun, written = clock(), 0
            while written < blocks * BLOCK and clock() < begun + MOST_SECONDS:
                written += os.write(fd, block)
            os.fsync(fd)
            wrote = clock() - begun
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        fd, direct = _open(file, os.O_RDONLY) if direct else (os.open(file, os.O_RDONLY), False)
        with closing_at_end(fd):
            begun, got = clock(), 0
            while got < written and (count := os.readv(fd, [block])):
                got += count
            read = clock() - begun
    return Rates(written, written / max(wrote, 1e-6), got / max(read, 1e-6), direct)


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Context manager. Yields the path of a file that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix=".ckptd-doctor-", dir=directory) as scratch:
        yield Path(scratch) / "rates"


def _open(file: Path, flags: int) -> tuple[int, bool]:
    """Return a descriptor of a file, and whether it works without the page cache."""
    flags |= os.O_CLOEXEC
    try:
        return os.open(file, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(file, flags & ~os.O_EXCL, 0o600), False
