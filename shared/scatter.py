"""Reads byte ranges of a packed slot into the caller's buffers, chunk by chunk and in parallel.

The packed slot may come from any `ChunkSource`. Only chunks that a range touches are read, each of them once. Only verified bytes are
copied into the buffers.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from ckptd.shared.errors import IntegrityError
from ckptd.shared.part import ChunkSource

Target = tuple[int, memoryview]
"""An offset in the packed slot, and the writable buffer for the bytes from there on."""


def scatter(source: ChunkSource, targets: Iterable[Target], *, threads: int | None = None) -> int:
    """Fill every target from the packed slot, and return the number of raw bytes that were decoded.

    `threads` is the most threads that read at once, by default one for each CPU. Raises IntegrityError if a chunk is damaged or a target
    lies outside all chunks, or OSError. Some targets may be partly filled by then.
    """
    starts = [r.offset for r in source.ranges]
    wanted: dict[int, list[tuple[int, memoryview]]] = defaultdict(list)
    for offset, view in targets:
        position, end = offset, offset + len(view)
        number = bisect.bisect_right(starts, offset) - 1
        while position < end:
            if number < 0 or number >= len(starts) or not 0 <= position - starts[number] < source.ranges[number].length:
                raise IntegrityError(f"bytes {position} to {end} of the packed slot lie in no chunk")
            stop = min(end, starts[number] + source.ranges[number].length)
            wanted[number].append((position - starts[number], view[position - offset : stop - offset]))
            position, number = stop, number + 1

    def copy_out(number: int, raw: memoryview) -> None:
        for at, view in wanted[number]:
            view[:] = raw[at : at + len(view)]

    return _each(source, sorted(wanted), copy_out, threads)


def verify(source: ChunkSource, *, threads: int | None = None) -> int:
    """Read and verify every chunk, and return the number of raw bytes. Raises IntegrityError if a chunk is damaged, or OSError.

    `threads` is the most threads that read at once, by default one for each CPU.
    """
    return _each(source, list(range(len(source.ranges))), lambda number, raw: None, threads)


def _each(source: ChunkSource, numbers: list[int], use: Callable[[int, memoryview], None], threads: int | None) -> int:
    """Read the chunks with these numbers in parallel, call `use` for each one, and return the number of raw bytes.

    A chunk is first read into a buffer that belongs to the thread, so that `use` gets only verified bytes.
    """
    if not numbers:
        return 0
    local = threading.local()

    def one(number: int) -> int:
        length = source.ranges[number].length
        buffer = getattr(local, "buffer", None)
        if buffer is None or len(buffer) < length:
            buffer = local.buffer = memoryview(bytearray(length))
        source.read_chunk(number, buffer[:length])
        use(number, buffer[:length])
        return length

    workers = min(threads or os.cpu_count() or 1, len(numbers))
    with ThreadPoolExecutor(workers, thread_name_prefix="ckptd-read") as pool:
        return sum(pool.map(one, numbers))
