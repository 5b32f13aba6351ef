"""Groups the components that commit checkpoints to one repository and delete them
there.

A daemon without a stage has one destination, the root. A daemon with a stage has two:
the stage, for jobs whose ranks are all on this node, and the root behind it, for jobs
of several nodes and for uploads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from ckptd.daemon import log_events
from ckptd.daemon.chunks.pipeline import Pipeline
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.stored_checkpoint import LITTLE_ROOM
from ckptd.daemon.journal.journal import Journal
from ckptd.daemon.root.served_root import ServedRoot
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.saving.committer import Committer
from ckptd.daemon.saving.deleter import Deleter
from ckptd.daemon.saving.root_quota import RootQuota
from ckptd.shared.storage.repository import Repository
from ckptd.shared.units import size_text

log = logging.getLogger("ckptd.saver")


async def _is_open(job: Job) -> None:
    return None


class Destination:
    """A repository with its journal, what is known to be in it, and the threads that
    write to it.

    The threads are its own, so that a storage that hangs holds up no save to another
    one. `catalog` has the jobs with the checkpoints in this repository. `locks` has a
    lock for each job, which is held during each save and each deletion. `ready` returns
    once a job may be saved here, and raises StorageError or OSError. On a stage,
    `evict` deletes a local copy, and returns False if there is none that may go. On the
    root, it is None, and `served` checks that the root is still there.
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
        events: Events,
        served: ServedRoot | None = None,
    ) -> None:
        self.repository, self.journal = repository, journal
        self.catalog, self.calls = catalog, calls
        self.pipeline, self.counters = pipeline, counters
        self.ready: Callable[[Job], Awaitable[None]] = _is_open
        self.evict: Callable[[Job], Awaitable[bool]] | None = None
        self.served = served
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.committer = Committer(config.codec, journal, repository, catalog, calls, events)
        self.deleter = Deleter(config.retention, journal, repository, calls, self.locks, counters)
        self.quota = RootQuota(config.root_quota, shared=repository.storage.shares_links)
        self._events = events
        self._may_delete_early = config.make_room
        self._fit: dict[str, int] = {}  # how many more checkpoints fit, by job; at most LITTLE_ROOM

    async def retain(self, name: str) -> None:
        """Apply retention to a job after a commit, and warn if only few more of its
        checkpoints fit. Raises JournalBroken, StorageError.
        """
        job = self.catalog.job(name)
        async with self.locks[name]:
            await self.deleter.retain(job)
        await self._warn_of_room(job)
        self.watch_quota(name)

    def watch_quota(self, name: str) -> None:
        """Warn if this is the root, and a commit of the job has exceeded its quota."""
        if self.served is not None and (text := self.quota.watch(self.catalog.jobs.values())):
            log_events.QUOTA_EXCEEDED.log(log, "%s", text, job=name, quota_bytes=self.quota.quota)
            self._events.remark(name, text)

    async def _warn_of_room(self, job: Job) -> None:
        """Warn if only few more checkpoints like the newest fit, each time their number
        has become smaller.
        """
        free = await self.calls.run(self.repository.storage.free)
        room = job.room_for(free)
        fit = LITTLE_ROOM if room is None else min(LITTLE_ROOM, room)
        if fit < self._fit.get(job.name, LITTLE_ROOM):
            text = self.remark(job, fit, free)
            log_events.ROOM_LITTLE.log(log, "%s", text, job=job.name, fit=fit, free_bytes=free)
            self._events.remark(job.name, text)
        self._fit[job.name] = fit

    def remark(self, job: Job, fit: int, free: int | None) -> str:
        """Return a warning that only `fit` more checkpoints fit into the `free` bytes
        under the root, or "" if that is enough.
        """
        if fit >= LITTLE_ROOM:
            return ""
        then = (
            "the oldest ones are then deleted early"
            if self._may_delete_early
            else "delete some (`ckptd forget`), keep fewer (keep_last), or set make_room, "
            "which then deletes the oldest ones early"
        )
        return (
            f"job {job.name}: the root has room for {fit} more of its checkpoints "
            f"({size_text(free or 0)} free): {then}"
        )

    async def finish_deletion(self, place: str) -> None:
        """Finish a deletion that an earlier daemon has begun, given its job and tag as
        `job/tag`. Raises StorageError, OSError.
        """
        name, tag = place.split("/")
        await self.deleter.finish(self.catalog.job(name), tag)
