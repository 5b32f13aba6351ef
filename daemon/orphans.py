"""Takes care of slots whose trainer is dead, of slots that an earlier daemon left, and of all slots when the daemon stops.

An `Owner` outlives the connection of its rank, and ends here, once its process is known to be dead. Its seals are then recorded. The newest
sealed snapshot is saved unasked and stays in memory for `memory_ttl`; the other slots are freed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine

from ckptd.daemon.admission import Owner
from ckptd.daemon.catalog import Job
from ckptd.daemon.engine import Engine
from ckptd.daemon.journal import JournalBroken
from ckptd.daemon.slots import Slot
from ckptd.daemon.tasks import watched
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError, SnapshotFailed
from ckptd.shared.failpoints import failpoint
from ckptd.shared.lifecycle import SnapshotState
from ckptd.shared.segment import SlotState

log = logging.getLogger("ckptd.orphans")

CHECK_SECONDS = 1.0
"""Between two checks of the locks of trainers that have not reconnected after a restart of the daemon."""


class Orphans:
    def __init__(self, engine: Engine, memory_ttl: float, changed: Callable[[], None]) -> None:
        """memory_ttl: seconds that a dead trainer's newest snapshot stays in memory. `changed` is called when work has ended."""
        self._engine, self._ttl, self._changed = engine, memory_ttl, changed
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._guards: dict[tuple[str, int, int], int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def guard(self, owner: Owner, pidfd: int) -> None:
        """Watch the process of an owner. Takes over `pidfd`, which is readable once the process is dead: only then the owner ends."""
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
        self._spawn(self.bereave(owner))

    def connection_lost(self, owner: Owner) -> None:
        """Watch the locks of an owner that has no pidfd, because the kernel gave none or the daemon has been restarted."""
        if owner.identity not in self._guards and self._engine.owners.get(owner.identity) is owner:
            self.watch()

    def watch(self) -> None:
        self._spawn(self._watch())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = watched(work, "settling the slots of a dead trainer")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed()

    async def bereave(self, owner: Owner) -> None:
        """End an owner whose process is dead: record its seals, free its other slots, and save the newest snapshot."""
        failpoint("orphan.found")
        engine = self._engine
        if engine.owners.get(owner.identity) is not owner:
            return
        del engine.owners[owner.identity]
        log.info("job %s attempt %d rank %d: the trainer is gone", owner.job, owner.attempt, owner.rank)
        job = engine.catalog.job(owner.job)
        for slot in engine.slots.of(*owner.identity):
            if not await engine.note_untold(slot):
                engine.admission.vacate(slot)
        engine.steps.bury(owner, "ended")
        self._save_owed(job)
        engine.steps.release_settled(job)
        self.start_timer(job)

    def _save_owed(self, job: Job) -> None:
        owed = job.owed()
        if owed is not None:
            log.info("snapshot %s/%s: saved unasked, since its trainer is gone", owed.job, owed.tag)
            owed.persist = True
            self._engine.saver.counters["saved_unasked"] += 1
            self._engine.saver.start(owed)

    async def let_go(self, job: Job, tag: str) -> str:
        """Free the copies in memory of a checkpoint that is about to be deleted, because a later daemon would save them again.

        Return the reason if that is not possible, because a running trainer or a reader has them.
        """
        engine, known, parsed = self._engine, job.checkpoints.get(tag), names.parse_tag_directory(tag)
        key = (known.attempt, known.step) if known else (parsed[2], parsed[1]) if parsed else (0, None)
        if key[1] is None:
            return ""
        for slot in list(engine.slots.slots.values()):
            if slot.released or (slot.header.job, slot.header.attempt) != (job.name, key[0]):
                continue
            try:
                header = slot.refresh()
            except IntegrityError:
                continue  # a damaged slot is never saved
            if (header.step, header.state) != (key[1], SlotState.SEALED):
                continue
            if engine.slots.is_held(slot):
                return f"checkpoint {job.name}/{tag} is in the memory of a running trainer too; try again when it has gone on, or ended"
            if (owner := engine.owners.get(slot.owner)) is not None:
                await self.bereave(owner)
        snapshot = job.snapshots.get((key[0], key[1]))
        if snapshot is None:
            return ""
        await engine.saver.settle(snapshot)
        if job.snapshots.get(snapshot.key) is snapshot:
            if snapshot.holds:
                return f"the copy of checkpoint {job.name}/{tag} in memory is being read"
            if snapshot.complete:
                engine.steps.release(job, snapshot)
            else:
                engine.steps.give_up(job, snapshot.key, SnapshotFailed("it was forgotten"))
        return ""

    # -- memory_ttl

    def start_timer(self, job: Job) -> None:
        self.cancel_timer(job.name)
        if job.snapshots and not any(o.job == job.name for o in self._engine.owners.values()):
            self._timers[job.name] = asyncio.get_running_loop().call_later(self._ttl, self._expire, job)

    def has_timer(self, job_name: str) -> bool:
        return job_name in self._timers

    def cancel_timer(self, job_name: str) -> None:
        timer = self._timers.pop(job_name, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, job: Job) -> None:
        """Free the snapshots of a job that are durable, and try to save the newest one that is not."""
        self._timers.pop(job.name, None)
        for snapshot in list(job.snapshots.values()):
            if snapshot.state is SnapshotState.DURABLE and not snapshot.holds:
                self._engine.steps.release(job, snapshot)
        self._save_owed(job)
        self.start_timer(job)
        self._changed()

    # -- a new daemon

    def adopt(self, slots: list[Slot]) -> None:
        """Adopt the segments that an earlier daemon left, before any file is finished or swept."""
        engine = self._engine
        for slot in slots:
            header = slot.header
            job = engine.catalog.job(header.job)
            if header.attempt > job.attempt:
                job.attempt, job.world_size = header.attempt, header.world_size
        for slot in slots:
            header = slot.header
            if header.attempt == engine.catalog.job(header.job).attempt:
                owner = Owner(header.job, header.attempt, header.rank, header.world_size)
                engine.owners.setdefault(owner.identity, owner)
            if header.state is SlotState.FILLING and header.step is not None:
                engine.admission.occupy(slot, (header.attempt, header.step))
        failpoint("start.adopted")

    async def settle_adopted(self, slots: list[Slot]) -> None:
        """Record the seals of adopted slots in order of attempt and step, and release the slots that belong to no owner."""
        engine = self._engine
        for slot in sorted(slots, key=lambda s: (s.header.attempt, s.header.step or 0)):
            if slot.header.state is SlotState.SEALED:
                try:
                    await engine.note_seal(slot)
                except JournalBroken:
                    raise
                except CkptdError as error:  # damaged: note_seal has freed the slot
                    log.warning("%r removed: %s", slot, error)
                    engine.saver.counters["verify_failures"] += 1
        for slot in list(engine.slots.slots.values()):
            if slot.owner not in engine.owners and slot.name not in engine.admission.busy:
                engine.slots.release(slot)
        for job in engine.catalog.jobs.values():
            engine.steps.release_settled(job)
            self.start_timer(job)

    async def _watch(self) -> None:
        """Poll the locks until every adopted owner has reconnected or is dead. There is no pidfd for a trainer until it reconnects."""
        engine = self._engine
        while waiting := [o for o in engine.owners.values() if o.notify is None and o.identity not in self._guards]:
            for owner in waiting:
                if owner.notify is None and not any(engine.slots.is_held(slot) for slot in engine.slots.of(*owner.identity)):
                    await self.bereave(owner)
            await asyncio.sleep(CHECK_SECONDS)

    # -- the end

    async def drain(self) -> None:
        """Save the newest sealed snapshot of every job, wait for all saves, and stop watching."""
        for slot in list(self._engine.slots.slots.values()):
            await self._engine.note_untold(slot)
        for job in self._engine.catalog.jobs.values():
            self._save_owed(job)
        await self._engine.saver.drain()
        self._engine.steps.close()
        for name in list(self._timers):
            self.cancel_timer(name)
        for identity in list(self._guards):
            self.unguard(identity)
        for task in self._tasks:
            task.cancel()
