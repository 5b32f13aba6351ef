"""Slots as the trainer sees them: mapped, populated off the training thread, and filled by batched copies.

The trainer alone writes headers and data. A header says FILLING before the first byte changes and SEALED after the last, so that a death at
any instant leaves either the old snapshot, or the new one, or none that could be mistaken for one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ckptd.agent.copy.fences import Transfer
from ckptd.agent.copy.lanes import lock_pages, unlock_pages
from ckptd.agent.copy.mapping import map_segment, populate
from ckptd.agent.plan.layout import Layout, as_integer, dtype_of
from ckptd.shared.descriptor import Descriptor
from ckptd.shared.errors import IntegrityError, QuotaExceeded
from ckptd.shared.failpoints import failpoint
from ckptd.shared.plan import Item, align_region
from ckptd.shared.segment import SegmentHeader, SlotState, read_header, write_document, write_header

log = logging.getLogger("ckptd.agent")

Carry = Callable[[list[torch.Tensor], list[torch.Tensor]], Transfer]
"""Begins copies from accelerators: targets, sources."""
MADV_POPULATE_WRITE = 23  # linux/mman.h, 5.14
_PIECE = 64 << 20
_COPYABLE = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Documents:
    """What is written behind the tensors: `values` first, since it is the last region."""

    values: bytes
    request: bytes

    def offsets(self, layout: Layout) -> tuple[int, int, int, int]:
        """Where values, plan and request begin, and where the last ends."""
        return document_offsets(layout, len(self.values), len(self.request))


def document_offsets(layout: Layout, values_length: int, request_length: int) -> tuple[int, int, int, int]:
    """See `Documents.offsets`. The last is what a slot needs in bytes of data, without slack."""
    values = align_region(layout.data_length)
    plan = align_region(values + values_length)
    request = align_region(plan + len(layout.document))
    return values, plan, request, request + request_length


@dataclass(frozen=True, slots=True)
class _Views:
    """The places of a layout's items in a slot. `elsewhere`: numbers of the items that are on accelerators."""

    signature: bytes
    targets: list[torch.Tensor]
    as_integers: bool
    elsewhere: list[int]


_NO_VIEWS = _Views(b"", [], False, [])


class MappedSlot:
    """One segment, mapped. Construction takes the lock that tells the daemon that this process lives.

    Raises IntegrityError if the segment has been damaged or cut short, OSError if it cannot be mapped: the descriptors stay the caller's.
    """

    def __init__(self, name: str, data: Descriptor, lock: Descriptor) -> None:
        self.name = name
        self._data, self._lock = data, lock
        fcntl.flock(lock, fcntl.LOCK_EX)  # at most a daemon's test is in the way, for an instant
        self.header: SegmentHeader = read_header(self._fd)
        try:
            mapped = map_segment(self._fd, self.header.file_length)
        except IntegrityError:
            raise IntegrityError(f"segment {name} has been cut short by another process") from None
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8, offset=self.header.data_offset, count=self.header.capacity)
        self._views = _NO_VIEWS
        self._locking, self._locked_at, self._forgotten = threading.Lock(), 0, False

    def __repr__(self) -> str:
        return f"<MappedSlot {self.name[:8]} {self.header.state.name} step {self.header.step}>"

    @property
    def _fd(self) -> int:
        """Raises ValueError once the descriptors are closed."""
        return self._data.fileno()

    @property
    def capacity(self) -> int:
        return self.header.capacity

    def populate(self) -> None:
        """Fault in every page, so that the first copy is as fast as later ones. Other threads run meanwhile."""
        held = self._bytes  # keeps the mapping, should the slot be forgotten meanwhile
        if not held.numel():
            return
        start, length = held.data_ptr() - self.header.data_offset, self.header.file_length
        for offset in range(0, length, _PIECE):
            if error := populate(start + offset, min(_PIECE, length - offset), MADV_POPULATE_WRITE):
                log.debug("pages of a slot could not be mapped ahead: %s", os.strerror(error))
                break
        with self._locking:
            if not self._forgotten and lock_pages(start, length):
                self._locked_at = start

    def fill(self, sources: list[torch.Tensor], layout: Layout, step: int, carry: Carry) -> Transfer | None:
        """Copy all sources; when this returns they may change. What is on accelerators `carry` takes: it is there once that is finished."""
        self.begin(step)
        transfer = self.copy(sources, layout, range(len(layout.plan.items)), carry)
        failpoint("agent.copied")
        return transfer

    def begin(self, step: int) -> None:
        """Say that it is being filled, before the first byte changes."""
        write_header(self._fd, header := self.header.next(SlotState.FILLING, step=step))
        self.header = header
        failpoint("agent.filling")

    def copy(self, sources: list[torch.Tensor], layout: Layout, numbers: range, carry: Carry) -> Transfer | None:
        """As `fill`, for those items of the plan that have these numbers."""
        views, transfer = self._views_of(layout), None
        targets = views.targets[numbers.start : numbers.stop]
        if views.as_integers:
            targets, sources = _integers(targets, sources)
        if views.elsewhere:
            elsewhere = [n - numbers.start for n in views.elsewhere if n in numbers]
            if elsewhere:
                transfer = carry([targets[n] for n in elsewhere], [sources[n] for n in elsewhere])
            here = [n for n, number in enumerate(numbers) if layout.plan.items[number].device == "cpu"]
            targets, sources = [targets[n] for n in here], [sources[n] for n in here]
        half = len(targets) // 2
        try:
            with torch.no_grad():
                _copy(targets[:half], sources[:half])
                failpoint("agent.copying")
                _copy(targets[half:], sources[half:])
        except BaseException:
            if transfer is not None:
                transfer.wait()
            raise
        return transfer

    def seal(self, layout: Layout, documents: Documents) -> None:
        """Write the documents, then the header that says so. Raises QuotaExceeded if they do not fit any more."""
        header = self.header
        values, plan, request, end = documents.offsets(layout)
        if end > header.capacity:
            raise QuotaExceeded(f"the plain values of this state need {end - header.capacity} bytes more than the slot has")
        written = {
            "values": write_document(self._fd, header, values, documents.values),
            "plan": write_document(self._fd, header, plan, layout.document),
            "request": write_document(self._fd, header, request, documents.request),
        }
        failpoint("agent.documents")
        sealed = header.next(SlotState.SEALED, signature=layout.signature, **written)
        write_header(self._fd, sealed)
        self.header = sealed
        failpoint("agent.sealed")

    def refresh(self) -> SegmentHeader:
        """Read the header again: Ctrl-C may have come after it was written and before it was kept here."""
        self.header = header = read_header(self._fd)
        return header

    def clear(self) -> None:
        """Say that nothing is in it: after a copy that failed."""
        free = self.header.next(SlotState.FREE, step=None)
        write_header(self._fd, free)
        self.header = free

    def _views_of(self, layout: Layout) -> _Views:
        if self._views.signature != layout.signature:
            targets = [self._view(item) for item in layout.plan.items]
            elsewhere = [number for number, item in enumerate(layout.plan.items) if item.device != "cpu"]
            # kept all at once: Ctrl-C may come between any two instructions
            self._views = _Views(layout.signature, targets, not _COPYABLE.issuperset(target.dtype for target in targets), elsewhere)
        return self._views

    def _view(self, item: Item) -> torch.Tensor:
        flat = self._bytes[item.offset : item.offset + item.length].view(dtype_of(item.dtype))
        return flat.as_strided(item.sizes, item.stride) if item.stride is not None else flat.view(item.sizes)

    def forget(self) -> None:
        """Let go of the mapping's views and of the lock. The pages go when the last view does. No copy may be under way."""
        with self._locking:
            self._forgotten = True
            if self._locked_at:
                unlock_pages(self._locked_at)
                self._locked_at = 0
        self._views = _NO_VIEWS
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close both descriptors. Closing them again does nothing."""
        self._data.close()
        self._lock.close()


def batches(layout: Layout, most: int) -> Iterator[range]:
    """Yield ranges of item numbers, each as many as make `most` bytes."""
    first, nbytes = 0, 0
    for number, item in enumerate(layout.plan.items):
        nbytes += item.length
        if nbytes >= most:
            yield range(first, number + 1)
            first, nbytes = number + 1, 0
    yield range(first, len(layout.plan.items))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """One batched call."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _integers(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Dtypes that torch cannot copy (sub-byte, some floats) go as integers of their size."""
    pairs = [(t, s) if t.dtype in _COPYABLE else (as_integer(t), as_integer(s)) for t, s in zip(targets, sources, strict=True)]
    return [target for target, _ in pairs], [source for _, source in pairs]
