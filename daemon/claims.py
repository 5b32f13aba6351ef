"""Attempts that begin before they are claimed, because the disk hangs.

An attempt's number is claimed on storage before anything is saved under it. A trainer that comes back to its memory does not wait for that:
if the storage does not answer, the attempt begins in memory, and its saves wait until it is claimed.
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
"""For the storage to answer before an attempt begins in memory: well below the 30 s that an agent waits for `Began`."""


class Claims:
    """`lost(job, attempt)` is called when another daemon has claimed a job's number meanwhile; `attempt` is the one claimed instead."""

    def __init__(self, attempts: Attempts, seconds: float = CLAIM_SECONDS) -> None:
        self._attempts, self._seconds = attempts, seconds
        self.lost: Callable[[Job, int], None] = lambda job, attempt: None
        self._pending: dict[tuple[str, int], asyncio.Task[int]] = {}

    async def claim(self, job: Job, known: int) -> int:
        """Return the number of the next attempt, above `known`.

        Raises StorageError if it cannot be claimed, or if the storage does not answer and this daemon knows no attempt of the job.
        """
        task = asyncio.get_running_loop().create_task(self._attempts.claim(job.name, known))
        done, _ = await asyncio.wait([task], timeout=self._seconds)
        if done:
            return task.result()
        attempt = known + 1
        task.add_done_callback(lambda ended: self._ended(job, attempt, ended))
        if not known:
            raise StorageError(
                f"cannot claim an attempt of job {job.name!r}: the storage has not answered for {self._seconds:g} s, and nothing of this "
                "job is in memory",
                errno.ETIMEDOUT,
            )
        log.warning("job %s attempt %d begins in memory: the storage does not answer; it is saved once it does", job.name, attempt)
        self._pending[job.name, attempt] = task
        return attempt

    def _ended(self, job: Job, attempt: int, task: asyncio.Task[int]) -> None:
        if task.cancelled() or self._pending.get((job.name, attempt)) is not task:
            return
        if (error := task.exception()) is not None:
            log.error("job %s attempt %d: %s; the next save tries again", job.name, attempt, error)
            return
        del self._pending[job.name, attempt]
        if task.result() != attempt:
            log.error("job %s attempt %d: another daemon has claimed this number", job.name, attempt)
            self.lost(job, task.result())

    async def claimed(self, job: Job, attempt: int) -> None:
        """Wait until this attempt is claimed on storage. Raises StorageError if it cannot be, Fenced if another daemon was first."""
        task = self._pending.get((job.name, attempt))
        if task is None:
            return
        if task.done() and task.exception() is not None:
            task = self._pending[job.name, attempt] = asyncio.get_running_loop().create_task(self._attempts.claim(job.name, attempt - 1))
            task.add_done_callback(lambda ended: self._ended(job, attempt, ended))
        if await asyncio.shield(task) != attempt:
            raise Fenced(f"attempt {attempt} of job {job.name!r} was claimed by another daemon first: this run can no longer save")
