"""Takes the requests of ranks: begins attempts, grants slots, takes seals, and ends
ranks.

All calls run on the event loop. The engine waits where that is needed, for example for
the claim of an attempt or for the reading of a seal, and turns the outcome into a
decision of `decisions.py`, which `steps.py` carries out. A CkptdError goes to the
client. Section 4 of PROTOCOL.md says what a failed request may have changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection

from ckptd.daemon import log_events
from ckptd.daemon.engine.peer_copies import PeerCopies
from ckptd.daemon.engine.seal_intake import SealIntake
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job import decisions as d
from ckptd.daemon.job import peer_replicas
from ckptd.daemon.job.catalog import Catalog, EarlierAttempt, Job
from ckptd.daemon.job.ranks import NOT_KNOWN, Owner, Process
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import Journal
from ckptd.daemon.memory.admission import Admission
from ckptd.daemon.memory.foreign_memory import ForeignMemoryKeeper
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.daemon.root.claims import Claims
from ckptd.daemon.root.served_root import ServedRoot
from ckptd.daemon.runs.run_guard import RunGuard
from ckptd.daemon.saving.saver import Saver
from ckptd.shared import names
from ckptd.shared.errors import Busy, Fenced, InvalidRequest, NotFound, SnapshotFailed
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.units import count_text
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import SnapshotState

log = logging.getLogger("ckptd.engine")

RECORD_SECONDS = 2.0
"""Seconds that a new attempt waits for its journal record. A trainer must reach its
snapshots in memory even while the disk hangs.
"""
PLAN_GRACE_SECONDS = 5.0
"""Seconds beyond the stall budget in which the ranks can report that another rank has
not planned.
"""
_BARREN = 3
"""After so many attempts in a row that have sealed nothing, the log says so."""
MOST_JOBS = 10_000
"""The most jobs that one daemon knows at once. The state of the journal must fit into
one record.
"""


class Engine:
    """The engine of one daemon.

    `plan_timeout`: seconds that the ranks have to plan a step again, beyond the time to
    seal it.
    """

    def __init__(
        self,
        catalog: Catalog,
        slots: Slots,
        journal: Journal,
        claims: Claims,
        admission: Admission,
        steps: Steps,
        seals: SealIntake,
        copies: PeerCopies,
        saver: Saver,
        guard: RunGuard,
        served: ServedRoot,
        foreign: ForeignMemoryKeeper,
        plan_timeout: float,
    ) -> None:
        self.catalog, self.slots = catalog, slots
        self._journal = journal
        self._claims = claims
        self._admission = admission
        self._saver = saver
        self._steps = steps
        self._seals, self.copies = seals, copies
        self._guard = guard
        self._plan_timeout = plan_timeout
        self._served, self._foreign = served, foreign
        self.stopping = False  # once this is True, nothing new begins, but seals are still taken

    # -- ranks begin

    async def begin(
        self,
        job_name: str,
        rank: int,
        world_size: int,
        attempt: int,
        notify: Callable[[m.Notification], None],
        process: Process = NOT_KNOWN,
        wait: float | None = None,
        node: Membership | None = None,
        foreign_memory: str = "",
        identity: str = "",
    ) -> Owner:
        """Begin the next attempt, if `attempt` is 0, or join or resume the given one.

        A given attempt that this daemon does not know was begun with an earlier
        daemon, and continues here, unless the storage knows a newer one. Return the
        rank's owner.

        process: the process of the rank. wait: seconds to wait for the end of another
        run of the job before the next attempt begins, or None to begin it at once.
        node: the membership of this node in an attempt of several nodes, which rank 0
        has begun with its daemon. foreign_memory: the treatment of snapshots of the job
        in memory that were saved for another root: "refuse", "adopt" or "drop", or ""
        for the setting of this daemon. identity: the identity of the root for which the
        given attempt was begun, or "" if that is not known.

        Raises Fenced if the attempt is over, JobRunning if another run
        is alive after `wait`, ForeignMemory, InvalidName, InvalidRequest, Busy,
        StorageError.
        """
        names.check_name("job", job_name)
        if rank >= world_size:
            raise InvalidRequest(
                f"rank {rank} does not exist: the job has {world_size} ranks, numbered from 0"
            )
        if node is not None and (problem := node.problem(rank, world_size)):
            raise InvalidRequest(
                f"rank {rank} cannot begin job {job_name!r}, because it gives a wrong list of the "
                f"ranks of its node: {problem}"
            )
        self._check_not_stopping()
        if job_name not in self.catalog.jobs and len(self.catalog.jobs) >= MOST_JOBS:
            raise Busy(
                f"this daemon knows {MOST_JOBS} jobs already; move old ones to another root, and "
                f"restart it"
            )
        job = self.catalog.job(job_name)
        if attempt != job.attempt or not attempt:
            await self._served.check(job)
        async with job.begin_lock:
            await self._foreign.apply_choice(job_name, foreign_memory)
        if attempt:
            self._foreign.check_attempt(job_name, attempt, identity, foreign_memory)
        dead: Collection[int] = ()
        if wait is not None and (attempt == 0 or (node is not None and attempt > job.attempt)):
            dead = await self._guard.wait_for_end(job, process, wait, everywhere=attempt == 0)
        async with job.begin_lock:
            if attempt == 0:
                self._guard.check_alone(job, process, takeover=wait is None)
                attempt = await self._begin_next(job, world_size, node)
            elif node is not None and attempt > job.attempt:
                self._guard.check_alone(job, process, takeover=wait is None)
                await self._claims.check_shared(job, attempt)
                await self._start(job, attempt, world_size, node)
            elif attempt > job.attempt or (attempt == job.attempt and not job.world_size):
                await self._claims.bring(job, attempt)
                await self._start(job, attempt, world_size, node)
            elif attempt < job.attempt:
                raise _fenced(attempt, job)
            elif world_size != job.world_size:
                raise InvalidRequest(
                    f"attempt {attempt} of job {job_name!r} has {job.world_size} ranks, but this "
                    f"rank says {world_size}: "
                    "start all ranks with the same world size"
                )
            elif node != job.node:
                if job.node is not None:
                    raise Fenced(
                        f"attempt {attempt} of job {job_name!r} on this node is that of another "
                        f"run: start this run again"
                    )
                # An earlier daemon of this node began the attempt, and its journal is
                # lost.
                job.node = node
        owner = Owner(job_name, attempt, rank, world_size, notify, process)
        job.ranks.join(owner)
        self._guard.began(job, dead)
        for slot in self.slots.of(*owner.identity):  # abandoned while the daemon was down
            if job.step_in(slot.name) is not None and slot.refresh().state is SlotState.FREE:
                self.abandon(owner, slot.name, None)
        return owner

    async def _begin_next(self, job: Job, world_size: int, node: Membership | None) -> int:
        """Begin the next attempt of the job, and end the older ones. Return its number."""
        held = max((slot.header.attempt for slot in self._slots_of(job)), default=0)
        attempt = await self._claims.claim(job, max(job.attempt, held), in_memory=node is None)
        await self._start(job, attempt, world_size, node)
        return attempt

    async def _start(
        self, job: Job, attempt: int, world_size: int, node: Membership | None
    ) -> None:
        """Start an attempt that is claimed, and end the older ones."""
        known = self._journal.state.jobs.get(job.name)
        if known is not None and 0 < known.attempt < attempt:
            here = range(known.world_size) if known.node is None else known.node.ranks
            job.earlier = EarlierAttempt(known.attempt, known.world_size, tuple(here))
        # The claim on storage is the truth.
        record = r.Begun(job=job.name, attempt=attempt, world_size=world_size, node=node)
        await asyncio.wait(
            [self._journal.post(record, lambda: failpoint("attempt.journaled"))],
            timeout=RECORD_SECONDS,
        )
        for slot in self._slots_of(job):
            # Sealed before this attempt began, and not reported yet.
            await self._seals.record_unreported(slot)
        if self._claims.is_lost(job, attempt):
            raise Fenced(
                f"attempt {attempt} of job {job.name!r} was claimed by another daemon first: "
                f"start this run again"
            )
        job.barren = job.barren + 1 if job.has_sealed_nothing() else 0
        job.attempt = attempt
        job.world_size = world_size
        job.node = node
        job.answer = Answer()
        job.changed.notify()
        log_events.ATTEMPT_BEGUN.log(
            log, "job %s: attempt %d begins with %s, %d here",
            job.name, attempt, count_text(world_size, "rank"), len(job.ranks_here),
            job=job.name, attempt=attempt, ranks=world_size,
        )  # fmt: skip
        if job.barren >= _BARREN:
            log_events.ATTEMPT_REPEATS.log(
                log, "job %s: the last %d attempts have ended before their first snapshot was "
                "sealed: look at the log of the training, and take snapshots more often if it "
                "cannot run so long", job.name, job.barren, job=job.name, attempt=attempt,
                attempts=job.barren,
            )  # fmt: skip
        self._retire_older(job)

    def _slots_of(self, job: Job) -> list[Slot]:
        return [slot for slot in self.slots.slots.values() if slot.header.job == job.name]

    def lose_claim(self, job: Job, attempt: int) -> None:
        """End an attempt that began in memory, because another daemon has claimed its
        number.
        """
        if job.attempt == attempt:
            # No rank has this number: the next attempt that begins here gets a higher
            # one.
            job.attempt += 1
            self._retire_older(job)

    def _retire_older(self, job: Job) -> None:
        """End the older attempts of a job.

        Only their snapshots that all ranks have sealed may still be saved.
        """
        self._steps.perform(job, d.superseded(job))
        self.copies.end_attempt(job)
        for owner in job.ranks.retire(job.attempt):
            self._steps.end(job, owner, "ended")
        self._steps.release_replaced(job)

    # -- slots

    async def allocate(self, owner: Owner, capacity: int, count: int, node: int) -> list[Slot]:
        """Make `count` segments of `capacity` bytes for this rank, near the NUMA
        `node`, in place of its present ones.

        A slot that was granted and not sealed is taken back. Raises Fenced,
        QuotaExceeded, SharedMemoryFull.
        """
        job = self._current(owner)
        for slot in self.slots.of(*owner.identity):
            step = job.step_in(slot.name)
            if step is None or step.filling is None or step.sealed_by(owner.rank):
                continue
            header = slot.refresh()
            # A Seal message may still be on its way.
            if (header.state, header.step) != (SlotState.SEALED, step.number):
                if list(step.slots) == [slot.name]:
                    step.snapshot = None  # no rank has another slot for it
                self._steps.perform(job, [d.Free(step.key, slot.name)])
        return await self._admission.allocate(
            owner, job, capacity, count, node, lambda: self._free_older(job)
        )

    def _free_older(self, job: Job) -> bool:
        """Free the durable snapshots of older attempts, and the peer replicas of such
        steps. Return True if there were any.
        """
        actions = d.durable(job, before=job.attempt)
        self._steps.perform(job, actions)
        old = peer_replicas.needless(job, before=job.attempt)
        return self.copies.free(job, old) or bool(actions)

    def plan(self, owner: Owner, number: int, why: str) -> None:
        """Record that the rank plans this step again.

        Raises StructureChanged if another rank has sealed it with its old plan.
        """
        job = self._current(owner)
        self._check_turn(job, owner, number)
        if owner.world_size > 1:
            step = job.step((owner.attempt, number))
            step.plan_again(owner.rank, why)
            self._steps.perform(job, d.planned(step, self._plan_timeout))

    async def acquire(self, owner: Owner, number: int, tag: str | None, wait: float) -> Slot | str:
        """Return a free slot for a snapshot of the step within `wait` seconds, or the
        reason for skipping the step.

        Raises AlreadyExists if the tag is taken, InvalidRequest, SnapshotFailed,
        Fenced, Busy.
        """
        job, key = self._current(owner), (owner.attempt, number)
        self._check_turn(job, owner, number)
        directory = names.tag_directory(
            number, names.check_new_tag(tag) if tag is not None else None, owner.attempt
        )
        if tag is not None:
            d.check_tag(job, key, directory, tag)
        self._check_not_stopping()
        if owner.world_size > 1:
            job.step(key).keep_plan(owner.rank)
            self._steps.perform(job, d.requested(job.step(key), owner.rank, directory))
        try:
            slot = await self._admission.acquire(owner, job, key, wait)
        finally:
            job.tidy()
        self._check_not_stopping()
        self._current(owner)
        if isinstance(slot, str):
            step, first = job.step(key), 0 if job.node is None else job.node.ranks[0]
            # All ranks of this node skip the step; a planned one fails, and counts so.
            if owner.rank == first and not step.planned:
                self._steps.count_skip(job, number, slot)
            self._steps.perform(job, d.skipped(step, slot))
            return slot
        self._check_turn(job, owner, number)
        step = job.occupy(slot.name, owner.rank, key)
        step.snapshot = step.snapshot or Snapshot(
            job.name, *key, directory, owner.world_size, persist=True, node=job.node
        )
        return slot

    def _check_turn(self, job: Job, owner: Owner, number: int) -> None:
        journaled = self._journal.state.jobs.get(job.name)
        in_journal = (
            journaled.sealed_step
            if journaled is not None and journaled.attempt == owner.attempt
            else -1
        )
        in_memory = job.sealed[1] if job.sealed[0] == owner.attempt else -1
        d.check_turn(job, owner.rank, (owner.attempt, number), max(in_memory, in_journal))

    # -- seals

    async def seal(
        self,
        owner: Owner,
        segment: str,
        attempt: int,
        number: int,
        training_held: float = 0.0,
        cost: m.TrainingCost | None = None,
        unlocked: int = 0,
        *,
        uncompared: bool = False,
    ) -> bool:
        """Record a seal. Return True if the snapshot is durable already. Idempotent.

        Raises NotFound, InvalidRequest, Fenced, IntegrityError, and the reason if the
        step cannot be saved.
        """
        failpoint("seal.received")
        owner.unlocked = unlocked
        job = self.catalog.job(owner.job)
        if job.is_durable(attempt, number):
            return True
        snapshot = job.snapshot((attempt, number))
        if snapshot is None or owner.rank not in snapshot.seals:
            if attempt != owner.attempt:
                raise NotFound(
                    f"step {number} of attempt {attempt} is no longer in memory or on storage"
                )
            self._current(owner)
            slot = self._slot_of(owner, segment)
            header = slot.refresh()
            if header.state is not SlotState.SEALED or header.step != number:
                raise InvalidRequest(
                    f"segment {segment[:8]} does not hold a sealed snapshot of step {number}"
                )
            snapshot = await self._seals.record(slot)
        seal = snapshot.seals[owner.rank]
        if training_held and not seal.training_held:  # a rank may report its seal again
            self._saver.stalls.add(training_held)
        self._saver.counters["uncompared"] += uncompared and not seal.uncompared
        seal.training_held, seal.cost = training_held, cost
        seal.uncompared = uncompared
        if snapshot.state is SnapshotState.FAILED:
            self._steps.tell(snapshot)
        return job.is_durable(attempt, number)

    def refused(self, owner: Owner, reason: str) -> None:
        """Count a snapshot that this rank has refused for its step.

        Ranks make the same calls, so only that of rank 0 counts.
        """
        job = self._current(owner)
        if owner.rank == 0:
            self._steps.count_failure(job, None, reason)

    def pass_over(self, owner: Owner, number: int, reason: str, code: str) -> None:
        """Fail a step on all ranks, because this rank cannot save it.

        A `reason` that came from another rank begins with its name.
        """
        job = self._current(owner)
        self._steps.perform(
            job, d.passed_over(job, job.step((owner.attempt, number)), owner.rank, reason, code)
        )

    def abandon(
        self, owner: Owner, segment: str, number: int | None, reason: str = "", code: str = ""
    ) -> None:
        """Take back a granted slot that will not be sealed, and fail its step.

        Does nothing if the slot is no longer granted for the step.

        If the rank has two slots for the step, this one is freed and the step goes on.
        """
        if self.slots.get(segment).header.peer_replica:
            self.copies.give_back(owner, segment)
            return
        self._slot_of(owner, segment)
        job = self.catalog.job(owner.job)
        step = job.step_in(segment)
        if step is None or (number is not None and step.key != (owner.attempt, number)):
            return
        if step.snapshot is None or d.has_another(step, segment):
            self._steps.perform(job, [d.Free(step.key, segment)])
        elif step.filling is not None:
            self.pass_over(
                owner, step.number, reason or f"rank {owner.rank} could not copy its state", code
            )

    def _slot_of(self, owner: Owner, segment: str) -> Slot:
        slot = self.slots.get(segment)
        if slot.owner != owner.identity:
            raise NotFound(f"segment {segment[:8]} belongs to another rank or attempt")
        return slot

    # -- saves and reads on request

    async def persist(self, owner: Owner) -> None:
        """Make the newest sealed snapshot durable.

        Raises SnapshotFailed if it cannot be.
        """
        job = self._current(owner)
        # Until the other ranks have sealed the steps that this rank has sealed, or these
        # steps have failed.
        await job.changed.wait_until(
            lambda: (
                not any(
                    s.attempt == owner.attempt
                    and s.state is SnapshotState.FILLING
                    and owner.rank in s.seals
                    for s in job.snapshots
                )
            )
        )
        newest = job.newest_in_memory()
        if (
            newest is None
            or newest.attempt != owner.attempt
            or newest.state is SnapshotState.DURABLE
        ):
            return
        newest.persist = True
        await self._saver.start(newest)
        # It was only being checked, or its save has failed: save it now.
        if not job.is_durable(*newest.key) and newest.in_memory:
            await self._saver.start(newest)
        if not job.is_durable(*newest.key):
            raise SnapshotFailed(
                f"{newest.job}/{newest.tag} could not be made durable: {newest.reason}"
            )

    def take_answer(self, owner: Owner, attempt: int, answer: Answer) -> None:
        """Take an answer from the board, which the lowest rank of this node passes on."""
        job = self._current(owner)
        if job.node is None or owner.rank != job.node.ranks[0]:
            raise InvalidRequest(
                f"rank {owner.rank} cannot pass this on: it is not the lowest rank of a node of "
                f"several"
            )
        if attempt == owner.attempt:
            before = job.answer
            self._steps.take_answer(job, answer)
            self.copies.follow(job, before)

    def memory_candidates(self, job_name: str) -> list[Snapshot]:
        """Return the snapshots that can be recovered from memory: all ranks must be on
        this node.
        """
        return [s for s in self.catalog.job(job_name).snapshots if s.in_memory and s.node is None]

    async def fetch(
        self, owner: Owner, attempt: int, number: int, *, check: bool = True
    ) -> list[tuple[int, int]]:
        """Return (rank, read-only descriptor) for each slot of a snapshot in memory, and
        for each slot in a peer replica of the same step.

        The caller closes the descriptors.

        With `check`, the snapshot is checked first. Raises NotFound if it is not in
        memory, IntegrityError if it is damaged.
        """
        job, key = self.catalog.job(owner.job), (attempt, number)
        own = job.snapshot(key)
        found = [s for s in [own, *peer_replicas.of_step(job, key)] if s and s.in_memory]
        if not found:
            raise NotFound(f"step {number} of attempt {attempt} is not in the memory of this node")
        if check and own is not None:
            await self._saver.check(own)
        seals = {rank: seal for snapshot in found for rank, seal in snapshot.seals.items()}
        opened: list[tuple[int, int]] = []
        try:
            for rank, seal in sorted(seals.items()):
                opened.append(
                    (rank, self.slots.open_again(self.slots.get(seal.segment), write=False))
                )
        except BaseException:
            for _, fd in opened:
                os.close(fd)
            raise
        return opened

    # -- ranks leave

    def detach(self, owner: Owner) -> None:
        """End an owner whose agent was closed.

        Its slots are freed as soon as their snapshots are settled.
        """
        job = self.catalog.job(owner.job)
        self._steps.end(job, owner, "closed")
        for snapshot in job.snapshots:
            snapshot.unwanted |= snapshot.attempt == owner.attempt
        self._steps.perform(job, d.closed(job, owner.attempt))
        self.copies.settle(job)

    def _check_not_stopping(self) -> None:
        if self.stopping:
            raise Busy("the daemon is stopping; try again after its restart")

    def _current(self, owner: Owner) -> Job:
        """Return the job of an owner.

        Raises Fenced if the attempt of the owner is over, or another connection has
        taken its place.
        """
        job = self.catalog.job(owner.job)
        if owner.attempt != job.attempt:
            raise _fenced(owner.attempt, job)
        if not job.ranks.is_here(owner):
            raise Fenced(
                f"rank {owner.rank} of attempt {owner.attempt} of job {owner.job!r} has connected "
                f"again or has been closed: "
                "this connection can no longer save"
            )
        return job


def _fenced(attempt: int, job: Job) -> Fenced:
    return Fenced(
        f"attempt {attempt} of job {job.name!r} has ended, because attempt {job.attempt} has "
        f"begun: "
        "this run can no longer save; stop it, or use another job name"
    )
