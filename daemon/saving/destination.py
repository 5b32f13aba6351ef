"""Groups the parts that commit checkpoints to one repository and delete them there.

A daemon without a stage has one destination, the root. A daemon with a stage has two:
the stage, for jobs whose ranks are all on this node, and the root behind it, for jobs
of several nodes and for uploads.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from ckptd.daemon.chunks.pipeline import Pipeline
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.journal.journal import Journal
from ckptd.daemon.root.room import Room
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.saving.committer import Committer
from ckptd.daemon.saving.deleter import Deleter
from ckptd.shared.storage.repository import Repository


async def _is_open(job: Job) -> None:
    return None


class Destination:
    """A repository with its journal, what is known to be in it, and the threads that
    write to it.

    The threads are its own, so that a storage that hangs holds up no save to another
    one. `catalog` has the jobs with the checkpoints in this repository. `locks` has a
    lock for each job, which is held during each save and each deletion.
    """

    def __init__(
        self,
        config: Config,
        repository: Repository,
        journal: Journal,
        catalog: Catalog,
        calls: StorageCalls,
        pipeline: Pipeline,
        counters: Counter[str],
        tell: Callable[[Snapshot], None],
        ready: Callable[[Job], Awaitable[None]] = _is_open,
    ) -> None:
        """tell: sends the ranks the outcome of a save. ready: returns once a job may be
        saved here. Raises StorageError, OSError.
        """
        self.repository, self.journal, self.catalog, self.ready = (
            repository,
            journal,
            catalog,
            ready,
        )
        self.calls, self.pipeline = calls, pipeline
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.committer = Committer(config.codec, journal, repository, catalog, calls, tell)
        self.deleter = Deleter(config.retention, journal, repository, calls, self.locks, counters)
        self.room = Room(config, repository, calls)

    async def retain(self, name: str) -> None:
        """Apply retention to a job after a commit, and warn if only few more of its
        checkpoints fit. Raises JournalBroken, StorageError.
        """
        job = self.catalog.job(name)
        async with self.locks[name]:
            await self.deleter.retain(job)
        await self.room.warn(job)

    async def make_room(self, job: Job, needed: int) -> bool:
        """Delete an older checkpoint of a job here, for `needed` bytes.

        The caller holds its lock. Return False if there is none.
        """
        return await self.deleter.make_room(self.catalog.job(job.name), needed)
