"""Read byte ranges of a packed slot, chunk by chunk, in parallel, into the caller's buffers.

Works on any `ChunkSource`. Only the chunks that a range touches are read, each once; nothing unverified is copied out.
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
"""Offset in the packed slot, and the writable bytes that want what is there."""


def scatter(source: ChunkSource, targets: Iterable[Target], *, threads: int | None = None) -> int:
    """Fill every target; returns the number of raw bytes decoded. Raises IntegrityError or OSError; targets may then be half filled."""
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
    """Read and check every chunk; returns raw bytes. Raises IntegrityError or OSError at the first damage."""
    return _each(source, list(range(len(source.ranges))), lambda number, raw: None, threads)


def _each(source: ChunkSource, numbers: list[int], use: Callable[[int, memoryview], None], threads: int | None) -> int:
    """Read chunks in parallel, each into a bounce buffer, so that only verified bytes reach `use`."""
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
