"""Claims attempts of a job on storage, on threads that may wait for a hung disk.

A claim is durable before its number is used (FORMAT.md, section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptd.daemon.storage_calls import StorageCalls
from ckptd.shared.errors import StorageError
from ckptd.shared.storage.repository import Repository

T = TypeVar("T")


class Attempts:
    """The attempts of one root that are claimed. A number can be claimed once only, by one daemon."""

    def __init__(self, repository: Repository, calls: StorageCalls) -> None:
        self._repository, self._calls = repository, calls

    async def find_newest(self, job: str) -> int:
        """Return the highest attempt of a job, or 0. The caller may stop waiting at any time. Raises StorageError."""
        return await self._translated(job, lambda: self._repository.newest_attempt(job))

    async def claim(self, job: str, attempt: int) -> bool:
        """Claim exactly this number, durably. Return False if another daemon has claimed it.

        Raises StorageError; the caller may then retry the same claim.
        """
        return await self._translated(job, lambda: self._repository.claim(job, attempt))

    async def _translated(self, job: str, call: Callable[[], T]) -> T:
        try:
            return await self._calls.run(call)
        except OSError as error:
            raise StorageError.of(f"claim an attempt of job {job!r} under {self._repository.where()}", error) from None
