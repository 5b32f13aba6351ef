"""The daemon's core without processes, files or threads: the real engine, steps
and orphans, over fakes and a clock of its own.

A test moves the core by hand. `Core.tick` runs what is ready, `Core.advance` moves the
clock, and `Core.work` has the calls that the core waits for: reads of seals, saves,
segments, claims and journal records. Each ends when the test says so, and how the test
says.
"""

from __future__ import annotations

import asyncio
import os
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from ckptd.daemon import tasks
from ckptd.daemon.composition import subscribe
from ckptd.daemon.engine.engine import Engine
from ckptd.daemon.engine.orphans import Orphans
from ckptd.daemon.engine.peer_copies import PeerCopies
from ckptd.daemon.engine.seal_intake import SealIntake
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.durations import STALLS, Durations
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.journal import records as r
from ckptd.daemon.memory.admission import Admission
from ckptd.daemon.runs.run_guard import RunGuard
from ckptd.shared.errors import (
    CkptdError,
    Fenced,
    IntegrityError,
    NotFound,
    SharedMemoryFull,
    StorageError,
)
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import SegmentHeader, SlotState
from ckptd.shared.wire.board import Holding
from ckptd.shared.wire.lifecycle import Event, SnapshotState
from ckptd.shared.wire.messages import Holds, Notification, Progress, Waiting

RANK_TIMEOUT, PLAN_TIMEOUT, MEMORY_TTL = 60.0, 15.0, 900.0


class _Selector(selectors.SelectSelector):
    """A selector that neither waits nor finds anything ready."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only by `now`, and whose readers are called only
    by `end_of`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.readers: dict[int, Callable[[], None]] = {}
        super().__init__(_Selector())

    def time(self) -> float:
        return self.now

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        self.readers[fd] = lambda: (callback(*args), None)[1]

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None

    def tick(self) -> None:
        """Run what is ready now, but not what becomes ready by it."""
        self.call_soon(self.stop)
        self.run_forever()

    def timers(self) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


@dataclass(eq=False)
class Work:
    """A call that the core waits for.

    `what` names its kind, `subject` what it is about.
    """

    what: str
    subject: Any
    future: asyncio.Future[Any]

    def end(self, result: Any = None) -> None:
        """End the call with a result, or with an error."""
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def __repr__(self) -> str:
        return f"<{self.what} {self.subject}>"


@dataclass(eq=False)
class Segment:
    """A slot without a file, with what its trainer has written.

    held: the trainer holds its lock. unreadable: its disk reports an error now. misfit:
    its documents do not fit those of other ranks.
    """

    name: str
    header: SegmentHeader
    written: SegmentHeader
    held: bool = False
    damaged: bool = False
    unreadable: bool = False
    misfit: bool = False
    tag: str | None = None
    persist: bool = True
    plan: bytes = b"plan"
    crcs: list[int] | None = None
    pins: int = 0
    released: bool = False
    outgrown: bool = False
    lent: bool = False

    @property
    def owner(self) -> tuple[str, int, int]:
        return (self.header.job, self.header.attempt, self.header.rank)

    def refresh(self) -> SegmentHeader:
        self._check()
        self.header = self.written
        return self.header

    @contextmanager
    def pinned(self) -> Iterator[Any]:
        self._check()
        self.pins += 1
        try:
            yield self
        finally:
            self.pins -= 1

    reading = pinned

    def _check(self) -> None:
        if self.released:
            raise NotFound(f"segment {self.name} has been released")
        if self.unreadable:
            raise StorageError(f"cannot read the segment {self.name}")

    def write(self, state: SlotState, step: int | None = None) -> None:
        """Write a header, as the trainer does."""
        self.written = replace(
            self.written, state=state, step=step, generation=self.written.generation + 1
        )

    def __repr__(self) -> str:
        return f"<{self.name} {self.written.state.name} {self.written.step}>"


class Segments:
    """Plays `Slots`. `room`: how many segments fit."""

    def __init__(self, room: int = 1000) -> None:
        self.slots: dict[str, Segment] = {}
        self.room, self._made = room, 0

    def create(self, header: SegmentHeader, node: int) -> Segment:
        if len(self.slots) >= self.room:
            raise SharedMemoryFull("no room")
        self._made += 1
        return Segment(f"{header.job}{header.attempt}r{header.rank}n{self._made}", header, header)

    def add(self, slot: Segment) -> Segment:
        self.slots[slot.name] = slot
        return slot

    def of(self, job: str, attempt: int, rank: int) -> list[Segment]:
        return [slot for slot in self.slots.values() if slot.owner == (job, attempt, rank)]

    def may_overflow(self, error: CkptdError) -> bool:
        return False

    def get(self, name: str) -> Segment:
        if name not in self.slots:
            raise NotFound(f"there is no segment {name!r}")
        return self.slots[name]

    def release(self, slot: Segment) -> None:
        slot.released = True
        self.slots.pop(slot.name, None)

    def is_held(self, slot: Segment) -> bool:
        return slot.held

    def open_again(self, slot: Segment, *, write: bool) -> int:
        return os.open("/dev/null", os.O_RDONLY)


class Journal:
    """Plays `Journal`: a record counts once its work has ended.

    `records` has all that were posted, in order.
    """

    def __init__(self, core: Core, state: r.JournalState) -> None:
        self._core, self.state, self.records = core, state, list[r.Record]()

    def post(self, record: r.Record, done: Callable[[], None]) -> asyncio.Future[None]:
        self.records.append(record)
        work = self._core.begin("journal", record)
        work.future.add_done_callback(lambda _: self.state.apply(record))
        return work.future


class Claims:
    """Plays `Claims`: a claim ends with the next number, or with an error.

    `lost` has the attempts that other daemons have claimed, `newest` the newest attempt
    that the storage knows.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.lost: set[tuple[str, int]] = set()
        self.newest = 0

    async def claim(self, job: Job, known: int, *, in_memory: bool = True) -> int:
        await self._core.begin("claim", job.name).future
        return known + 1

    async def check_shared(self, job: Job, attempt: int) -> None:
        pass

    async def bring(self, job: Job, attempt: int) -> None:
        if attempt < self.newest:
            raise Fenced(f"attempt {attempt} of job {job.name!r} has ended")

    def is_lost(self, job: Job, attempt: int) -> bool:
        return (job.name, attempt) in self.lost


class Saver:
    """Plays `Saver`, with the same moves of a snapshot, and without a byte written.

    The work "save" ends with None or an error.
    """

    def __init__(self, core: Core, events: Events) -> None:
        self._core, self._events = core, events
        self.counters: Counter[str] = Counter()
        self.stalls = Durations(STALLS)
        self.running: dict[Snapshot, asyncio.Task[None]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def stop_waiting(self) -> None:
        pass  # all ranks are on one node

    def start(self, snapshot: Snapshot) -> asyncio.Task[None]:
        task = self.running.get(snapshot)
        if task is None or task.done():
            hold = ExitStack()
            hold.enter_context(snapshot.held())
            task = self.running[snapshot] = asyncio.get_running_loop().create_task(
                self._run(snapshot, hold)
            )
            task.add_done_callback(lambda done: self._done(snapshot, hold, done))
        return task

    def _done(self, snapshot: Snapshot, hold: ExitStack, task: asyncio.Task[None]) -> None:
        hold.close()
        if self.running.get(snapshot) is task:
            del self.running[snapshot]
        self._events.settled(self._core.catalog.job(snapshot.job))

    async def _run(self, snapshot: Snapshot, hold: ExitStack) -> None:
        job = self._core.catalog.job(snapshot.job)
        try:
            with hold:
                await self.check(snapshot)
                if snapshot.persist and not job.is_durable(*snapshot.key):
                    snapshot.move(Event.WRITE)
                    await self._core.begin("save", snapshot).future
                    snapshot.move(Event.WROTE)
                    job.commit(
                        StoredCheckpoint(
                            job.name,
                            snapshot.tag,
                            snapshot.attempt,
                            snapshot.step,
                            job.seq + 1,
                            1,
                            ("part",),
                            user_tag=False,
                        )
                    )
                    snapshot.move(Event.COMMIT)
                    self._events.saved(snapshot)
            if snapshot.state is SnapshotState.DURABLE:
                self._events.settled(job)
        except CkptdError as error:
            snapshot.reason, snapshot.code = str(error), error.code
            if snapshot.state in (
                SnapshotState.SEALED,
                SnapshotState.WRITING,
                SnapshotState.WRITTEN,
            ):
                snapshot.move(Event.FAIL)
            if snapshot.state is SnapshotState.FAILED:
                self._events.saved(snapshot)

    async def check(self, snapshot: Snapshot) -> None:
        with snapshot.held():
            await self._core.begin("check", snapshot).future

    async def wait_idle(self, snapshot: Snapshot) -> None:
        while snapshot in self.running:
            await asyncio.wait([self.running[snapshot]])

    async def drain(self) -> None:
        while self.running:
            await asyncio.wait(list(self.running.values()))


class NoHeartbeats:
    """Plays what a `RunGuard` needs, for a job that runs on no other node."""

    def attempts(self, job: str) -> list[int]:
        return []

    async def run(self, call: Callable[[], Any]) -> Any:
        return call()

    def keep(self, job: Job, dead: Collection[int] = ()) -> None:
        pass


@dataclass
class Left:
    """What a daemon leaves to the next one: its segments, its checkpoints and its
    journal.
    """

    segments: Segments = field(default_factory=Segments)
    checkpoints: dict[str, list[StoredCheckpoint]] = field(default_factory=dict)
    journal: r.JournalState = field(default_factory=r.JournalState)


def _fake(part: object) -> Any:
    """Return a fake as whatever the core wants it to be."""
    return part


class OneRoot:
    """A root that is always there, and a memory that is all of it."""

    async def check(self, job: Job) -> None:
        pass

    async def apply_choice(self, job: str, choice: str) -> None:
        pass

    def check_attempt(self, job: str, attempt: int, identity: str, choice: str) -> None:
        pass


class Core:
    """One daemon's core. `close` ends it as a kill does, and returns what it leaves."""

    def __init__(self, left: Left | None = None) -> None:
        left = left or Left()
        self.loop = Loop()
        self.work: list[Work] = []
        self.catalog, self.segments = Catalog(), left.segments
        slots = _fake(left.segments)
        self.journal, self.claims = _fake(Journal(self, left.journal)), _fake(Claims(self))
        self.errors: list[BaseException] = []
        tasks.on_failure(self.errors.append)
        self.loop.set_exception_handler(
            lambda _, context: self.errors.append(
                context.get("exception") or RuntimeError(context["message"])
            )
        )
        self.changes = 0
        self.compared: list[list[int]] = []
        """The ranks whose slots were compared, each time."""

        self.events = Events(on_changed=[self._changed])
        self.saver = _fake(Saver(self, self.events))
        self.steps = Steps(self.catalog, slots, self.saver, RANK_TIMEOUT)
        self.seals = SealIntake(self.catalog, self.steps, self.journal, self._read, self._compare)
        self.copies = PeerCopies(self.catalog, slots, self.steps, self._create, self._read)
        self.admission = Admission(slots, MIN_CHUNK, self._create)
        self.engine = Engine(
            self.catalog, slots, self.journal, self.claims, self.admission, self.steps, self.seals,
            self.copies, self.saver, RunGuard(_fake(NoHeartbeats()), _fake(NoHeartbeats()),
            _fake(NoHeartbeats())), _fake(OneRoot()), _fake(OneRoot()), PLAN_TIMEOUT,
        )  # fmt: skip
        self.orphans = Orphans(
            self.catalog,
            slots,
            self.steps,
            self.seals,
            self.copies,
            self.saver,
            self.events,
            MEMORY_TTL,
        )
        subscribe(self.events, self.steps, self.engine, self.orphans, None)
        for name, checkpoints in left.checkpoints.items():
            for checkpoint in checkpoints:
                self.catalog.job(name).commit(checkpoint)

    def _changed(self) -> None:
        self.changes += 1

    def lose_claim(self, job: Job, attempt: int) -> None:
        """Do what the daemon does when another daemon turns out to have claimed an
        attempt.
        """
        self.claims.lost.add((job.name, attempt))
        self.events.claim_lost(job, attempt)

    # -- what the core waits for

    def begin(self, what: str, subject: Any) -> Work:
        work = Work(what, subject, self.loop.create_future())
        self.work.append(work)
        work.future.add_done_callback(lambda _: self.work.remove(work))
        return work

    async def _create(self, create: Callable[[], Any]) -> Any:
        await self.begin("create", None).future
        return create()

    def _read(self, fd: Any, header: SegmentHeader) -> Awaitable[Any]:
        return self._read_segment(fd, header)

    async def _read_segment(self, segment: Segment, header: SegmentHeader) -> Any:
        await self.begin("read", segment).future
        if segment.damaged or segment.written.generation != header.generation:
            raise IntegrityError(f"{segment.name} is damaged")
        sealed = SimpleNamespace(
            request=SimpleNamespace(
                replicate=False, tag=segment.tag, persist=segment.persist, node=None, replicas=[]
            ),
            plan=SimpleNamespace(global_plan=segment.plan),
            crcs=segment.crcs,
        )
        return sealed, segment

    async def _compare(self, contents: Mapping[int, Any], world_size: int) -> None:
        self.compared.append(sorted(contents))
        if any(segment.misfit for segment in contents.values()):
            await self.begin("compare", sorted(contents)).future
            raise IntegrityError("'w' has a hole")

    # -- moving it

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(work)

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.tick()

    def advance(self, seconds: float) -> None:
        self.loop.now += seconds
        self.tick(4)

    def finish(self, *kinds: str) -> None:
        """End all work of these kinds, or of all kinds, until there is none left, and
        run what follows.
        """
        self.tick(4)
        while found := [work for work in self.work if not kinds or work.what in kinds]:
            for work in found:
                work.end()
            self.tick(4)

    def run(self, work: Any) -> Any:
        """Run a coroutine to its end, with all work that it waits for."""
        task = self.spawn(work)
        self.finish()
        for _ in range(20):
            if task.done():
                return task.result()
            self.finish()
        raise AssertionError(f"{task} does not end")

    def start(self) -> None:
        """Take over what an earlier daemon left, as `recovery` does."""
        adopted = _fake(list(self.segments.slots.values()))
        for name, known in self.journal.state.jobs.items():
            job = self.catalog.job(name)
            if known.attempt > job.attempt:
                job.attempt, job.world_size = known.attempt, known.world_size
        self.orphans.adopt(adopted)
        self.run(self.orphans.record_adopted(adopted))

        async def watch() -> None:
            self.orphans.watch()

        self.run(watch())

    def close(self) -> Left:
        """End without a word, as SIGKILL does."""
        for _ in range(3):
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.tick(3)
        for process in list(self.loop.readers):
            os.close(process)
        self.loop.close()
        tasks.on_failure(lambda error: None)
        checkpoints = {
            name: list(job.checkpoints.values()) for name, job in self.catalog.jobs.items()
        }
        for segment in self.segments.slots.values():
            segment.header, segment.outgrown, segment.pins = segment.written, False, 0
        return Left(self.segments, checkpoints, self.journal.state)


class Client:
    """One connection of a rank, with what the daemon has told it."""

    def __init__(self, core: Core, owner: Owner | None = None) -> None:
        self.core, self.owner = core, owner
        self.connected = True
        self.told: list[Progress] = []
        self.warned: list[Waiting] = []
        self.holdings: list[Holding] = []

    def notify(self, message: Notification) -> None:
        if isinstance(message, Progress):
            self.told.append(message)
        if isinstance(message, Waiting):
            self.warned.append(message)
        if isinstance(message, Holds):
            self.holdings.append(message.holding)

    def failures(self, attempt: int, step: int) -> list[str]:
        return [
            told.reason
            for told in self.told
            if (told.attempt, told.step, told.state) == (attempt, step, "failed")
        ]


class ConnectedRanks:
    """A core, and a job whose ranks are connected and have two slots each, whose locks
    they hold. Nothing ends by chance.
    """

    def __init__(self, size: int = 2, job: str = "gpt") -> None:
        self.core, self.name, self.size = Core(), job, size
        self.clients = [self.begin(rank, rank and 1) for rank in range(size)]
        for client in self.clients:
            for slot in self.core.run(self.core.engine.allocate(self.owner(client), 1000, 2, -1)):
                _fake(slot).held = True

    @property
    def job(self) -> Job:
        return self.core.catalog.job(self.name)

    def begin(self, rank: int, attempt: int) -> Client:
        client = Client(self.core)
        client.owner = self.core.run(
            self.core.engine.begin(self.name, rank, self.size, attempt, client.notify)
        )
        return client

    @staticmethod
    def owner(client: Client) -> Owner:
        assert client.owner is not None
        return client.owner

    def call(self, work: Callable[[], Any]) -> Any:
        """Call a function of the core on its loop."""

        async def run() -> Any:
            return work()

        return self.core.loop.run_until_complete(run())

    def grant(self, rank: int, step: int) -> Segment:
        """Let a rank acquire a slot and fill it."""
        slot = self.core.run(
            self.core.engine.acquire(self.owner(self.clients[rank]), step, None, 0.0)
        )
        assert isinstance(slot, Segment), slot
        slot.write(SlotState.FILLING, step)
        return slot

    def write_seal(self, slot: Segment, step: int) -> None:
        """Seal a slot, and do not report it."""
        slot.write(SlotState.SEALED, step)

    def seal(self, rank: int, step: int) -> asyncio.Task[Any]:
        """Let a rank acquire, fill and seal a slot and report it; the read of the seal
        is under way.
        """
        slot = self.grant(rank, step)
        slot.write(SlotState.SEALED, step)
        owner = self.owner(self.clients[rank])
        task = self.core.spawn(self.core.engine.seal(owner, slot.name, owner.attempt, step))
        self.core.tick(2)
        return task

    def lose(self, rank: int) -> Owner:
        """Lose the connection and the locks of a rank."""
        owner = self.owner(self.clients[rank])
        self.job.ranks.disconnect(owner)
        for slot in self.core.segments.of(*owner.identity):
            slot.held = False
        return owner
