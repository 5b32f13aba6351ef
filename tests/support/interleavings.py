"""Random lives of trainers at one daemon, and what must be true after each event,
whatever the order.

`World(seed).live(events)` chooses one event after another: a rank plans, acquires,
seals, gives back, passes over, persists, detaches, loses its connection, comes back or
dies; a read, a save, a claim or a record ends or fails; time passes; the daemon is
killed and starts again. `World.end` lets everybody leave. Both raise Violated, with all
events so far, if an invariant does not hold. `run` lives one life after another.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from ckptd.daemon.job.catalog import Job, Step
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import Key, Snapshot
from ckptd.shared.errors import CkptdError, IntegrityError, NotFound, StorageError
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.wire.lifecycle import Event, SnapshotState
from tests.support.core import MEMORY_TTL, PLAN_TIMEOUT, RANK_TIMEOUT, Client, Core, Segment, Work

DISK = "the disk is full"
EVENTS = 120  # of a life


class Violated(AssertionError):
    pass


@dataclass(eq=False)
class Trainer:
    """One rank of a job, in one process after another.

    `granted` and `sealed` have the step of each of its segments.
    """

    job: str
    rank: int
    size: int
    alive: bool = True
    attempt: int = 0
    client: Client | None = None
    busy: bool = False  # Begin, Allocate or Detach is under way
    segments: set[str] = field(default_factory=set)
    granted: dict[str, int] = field(default_factory=dict)
    sealed: dict[str, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # steps whose grant did not arrive
    step: int = 0

    @property
    def attached(self) -> bool:
        return (
            self.alive
            and not self.busy
            and self.client is not None
            and self.client.owner is not None
        )

    def __repr__(self) -> str:
        return f"{self.job}{self.rank}"


class World:
    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.core = Core()
        sizes = {"a": self.random.choice([1, 2, 2, 3]), "b": self.random.choice([1, 2])}
        self.trainers = [
            Trainer(job, rank, size) for job, size in sizes.items() for rank in range(size)
        ]
        self.attempts = dict.fromkeys(sizes, 0)
        self.requests: dict[asyncio.Task[Any], str] = {}
        self.clients: list[Client] = []
        self.processes: dict[int, Trainer] = {}  # by pidfd
        self.log: list[str] = []
        # How often each client must be told of a failed step.
        self.expected: dict[Client, Counter[Key]] = defaultdict(Counter)
        # The steps that all ranks had sealed at some time.
        self.complete: set[tuple[str, Key]] = set()
        self.failed_saves: set[tuple[str, Key]] = set()
        self.forgotten: set[tuple[str, Key]] = set()
        self.counts: Counter[str] = Counter()
        self._watch_core()

    # -- watching what the core does

    def _watch_core(self) -> None:
        fail, end_owner, pass_over = (
            self.core.steps._fail,
            self.core.orphans._end_owner,
            self.core.engine.pass_over,
        )
        reporting = [False]

        def passing_over(owner: Owner, number: int, reason: str, code: str) -> None:
            reporting[0] = True
            try:
                pass_over(owner, number, reason, code)
            finally:
                reporting[0] = False

        def ending(owner: Owner) -> Coroutine[Any, Any, Job | None]:
            for client in self.clients:
                if client.owner is owner:
                    # As when a checkpoint is forgotten that a rank has in memory
                    # without its lock.
                    client.connected = False
            return end_owner(owner)

        def failing(job: Job, step: Step, code: str, reason: str) -> None:
            self.counts["steps failed"] += 1
            # The only rank has reported the failure itself.
            known = job.world_size == 1 and reporting[0]
            for client in [] if known else self.clients:
                if client.connected and client.owner is not None and client.owner.job == job.name:
                    self.expected[client][step.key] += 1
                    if job.world_size > 1 and self.expected[client][step.key] > 1:
                        self.violated(f"step {step.key} of {job.name} failed twice")
            fail(job, step, code, reason)

        self.core.steps._fail = failing  # type: ignore[method-assign]
        self.core.orphans._end_owner = ending  # type: ignore[method-assign]
        self.core.engine.pass_over = passing_over  # type: ignore[method-assign]

    def moving(self, snapshot: Snapshot, event: Event) -> None:
        """Check that a snapshot may be released now.

        Called before each move of a snapshot.
        """
        self.counts[f"{event.name.lower()}"] += 1
        if event is Event.SEAL and snapshot.persist:
            self.complete.add((snapshot.job, snapshot.key))
        if event is not Event.RELEASE or (
            snapshot.state is SnapshotState.FAILED and not snapshot.complete
        ):
            return
        job = self.core.catalog.job(snapshot.job)
        newer = any(
            other.in_memory and other.key > snapshot.key
            for other in job.snapshots
            if other is not snapshot
        )
        settled = (
            snapshot.state in (SnapshotState.DURABLE, SnapshotState.FAILED) or not snapshot.persist
        )
        unneeded = snapshot.state is SnapshotState.DURABLE and (
            not job.ranks.owners or snapshot.attempt < job.attempt
        )
        if snapshot.holds:
            self.violated(f"{snapshot!r} is released while it is being read")
        if not settled:
            self.violated(f"{snapshot!r} is released while its save is owed")
        if not (
            newer or snapshot.unwanted or unneeded or (job.name, snapshot.key) in self.forgotten
        ):
            self.violated(f"{snapshot!r} is released, although it is the newest in memory")

    def violated(self, what: str) -> None:
        tail = "\n".join(self.log)
        raise Violated(f"seed {self.seed}: {what}\n{tail}")

    def check(self) -> None:
        """Check all that must be true between two events."""
        core = self.core
        if core.errors:
            self.violated(f"an internal error: {core.errors[0]!r}")
        for task, name in list(self.requests.items()):
            if task.done():
                del self.requests[task]
                error = None if task.cancelled() else task.exception()
                if isinstance(error, Violated):
                    raise error
                if error is not None and not isinstance(error, CkptdError):
                    self.violated(f"{name}: {error!r}")
        places: dict[str, Step] = {}
        for job in core.catalog.jobs.values():
            for step in job.steps.values():
                self._check_step(job, step, places)
        for trainer in self.trainers:
            self._check_granted(trainer)
        for client, expected in self.expected.items():
            for key, count in expected.items():
                told = [reason for reason in client.failures(*key) if reason != DISK]
                if len(told) != count and client.connected:
                    self.violated(
                        f"{client.owner and client.owner.identity} was told {len(told)} times of "
                        f"step {key}, not {count}: {told}"
                    )

    def _check_granted(self, trainer: Trainer) -> None:
        """Check that the slots that a rank fills are in their steps, unless the steps
        have failed.
        """
        job = self.core.catalog.job(trainer.job)
        if trainer.attached and trainer.attempt == job.attempt:
            for name, number in trainer.granted.items():
                step = job.steps.get((trainer.attempt, number))
                if step is not None and step.filling is not None and name not in step.slots:
                    self.violated(f"{trainer} fills {name}, which is not in {step}")

    def _check_step(self, job: Job, step: Step, places: dict[str, Step]) -> None:
        for name, rank in step.slots.items():
            slot = self.core.segments.slots.get(name)
            if name in places:
                self.violated(f"{name} is in {places[name]} and in {step}")
            if slot is None or slot.owner != (job.name, step.attempt, rank):
                self.violated(f"{step} has {name}, which is {slot}")
            places[name] = step
        if (step.planned or step.kept) and step.timer is None:
            self.violated(f"{step}: ranks wait for each other without a timer")
        if step.timer is not None and step.timer.cancelled():
            self.violated(f"{step} has a cancelled timer")
        snapshot = step.snapshot
        if snapshot is None:
            return
        if any(seal.segment not in step.slots for seal in snapshot.seals.values()):
            self.violated(f"{snapshot!r} is in memory, and a slot of it is not: {step.slots}")
        if not snapshot.complete:
            if snapshot.state is not SnapshotState.FILLING or step.failure is not None:
                self.violated(f"{snapshot!r} is incomplete, {step.failure}")
            if snapshot.seals and step.timer is None and not self.core.engine.stopping:
                self.violated(f"{snapshot!r}: a rank has sealed it, and nothing ends its waiting")
        elif snapshot.state is SnapshotState.FILLING:
            self.violated(f"all ranks have sealed {snapshot!r}")
        elif (
            snapshot.state is SnapshotState.SEALED
            and snapshot.persist
            and snapshot not in self.core.saver.running
        ):
            self.violated(f"{snapshot!r} is not being saved")
        elif (
            snapshot.state in (SnapshotState.WRITING, SnapshotState.WRITTEN)
            and snapshot not in self.core.saver.running
        ):
            self.violated(f"{snapshot!r} is not being written")

    # -- requests, as the server makes them

    def request(
        self, trainer: Trainer, name: str, work: Coroutine[Any, Any, Any]
    ) -> asyncio.Task[Any]:
        task = self.core.spawn(work)
        self.requests[task] = f"{trainer} {name}"
        self.log.append(f"{trainer} {name}")
        return task

    async def begin(self, trainer: Trainer, attempt: int) -> None:
        core, before = self.core, trainer.client
        client = Client(core)
        client.connected = False
        trainer.client = client
        self.clients.append(client)
        process = os.eventfd(0) if self.random.random() < 0.8 else -1
        try:
            owner = await core.engine.begin(
                trainer.job, trainer.rank, trainer.size, attempt, client.notify
            )
        except BaseException:
            if process >= 0:
                os.close(process)
            if trainer.client is client:
                trainer.client, trainer.busy = before, False
            raise
        if before is not None and before.owner is not None:
            core.orphans.moved_on(before.owner)
            before.connected = False
        core.orphans.cancel_timer(trainer.job)
        core.orphans.guard(owner, process)
        if process >= 0:
            self.processes[process] = trainer
        client.owner = owner
        if trainer.client is not client or not trainer.alive:  # the connection was closed meanwhile
            core.orphans.connection_lost(owner)
            return
        client.connected, trainer.busy = True, False
        if owner.attempt != trainer.attempt:
            self.forget(trainer)
            trainer.attempt = owner.attempt
        self.attempts[trainer.job] = max(self.attempts[trainer.job], owner.attempt)
        self.resume(trainer)

    def resume(self, trainer: Trainer) -> None:
        """Give back what was granted and is not known, and repeat all seals."""
        held = {
            slot.name for slot in self.core.segments.of(trainer.job, trainer.attempt, trainer.rank)
        }
        trainer.segments &= held
        for name in sorted(trainer.segments - set(trainer.granted) - set(trainer.sealed)):
            for step in sorted(trainer.lost):
                self.core.segments.get(name).write(SlotState.FREE)
                self.request(
                    trainer, f"gives {name} of step {step} back", self.abandon(trainer, name, step)
                )
        trainer.lost.clear()
        for name, step in sorted(trainer.sealed.items()):
            if name in held:
                self.request(
                    trainer,
                    f"reports {name} with step {step} again",
                    self.seal(trainer, name, step),
                )

    def forget(self, trainer: Trainer) -> None:
        trainer.segments, trainer.granted, trainer.sealed, trainer.lost, trainer.step = (
            set(),
            {},
            {},
            set(),
            0,
        )

    def owner(self, trainer: Trainer) -> Any:
        if trainer.client is None or trainer.client.owner is None:
            raise NotFound("the connection was lost before the daemon read the request")
        return trainer.client.owner

    async def allocate(self, trainer: Trainer, count: int) -> None:
        client, trainer.busy = trainer.client, True
        try:
            made: list[Any] = await self.core.engine.allocate(self.owner(trainer), 1000, count, -1)
        finally:
            if trainer.client is client:
                trainer.busy = False
        if trainer.client is client and trainer.alive:
            trainer.segments = {slot.name for slot in made} | set(trainer.sealed)
            trainer.granted.clear()
            for slot in made:
                slot.held = True

    async def plan(self, trainer: Trainer, step: int) -> None:
        self.core.engine.plan(self.owner(trainer), step, "a tensor grew")

    async def acquire(self, trainer: Trainer, step: int, tag: str | None, wait: float) -> None:
        client = trainer.client
        try:
            slot: Any = await self.core.engine.acquire(self.owner(trainer), step, tag, wait)
        except asyncio.CancelledError:
            return
        if isinstance(slot, str):
            self.counts["skipped"] += 1
            return
        self.counts["granted"] += 1
        for snapshot in self.core.catalog.job(trainer.job).snapshots:
            if snapshot.complete and any(
                seal.segment == slot.name for seal in snapshot.seals.values()
            ):
                self.violated(f"{slot} is granted, and {snapshot!r} is in it")
        if trainer.client is not client or not trainer.alive or slot.name not in trainer.segments:
            if trainer.alive:
                trainer.lost.add(step)
            return
        trainer.sealed.pop(slot.name, None)
        trainer.granted[slot.name] = step
        trainer.step = max(trainer.step, step)
        slot.tag = tag
        slot.write(SlotState.FILLING, step)

    async def seal(self, trainer: Trainer, name: str, step: int) -> None:
        attempt = trainer.attempt
        durable = await self.core.engine.seal(self.owner(trainer), name, attempt, step)
        if durable:
            trainer.sealed.pop(name, None)

    async def abandon(self, trainer: Trainer, name: str, step: int | None) -> None:
        self.core.engine.abandon(self.owner(trainer), name, step, "", "")

    async def pass_over(self, trainer: Trainer, step: int) -> None:
        self.core.engine.pass_over(self.owner(trainer), step, "no memory left", "storage")

    async def persist(self, trainer: Trainer) -> None:
        await self.core.engine.persist(self.owner(trainer))

    async def fetch(self, trainer: Trainer, attempt: int, step: int) -> None:
        for _, fd in await self.core.engine.fetch(self.owner(trainer), attempt, step):
            os.close(fd)

    async def detach(self, trainer: Trainer) -> None:
        core, owner, client = self.core, self.owner(trainer), trainer.client
        assert client is not None
        client.connected = False
        core.engine.detach(owner)
        core.orphans.unguard(owner.identity)
        core.orphans.start_timer(core.catalog.job(owner.job))
        client.owner = None
        trainer.client, trainer.busy = None, False
        self.drop_locks(trainer)
        self.forget(trainer)
        trainer.attempt = 0

    async def disconnect(self, trainer: Trainer) -> None:
        client = trainer.client
        trainer.client, trainer.busy = None, False
        if client is not None and client.owner is not None and client.connected:
            client.connected = False
            self.core.orphans.connection_lost(client.owner)

    def drop_locks(self, trainer: Trainer) -> None:
        for slot in self.core.segments.slots.values():
            if slot.owner[0] == trainer.job and slot.owner[2] == trainer.rank:
                slot.held = False

    # -- events

    def live(self, events: int) -> None:
        for _ in range(events):
            self.event()
            self.check()

    def event(self) -> None:
        dice = self.random.random()
        if dice < 0.4 and self.core.work:
            self.end_work(self.random.choice(self.core.work))
        elif dice < 0.93:
            self.trainer_event(self.random.choice(self.trainers))
        elif dice < 0.985:
            seconds = self.random.choice(
                [0.1, 0.1, 1.0, 1.0, 5.0, 5.0, 20.0, RANK_TIMEOUT, MEMORY_TTL]
            )
            self.log.append(f"{seconds} s pass")
            self.core.advance(seconds)
        elif dice < 0.991:
            self.restart()
        elif dice < 0.995:
            self.lose_claim(self.random.choice(list(self.attempts)))
        else:
            self.let_go(self.random.choice(list(self.attempts)))
        self.core.tick(self.random.choice([0, 1, 1, 2, 6]))

    def end_work(self, work: Work) -> None:
        result: Any = None
        if work.what in ("save", "check") and self.random.random() < 0.2:
            result = StorageError(DISK)
            self.failed_saves.add((work.subject.job, work.subject.key))
        elif work.what == "read" and self.random.random() < 0.05:
            result = IntegrityError("the plan is damaged")
            header = work.subject.header
            self.failed_saves.add((header.job, (header.attempt, header.step)))
        elif work.what == "claim" and self.random.random() < 0.2:
            result = StorageError("the storage does not answer")
        self.log.append(f"{work} ends: {result!r}")
        work.end(result)

    def trainer_event(self, trainer: Trainer) -> None:
        if not trainer.alive:
            if self.random.random() < 0.5:
                self.notice_death(trainer)
            else:
                trainer.alive = True
                self.log.append(f"{trainer} is started again")
            return
        if not trainer.attached:
            self.connect(trainer)
            return
        if trainer.attempt < self.attempts[trainer.job] and self.random.random() < 0.5:
            self.connect(trainer)
            return
        if not trainer.segments:
            self.request(trainer, "allocates", self.allocate(trainer, 2))
            return
        self.random.choices(
            [self.takes, self.seals, self.gives_back, self.dies, self.leaves, self.asks, self.grows,
            self.connect], [40 if not trainer.granted else 4, 60, 4, 2, 3, 5, 1, 1],
        )[0](trainer)  # fmt: skip

    def connect(self, trainer: Trainer) -> None:
        if trainer.busy:
            return
        known = self.attempts[trainer.job] if self.random.random() < 0.9 else trainer.attempt
        attempt = known if self.random.random() < 0.9 else 0
        if trainer.rank and not attempt:
            return
        if trainer.attempt and attempt != trainer.attempt:
            self.drop_locks(trainer)
        trainer.busy = True
        self.request(
            trainer, f"begins {attempt or 'the next attempt'}", self.begin(trainer, attempt)
        )

    def takes(self, trainer: Trainer) -> None:
        peers = [
            other.step
            for other in self.trainers
            if other.job == trainer.job and other.attempt == trainer.attempt
        ]
        step = (
            max(max(peers), trainer.step + 1)
            if self.random.random() < 0.95
            else trainer.step + self.random.choice([0, 1, 2])
        )
        if step % 7 == 0 or self.random.random() < 0.03:
            self.request(trainer, f"plans {step}", self.plan(trainer, step))
        if self.random.random() < 0.95:
            tag = "best" if self.random.random() < 0.02 else None
            wait = self.random.choice([0.0, 0.5, 10.0])
            self.request(
                trainer,
                f"acquires {step}, tag {tag}, within {wait} s",
                self.acquire(trainer, step, tag, wait),
            )

    def seals(self, trainer: Trainer) -> None:
        if not trainer.granted:
            return
        name = self.random.choice(sorted(trainer.granted))
        slot, step = self.core.segments.slots.get(name), trainer.granted.pop(name)
        if slot is None:
            return
        trainer.sealed[name] = step
        self.fill(slot, trainer, step)
        if self.random.random() < 0.9:
            self.request(trainer, f"seals {name} with step {step}", self.seal(trainer, name, step))
        else:
            self.log.append(f"{trainer} seals {name} with step {step}, and does not report it")

    def fill(self, slot: Segment, trainer: Trainer, step: int) -> None:
        slot.plan = b"another" if self.random.random() < 0.03 else b"plan"
        slot.persist = step % 3 != 0 if self.random.random() < 0.97 else step % 3 == 0
        slot.damaged = self.random.random() < 0.02
        slot.write(SlotState.SEALED, step)

    def gives_back(self, trainer: Trainer) -> None:
        if trainer.granted and self.random.random() < 0.7:
            name = self.random.choice(sorted(trainer.granted))
            step = trainer.granted.pop(name)
            if name in self.core.segments.slots:
                self.core.segments.get(name).write(SlotState.FREE)
            self.request(
                trainer, f"gives {name} of step {step} back", self.abandon(trainer, name, step)
            )
        else:
            self.request(
                trainer,
                f"passes over {trainer.step + 1}",
                self.pass_over(trainer, trainer.step + 1),
            )

    def dies(self, trainer: Trainer) -> None:
        self.log.append(f"{trainer} dies")
        trainer.alive = False
        self.request(trainer, "loses its connection", self.disconnect(trainer))
        self.drop_locks(trainer)
        self.forget(trainer)
        trainer.attempt = 0

    def notice_death(self, trainer: Trainer) -> None:
        for process, whose in list(self.processes.items()):
            if whose is trainer and process in self.core.loop.readers:
                self.log.append(f"the kernel tells that {trainer} is dead")
                self.core.loop.call_soon(self.core.loop.readers[process])
                del self.processes[process]

    def leaves(self, trainer: Trainer) -> None:
        if self.random.random() < 0.5:
            trainer.busy = True
            self.request(trainer, "detaches", self.detach(trainer))
        else:
            self.request(trainer, "loses its connection", self.disconnect(trainer))

    def asks(self, trainer: Trainer) -> None:
        if self.random.random() < 0.5:
            self.request(trainer, "persists", self.persist(trainer))
        elif found := self.core.engine.memory_candidates(trainer.job):
            key = self.random.choice(found).key
            self.request(trainer, f"fetches {key}", self.fetch(trainer, *key))

    def grows(self, trainer: Trainer) -> None:
        self.request(trainer, "allocates larger slots", self.allocate(trainer, 2))

    def restart(self) -> None:
        """Kill the daemon, and start the next one on what it left."""
        self.log.append("the daemon is killed and starts again")
        for task in self.requests:
            task.cancel()
        for client in self.clients:
            client.connected = False
        for trainer in self.trainers:
            trainer.client, trainer.busy = None, False
        left = self.core.close()
        self.requests.clear()
        self.clients.clear()
        self.expected.clear()
        self.processes.clear()
        self.core = Core(left)
        self._watch_core()
        self.core.start()

    def lose_claim(self, job: str) -> None:
        """Let another daemon claim the newest attempt, which has begun in memory."""
        attempt = self.core.catalog.job(job).attempt
        if not attempt:
            return
        self.log.append(f"attempt {attempt} of {job} is lost")

        async def lose() -> None:
            self.core.lose_claim(self.core.catalog.job(job), attempt)

        self.requests[self.core.spawn(lose())] = "lose_claim"

    def let_go(self, job: str) -> None:
        known = self.core.catalog.job(job)
        if not known.checkpoints:
            return
        checkpoint = self.random.choice(list(known.checkpoints.values()))
        assert checkpoint.step is not None
        self.log.append(f"{job}/{checkpoint.tag} is forgotten")
        self.forgotten.add((job, (checkpoint.attempt, checkpoint.step)))
        self.requests[self.core.spawn(self.core.orphans.let_go(known, checkpoint.tag))] = "let_go"

    # -- the end

    def settle(self) -> None:
        """End all work, and let all time limits pass: then no rank may wait for
        anything.
        """
        for _ in range(12):
            self.core.finish()
            self.check()
            self.core.advance((RANK_TIMEOUT + PLAN_TIMEOUT) / 4)
            self.check()
        self.core.finish()
        self.check()
        if self.requests:
            self.violated(f"nobody answers {sorted(self.requests.values())}")
        for job in self.core.catalog.jobs.values():
            for step in job.steps.values():
                if step.timer is not None:
                    self.violated(f"{step} still has a timer")
        for name, key in self.complete - self.failed_saves - self.forgotten:
            if not self.core.catalog.job(name).is_durable(*key):
                self.violated(f"all ranks have sealed step {key} of {name}, and it is not durable")

    def drain(self) -> None:
        """Stop the daemon while trainers go on: then what was the newest snapshot of
        each job is saved, unless a newer one has come.
        """
        core = self.core
        owed = [
            (job, newest)
            for job in core.catalog.jobs.values()
            if (newest := job.newest_in_memory()) is not None
        ]
        core.engine.stopping = True
        self.log.append("the daemon stops")
        stopping = core.spawn(core.orphans.drain())
        for _ in range(30):
            self.event_while_stopping()
            self.check()
        while not stopping.done():
            core.finish()
            self.check()
        stopping.result()
        for job, newest in owed:
            excused = (
                job.newest_in_memory() is not newest or (job.name, newest.key) in self.failed_saves
            )
            if not job.is_durable(*newest.key) and not excused:
                self.violated(f"the daemon has stopped, and {newest!r} is not durable")
        for task in self.requests:
            task.cancel()
        core.close()

    def event_while_stopping(self) -> None:
        if self.core.work and self.random.random() < 0.5:
            self.end_work(self.random.choice(self.core.work))
        else:
            trainer = self.random.choice(self.trainers)
            if trainer.attached:
                self.random.choice([self.seals, self.seals, self.takes, self.dies])(trainer)
        self.core.tick(self.random.choice([0, 1, 2]))

    def end(self) -> None:
        """Let all trainers leave or die, and let `memory_ttl` pass: then nothing may be
        left.
        """
        self.settle()
        for trainer in self.trainers:
            if trainer.attached and self.random.random() < 0.5:
                self.request(trainer, "detaches", self.detach(trainer))
            elif trainer.alive:
                self.dies(trainer)
            self.core.tick(3)
        for trainer in self.trainers:
            self.notice_death(trainer)
        self.settle()
        for _ in range(4):
            self.core.advance(MEMORY_TTL + 1)
            self.core.finish()
            self.check()
        core = self.core
        left = [
            step
            for job in core.catalog.jobs.values()
            for step in job.steps.values()
            if not step.idle
        ]
        untidy = [
            step
            for job in core.catalog.jobs.values()
            for step in job.steps.values()
            if not (step.failure or step.refusal)
        ]
        owners = [
            owner for job in core.catalog.jobs.values() for owner in job.ranks.owners.values()
        ]
        what = (
            left,
            untidy,
            owners,
            core.segments.slots,
            core.loop.timers(),
            core.loop.readers,
            core.work,
            core.saver.running,
        )
        if any(what):
            self.violated(f"something is left: {what}")
        core.close()


def run(count: int, number: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Live `count` lives, or as many as the time allows. `number` is the seed.

    Return how often what happened in them, and the first invariant that did not hold.
    """
    tried, end, first = Counter[str](), time.monotonic() + seconds, number * 1_000_000
    move = Snapshot.move
    for seed in range(first, first + count):
        world = World(seed)

        def moved(snapshot: Snapshot, event: Event, world: World = world) -> None:
            world.moving(snapshot, event)
            move(snapshot, event)

        try:
            with mock.patch.object(Snapshot, "move", moved):
                world.live(EVENTS)
                world.drain() if seed % 4 == 0 else world.end()
        except Violated as violated:
            return tried, [str(violated)]
        except Exception as error:
            error.add_note(f"in the life with seed {seed}")
            raise
        tried["lives"] += 1
        tried.update({f" {kind}": often for kind, often in world.counts.items()})
        if time.monotonic() >= end:
            break
    return tried, []
