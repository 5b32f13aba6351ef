"""Fills and seals a slot that is mapped into the trainer: batched copies, then the
documents, then the sealed header.

Only the trainer writes the header and the data. The header says FILLING before the
first byte changes, and SEALED after the last one. If the trainer dies at any instant,
the slot has the old snapshot, the new snapshot, or nothing that could be mistaken for a
snapshot.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch

from ckptd.agent.copy.checked_copy import CheckedCopy, Targets
from ckptd.agent.copy.fences import Transfer
from ckptd.agent.copy.lanes import lock_pages, locks, unlocking
from ckptd.agent.copy.mapping import MADV_POPULATE_WRITE, map_segment
from ckptd.agent.plan.layout import Layout
from ckptd.agent.state.dtypes import copyable, dtype_of
from ckptd.agent.threads.flag import Flag
from ckptd.shared.errors import IntegrityError, QuotaExceeded
from ckptd.shared.formats.plan import Item, align_region
from ckptd.shared.formats.segment import (
    SegmentHeader,
    SlotState,
    read_check,
    read_header,
    write_check,
    write_document,
    write_header,
)
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.huge_pages import advise

log = logging.getLogger("ckptd.agent")

Carry = Callable[[list[torch.Tensor], list[torch.Tensor]], Transfer]
"""A function that enqueues copies from accelerators. Takes the targets and the sources,
and returns the transfer.
"""
_PIECE = 64 << 20


@dataclass(frozen=True, slots=True)
class Documents:
    """The encoded values document and request document of a snapshot, which follow its
    tensors.

    The values come first, because they are the last region of the packed slot. Then
    come the plan document, which the layout has, and the request. `late` returns the
    final request once the copies into the slot are done, because it has digests that
    are known only then. The final request must fit into the slot.
    """

    values: bytes
    request: bytes
    late: Callable[[], bytes] | None = None

    def finished(self) -> Documents:
        """Return the documents with their final request.

        Call this once the copies are done.
        """
        return self if self.late is None else Documents(self.values, self.late())

    def offsets(self, layout: Layout) -> tuple[int, int, int, int]:
        """Return where values, plan and request begin and where the request ends, in
        bytes from the start of the slot's data.
        """
        return document_offsets(layout, len(self.values), len(self.request))


def document_offsets(
    layout: Layout, values_length: int, request_length: int
) -> tuple[int, int, int, int]:
    """Return where values, plan and request begin and where the request ends, in bytes
    from the start of the slot's data.

    The end is the capacity that the slot needs, without slack.
    """
    values = align_region(layout.plan.data_length)
    plan = align_region(values + values_length)
    request = align_region(plan + len(layout.document))
    return values, plan, request, request + request_length


@dataclass(frozen=True, slots=True)
class _Views:
    """The places of the items of a layout in the memory of a slot.

    signature: the layout's. targets: one for each item.
    """

    signature: bytes
    targets: Targets


_NO_VIEWS = _Views(b"", Targets.of([]))


class MappedSlot:
    """A slot whose segment is mapped into this process.

    Construction takes the lock that shows the daemon that this process is alive. Call
    `populate` once, off the training thread. For each snapshot call `fill`, or `begin`
    and then `copy`, and at last `seal`. Call `forget` at the end.

    Raises IntegrityError if the segment is damaged or cut short, OSError if it cannot
    be mapped. The descriptors then stay the caller's.
    """

    def __init__(self, name: str, data: Descriptor, lock: Descriptor) -> None:
        self.name = name
        self._data, self._lock = data, lock
        # Waits for an instant at most, while a daemon tests whether the lock is held.
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.header: SegmentHeader = read_header(self._fd)
        self._unlocks: list[Callable[[], object]] = []
        try:
            mapped = map_segment(self._fd, self.header.file_length, unlocks=self._unlocks)
        except IntegrityError:
            raise IntegrityError(f"segment {name} has been cut short by another process") from None
        self._bytes = torch.frombuffer(
            mapped, dtype=torch.uint8, offset=self.header.data_offset, count=self.header.capacity
        )
        self._views = _NO_VIEWS
        self._copying = CheckedCopy([], self.header.chunk_size)
        self._locking = threading.Lock()
        self._locked = 0
        self.ready = Flag()  # set once `populate` is over, whether it has locked or not
        self._forgotten = False

    def __repr__(self) -> str:
        return f"<MappedSlot {self.name[:8]} {self.header.state.name} step {self.header.step}>"

    @property
    def _fd(self) -> int:
        """The number of the segment's data descriptor.

        Raises ValueError once that is closed.
        """
        return self._data.fileno()

    @property
    def unlocked(self) -> int:
        """The bytes of the slot's memory that are not page-locked."""
        return self.header.file_length - self._locked

    @property
    def is_unlinked(self) -> bool:
        """True once the daemon has released the segment."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def may_be_locked(self) -> bool:
        """True if the memory is page-locked, or is being locked or unlocked, so that
        `forget` may have to wait for a driver.
        """
        return bool(self._unlocks) or not self.ready.is_set() or self._locking.locked()

    def populate(self, device: torch.device | None = None) -> None:
        """Fault in all memory of the slot, so that the first copy is as fast as later
        ones. Other threads run meanwhile. `ready` is set by the caller after that.

        device: an accelerator. The memory is page-locked for copies from it, until it is
        unmapped or the slot is forgotten, and faulted in on several threads: copies are
        slow, and hold up training, until it is locked. A failure is logged. The slot
        can still be used, and copies into it stay slow. Raises InternalError if the
        slot must not be used.
        """
        held = self._bytes  # keeps the memory mapped if another thread calls `forget` meanwhile
        if not held.numel():
            return
        start, length = held.data_ptr() - self.header.data_offset, self.header.file_length
        self._fault(start, length, 1 if device is None else fault_threads())
        for piece, nbytes in locks(start, length, self.header.data_offset):
            with self._locking:
                if device is None or self._forgotten or not lock_pages(piece, nbytes, device):
                    return
                self._unlocks.append(unlocking(piece, device))
                self._locked += nbytes

    @staticmethod
    def _fault(start: int, length: int, count: int) -> None:
        """Fault in the pages of a range of memory on `count` threads, this one included."""
        offsets, errors = iter(range(0, length, _PIECE)), list[int]()

        def work() -> None:
            for offset in offsets:  # each thread takes the next one
                if errors:
                    return
                piece = min(_PIECE, length - offset)
                if error := advise(start + offset, piece, MADV_POPULATE_WRITE):
                    errors.append(error)

        others = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
        started = []
        for other in others:
            with suppress(RuntimeError):  # the interpreter ends
                other.start()
                started.append(other)
        work()
        for other in started:
            other.join()
        if errors:
            log.debug(
                "pages of a slot could not be faulted in before the first copy: %s",
                os.strerror(errors[0]),
            )

    def cut(self, layout: Layout) -> None:
        """Find the places that copies by this layout write to, so that the first of them
        need not. Other threads may run meanwhile.
        """
        with self._locking:
            if not self._forgotten and self._views is _NO_VIEWS:
                self._views_of(layout)

    def fill(
        self,
        sources: list[torch.Tensor],
        layout: Layout,
        step: int,
        carry: Carry,
        unlike: list[int] | None = None,
    ) -> Transfer | None:
        """Begin to fill the slot, and copy all sources into it.

        The sources may change when this returns.

        unlike: the numbers of the sources that differ from their item in dtype or
        layout, or None if that is not known. Sources on the CPU are copied at once.
        `carry` enqueues the copies of those on accelerators, ordered before later
        writes. Return the transfer of these copies, or None if there are none. The slot
        is complete once that transfer is finished.
        """
        self.begin(layout, step)
        transfer = self.copy(sources, layout, range(len(layout.plan.items)), carry, unlike)
        failpoint("agent.copied")
        return transfer

    def begin(self, layout: Layout, step: int) -> None:
        """Write a header that says that the slot is being filled.

        Call this before the first byte changes.
        """
        write_header(self._fd, header := self.header.next(SlotState.FILLING, step=step))
        self.header = header
        self._copying = CheckedCopy(layout.plan.regions, header.chunk_size)
        failpoint("agent.filling")

    def copy(
        self,
        sources: list[torch.Tensor],
        layout: Layout,
        numbers: range,
        carry: Carry,
        unlike: list[int] | None = None,
    ) -> Transfer | None:
        """Copy one source for each of these item numbers of the plan, as `fill` does
        for all items. Call `begin` first.

        The first call has the first items, and each later call the items that follow.
        `unlike` has numbers of sources, as for `fill`. After an error, copies from
        accelerators may be under way.
        """
        views, transfer = self._views_of(layout), None
        targets = views.targets.part(slice(numbers.start, numbers.stop))
        if layout.columns.elsewhere:
            self._copying.skip_checks()
            unlike, tensors = None, targets.tensors
            elsewhere = [n - numbers.start for n in layout.columns.elsewhere if n in numbers]
            if elsewhere:
                transfer = carry(
                    [copyable(tensors[n]) for n in elsewhere],
                    [copyable(sources[n]) for n in elsewhere],
                )
            here = [
                n for n, number in enumerate(numbers) if layout.plan.items[number].device == "cpu"
            ]
            targets, sources = Targets.of([tensors[n] for n in here]), [sources[n] for n in here]
        half = len(sources) // 2
        self._copying.copy(
            targets.part(slice(half)), sources[:half], unlike and [n for n in unlike if n < half]
        )
        failpoint("agent.copying")
        self._copying.copy(
            targets.part(slice(half, None)),
            sources[half:],
            unlike and [n - half for n in unlike if n >= half],
        )
        return transfer

    def seal(self, layout: Layout, documents: Documents) -> None:
        """Write the documents, then the header that says that the slot is sealed.

        Raises QuotaExceeded if the documents do not fit.
        """
        header, documents = self.header, documents.finished()
        values, plan, request, end = documents.offsets(layout)
        if end > header.capacity:
            raise QuotaExceeded(
                f"the plain values of this state need {end - header.capacity} bytes more than the "
                f"slot has"
            )
        written = {
            "values": write_document(self._fd, header, values, documents.values),
            "plan": write_document(self._fd, header, plan, layout.document),
            "request": write_document(self._fd, header, request, documents.request),
        }
        failpoint("agent.documents")
        sealed = header.next(SlotState.SEALED, signature=layout.signature, **written)
        checks = self._copying.checks(documents.values)
        if checks is not None:
            write_check(self._fd, sealed, checks)
        write_header(self._fd, sealed)
        self.header = sealed
        failpoint("agent.sealed")

    @property
    def data(self) -> torch.Tensor:
        """The data area of the slot, as bytes."""
        return self._bytes

    def checks(self) -> list[int] | None:
        """Return the crc32c of each chunk of the sealed slot, or None if the segment has
        none.
        """
        return read_check(self._fd, self.header)

    def begin_copy(self, step: int) -> None:
        """Write a header that says that a slot of another node is being copied into this
        one. Call this before the first byte changes.
        """
        write_header(self._fd, header := self.header.next(SlotState.FILLING, step=step))
        self.header = header

    def seal_copy(self, source: SegmentHeader, checks: list[int]) -> None:
        """Write the checksums, then the header that says that the copy is sealed.

        source: the header of the slot that was copied. checks: the crc32c of each chunk.
        """
        sealed = self.header.next(
            SlotState.SEALED, signature=source.signature, plan=source.plan,
            request=source.request, values=source.values,
        )  # fmt: skip
        write_check(self._fd, sealed, checks)
        write_header(self._fd, sealed)
        self.header = sealed
        failpoint("agent.copy.sealed")

    def refresh(self) -> SegmentHeader:
        """Read the header from the segment and return it.

        Ctrl-C may have come after it was written and before it was stored here.
        """
        self.header = header = read_header(self._fd)
        return header

    def clear(self) -> None:
        """Write a header that says that the slot is free. For use after a failed copy."""
        free = self.header.next(SlotState.FREE, step=None)
        write_header(self._fd, free)
        self.header = free

    def _views_of(self, layout: Layout) -> _Views:
        views = self._views  # another thread may replace them
        if views.signature != layout.signature:
            memory, columns, made = self._bytes, layout.columns, list[torch.Tensor]()

            def tensors() -> list[torch.Tensor]:
                if not made:
                    made[:] = _cut(memory, layout.plan.items)
                return made

            if columns.elsewhere:
                tensors()
            begin = memory.data_ptr()
            targets = Targets(
                tensors, 0, [begin + offset for offset in columns.offsets], columns.lengths,
                columns.dtypes, columns.shapes, columns.strides,
            )  # fmt: skip
            # A single assignment, because Ctrl-C may come between any two instructions.
            views = self._views = _Views(layout.signature, targets)
        return views

    def forget(self) -> None:
        """Release the views of the memory, the page lock and both descriptors.

        No copy may be under way. If the memory may be locked, this waits for a driver,
        and the thread must launch no kernels later, as for `lock_pages`.

        The memory is unmapped when the last view of it is gone.
        """
        with self._locking:
            self._forgotten = True
            while self._unlocks:
                self._unlocks.pop()()
        self._views = _NO_VIEWS
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.close_descriptors()

    def leave(self) -> None:
        """Release both descriptors, and keep the memory mapped and page-locked as long
        as this process lives.

        Copies may be under way. The driver would wait for them before it unlocks the
        memory, and without the lock they would end in the memory of somebody else.
        """
        self._forgotten = True
        _left.append(self._bytes)
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close both descriptors. May be called again."""
        self._data.close()
        self._lock.close()


def _cut(memory: torch.Tensor, items: list[Item]) -> list[torch.Tensor]:
    """Return a view of the memory of a slot for each item.

    Neighbours of one dtype are cut out in one call, which costs a tenth.
    """
    targets: list[torch.Tensor] = []
    for dtype, group in groupby(items, attrgetter("dtype")):
        run = list(group)
        flat = memory[run[0].offset : run[-1].offset + run[-1].length].view(dtype_of(dtype))
        parts = torch.split_with_sizes(flat, [math.prod(item.sizes) for item in run])
        for part, item in zip(parts, run, strict=True):
            if item.stride is not None:
                targets.append(part.as_strided(item.sizes, item.stride))
            else:
                targets.append(part if len(item.sizes) == 1 else part.view(item.sizes))
    return targets


_left: list[torch.Tensor] = []


def fault_threads() -> int:
    """Return the number of threads that fault in a slot for an accelerator: a quarter of
    the CPUs that this process may use, at most 4. Other ranks fault in theirs meanwhile.
    """
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def batches(layout: Layout, most: int) -> Iterator[range]:
    """Yield consecutive ranges of item numbers.

    Each ends with the item that makes it `most` bytes or more; the last has the rest.
    """
    first, nbytes = 0, 0
    for number, item in enumerate(layout.plan.items):
        nbytes += item.length
        if nbytes >= most:
            yield range(first, number + 1)
            first, nbytes = number + 1, 0
    yield range(first, len(layout.plan.items))
