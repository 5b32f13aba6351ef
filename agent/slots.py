"""The slots of this rank, made ready off the training thread: asked for, mapped, and every page faulted in by the trainer itself.

Pages that another process faulted in cost this one a minor fault each at the first copy: 3.3 times its time. A new segment costs the kernel
the zeroing of all its pages, which must not hold the training.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from ckptd.agent.client import Client
from ckptd.agent.numa import home_node
from ckptd.agent.staging import MappedSlot
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError, InternalError, StorageError
from ckptd.shared.failpoints import failpoint

log = logging.getLogger("ckptd.agent")

ALLOCATE_SECONDS = 600.0
_SLACK = 1 << 16


class Slots:
    """The slots that may be used now. `prepare` and `ensure` get others when they are too small."""

    def __init__(self, client: Client, settle: Callable[[], None]) -> None:
        """`settle` returns once no copy into a slot is under way: called before they are replaced."""
        self._client, self._settle = client, settle
        self._slots: dict[str, MappedSlot] = {}
        self._preparing: Preparation | None = None

    def __contains__(self, segment: str) -> bool:
        return segment in self._slots

    def fit(self, needed: int) -> bool:
        """Whether there are slots for `needed` bytes, and no others are being made."""
        return (self._preparing is None or self._preparing.allocated.is_set()) and self._room() >= needed

    def get(self, segment: str) -> MappedSlot:
        if segment not in self._slots:
            raise InternalError(f"the daemon granted a segment that this rank has not mapped: {segment[:8]}")
        return self._slots[segment]

    def prepare(self, capacity: int) -> None:
        """Slots of `capacity` bytes, in the background. Nothing if they are there, or if others have not come within the stall budget."""
        if (self._preparing is None or self._preparing.wait(self._client.welcome.stall_budget)) and self._room() < capacity:
            self._begin(capacity)

    def ensure(self, needed: int, deadline: float) -> bool:
        """Slots for `needed` bytes by `deadline`; False if that takes longer: it goes on in the background, for a later snapshot."""
        if self.fit(needed):
            return True
        preparing = self._preparing
        if preparing is None or preparing.allocated.is_set():
            preparing = self._begin(needed)
        if not preparing.wait(deadline - time.monotonic()):
            return False
        if preparing.error is not None:
            raise preparing.error
        return self._room() >= needed or self.ensure(needed, deadline)

    def _room(self) -> int:
        return min((slot.capacity for slot in self._slots.values()), default=-1)

    def _begin(self, needed: int) -> Preparation:
        """Some room to spare, since plain values may grow from step to step."""
        self._settle()
        self._preparing = Preparation(self._client, needed + needed // 64 + _SLACK, self._slots)
        return self._preparing

    def keep(self, segments: set[str]) -> None:
        """Of these the daemon knows; others are gone."""
        for name in [name for name in self._slots if name not in segments]:
            log.warning("a slot is gone from shared memory: what was only there is lost")
            self._slots.pop(name).close_descriptors()

    def settle(self) -> None:
        """Until nothing is under way."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def drop(self) -> None:
        for slot in self._slots.values():
            slot.forget()
        self._slots.clear()

    def forget(self) -> None:
        """In a forked child."""
        for slot in self._slots.values():
            slot.close_descriptors()


class Preparation:
    """Replaces what is in `slots` by new ones of `capacity` bytes. `allocated` is set once they may be used, or `error` says why not."""

    def __init__(self, client: Client, capacity: int, slots: dict[str, MappedSlot]) -> None:
        self.allocated = threading.Event()
        self.error: CkptdError | None = None
        self._begun = time.monotonic()
        self._client, self._capacity, self._slots = client, capacity, slots
        self._thread = threading.Thread(target=self._run, name="ckptd-prepare", daemon=True)
        self._thread.start()

    def wait(self, budget: float) -> bool:
        """Whether the slots are there, waiting until `budget` seconds after they were asked for: a slow start costs that once."""
        return self.allocated.wait(max(0.0, self._begun + budget - time.monotonic()))

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        made: list[MappedSlot] = []
        try:
            made = self._allocate()
        except CkptdError as error:
            self.error = error
        except (OSError, RuntimeError) as error:
            self.error = StorageError(f"cannot map the slots in shared memory: {error}")
        if self.error is not None:
            log.warning("slots could not be made: %s", self.error)
            for slot in self._slots.values():
                slot.forget()
            self._slots.clear()  # the daemon may have given them up to make room
        self.allocated.set()
        for slot in made:
            slot.populate()

    def _allocate(self) -> list[MappedSlot]:
        reply, descriptors = self._client.call(
            lambda n: m.Allocate(id=n, capacity=self._capacity, count=self._client.welcome.slots, node=home_node()),
            m.Segments, ALLOCATE_SECONDS,
        )  # fmt: skip
        before = list(self._slots.values())
        made: list[MappedSlot] = []
        try:
            for n, held in enumerate(reply.segments):
                made.append(MappedSlot(held.segment, *descriptors[2 * n : 2 * n + 2]))
        except BaseException:
            for slot in made:
                slot.forget()
            for fd in descriptors[2 * len(made) :]:
                os.close(fd)  # a lock that stays would keep the segment
            raise
        self._slots.clear()
        self._slots.update({slot.name: slot for slot in made})
        for slot in before:
            slot.forget()
        failpoint("agent.allocated")
        return made
