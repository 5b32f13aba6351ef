"""Requests the slots of this rank, maps them, and faults in their pages, all off the
training thread.

The trainer faults in every page itself. A page that only another process has faulted in
costs the trainer a minor fault at the first copy, which then takes 3.3 times as long.
The kernel has to zero all pages of a new segment, and the training must not wait for
that.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.copy.numa import home_node
from ckptd.agent.link.client import Client
from ckptd.agent.plan.layout import Layout
from ckptd.agent.threads.flag import Flag
from ckptd.shared.errors import CkptdError, InternalError, SnapshotFailed, StorageError
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.wire import messages as m

log = logging.getLogger("ckptd.agent")

ALLOCATE_SECONDS = 600.0
_SLACK = 1 << 16
UNLOCK_SECONDS = 5.0
_UNLOCK_SECONDS_A_BYTE = 1e-10


class MappedSlots:
    """The slots of this rank that may be used now, by the name of their segment.

    `prepare` and `ensure` replace all of them by larger ones when they are too small.
    `count` is the number of slots that are made, or None for as many as the daemon is
    set to give to a rank. `outgrown` is called, on another thread, with each slot that a
    larger one replaces, before the slot is forgotten.
    """

    def __init__(self, client: Client, wait_for_copies: Callable[[float], bool]) -> None:
        """Start without slots.

        `wait_for_copies` is called before slots are replaced. It returns True once no
        copy into a slot is under way, and False after so many seconds.
        """
        self._client, self._wait_for_copies = client, wait_for_copies
        self._slots: dict[str, MappedSlot] = {}
        self._preparing: Preparation | None = None
        self._device: torch.device | None = None
        self._some_lost = False
        self.count: int | None = None
        self.outgrown: Callable[[MappedSlot], None] = lambda slot: None

    def __contains__(self, segment: str) -> bool:
        return segment in self._slots

    def fit(self, needed: int, device: torch.device | None = None) -> bool:
        """Return True if there are slots, each of `needed` bytes or more, and no others
        are being allocated. With a device, they must be made for copies from one.
        """
        return (self._preparing is None or self._preparing.allocated.is_set()) and self._will_do(
            needed, device
        )

    def get(self, segment: str) -> MappedSlot:
        if segment not in self._slots:
            raise InternalError(
                f"the daemon granted a segment that this rank has not mapped: {segment[:8]}"
            )
        return self._slots[segment]

    def prepare(
        self, capacity: int, layout: Layout | None = None, device: torch.device | None = None
    ) -> None:
        """Begin to make slots of `capacity` bytes in the background, unless the present
        slots will do.

        With a layout, the slots are also made ready for copies by it. With a device, the
        accelerator that the state is on, they are page-locked.

        Waits first for slots that are being allocated already, and for copies into the
        present slots. Does nothing if either takes longer than the daemon's stall
        budget, which counts from the request of the slots.
        """
        self._start()
        budget = self._client.welcome.stall_budget
        if (
            (self._preparing is None or self._preparing.wait(budget))
            and not self._will_do(capacity, device)
            and self._wait_for_copies(budget)
        ):
            self._begin(capacity, layout, device)

    def ensure(self, needed: int, deadline: float, device: torch.device | None = None) -> bool:
        """Wait for slots of `needed` bytes. `device` is as for `prepare`.

        Return False if they take longer than `deadline`: they are then made in the
        background.

        deadline: on the monotonic clock. If slots were already being allocated, the
        time since their request shortens the wait. Raises the CkptdError with which the
        allocation failed, and SnapshotFailed if copies from an accelerator into the
        present slots have not ended by the deadline.
        """
        self._start()
        preparing = self._preparing
        if preparing is None or preparing.allocated.is_set():
            if self._will_do(needed, device):
                return True
            if not self._wait_for_copies(max(0.0, deadline - time.monotonic())):
                raise SnapshotFailed(
                    "larger slots are needed, and copies from an accelerator into the present ones "
                    "have not ended in time: the device hangs, or has much work before them"
                )
            preparing = self._begin(needed, None, device)
        if not preparing.wait(deadline - time.monotonic()):
            return False
        if preparing.error is not None:
            raise preparing.error
        # A slot that is lost meanwhile is replaced by the next call: it may be lost again.
        return self._fits(needed, device) or self.ensure(needed, deadline, device)

    def _will_do(self, needed: int, device: torch.device | None) -> bool:
        # With fewer slots than it has made, the daemon would skip every snapshot: the
        # last one holds the newest snapshot.
        return not self._some_lost and self._fits(needed, device)

    def _fits(self, needed: int, device: torch.device | None) -> bool:
        room = min((slot.header.capacity for slot in self._slots.values()), default=-1)
        return room >= needed and (device is None or self._device is not None)

    def _begin(
        self, needed: int, layout: Layout | None, device: torch.device | None
    ) -> Preparation:
        """Begin to make slots with room to spare, since plain values may grow from step
        to step. No copy may be under way.
        """
        capacity, count = needed + needed // 64 + _SLACK, self.count or self._client.welcome.slots
        self._device, self._some_lost = device or self._device, False
        self._preparing = preparing = Preparation(
            self._client, capacity, count, self._slots, layout, self._device, self.outgrown,
            self._note_lost,
        )  # fmt: skip
        # Only once it is stored: after Ctrl-C, no thread may replace slots that later
        # calls do not know of.
        preparing.start()
        return preparing

    def keep(self, segments: set[str]) -> None:
        """Keep the slots whose segments the daemon still has, and forget the others.

        `segments` are the daemon's.
        """
        for name in [name for name in self._slots if name not in segments]:
            log.warning(
                "a slot has disappeared from shared memory: a snapshot that was only in this slot "
                "is lost"
            )
            self._slots.pop(name).close_descriptors()
            self._note_lost()

    def _note_lost(self) -> None:
        self._some_lost = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no slots are being allocated, faulted in or locked, and return True.

        Return False after `timeout` seconds: a driver may lock memory only once its
        device has nothing to do, and the device may hang.
        """
        self._start()
        if self._preparing is not None and self._preparing.join(timeout):
            self._preparing = None
        return self._preparing is None

    def _start(self) -> None:
        """Make sure that the present preparation, if any, is started: Ctrl-C may have
        come before its start.
        """
        if self._preparing is not None:
            self._preparing.start()

    def sealed(self, step: int) -> MappedSlot | None:
        """Return the slot that holds the sealed snapshot of a step, or None."""
        return next(
            (
                slot
                for slot in list(self._slots.values())
                if (slot.header.state, slot.header.step) == (SlotState.SEALED, step)
            ),
            None,
        )

    def find(self, segment: str) -> MappedSlot | None:
        return self._slots.get(segment)

    @property
    def names(self) -> list[str]:
        return list(self._slots)

    def drop(self) -> None:
        """Forget all slots. No copy may be under way.

        A driver may unlock memory only once its device has nothing to do, and the device
        may hang. If that takes long, a thread of its own finishes it.
        """
        dropped, over = list(self._slots.values()), Flag()

        def forget() -> None:
            try:
                for slot in dropped:
                    slot.forget()
            finally:
                over.set()

        if not any(slot.may_be_locked for slot in dropped):
            forget()
        else:
            for slot in dropped:
                slot.close_descriptors()  # the daemon frees the segments
            _thread.start_new_thread(forget, ())
            nbytes = sum(slot.header.file_length for slot in dropped)
            if not over.wait(UNLOCK_SECONDS + nbytes * _UNLOCK_SECONDS_A_BYTE):
                log.warning(
                    "slots have not been unlocked in time (%.1f GB): their memory is freed once "
                    "the device does so, or this process ends",
                    nbytes / 1e9,
                )
        self._slots.clear()

    def leave(self) -> None:
        """Forget all slots while copies from a device may be under way: their memory
        stays.
        """
        for slot in list(self._slots.values()):
            slot.leave()
        self._slots.clear()

    def forget(self) -> None:
        """Close the descriptors that a forked child has inherited. Runs in the child."""
        for slot in list(self._slots.values()):
            slot.close_descriptors()
        if self._preparing is not None:
            self._preparing.forget()


class Preparation:
    """The replacement of all slots in `slots` by `count` new ones of `capacity` bytes,
    on a thread of its own.

    The new slots are faulted in and, with a `layout`, made ready for copies by it. With
    a `device`, they are page-locked, and on the NUMA node of the device.

    Call `start`, then `wait` or `join`. `allocated` is set once the new slots may be
    used, or once the allocation has failed. After a failure `error` is the reason and
    `slots` is empty. Otherwise `error` is None.
    """

    def __init__(
        self,
        client: Client,
        capacity: int,
        count: int,
        slots: dict[str, MappedSlot],
        layout: Layout | None = None,
        device: torch.device | None = None,
        outgrown: Callable[[MappedSlot], None] = lambda slot: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """lost: called, on another thread, when a slot that was made cannot be used."""
        self.allocated = Flag()
        self.error: CkptdError | None = None
        self._begun = time.monotonic()
        self._client = client
        self._capacity = capacity
        self._count = count
        self._slots = slots
        self._layout = layout
        self._device, self._node = device, home_node(device)
        self._outgrown, self._lost = outgrown, lost
        self._started, self._over = threading.Lock(), Flag()
        self._made: list[MappedSlot] = []
        self._descriptors: Sequence[Descriptor] = ()

    def start(self) -> None:
        """Start the work on a new thread.

        May be called again: only one thread does the work.

        `threading.Thread.start` is not used, because it waits for its thread in Python
        code, where Ctrl-C can leave both threads stuck.
        """
        if not self._started.locked():
            _thread.start_new_thread(self._run, ())

    def wait(self, budget: float) -> bool:
        """Wait until `allocated` is set, but not longer than `budget` seconds after the
        request. Return True if it is set.

        The budget counts from the request, so that a slow allocation holds the training
        for that long only once.
        """
        return self.allocated.wait(max(0.0, self._begun + budget - time.monotonic()))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the work is over. Return False after `timeout` seconds."""
        return self._over.wait(timeout)

    def forget(self) -> None:
        """Close the descriptors of slots that are being made, which a forked child has
        inherited. Runs in the child.
        """
        for slot in list(self._made):
            slot.close_descriptors()
        for descriptor in self._descriptors:
            descriptor.close()

    def _run(self) -> None:
        if self._started.acquire(blocking=False):
            try:
                self._prepare()
            finally:
                for slot in self._made:
                    slot.ready.set()
                self.allocated.set()
                self._over.set()

    def _prepare(self) -> None:
        made: list[MappedSlot] = []
        try:
            made = self._allocate()
        except CkptdError as error:
            self.error = error
        except (OSError, RuntimeError) as error:
            self.error = StorageError(f"cannot map the slots in shared memory: {error}")
        except (
            Exception
        ) as error:  # a bug; without an error here, `ensure` would allocate again and again
            log.exception("slots could not be made")
            self.error = InternalError(f"the slots could not be made: {error!r}")
        if self.error is not None:
            log.warning("slots could not be made: %s", self.error)
            for slot in self._slots.values():
                slot.forget()
            self._slots.clear()  # the daemon may have freed them to make room
        self.allocated.set()
        for slot in made:
            try:
                # All of one slot, so that the first can be used before the next is begun.
                slot.populate(self._device)
            except CkptdError as error:
                log.error("a slot cannot be used: %s", error)
                self._slots.pop(slot.name, None)
                self._lost()
                slot.close_descriptors()  # so that a snapshot that is using it fails
            else:
                if self._layout is not None:
                    slot.cut(self._layout)
            finally:
                slot.ready.set()

    def _allocate(self) -> list[MappedSlot]:
        reply, self._descriptors = self._client.call(
            lambda n: m.Allocate(id=n, capacity=self._capacity, count=self._count,
            node=self._node), m.Segments, ALLOCATE_SECONDS,
        )  # fmt: skip
        if reply.remark:
            log.warning("%s", reply.remark)
        before = list(self._slots.values())
        made = self._made
        try:
            for n, held in enumerate(reply.segments):
                made.append(MappedSlot(held.segment, *self._descriptors[2 * n : 2 * n + 2]))
        except BaseException:
            for slot in made:
                slot.forget()
            for descriptor in self._descriptors:
                descriptor.close()  # a lock that stays open would make the daemon keep the segment
            raise
        self._slots.clear()
        self._slots.update({slot.name: slot for slot in made})
        for slot in before:
            self._outgrown(slot)
            slot.forget()
        failpoint("agent.allocated")
        return made
