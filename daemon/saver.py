"""Saves sealed snapshots as committed checkpoints, and owns the order of operations on storage.

The order of a save must not change: journal the intent, write the parts, compare them with the checksums of the slots, make the parts
durable, journal them, publish the manifest, journal the commit, tell the ranks, update `newest`, apply retention. The checksums of slots
that were sealed without them are computed at once, while the parts are being written. A job has one save at a time, and saves wait for
their turn in the order of the seals. Each failure is recorded in `Snapshot.reason`, sent to the ranks as a Progress message, and counted.
The copy in memory stays.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial

from ckptd.daemon import records as r
from ckptd.daemon.catalog import Catalog, Job, RankSeal, Snapshot, StoredCheckpoint
from ckptd.daemon.config import Config
from ckptd.daemon.deleter import Deleter
from ckptd.daemon.governor import Governor
from ckptd.daemon.journal import Journal, JournalBroken
from ckptd.daemon.pipeline import Pipeline, SealedSlot
from ckptd.daemon.save_progress import SaveProgress
from ckptd.daemon.slots import Slots
from ckptd.daemon.storage_calls import StorageCalls
from ckptd.daemon.tasks import all_of, watched
from ckptd.shared import codec, names
from ckptd.shared.errors import AlreadyExists, CkptdError, IntegrityError, InternalError, NotFound, StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import NO_ROOM
from ckptd.shared.lifecycle import Event, SnapshotState
from ckptd.shared.manifest import Manifest, PartEntry
from ckptd.shared.part_writer import PartWriter
from ckptd.shared.plan import Plan
from ckptd.shared.reuse import ChunkCheck, StoredPart
from ckptd.shared.segment import write_check
from ckptd.shared.snapshot_request import SnapshotRequest
from ckptd.shared.storage.repository import Repository
from ckptd.shared.units import size_text

log = logging.getLogger("ckptd.saver")

Document = tuple[PartEntry, Plan, SnapshotRequest]
"""A durable part: its entry in the manifest, its plan and its request."""
Saved = tuple[Document, StoredPart]
"""A durable part, and what the next save needs to link its files."""

_FEW = 5
"""The log warns if fewer checkpoints than this still fit under the root."""


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
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: dict[Snapshot, asyncio.Task[None]] = {}
        self.counters = counters
        self.deleter = Deleter(config.retention, journal, repository, calls, self._locks, counters)
        self.persist_seconds = 0.0
        self._governors: dict[str, Governor] = {}
        self._fit: dict[str, int] = {}  # how many more checkpoints fit, by job; at most _FEW

    def governor(self, job: str) -> Governor:
        """Return the governor of the saves of a job."""
        return self._governors.setdefault(job, Governor(self._pipeline.writers))

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def start(self, snapshot: Snapshot) -> asyncio.Task[None]:
        """Return the task that checks a sealed snapshot and, if it is to persist, saves it. Start the task unless it is running."""
        task = self._tasks.get(snapshot)
        if task is None or task.done():
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
                        async with self._locks[snapshot.job]:
                            await self._save(job, snapshot, sealed, checking)
                finally:
                    await asyncio.gather(checking, return_exceptions=True)  # it reads the slots; its error is raised below, if not above
                checking.result()
            if snapshot.state is SnapshotState.DURABLE:
                self._settled(job)
                async with self._locks[snapshot.job]:
                    await self.deleter.retain(job)
                await self._warn_of_little_room(job)
        except JournalBroken:
            pass
        except Exception as error:
            await self._fail(snapshot, error)

    async def check(self, snapshot: Snapshot) -> None:
        """Check each slot of the snapshot once: compute its checksums, and write them into the segment.

        If checksums are there already, compare with them instead. A slot that came from the trainer with checksums is not read here.
        Raises IntegrityError if a slot has changed since it was sealed, NotFound if it has been released.
        """
        with snapshot.held():
            await all_of([self._check_seal(snapshot, seal) for seal in snapshot.seals.values() if seal.checks is None])

    async def _check_seal(self, snapshot: Snapshot, seal: RankSeal) -> None:
        slot = self._slots.get(seal.segment)
        header = slot.header
        with slot.pinned() as fd:
            sealed = await self._pipeline.run(lambda: SealedSlot.read(fd, header))
            before = self._catalog.job(snapshot.job).stored.get(seal.rank)
            digests = self._config.link_unchanged and before is not None and before.steady
            checks = await self._pipeline.checksum(sealed, with_digests=digests)
            if slot.refresh().generation != seal.generation:  # a trainer raises it before it changes the first byte
                raise IntegrityError(f"{snapshot.job} step {snapshot.step}: the slot was filled again while it was being checked")
            crcs = [check.crc for check in checks]
            if sealed.crcs is None:
                write_check(fd, header, crcs)
            elif sealed.crcs != crcs:
                raise IntegrityError(f"{snapshot.job} step {snapshot.step}: the copy in memory has changed since it was sealed")
        seal.checks = checks
        failpoint("seal.checked")

    async def _save(self, job: Job, snapshot: Snapshot, sealed_at: float, checking: asyncio.Future[None]) -> None:
        """Save a snapshot whose slots `checking` checks meanwhile. Raises what `checking` raises, and the errors of its parts."""
        begun = time.monotonic()
        if checking.done():
            checking.result()
        await self._claimed(job, snapshot.attempt)
        snapshot.move(Event.WRITE)
        used = [self._slots.get(seal.segment).header.values for seal in snapshot.seals.values()]  # the last document of each slot
        snapshot.progress = SaveProgress(sum(values.offset + values.length for values in used), begun)
        governor = self.governor(job.name)
        governor.hear([seal.cost for seal in snapshot.seals.values() if seal.cost is not None])
        saved = await self._save_parts(snapshot, checking)
        documents = [document for document, _ in saved]
        snapshot.move(Event.WROTE)
        await self.commit(job, snapshot, documents)
        job.stored = {entry.rank: stored for (entry, _, _), stored in saved}
        seconds = time.monotonic() - begun
        self.persist_seconds += seconds
        self.counters["persisted"] += 1
        entries = [entry for entry, _, _ in documents]
        raw, written, linked = (sum(sizes) for sizes in zip(*((e.raw_bytes, e.new_bytes, e.linked_bytes) for e in entries), strict=True))
        held = max(seal.training_held for seal in snapshot.seals.values())
        governor.saved(snapshot.step, sealed_at, seconds, held)
        log.info(
            "saved %s/%s: %s as %s (%.0f %%)%s%s, durable after %.2f s, %s/s",
            snapshot.job, snapshot.tag, size_text(raw), size_text(written), 100 * written / max(raw, 1),
            f" and {size_text(linked)} in files that have not changed" if linked else "",
            f", training held {held:.3f} s" if held else "", time.monotonic() - sealed_at, size_text(raw / max(seconds, 1e-6)),
        )  # fmt: skip

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

    async def _warn_of_little_room(self, job: Job) -> None:
        """Log a warning if only few more checkpoints like the newest fit under the root, each time their number has become smaller."""
        free = await self._calls.run(self._repository.storage.free)
        room = job.room_for(free)
        fit = _FEW if room is None else min(_FEW, room)
        if fit < self._fit.get(job.name, _FEW):
            log.warning("%s", self.little_room(job, fit, free))
        self._fit[job.name] = fit

    def little_room(self, job: Job, fit: int, free: int | None) -> str:
        """Return a warning that only `fit` more checkpoints fit into the `free` bytes under the root, or "" if that is enough."""
        if fit >= _FEW:
            return ""
        then = "the oldest ones are then deleted early"
        if not self._config.make_room:
            then = "delete some (`ckptd forget`), keep fewer (keep_last), or set make_room, which then deletes the oldest ones early"
        return f"job {job.name}: the root has room for {fit} more of its checkpoints ({size_text(free or 0)} free): {then}"

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
        place = snapshot.job, snapshot.tag
        linker = self._repository.linker(*place) if self._config.link_unchanged else None
        while True:
            progress.begin_part(seal.rank)
            nonce = names.new_nonce()
            file = names.part_file(seal.rank, nonce)
            common = {"job": snapshot.job, "attempt": snapshot.attempt, "step": snapshot.step, "rank": seal.rank, "tag": snapshot.tag}
            await self._journal.append(r.Staging(**common, file=file))  # type: ignore[arg-type]
            failpoint("persist.intended")
            try:
                writer = PartWriter(self._repository.part_files(*place), nonce, self._encoder, self._config.spread, linker)
                written = partial(progress.add, seal.rank)
                governor = self.governor(snapshot.job)
                at_once = governor.threads if governor.threads == governor.most else -(-governor.threads // len(snapshot.seals))
                digests = self._config.link_unchanged and (before is None or before.steady)
                entry, stored = await self._pipeline.write_part(
                    sealed, writer, snapshot.tag, wait_for_checks, written, before, at_once, with_digests=digests
                )
            except OSError as error:
                make_room = alone and error.errno in NO_ROOM and self._config.make_room
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

    async def commit(self, job: Job, snapshot: Snapshot, documents: list[Document]) -> None:
        """Commit a checkpoint by publishing its manifest, then journal the commit and tell the ranks. All parts must be durable.

        documents: entry, plan and request of each part, in the order of the ranks. Raises IntegrityError if the part of a rank is missing
        or the plans differ, AlreadyExists if the tag has a manifest already, OSError, StorageError.
        """
        if [entry.rank for entry, _, _ in documents] != list(range(snapshot.world_size)):
            raise IntegrityError(
                f"only the parts of ranks {[e.rank for e, _, _ in documents]} are durable; expected {snapshot.world_size} parts"
            )
        if len({plan.global_plan for _, plan, _ in documents}) != 1:
            raise IntegrityError(f"{snapshot.job}/{snapshot.tag}: its ranks sealed different plans")
        _, plan, request = documents[0]
        manifest = Manifest.of(
            plan, request, [entry for entry, _, _ in documents], job=snapshot.job, attempt=snapshot.attempt, step=snapshot.step,
            tag=snapshot.tag, seq=job.seq + 1, codec=self._config.codec,
        )  # fmt: skip
        failpoint("commit.starting")
        try:
            await self._calls.run(lambda: self._repository.publish_manifest(snapshot.job, snapshot.tag, manifest.encode()))
        except FileExistsError:
            raise AlreadyExists(f"{snapshot.job}/{snapshot.tag} is committed already; choose another tag") from None
        failpoint("commit.durable")
        job.commit(StoredCheckpoint.of(manifest, user_tag=names.parse_tag_directory(snapshot.tag)[1] is None))  # type: ignore[index]
        await self._journal.append(
            r.Committed(job=job.name, attempt=snapshot.attempt, step=snapshot.step, tag=snapshot.tag, seq=manifest.seq)
        )
        failpoint("commit.journaled")
        snapshot.move(Event.COMMIT)
        self._tell(snapshot)

    async def _fail(self, snapshot: Snapshot, error: Exception) -> None:
        if isinstance(error, OSError):
            error = StorageError.of(f"save {snapshot.job}/{snapshot.tag}", error)
        elif not isinstance(error, CkptdError):
            log.exception("snapshot %s/%s: internal error", snapshot.job, snapshot.tag)
            error = InternalError(f"internal error while saving {snapshot.job}/{snapshot.tag}: {error!r}; the daemon's log has more")
        assert isinstance(error, CkptdError)
        log.error("snapshot %s/%s: %s", snapshot.job, snapshot.tag, error)
        snapshot.reason, snapshot.code = str(error), error.code
        self.counters["failed"] += 1
        if isinstance(error, IntegrityError):
            self.counters["verify_failures"] += 1
        try:
            await self.drop(snapshot.job, snapshot.tag, snapshot.attempt, snapshot.step, str(error))
        except JournalBroken:
            return
        except (StorageError, OSError) as again:
            log.warning(
                "snapshot %s/%s: its files cannot be deleted now, and are deleted at the next start (%s)", snapshot.job, snapshot.tag, again
            )
        if snapshot.state in (SnapshotState.SEALED, SnapshotState.WRITING, SnapshotState.WRITTEN):
            snapshot.move(Event.FAIL)
        if snapshot.state is SnapshotState.FAILED:
            self._tell(snapshot)

    async def drop(self, job: str, tag: str, attempt: int, step: int, reason: str) -> None:
        """Delete the files that the journal names for a checkpoint that will not be committed, and journal that they are gone.

        If the checkpoint has a manifest after all, the files that the manifest names stay. If that manifest cannot be read, nothing is
        deleted. Raises OSError, StorageError.
        """
        place = f"{job}/{tag}"
        staged = list(self._journal.state.staged.get(place, {}))
        if not staged:
            return
        try:
            keep = {part.file for part in (await self._calls.run(lambda: self._repository.read_manifest(job, tag))).parts}
        except NotFound:
            keep = set()
        except CkptdError:
            log.error("%s has a manifest that cannot be read: nothing in it is deleted", place)
            return
        await self._calls.run(lambda: self._repository.delete_unfinished(job, tag, [file for file in staged if file not in keep]))
        if not keep:
            await self._calls.run(lambda: self._repository.delete_tag(job, tag))
        await self._journal.append(r.Dropped(job=job, attempt=attempt, step=step, tag=tag, reason=reason))
