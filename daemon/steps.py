"""Steps on their way to being complete: what ranks must agree on, whom the others wait for and how long, and what becomes of a step that
not all ranks will seal. A job of one rank has nothing to agree on.

Decides on the catalog's values; frees slots through the admission and tells ranks, and does no I/O.
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
    """A step that at least one rank has come to. `planned`: why a rank plans anew; `kept`: ranks that, as far as is known, go on with the
    plan they had: they have asked for a slot, which a rank does before it has looked at its structure."""

    timer: asyncio.TimerHandle
    planned: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


class Steps:
    """`former`: owners whose attempt is over and who are still connected; what they wait for, they are told."""

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
        """Whether the rank may take this step now. `sealed_step`: the last that the journal knows of this attempt."""
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
        """The rank is about to plan this step anew. Raises StructureChanged if others have sealed it with the plan they had."""
        if owner.world_size > 1:
            waiting = self.expect(job, key, self._plan_timeout)  # the ranks find out themselves who is late with its plan
            waiting.planned[owner.rank] = why
            waiting.kept.discard(owner.rank)
            snapshot = job.snapshots.get(key)
            if snapshot is not None and not waiting.kept.isdisjoint(snapshot.seals):
                with self._or_give_up(job, key):
                    raise self._changed(waiting, key)

    def take(self, job: Job, owner: Owner, key: Key, directory: str) -> None:
        """The rank asks for a slot: with a plan made at this step, or with the one it had. Raises SnapshotFailed."""
        if owner.world_size > 1:
            waiting = self.expect(job, key)
            if owner.rank not in waiting.planned:
                waiting.kept.add(owner.rank)
            with self._or_give_up(job, key):
                self.check_tag(job, key, directory, owner.rank)

    def skip(self, job: Job, key: Key, why: str) -> None:
        """The step is not taken; ranks that are planning it need not wait for the others."""
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
        """All ranks must have sealed shares of one plan. Raises StructureChanged."""
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
        """Raises SnapshotFailed: a step is kept in memory only by all ranks or by none."""
        snapshot = job.snapshots.get(key)
        others = [] if snapshot is None else [seal.rank for seal in snapshot.seals.values() if seal.persist != persist]
        if others:
            where = ranks(sorted(others))
            raise SnapshotFailed(f"step {key[1]} has persist={persist} on rank {rank}, and not on {where}: give the same on all")

    @contextmanager
    def _or_give_up(self, job: Job, key: Key) -> Iterator[None]:
        """What ranks disagree about fails the step on all of them."""
        try:
            yield
        except SnapshotFailed as error:
            self.give_up(job, key, error)
            raise

    # -- whom the others wait for

    def expect(self, job: Job, key: Key, more: float = 0.0) -> _Waiting:
        """From now on the step has `rank_timeout` seconds, and `more`, to be sealed by all ranks."""
        waiting = self._waiting.get((job.name, key))
        if waiting is None:
            timer = asyncio.get_running_loop().call_later(self._timeout + more, self._expire, job, key)
            waiting = self._waiting[job.name, key] = _Waiting(timer)
        return waiting

    def _expire(self, job: Job, key: Key) -> None:
        snapshot = job.snapshots.get(key)
        came = set(snapshot.seals) if snapshot is not None else set(self._waiting[job.name, key].planned)
        late = [rank for rank in range(job.world_size) if rank not in came] or list(range(job.world_size))  # if all plan, nobody knows
        self.give_up(job, key, SnapshotFailed(f"step {key[1]} failed: {ranks(late)} did not seal it within {self._timeout:g} s"))

    def settle(self, job: Job, key: Key) -> None:
        """Nobody waits for the step any more: it is complete, skipped or given up."""
        waiting = self._waiting.pop((job.name, key), None)
        if waiting is not None:
            waiting.timer.cancel()
        self._moved.set()

    async def sealed_by_all(self, job: Job, owner: Owner) -> None:
        """Until what this rank has sealed is sealed by the others too, or given up."""
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
        """Not all ranks will seal it: every rank is told, and its slots are free again. Nothing if it is complete or given up already.

        If some were planning it and others were not, all are told to plan anew, unless it failed of something else than being late.
        """
        waiting = self._waiting.get((job.name, key))
        if type(error) is SnapshotFailed and waiting is not None and waiting.planned and waiting.kept:
            error = StructureChanged(str(error))
        snapshot = job.snapshots.get(key)
        if key not in job.given_up and (snapshot is None or snapshot.state is SnapshotState.FILLING):
            if job.world_size > 1:  # a rank alone may try again
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
        """Progress to every rank of the job that is connected: whoever went back still waits for what he left."""
        message = Progress(
            re=0, attempt=snapshot.attempt, step=snapshot.step, state="durable" if snapshot.state is SnapshotState.DURABLE else "failed",
            reason=snapshot.reason, code=snapshot.code,
        )  # fmt: skip
        self.former = [owner for owner in self.former if owner.notify is not None]
        for owner in [*self._owners.values(), *self.former]:
            if owner.job == snapshot.job and owner.notify is not None:
                owner.notify(message)

    def release_settled(self, job: Job) -> None:
        """Free every slot that a newer seal has made superfluous."""
        for snapshot in job.releasable():
            self.release(job, snapshot)

    def release(self, job: Job, snapshot: Snapshot) -> None:
        snapshot.move(Event.RELEASE)
        job.snapshots.pop(snapshot.key, None)
        self._admission.vacate_snapshot(job.name, snapshot.key)

    def bury(self, owner: Owner, how: str) -> None:
        """An owner has "ended" or "closed": what it had not sealed will never be complete, and its free slots go."""
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
