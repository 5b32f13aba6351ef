"""Slots made ready off the training thread: asked for, mapped, and every page faulted in by the trainer itself.

Pages that another process faulted in cost this one a minor fault each at the first copy: 3.3 times its time. A new segment costs the kernel
the zeroing of all its pages, which must not hold the training.
"""

from __future__ import annotations

import logging
import threading
import time

from ckptd.agent.client import Client
from ckptd.agent.staging import MappedSlot
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError, StorageError
from ckptd.shared.failpoints import failpoint

log = logging.getLogger("ckptd.agent")

ALLOCATE_SECONDS = 600.0


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
            lambda n: m.Allocate(id=n, capacity=self._capacity, count=self._client.welcome.slots), m.Segments, ALLOCATE_SECONDS
        )
        before = list(self._slots.values())
        made = [MappedSlot(held.segment, *descriptors[2 * n : 2 * n + 2]) for n, held in enumerate(reply.segments)]
        self._slots.clear()
        self._slots.update({slot.name: slot for slot in made})
        for slot in before:
            slot.forget()
        failpoint("agent.allocated")
        return made
