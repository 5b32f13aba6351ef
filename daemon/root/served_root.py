"""Checks that the daemon's root is still at its place, so that its snapshots and
attempts never go into another root.

`Vitals` notices a lost POSIX root within seconds. These checks close the gap, and are
the only ones for an object store, where nothing tells a daemon that the objects of its
root were deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.memory.foreign_memory import HeldSnapshot, described
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared.errors import ForeignMemory, IntegrityError, StorageError, storage_errors
from ckptd.shared.formats.segment import RootMark
from ckptd.shared.storage.repository import Repository

log = logging.getLogger("ckptd.root")

ANSWER_SECONDS = 3.0
"""The seconds that the storage has to answer before an attempt begins.

A root that does not answer counts as unchanged.
"""
AGAIN_SECONDS = 1.0
"""The seconds between two checks of a root that seems to be replaced.

A root may be replaced by a copy of itself in two steps, and is missing between them.
"""


class ServedRoot:
    """The root of one daemon.

    mark: its identity and its place. lost: called once the root is known to be gone.
    staged: True if there is a stage in front of the root. A root that is missing then
    counts as one that does not answer, because the daemon continues with the stage.
    """

    def __init__(
        self,
        repository: Repository,
        calls: StorageCalls,
        mark: RootMark,
        lost: Callable[[], None],
        *,
        staged: bool = False,
    ) -> None:
        self._repository = repository
        self._calls = calls
        self._mark = mark
        self._lost = lost
        self._staged = staged

    async def check(self, job: Job) -> None:
        """Check the root before a run of a job begins or recovers.

        If the root is gone or replaced, raises ForeignMemory if snapshots of the job
        are in memory, and StorageError otherwise.
        """
        try:
            found = await self._look(ANSWER_SECONDS)
        except (OSError, TimeoutError, IntegrityError, StorageError):
            return
        if found == self._mark.identity or (found is None and self._staged):
            return
        self._lost()
        newest = job.newest_in_memory()
        if newest is None:
            raise self._gone()
        raise ForeignMemory(
            described(
                HeldSnapshot(job.name, newest.attempt, newest.step, self._mark, 0),
                self._mark.place,
                found,
            )
        )

    async def check_before_save(self) -> None:
        """Check the root before a save writes to it.

        Waits for the answer without a timeout.

        Raises StorageError if the root is gone or replaced, or cannot be read.
        """
        with storage_errors(f"read the identity of the root {self._mark.place}"):
            found = await self._look(None)
        if found is None and self._staged:
            raise StorageError(f"there is no root at {self._mark.place}: is it mounted?")
        if found != self._mark.identity:
            self._lost()
            raise self._gone()

    async def _look(self, seconds: float | None) -> str | None:
        """Return the identity of the root that is there, or None if there is none.

        If it is not the right one, look a second time. If its file alone has vanished by
        then, it is written again, because every daemon and every trainer of this root
        would be refused without it. With a stage, nothing is written to a root that may
        not be mounted. Raises TimeoutError if an answer takes longer than `seconds`.
        """
        async with asyncio.timeout(seconds):
            found = await self._calls.run(self._repository.known_identity)
        if found == self._mark.identity or (found is None and self._staged):
            return found
        await asyncio.sleep(AGAIN_SECONDS)
        async with asyncio.timeout(seconds):
            return await self._calls.run(self._again)

    def _again(self) -> str | None:
        found = self._repository.known_identity()
        if found is None and not self._staged:
            found = self._repository.restore_identity(self._mark.identity)
            if found is not None:
                log.warning(
                    "the identity of the root %s had vanished, and is written again: %s",
                    self._mark.place,
                    found,
                )
        return found

    def _gone(self) -> StorageError:
        return StorageError(
            f"the root {self._mark.place} has been deleted, moved or replaced, and this daemon is "
            f"about to "
            "end: the next daemon serves the root that is there then"
        )
