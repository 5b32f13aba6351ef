"""Keeps a heartbeat in storage for each job whose rank 0 is on this node, while its
trainers live (FORMAT.md, section 6).

Nothing waits for a heartbeat, and nothing but a log line follows from one that cannot
be written. The writes have threads of their own, so that a storage that hangs takes no
thread from the saves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import aiofiles.os

from ckptd.daemon import log_events
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.ranks import NOT_KNOWN
from ckptd.daemon.tasks import watched
from ckptd.shared import names
from ckptd.shared.errors import CkptdError
from ckptd.shared.formats.heartbeat import Heartbeat
from ckptd.shared.formats.segment import this_boot
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.system import machine

log = logging.getLogger("ckptd.heartbeats")

T = TypeVar("T")

RENEWAL_SECONDS = 4.0
"""Seconds between two heartbeats: 15 small requests a minute for each job, whatever the
number of its ranks and nodes.
"""
RENEWALS_FOR_EACH_LOOK = 15
"""The number of heartbeats for each listing, which tells whether a newer attempt has
begun on another node: once a minute.
"""
END_SECONDS = 2.0
"""Seconds that a daemon which ends waits for the deletion of heartbeats. One that stays
costs the next run on another node a short wait.
"""
_THREADS = 4


class Heartbeats:
    """The heartbeats of one daemon, by job.

    `keep` begins one, which then ends by itself.
    """

    def __init__(self, store: HeartbeatStore, is_claimed: Callable[[Job, int], bool]) -> None:
        """is_claimed: returns True if this daemon has claimed an attempt durably.

        Before that, another daemon may write its heartbeat.
        """
        self._store, self._is_claimed = store, is_claimed
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptd-storage-heartbeat")
        self._tasks: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        # Heartbeats of dead runs, which the next heartbeat of the job replaces.
        self._dead: dict[str, Collection[int]] = {}

    def keep(self, job: Job, dead: Collection[int] = ()) -> None:
        """Keep a heartbeat of the newest attempt of the job from now on, as long as it
        has rank 0 and living ranks here. Idempotent.

        dead: attempts whose heartbeats are those of dead runs. They are deleted.
        """
        if dead:
            self._dead[job.name] = dead
        kept = self._tasks.get(job.name)
        if (kept is None or kept[1].done()) and _is_alive(job):
            # An error is a bug, which is logged. It must not end the daemon, because no
            # snapshot needs a heartbeat.
            self._tasks[job.name] = (
                job,
                watched(
                    self._keep(job), f"keeping the heartbeat of job {job.name}", lambda error: None
                ),
            )

    def resume(self, jobs: Iterable[Job]) -> None:
        """Keep the heartbeats that an earlier daemon of this node kept, for the
        trainers that still live.
        """
        for job in jobs:
            self.keep(job)

    async def _keep(self, job: Job) -> None:
        while _is_alive(job):
            await self._keep_attempt(job, job.attempt)
        self._tasks.pop(job.name, None)

    async def _keep_attempt(self, job: Job, attempt: int) -> None:
        """Keep the heartbeat of one attempt until it is over or its ranks have left."""
        loop, last = asyncio.get_running_loop(), None
        count, wanted, failing = 0, True, False

        def is_over() -> bool:
            return job.attempt != attempt or not _is_alive(job)

        while not is_over():
            due = loop.time() + RENEWAL_SECONDS
            try:
                if wanted and self._is_claimed(job, attempt):
                    last = _heartbeat(
                        job,
                        attempt,
                        last or await self._run(partial(self._read, job.name, attempt)),
                    )
                    await self._run(partial(self._store.publish, last))
                    if dead := set(self._dead.pop(job.name, ())) - {attempt}:
                        await self._run(partial(self._store.delete, job.name, dead))
                    # At first, because two runs may begin at the same time.
                    if count % RENEWALS_FOR_EACH_LOOK == 0 and not is_over():
                        wanted = not await self._is_replaced(job, attempt)
                    count += 1
                if failing:
                    log.info("job %s: the heartbeat of attempt %d is kept again", job.name, attempt)
                failing = False
            except (OSError, CkptdError) as error:
                if not failing:
                    log.warning(
                        "job %s: the heartbeat of attempt %d cannot be kept, so that a second run "
                        "on another node would not be refused: %s",
                        job.name, attempt, error,
                    )  # fmt: skip
                failing = True
            await job.changed.wait_until(is_over, due - loop.time())
        with suppress(OSError, CkptdError):  # a heartbeat that stays is found dead later
            await self._run(lambda: self._store.delete(job.name, [attempt]))

    def _read(self, job: str, attempt: int) -> Heartbeat | None:
        """Return the heartbeat that an earlier daemon has written for this attempt, or
        None. It knows the process of rank 0.
        """
        data = self._store.read(job, attempt)
        return None if data is None else Heartbeat.decode(data, job, attempt)

    async def _is_replaced(self, job: Job, attempt: int) -> bool:
        """Look for a heartbeat of a newer attempt.

        If there is one, delete the heartbeat of this attempt, which is no longer the
        newest.
        """
        newer = [
            number
            for number in await self._run(lambda: self._store.attempts(job.name))
            if number > attempt
        ]
        if not newer:
            return False
        log_events.RUN_REPLACED.log(
            log, "job %s: attempt %d has begun on another node, while attempt %d is running here: "
            "both save, and the newest attempt is recovered; stop one of the two, or give it "
            "another job name", job.name, newer[-1], attempt,
            job=job.name, attempt=attempt, newer=newer[-1],
        )  # fmt: skip
        await self._run(lambda: self._store.delete(job.name, [attempt]))
        return True

    async def _run(self, call: Callable[[], T]) -> T:
        result: T = await aiofiles.os.wrap(call)(executor=self._pool)
        return result

    async def close(self) -> None:
        """Wait a moment for the heartbeats of trainers that have ended, and stop.

        Those of living trainers stay for the next daemon.
        """
        kept = list(self._tasks.values())
        ending = [task for job, task in kept if not task.done() and not _is_alive(job)]
        if ending:
            await asyncio.wait(ending, timeout=END_SECONDS)
        for _, task in kept:
            task.cancel()
        await asyncio.gather(*(task for _, task in kept), return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _is_alive(job: Job) -> bool:
    """Return True if this node has rank 0 of the newest attempt, and a rank of it is
    alive here.
    """
    return bool(job.ranks.owners) and (job.node is None or job.node.leads)


def _heartbeat(job: Job, attempt: int, before: Heartbeat | None) -> Heartbeat:
    """Return the next heartbeat.

    After a restart of the daemon, the process is that of the heartbeat before until a
    rank reconnects.
    """
    process = next(
        (
            owner.process
            for _, owner in sorted(job.ranks.owners.items())
            if owner.process != NOT_KNOWN
        ),
        None,
    )
    if process is None and before is not None:
        return before.again()
    process = process or NOT_KNOWN
    return Heartbeat(
        job=job.name, attempt=attempt, run=process.run, host=machine.host(), boot=this_boot().hex(),
        pid=process.pid, since=process.started, beat=names.new_nonce().hex(),
    )  # fmt: skip
