"""Maps files of a tmpfs, and makes them of huge pages, where the kernel has some.

A huge page, of 2 MB on most machines, takes the place of 512 pages of 4 KB. Every
process that maps or reads the file then has 512 times fewer pages to find: that would
take longer than to copy their bytes.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("ckptd.memory")

_PIECE = 32  # huge pages at once
_PATIENCE, _LEAST_RATE = 1.0, 1e9  # seconds, and bytes a second
_COLLAPSE = 25  # MADV_COLLAPSE of linux/mman.h; for files of a tmpfs since Linux 6.1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10  # MAP_FIXED of linux/mman.h


def _size() -> int:
    """Return the bytes of a huge page, or 0 if this kernel has none."""
    with suppress(OSError, ValueError):
        path = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
        return int(path.read_text())
    return 0


SIZE = _size()
"""The bytes of a huge page, or 0."""


def map_file(fd: int, length: int, protection: int) -> int:
    """Map the first `length` bytes of a file, shared, where its huge pages can be mapped
    whole: at a multiple of their size. Return the address.

    Raises OSError.
    """
    if not SIZE or length < SIZE:
        return _map(None, length, protection, mmap.MAP_SHARED, fd)
    room = length + SIZE
    reserved = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    begin = -(-reserved // SIZE) * SIZE
    end = begin + -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        _map(begin, length, protection, mmap.MAP_SHARED | _FIXED, fd)
    except OSError:
        unmap(reserved, room)
        raise
    for first, last in ((reserved, begin), (end, reserved + room)):
        if first < last:
            unmap(first, last - first)
    return begin


def _map(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(address, length, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def unmap(address: int, length: int) -> None:
    """Unmap a range of memory, while other threads run."""
    _libc.munmap(address, length)


def advise(address: int, length: int, advice: int) -> int:
    """Call madvise(2) with this advice for a range of memory, while other threads run.

    Return 0 or the errno.
    """
    return ctypes.get_errno() if _libc.madvise(address, length, advice) else 0


def take(fd: int, length: int) -> int:
    """Give a new, empty file of a tmpfs the length `length`, and as many huge pages as
    the kernel has at hand. Return their bytes.

    The kernel may have to move other pages first to make room for a huge one. If that
    takes 1 s more than 1 GB a second, no further ones are asked for. The rest of the
    file has no pages yet. The pages come from the NUMA node of the calling thread. No
    other process may have the file. Raises OSError if the length cannot be set.
    """
    os.ftruncate(fd, length)
    whole = length - length % SIZE if SIZE else 0
    if not whole:
        return 0
    begun, taken = time.monotonic(), 0
    try:
        address = map_file(fd, whole, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            while taken < whole and time.monotonic() - begun <= _PATIENCE + taken / _LEAST_RATE:
                piece = min(_PIECE * SIZE, whole - taken)
                for page in range(taken, taken + piece, SIZE):
                    os.posix_fallocate(fd, page, 1)  # a huge page is made where a page is
                if error := advise(address + taken, piece, _COLLAPSE):
                    raise OSError(error, os.strerror(error))
                # The pages stay in the file, and no longer count as memory of this process.
                advise(address + taken, piece, mmap.MADV_DONTNEED)
                taken += piece
        finally:
            unmap(address, whole)
    except OSError as error:
        log.debug("%d of %d bytes got huge pages: %s", taken, length, error.strerror)
    return taken
