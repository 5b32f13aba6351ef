"""Builds the parts of a daemon, in the order in which they need each other, and
recovers the root before anyone may use them.

`opened` is the only place that puts the parts together. `App` adds the socket and its
clients; a deletion without a daemon adds nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptd.daemon import recovery, tasks
from ckptd.daemon.chunks.pipeline import Pipeline, SealedSlot
from ckptd.daemon.chunks.seal_check import SealCheck, read_sealed
from ckptd.daemon.config import Config
from ckptd.daemon.engine.custody import Custody
from ckptd.daemon.engine.engine import PLAN_GRACE_SECONDS, Engine
from ckptd.daemon.engine.orphans import Orphans
from ckptd.daemon.engine.seal_intake import SealIntake
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.snapshot import SlotContents, Snapshot
from ckptd.daemon.journal.journal import Journal
from ckptd.daemon.journal.place import journal_directory
from ckptd.daemon.memory import moved_root
from ckptd.daemon.memory.admission import Admission
from ckptd.daemon.memory.foreign_memory import ForeignMemoryKeeper
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.daemon.root.attempts import Attempts
from ckptd.daemon.root.claims import Claims
from ckptd.daemon.root.served_root import ServedRoot
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.runs.heartbeats import Heartbeats
from ckptd.daemon.runs.run_guard import RunGuard
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.saving.saver import Saver
from ckptd.daemon.stage.root import StageRoot, check_apart, check_is_no_stage
from ckptd.daemon.stage.uploader import Uploader
from ckptd.shared.formats.segment import RootMark, SegmentHeader
from ckptd.shared.location import Location
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import FileSystem


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one daemon.

    `engine` decides about ranks and seals, `saver` writes checkpoints, and `orphans`
    looks after dead trainers. `identity` is the identity of the root. `served` checks
    that the root is still there, and `foreign` keeps the memory of other roots apart.
    `repository` is the root, or the stage if there is one. With a stage, `uploader`
    uploads to the root, and the second of `pipelines` writes to the root.
    """

    config: Config
    repository: Repository
    identity: str
    served: ServedRoot
    foreign: ForeignMemoryKeeper
    calls: StorageCalls
    pipelines: list[Pipeline]
    slots: Slots
    catalog: Catalog
    journal: Journal
    engine: Engine
    saver: Saver
    orphans: Orphans
    uploader: Uploader | None = None


@asynccontextmanager
async def opened(
    config: Config,
    fs: FileSystem,
    *,
    failed: Callable[[BaseException], None],
    changed: Callable[[], None],
    locked: Callable[[], None] = lambda: None,
    lost: Callable[[], None] = lambda: None,
) -> AsyncIterator[Parts]:
    """Lock the root, build the parts, and recover; yield the parts; release everything
    at the end.

    `failed` is called with the error of a background task or of the journal, after
    which the daemon must end. `changed` is called when a save or the work for a dead
    trainer has ended. `locked` is called once the root is locked and the journal is
    replayed, before anything is recovered. `lost` is called if another root is found at
    the place of the root. Raises Busy if another daemon has the root, StorageError,
    InvalidConfig, NewerFormat.
    """
    with ExitStack() as held:
        root = open_root(config.root, fs)
        repository = root if config.stage is None else open_root(config.stage, fs)
        held.callback(repository.storage.serve(machine.host()).close)
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
            catalog, seal_check = Catalog(), SealCheck()

            def lose_claim(job: Job, attempt: int) -> None:
                engine.lose_claim(job, attempt)
                orphans.ensure_timer(job)

            def save(snapshot: Snapshot) -> None:
                saver.start(snapshot)

            def read_seal(
                fd: int, header: SegmentHeader
            ) -> Awaitable[tuple[SealedSlot, SlotContents]]:
                return pipeline.run(lambda: read_sealed(fd, header))

            def compare_seals(
                contents: Mapping[int, SlotContents], world_size: int
            ) -> Awaitable[None]:
                return pipeline.run(lambda: seal_check.compare(contents, world_size))

            async def reach_root(job: Job) -> None:
                assert uploader is not None
                await uploader.reach(job)

            async def finish_save(place: str) -> None:
                await recovery.finish_save(final, saver, catalog, root_calls, place)

            def settled(job: Job) -> None:
                steps.release_replaced(job)
                orphans.ensure_timer(job)
                if uploader is not None:
                    uploader.wake()
                changed()

            async def take_over(foreign: list[Slot]) -> None:
                await recovery.take_over(foreign, claims, catalog, orphans)

            async def may_save(job: Job, attempt: int) -> None:
                if behind is None or job.node is not None:
                    await served.check_before_save()
                await claims.claimed(job, attempt)

            def gather() -> None:
                moved_root.gather(
                    slots, config.root, None if overflow is None else overflow.parent.parent
                )

            served = ServedRoot(root, root_calls, slots.mark, lost, staged=behind is not None)
            foreign = ForeignMemoryKeeper(slots, str(config.root), config.foreign_memory, take_over)
            claims = Claims(
                Attempts(root, root_calls, None if behind is None else repository),
                on_loss=lose_claim,
            )
            steps = Steps(catalog, slots, save, config.rank_timeout)
            front = final = Destination(
                config, repository, journal, catalog, calls, pipeline, steps.counters, steps.tell
            )
            if of_root is not None:
                pipelines.append(
                    Pipeline(
                        config.threads, config.memory_budget, config.chunk_size, config.worker_cpus
                    )
                )
                held.callback(pipelines[-1].close)
                final = Destination(
                    config,
                    root,
                    of_root,
                    Catalog(),
                    root_calls,
                    pipelines[-1],
                    steps.counters,
                    steps.tell,
                    reach_root,
                )
            saver = Saver(
                config, catalog, slots, front, final,
                counters=steps.counters, claimed=may_save, tell=steps.tell, settled=settled,
            )  # fmt: skip
            uploader = None
            if behind is not None:
                uploader = Uploader(behind, front, final, finish_save=finish_save, changed=changed)
                saver.front_parts.evict = uploader.make_room
            seals = SealIntake(catalog, steps, journal, read_seal, compare_seals)
            admission = Admission(slots, config.chunk_size, pipeline.run)
            plan_timeout = config.stall_budget + PLAN_GRACE_SECONDS
            beats = HeartbeatStore(root.storage)
            heartbeats = Heartbeats(beats, claims.is_claimed)
            guard = RunGuard(beats, root_calls, heartbeats)
            engine = Engine(
                catalog,
                slots,
                journal,
                claims,
                admission,
                steps,
                seals,
                saver,
                guard,
                served,
                foreign,
                plan_timeout,
            )
            orphans = Orphans(
                Custody(catalog, slots, steps, seals, saver), config.memory_ttl, changed
            )
            if of_root is not None:
                of_root.start()
            await recovery.recover(
                repository, calls, claims, journal, catalog, slots, saver, orphans, foreign, gather
            )
            if uploader is not None:
                _know_attempts(catalog)
                uploader.start()
            heartbeats.resume(catalog.jobs.values())
            try:
                yield Parts(
                    config, repository, identity, served, foreign, calls, pipelines, slots, catalog,
                    journal, engine, saver, orphans, uploader,
                )  # fmt: skip
            finally:
                await heartbeats.close()
                if uploader is not None and of_root is not None:
                    await uploader.close()
                    await of_root.close()
                await journal.close()


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


def _know_attempts(catalog: Catalog) -> None:
    """Raise the newest attempt of each job to that of its checkpoints on the stage.

    An attempt may then begin in memory while the root does not answer, and recover from
    the stage.
    """
    for job in catalog.jobs.values():
        job.attempt = max(
            [job.attempt, *(checkpoint.attempt for checkpoint in job.checkpoints.values())]
        )
