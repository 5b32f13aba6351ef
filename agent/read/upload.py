"""Copies verified bytes to accelerators through two page-locked buffers of this process:
one is filled while the other is copied.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Self

import torch

from ckptd.agent.copy.lanes import Lane, Mark, StreamLane, lock_pages, unlock_pages
from ckptd.agent.copy.mapping import map_segment
from ckptd.agent.plan.layout import memory
from ckptd.agent.read.saved import Reads, Shard
from ckptd.agent.state.dtypes import copyable

log = logging.getLogger("ckptd.agent")

BUFFER = 128 << 20
"""The most bytes of one buffer. It holds several chunks, which are read in parallel."""


@dataclass(slots=True)
class _Piece:
    """A range of a stored shard.

    flat: the destination of the whole shard, as bytes. begin, end: the range. at: its
    place in the buffer.
    """

    flat: torch.Tensor
    shard: Shard
    begin: int
    end: int
    at: int


class _Buffer:
    """Page-locked memory of this process, as bytes, and marks behind the copies from it.

    No other process can write to the memory. It is a segment nevertheless: of private
    memory, a fork would give this process other pages than those that are locked.
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
            self._unlocks.append(partial(_unlock, os.getpid(), address, device))

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
        log.warning("a recovery is slower, because its buffer cannot be page-locked: %s", error)
        return None


def _unlock(owner: int, address: int, device: torch.device) -> None:
    """Unlock memory, but not in a forked child, which has no such mapping."""
    if os.getpid() == owner:
        unlock_pages(address, device)


class Upload:
    """The two buffers of one recovery, and a lane to each of its devices.

    Context manager. A buffer is made when it is first needed, and unlocked at the end.
    """

    def __init__(self, most: int) -> None:
        """most: the bytes of the checkpoint, beyond which a buffer need not be."""
        self._length = max(1, min(BUFFER, most))
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
            for buffer in self._buffers:
                self._aside.submit(buffer.unlock)
            self._aside.shutdown()
            self._buffers.clear()

    @staticmethod
    def goes_to(device: torch.device) -> bool:
        """Return True if tensors on this device are filled through the buffers."""
        return device.type == "cuda"

    def fill(self, wanted: Iterable[tuple[torch.Tensor, Shard]], threads: int | None = None) -> int:
        """Fill tensors with the bytes of shards, and return the number of raw bytes read.

        Each tensor must be dense, and have the dtype and the strides of its shard. All
        copies are done when this returns or raises. Raises IntegrityError, OSError.
        """
        shards = sorted(
            ((tensor, shard) for tensor, shard in wanted if shard.item.length),
            key=lambda pair: (id(pair[1].source), pair[1].item.offset),
        )
        if not shards:
            return 0
        for tensor, _ in shards:
            if tensor.device not in self._lanes:
                self._lanes[tensor.device] = StreamLane(tensor.device)
        for lane in self._lanes.values():
            lane.begin()
        try:
            return sum(
                self._copy(self._buffer(number % 2, pieces[0].flat.device), pieces, threads)
                for number, pieces in enumerate(_batches(shards, self._length))
            )
        finally:
            self._drain()

    def _drain(self) -> None:
        """Wait for every copy, even if Ctrl-C has come before its mark was made."""
        for lane in self._lanes.values():
            lane.mark().synchronize()

    def _copy(self, buffer: _Buffer, pieces: list[_Piece], threads: int | None) -> int:
        """Read and verify pieces in the buffer, and enqueue their copies from there."""
        buffer.wait()
        reads = Reads()
        for piece in pieces:
            data = buffer.data[piece.at : piece.at + piece.end - piece.begin]
            reads.add(piece.shard, memory(data, len(data)), piece.begin)
        total = reads.run(threads)
        by_device: dict[torch.device, list[_Piece]] = defaultdict(list)
        for piece in pieces:
            by_device[piece.flat.device].append(piece)
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


def _send(buffer: torch.Tensor, pieces: list[_Piece]) -> None:
    for piece in pieces:
        data = buffer[piece.at : piece.at + piece.end - piece.begin]
        piece.flat[piece.begin : piece.end].copy_(data, non_blocking=True)


def _batches(shards: Iterable[tuple[torch.Tensor, Shard]], most: int) -> Iterator[list[_Piece]]:
    """Yield the pieces of all shards, in lists of at most `most` bytes.

    A shard is cut between two chunks where one of them fits, so that few chunks are read
    twice.
    """
    batch, at = list[_Piece](), 0
    for tensor, shard in shards:
        flat, begin = _flat(tensor), 0
        while begin < shard.item.length:
            end = _end(shard, begin, most - at)
            if end is None and at:
                yield batch
                batch, at = [], 0
                continue
            end = end or begin + most
            batch.append(_Piece(flat, shard, begin, end, at))
            at, begin = at + end - begin, end
    if batch:
        yield batch


def _end(shard: Shard, begin: int, room: int) -> int | None:
    """Return the end of the piece that begins at `begin` and has at most `room` bytes, or
    None if none ends with a chunk.
    """
    length = shard.item.length
    if length - begin <= room:
        return length
    ranges = shard.source.ranges
    number = bisect_right(ranges, shard.item.offset + begin + room, key=attrgetter("offset")) - 1
    start = ranges[number].offset if number >= 0 else 0
    return start - shard.item.offset if start > shard.item.offset + begin else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes."""
    flat = copyable(tensor.detach()).as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
