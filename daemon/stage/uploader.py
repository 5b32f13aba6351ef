"""Uploads the checkpoints of a stage to the root, and deletes their local copies
afterwards.

The stage is a POSIX root in which the saver commits. An upload copies the parts, reads
them back and verifies them, and then publishes the manifest in the root, which makes it
count. A local copy is deleted only if the root has the same checkpoint. There is no
queue on disk: a checkpoint waits if the stage has it and the root has not. The journal
of the root has the intents, so that no files of an upload are forgotten. Jobs of
several nodes are saved straight to the root, which the uploader opens for them too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict

from ckptd.daemon import log_events, recovery
from ckptd.daemon.job import stage_decisions as d
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.dues import UploadProgress
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import JournalBroken
from ckptd.daemon.saving.saver import Saver
from ckptd.daemon.stage.copier import CheckpointCopier, Copied, Copying, one_at_a_time
from ckptd.daemon.stage.root import StageRoot
from ckptd.daemon.tasks import watched
from ckptd.shared.errors import (
    AlreadyExists,
    CkptdError,
    IntegrityError,
    NotFound,
    StorageError,
    storage_errors,
)
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.units import size_text

log = logging.getLogger("ckptd.uploader")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before an upload that has failed is tried again; the pause doubles with each
failure in a row.
"""


class _Stopped(Exception):
    """Raised in the thread of an upload when the daemon ends."""


class Uploader:
    """The uploader of one daemon with a stage.

    Call `start` once the stage is recovered, `wake` after each change, and `close` at
    the end.

    jobs: the jobs in the root, whose `checkpoints` are those in the root. refused:
    those that cannot be uploaded, with the reason, by job and tag. problem: the reason
    why nothing is uploaded at the moment, or "".
    """

    def __init__(self, behind: StageRoot, saver: Saver, events: Events) -> None:
        """saver: the saver, whose `front` is the stage and whose `root` is the root."""
        self._behind = behind
        self._saver = saver
        self._events = events
        self._stage, self._root = saver.front, saver.root
        self._catalog, self.jobs = saver.front.catalog, saver.root.catalog
        self.counters = saver.counters
        # Job/tag of each upload that has begun, and may have left files.
        self._begun: set[str] = set()
        # Job/tag of each save of earlier daemons that is not finished or undone yet.
        self._left: set[str] = set()
        self._opening, self._working = asyncio.Lock(), asyncio.Lock()
        self._known = False  # True once the root has been scanned
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._last = ""  # the job of the last upload
        # The newest attempt of each job when its checkpoints in the root were last
        # read.
        self._attempts: dict[str, int] = {}
        self.refused: dict[str, dict[str, str]] = defaultdict(dict)
        self._done = self._total = 0  # bytes of the upload that is under way
        self._uploading: tuple[str, str] | None = None
        self.problem = ""

    # -- life

    def start(self) -> None:
        self._task = watched(self._run(), "uploading checkpoints")

    def wake(self) -> None:
        """Look for checkpoints to upload, and send each rank what has changed for it."""
        self._wake.set()
        self._tell()

    def stop(self) -> None:
        """Begin no upload any more, and end the one that is under way, which the next
        daemon continues.
        """
        self._stopping = True

    async def close(self) -> None:
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def busy(self) -> bool:
        """True while a checkpoint waits for its upload."""
        return any(self.waiting(job) for job in self._catalog.jobs.values())

    def waiting(self, job: Job) -> list[StoredCheckpoint]:
        """Return the checkpoints of a job that wait for their upload, oldest first."""
        return d.waiting(job, self.refused[job.name])

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            self._wake.clear()
            try:
                while await self._step():
                    pause = FIRST_PAUSE
                    self._note("")
                self._note("")
            except (JournalBroken, _Stopped):
                return  # the daemon ends
            except (CkptdError, OSError) as error:
                self._note(
                    str(error)
                    if isinstance(error, CkptdError)
                    else str(StorageError.of("upload", error, served=True))
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            pause = FIRST_PAUSE
            self._events.changed()
            await self._wake.wait()

    def _note(self, problem: str) -> None:
        if problem and problem != self.problem:
            log_events.UPLOADS_STOPPED.log(
                log, "nothing is uploaded to %s: %s; it is tried again", self._behind.place,
                problem, reason=str(problem),
            )  # fmt: skip
        elif self.problem and not problem:
            log_events.UPLOADS_RESUMED.log(log, "uploads to %s work again", self._behind.place)
        self.problem = problem

    # -- one step

    async def _step(self) -> bool:
        """Upload one checkpoint, after everything that is left of earlier ones is
        tidied up. Return False if none waits.
        """
        async with self._working:
            await self._open()
            for place in list(self._root.journal.state.retiring):
                await self._root.finish_deletion(place)
            await self._drop_leftovers()
            for job in list(self._catalog.jobs.values()):
                for old in d.needless(job):
                    await self._stage.deleter.evict(job, old)
            name = d.next_job(
                [job.name for job in self._catalog.jobs.values() if self.waiting(job)], self._last
            )
            if name is None:
                return False
            self._last = name
            job = self._catalog.job(name)
            one = d.next_upload(self.waiting(job))
            assert one is not None
            await self._upload_or_refuse(job, one)
            return True

    async def _upload_or_refuse(self, job: Job, one: StoredCheckpoint) -> None:
        """Upload one checkpoint.

        If it cannot be uploaded, it stays on the stage, and is not tried again. Raises
        StorageError, OSError.
        """
        await self._root.calls.run(self._behind.check)
        try:
            await self._upload(job, one)
        except NotFound as error:  # it was deleted from the stage meanwhile
            log.info("%s/%s is not uploaded: %s", job.name, one.tag, error)
            await recovery.scan_job(self._stage.repository, job, self._stage.calls)
        except (IntegrityError, AlreadyExists) as error:
            log_events.UPLOAD_FAILED.log(
                log, "%s/%s cannot be uploaded, and stays on the stage: %s",
                job.name, one.tag, error,
                job=job.name, tag=one.tag, step=one.step, reason=str(error),
            )  # fmt: skip
            self.counters["failed_uploads"] += 1
            self.refused[job.name][one.tag] = str(error)
        finally:
            self._uploading = None
            self._tell()

    async def _open(self) -> None:
        """Unless that is done, lock the root, read which checkpoints it has, and finish
        the saves there that earlier daemons have begun.
        """
        async with self._opening:
            if not self._known:
                await self._root.calls.read(
                    f"open the root {self._behind.place}", self._behind.open
                )
                for name in await self._root.calls.read(
                    f"list the root {self._behind.place}", self._root.repository.jobs
                ):
                    await self.scan(name)
                for place in self._root.journal.state.staged:
                    name, tag = place.split("/")
                    # Uploads are continued.
                    (self._begun if tag in self._catalog.job(name).checkpoints else self._left).add(
                        place
                    )
                for place in sorted(self._left):
                    try:
                        await self._finish(place)
                    except JournalBroken:
                        raise
                    except (OSError, StorageError) as error:
                        log.warning(
                            "%s could not be finished or undone: %s; the next save of the job "
                            "tries again",
                            place,
                            error,
                        )
                self._known = True
                self._tell()

    async def _finish(self, place: str) -> None:
        await recovery.finish_save(self._root, self._saver, place)
        self._left.discard(place)

    # -- for jobs of several nodes

    async def reach(self, job: Job) -> None:
        """Return once a job may be saved to the root.

        Raises StorageError, Busy, InvalidConfig, OSError if it cannot be used now.

        The saves that earlier daemons have begun are finished first: a save could have
        the directory of one that is then undone.
        """
        await self._open()
        await self._root.calls.read(f"find the root {self._behind.place}", self._behind.check)
        async with self._opening:
            for place in [place for place in self._left if place.startswith(f"{job.name}/")]:
                await self._finish(place)
        self._join(job, self.jobs.job(job.name))

    async def upload_newest(self, job: Job) -> None:
        """Upload the newest checkpoint of a job, if it waits, so that all nodes can
        read it. If it is damaged, upload an older one.

        An upload that is under way is waited for. Raises StorageError if the root
        cannot be used now.
        """
        with storage_errors(f"upload the newest checkpoint of job {job.name!r}", served=True):
            await self.reach(job)
            while (
                newest := job.newest_durable(self.refused[job.name])
            ) is not None and newest in self.waiting(job):
                async with self._working:
                    if newest in self.waiting(job):
                        await self._upload_or_refuse(job, newest)

    async def scan(self, name: str, *, fresh: bool = False) -> Job:
        """Read which checkpoints of a job are in the root, and return the job as it is
        there. `fresh` is as in `scan_job`.

        Raises StorageError, InvalidConfig.
        """
        there, job = self.jobs.job(name), self._catalog.job(name)
        there.node = job.node
        with storage_errors(f"find the root {self._behind.place}"):
            await self._root.calls.read(f"find the root {self._behind.place}", self._behind.check)
        await recovery.scan_job(self._root.repository, there, self._root.calls, fresh=fresh)
        self._join(job, there)
        return there

    @staticmethod
    def _join(job: Job, there: Job) -> None:
        job.in_root = there.checkpoints
        job.seq = there.seq = max(job.seq, there.seq)

    async def _upload(self, job: Job, one: StoredCheckpoint) -> None:
        """Upload one checkpoint, unless the root has it.

        Raises NotFound if it is gone from the stage; AlreadyExists, IntegrityError if
        it cannot be uploaded; JournalBroken, Busy, StorageError, OSError.
        """
        run, begun = self._root.calls.run, time.monotonic()
        transfer = CheckpointCopier(self._stage.repository, self._root.repository)
        planned = await run(lambda: transfer.planned(job.name, one.tag))
        manifest = planned.manifest
        if manifest is None:
            raise IntegrityError(planned.error or "its manifest is damaged")
        if not planned.there:
            self._uploading = (job.name, one.tag)
            self._done = 0
            self._total = manifest.nbytes
            async with self._root.calls.entered(one_at_a_time(self._behind.place)):
                await self._copy(transfer, planned, manifest)
        newest = await self._see_other_attempts(job.name)
        there = self.jobs.job(job.name)
        there.commit(StoredCheckpoint.of(manifest))
        self._join(job, there)
        await self._root.committer.journal_commit(one)
        failpoint("upload.journaled")
        self._tell()
        if not planned.there:
            self.counters["uploaded"] += 1
            seconds = time.monotonic() - begun
            log_events.UPLOAD_DONE.log(
                log, "uploaded %s/%s: %s in %.2f s",
                job.name, one.tag, size_text(manifest.nbytes), seconds,
                job=job.name, tag=one.tag, step=one.step, bytes=manifest.nbytes, seconds=seconds,
            )  # fmt: skip
        # Otherwise a newer attempt, perhaps on another machine, decides what the root
        # keeps.
        if one.attempt >= newest:
            async with self._root.locks[job.name]:
                await self._root.deleter.retain(there)
            self._root.watch_quota(job.name)

    async def _see_other_attempts(self, name: str) -> int:
        """Return the newest attempt of a job.

        Read its checkpoints again if an attempt has begun since they were read.
        """
        newest = await self._root.calls.run(lambda: self._root.repository.newest_attempt(name))
        if newest != self._attempts.get(name):
            await self.scan(name)
            self._attempts[name] = newest
        return newest

    async def _copy(self, transfer: CheckpointCopier, one: Copying, manifest: Manifest) -> None:
        run, repository = self._root.calls.run, self._root.repository
        self._begun.add(f"{one.job}/{one.tag}")
        common = {
            "job": one.job,
            "attempt": manifest.attempt,
            "step": manifest.step or 0,
            "tag": one.tag,
        }
        await self._root.journal.append(
            *(r.Staging(**common, rank=part.rank, file=part.file) for part in manifest.parts)  # type: ignore[arg-type]
        )
        failpoint("upload.intended")

        def copy() -> Copied:
            # A file that was not synced before a power cut may look whole until then.
            if repository.storage.head_last:
                repository.delete_files(one.job, one.tag, [part.file for part in manifest.parts])
            copied = transfer.copy_parts(one, manifest, self._progress)
            self._progress(0)
            failpoint("upload.copied")
            return copied

        try:
            copied = await run(copy)
            await run(lambda: transfer.publish(one, copied))
        except (IntegrityError, NotFound) as error:
            await run(lambda: transfer.undo(one, manifest))
            await self._root.journal.append(r.Dropped(**common, reason=str(error)))  # type: ignore[arg-type]
            raise
        except FileExistsError:
            raise AlreadyExists(
                f"{repository.where(one.job, one.tag)} was committed by another daemon meanwhile"
            ) from None
        failpoint("upload.published")

    def _progress(self, length: int) -> None:
        if self._stopping:
            raise _Stopped
        self._done += length

    # -- what earlier uploads have left in the root

    async def _drop_leftovers(self) -> None:
        """Delete the files of uploads that will not be continued, because the stage no
        longer has the checkpoint.
        """
        for place in self._begun.intersection(self._root.journal.state.staged):
            name, tag = place.split("/")
            there, job = self.jobs.job(name), self._catalog.job(name)
            if tag in there.checkpoints:
                await self._root.committer.journal_commit(there.checkpoints[tag])
            elif tag not in job.checkpoints or tag in self.refused[name]:
                await self._root.committer.drop(
                    name, tag, 0, 0, "its upload was not finished, and the stage no longer has it"
                )

    # -- room on the stage

    async def make_room(self, job: Job) -> bool:
        """Delete one local copy of a checkpoint that is in the root, because the disk
        is full. Return False if there is none.

        The caller holds the lock of `job`. Copies of other jobs whose lock is held are
        left alone. Raises OSError, StorageError.
        """
        for other in [job, *(other for other in self._catalog.jobs.values() if other is not job)]:
            for old in d.spare(other):
                if (
                    other is job or not self._stage.locks[other.name].locked()
                ) and await self._stage.deleter.evict(other, old, locked=other is job):
                    return True
        return False

    # -- what clients are told

    def _tell(self) -> None:
        """Send each connected rank which steps of its attempt are in the root, unless
        it has been told so.
        """
        if not self._known:
            return
        for job in self._catalog.jobs.values():
            for owner in (*job.ranks.owners.values(), *job.ranks.former):
                if owner.notify is None:
                    continue
                message = d.uploads(job, owner.attempt, self.refused[job.name])
                if message != owner.uploads:
                    owner.uploads = message
                    owner.notify(message)

    async def forget(self, job: Job, tag: str) -> str:
        """Delete a checkpoint from the stage and from the root.

        Return the reason if it stays, or "". Raises OSError, StorageError.

        The stage comes first: a copy there would be uploaded again.
        """
        await self._open()
        there = await self.scan(job.name)
        known = (
            tag in job.checkpoints or tag in job.damaged,
            any(
                tag in known
                for known in (there.checkpoints, there.damaged, there.newer, there.denied)
            ),
        )
        if known[1] and tag in await self._root.calls.run(
            lambda: self._root.repository.pins(job.name)
        ):
            return f"checkpoint {job.name}/{tag} is pinned"
        if known[0] and (why := await self._stage.deleter.forget(job, tag)):
            return why
        self.refused[job.name].pop(tag, None)
        why = await self._root.deleter.forget(there, tag) if known[1] or not known[0] else ""
        self.wake()
        return why

    def progress(self) -> UploadProgress:
        """Return how far the uploads are."""
        refused = {job: dict(found) for job, found in self.refused.items()}
        return UploadProgress(refused, self.problem, self._uploading, self._done, self._total)

    def report(self) -> dict[str, object]:
        """Return the part of `ckptd status --json` that is about uploads.

        Sizes are bytes, times are seconds.
        """
        wait = [c for job in self._catalog.jobs.values() for c in self.waiting(job)]
        ages = [time.time() - c.created for c in wait if c.created == c.created]
        refused = {
            f"{job}/{tag}": why for job, found in self.refused.items() for tag, why in found.items()
        }
        uploading = self._uploading
        return {
            "root_known": self._known,
            "waiting": len(wait),
            "waiting_bytes": sum(c.nbytes for c in wait),
            "oldest_age_seconds": max(0.0, round(max(ages), 1)) if ages else None,
            "uploading": None
            if uploading is None
            else {
                "job": uploading[0],
                "tag": uploading[1],
                "done_bytes": self._done,
                "total_bytes": self._total,
            },
            "problem": self.problem,
            "refused": refused,
        }
