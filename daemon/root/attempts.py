"""Claims attempts of a job on storage, on threads that may wait for a hung disk.

A claim is durable before its number is used (FORMAT.md, section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared.errors import InvalidRequest, StorageError
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine

T = TypeVar("T")


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
        self._repository, self._calls, self._stage = repository, calls, stage

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
        try:
            return await self._calls.run(call)
        except OSError as error:
            raise StorageError.of(
                f"claim an attempt of job {job!r} under {self._repository.where()}", error
            ) from None
