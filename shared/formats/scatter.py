"""Reads byte ranges of a packed slot into the caller's buffers, chunk by chunk and in
parallel.

The packed slot may come from any `ChunkSource`. Only chunks that a range touches are
read, each of them once. A chunk that fills a part of one buffer, or that several large
buffers divide among them, is read and verified in place, unless buffers share memory.
The bytes of other chunks are copied into the buffers once they are verified.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.part import ChunkSource

_READS = 4
"""The least number of reads under way, unless the caller sets it: a disk needs several,
even if there are fewer cores.
"""
_REMOTE_READS = 16
"""The same for a source over the network, where each read waits tens of milliseconds
for its first byte.
"""
_LARGE = 1 << 14
"""The least average size, in bytes, of buffers that a chunk is read into directly. One
copy costs less than the calls for smaller ones.
"""
ReadTarget = tuple[int, memoryview]
"""An offset in the packed slot, and the writable buffer for the bytes from there on."""


def scatter(
    source: ChunkSource, targets: Iterable[ReadTarget], *, threads: int | None = None
) -> int:
    """Fill every target from the packed slot, and return the number of raw bytes that
    were decoded.

    `threads` is the most threads that read at once, by default one for each CPU, and at
    least 4, or 16 over the network. Raises IntegrityError if a chunk is damaged or a
    target lies outside all chunks, or OSError. Some targets may be partly filled by
    then, and hold bytes of the damaged chunk.
    """
    ranges = source.ranges
    starts, ends = [r.offset for r in ranges], [r.offset + r.length for r in ranges]
    wanted: dict[int, list[tuple[int, memoryview]]] = defaultdict(list)
    for offset, view in targets:
        position, end = offset, offset + len(view)
        number = bisect.bisect_right(starts, offset) - 1
        if number >= 0 and position < end <= ends[number]:  # nearly all of many
            wanted[number].append((position - starts[number], view))
            continue
        while position < end:
            if number < 0 or number >= len(starts) or not starts[number] <= position < ends[number]:
                raise IntegrityError(
                    f"bytes {position} to {end} of the packed slot lie in no chunk"
                )
            stop = min(end, ends[number])
            wanted[number].append(
                (position - starts[number], view[position - offset : stop - offset])
            )
            position, number = stop, number + 1

    divided = {
        number: found
        for number, views in wanted.items()
        if (found := _dividing(views, ranges[number].length))
    }
    # The bytes of one target could be verified after those of another have replaced them.
    if divided and _overlap(view for views in wanted.values() for _, view in views):
        divided = {}

    def copy_out(number: int, raw: memoryview) -> None:
        for at, view in wanted[number]:
            view[:] = raw[at : at + len(view)]

    return _each(source, sorted(wanted), lambda number: divided.get(number, []), copy_out, threads)


def _dividing(views: list[tuple[int, memoryview]], length: int) -> list[memoryview]:
    """Return the views that divide a whole chunk of this length among them, in order, or
    [] if there are none or most are small. Each view has its place in the chunk.
    """
    if len(views) > 1 and length < len(views) * _LARGE:
        return []
    found, end = [], 0
    for at, view in sorted(views, key=itemgetter(0)):
        if at != end:
            return []
        found.append(view)
        end += len(view)
    return found if end == length else []


def _overlap(views: Iterable[memoryview]) -> bool:
    """Return True if two of the buffers have a byte of memory in common."""
    spans = sorted(
        (ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
        for view in views
        if len(view)
    )
    return any(
        start + length > following for (start, length), (following, _) in itertools.pairwise(spans)
    )


def verify(source: ChunkSource, *, threads: int | None = None) -> int:
    """Read and verify every chunk, and return the number of raw bytes.

    Raises IntegrityError if a chunk is damaged, or OSError.

    `threads` is as for `scatter`.
    """
    return _each(
        source,
        list(range(len(source.ranges))),
        lambda number: [],
        lambda number, raw: None,
        threads,
    )


def _each(
    source: ChunkSource,
    numbers: list[int],
    places: Callable[[int], list[memoryview]],
    use: Callable[[int, memoryview], None],
    threads: int | None,
) -> int:
    """Read the chunks with these numbers in parallel, and return the number of raw
    bytes.

    A chunk is read into its `places`. If it has none, or cannot be read in pieces, it
    is read into a buffer of the thread, and `use` gets the verified bytes.
    """
    if not numbers:
        return 0
    local = threading.local()

    def one(number: int) -> int:
        length = source.ranges[number].length
        targets = places(number)
        if len(targets) == 1:
            source.read_chunk(number, targets[0])
            return length
        if targets and source.read_pieces(number, targets):
            return length
        buffer = getattr(local, "buffer", None)
        if buffer is None or len(buffer) < length:
            buffer = local.buffer = memoryview(bytearray(length))
        source.read_chunk(number, buffer[:length])
        use(number, buffer[:length])
        return length

    workers = min(
        threads or max(_REMOTE_READS if source.remote else _READS, os.cpu_count() or 1),
        len(numbers),
    )
    with ThreadPoolExecutor(workers, thread_name_prefix="ckptd-read") as pool:
        return sum(pool.map(one, numbers))
