"""Lends the newest snapshot of a job to readers, which are processes of the same user
that are no ranks of the job.

A loan holds nothing: the slots are reused as if there were no reader, and a reader
notices that. `newest` decides what is lent, as a pure function of what is known of the
job.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from dataclasses import dataclass, field

from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.snapshot import Key, Snapshot
from ckptd.daemon.memory.slots import Slots
from ckptd.daemon.saving.saver import Saver
from ckptd.shared import names
from ckptd.shared.errors import Busy, IntegrityError, NotFound
from ckptd.shared.wire.lifecycle import SnapshotState

MOST_WAITING = 64
"""The most readers that wait for a later snapshot at the same time."""
_LOOK_SECONDS = 1.0
"""The time between two looks for a job that the daemon does not know yet."""
NOTHING: Key = (0, -1)
"""The key of a reader that has no snapshot yet: every snapshot is later."""


@dataclass(slots=True)
class Loan:
    """A snapshot that is lent to a reader.

    `tag`: the name of its directory. `stored`: True if the reader is to read the
    checkpoint, and slots only in place of its parts. `slots`: a read-only descriptor
    for each rank whose slot is lent, by rank. The receiver closes the descriptors.
    """

    key: Key
    tag: str
    stored: bool
    slots: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        """Close the descriptors."""
        while self.slots:
            os.close(self.slots.popitem()[1])


def newest(job: Job, after: Key, but: Collection[Key]) -> tuple[Key, str, Snapshot | None] | None:
    """Return the newest snapshot of a job that can be lent, as (key, tag, snapshot), or
    None if none is later than `after`.

    The snapshot is None if the checkpoint on storage is to be read alone. Memory comes
    before storage. Of a job of several nodes, only what is durable is complete. `but`:
    snapshots that cannot be read from memory.
    """
    stored = {
        (c.attempt, c.step): c.tag for c in job.durable_checkpoints() if c.step is not None
    } | {s.key: s.directory for s in job.snapshots if s.state is SnapshotState.DURABLE}
    held = {
        s.key: s
        for s in job.snapshots
        if s.in_memory and s.key not in but and not job.is_dead(s)
        if s.node is None or s.key in stored
    }
    key = max((*stored, *held), default=NOTHING)
    if key <= after:
        return None
    snapshot = held.get(key)
    return key, stored.get(key) or (snapshot.tag if snapshot else ""), snapshot


class Readers:
    """The readers of one daemon, and what is lent to them."""

    def __init__(self, catalog: Catalog, slots: Slots, saver: Saver) -> None:
        self._catalog, self._slots = catalog, slots
        self._saver = saver
        self._waiting = 0

    async def lend(self, job_name: str, after: Key, wait: float) -> Loan | None:
        """Return the newest snapshot of a job that is later than `after`, within `wait`
        seconds, or None.

        Raises InvalidName, and Busy if too many readers wait.
        """
        names.check_name("job", job_name)
        deadline = asyncio.get_running_loop().time() + wait
        damaged = set[Key]()
        while True:
            job = self._catalog.jobs.get(job_name)
            if job is not None and (found := newest(job, after, damaged)) is not None:
                key, tag, snapshot = found
                try:
                    return await self._lent(key, tag, snapshot)
                except (IntegrityError, NotFound):
                    damaged.add(key)
                    continue
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return None
            await self._wait(job, after, damaged, left)

    async def _wait(
        self, job: Job | None, after: Key, damaged: Collection[Key], seconds: float
    ) -> None:
        """Wait until there may be a later snapshot in the job, or for at most so long."""
        if self._waiting >= MOST_WAITING:
            raise Busy(
                f"{MOST_WAITING} readers wait for snapshots already, the most that one daemon "
                f"has: try again later"
            )
        self._waiting += 1
        try:
            if job is None:
                await asyncio.sleep(min(seconds, _LOOK_SECONDS))
            else:
                await job.changed.wait_until(lambda: newest(job, after, damaged), seconds)
        finally:
            self._waiting -= 1

    async def _lent(self, key: Key, tag: str, snapshot: Snapshot | None) -> Loan:
        """Lend a snapshot, once it is checked.

        Raises IntegrityError or NotFound if it cannot be read from memory.
        """
        if snapshot is None:
            return Loan(key, tag, stored=True)
        await self._saver.check(snapshot)
        loan = Loan(key, tag, stored=snapshot.node is not None)
        try:
            if not snapshot.in_memory:
                raise NotFound(f"step {snapshot.step} has been released: that copy is lost")
            for rank, seal in sorted(snapshot.seals.items()):
                slot = self._slots.get(seal.segment)
                loan.slots[rank] = self._slots.open_again(slot, write=False)
                slot.lent = True
        except BaseException:
            loan.close()
            raise
        return loan
