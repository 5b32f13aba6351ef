"""Saves sealed snapshots as committed checkpoints, and owns the order of operations on storage.

The order of a save must not change: journal the intent, write the parts, compare them with the checksums of the slots, make the parts
durable, journal them, publish the manifest, journal the commit, tell the ranks, update `newest`, apply retention. The checksums of slots
that were sealed without them are computed at once, while the parts are being written. A job has one save at a time, and saves wait for
their turn in the order of the seals. On several nodes, a save begins once all nodes hold the step, and `joint.py` commits it. Each failure
is recorded in `Snapshot.reason`, sent to the ranks as a Progress message, and counted. The copy in memory stays.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ckptd.daemon import records as r
from ckptd.daemon.attempts import no_stage
from ckptd.daemon.catalog import Catalog, Job
from ckptd.daemon.committer import Committer, Document
from ckptd.daemon.config import Config
from ckptd.daemon.deleter import Deleter
from ckptd.daemon.governor import Governor
from ckptd.daemon.joint import Abandoned, Joint, Undecided
from ckptd.daemon.journal import Journal, JournalBroken
from ckptd.daemon.pipeline import Pipeline, SealedSlot
from ckptd.daemon.room import Room
from ckptd.daemon.save_progress import SaveProgress
from ckptd.daemon.slot_check import SlotCheck
from ckptd.daemon.slots import Slots
from ckptd.daemon.snapshot import RankSeal, Snapshot
from ckptd.daemon.storage_calls import StorageCalls
from ckptd.daemon.tasks import all_of, watched
from ckptd.shared import codec, names
from ckptd.shared.errors import CkptdError, IntegrityError, InternalError, InvalidRequest, StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import NO_ROOM
from ckptd.shared.lifecycle import Event, SnapshotState
from ckptd.shared.location import Url
from ckptd.shared.manifest import Manifest, PartEntry
from ckptd.shared.part_writer import PartWriter
from ckptd.shared.reuse import ChunkCheck, StoredPart
from ckptd.shared.storage.repository import Repository
from ckptd.shared.units import size_text

log = logging.getLogger("ckptd.saver")

Saved = tuple[Document, StoredPart]
"""A durable part, and what the next save needs to link its files."""


async def _nothing_to_evict(job: Job) -> bool:
    return False


class Saver:
    """The saver of one daemon. `start` begins a save. A save that fails does not raise: it is reported through `tell`.

    A JournalBroken is not reported, because the journal itself ends the daemon. `persist_seconds`: seconds that successful saves have
    taken. `deleter`: the deleter that shares the saver's locks.
    """

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        slots: Slots,
        journal: Journal,
        repository: Repository,
        pipeline: Pipeline,
        calls: StorageCalls,
        *,
        counters: Counter[str],
        committer: Committer,
        claimed: Callable[[Job, int], Awaitable[None]],
        tell: Callable[[Snapshot], None],
        settled: Callable[[Job], None],
    ) -> None:
        """claimed: waits until an attempt of a job is durably claimed. tell: sends the ranks the outcome of a save.

        settled: called when slots of a job may have become free, which is after a commit and at the end of each save.
        """
        self._config, self._catalog, self._slots = config, catalog, slots
        self._journal, self._repository, self._pipeline, self._calls = journal, repository, pipeline, calls
        self._claimed, self._tell, self._settled = claimed, tell, settled
        self._encoder = codec.encoder(config.codec)
        self.committer = committer
        self.joint = Joint(
            committer, repository, calls, config.node_timeout, remote=isinstance(config.root, Url), stopping=lambda: self.stopping
        )
        self.check = SlotCheck(catalog, slots, pipeline, link_unchanged=config.link_unchanged).check
        self.evict = _nothing_to_evict  # deletes a local copy on a full stage
        self.stopping = False  # once this is True, saves no longer wait for other nodes to seal a step
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: dict[Snapshot, asyncio.Task[None]] = {}
        self._refusals: dict[Snapshot, asyncio.Task[None]] = {}
        self.counters = counters
        self.deleter = Deleter(config.retention, journal, repository, calls, self._locks, counters)
        self.persist_seconds = 0.0
        self._governors: dict[str, Governor] = {}
        self.room = Room(config, repository, calls)

    def governor(self, job: str) -> Governor:
        """Return the governor of the saves of a job."""
        return self._governors.setdefault(job, Governor(self._pipeline.writers))

    @property
    def busy(self) -> bool:
        return bool(self._tasks or self._refusals)

    def start(self, snapshot: Snapshot) -> asyncio.Task[None]:
        """Return the task that checks a sealed snapshot and, if it is to persist, saves it. Start the task unless it is running."""
        task = self._tasks.get(snapshot)
        if task is None or task.done():
            if (refusal := self._refusals.pop(snapshot, None)) is not None:
                refusal.cancel()
            hold = ExitStack()
            hold.enter_context(snapshot.held())  # now, and not when the task first runs: a newer seal could release the slots in between
            task = self._tasks[snapshot] = watched(self._run(snapshot, hold, time.monotonic()), f"saving {snapshot.job}/{snapshot.tag}")
            task.add_done_callback(lambda done: self._done(snapshot, hold, done))
        return task

    def _done(self, snapshot: Snapshot, hold: ExitStack, task: asyncio.Task[None]) -> None:
        hold.close()
        if self._tasks.get(snapshot) is task:
            del self._tasks[snapshot]
        self._settled(self._catalog.job(snapshot.job))

    async def settle(self, snapshot: Snapshot) -> None:
        """Wait until no save of this snapshot is running."""
        while snapshot in self._tasks:
            await asyncio.wait([self._tasks[snapshot]])

    def stop_waiting(self) -> None:
        """Save the steps of several nodes that wait for other nodes at once, because the daemon ends."""
        self.stopping = True
        for job in self._catalog.jobs.values():
            job.moved.set()

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _run(self, snapshot: Snapshot, hold: ExitStack, sealed: float) -> None:
        """Check and save a snapshot whose last rank sealed it at the time `sealed` of the monotonic clock."""
        job = self._catalog.job(snapshot.job)
        try:
            with hold:
                checking = asyncio.ensure_future(self.check(snapshot))
                try:
                    if not snapshot.persist:
                        await asyncio.shield(checking)  # meanwhile the trainer may die, and then the snapshot is to be saved after all
                    if snapshot.persist and not job.is_durable(*snapshot.key):
                        if snapshot.node is not None:
                            if self._config.stage is not None:
                                raise InvalidRequest(no_stage(snapshot.job))
                            await asyncio.shield(checking)
                            await self._until_all_hold(job, snapshot)
                        async with self._locks[snapshot.job]:
                            await self._save(job, snapshot, sealed, checking)
                        if snapshot.node is not None and snapshot.state is SnapshotState.WRITTEN:
                            await self.joint.settle(job, snapshot)
                finally:
                    await asyncio.gather(checking, return_exceptions=True)  # it reads the slots; its error is raised below, if not above
                checking.result()
            if snapshot.state is SnapshotState.DURABLE:
                self._settled(job)
            if snapshot.state is SnapshotState.DURABLE and (snapshot.node is None or snapshot.node.leads):
                async with self._locks[snapshot.job]:
                    await self.deleter.retain(job)
                await self.room.warn(job)
        except JournalBroken:
            pass
        except Exception as error:
            await self._fail(job, snapshot, error)

    async def _until_all_hold(self, job: Job, snapshot: Snapshot) -> None:
        """Wait until all nodes hold a step, or until that can no longer be learned: then the save itself finds out, on storage.

        Raises the reason if another node will never seal the step.
        """
        self._settled(job)  # the checksums are known now, so the step may go on the board
        try:
            async with asyncio.timeout(self._config.rank_timeout):
                while not self.stopping and not job.may_save(snapshot):
                    job.moved.clear()
                    await job.moved.wait()
        except TimeoutError:
            log.warning(
                "%s/%s: not all nodes are known to hold it after %g s: it is saved nevertheless",
                snapshot.job, snapshot.tag, self._config.rank_timeout,
            )  # fmt: skip

    async def _save(self, job: Job, snapshot: Snapshot, sealed_at: float, checking: asyncio.Future[None]) -> None:
        """Save a snapshot whose slots `checking` checks meanwhile. Raises what `checking` raises, and the errors of its parts."""
        begun = time.monotonic()
        if checking.done():
            checking.result()
        await self._claimed(job, snapshot.attempt)
        if snapshot.node is not None and not await self._needs_parts(job, snapshot):
            return
        snapshot.move(Event.WRITE)
        used = [self._slots.get(seal.segment).header.values for seal in snapshot.seals.values()]  # the last document of each slot
        snapshot.progress = SaveProgress(sum(values.offset + values.length for values in used), begun)
        governor = self.governor(job.name)
        governor.hear([seal.cost for seal in snapshot.seals.values() if seal.cost is not None])
        saved = await self._save_parts(snapshot, checking)
        documents = [document for document, _ in saved]
        snapshot.move(Event.WROTE)
        if snapshot.node is None:
            await self.committer.commit(job, snapshot, documents)
        else:
            await self.joint.deliver(job, snapshot, documents)
        job.stored = {entry.rank: stored for (entry, _, _), stored in saved}
        seconds = time.monotonic() - begun
        self.persist_seconds += seconds
        self.counters["persisted"] += 1
        entries = [entry for entry, _, _ in documents]
        raw, written, linked = (sum(sizes) for sizes in zip(*((e.raw_bytes, e.new_bytes, e.linked_bytes) for e in entries), strict=True))
        held = max(seal.training_held for seal in snapshot.seals.values())
        governor.saved(snapshot.step, sealed_at, seconds, held)
        log.info(
            "saved %s/%s: %s as %s (%.0f %%)%s%s, %s after %.2f s, %s/s",
            snapshot.job, snapshot.directory, size_text(raw), size_text(written), 100 * written / max(raw, 1),
            f" and {size_text(linked)} in files that have not changed" if linked else "",
            f", training held {held:.3f} s" if held else "", "durable" if snapshot.node is None else "delivered",
            time.monotonic() - sealed_at, size_text(raw / max(seconds, 1e-6)),
        )  # fmt: skip

    async def _needs_parts(self, job: Job, snapshot: Snapshot) -> bool:
        """Open the next try of a step of several nodes. Return False if this node has delivered its parts, or the step is committed."""
        found = await self.joint.open_try(job, snapshot)
        if found is None:
            return True
        snapshot.move(Event.WRITE)
        snapshot.move(Event.WROTE)
        if isinstance(found, Manifest):
            await self.committer.record(job, snapshot, found)
        return False

    async def _save_parts(self, snapshot: Snapshot, checking: asyncio.Future[None]) -> list[Saved]:
        """Write the parts of all ranks at the same time.

        Each part reserves the room that it would take raw. A part that finds no room is written again once the others have ended, which
        then take no more room than they need. Only then are older checkpoints deleted for it.
        """
        seals = [seal for _, seal in sorted(snapshot.seals.items())]
        alone = len(seals) == 1

        async def saved(seal: RankSeal) -> Saved | None:
            try:
                return await self._save_part(snapshot, seal, checking, alone=alone)
            except OSError as error:
                if alone or error.errno not in NO_ROOM:
                    raise
                return None

        parts = await all_of(map(saved, seals))
        return [part or await self._save_part(snapshot, seal, checking, alone=True) for seal, part in zip(seals, parts, strict=True)]

    async def _save_part(self, snapshot: Snapshot, seal: RankSeal, checking: asyncio.Future[None], *, alone: bool) -> Saved:
        """Write the part of one rank. `alone`: True if no other part is being written, so that a full disk is really full."""
        slot = self._slots.get(seal.segment)
        header = slot.header
        with slot.pinned() as fd:
            sealed = await self._pipeline.run(lambda: SealedSlot.read(fd, header))
            if header.generation != seal.generation:
                raise IntegrityError(f"{snapshot.job} step {snapshot.step}: the slot was filled again while it was being saved")
            entry, stored = await self._write_part(snapshot, seal, sealed, checking, alone=alone)
        return (entry, sealed.plan, sealed.request), stored

    async def _write_part(
        self, snapshot: Snapshot, seal: RankSeal, sealed: SealedSlot, checking: asyncio.Future[None], *, alone: bool
    ) -> tuple[PartEntry, StoredPart]:
        """Write the part of one rank to a file with a fresh name. Return its entry in the manifest, and what the next save needs to know.

        After an I/O error (EIO) try once more with another file: a file whose sync has failed is never trusted again. With the setting
        `make_room`, a full disk is tried again after each older checkpoint that could be deleted. Raises IntegrityError if the slot or its
        checksums are damaged, OSError, StorageError.
        """

        async def wait_for_checks() -> list[ChunkCheck]:
            await asyncio.shield(checking)
            assert seal.checks is not None
            return seal.checks

        rewritten, progress = False, snapshot.progress
        assert progress is not None
        before = self._catalog.job(snapshot.job).stored.get(seal.rank) if self._config.link_unchanged else None
        if before is not None and (before.attempt, before.world_size) != (snapshot.attempt, snapshot.world_size):
            before = None
        place = snapshot.job, snapshot.directory
        linker = self._repository.linker(*place) if self._config.link_unchanged else None
        while True:
            progress.begin_part(seal.rank)
            nonce = names.new_nonce()
            file = names.part_file(seal.rank, nonce)
            common = {"job": snapshot.job, "attempt": snapshot.attempt, "step": snapshot.step, "rank": seal.rank, "tag": snapshot.directory}
            await self._journal.append(r.Staging(**common, file=file))  # type: ignore[arg-type]
            failpoint("persist.intended")
            try:
                writer = PartWriter(self._repository.part_files(*place), nonce, self._encoder, self._config.spread, linker)
                written = partial(progress.add, seal.rank)
                governor = self.governor(snapshot.job)
                at_once = governor.threads if governor.threads == governor.most else -(-governor.threads // len(snapshot.seals))
                digests = self._config.link_unchanged and (before is None or before.steady)
                entry, stored = await self._pipeline.write_part(
                    sealed, writer, snapshot.directory, wait_for_checks, written, before, at_once, with_digests=digests
                )
            except OSError as error:
                full = alone and error.errno in NO_ROOM
                if full and await self.evict(self._catalog.job(snapshot.job)):
                    continue
                may_delete = self._config.make_room and self._config.stage is None and (snapshot.node is None or snapshot.node.leads)
                make_room = full and may_delete
                if make_room and await self.deleter.make_room(self._catalog.job(snapshot.job), writer.needed):
                    continue
                if rewritten or error.errno != errno.EIO:
                    raise
                rewritten = True
                log.warning("snapshot %s/%s: %s; retrying once with a new file", snapshot.job, snapshot.tag, error.strerror)
                self.counters["rewrites"] += 1
                continue
            await self._journal.append(
                r.PartDurable(**common, file=file, bytes=entry.bytes, index_sha256=entry.index_sha256)  # type: ignore[arg-type]
            )
            failpoint("persist.journaled")
            return entry, stored

    async def _fail(self, job: Job, snapshot: Snapshot, error: Exception) -> None:
        dead, abandoned = job.is_dead(snapshot), isinstance(error, Abandoned)
        if isinstance(error, Abandoned):
            error = error.error
        if isinstance(error, OSError):
            error = StorageError.of(f"save {snapshot.job}/{snapshot.tag}", error)
        elif not isinstance(error, CkptdError):
            log.exception("snapshot %s/%s: internal error", snapshot.job, snapshot.tag)
            error = InternalError(f"internal error while saving {snapshot.job}/{snapshot.tag}: {error!r}; the daemon's log has more")
        assert isinstance(error, CkptdError)
        if isinstance(error, Undecided) and self.stopping:
            log.info("snapshot %s/%s: %s; the next daemon goes on with it", snapshot.job, snapshot.directory, error)
            return
        log.error("snapshot %s/%s: %s", snapshot.job, snapshot.tag, error)
        snapshot.reason, snapshot.code = str(error), error.code
        self.counters["failed"] += 1
        if isinstance(error, IntegrityError):
            self.counters["verify_failures"] += 1
        snapshot.delivered &= not abandoned
        snapshot.abandoned += abandoned
        reported = snapshot.node is None or abandoned or (dead and not snapshot.delivered)
        if reported and not await self._drop(snapshot, str(error)):
            return
        if snapshot.state in (SnapshotState.SEALED, SnapshotState.WRITING, SnapshotState.WRITTEN):
            snapshot.move(Event.FAIL)
        if snapshot.state is SnapshotState.FAILED:
            self._tell(snapshot)
        if not reported and not isinstance(error, Undecided):
            refusal = watched(self._refuse(job, replace(snapshot), error), f"reporting that {snapshot.directory} cannot be saved")
            self._refusals[snapshot] = refusal
            refusal.add_done_callback(lambda _: self._refusals.pop(snapshot) if self._refusals.get(snapshot) is refusal else None)

    async def _refuse(self, job: Job, tried: Snapshot, error: CkptdError) -> None:
        try:
            if await self.joint.refuse(job, tried, error):
                await self._drop(tried, str(error))
        except Exception:  # the other nodes then wait until `node_timeout`
            log.exception("it cannot be reported that %s/%s cannot be saved", tried.job, tried.directory)

    async def _drop(self, snapshot: Snapshot, reason: str) -> bool:
        """Delete the files of a save that has failed. Return False if the journal is broken."""
        try:
            await self.committer.drop(snapshot.job, snapshot.directory, snapshot.attempt, snapshot.step, reason)
        except JournalBroken:
            return False
        except (StorageError, OSError) as error:
            log.warning(
                "snapshot %s/%s: its files cannot be deleted now, and are deleted at the next start (%s)",
                snapshot.job, snapshot.directory, error,
            )  # fmt: skip
        return True

    def follow(self, job: Job, snapshot: Snapshot) -> None:
        """Wait in the background for the outcome of a try that an earlier daemon of this node has delivered."""
        task = self._tasks[snapshot] = watched(self._follow(job, snapshot), f"the outcome of {snapshot.job}/{snapshot.directory}")
        task.add_done_callback(lambda done: self._done(snapshot, ExitStack(), done))

    async def _follow(self, job: Job, snapshot: Snapshot) -> None:
        try:
            await self.joint.settle(job, snapshot)
        except JournalBroken:
            pass
        except Abandoned as error:
            await self._drop(snapshot, str(error.error))
        except (OSError, CkptdError) as error:
            log.warning("%s/%s: %s", snapshot.job, snapshot.directory, error)
