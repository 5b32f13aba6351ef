"""Decides what happens to the slots of trainers that are dead: notices the death, saves
what is owed, and frees what is no longer needed.

An `Owner` outlives the connection of its rank, and ends here, once its process is known
to be dead. Its seals are then recorded. The newest sealed snapshot is saved unasked and
stays in memory for `memory_ttl`; the other slots are freed. A starting daemon adopts
the slots that an earlier daemon left, and a stopping one saves what is owed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine

from ckptd.daemon import log_events
from ckptd.daemon.engine.peer_copies import PeerCopies
from ckptd.daemon.engine.seal_intake import SealIntake
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job import decisions as d
from ckptd.daemon.job import peer_replicas
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.journal.journal import JournalBroken
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.daemon.saving.saver import Saver
from ckptd.daemon.tasks import watched
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError, SnapshotFailed, StorageError
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.wire.lifecycle import SnapshotState

log = logging.getLogger("ckptd.orphans")

CHECK_SECONDS = 1.0
"""Seconds between two checks of the locks of trainers that have not reconnected after a
restart of the daemon.
"""
BEHALF_SECONDS = 10.0
"""Seconds after the death of the trainers until this node delivers the copies of another
node that has not delivered by itself.
"""
RETRY_SECONDS = 30.0
"""Seconds until a dead trainer's snapshot whose save has failed is saved again. They
double with each failure, up to `memory_ttl`.
"""


class Orphans:
    """The slots of the dead trainers of all jobs of one daemon, the watch over those
    that live, and the timers of `memory_ttl`.
    """

    def __init__(
        self,
        catalog: Catalog,
        slots: Slots,
        steps: Steps,
        seals: SealIntake,
        copies: PeerCopies,
        saver: Saver,
        events: Events,
        memory_ttl: float,
    ) -> None:
        """memory_ttl: seconds that a dead trainer's newest snapshot stays in memory."""
        self._catalog, self._slots = catalog, slots
        self._steps = steps
        self._seals, self._copies = seals, copies
        self._saver = saver
        self._events, self._ttl = events, memory_ttl
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # The retries to come, by job, and the seconds that each was to wait.
        self._retries: dict[str, tuple[asyncio.TimerHandle, float]] = {}
        self._behalf: dict[str, asyncio.TimerHandle] = {}
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

    def moved_on(self, owner: Owner) -> None:
        """End the watch of an owner whose process has begun another attempt on the same
        connection. The new owner hears there what earlier attempts are told.
        """
        self._catalog.job(owner.job).ranks.disconnect(owner)
        self.unguard(owner.identity)

    def connection_lost(self, owner: Owner) -> None:
        """Watch the locks of an owner that has no pidfd, because the kernel gave none
        or the daemon has been restarted.
        """
        self._catalog.job(owner.job).ranks.disconnect(owner)
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
            owner
            for job in self._catalog.jobs.values()
            for owner in job.ranks.owners.values()
            if owner.notify is None and owner.identity not in self._guards
        ]:
            for owner in waiting:
                if owner.notify is None and not any(
                    map(self._slots.is_held, self._slots.of(*owner.identity))
                ):
                    await self._end(owner)
            await asyncio.sleep(CHECK_SECONDS)

    async def _end(self, owner: Owner) -> None:
        """End an owner whose process is dead.

        If its memory cannot be read now, log the reason, and leave it to `_watch`.
        """
        try:
            job = await self._end_owner(owner)
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

    async def _end_owner(self, owner: Owner) -> Job | None:
        """End an owner whose process is dead: record its seals, free its other slots,
        and save the newest snapshot of its job.

        Return the job, or None if the owner has left already. If a slot cannot be read
        now, raises StorageError, and the owner stays.
        """
        failpoint("orphan.found")
        job = self._catalog.job(owner.job)
        if not job.ranks.is_here(owner):
            return None
        recorded = {
            slot.name
            for slot in self._slots.of(*owner.identity)
            if await self._seals.record_unreported(slot)
        }
        if not job.ranks.is_here(owner):
            return None
        job.ranks.remove(owner)
        log_events.TRAINER_GONE.log(
            log, "job %s attempt %d rank %d: the trainer is gone",
            owner.job, owner.attempt, owner.rank,
            job=owner.job, attempt=owner.attempt, rank=owner.rank,
        )  # fmt: skip
        for slot in self._slots.of(*owner.identity):
            if slot.name not in recorded and (step := job.step_in(slot.name)) is not None:
                self._steps.perform(job, [d.Free(step.key, slot.name)])
        self._steps.end(job, owner, "ended")
        self._save_owed(job)
        self._steps.release_replaced(job)
        self._copies.settle(job)
        return job

    def _save_owed(self, job: Job) -> None:
        """Save what `Job.owed` names, although no rank has requested it."""
        for owed in job.owed():
            self._steps.save_unasked(owed, "its trainer is gone or this daemon is stopping")
        if job.peer_replicas and not job.ranks.owners and job.name not in self._behalf:
            self._behalf[job.name] = asyncio.get_running_loop().call_later(
                BEHALF_SECONDS, self._save_on_behalf, job
            )

    def _save_on_behalf(self, job: Job) -> None:
        """Save the peer replicas whose own nodes have not delivered them, unless the
        ranks are back: the next attempt then decides.
        """
        if (timer := self._behalf.pop(job.name, None)) is not None:
            timer.cancel()
        if job.ranks.owners:
            return
        for replica in peer_replicas.owed(job):
            replica.persist = replica.unasked = True
            self._saver.start(replica)

    @staticmethod
    def _owed(job: Job) -> list[Snapshot]:
        """Return what `Job.owed` names and, once no rank is left here, the peer replicas
        that this node must save.
        """
        return [*job.owed(), *([] if job.ranks.owners else peer_replicas.owed(job))]

    def retry_later(self, snapshot: Snapshot) -> None:
        """Save what a job owes again later if the storage has failed this snapshot and no
        rank is left. No next snapshot will take its place.

        A pending retry is kept, because it saves all that is owed, and is cancelled once
        nothing is.
        """
        job, loop = self._catalog.job(snapshot.job), asyncio.get_running_loop()
        before = self._retries.get(job.name)
        if before is not None and (job.ranks.owners or not self._owed(job)):
            del self._retries[job.name]
            before[0].cancel()
            before = None
        failed = snapshot.state is SnapshotState.FAILED and snapshot.code == StorageError.code
        pending = before is not None and before[0].when() > loop.time()
        if failed and not pending and not job.ranks.owners:
            delay = min(RETRY_SECONDS if before is None else 2 * before[1], self._ttl)
            self._retries[job.name] = loop.call_later(delay, self._retry, job), delay

    def _retry(self, job: Job) -> None:
        if not job.ranks.owners:
            self._save_owed(job)
            self._save_on_behalf(job)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = watched(work, "taking back the slots of a dead trainer")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._events.changed()

    # -- memory_ttl

    def start_timer(self, job: Job) -> None:
        """Start or restart `memory_ttl` for a job that has snapshots in memory and no
        owner.
        """
        self.cancel_timer(job.name)
        if (job.snapshots or job.peer_replicas) and not job.ranks.owners:
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
        """Free the snapshots of a job that are durable, and save the newest one in
        memory if it is not. Its `memory_ttl` has ended.

        Of several nodes, snapshots whose save has failed are freed too.
        """
        self._steps.perform(job, [*d.durable(job), *d.given_up(job)])
        self._copies.free(job, peer_replicas.expired(job))
        self._save_owed(job)
        self.start_timer(job)
        self._events.changed()

    # -- start and stop of the daemon

    def adopt(self, slots: list[Slot]) -> None:
        """Adopt the segments that an earlier daemon left, before any file is finished
        or swept.
        """
        for slot in slots:
            header = slot.header
            job = self._catalog.job(header.job)
            if header.attempt > job.attempt:
                job.attempt = header.attempt
                job.world_size = header.world_size
                job.node = None
        for slot in slots:
            header = slot.header
            job = self._catalog.job(header.job)
            if header.peer_replica:
                self._copies.adopt(slot)
                continue
            if header.attempt < job.attempt:
                continue  # the trainer is fenced, so only a sealed slot of it matters
            if not job.ranks.has(header.attempt, header.rank):
                job.ranks.join(Owner(header.job, header.attempt, header.rank, header.world_size))
            if header.state is SlotState.FILLING and header.step is not None:
                job.occupy(slot.name, header.rank, (header.attempt, header.step))
        failpoint("start.adopted")

    async def record_adopted(self, slots: list[Slot]) -> None:
        """Record the seals of adopted slots in order of attempt and step, and release
        those that have no owner.
        """
        await self._copies.record_adopted([s for s in slots if s.header.peer_replica])
        own = [slot for slot in slots if not slot.header.peer_replica]
        for slot in sorted(own, key=lambda s: (s.header.attempt, s.header.step or 0)):
            if slot.header.state is SlotState.SEALED:
                try:
                    await self._seals.record(slot, adopted=True)
                except JournalBroken:
                    raise
                except StorageError as error:
                    log.error("%r is left alone: %s", slot, error)
                except (
                    CkptdError
                ) as error:  # the seal is damaged: its step has failed, and its slot is free
                    log.warning("%r removed: %s", slot, error)
                    self._saver.counters["verify_failures"] += 1
        for slot in own:
            job = self._catalog.job(slot.header.job)
            if (
                not slot.released
                and not job.ranks.has(slot.header.attempt, slot.header.rank)
                and job.step_in(slot.name) is None
            ):
                self._slots.release(slot)
        for name in sorted({slot.header.job for slot in slots}):
            self._steps.release_replaced(self._catalog.job(name))
            self.start_timer(self._catalog.job(name))

    async def drain(self) -> None:
        """Save the newest sealed snapshot and the peer replicas of every job, wait for all
        saves, and stop watching.
        """
        await self.record_unreported()
        self._saver.stop_waiting()
        while True:
            for job in self._catalog.jobs.values():
                self._save_owed(job)
                # At once: an own snapshot may wait for the receipt that only this save writes.
                self._save_on_behalf(job)
            await self._saver.drain()
            # Otherwise one was sealed, or the last rank of its job has ended, meanwhile.
            if all(owed.persist for job in self._catalog.jobs.values() for owed in self._owed(job)):
                break
        self._steps.close()
        for name in list(self._timers):
            self.cancel_timer(name)
        for timer in [*self._behalf.values(), *(timer for timer, _ in self._retries.values())]:
            timer.cancel()
        for identity in list(self._guards):
            self.unguard(identity)
        for task in self._tasks:
            task.cancel()

    async def record_unreported(self) -> None:
        """Record the seals that no trainer has reported, in all slots that can be read."""
        for slot in list(self._slots.slots.values()):
            try:
                await self._seals.record_unreported(slot)
            except StorageError as error:
                log.error("%r is left as it is: %s", slot, error)

    # -- a checkpoint is deleted

    async def let_go(self, job: Job, tag: str) -> str:
        """Free the copies in memory of a checkpoint that is about to be deleted,
        because a later daemon would save them again.

        Return the reason if that is not possible, because a running trainer or a reader
        has them.
        """
        reason = await self._free_copy(job, tag)
        self.ensure_timer(job)
        return reason

    async def _free_copy(self, job: Job, tag: str) -> str:
        known = job.checkpoints.get(tag) or names.parse_tag_directory(tag)
        if known is None or known.step is None:
            return ""
        for slot in list(self._slots.slots.values()):
            if slot.released or (slot.header.job, slot.header.attempt) != (job.name, known.attempt):
                continue
            try:
                header = slot.refresh()
            except IntegrityError:
                continue  # a damaged slot is never saved
            if (header.step, header.state) != (known.step, SlotState.SEALED):
                continue
            if self._slots.is_held(slot):
                return (
                    f"checkpoint {job.name}/{tag} is still in the memory of a running trainer; "
                    "try again after its next snapshot, or after it has ended"
                )
            if job.ranks.has(known.attempt, header.rank):
                await self._end_owner(job.ranks.owners[header.rank])
        reading = f"the copy of checkpoint {job.name}/{tag} in memory is being read"
        key = (known.attempt, known.step)
        if (snapshot := job.snapshot(key)) is not None:
            await self._saver.wait_idle(snapshot)
            if job.snapshot(key) is snapshot:
                if snapshot.holds:
                    return reading
                step = job.step(key)
                error = SnapshotFailed(f"step {known.step} was deleted by ckptd forget")
                self._steps.perform(
                    job, [d.Release(step.key)] if snapshot.complete else d.fail(step, error)
                )
        for replica in peer_replicas.of_step(job, key):
            await self._saver.wait_idle(replica)
            if replica in peer_replicas.of_step(job, key):
                if replica.holds:
                    return reading
                self._copies.free(job, [replica])
        return ""
