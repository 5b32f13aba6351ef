"""Prepares a starting daemon: adopts slots, reads manifests, and finishes or undoes the
saves and deletions that were under way.

A crash may interrupt any step; the next start then repeats it. Manifests and the
headers of sealed slots are the truth. The journal tells which files this daemon may
finish or delete, and no other file is deleted.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial

from ckptd.daemon import log_events
from ckptd.daemon.engine.orphans import Orphans
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import JournalBroken
from ckptd.daemon.memory.foreign_memory import ForeignMemoryKeeper, HeldElsewhere
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.daemon.root.claims import Claims
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.saving.committer import Document
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.saving.saver import Saver
from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound, StorageError, storage_errors
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import NO_ROOM
from ckptd.shared.wire.lifecycle import SnapshotState

log = logging.getLogger("ckptd.recovery")

_NOT_WRITABLE = (*NO_ROOM, errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors after which a network file system may list a directory from its cache: the
storage is full, or may only be read.
"""


async def scan_job(
    repository: Repository, job: Job, calls: StorageCalls, *, fresh: bool = False
) -> None:
    """Update the catalog from the manifests of a job.

    fresh: True if a checkpoint that another node has just committed must not be missed,
    as in a recovery. On several nodes, it is an error if this cannot be had, unless the
    storage may only be read.

    Raises StorageError if the job cannot be listed, if a manifest cannot be read
    because the machine has run out of memory, descriptors or the like, or if the
    storage does not answer. Recovering an older checkpoint in these cases would lose
    history.
    """
    before = set(job.checkpoints)
    if fresh:
        try:
            async with calls.deadline(f"list {repository.where(job.name)}"):
                await calls.run(partial(repository.refresh_listing, job.name))
        except OSError as error:
            if job.node is not None and error.errno not in _NOT_WRITABLE:
                raise StorageError.of(
                    f"list {repository.where(job.name)}", error, served=True
                ) from None
    with storage_errors(f"list {repository.where(job.name)}", served=True):
        tags = await calls.read(
            f"list {repository.where(job.name)}", lambda: repository.tags(job.name)
        )
    uncommitted: set[str] = set()
    damaged: dict[str, str] = {}
    newer: dict[str, str] = {}
    denied: dict[str, str] = {}
    guards: dict[str, str] = {}
    for tag in tags:
        try:
            manifest = await calls.read(
                f"read the manifest of {job.name}/{tag}",
                partial(repository.read_manifest, job.name, tag),
            )
        except NotFound:
            before.discard(tag)
            uncommitted.add(tag)
            job.checkpoints.pop(tag, None)
        except OSError as problem:
            failure = StorageError.of(f"read the manifest of {job.name}/{tag}", problem)
            if failure.is_no_damage:
                raise failure from None
            if failure.is_denied:
                denied[tag] = str(failure)
                if tag not in job.denied:
                    log.error("checkpoint %s/%s: %s", job.name, tag, failure)
                continue
            damaged[tag] = str(failure)
            _log_damage(job, tag, damaged[tag])
        except NewerFormat as error:
            newer[tag] = str(error).removeprefix(f"{job.name}/{tag}: ")
            if unknown := await calls.run(
                partial(repository.unknown_deleter_features, job.name, tag)
            ):
                guards[tag] = unknown[0]
            log.error("checkpoint %s/%s: %s", job.name, tag, newer[tag])
        except IntegrityError as error:
            damaged[tag] = str(error).removeprefix(f"{job.name}/{tag}: ")
            _log_damage(job, tag, damaged[tag])
        else:
            job.commit(StoredCheckpoint.of(manifest))
            if manifest.unknown_deleter_features:
                guards[tag] = manifest.unknown_deleter_features[0]
    # Without an await between them: retention may read them while a scan waits.
    job.uncommitted = uncommitted
    job.damaged = damaged
    job.newer = newer
    job.denied = denied
    job.guards = guards
    for gone in before - set(tags) | set(damaged) | set(newer) | set(denied):
        job.checkpoints.pop(gone, None)


async def drop_deleted(repository: Repository, jobs: Collection[Job], calls: StorageCalls) -> None:
    """Update the catalog of each job whose newest checkpoint was deleted by hand, or
    that has a checkpoint which this user could not read.

    Changes nothing while the storage cannot be read, or is another one.
    """
    newest = [
        (job, max(known, key=lambda c: c.order) if known else None)
        for job in jobs
        if (known := job.live_checkpoints()) or job.denied
    ]

    def find_deleted() -> list[Job]:
        if repository.storage.is_lost():
            return []
        return [
            job
            for job, one in newest
            if job.denied or one is None or not repository.has_manifest(job.name, one.tag)
        ]

    try:
        for job in await calls.run(find_deleted):
            await scan_job(repository, job, calls)
    except (OSError, StorageError) as error:
        log.debug("what was deleted by hand cannot be seen: %s", error)


def _log_damage(job: Job, tag: str, reason: str) -> None:
    log_events.CHECKPOINT_DAMAGED.log(
        log, "checkpoint %s/%s is damaged: %s. recover() passes it over: look at the disk, then "
        "delete it with `ckptd forget`", job.name, tag, reason,
        job=job.name, tag=tag, reason=reason,
    )  # fmt: skip


async def recover(
    saver: Saver,
    claims: Claims,
    slots: Slots,
    orphans: Orphans,
    foreign: ForeignMemoryKeeper,
    gather: Callable[[], list[HeldElsewhere]],
) -> None:
    """Bring a starting daemon to the state in which it can serve clients.

    The journal must have been replayed already. With a stage, what the root has is left
    to the uploader.

    If the root was moved, `gather` brings its segments to `slots`.

    Raises StorageError if the root cannot be read or the journal cannot be written.
    """
    failpoint("start.replayed")
    front = saver.front
    repository, calls = front.repository, front.calls
    journal, catalog = front.journal, front.catalog
    with storage_errors(f"use the root {repository.where()}"):
        foreign.elsewhere = await calls.read("look for the memory of a root that was moved", gather)
        slots.adopt()
        foreign.start()
        adopted = list(slots.slots.values())
        with storage_errors(f"begin a new journal file in {journal.place}"):
            journal.start({slot.header.job for slot in adopted})
        failpoint("start.rotated")
        for name in await calls.read(f"list {repository.where()}", repository.jobs):
            if reason := await calls.read(
                f"look at {repository.where(name)}", partial(repository.refusal, name)
            ):
                log.warning("job %s is skipped: %s", name, reason)
                continue
            await scan_job(repository, catalog.job(name), calls)
    for name, known in journal.state.jobs.items():
        job = catalog.job(name)
        job.seq = max(job.seq, known.seq)
        if known.attempt > job.attempt:
            job.attempt = known.attempt
            job.world_size = known.world_size
            job.node = known.node
    orphans.adopt(adopted)
    for job in catalog.jobs.values():
        if job.node is None:  # otherwise the claim was durable before this node joined
            await claims.adopt(job)
    for place in list(journal.state.retiring):
        try:
            await front.finish_deletion(place)
        except JournalBroken:
            raise
        except (OSError, StorageError) as error:
            log.warning("the deletion of %s is left to the next start: %s", place, error)
    for place in list(journal.state.staged):
        try:
            await finish_save(front, saver, place)
        except JournalBroken:
            raise
        except (OSError, StorageError) as error:
            log.warning(
                "%s could not be finished or undone, and is left for the next start: %s",
                place,
                error,
            )
    failpoint("start.swept")
    await orphans.record_adopted(adopted)
    for job in catalog.jobs.values():
        await front.deleter.repair_newest(job)


async def take_over(
    claims: Claims, catalog: Catalog, orphans: Orphans, adopted: list[Slot]
) -> None:
    """Adopt slots of one job while the daemon is running.

    They are treated as `recover` treats the slots that it finds. No rank of the job may
    be connected. Raises JournalBroken.
    """
    orphans.adopt(adopted)
    job = catalog.job(adopted[0].header.job)
    if job.node is None:
        await claims.adopt(job)
    await orphans.record_adopted(adopted)
    orphans.watch()


async def finish_save(destination: Destination, saver: Saver, place: str) -> None:
    """Finish a save that was under way: commit it if it lacks only the manifest, and
    delete its files otherwise.

    destination: where the checkpoint was to be committed. place: its job and tag, as
    `job/tag`. Raises JournalBroken, StorageError, OSError.
    """
    name, tag = place.split("/")
    there = destination.catalog.job(name)
    files = destination.journal.state.staged.get(place, {})
    parts = sorted(
        (part for part in files.values() if part is not None), key=lambda part: part.rank
    )
    attempt, step = (parts[0].attempt, parts[0].step) if parts else (0, 0)
    if (known := there.checkpoints.get(tag)) is not None:
        needless = [file for file in files if file not in known.files]
        await destination.calls.run(
            partial(destination.repository.delete_unfinished, name, tag, needless)
        )
        await destination.committer.journal_commit(known)
    elif tag in there.denied:  # it may be committed, and must not be deleted
        raise StorageError(there.denied[tag])
    elif (
        not parts
        or tag in there.damaged
        or not await _roll_forward(destination, saver, saver.front.catalog.job(name), parts)
    ):
        await destination.committer.drop(
            name, tag, attempt, step, "the daemon ended before it was committed"
        )


async def _roll_forward(
    destination: Destination,
    saver: Saver,
    job: Job,
    durable: list[r.PartDurable],
) -> bool:
    """Commit a checkpoint from its durable parts.

    Return False if the part of a rank is missing or damaged, or if the commit fails.

    Of several nodes, deliver the parts of this node, and those that it has written on
    behalf of another one, unless that is done. Follow what becomes of them.
    """
    first = durable[0]
    try:
        read = await destination.calls.run(
            lambda: [_read_part(destination.repository, part) for part in durable]
        )
        documents, world_size = [document for document, _ in read], read[0][1]
        if documents[0][2].node is not None:
            return await _deliver(destination, saver, job, first, documents, world_size)
        if [entry.rank for entry, _, _ in documents] != list(range(world_size)):
            return False
        snapshot = Snapshot(
            job.name, first.attempt, first.step, first.tag, world_size, persist=True,
            state=SnapshotState.WRITTEN,
        )  # fmt: skip
        await destination.committer.commit(snapshot, documents)
    except (JournalBroken, StorageError, OSError):
        raise
    except (
        Exception
    ) as error:  # a damaged file may cause any error; the caller then drops the checkpoint
        log.warning(
            "checkpoint %s/%s cannot be committed from its parts: %r", job.name, first.tag, error
        )
        return False
    log.info("checkpoint %s/%s: committed from its durable parts", job.name, first.tag)
    return True


async def _deliver(
    destination: Destination,
    saver: Saver,
    job: Job,
    first: r.PartDurable,
    documents: list[Document],
    world_size: int,
) -> bool:
    """Deliver durable parts of this node, and those that it has written on behalf of
    another one, each with a receipt of its own. Delete those that are not needed.

    first: the record of one of the parts. Return False, and delete nothing, if none of
    them is needed.
    """
    nodes: dict[int, list[Document]] = {}
    for document in documents:
        node = document[2].node
        assert node is not None
        nodes.setdefault(node.ranks[0], []).append(document)
    needless = list[Snapshot]()
    for parts in nodes.values():
        snapshot = Snapshot(
            job.name, first.attempt, first.step, first.tag, world_size, persist=True,
            state=SnapshotState.WRITTEN, node=parts[0][2].node
        )  # fmt: skip
        if await saver.joint.roll_forward(job, snapshot, parts):
            saver.follow(job, snapshot)
        else:
            needless.append(snapshot)
    if len(needless) == len(nodes):
        return False
    for snapshot in needless:
        await destination.committer.drop(
            job.name, first.tag, *snapshot.key, "its parts are not needed", snapshot.ranks
        )
    return True


def _read_part(repository: Repository, part: r.PartDurable) -> tuple[Document, int]:
    """Return the documents of a durable part, and the number of ranks.

    Raises any error if the file is damaged.
    """
    with closing(repository.open_part(part.job, part.tag, part.file, part.index_sha256)) as reader:
        index = reader.index
        entry = PartEntry(
            rank=part.rank, file=part.file, bytes=part.bytes,
            raw_bytes=sum(c.raw_length for c in index.chunks), items=len(reader.plan.items),
            index_sha256=part.index_sha256, files=1 + len(index.files),
            linked_bytes=reader.linked_bytes,
            non_finite=None if index.non_finite is None else index.non_finite.values,
            chain=reader.longest_chain, read_bytes=reader.read_bytes if index.bases else 0,
        )  # fmt: skip
        return (entry, reader.plan, SnapshotRequest.decode(index.request)), index.world_size
