"""Copies verified bytes to accelerators through two page-locked buffers of this process:
one is filled while the other is copied.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter, mul
from typing import Any, Self

import torch

from ckptd.agent.copy.lanes import Lane, Mark, StreamLane, lock_pages, unlocking
from ckptd.agent.copy.mapping import map_segment
from ckptd.agent.plan.layout import memory
from ckptd.agent.plan.structure import PLAIN
from ckptd.agent.read.saved import Reads, Shard
from ckptd.agent.state.dtypes import copyable

log = logging.getLogger("ckptd.agent")

BUFFER = 128 << 20
"""The most bytes of one buffer. It holds several chunks, which are read in parallel."""


_ALIGNED = 16
"""Pieces begin at multiples of so many bytes of a buffer: the largest element has 16."""


@dataclass(slots=True)
class Wanted:
    """A tensor, or a part of one, and its elements in a stored shard.

    begin: the offset of the first element in the shard, in bytes. stride: of each
    dimension of the tensor in the shard, in elements. at: its place in the buffer.
    """

    tensor: torch.Tensor
    shard: Shard
    begin: int
    stride: Sequence[int]
    at: int = 0

    def span(self, count: int) -> int:
        """Return the number of bytes of the shard from the first to the last element of
        the first `count` indices. Others may lie between them.
        """
        ends: int = sum(map(mul, (count, *self.tensor.shape[1:]), self.stride))
        return (1 + ends - sum(self.stride)) * self.tensor.itemsize

    def room(self, count: int) -> int:
        """Return the number of bytes of a buffer that the first `count` indices take. If
        other elements lie between theirs, theirs are packed behind them.
        """
        span, packed = self.span(count), count * self.tensor.nbytes // self.tensor.shape[0]
        return span + packed * (span > packed)

    def part(self, first: int, count: int, at: int = 0) -> Wanted:
        """Return `count` indices from `first` on."""
        begin = self.begin + first * self.stride[0] * self.tensor.itemsize
        return Wanted(self.tensor.narrow(0, first, count), self.shard, begin, self.stride, at)


class _Buffer:
    """Page-locked memory of this process, as bytes, and marks behind the copies from it.

    No other process can write to the memory. It is a segment nevertheless: a fork would give
    this process new pages in place of private ones, and other pages are locked then.
    """

    def __init__(self, length: int, lockable: bool) -> None:
        self.marks: list[Mark] = []
        self._unlocks: list[Callable[[], object]] = []
        self._mapped = _segment(length, self._unlocks) if lockable else None
        self.data = (
            torch.empty(length, dtype=torch.uint8, device="cpu")
            if self._mapped is None
            else torch.frombuffer(self._mapped, dtype=torch.uint8)
        )

    @property
    def is_locked(self) -> bool:
        return bool(self._unlocks)

    def lock(self, device: torch.device) -> None:
        address = self.data.data_ptr()
        if self._mapped is not None and lock_pages(address, len(self.data), device):
            self._unlocks.append(unlocking(address, device))

    def unlock(self) -> None:
        while self._unlocks:
            self._unlocks.pop()()

    def wait(self) -> None:
        """Wait until the copies from this buffer are done."""
        for mark in self.marks:
            mark.synchronize()
        self.marks.clear()


def _segment(length: int, unlocks: list[Callable[[], object]]) -> Any:
    """Map a new segment and return a ctypes array over it, or None if the system refuses."""
    try:
        fd = os.memfd_create("ckptd-recovery")
        try:
            os.truncate(fd, length)
            return map_segment(fd, length, unlocks=unlocks)
        finally:
            os.close(fd)
    except OSError as error:
        log.warning("loading is slower, because its buffer cannot be page-locked: %s", error)
        return None


class Upload:
    """The two buffers of a recovery or another load, and a lane to each of its devices.

    Context manager. A buffer is made when it is first needed, and unlocked at the end.
    """

    def __init__(self) -> None:
        self._length = 0
        self._lanes: dict[torch.device, Lane] = {}
        self._buffers: list[_Buffer] = []
        # The driver keeps the last error of each thread, and torch raises it when the
        # thread launches its next kernel. The driver may refuse to lock memory, and the
        # recovery goes on, so the thread that asks for it launches no kernel.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="ckptd-lock")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._drain()
        finally:
            self._forget()
            self._aside.shutdown()

    def _forget(self) -> None:
        """Unlock the buffers, from which no copy may run."""
        wait([self._aside.submit(buffer.unlock) for buffer in self._buffers])
        self._buffers.clear()

    @staticmethod
    def goes_to(device: torch.device) -> bool:
        """Return True if tensors on this device are filled through the buffers."""
        return device.type == "cuda"

    @staticmethod
    def takes(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return True if `fill` can fill this tensor with stored elements of this dtype,
        none of which is converted.
        """
        return (
            Upload.goes_to(tensor.device)
            and type(tensor) in PLAIN
            and tensor.dtype == dtype
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        )

    def fill(self, wanted: Iterable[Wanted], threads: int | None = None) -> int:
        """Fill tensors that this takes, and return the number of raw bytes read.

        All copies are done when this returns or raises. Raises IntegrityError, OSError.
        """
        pieces = sorted(
            (_merged(piece) for piece in wanted if piece.tensor.numel()),
            key=lambda piece: (id(piece.shard.source), piece.shard.item.offset + piece.begin),
        )
        if not pieces:
            return 0
        length = min(BUFFER, sum(piece.room(piece.tensor.shape[0]) + _ALIGNED for piece in pieces))
        if length > self._length:
            self._forget()
            self._length = length
        for piece in pieces:
            if piece.tensor.device not in self._lanes:
                self._lanes[piece.tensor.device] = StreamLane(piece.tensor.device)
        for lane in self._lanes.values():
            lane.begin()
        try:
            return sum(
                self._copy(self._buffer(number % 2, batch[0].tensor.device), batch, threads)
                for number, batch in enumerate(_batches(pieces, self._length))
            )
        finally:
            self._drain()

    def _drain(self) -> None:
        """Wait for every copy, even if Ctrl-C has come before its mark was made."""
        for lane in self._lanes.values():
            lane.mark().synchronize()

    def _copy(self, buffer: _Buffer, pieces: list[Wanted], threads: int | None) -> int:
        """Read and verify pieces in the buffer, and enqueue their copies from there."""
        buffer.wait()
        reads = Reads()
        for piece in pieces:
            data = buffer.data[piece.at : piece.at + piece.span(piece.tensor.shape[0])]
            reads.add(piece.shard, memory(data, len(data)), piece.begin)
        total = reads.run(threads)
        by_device: dict[torch.device, list[Wanted]] = defaultdict(list)
        for piece in pieces:
            by_device[piece.tensor.device].append(piece)
        for device, found in by_device.items():
            lane = self._lanes[device]
            lane.run(partial(_send, buffer.data, found))
            buffer.marks.append(lane.mark())
        return total

    def _buffer(self, number: int, device: torch.device) -> _Buffer:
        """Return one of the two buffers. Make it if it is needed for the first time."""
        if number == len(self._buffers):
            # A driver or system that has refused the first is not asked again, so that the
            # log says it once.
            made = _Buffer(self._length, all(buffer.is_locked for buffer in self._buffers))
            self._aside.submit(made.lock, device).result()
            self._buffers.append(made)
        return self._buffers[number]


def _send(buffer: torch.Tensor, pieces: list[Wanted]) -> None:
    for piece in pieces:
        tensor, end = piece.tensor, piece.at + piece.span(piece.tensor.shape[0])
        found = buffer[piece.at : end].view(tensor.dtype).as_strided(tensor.shape, piece.stride)
        if end - piece.at > tensor.nbytes:
            # torch would pack elements with gaps between them into ordinary memory.
            room = buffer[end : end + tensor.nbytes].view(tensor.dtype)
            found = room.view(tensor.shape).copy_(found)
        tensor.copy_(found, non_blocking=True)


def _merged(piece: Wanted) -> Wanted:
    """Return a piece with few dimensions, those with the largest strides in the shard
    first: dimensions that follow one another in the shard and in the tensor are one.
    """
    tensor, merged = copyable(piece.tensor.detach()), list[tuple[int, int, int]]()
    found = zip(tensor.shape, piece.stride, tensor.stride(), strict=True)
    for size, step, own in sorted(found, key=itemgetter(1), reverse=True):
        if merged and merged[-1][1:] == (size * step, size * own):
            merged[-1] = merged[-1][0] * size, step, own
        elif size > 1:
            merged.append((size, step, own))
    sizes, stride, own_stride = zip(*(merged or [(1, 1, 1)]), strict=True)
    return Wanted(tensor.as_strided(sizes, own_stride), piece.shard, piece.begin, stride)


def _batches(pieces: Iterable[Wanted], most: int) -> Iterator[list[Wanted]]:
    """Yield the pieces, in lists that take at most `most` bytes of a buffer.

    A piece is cut between two chunks where one of them fits, so that few chunks are read
    twice.
    """
    batch, at, left = list[Wanted](), 0, list(pieces)[::-1]
    while left:
        piece = left.pop()
        count = _fitting(piece, most - at, alone=not batch)
        if count:
            batch.append(piece.part(0, count, at))
            at += -(-piece.room(count) // _ALIGNED) * _ALIGNED
            if count < piece.tensor.shape[0]:
                left.append(piece.part(count, piece.tensor.shape[0] - count))
        elif batch:
            yield batch
            batch, at = [], 0
            left.append(piece)
        else:  # not even one index fits into a buffer
            left += [_merged(piece.part(n, 1)) for n in reversed(range(piece.tensor.shape[0]))]
    if batch:
        yield batch


def _fitting(piece: Wanted, room: int, *, alone: bool) -> int:
    """Return how many indices of a piece fit into so many bytes and end with a chunk. If
    none do, return 0, or how many fit if the piece is `alone`.
    """
    counts = range(1, piece.tensor.shape[0] + 1)
    if piece.room(len(counts)) <= room:
        return len(counts)
    count = bisect_right(counts, room, key=piece.room)
    start, ranges = piece.shard.item.offset + piece.begin, piece.shard.source.ranges
    number = bisect_right(ranges, start + piece.span(count), key=attrgetter("offset")) - 1
    boundary = ranges[number].offset if number >= 0 else 0
    return bisect_right(counts[:count], boundary - start, key=piece.span) or count * alone
