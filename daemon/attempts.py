"""Claims attempts of a job on storage, each by the exclusive create of a file (FORMAT.md, section 6).

A claim is durable before its number is used.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TypeVar

from ckptd.daemon.roots import foreign_job
from ckptd.daemon.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import NO_ROOM
from ckptd.shared.storage import PosixStorage

T = TypeVar("T")


class Attempts:
    """The attempts of one root that are claimed, each by an empty file. A number can be claimed once only, by one daemon."""

    def __init__(self, storage: PosixStorage, calls: StorageCalls) -> None:
        self._storage, self._calls = storage, calls
        self._created: set[tuple[str, int]] = set()  # claims that this process has created, but perhaps not synced: a retry may use them

    def newest(self, job: str) -> int:
        """Return the highest attempt among the job's claims and tag directories, or 0 if there is none. Raises OSError."""
        claimed = [0]
        try:
            with self._storage.directory(names.CONTROL, names.ATTEMPTS, job) as fd:
                claimed += [n for name in os.listdir(fd) if (n := names.parse_attempt_file(name)) is not None]
        except FileNotFoundError:
            pass
        tagged = [parsed[2] for tag in self._storage.tags(job) if (parsed := names.parse_tag_directory(tag))]
        return max(claimed + tagged)

    async def find_newest(self, job: str) -> int:
        """Run `newest` on a storage thread, and return its result. The caller may stop waiting at any time. Raises StorageError."""
        return await self._translated(job, lambda: self.newest(job))

    async def claim(self, job: str, attempt: int) -> bool:
        """Claim exactly this number, durably. Return False if another daemon has claimed it.

        Raises StorageError; the caller may then retry the same claim.
        """
        return await self._translated(job, lambda: self._claim(job, attempt))

    async def _translated(self, job: str, call: Callable[[], T]) -> T:
        try:
            return await self._calls.run(call)
        except OSError as error:
            raise StorageError.of(f"claim an attempt of job {job!r} under {self._storage.root}", error) from None

    def _claim(self, job: str, attempt: int) -> bool:
        fs = self._storage.fs
        if reason := foreign_job(self._storage, job):
            raise StorageError(reason)
        self._storage.ensure(names.CONTROL, names.ATTEMPTS, job)
        with self._storage.directory(names.CONTROL, names.ATTEMPTS, job) as fd:
            failpoint("attempt.claiming")
            if (job, attempt) not in self._created:
                try:
                    self._take(names.attempt_file(attempt), fd)
                except FileExistsError:
                    return False
                self._created.add((job, attempt))
            fs.sync_directory(fd)
            failpoint("attempt.claimed")
            self._created.discard((job, attempt))
            for name in os.listdir(fd):
                older = names.parse_attempt_file(name)
                if older is not None and older < attempt - 1:
                    fs.unlink(name, fd)
        return True

    def _take(self, claim: str, directory: int) -> None:
        """Create the file of a claim. If no inode is left, make the claim a hard link to an empty file that exists already.

        Raises FileExistsError if the number is claimed already, OSError if the file cannot be created.
        """
        fs = self._storage.fs
        try:
            fs.close(fs.create(claim, directory))
            return
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            no_room = error
        for other in sorted(name for name in os.listdir(directory) if names.parse_attempt_file(name) is not None):
            if self._link(other, directory, claim, directory):
                return
        with self._storage.directory(names.CONTROL, names.host()) as control:
            if self._link(names.LOCK, control, claim, directory):
                return
        raise no_room

    def _link(self, old: str, old_directory: int, claim: str, directory: int) -> bool:
        """Make the claim a hard link to `old`. Return False if `old` is not an empty regular file or cannot be linked.

        Raises FileExistsError if the number is claimed already.
        """
        try:
            found = os.stat(old, dir_fd=old_directory, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_size:
                return False
            self._storage.fs.link(old, old_directory, claim, directory)
        except FileExistsError:
            raise
        except OSError:  # the file is gone or has too many links, or the file system has no links
            return False
        return True
