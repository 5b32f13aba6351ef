"""Attempts that begin before they are claimed, because the disk hangs.

An attempt's number is claimed on storage before anything is saved under it. A trainer that comes back to its memory does not wait for that:
if the storage does not answer, the attempt begins in memory, and its saves wait until exactly that number is claimed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

from ckptd.daemon.attempts import Attempts
from ckptd.daemon.catalog import Job
from ckptd.shared.errors import Fenced, StorageError

log = logging.getLogger("ckptd.claims")

CLAIM_SECONDS = 5.0
"""How long the storage has to answer before an attempt begins in memory: well below the 30 s that an agent waits for `Began`."""


class Claims:
    """`on_loss(job, attempt)` is called when another daemon turns out to have claimed the number of an attempt that began in memory."""

    def __init__(self, attempts: Attempts, seconds: float = CLAIM_SECONDS) -> None:
        self._attempts, self._seconds = attempts, seconds
        self.on_loss: Callable[[Job, int], None] = lambda job, attempt: None
        self._pending: dict[tuple[str, int], asyncio.Task[bool]] = {}
        self._lost: set[tuple[str, int]] = set()

    async def claim(self, job: Job, known: int) -> int:
        """Return the number of the next attempt, above `known`.

        Raises StorageError if it cannot be claimed, or if the storage does not answer and this daemon knows no attempt of the job.
        """
        try:
            async with asyncio.timeout(self._seconds):  # a look that is given up changes nothing
                attempt = 1 + max(known, await self._attempts.find_newest(job.name))
        except TimeoutError:
            attempt = known + 1
            return self._begin_in_memory(job, attempt, known, self._start(job, attempt))
        while True:
            task = self._start(job, attempt)
            done, _ = await asyncio.wait([task], timeout=self._seconds)
            if not done:
                return self._begin_in_memory(job, attempt, known, task)
            if task.result():
                return attempt
            attempt += 1

    def _start(self, job: Job, attempt: int) -> asyncio.Task[bool]:
        task = asyncio.get_running_loop().create_task(self._attempts.claim(job.name, attempt))
        task.add_done_callback(lambda done: self._note_end(job, attempt, done))
        return task

    def _begin_in_memory(self, job: Job, attempt: int, known: int, task: asyncio.Task[bool]) -> int:
        if not known:
            raise StorageError(
                f"cannot claim an attempt of job {job.name!r}: the storage has not answered for {self._seconds:g} s, and nothing of this "
                "job is in memory",
                errno.ETIMEDOUT,
            )
        log.warning("job %s attempt %d begins in memory: the storage does not answer; it is saved once it does", job.name, attempt)
        self._pending[job.name, attempt] = task
        return attempt

    def _note_end(self, job: Job, attempt: int, task: asyncio.Task[bool]) -> None:
        """Take note of a claim that ended, if an attempt has begun with it."""
        failed = None if task.cancelled() else task.exception()
        if self._pending.get((job.name, attempt)) is not task:
            return
        if failed is not None:
            log.error("job %s attempt %d: %s; the next save tries again", job.name, attempt, failed)
            return
        del self._pending[job.name, attempt]
        if not task.cancelled() and not task.result():
            log.error("job %s attempt %d: another daemon has claimed this number; nothing more of it is saved", job.name, attempt)
            self._lost.add((job.name, attempt))
            self.on_loss(job, attempt)

    def is_lost(self, job: Job, attempt: int) -> bool:
        """Return True if another daemon has claimed the number of this attempt, which had begun in memory."""
        return (job.name, attempt) in self._lost

    async def adopt(self, job: Job) -> None:
        """Claim the attempt that an earlier daemon of this root began and may not have claimed. A failure is left to the next save."""
        try:
            if not job.attempt or await self._attempts.find_newest(job.name) >= job.attempt:
                return
        except StorageError as error:  # a job whose directory cannot be listed must not keep the others from starting
            log.warning("job %s attempt %d: it is not known whether it is claimed: %s", job.name, job.attempt, error)
            return
        log.warning("job %s attempt %d has no claim: it is claimed now", job.name, job.attempt)
        task = self._pending[job.name, job.attempt] = self._start(job, job.attempt)
        await asyncio.wait([task], timeout=self._seconds)

    async def claimed(self, job: Job, attempt: int) -> None:
        """Wait until this attempt is claimed on storage. Raises StorageError if it cannot be, Fenced if another daemon has its number."""
        task = self._pending.get((job.name, attempt))
        if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
            task = self._pending[job.name, attempt] = self._start(job, attempt)
        if task is not None:
            await asyncio.wait([task])  # not the task itself: a save that is cancelled must not cancel the claim
            task.result()
        if self.is_lost(job, attempt):
            raise Fenced(f"attempt {attempt} of job {job.name!r} was claimed by another daemon first: this run can no longer save")
