"""Takes the requests of ranks: begins attempts, grants slots, records seals, and starts the save once all ranks have sealed.

Runs on the event loop only. Every decision is made on the values of the catalog. A CkptdError goes to the client; what a failed
request may have changed is in section 4 of PROTOCOL.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable

from ckptd.daemon import records as r
from ckptd.daemon.admission import Admission, Owner
from ckptd.daemon.catalog import Catalog, Job, Key, RankSeal, Snapshot
from ckptd.daemon.claims import Claims
from ckptd.daemon.journal import Journal, JournalBroken
from ckptd.daemon.pipeline import Pipeline, SealedSlot
from ckptd.daemon.saver import Saver
from ckptd.daemon.slots import Slot, Slots
from ckptd.daemon.steps import Steps
from ckptd.shared import names
from ckptd.shared.errors import (
    AlreadyExists,
    Busy,
    CallerError,
    CkptdError,
    Fenced,
    InvalidRequest,
    MachineError,
    NotFound,
    SnapshotFailed,
    from_wire,
)
from ckptd.shared.failpoints import failpoint
from ckptd.shared.lifecycle import Event, SnapshotState
from ckptd.shared.messages import Progress
from ckptd.shared.segment import SegmentHeader, SlotState

log = logging.getLogger("ckptd.engine")

_NAMES_A_RANK = re.compile(r"ranks? \d")

RECORD_SECONDS = 2.0
"""How long a new attempt waits for its journal record. A trainer must get at its memory although the disk hangs."""
PLAN_GRACE_SECONDS = 5.0
"""Beyond the stall budget, the time in which ranks report that another rank has not planned."""
MOST_JOBS = 10_000
"""Jobs that one daemon may know at once. The state of the journal must fit into one record."""


class Engine:
    """Takes the requests of ranks. `owners` are the ranks of each job's newest attempt, by job, attempt and rank."""

    def __init__(
        self,
        catalog: Catalog,
        slots: Slots,
        journal: Journal,
        claims: Claims,
        pipeline: Pipeline,
        owners: dict[tuple[str, int, int], Owner],
        admission: Admission,
        steps: Steps,
        saver: Saver,
    ) -> None:
        self.catalog, self.slots, self.owners, self.admission, self.steps, self.saver = catalog, slots, owners, admission, steps, saver
        self._journal, self._claims, self._pipeline = journal, claims, pipeline
        claims.on_loss = self._claim_lost
        self._begin_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.stopping = False  # once it is True nothing new begins, and seals are still taken

    # -- ranks come

    async def begin(self, job_name: str, rank: int, world_size: int, attempt: int, notify: Callable[[Progress], None]) -> Owner:
        """Begin the next attempt, if `attempt` is 0, or resume the given one. Return the rank's owner.

        Raises Fenced if the attempt is over or unknown here, InvalidName, InvalidRequest, Busy, StorageError.
        """
        names.check_name("job", job_name)
        if rank >= world_size:
            raise InvalidRequest(f"rank {rank} cannot be: the job has {world_size} ranks, numbered from 0")
        self._check_not_stopping()
        if job_name not in self.catalog.jobs and len(self.catalog.jobs) >= MOST_JOBS:
            raise Busy(f"this daemon knows {MOST_JOBS} jobs already; move old ones to another root, and restart it")
        async with self._begin_locks[job_name]:
            job = self.catalog.job(job_name)
            if attempt == 0:
                held = max((s.header.attempt for s in self.slots.slots.values() if s.header.job == job_name), default=0)
                attempt = await self._claims.claim(job, max(job.attempt, held))
                record = r.Begun(job=job_name, attempt=attempt, world_size=world_size)  # the claim on storage is the truth
                await asyncio.wait([self._journal.post(record, lambda: failpoint("attempt.journaled"))], timeout=RECORD_SECONDS)
                for slot in list(self.slots.slots.values()):
                    if slot.header.job == job_name:
                        await self.note_untold(slot)  # sealed before this attempt began, and not reported yet
                if self._claims.is_lost(job, attempt):
                    raise Fenced(f"attempt {attempt} of job {job_name!r} was claimed by another daemon first: start this run again")
                job.attempt, job.world_size = attempt, world_size
                job.gone.clear()
                self._retire_older(job)
            elif attempt > job.attempt:
                raise Fenced(
                    f"attempt {attempt} of job {job_name!r} was begun with another daemon: this daemon on {names.host()} knows "
                    f"{job.attempt} as the newest. A job's ranks must be on one node with one daemon in this version"
                )
            elif attempt < job.attempt:
                raise Fenced(f"attempt {attempt} of job {job_name!r} is over: attempt {job.attempt} has begun; this trainer is to end")
            elif world_size != job.world_size:
                raise InvalidRequest(f"attempt {attempt} of job {job_name!r} has {job.world_size} ranks, not {world_size}")
        owner = Owner(job_name, attempt, rank, world_size, notify)
        self.owners[owner.identity] = owner
        job.gone.pop(rank, None)
        for slot in self.slots.of(*owner.identity):  # abandoned while the daemon was down
            if slot.name in self.admission.busy and slot.refresh().state is SlotState.FREE:
                self.abandon(owner, slot.name, None)
        return owner

    def _claim_lost(self, job: Job, attempt: int) -> None:
        """End an attempt that began in memory, because another daemon has claimed its number."""
        if job.attempt == attempt:
            job.attempt += 1  # no rank has this number: the next attempt that begins here gets a higher one
            self._retire_older(job)

    def _retire_older(self, job: Job) -> None:
        """End the older attempts of a job. Only their snapshots that all ranks have sealed may still be saved."""
        for snapshot in list(job.snapshots.values()):
            if snapshot.attempt < job.attempt and not snapshot.complete:
                self.steps.give_up(job, snapshot.key, Fenced("a newer attempt of the job has begun; this trainer is to end"))
        for identity in [i for i in self.owners if i[0] == job.name and i[1] < job.attempt]:
            owner = self.owners.pop(identity)
            self.steps.former.append(owner)
            self.steps.bury(owner, "ended")
        self.steps.release_settled(job)

    # -- slots

    async def allocate(self, owner: Owner, capacity: int, count: int, node: int) -> list[Slot]:
        """Make `count` segments of `capacity` bytes for this rank, near the NUMA `node`, in place of its present ones.

        A slot that was granted and not sealed is taken back. Raises Fenced, QuotaExceeded, SharedMemoryFull.
        """
        self._check_current(owner)
        job = self.catalog.job(owner.job)
        for slot in self.slots.of(*owner.identity):
            snapshot = job.snapshots.get(self.admission.busy.get(slot.name, (0, 0)))
            if snapshot is None or snapshot.state is not SnapshotState.FILLING or owner.rank in snapshot.seals:
                continue
            header = slot.refresh()
            if (header.state, header.step) != (SlotState.SEALED, snapshot.step):  # a Seal message may still be on its way
                self.admission.vacate(slot)
                if snapshot.key not in self.admission.busy.values():
                    job.snapshots.pop(snapshot.key)
        return await self.admission.allocate(owner, capacity, count, node, lambda: self._make_room(job))

    def _make_room(self, job: Job) -> bool:
        """Free the durable snapshots of older attempts. Return True if there were any."""
        gone = [s for s in job.snapshots.values() if s.attempt < job.attempt and s.state is SnapshotState.DURABLE and not s.holds]
        for snapshot in gone:
            self.steps.release(job, snapshot)
        return bool(gone)

    def plan(self, owner: Owner, step: int, why: str) -> None:
        """Record that the rank plans this step again. Raises StructureChanged if another rank has sealed it with its old plan."""
        self._check_current(owner)
        job, key = self.catalog.job(owner.job), (owner.attempt, step)
        self._check_step(job, owner, step)
        self.steps.plan(job, owner, key, why)

    async def acquire(self, owner: Owner, step: int, tag: str | None, wait: float) -> Slot | str:
        """Return a free slot for a snapshot of `step` within `wait` seconds, or the reason for skipping the step.

        Raises AlreadyExists if the tag is taken, InvalidRequest, SnapshotFailed, Fenced, Busy.
        """
        self._check_current(owner)
        job, key = self.catalog.job(owner.job), (owner.attempt, step)
        self._check_step(job, owner, step)
        directory = names.tag_directory(step, names.check_user_tag(tag) if tag is not None else None, owner.attempt)
        if tag is not None and (directory in job.checkpoints or any(s.tag == directory and s.key != key for s in job.snapshots.values())):
            raise AlreadyExists(f"tag {tag!r} is taken in attempt {owner.attempt} of job {job.name!r}; choose another")
        self._check_not_stopping()
        self.steps.take(job, owner, key, directory)
        slot = await self.admission.acquire(owner, job, key, wait)
        self._check_not_stopping()
        self._check_current(owner)
        if isinstance(slot, str):
            self.steps.counters["skipped"] += 1
            self.steps.skip(job, key, slot)
            return slot
        self._check_step(job, owner, step)
        if key not in job.snapshots:
            job.snapshots[key] = Snapshot(job.name, owner.attempt, step, directory, owner.world_size, persist=True)
        self.admission.occupy(slot, key)
        return slot

    def _check_step(self, job: Job, owner: Owner, step: int) -> None:
        journaled = self._journal.state.jobs.get(job.name)
        known = journaled is not None and journaled.attempt == owner.attempt
        last = job.sealed[1] if job.sealed[0] == owner.attempt else -1
        self.steps.check(job, owner, step, max(last, journaled.sealed_step if journaled is not None and known else -1))

    # -- seals

    async def seal(self, owner: Owner, segment: str, attempt: int, step: int) -> bool:
        """Record a seal. Return True if the snapshot is durable already. Idempotent.

        Raises NotFound, InvalidRequest, Fenced, IntegrityError, and the reason if the step cannot be saved.
        """
        failpoint("seal.received")
        job = self.catalog.job(owner.job)
        if job.is_durable(attempt, step):
            return True
        snapshot = job.snapshots.get((attempt, step))
        if snapshot is None or owner.rank not in snapshot.seals:
            if attempt != owner.attempt:
                raise NotFound(f"step {step} of attempt {attempt} is neither in memory nor on storage any more")
            self._check_current(owner)
            slot = self.slots.get(segment)
            if slot.owner != owner.identity:
                raise NotFound(f"segment {segment[:8]} is not this rank's")
            header = slot.refresh()
            if header.state is not SlotState.SEALED or header.step != step:
                raise InvalidRequest(f"segment {segment[:8]} is not sealed with step {step}")
            snapshot = await self.note_seal(slot)
        if snapshot.state is SnapshotState.FAILED:
            self.steps.tell(snapshot)
        return job.is_durable(attempt, step)

    async def note_untold(self, slot: Slot) -> bool:
        """Record the seal of a slot whose header says sealed, if it is not recorded. Return False if there is no seal, or it is damaged."""
        if slot.released:  # by a seal that was recorded meanwhile
            return False
        try:
            header = slot.refresh()
            if header.state is not SlotState.SEALED or header.step is None or slot.name not in self.admission.busy:
                return False
            snapshot = self.catalog.job(header.job).snapshots.get((header.attempt, header.step))
            if snapshot is None or header.rank not in snapshot.seals:
                await self.note_seal(slot)
        except JournalBroken:
            raise
        except CkptdError as error:
            log.warning("%r: %s", slot, error)
            return False
        return True

    async def note_seal(self, slot: Slot) -> Snapshot:
        """Add the seal of a slot to its snapshot, journal it, and start the save once all ranks have sealed. The header is fresh."""
        header = slot.header
        assert header.step is not None
        job, key = self.catalog.job(header.job), (header.attempt, header.step)
        self.admission.occupy(slot, key)
        self.admission.noting.add(slot.name)
        try:
            return await self._note_seal(slot, job, key)
        finally:
            self.admission.noting.discard(slot.name)

    async def _note_seal(self, slot: Slot, job: Job, key: Key) -> Snapshot:
        header = slot.header
        assert header.step is not None
        try:
            with slot.pinned() as fd:
                sealed = await self._pipeline.run(lambda: SealedSlot.read(fd, header))
            if key in job.given_up:
                raise from_wire(*job.given_up[key])
            tag = names.tag_directory(header.step, names.check_user_tag(sealed.request.tag) if sealed.request.tag else None, header.attempt)
            if tag in job.checkpoints and not job.is_durable(*key):
                raise AlreadyExists(f"tag {tag!r} of job {job.name!r} is taken; choose another")
            self.steps.check_tag(job, key, tag, header.rank)
        except CkptdError as error:
            self.steps.give_up(job, key, error)
            self.admission.vacate(slot)
            raise
        snapshot = job.snapshots.get(key)
        if snapshot is None:
            snapshot = job.snapshots[key] = Snapshot(job.name, *key, tag, header.world_size, sealed.request.persist)
        snapshot.tag, snapshot.persist = tag, snapshot.persist and sealed.request.persist
        self._journal_seal(header, tag, slot.name, persist=sealed.request.persist)
        try:
            self.steps.check_plan(job, key, header.rank, sealed.plan.global_plan)
            self.steps.check_persist(job, key, header.rank, sealed.request.persist)
        except CkptdError as error:
            self.steps.give_up(job, key, error)
            self.admission.vacate(slot)
            raise
        snapshot.seals[header.rank] = RankSeal(
            header.rank, slot.name, header.generation, header.signature, sealed.plan.global_plan, sealed.request.persist
        )
        if not snapshot.complete:
            self.steps.expect(job, key)
        elif snapshot.state is SnapshotState.FILLING:
            self.steps.settle(job, key)
            snapshot.move(Event.SEAL)
            job.sealed = max(job.sealed, key)
            self.steps.counters["sealed"] += 1
            if job.is_durable(*key):
                snapshot.move(Event.COMMIT)
            else:
                self.saver.start(snapshot)
            self.steps.release_settled(job)
        return snapshot

    def _journal_seal(self, header: SegmentHeader, tag: str, segment: str, *, persist: bool) -> None:
        """Journal a seal, without waiting for the record: the header of the slot is the truth, and memory does not wait for the disk."""
        assert header.step is not None
        record = r.RankSealed(
            job=header.job, attempt=header.attempt, step=header.step, rank=header.rank, world_size=header.world_size, tag=tag,
            segment=segment, generation=header.generation, persist=persist,
        )  # fmt: skip
        self._journal.post(record, lambda: failpoint("seal.journaled"))

    def pass_over(self, owner: Owner, step: int, reason: str, code: str) -> None:
        """Fail a step on all ranks, because this rank cannot save it. A `reason` that came from another rank names that rank already."""
        self._check_current(owner)
        job, key = self.catalog.job(owner.job), (owner.attempt, step)
        known = job.snapshots.get(key)
        if known is None or (known.state is SnapshotState.FILLING and owner.rank not in known.seals):
            why = reason if _NAMES_A_RANK.match(reason) else f"rank {owner.rank}: {reason}"
            error = from_wire(code, why)
            of_a_snapshot = isinstance(error, (CallerError, MachineError, SnapshotFailed))
            self.steps.give_up(job, key, error if of_a_snapshot else SnapshotFailed(why))

    def abandon(self, owner: Owner, segment: str, step: int | None, reason: str = "", code: str = "") -> None:
        """Take back a granted slot that will not be sealed, and fail its step. Does nothing if the slot is not granted for `step` any more.

        If the rank has two slots for the step, this one is freed and the step goes on.
        """
        slot = self.slots.get(segment)
        if slot.owner != owner.identity:
            raise NotFound(f"segment {segment[:8]} is not this rank's")
        job = self.catalog.job(owner.job)
        if step is not None and self.admission.busy.get(segment) != (owner.attempt, step):
            return
        key = self.admission.busy.get(segment, (0, 0))
        snapshot = job.snapshots.get(key)
        if snapshot is None or any(s is not slot and self.admission.busy.get(s.name) == key for s in self.slots.of(*owner.identity)):
            self.admission.vacate(slot)
        elif snapshot.state is SnapshotState.FILLING:
            self.pass_over(owner, snapshot.step, reason or f"rank {owner.rank} could not copy it", code)

    # -- what clients want to know

    async def persist(self, owner: Owner) -> None:
        """Make the newest sealed snapshot durable. Raises SnapshotFailed if it cannot be."""
        self._check_current(owner)
        job = self.catalog.job(owner.job)
        await self.steps.sealed_by_all(job, owner)
        newest = job.newest_in_memory()
        if newest is None or newest.attempt != owner.attempt or newest.state is SnapshotState.DURABLE:
            return
        newest.persist = True
        await self.saver.start(newest)
        if not job.is_durable(*newest.key):  # it was only being checked, or its save has failed: save it now
            await self.saver.start(newest)
        if not job.is_durable(*newest.key):
            raise SnapshotFailed(f"{newest.job}/{newest.tag} could not be made durable: {newest.reason}")

    def memory_candidates(self, job_name: str) -> list[Snapshot]:
        return [s for s in self.catalog.job(job_name).snapshots.values() if s.in_memory]

    async def fetch(self, owner: Owner, attempt: int, step: int) -> list[tuple[int, int]]:
        """Check a snapshot in memory, and return (rank, read-only descriptor) for each of its slots. The caller closes the descriptors."""
        snapshot = self.catalog.job(owner.job).snapshots.get((attempt, step))
        if snapshot is None or not snapshot.in_memory:
            raise NotFound(f"step {step} of attempt {attempt} is not in memory any more")
        await self.saver.check(snapshot)
        opened: list[tuple[int, int]] = []
        try:
            for rank, seal in sorted(snapshot.seals.items()):
                opened.append((rank, self.slots.open_again(self.slots.get(seal.segment), write=False)))
        except BaseException:
            for _, fd in opened:
                os.close(fd)
            raise
        return opened

    # -- ranks go

    def detach(self, owner: Owner) -> None:
        """End an owner whose agent was closed. Its slots are freed as soon as nothing is owed of them."""
        self.owners.pop(owner.identity, None)
        self.steps.bury(owner, "closed")
        job = self.catalog.job(owner.job)
        for snapshot in list(job.snapshots.values()):
            if snapshot.attempt == owner.attempt:
                snapshot.unwanted = True
                if job.is_settled(snapshot):
                    self.steps.release(job, snapshot)

    def _check_not_stopping(self) -> None:
        if self.stopping:
            raise Busy("the daemon is stopping; try again when it is back")

    def _check_current(self, owner: Owner) -> None:
        newest = self.catalog.job(owner.job).attempt
        if owner.attempt != newest or self.owners.get(owner.identity) is not owner:
            raise Fenced(f"attempt {owner.attempt} of job {owner.job!r} is over: attempt {newest} has begun; this trainer is to end")
