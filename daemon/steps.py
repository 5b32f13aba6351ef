"""Follows each step of a job until all ranks have sealed it: compares the ranks, limits how long they wait, and fails incomplete steps.

A job of one rank has nothing to compare. Decisions are made on the values of the catalog. This module does no I/O: it frees slots through
the admission, and notifies ranks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptd.daemon.admission import Admission, Owner, ranks
from ckptd.daemon.catalog import Catalog, Job, Key, Snapshot
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, InvalidRequest, SnapshotFailed, StructureChanged, from_wire
from ckptd.shared.lifecycle import Event, SnapshotState
from ckptd.shared.messages import Progress


@dataclass(slots=True, eq=False)
class _Waiting:
    """A step that at least one rank has reached, and that not all ranks have sealed.

    `planned` has the ranks that plan the step again, with the reason. `kept` has the ranks that have requested a slot without planning
    again: as far as the daemon knows, they use the plan that they had.
    """

    timer: asyncio.TimerHandle
    planned: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


class Steps:
    """The incomplete steps of all jobs.

    `former` has owners whose attempt is over and who are still connected: they are notified about the snapshots that they wait for.
    """

    def __init__(
        self, catalog: Catalog, owners: dict[tuple[str, int, int], Owner], admission: Admission, rank_timeout: float, plan_timeout: float
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.former: list[Owner] = []
        self._catalog, self._owners, self._admission = catalog, owners, admission
        self._timeout, self._plan_timeout = rank_timeout, plan_timeout
        self._waiting: dict[tuple[str, Key], _Waiting] = {}
        self._moved = asyncio.Event()

    # -- what ranks must agree on

    def check(self, job: Job, owner: Owner, step: int, sealed_step: int) -> None:
        """Check that the rank may take this step now. `sealed_step` is the last sealed step of this attempt that the journal knows.

        Raises InvalidRequest if the step is behind the last one, SnapshotFailed if the step has failed or a rank is gone.
        """
        key = (owner.attempt, step)
        if key in job.given_up:
            raise from_wire(*job.given_up[key])
        for rank, how in sorted(job.gone.items()):
            raise SnapshotFailed(
                f"rank {rank} of attempt {owner.attempt} of job {job.name!r} has {how}: no snapshot can be complete without it; "
                "start the job again"
            )
        known = job.snapshots.get(key)
        if known is not None and known.state is SnapshotState.FILLING and owner.rank not in known.seals:
            return
        last = max([sealed_step, *(s.step for s in job.snapshots.values() if s.attempt == owner.attempt)])
        if step <= last:
            raise InvalidRequest(
                f"step {step} does not follow step {last}, the last of attempt {owner.attempt}: "
                "steps only rise within an attempt; recover() to go back"
            )

    def plan(self, job: Job, owner: Owner, key: Key, why: str) -> None:
        """Record that the rank plans this step again. Raises StructureChanged if another rank has sealed it with the plan that it had."""
        if owner.world_size > 1:
            waiting = self.expect(job, key, self._plan_timeout)  # the ranks themselves name a rank that is late with its plan
            waiting.planned[owner.rank] = why
            waiting.kept.discard(owner.rank)
            snapshot = job.snapshots.get(key)
            if snapshot is not None and not waiting.kept.isdisjoint(snapshot.seals):
                with self._or_give_up(job, key):
                    raise self._changed(waiting, key)

    def take(self, job: Job, owner: Owner, key: Key, directory: str) -> None:
        """Record that the rank requests a slot for this step. Raises SnapshotFailed if another rank gives the step another tag."""
        if owner.world_size > 1:
            waiting = self.expect(job, key)
            if owner.rank not in waiting.planned:
                waiting.kept.add(owner.rank)
            with self._or_give_up(job, key):
                self.check_tag(job, key, directory, owner.rank)

    def skip(self, job: Job, key: Key, why: str) -> None:
        """Record that the step is skipped. Ranks that are planning it stop waiting for the others."""
        waiting = self._waiting.get((job.name, key))
        if waiting is not None and waiting.planned:
            self.give_up(job, key, SnapshotFailed(f"step {key[1]} is skipped: {why}"))
        else:
            self.settle(job, key)

    @staticmethod
    def _changed(waiting: _Waiting, key: Key) -> StructureChanged:
        changed = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(waiting.planned.items()))
        return StructureChanged(
            f"step {key[1]} failed, since the structure changed on some ranks only ({changed}; not on {ranks(sorted(waiting.kept))}); "
            "every rank plans anew at the next snapshot"
        )

    @staticmethod
    def check_tag(job: Job, key: Key, directory: str, rank: int) -> None:
        known = job.snapshots.get(key)
        if known is not None and known.tag != directory:
            raise SnapshotFailed(f"step {key[1]} is {directory!r} to rank {rank} and {known.tag!r} to another: use one tag on all ranks")

    def check_plan(self, job: Job, key: Key, rank: int, global_plan: bytes) -> None:
        """Raise StructureChanged unless this rank has sealed its share of the plan that the other ranks have sealed."""
        waiting = self._waiting.get((job.name, key))
        if waiting is not None and waiting.planned and rank in waiting.kept:
            raise self._changed(waiting, key)
        snapshot = job.snapshots.get(key)
        others = [] if snapshot is None else [seal.rank for seal in snapshot.seals.values() if seal.global_plan != global_plan]
        if others:
            raise StructureChanged(
                f"step {key[1]} failed: rank {rank} sealed another plan than {ranks(sorted(others))}; "
                "every rank plans anew at the next snapshot"
            )

    @staticmethod
    def check_persist(job: Job, key: Key, rank: int, persist: bool) -> None:
        """Raise SnapshotFailed unless all ranks give the step the same `persist`."""
        snapshot = job.snapshots.get(key)
        others = [] if snapshot is None else [seal.rank for seal in snapshot.seals.values() if seal.persist != persist]
        if others:
            where = ranks(sorted(others))
            raise SnapshotFailed(f"step {key[1]} has persist={persist} on rank {rank}, and not on {where}: give the same on all")

    @contextmanager
    def _or_give_up(self, job: Job, key: Key) -> Iterator[None]:
        """Fail the step on all ranks if the body raises SnapshotFailed."""
        try:
            yield
        except SnapshotFailed as error:
            self.give_up(job, key, error)
            raise

    # -- whom the others wait for

    def expect(self, job: Job, key: Key, more: float = 0.0) -> _Waiting:
        """Start the timeout of the step if it has none: all ranks have `rank_timeout` plus `more` seconds to seal it."""
        waiting = self._waiting.get((job.name, key))
        if waiting is None:
            timer = asyncio.get_running_loop().call_later(self._timeout + more, self._expire, job, key)
            waiting = self._waiting[job.name, key] = _Waiting(timer)
        return waiting

    def _expire(self, job: Job, key: Key) -> None:
        snapshot = job.snapshots.get(key)
        came = set(snapshot.seals) if snapshot is not None else set(self._waiting[job.name, key].planned)
        late = [rank for rank in range(job.world_size) if rank not in came] or list(range(job.world_size))  # all plan: any may be late
        self.give_up(job, key, SnapshotFailed(f"step {key[1]} failed: {ranks(late)} did not seal it within {self._timeout:g} s"))

    def settle(self, job: Job, key: Key) -> None:
        """End the waiting for a step, because it is complete, skipped or failed."""
        waiting = self._waiting.pop((job.name, key), None)
        if waiting is not None:
            waiting.timer.cancel()
        self._moved.set()

    async def sealed_by_all(self, job: Job, owner: Owner) -> None:
        """Wait until the other ranks have sealed every step that this rank has sealed, or those steps have failed."""
        while any(
            s.attempt == owner.attempt and s.state is SnapshotState.FILLING and owner.rank in s.seals for s in job.snapshots.values()
        ):
            self._moved.clear()
            await self._moved.wait()

    def close(self) -> None:
        for waiting in self._waiting.values():
            waiting.timer.cancel()
        self._waiting.clear()

    # -- what becomes of a step

    def give_up(self, job: Job, key: Key, error: CkptdError) -> None:
        """Fail a step that not all ranks will seal: notify every rank and free the slots. Does nothing if it is complete or has failed.

        If some ranks were planning the step and others were not, all are told to plan again, unless the error is of another kind.
        """
        waiting = self._waiting.get((job.name, key))
        if type(error) is SnapshotFailed and waiting is not None and waiting.planned and waiting.kept:
            error = StructureChanged(str(error))
        snapshot = job.snapshots.get(key)
        if key not in job.given_up and (snapshot is None or snapshot.state is SnapshotState.FILLING):
            if job.world_size > 1:  # a job of one rank may try the step again
                job.give_up(key, error.code, str(error))
            if snapshot is None:
                snapshot = Snapshot(job.name, *key, names.tag_directory(key[1], None, key[0]), job.world_size, persist=True)
            snapshot.reason, snapshot.code = str(error), error.code
            snapshot.move(Event.FAIL)
            self.counters["failed"] += 1
            self.tell(snapshot)
            self.release(job, snapshot)
        self.settle(job, key)

    def tell(self, snapshot: Snapshot) -> None:
        """Notify every connected rank of the job. A rank that went back to an older step still waits for the snapshots that it left."""
        message = Progress(
            re=0, attempt=snapshot.attempt, step=snapshot.step, state="durable" if snapshot.state is SnapshotState.DURABLE else "failed",
            reason=snapshot.reason, code=snapshot.code,
        )  # fmt: skip
        self.former = [owner for owner in self.former if owner.notify is not None]
        for owner in [*self._owners.values(), *self.former]:
            if owner.job == snapshot.job and owner.notify is not None:
                owner.notify(message)

    def release_settled(self, job: Job) -> None:
        """Free the slots of every snapshot that a newer sealed one has replaced."""
        for snapshot in job.releasable():
            self.release(job, snapshot)

    def release(self, job: Job, snapshot: Snapshot) -> None:
        snapshot.move(Event.RELEASE)
        job.snapshots.pop(snapshot.key, None)
        self._admission.vacate_snapshot(job.name, snapshot.key)

    def bury(self, owner: Owner, how: str) -> None:
        """Fail the steps that an owner had not sealed, and unlink its idle slots. `how` is "ended" or "closed"."""
        job = self._catalog.job(owner.job)
        if owner.world_size > 1 and owner.attempt == job.attempt:
            job.gone[owner.rank] = how
        for snapshot in list(job.snapshots.values()):
            if snapshot.attempt == owner.attempt and snapshot.state is SnapshotState.FILLING and owner.rank not in snapshot.seals:
                reason = f"step {snapshot.step} failed: rank {owner.rank} {how} before it had sealed it"
                self.give_up(job, snapshot.key, SnapshotFailed(reason))
        for name, key in list(self._waiting):  # steps that ranks are still planning
            if name == job.name and key[0] == owner.attempt and key not in job.snapshots:
                self.give_up(job, key, SnapshotFailed(f"step {key[1]} failed: rank {owner.rank} {how} before it had sealed it"))
        self._admission.drop_idle(owner)
