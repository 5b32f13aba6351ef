"""Notices when a trainer is dead and when `memory_ttl` ends, and has `custody.py` save
or free the slots then.

An `Owner` outlives the connection of its rank, and ends here, once its process is known
to be dead. Its seals are then recorded. The newest sealed snapshot is saved unasked and
stays in memory for `memory_ttl`; the other slots are freed. The start and the stop of
the daemon pass through here too, because they start and stop the timers and the watch.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine

from ckptd.daemon.engine.custody import Custody
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.memory.slots import Slot
from ckptd.daemon.tasks import watched
from ckptd.shared.errors import StorageError

log = logging.getLogger("ckptd.orphans")

CHECK_SECONDS = 1.0
"""Seconds between two checks of the locks of trainers that have not reconnected after a
restart of the daemon.
"""


class Orphans:
    """The watch of one daemon over the trainers of all jobs, with the timers of
    `memory_ttl`.
    """

    def __init__(self, custody: Custody, memory_ttl: float, changed: Callable[[], None]) -> None:
        """memory_ttl: seconds that a dead trainer's newest snapshot stays in memory.

        `changed` is called when work has ended.
        """
        self._custody, self._ttl, self._changed = custody, memory_ttl, changed
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._guards: dict[tuple[str, int, int], int] = {}
        self._unread = set[tuple[str, int, int]]()  # the dead owners whose memory cannot be read
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    # -- the death of a trainer

    def guard(self, owner: Owner, pidfd: int) -> None:
        """Watch the process of an owner.

        Takes over `pidfd`, which is readable once the process is dead: only then the
        owner ends.
        """
        self.unguard(owner.identity)
        if pidfd >= 0:
            self._guards[owner.identity] = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._died, owner)

    def unguard(self, identity: tuple[str, int, int]) -> None:
        pidfd = self._guards.pop(identity, -1)
        if pidfd >= 0:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _died(self, owner: Owner) -> None:
        self.unguard(owner.identity)
        self._spawn(self._end(owner))

    def connection_lost(self, owner: Owner) -> None:
        """Watch the locks of an owner that has no pidfd, because the kernel gave none
        or the daemon has been restarted.
        """
        if owner.identity not in self._guards:
            self.watch()

    def watch(self) -> None:
        self._spawn(self._watch())

    async def _watch(self) -> None:
        """Poll the locks until every adopted owner has reconnected or is dead.

        There is no pidfd for a trainer until it reconnects.
        """
        # The process that /proc/locks names cannot stand in for the lock. It may live
        # on after it has closed its agent and so its lock. It may be dead while a
        # forked child has the lock, and its number may be given again. In a container
        # it may not be shown at all.
        while waiting := [
            owner for owner in self._custody.absent() if owner.identity not in self._guards
        ]:
            for owner in waiting:
                if owner.notify is None and not self._custody.holds_lock(owner):
                    await self._end(owner)
            await asyncio.sleep(CHECK_SECONDS)

    async def _end(self, owner: Owner) -> None:
        """End an owner whose process is dead.

        If its memory cannot be read now, log the reason, and leave it to `_watch`.
        """
        try:
            job = await self._custody.end_owner(owner)
        except StorageError as error:
            if owner.identity not in self._unread:
                self._unread.add(owner.identity)
                log.error(
                    "job %s rank %d: the trainer is gone; %s; it is tried again every second",
                    owner.job,
                    owner.rank,
                    error,
                )
                self.connection_lost(owner)
            return
        self._unread.discard(owner.identity)
        if job is not None:
            self.start_timer(job)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = watched(work, "taking back the slots of a dead trainer")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed()

    # -- memory_ttl

    def start_timer(self, job: Job) -> None:
        """Start or restart `memory_ttl` for a job that has snapshots in memory and no
        owner.
        """
        self.cancel_timer(job.name)
        if job.snapshots and not job.ranks.owners:
            self._timers[job.name] = asyncio.get_running_loop().call_later(
                self._ttl, self._expire, job
            )

    def ensure_timer(self, job: Job) -> None:
        """Start `memory_ttl` if it is not running."""
        if job.name not in self._timers:
            self.start_timer(job)

    def cancel_timer(self, job_name: str) -> None:
        timer = self._timers.pop(job_name, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, job: Job) -> None:
        self._custody.release_expired(job)
        self.start_timer(job)
        self._changed()

    async def let_go(self, job: Job, tag: str) -> str:
        """Free the copies in memory of a checkpoint that is about to be deleted.

        Return the reason if that is not possible.
        """
        reason = await self._custody.forget_copy(job, tag)
        self.ensure_timer(job)
        return reason

    # -- start and stop of the daemon

    def adopt(self, slots: list[Slot]) -> None:
        """Adopt the segments that an earlier daemon left, before any file is finished
        or swept.
        """
        self._custody.adopt(slots)

    async def record_adopted(self, slots: list[Slot]) -> None:
        """Record the seals of adopted slots, and release the slots that belong to no
        owner.
        """
        for job in await self._custody.record_adopted(slots):
            self.start_timer(job)

    async def drain(self) -> None:
        """Save the newest sealed snapshot of every job, wait for all saves, and stop
        watching.
        """
        await self._custody.drain()
        for name in list(self._timers):
            self.cancel_timer(name)
        for identity in list(self._guards):
            self.unguard(identity)
        for task in self._tasks:
            task.cancel()
