"""Claim attempts of a job: an exclusive create, durable before the number is used (FORMAT.md, section 6)."""

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
    """The claims of a root, as files. Each number is claimed once, by one daemon."""

    def __init__(self, storage: PosixStorage, calls: StorageCalls) -> None:
        self._storage, self._calls = storage, calls
        self._created: set[tuple[str, int]] = set()  # files that this process made; a sync of their directory may have failed

    def newest(self, job: str) -> int:
        """Return the highest attempt that storage knows of, by claims and by tag directories; 0 for none. Raises OSError."""
        claimed = [0]
        try:
            with self._storage.directory(names.CONTROL, names.ATTEMPTS, job) as fd:
                claimed += [n for name in os.listdir(fd) if (n := names.parse_attempt_file(name)) is not None]
        except FileNotFoundError:
            pass
        tagged = [parsed[2] for tag in self._storage.tags(job) if (parsed := names.parse_tag_directory(tag))]
        return max(claimed + tagged)

    async def find_newest(self, job: str) -> int:
        """Run `newest` on a storage thread. The caller may give up waiting. Raises StorageError."""
        return await self._translated(job, lambda: self.newest(job))

    async def claim(self, job: str, attempt: int) -> bool:
        """Claim exactly this number, durably. Return False if another daemon has it.

        Raises StorageError; the same claim may be tried again.
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
        """Create the claim, or link it to an empty file where no inode is left. Raises FileExistsError if it is taken, else OSError."""
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
        """Link the claim to an empty regular file; return False if that is not possible. Raises FileExistsError if the claim is taken."""
        try:
            found = os.stat(old, dir_fd=old_directory, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_size:
                return False
            self._storage.fs.link(old, old_directory, claim, directory)
        except FileExistsError:
            raise
        except OSError:  # it has too many names already, or the file system has no links
            return False
        return True
