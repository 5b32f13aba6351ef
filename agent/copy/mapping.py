"""Maps segments into this process without keeping a descriptor for the mapping.

`mmap.mmap` keeps a duplicate of the descriptor. A forked child would inherit it, and
would keep the pages of an unlinked segment in memory.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ckptd.shared.errors import IntegrityError
from ckptd.shared.system import huge_pages
from ckptd.shared.system.huge_pages import advise

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # from linux/mman.h, since Linux 5.14
_forking = threading.RLock()
"""Held while a segment is mapped and while this process forks. A fork between `mmap`
and MADV_DONTFORK would give the child the mapping.
"""


def map_segment(
    fd: int,
    length: int,
    *,
    writable: bool = True,
    unlocks: list[Callable[[], object]] | None = None,
) -> Any:
    """Map `length` bytes of a segment, shared, and return a ctypes array over them.

    The memory is unmapped when the last reference to the array is gone. A tensor made
    by `torch.frombuffer` holds a reference. A forked child does not inherit the
    mapping. Raises IntegrityError if the segment is shorter than `length`, OSError if
    it cannot be mapped.

    unlocks: the calls that unlock memory which has been page-locked meanwhile. They are
    made before the memory is unmapped, on a thread of their own, which then unmaps it.
    """
    if os.fstat(fd).st_size < length:
        raise IntegrityError("the segment has been cut short by another process")
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    with _forking:
        address = huge_pages.map_file(fd, length, protection)
        if error := advise(address, length, mmap.MADV_DONTFORK):
            huge_pages.unmap(address, length)
            raise OSError(error, os.strerror(error))
    array = (ctypes.c_ubyte * length).from_address(address)
    unlocks = [] if unlocks is None else unlocks
    unmap = weakref.finalize(array, _unmap, os.getpid(), address, length, unlocks)
    # Other threads may still use the memory while the interpreter ends; the kernel
    # unmaps it.
    unmap.atexit = False
    return array


@contextmanager
def present(address: int, length: int) -> Iterator[None]:
    """Context manager.

    Map all pages of a range of a segment, and no longer need them at the end.

    Raises OSError if a page cannot be read now, where an access would end this process:
    the segment has been cut short, its memory has failed, or the kernel is older than
    Linux 5.14 and cannot tell. A segment that is cut later still ends the process at
    the next access.
    """
    page, end = mmap.PAGESIZE, address + length
    start = address - address % page
    if error := advise(start, end - start, MADV_POPULATE_READ):
        raise OSError(error, os.strerror(error))
    try:
        yield
    finally:
        # By each thread for its own range, since one call for the whole segment would
        # take longer. Other threads may use the border pages.
        own, own_end = -(-address // page) * page, end - end % page
        if own < own_end:
            advise(own, own_end - own, mmap.MADV_DONTNEED)


def _unmap(owner: int, address: int, length: int, unlocks: list[Callable[[], object]]) -> None:
    """Unlock and unmap the memory, but not in a forked child: it never had this mapping,
    and may have mapped other memory at the same address.
    """
    if os.getpid() != owner:
        return

    def unmap() -> None:
        while unlocks:
            unlocks.pop()()
        huge_pages.unmap(address, length)

    if not unlocks:
        unmap()
        return
    # A driver may unlock memory only once its device has nothing to do. It also keeps the
    # last error of each thread, which torch raises when that thread launches a kernel.
    with suppress(RuntimeError):  # the interpreter ends, and the kernel unmaps the memory
        _thread.start_new_thread(unmap, ())


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forking.release
)
