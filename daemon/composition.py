"""Builds the components of a daemon, in the order in which they need each other, and
recovers the root before anyone may use them.

`opened` is the only place that puts the components together. `App` adds the socket and its
clients; a deletion without a daemon adds nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckptd.daemon import recovery, tasks
from ckptd.daemon.chunks.pipeline import Pipeline
from ckptd.daemon.chunks.seal_check import SealCheck, read_sealed
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.config import Config
from ckptd.daemon.engine.engine import PLAN_GRACE_SECONDS, Engine
from ckptd.daemon.engine.orphans import Orphans
from ckptd.daemon.engine.peer_copies import PeerCopies
from ckptd.daemon.engine.readers import Readers
from ckptd.daemon.engine.recoveries import Recoveries
from ckptd.daemon.engine.seal_intake import SealIntake
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.snapshot import SlotContents
from ckptd.daemon.journal.journal import Journal
from ckptd.daemon.journal.place import journal_directory
from ckptd.daemon.memory import moved_root
from ckptd.daemon.memory.admission import Admission
from ckptd.daemon.memory.foreign_memory import ForeignMemoryKeeper
from ckptd.daemon.memory.slots import Slots
from ckptd.daemon.root.claims import Attempts, Claims
from ckptd.daemon.root.served_root import ServedRoot
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.runs.heartbeats import Heartbeats
from ckptd.daemon.runs.run_guard import RunGuard
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.saving.saver import Saver
from ckptd.daemon.stage.root import StageRoot, check_apart, check_is_no_stage
from ckptd.daemon.stage.uploader import Uploader
from ckptd.shared.errors import StorageError, storage_errors
from ckptd.shared.formats.segment import RootMark, SegmentHeader
from ckptd.shared.location import Location
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.storage.locate import check_new_root, open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import FileSystem
from ckptd.shared.system.root_lock import write_hint

log = logging.getLogger("ckptd.daemon")


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of one daemon.

    `engine` decides about ranks and seals, `steps` carries decisions out, `saver` writes
    checkpoints, `orphans` looks after dead trainers, `recoveries` counts what agents
    report, and `readers` lends snapshots. `identity` is the identity of the root.
    `served` checks that the root is still there, and `foreign` keeps the memory of other
    roots apart. `events` reports what the daemon has done. `repository` is the root, or
    the stage if there is one.
    With a stage, `uploader` uploads to the root, and the second of `pipelines` writes to
    the root.
    """

    config: Config
    events: Events
    repository: Repository
    identity: str
    served: ServedRoot
    foreign: ForeignMemoryKeeper
    calls: StorageCalls
    pipelines: list[Pipeline]
    slots: Slots
    catalog: Catalog
    journal: Journal
    claims: Claims
    engine: Engine
    steps: Steps
    saver: Saver
    orphans: Orphans
    heartbeats: Heartbeats
    recoveries: Recoveries
    readers: Readers
    lock: Descriptor
    behind: StageRoot | None = None
    uploader: Uploader | None = None

    async def tell_socket(self, socket: Path) -> None:
        """Write into the lock of the root, and into that of the stage, where this daemon
        listens.

        A disk that is full, or does not answer, keeps the daemon from nothing: it is then
        found only at the usual sockets.
        """
        behind = None if self.behind is None else self.behind.lock
        for lock in filter(None, (self.lock, behind)):
            try:
                await self.calls.run(partial(write_hint, lock.fileno(), socket))
            except (OSError, StorageError) as error:
                log.warning("the lock of %s does not name the socket: %s", self.config.root, error)


log = logging.getLogger("ckptd")


@asynccontextmanager
async def opened(
    config: Config,
    fs: FileSystem,
    *,
    failed: Callable[[BaseException], None],
    locked: Callable[[], None] = lambda: None,
    lost: Callable[[], None] = lambda: None,
) -> AsyncIterator[Components]:
    """Lock the root, build the parts, and recover; yield the parts; release everything
    at the end.

    `failed` is called with the error of a background task or of the journal, after
    which the daemon must end. `locked` is called once the root is locked and the
    journal is replayed, before anything is recovered. `lost` is called if another root
    is found at the place of the root. Raises Busy if another daemon has the root,
    StorageError, InvalidConfig, NewerFormat.
    """
    with ExitStack() as held:
        for place in (config.root, config.stage):
            if place is not None and (inside := check_new_root(place)):
                log.warning("%s", inside)
        root = open_root(config.root, fs)
        repository = root if config.stage is None else open_root(config.stage, fs)
        lock = repository.storage.serve(machine.host())
        held.callback(lock.close)
        calls = root_calls = StorageCalls(config.storage_timeout)
        held.callback(calls.close)
        if config.stage is not None:
            root_calls = StorageCalls(config.storage_timeout)
            held.callback(root_calls.close)
        behind = _root_behind(config, root, repository, root_calls)
        if behind is not None:
            held.callback(behind.close)
        failpoint("start.locked")
        pipeline = Pipeline(
            config.threads, config.memory_budget, config.chunk_size, config.worker_cpus
        )
        held.callback(pipeline.close)
        pipelines = [pipeline]
        journal_thread = ThreadPoolExecutor(1, thread_name_prefix="ckptd-journal")
        held.callback(journal_thread.shutdown, wait=False)
        overflow = (
            machine.state_directory(config.state_dir, config.root) / "segments"
            if config.overflow
            else None
        )
        slots = Slots(
            fs, config.shm_dir, machine.segment_directory(config.root), config.shm_quota, overflow
        )
        held.callback(slots.close)
        with ExitStack() as journals:

            def open_journal(
                place: Location, of: Repository, identity: str | None = None
            ) -> Journal:
                directory = journals.enter_context(
                    journal_directory(fs, config.state_dir, place, of, identity)
                )
                return Journal.open(
                    fs, directory, journal_thread, strict=config.strict_journal, on_broken=failed
                )

            journal = open_journal(config.stage or config.root, repository)
            of_root = (
                open_journal(config.root, root, behind.identity) if behind is not None else None
            )
            tasks.on_failure(failed)
            locked()
            identity = await calls.run(repository.identity) if behind is None else behind.identity
            slots.mark = RootMark(identity, str(config.root))
            events, counters = Events(), Counter[str]()
            served = ServedRoot(root, root_calls, slots.mark, lost, staged=behind is not None)
            front = final = Destination(
                config, repository, journal, Catalog(), calls, pipeline, counters, events,
                served if behind is None else None,
            )  # fmt: skip
            if of_root is not None:
                pipelines.append(
                    Pipeline(
                        config.threads, config.memory_budget, config.chunk_size, config.worker_cpus
                    )
                )
                held.callback(pipelines[-1].close)
                final = Destination(
                    config, root, of_root, Catalog(), root_calls, pipelines[-1], counters, events,
                    served,
                )  # fmt: skip
                with storage_errors(f"begin a new journal file in {of_root.place}"):
                    of_root.start()
            parts = _composed(
                config, identity, slots, pipelines, front, final, served, behind, events, lock
            )
            gather = partial(
                moved_root.gather, slots, config.root, overflow and overflow.parent.parent
            )
            await recovery.recover(
                parts.saver, parts.claims, slots, parts.orphans, parts.foreign, gather
            )
            if parts.uploader is not None:
                # Raise the newest attempt of each job to that of its checkpoints on the
                # stage. An attempt may then begin in memory while the root does not
                # answer, and recover from the stage.
                for job in parts.catalog.jobs.values():
                    staged = max((one.attempt for one in job.checkpoints.values()), default=0)
                    if staged > job.attempt:
                        job.attempt, job.world_size = staged, 0
                parts.uploader.start()
            parts.heartbeats.resume(parts.catalog.jobs.values())
            try:
                yield parts
            finally:
                await parts.heartbeats.close()
                if parts.uploader is not None and of_root is not None:
                    await parts.uploader.close()
                    await of_root.close()
                await journal.close()


def _composed(
    config: Config,
    identity: str,
    slots: Slots,
    pipelines: list[Pipeline],
    front: Destination,
    root: Destination,
    served: ServedRoot,
    behind: StageRoot | None,
    events: Events,
    lock: Descriptor,
) -> Components:
    """Return the parts of a daemon that saves to `front`, and to `root` if `front` is a
    stage. `behind` is then the root behind the stage.
    """
    catalog, journal, pipeline = front.catalog, front.journal, front.pipeline
    stage = None if behind is None else front.repository
    claims = Claims(Attempts(root.repository, root.calls, stage), events)
    saver = Saver(config, slots, front, root, claims, events)
    uploader = None
    if behind is not None:
        uploader = Uploader(behind, saver, events)
        root.ready = uploader.reach
        front.evict = uploader.make_room
    steps = Steps(catalog, slots, saver, config.rank_timeout)
    seal_check = SealCheck()

    async def read(fd: int, header: SegmentHeader) -> tuple[SealedSlot, SlotContents]:
        return await pipeline.run(partial(read_sealed, fd, header))

    seals = SealIntake(
        catalog,
        steps,
        journal,
        read,
        compare=lambda contents, size: pipeline.run(partial(seal_check.compare, contents, size)),
    )
    copies = PeerCopies(catalog, slots, steps, pipeline.run, read)
    orphans = Orphans(catalog, slots, steps, seals, copies, saver, events, config.memory_ttl)
    take_over = partial(recovery.take_over, claims, catalog, orphans)
    foreign = ForeignMemoryKeeper(
        slots, str(config.root), config.foreign_memory, take_over, catalog.newest_known
    )
    beats = HeartbeatStore(root.repository.storage)
    heartbeats = Heartbeats(beats, claims.is_claimed)
    engine = Engine(
        catalog,
        slots,
        journal,
        claims,
        Admission(slots, config.chunk_size, pipeline.run),
        steps,
        seals,
        copies,
        saver,
        RunGuard(beats, root.calls, heartbeats),
        served,
        foreign,
        config.stall_budget + PLAN_GRACE_SECONDS,
    )
    subscribe(events, steps, engine, orphans, uploader)
    return Components(
        config, events, front.repository, identity, served, foreign, front.calls, pipelines, slots,
        catalog, journal, claims, engine, steps, saver, orphans, heartbeats, Recoveries(),
        Readers(catalog, slots, saver), lock, behind, uploader,
    )  # fmt: skip


def subscribe(
    events: Events, steps: Steps, engine: Engine, orphans: Orphans, uploader: Uploader | None
) -> None:
    """Name the parts that act on each event, in their order."""
    events.on_saved = [steps.tell, orphans.retry_later]
    events.on_settled = [steps.release_replaced, engine.copies.settle, orphans.ensure_timer]
    if uploader is not None:
        events.on_settled.append(lambda job: uploader.wake())
    events.on_remark = [steps.remark]
    events.on_claim_lost = [
        engine.lose_claim,
        lambda job, attempt: orphans.ensure_timer(job),
    ]


def _root_behind(
    config: Config, root: Repository, repository: Repository, calls: StorageCalls
) -> StageRoot | None:
    """Return the root behind the stage, or None if there is no stage: then `repository`
    is the root. The stage must be locked.
    """
    if config.stage is None:
        if isinstance(config.root, Path):
            check_is_no_stage(repository)
        return None
    check_apart(config.stage, config.root)
    return StageRoot(root, config.root, repository, calls)
