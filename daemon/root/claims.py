"""Claims the numbers of new attempts, and lets an attempt begin in memory while the
storage does not answer.

The number of an attempt is claimed on storage, durably, before anything is saved under
it (FORMAT.md, section 6). `Attempts` makes the claims, on threads that may wait for a
hung disk, and `Claims` waits for them. A trainer that recovers from memory does not
wait for the claim if the storage does not answer. Its attempt begins in memory, and its
saves wait until exactly that number is claimed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.events import Events
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared.errors import Fenced, InvalidRequest, StorageError, storage_errors
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine

T = TypeVar("T")

MOST_AHEAD = 1000
"""The most attempts that may have begun in memory after the newest one that is claimed. A
client that names a higher one would use up the numbers of its job.
"""


class Attempts:
    """The attempts of one root that are claimed.

    A number can be claimed once only, by one daemon.
    """

    def __init__(
        self, repository: Repository, calls: StorageCalls, stage: Repository | None = None
    ) -> None:
        """stage: the repository in front of the root, whose checkpoints count for the
        numbers, but in which nothing is claimed.
        """
        self._repository = repository
        self._calls = calls
        self._stage = stage

    async def find_newest(self, job: str) -> int:
        """Return the highest attempt of a job, or 0.

        The caller may stop waiting at any time. Raises StorageError.
        """
        staged = (
            0
            if self._stage is None
            else await self._translated(job, partial(self._stage.newest_attempt, job))
        )
        return max(
            staged, await self._translated(job, lambda: self._repository.newest_attempt(job))
        )

    async def claim(self, job: str, attempt: int) -> bool:
        """Claim exactly this number, durably.

        Return False if another daemon has claimed it.

        Raises StorageError; the caller may then retry the same claim.
        """
        return await self._translated(job, lambda: self._repository.claim(job, attempt))

    async def confirm(self, job: str, attempt: int) -> bool:
        """Claim exactly this number, durably, unless it is claimed already.

        Return False if the storage knows a newer attempt, or if another daemon is
        faster. Raises InvalidRequest if the number is so high that no run can have it, and
        StorageError; the caller may then retry.
        """
        newest = await self.find_newest(job)
        if attempt > newest + MOST_AHEAD:
            raise InvalidRequest(
                f"attempt {attempt} of job {job!r} cannot be continued, because the newest one in "
                f"storage is {newest}: start this run again"
            )
        return newest == attempt or (newest < attempt and await self.claim(job, attempt))

    async def check_exclusive(self, job: str) -> None:
        """Raise InvalidRequest if the storage cannot hold a job of several nodes, whose
        daemons may commit at the same time.
        """
        if not await self._translated(job, lambda: self._repository.storage.creates_once):
            raise InvalidRequest(
                f"job {job!r} is on several nodes, but {self._repository.where()} creates an "
                f"object for several callers at once, so that "
                "two daemons could commit different outcomes: use a store with conditional puts, "
                "or a shared file system"
            )

    async def check_shared(self, job: str, attempt: int) -> None:
        """Check that a claim that the daemon of another node has made is seen here, and
        keeps this node from making it again.

        Raises InvalidRequest if this node can make it, StorageError.
        """
        if await self._translated(job, lambda: self._repository.claim_again(job, attempt)):
            raise InvalidRequest(
                f"{machine.host()} could claim attempt {attempt} of job {job!r}, which the node of "
                f"rank 0 has claimed: "
                f"{self._repository.where()} is another directory on this node, or its file "
                f"system lets several nodes create one file; use "
                "a shared file system such as NFS or Lustre, or an object store"
            )

    async def _translated(self, job: str, call: Callable[[], T]) -> T:
        with storage_errors(
            f"claim an attempt of job {job!r} under {self._repository.where()}", served=True
        ):
            return await self._calls.run(call)


log = logging.getLogger("ckptd.claims")

CLAIM_SECONDS = 5.0
"""Seconds that the storage has to answer before an attempt begins in memory. An agent
waits for `Began` much longer, 30 s.
"""


class Claims:
    """The claims of one daemon. Some may still wait for the storage."""

    def __init__(
        self,
        attempts: Attempts,
        events: Events,
        seconds: float = CLAIM_SECONDS,
    ) -> None:
        self._attempts = attempts
        self._events = events
        self._seconds = seconds
        self._pending: dict[tuple[str, int], asyncio.Task[bool]] = {}
        self._lost: set[tuple[str, int]] = set()
        # Attempts that live trainers have brought: an earlier daemon may have claimed them.
        self._brought: set[tuple[str, int]] = set()
        # The claims that were begun for a run that was refused, by job.
        self._unused: dict[str, tuple[int, asyncio.Task[bool]]] = {}

    async def claim(self, job: Job, known: int, *, in_memory: bool = True) -> int:
        """Claim the next attempt of a job, and return its number.

        The attempt begins in memory if the storage does not answer in time.

        known: the highest attempt of the job that this daemon knows, or 0; the new
        number is higher. in_memory: False if the attempt may not begin before its claim
        is durable, because the daemons of other nodes use the number, too. Raises
        StorageError if the number cannot be claimed, or if the storage does not answer
        and `known` is 0: then nothing of the job is in memory.
        """
        if not in_memory:
            await self._attempts.check_exclusive(job.name)
        try:
            # Giving up is safe here: `find_newest` changes nothing.
            async with asyncio.timeout(self._seconds):
                newest = max(known, await self._attempts.find_newest(job.name))
        except TimeoutError:
            attempt = known + 1
            return self._begin_in_memory(
                job, attempt, known if in_memory else 0, self._claiming(job, attempt)
            )
        unused, _ = self._unused.get(job.name, (0, None))
        attempt = unused if unused == newest > known else 1 + newest
        while True:
            task = self._claiming(job, attempt)
            done, _ = await asyncio.wait([task], timeout=self._seconds)
            if not done:
                return self._begin_in_memory(job, attempt, known if in_memory else 0, task)
            if task.result():
                return attempt
            attempt += 1

    async def check_shared(self, job: Job, attempt: int) -> None:
        """Check that the claim of an attempt that begins on several nodes holds on this
        node, too. Raises InvalidRequest, StorageError.
        """
        try:
            async with asyncio.timeout(self._seconds):
                await self._attempts.check_shared(job.name, attempt)
        except TimeoutError:
            raise StorageError(
                f"cannot join attempt {attempt} of job {job.name!r}: the storage has not answered "
                f"for {self._seconds:g} s",
                errno.ETIMEDOUT,
            ) from None

    def _claiming(self, job: Job, attempt: int) -> asyncio.Task[bool]:
        """Return the task that claims an attempt: one that was begun for a run that was
        refused, or a new one.
        """
        unused, task = self._unused.pop(job.name, (0, None))
        if (
            task is None
            or unused != attempt
            or (task.done() and (task.cancelled() or task.exception() is not None))
        ):
            return self._start(job, attempt)
        return task

    def _start(self, job: Job, attempt: int) -> asyncio.Task[bool]:
        claim = (
            self._attempts.confirm if (job.name, attempt) in self._brought else self._attempts.claim
        )
        task = asyncio.get_running_loop().create_task(claim(job.name, attempt))
        task.add_done_callback(lambda done: self._note_end(job, attempt, done))
        return task

    def _begin_in_memory(self, job: Job, attempt: int, known: int, task: asyncio.Task[bool]) -> int:
        if not known:
            self._unused[job.name] = attempt, task
            raise StorageError(
                f"cannot claim an attempt of job {job.name!r}: the storage has not answered for "
                f"{self._seconds:g} s, and nothing of this "
                "job that could be recovered without it is in memory",
                errno.ETIMEDOUT,
            )
        log.warning(
            "job %s attempt %d begins in memory, because the storage does not answer; it saves "
            "once it does",
            job.name,
            attempt,
        )
        self._pending[job.name, attempt] = task
        return attempt

    def _note_end(self, job: Job, attempt: int, task: asyncio.Task[bool]) -> None:
        """Record the result of a claim, if its attempt has begun in memory."""
        failed = None if task.cancelled() else task.exception()
        if self._pending.get((job.name, attempt)) is not task:
            return
        if failed is not None:
            log.error("job %s attempt %d: %s; the next save tries again", job.name, attempt, failed)
            return
        del self._pending[job.name, attempt]
        if not task.cancelled() and not task.result():
            log.error(
                "job %s attempt %d: another daemon has claimed this number; this attempt can no "
                "longer save",
                job.name,
                attempt,
            )
            self._lost.add((job.name, attempt))
            self._events.claim_lost(job, attempt)

    def is_lost(self, job: Job, attempt: int) -> bool:
        """Return True if this attempt began in memory and another daemon has claimed
        its number.
        """
        return (job.name, attempt) in self._lost

    def is_claimed(self, job: Job, attempt: int) -> bool:
        """Return True unless this attempt has begun in memory and its number is not
        claimed durably, or belongs to another daemon.
        """
        return (job.name, attempt) not in self._pending and not self.is_lost(job, attempt)

    async def adopt(self, job: Job) -> None:
        """Claim the newest attempt of the job if an earlier daemon of this root began
        it without claiming it.

        The claim is waited for only as long as that of a new attempt. If it fails, the
        next save tries again.
        """
        try:
            async with asyncio.timeout(self._seconds):
                if not job.attempt or await self._attempts.find_newest(job.name) >= job.attempt:
                    return
        except TimeoutError:
            log.warning(
                "job %s attempt %d: cannot tell whether it is claimed: the storage does not answer",
                job.name,
                job.attempt,
            )
            return
        # one job that cannot be listed must not keep the daemon from serving the others
        except StorageError as error:
            log.warning(
                "job %s attempt %d: cannot tell whether it is claimed: %s",
                job.name,
                job.attempt,
                error,
            )
            return
        log.warning(
            "job %s attempt %d was begun without a claim; claiming it now", job.name, job.attempt
        )
        task = self._pending[job.name, job.attempt] = self._start(job, job.attempt)
        await asyncio.wait([task], timeout=self._seconds)

    async def bring(self, job: Job, attempt: int) -> None:
        """Take the claim of an attempt from a live trainer, which an earlier daemon of
        this root has begun, and that only the trainer and the storage know.

        The storage is waited for only as long as for a new attempt. After that, the
        attempt continues in memory, and its saves wait. Raises Fenced if the storage
        knows a newer attempt, and InvalidRequest if the number is too high.
        """
        if not self.is_lost(job, attempt):
            self._brought.add((job.name, attempt))
            task = self._pending[job.name, attempt] = self._start(job, attempt)
            await asyncio.wait([task], timeout=self._seconds)
            if task.done() and isinstance(error := task.exception(), InvalidRequest):
                del self._pending[job.name, attempt]
                raise error
        if self.is_lost(job, attempt):
            raise Fenced(
                f"attempt {attempt} of job {job.name!r} has ended, because another run has begun a "
                f"newer attempt: this run can no longer save; stop it, or use another job name"
            )

    async def claimed(self, job: Job, attempt: int) -> None:
        """Wait until this attempt is claimed on storage.

        If the claim has failed before, try it once more.

        Raises StorageError if the claim fails, Fenced if another daemon has claimed the
        number.
        """
        task = self._pending.get((job.name, attempt))
        if (
            task is not None
            and task.done()
            and not task.cancelled()
            and task.exception() is not None
        ):
            task = self._pending[job.name, attempt] = self._start(job, attempt)
        if task is not None:
            # The task is not awaited itself: a cancelled save must not cancel the
            # claim.
            await asyncio.wait([task])
            task.result()
        if self.is_lost(job, attempt):
            raise Fenced(
                f"attempt {attempt} of job {job.name!r} was claimed by another daemon first: this "
                f"run can no longer save"
            )
