"""Builds the parts of a daemon, in the order in which they need each other, and recovers the root before anyone may use them.

`opened` is the only place that puts the parts together. `App` adds the socket and its clients; a deletion without a daemon adds nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from ckptd.daemon import recovery, tasks
from ckptd.daemon.admission import Admission
from ckptd.daemon.attempts import Attempts
from ckptd.daemon.catalog import Catalog, Job
from ckptd.daemon.claims import Claims
from ckptd.daemon.committer import Committer
from ckptd.daemon.config import Config
from ckptd.daemon.custody import Custody
from ckptd.daemon.engine import PLAN_GRACE_SECONDS, Engine
from ckptd.daemon.heartbeats import Heartbeats
from ckptd.daemon.journal import Journal
from ckptd.daemon.journal_place import journal_directory
from ckptd.daemon.orphans import Orphans
from ckptd.daemon.pipeline import Pipeline, SealedSlot
from ckptd.daemon.run_guard import RunGuard
from ckptd.daemon.saver import Saver
from ckptd.daemon.seal_intake import SealIntake
from ckptd.daemon.slots import Slots
from ckptd.daemon.snapshot import Snapshot
from ckptd.daemon.steps import Steps
from ckptd.daemon.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import FileSystem
from ckptd.shared.segment import SegmentHeader
from ckptd.shared.state_directory import state_directory
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one daemon. `engine` decides about ranks and seals, `saver` writes checkpoints, `orphans` looks after dead trainers.

    `identity` is that of the root.
    """

    config: Config
    repository: Repository
    identity: str
    calls: StorageCalls
    pipeline: Pipeline
    slots: Slots
    catalog: Catalog
    journal: Journal
    engine: Engine
    saver: Saver
    orphans: Orphans


@asynccontextmanager
async def opened(
    config: Config,
    fs: FileSystem,
    *,
    failed: Callable[[BaseException], None],
    changed: Callable[[], None],
    locked: Callable[[], None] = lambda: None,
) -> AsyncIterator[Parts]:
    """Lock the root, build the parts, and recover; yield the parts; release everything at the end.

    `failed` is called with the error of a background task or of the journal, after which the daemon must end. `changed` is called when a
    save or the work for a dead trainer has ended. `locked` is called once the root is locked and the journal is replayed, before anything
    is recovered. Raises Busy if another daemon has the root, StorageError, InvalidConfig, NewerFormat.
    """
    with ExitStack() as held:
        repository = open_root(config.root, fs)
        held.callback(repository.storage.serve(names.host()).close)
        failpoint("start.locked")
        pipeline = Pipeline(config.threads, config.memory_budget, config.chunk_size, config.worker_cpus)
        held.callback(pipeline.close)
        calls = StorageCalls(config.storage_timeout)
        held.callback(calls.close)
        journal_thread = ThreadPoolExecutor(1, thread_name_prefix="ckptd-journal")
        held.callback(journal_thread.shutdown, wait=False)
        overflow = state_directory(config.state_dir, config.root) / "segments" if config.overflow else None
        slots = Slots(fs, config.shm_dir, names.segment_directory(config.root), config.shm_quota, overflow)
        held.callback(slots.close)
        with journal_directory(fs, config.state_dir, config.root, repository) as directory:
            journal = Journal.open(fs, directory, journal_thread, strict=config.strict_journal, on_broken=failed)
            tasks.on_failure(failed)
            locked()
            identity = repository.identity()
            catalog = Catalog()

            def lose_claim(job: Job, attempt: int) -> None:
                engine.lose_claim(job, attempt)
                orphans.ensure_timer(job)

            def save(snapshot: Snapshot) -> None:
                saver.start(snapshot)

            def read_seal(fd: int, header: SegmentHeader) -> Awaitable[SealedSlot]:
                return pipeline.run(lambda: SealedSlot.read(fd, header))

            def settled(job: Job) -> None:
                steps.release_replaced(job)
                orphans.ensure_timer(job)
                changed()

            claims = Claims(Attempts(repository, calls), on_loss=lose_claim)
            steps = Steps(catalog, slots, save, config.rank_timeout)
            committer = Committer(config.codec, journal, repository, calls, steps.tell)
            saver = Saver(
                config, catalog, slots, journal, repository, pipeline, calls,
                counters=steps.counters, committer=committer, claimed=claims.claimed, tell=steps.tell, settled=settled,
            )  # fmt: skip
            seals = SealIntake(catalog, steps, journal, read_seal)
            admission = Admission(slots, config.chunk_size, pipeline.run)
            plan_timeout = config.stall_budget + PLAN_GRACE_SECONDS
            beats = HeartbeatStore(repository.storage)
            heartbeats = Heartbeats(beats, claims.is_claimed)
            guard = RunGuard(beats, calls, heartbeats)
            engine = Engine(catalog, slots, journal, claims, admission, steps, seals, saver, guard, plan_timeout)
            orphans = Orphans(Custody(catalog, slots, steps, seals, saver), config.memory_ttl, changed)
            await recovery.recover(repository, calls, claims, journal, catalog, slots, saver, orphans)
            heartbeats.resume(catalog.jobs.values())
            try:
                yield Parts(config, repository, identity, calls, pipeline, slots, catalog, journal, engine, saver, orphans)
            finally:
                await heartbeats.close()
                await journal.close()
