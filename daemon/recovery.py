"""Prepares a starting daemon: adopts slots, reads manifests, and finishes or undoes the saves and deletions that were under way.

A crash may interrupt any step; the next start then repeats it. Manifests and the headers of sealed slots are the truth. The journal tells
which files this daemon may finish or delete, and no other file is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import os

import aiofiles

from ckptd.daemon import records as r
from ckptd.daemon import roots
from ckptd.daemon.catalog import Catalog, Job, Snapshot, StoredCheckpoint
from ckptd.daemon.claims import Claims
from ckptd.daemon.journal import Journal, JournalBroken
from ckptd.daemon.orphans import Orphans
from ckptd.daemon.saver import MANIFEST_TMP, Saver
from ckptd.daemon.slots import Slots
from ckptd.daemon.storage_calls import StorageCalls
from ckptd.shared import leases, names
from ckptd.shared.errors import Busy, IntegrityError, NewerFormat, StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import open_regular
from ckptd.shared.lifecycle import SnapshotState
from ckptd.shared.manifest import MAX_MANIFEST, Manifest, PartEntry
from ckptd.shared.plan import Plan
from ckptd.shared.snapshot_request import SnapshotRequest
from ckptd.shared.storage import PosixStorage, check_manifest_place

log = logging.getLogger("ckptd.recovery")


async def scan_job(storage: PosixStorage, job: Job, calls: StorageCalls) -> None:
    """Update the catalog from the manifests of a job.

    Raises StorageError if the job cannot be listed, if a manifest cannot be read because the machine has run out of memory, descriptors or
    the like, or if the storage does not answer. Recovering an older checkpoint in these cases would lose history.
    """
    before = set(job.checkpoints)
    try:
        tags = await calls.read(f"list {storage.root / job.name}", lambda: storage.tags(job.name))
    except OSError as error:
        raise StorageError.of(f"list {storage.root / job.name}", error) from None
    damaged: dict[str, str] = {}
    newer: dict[str, str] = {}
    for tag in tags:
        try:
            async with calls.deadline(f"read the manifest of {job.name}/{tag}"):
                manifest = await _read_manifest(storage, job.name, tag, calls)
        except (FileNotFoundError, NotADirectoryError):
            before.discard(tag)
            job.checkpoints.pop(tag, None)
        except OSError as problem:
            failure = StorageError.of(f"read the manifest of {job.name}/{tag}", problem)
            if failure.is_of_the_machine:
                raise failure from None
            damaged[tag] = str(failure)
        except NewerFormat as error:
            newer[tag] = str(error)
            log.error("checkpoint %s/%s: %s", job.name, tag, error)
        except IntegrityError as error:
            damaged[tag] = str(error)
            log.error("checkpoint %s/%s is damaged: %s", job.name, tag, error)
        else:
            parsed = names.parse_tag_directory(tag)
            assert parsed is not None
            job.commit(StoredCheckpoint.of(manifest, user_tag=parsed[1] is None))
    job.damaged, job.newer = damaged, newer  # both at once, at the end: retention may read them while the scan waits
    for gone in before - set(tags) | set(damaged) | set(newer):
        job.checkpoints.pop(gone, None)


async def _read_manifest(storage: PosixStorage, job: str, tag: str, calls: StorageCalls) -> Manifest:
    def opener(path: str, flags: int) -> int:
        with storage.directory(job, tag) as directory:
            return open_regular(path, directory)

    file = await aiofiles.open(names.MANIFEST, "rb", opener=opener, executor=calls.pool)
    try:
        data = await file.read(MAX_MANIFEST + 1)
    except asyncio.CancelledError:
        raise  # the deadline has passed: closing the file would wait for the read that hangs
    except BaseException:
        await file.close()
        raise
    await file.close()
    manifest = Manifest.decode(data)
    check_manifest_place(manifest, job, tag)
    return manifest


async def recover(
    storage: PosixStorage,
    calls: StorageCalls,
    claims: Claims,
    journal: Journal,
    catalog: Catalog,
    slots: Slots,
    saver: Saver,
    orphans: Orphans,
) -> None:
    """Bring a starting daemon to the state in which it can serve clients. The journal must have been replayed already.

    Raises StorageError if the root cannot be read or the journal cannot be written.
    """
    failpoint("start.replayed")
    try:
        adopted = slots.adopt()
        journal.start({slot.header.job for slot in adopted})
        failpoint("start.rotated")
        for name in storage.jobs():
            if reason := roots.foreign_job(storage, name):
                log.warning("job %s is passed over: %s", name, reason)
                continue
            await scan_job(storage, catalog.job(name), calls)
    except OSError as error:
        raise StorageError.of(f"use the root {storage.root}", error) from None
    for name, known in journal.state.jobs.items():
        job = catalog.job(name)
        job.seq = max(job.seq, known.seq)
        if known.attempt > job.attempt:
            job.attempt, job.world_size = known.attempt, known.world_size
    orphans.adopt(adopted)
    for job in catalog.jobs.values():
        await claims.adopt(job)
    await _finish_retiring(storage, journal, catalog, saver)
    await _finish_staged(storage, journal, catalog, saver)
    failpoint("start.swept")
    await orphans.settle_adopted(adopted)
    for job in catalog.jobs.values():
        await saver.deleter.repair_newest(job)


async def _finish_retiring(storage: PosixStorage, journal: Journal, catalog: Catalog, saver: Saver) -> None:
    for place, files in list(journal.state.retiring.items()):
        job, tag = place.split("/")
        try:
            with leases.deletion(storage, job, tag):
                if tag in storage.pins(job) and storage.has_manifest(job, tag):  # pinned after the daemon died
                    await journal.append(r.Retired(job=job, tag=tag))
                    continue
                storage.delete_files(job, tag, [names.MANIFEST])
            storage.delete_files(job, tag, files)
            storage.delete_tag(job, tag)
            await journal.append(r.Retired(job=job, tag=tag))
        except Busy:
            await journal.append(r.Retired(job=job, tag=tag))
            continue
        except OSError as error:
            log.warning("%s: %s", place, StorageError.of("delete it", error))
            continue
        catalog.job(job).checkpoints.pop(tag, None)


async def _finish_staged(storage: PosixStorage, journal: Journal, catalog: Catalog, saver: Saver) -> None:
    """Finish the saves that were under way: commit those that lack only the manifest, and delete the files of all others."""
    for place, files in list(journal.state.staged.items()):
        job_name, tag = place.split("/")
        job = catalog.job(job_name)
        parts = [part for part in files.values() if part is not None]
        attempt, step = (parts[0].attempt, parts[0].step) if parts else (0, 0)
        try:
            if tag in job.checkpoints:
                known = job.checkpoints[tag]
                keep = set(known.files)
                # This also syncs the directory: the daemon that renamed the manifest may have died before its own sync.
                storage.delete_files(job_name, tag, [MANIFEST_TMP, *(file for file in files if file not in keep)])
                await journal.append(r.Committed(job=job_name, attempt=known.attempt, step=known.step, tag=tag, seq=known.seq))
                continue
            if parts and tag not in job.damaged and await _roll_forward(storage, saver, job, tag, parts):
                continue
            await saver.drop(job_name, tag, attempt, step, "the daemon ended before it was committed")
        except JournalBroken:
            raise
        except (OSError, StorageError) as error:
            log.warning("%s is left for the next start: %s", place, error)


async def _roll_forward(storage: PosixStorage, saver: Saver, job: Job, tag: str, durable: list[r.PartDurable]) -> bool:
    """Commit a checkpoint from its durable parts. Return False if the part of a rank is missing or damaged, or if the commit fails."""
    documents: list[tuple[PartEntry, Plan, SnapshotRequest]] = []
    try:
        for part in sorted(durable, key=lambda p: p.rank):
            reader = storage.open_part(job.name, tag, part.file, part.index_sha256)
            try:
                index = reader.index
                entry = PartEntry(
                    rank=part.rank, file=part.file, bytes=part.bytes, raw_bytes=sum(c.raw_length for c in index.chunks),
                    items=len(reader.plan.items), index_sha256=part.index_sha256, files=1 + len(index.files),
                )  # fmt: skip
                documents.append((entry, reader.plan, SnapshotRequest.decode(index.request)))
                world_size = index.world_size
            finally:
                os.close(reader.fileno())
        if [entry.rank for entry, _, _ in documents] != list(range(world_size)):
            return False
        first = durable[0]
        snapshot = Snapshot(job.name, first.attempt, first.step, tag, world_size, persist=True, state=SnapshotState.WRITTEN)
        await saver.commit(job, snapshot, documents)
    except JournalBroken:
        raise
    except Exception as error:  # a damaged file may cause any error; the caller then drops the checkpoint
        log.warning("%s/%s is not committed from its parts: %r", job.name, tag, error)
        return False
    log.info("checkpoint %s/%s: committed from its durable parts", job.name, tag)
    return True
