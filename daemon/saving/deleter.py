"""Deletes checkpoints, by retention after a commit or on request, and keeps the hint
`newest` up to date.

A daemon applies retention to a job only after its own commit in that job. If a daemon
is merely started, or a trainer connects to it, retention deletes nothing: the settings
of this daemon may not be those that the job was trained with.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from ckptd.daemon import log_events
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.retention import judged, obstacle, policies_of, to_retire, unforeseen
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import Journal, JournalBroken
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import Busy, StorageError
from ckptd.shared.retention import LatestN, Policy
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import NO_ROOM

log = logging.getLogger("ckptd.deleter")


def uncommit(repository: Repository, job: str, tag: str) -> None:
    """Delete the receipts and the manifest of a checkpoint.

    If a newer attempt has begun, a daemon of the older one may have read the receipts,
    and may publish the manifest at any later time. Then an abandonment replaces it,
    unless there is no room for one. The call may be repeated after an OSError.
    """
    files = repository.files(job, tag)
    receipts = any(names.parse_receipt_file(file) is not None for file in files)
    buried = names.MANIFEST in files and not _is_committed(repository, job, tag)
    parsed = names.parse_tag_directory(tag)
    if (
        receipts
        and not buried
        and parsed is not None
        and parsed.attempt < repository.newest_attempt(job)
    ):
        try:
            repository.bury(job, tag, parsed.attempt, parsed.step or 0)
            buried = True
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
    if receipts:
        repository.delete_receipts(job, tag)
    if not buried:
        repository.delete_files(job, tag, [names.MANIFEST])


def _is_committed(repository: Repository, job: str, tag: str) -> bool:
    """Return True if a checkpoint has a manifest, even one that cannot be read."""
    try:
        return repository.is_committed(job, tag)
    except OSError:
        return True


def sweep(repository: Repository, job: str, tag: str, files: Sequence[str]) -> None:
    """Delete the rest of a checkpoint after `uncommit`: these files, all others that
    ckptd has made, such as those of earlier tries of several nodes, and the directory.
    A manifest that is still there is an abandonment, and stays.
    """
    repository.delete_files(job, tag, list(files))
    repository.sweep_tag(job, tag, [names.MANIFEST])


class Deleter:
    """The deleter of one daemon.

    Every save and every deletion in a job holds the lock of that job, which is in
    `locks`.

    `repair_newest`, `forget`, `finish` and `evict` take the lock, which is not
    reentrant. The caller of `retain`, `retire` or `point_newest` must hold it.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        journal: Journal,
        repository: Repository,
        calls: StorageCalls,
        locks: Mapping[str, asyncio.Lock],
        counters: Counter[str],
    ) -> None:
        self._policies = tuple(policies)
        self._journal = journal
        self._repository = repository
        self._calls = calls
        self._locks, self.counters = locks, counters

    # -- at the start

    async def repair_newest(self, job: Job) -> None:
        """Wait until no save or deletion of the job is under way, then make `newest`
        name the newest checkpoint.
        """
        async with self._locks[job.name]:
            await self.point_newest(job)

    # -- after a commit

    async def retain(self, job: Job) -> None:
        """Update `newest`, then delete the checkpoints that retention does not keep.

        If the policies differ from those of the last retention, and would delete more
        than one checkpoint at once, nothing is deleted yet: the log and `Job.announced`
        say which checkpoints the next commit deletes. The same holds for policies that
        could not choose until now, because no checkpoint had their metric, and for the
        checkpoints that a limit of age takes away, because a clock may be wrong.

        While a policy cannot choose, nothing is deleted. The log says so once, and
        `Job.announced` says so all the time. If a newer ckptd has written to the job,
        nothing is deleted either. A failure is logged and counted, and the next commit
        tries again. Raises JournalBroken.
        """
        if not await self.point_newest(job):
            return
        try:
            pinned = await self._calls.run(lambda: self._repository.pins(job.name))
        except (OSError, StorageError) as error:
            self._failed(job, error)
            return
        if job.newer:
            log_events.RETENTION_HELD.log(
                log,
                "job %s: retention deletes nothing, because %s was written by a newer ckptd",
                job.name,
                min(job.newer),
                job=job.name,
            )
            return
        if job.guard:
            log_events.RETENTION_HELD.log(log, "%s", job.guard, job=job.name)
            return
        live = job.live_checkpoints()
        policies = policies_of(live, self._policies)
        # With a stage, the only checkpoints that have the metric may be in the root.
        if why := obstacle(job.durable_checkpoints(), self._policies, pinned):
            before, job.announced, job.policies = (
                job.announced,
                f"nothing is deleted, because {why}",
                None,
            )
            if job.announced != before:
                log_events.RETENTION_HELD.log(
                    log, "job %s: %s", job.name, job.announced, job=job.name
                )
            return
        rulings = [one for one in judged(live, self._policies, pinned) if not one.kept]
        changed, job.policies = job.policies != policies, policies
        sudden = unforeseen(rulings, job.foreseen, changed=changed)
        job.announced, job.foreseen = "", {one.checkpoint.tag for one in rulings} & job.foreseen
        if sudden:
            first, last = sudden[0].checkpoint.tag, sudden[-1].checkpoint.tag
            why = (
                f"not kept by {', '.join(map(repr, policies))}"
                if changed
                else f"older than {sudden[0].limit!r} allows by the clock of the newest"
            )
            job.announced = (
                f"{len(sudden)} checkpoints ({first} to {last}) are {why}, "
                "and will be deleted at the next commit; before that, pin those to keep, or "
                "change the policy"
            )
            log_events.RETENTION_HELD.log(log, "job %s: %s", job.name, job.announced, job=job.name)
            job.foreseen |= {one.checkpoint.tag for one in sudden}
        announced = {one.checkpoint.tag for one in sudden}
        for old in [one.checkpoint for one in rulings if one.checkpoint.tag not in announced]:
            try:
                if why := await self.retire(job, old):
                    log.info("%s; retention tries again after the next commit", why)
            except JournalBroken:
                raise
            except (OSError, StorageError) as error:
                self._failed(job, error)

    async def make_room(self, job: Job, needed: int) -> bool:
        """Delete the oldest checkpoint that retention may delete, whether a policy
        keeps it or not. Return False if there is none.

        Also return False, and delete nothing, if all of them together would not make
        room for `needed` bytes: files that another checkpoint has linked stay.
        Raises OSError, StorageError, JournalBroken.
        """
        pinned = await self._calls.run(lambda: self._repository.pins(job.name))
        storage = self._repository.storage
        free = await self._calls.run(storage.free)
        found = (
            []
            if job.newer or job.guard
            else to_retire(job.live_checkpoints(), [LatestN(1)], pinned, insisted=True)
        )
        places = [f"{job.name}/{old.tag}" for old in found]
        if (
            free is not None
            and free + await self._calls.run(lambda: storage.exclusive_bytes(places)) < needed
        ):
            log.warning(
                "job %s: its older checkpoints are not deleted early, because that would not make "
                "enough room",
                job.name,
            )
            return False
        for old in found:
            why = await self.retire(job, old)
            if not why:
                log_events.ROOM_MADE.log(
                    log, "job %s: %s was deleted early, to make room on the full disk",
                    job.name, old.tag, job=job.name, tag=old.tag,
                )  # fmt: skip
                return True
            log.info("%s", why)
        return False

    async def point_newest(self, job: Job) -> bool:
        """Make `newest` name the newest checkpoint, if there is one.

        Return False if that failed; the failure is logged and counted.
        """
        try:
            newest = job.newest_checkpoint()
            if (
                newest is not None
                and await self._calls.run(lambda: self._repository.read_newest(job.name))
                != newest.tag
            ):
                failpoint("newest.publishing")
                await self._calls.run(lambda: self._repository.publish_newest(job.name, newest.tag))
                failpoint("newest.published")
        except (OSError, StorageError) as error:
            self._failed(job, error)
            return False
        return True

    def _failed(self, job: Job, error: OSError | StorageError) -> None:
        self.counters["tidy_failures"] += 1
        log.warning(
            "job %s: %s",
            job.name,
            error if isinstance(error, StorageError) else StorageError.of("tidy up", error),
        )

    # -- on a stage

    async def evict(self, job: Job, old: StoredCheckpoint, *, locked: bool = False) -> bool:
        """Delete the local copy of a checkpoint that is in the root.

        Return False if it stays, because it is pinned or being read.

        locked: True if the caller holds the lock of the job. Raises OSError,
        StorageError.
        """
        async with nullcontext() if locked else self._locks[job.name]:
            if old.tag not in job.checkpoints:
                return False
            why = await self.retire(job, old, local=True)
        if why:
            log.info("%s; its local copy stays", why)
        return not why

    # -- on request

    async def forget(self, job: Job, tag: str) -> str:
        """Delete a checkpoint on request, whether it is intact or damaged.

        Return the reason if it cannot be deleted.

        Return "" if it is gone. Raises OSError, StorageError.
        """
        async with self._locks[job.name]:
            known = job.checkpoints.get(tag)
            if known is None and (tag in job.damaged or tag in job.newer or tag in job.denied):
                files = await self._calls.run(lambda: self._repository.files(job.name, tag))
                parts = sorted({part for file in files if (part := names.part_of(file))})
                known = StoredCheckpoint(job.name, tag, 0, None, 0, 0, tuple(parts), False)
            if known is None:
                return f"there is no checkpoint {job.name}/{tag}"
            return await self.retire(job, known)

    async def retire(self, job: Job, old: StoredCheckpoint, *, local: bool = False) -> str:
        """Delete a checkpoint.

        Return the reason if it stays, because it is pinned, guarded or being read, and
        "" if it is gone.

        local: True if this is only the local copy of a checkpoint in the root, which
        does not count as a deleted checkpoint. Raises OSError, StorageError.
        """
        why = await self._delete(job, old)
        if not why:
            self.counters["retired"] += not local
            done = "local copy deleted" if local else "deleted"
            log_events.CHECKPOINT_DELETED.log(
                log, "checkpoint %s/%s: %s", job.name, old.tag, done,
                job=job.name, tag=old.tag, step=old.step, bytes=old.nbytes,
            )  # fmt: skip
        return why

    async def finish(self, job: Job, tag: str) -> None:
        """Finish a deletion whose intent is in the journal, or take the intent back if
        the checkpoint stays. Raises OSError, StorageError.
        """
        place = f"{job.name}/{tag}"
        async with self._locks[job.name]:
            files = self._journal.state.retiring.get(place)
            if files is None:
                return  # it was deleted on request meanwhile
            old = job.checkpoints.get(tag) or StoredCheckpoint(
                job.name, tag, 0, None, 0, 0, tuple(files), False
            )
            # A reader that finds no manifest gives up, so nobody keeps the rest.
            gone = not await self._calls.run(lambda: _is_committed(self._repository, job.name, tag))
            if why := await self._delete(job, old, uncommitted=gone):
                await self._journal.append(r.Retired(job=job.name, tag=tag))
            log.info("%s", f"{why}; it stays" if why else f"checkpoint {place}: deleted")

    async def _delete(self, job: Job, old: StoredCheckpoint, *, uncommitted: bool = False) -> str:
        """Delete a checkpoint. Return the reason if it stays, or "".

        The order matters: journal the intent, delete the receipts of the nodes and the
        manifest (`uncommit`), then the parts, then the directory, and journal the end.
        uncommitted: True if the manifest is gone already.
        """
        try:
            if not uncommitted and (why := await self._uncommit(job, old)):
                return why
            failpoint("retire.uncommitted")
            await self._calls.run(lambda: sweep(self._repository, job.name, old.tag, old.files))
            failpoint("retire.swept")
            await self._journal.append(r.Retired(job=job.name, tag=old.tag))
            for known in (job.checkpoints, job.damaged, job.newer, job.denied):
                known.pop(old.tag, None)
            return ""
        finally:
            job.retiring.discard(old.tag)

    async def _uncommit(self, job: Job, old: StoredCheckpoint) -> str:
        """Journal the intent to delete a checkpoint, and delete its manifest.

        Return the reason if it stays, or "".
        """
        if job.guard:
            return job.guard
        repository, run = self._repository, self._calls.run
        try:
            async with self._calls.entered(repository.exclude(job.name, old.tag)):
                if old.tag in await run(lambda: repository.pins(job.name)):
                    return f"checkpoint {job.name}/{old.tag} is pinned"
                job.retiring.add(old.tag)
                if f"{job.name}/{old.tag}" not in self._journal.state.retiring:
                    await self._journal.append(
                        r.Retiring(job=job.name, tag=old.tag, files=list(old.files))
                    )
                failpoint("retire.intended")
                if await run(lambda: repository.read_newest(job.name)) == old.tag:
                    await self._leave_newest(job)
                await run(lambda: uncommit(repository, job.name, old.tag))
        except Busy as error:
            return str(error)
        return ""

    async def _leave_newest(self, job: Job) -> None:
        """Point `newest` to another checkpoint, because the checkpoint that it names is
        about to be deleted.

        If there is no other checkpoint, or no room on the disk to write the hint,
        remove the hint: deleting must work on a full disk.
        """
        other = job.newest_checkpoint()
        if other is not None:
            try:
                await self._calls.run(lambda: self._repository.publish_newest(job.name, other.tag))
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
        await self._calls.run(lambda: self._repository.remove_newest(job.name))
