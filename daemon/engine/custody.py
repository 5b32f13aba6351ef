"""Acts on slots without a request of their rank: adopts and ends owners, saves what is
owed, and frees what is no longer needed.

`orphans.py` decides when: after a trainer's death, after `memory_ttl`, and at the
daemon's start and stop.
"""

from __future__ import annotations

import logging

from ckptd.daemon.engine.seal_intake import SealIntake
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job import decisions as d
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.journal.journal import JournalBroken
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.daemon.saving.saver import Saver
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError, SnapshotFailed, StorageError
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.system.failpoints import failpoint

log = logging.getLogger("ckptd.orphans")


class Custody:
    """The custody of one daemon over the slots of all jobs."""

    def __init__(
        self, catalog: Catalog, slots: Slots, steps: Steps, seals: SealIntake, saver: Saver
    ) -> None:
        self._catalog, self._slots, self._steps, self._seals, self._saver = (
            catalog,
            slots,
            steps,
            seals,
            saver,
        )

    # -- a new daemon

    def adopt(self, slots: list[Slot]) -> None:
        """Adopt the segments that an earlier daemon left, before any file is finished
        or swept.
        """
        for slot in slots:
            header = slot.header
            job = self._catalog.job(header.job)
            if header.attempt > job.attempt:
                job.attempt, job.world_size, job.node = header.attempt, header.world_size, None
        for slot in slots:
            header = slot.header
            job = self._catalog.job(header.job)
            if header.attempt < job.attempt:
                continue  # the trainer is fenced, so only a sealed slot of it matters
            if not job.ranks.has(header.attempt, header.rank):
                job.ranks.join(Owner(header.job, header.attempt, header.rank, header.world_size))
            if header.state is SlotState.FILLING and header.step is not None:
                job.occupy(slot.name, header.rank, (header.attempt, header.step))
        failpoint("start.adopted")

    async def record_adopted(self, slots: list[Slot]) -> list[Job]:
        """Record the seals of adopted slots in order of attempt and step, and release
        those that have no owner. Return their jobs.
        """
        for slot in sorted(slots, key=lambda s: (s.header.attempt, s.header.step or 0)):
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
        for slot in slots:
            job = self._catalog.job(slot.header.job)
            if (
                not slot.released
                and not job.ranks.has(slot.header.attempt, slot.header.rank)
                and job.step_in(slot.name) is None
            ):
                self._slots.release(slot)
        jobs = [self._catalog.job(name) for name in sorted({slot.header.job for slot in slots})]
        for job in jobs:
            self._steps.release_replaced(job)
        return jobs

    # -- owners

    def absent(self) -> list[Owner]:
        """Return the owners whose connection is lost."""
        return [
            owner
            for job in self._catalog.jobs.values()
            for owner in job.ranks.owners.values()
            if owner.notify is None
        ]

    def holds_lock(self, owner: Owner) -> bool:
        """Return True if the trainer of an owner holds its lock on a segment."""
        return any(self._slots.is_held(slot) for slot in self._slots.of(*owner.identity))

    async def end_owner(self, owner: Owner) -> Job | None:
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
        log.info(
            "job %s attempt %d rank %d: the trainer is gone", owner.job, owner.attempt, owner.rank
        )
        for slot in self._slots.of(*owner.identity):
            if slot.name not in recorded and (step := job.step_in(slot.name)) is not None:
                self._steps.perform(job, [d.Free(step.key, slot.name)])
        self._steps.end(job, owner, "ended")
        self.save_owed(job)
        self._steps.release_replaced(job)
        return job

    # -- what is owed

    def save_owed(self, job: Job) -> None:
        """Save what `Job.owed` names, although no rank has requested it."""
        for owed in job.owed():
            if not owed.persist:
                log.info(
                    "snapshot %s/%s: is to be saved unasked, because its trainer is gone or this "
                    "daemon is stopping",
                    owed.job,
                    owed.tag,
                )
                owed.persist = owed.unasked = True
            self._saver.start(owed)

    def release_expired(self, job: Job) -> None:
        """Free the snapshots of a job that are durable, and save the newest one in
        memory if it is not.

        Of several nodes, snapshots whose save has failed are freed too.
        """
        self._steps.perform(job, [*d.durable(job), *d.given_up(job)])
        self.save_owed(job)

    async def drain(self) -> None:
        """Save the newest sealed snapshot of every job, wait for all saves, and stop
        all timers of steps.
        """
        for slot in list(self._slots.slots.values()):
            try:
                await self._seals.record_unreported(slot)
            except StorageError as error:
                log.error("%r is left to the next daemon: %s", slot, error)
        self._saver.stop_waiting()
        while True:
            for job in self._catalog.jobs.values():
                self.save_owed(job)
            await self._saver.drain()
            # Otherwise one was sealed meanwhile.
            if all(owed.persist for job in self._catalog.jobs.values() for owed in job.owed()):
                break
        self._steps.close()

    # -- a checkpoint is deleted

    async def forget_copy(self, job: Job, tag: str) -> str:
        """Free the copies in memory of a checkpoint that is about to be deleted,
        because a later daemon would save them again.

        Return the reason if that is not possible, because a running trainer or a reader
        has them.
        """
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
                await self.end_owner(job.ranks.owners[header.rank])
        snapshot = job.snapshot((known.attempt, known.step))
        if snapshot is None:
            return ""
        await self._saver.wait_idle(snapshot)
        if job.snapshot(snapshot.key) is snapshot:
            if snapshot.holds:
                return f"the copy of checkpoint {job.name}/{tag} in memory is being read"
            step = job.step(snapshot.key)
            error = SnapshotFailed(f"step {known.step} was deleted by ckptd forget")
            self._steps.perform(
                job, [d.Release(step.key)] if snapshot.complete else d.fail(step, error)
            )
        return ""
