"""Claim attempts of a job: an exclusive create, durable before the number is used (FORMAT.md, section 6)."""

from __future__ import annotations

import os

from ckptd.daemon.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.storage import PosixStorage


class Attempts:
    def __init__(self, storage: PosixStorage, calls: StorageCalls) -> None:
        self._storage, self._calls = storage, calls

    def newest(self, job: str) -> int:
        """The highest attempt that storage knows of, by claims and by tag directories; 0 for none. Raises OSError."""
        claimed = [0]
        try:
            with self._storage.directory(names.CONTROL, names.ATTEMPTS, job) as fd:
                claimed += [n for name in os.listdir(fd) if (n := names.parse_attempt_file(name)) is not None]
        except FileNotFoundError:
            pass
        tagged = [parsed[2] for tag in self._storage.tags(job) if (parsed := names.parse_tag_directory(tag))]
        return max(claimed + tagged)

    async def claim(self, job: str, known: int) -> int:
        """The next attempt, above `known` (what memory and journal say) and all that storage knows. Raises StorageError."""
        try:
            return await self._calls.run(lambda: self._claim(job, known))
        except OSError as error:
            raise StorageError.of(f"claim an attempt of job {job!r} under {self._storage.root}", error) from None

    def _claim(self, job: str, known: int) -> int:
        fs = self._storage.fs
        attempt = 1 + max(known, self.newest(job))
        self._storage.ensure(names.CONTROL, names.ATTEMPTS, job)
        with self._storage.directory(names.CONTROL, names.ATTEMPTS, job) as fd:
            failpoint("attempt.claiming")
            while True:
                try:
                    fs.close(fs.create(names.attempt_file(attempt), fd))
                    break
                except FileExistsError:
                    attempt += 1
            fs.sync_directory(fd)
            failpoint("attempt.claimed")
            for name in os.listdir(fd):
                older = names.parse_attempt_file(name)
                if older is not None and older < attempt - 1:
                    fs.unlink(name, fd)
        return attempt
