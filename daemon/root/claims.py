"""Claims the numbers of new attempts, and lets an attempt begin in memory while the
storage does not answer.

The number of an attempt is claimed on storage before anything is saved under it. A
trainer that recovers from memory does not wait for the claim if the storage does not
answer. Its attempt begins in memory, and its saves wait until exactly that number is
claimed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.root.attempts import Attempts
from ckptd.shared.errors import Fenced, StorageError

log = logging.getLogger("ckptd.claims")

CLAIM_SECONDS = 5.0
"""Seconds that the storage has to answer before an attempt begins in memory. An agent
waits for `Began` much longer, 30 s.
"""


class Claims:
    """The claims of one daemon, some of which may still wait for the storage."""

    def __init__(
        self,
        attempts: Attempts,
        seconds: float = CLAIM_SECONDS,
        *,
        on_loss: Callable[[Job, int], None] = lambda job, attempt: None,
    ) -> None:
        """on_loss: called if an attempt has begun in memory and another daemon then
        turns out to have claimed its number.
        """
        self._attempts, self._seconds, self._on_loss = attempts, seconds, on_loss
        self._pending: dict[tuple[str, int], asyncio.Task[bool]] = {}
        self._lost: set[tuple[str, int]] = set()
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
        task = asyncio.get_running_loop().create_task(self._attempts.claim(job.name, attempt))
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
            self._on_loss(job, attempt)

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
