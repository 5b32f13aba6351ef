"""Creates, drops and sets aside the files in the journal's directory, and keeps a spare
file (FORMAT.md, section 7).

The spare is an allocated file that is kept in reserve, so that a new journal file can
be written on a full disk. `journal.py` decides on the content of the files.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress

from ckptd.daemon.journal import file as jf
from ckptd.shared import names
from ckptd.shared.errors import StorageError
from ckptd.shared.names import TMP_SUFFIX
from ckptd.shared.system.fs import NO_ROOM, FileSystem, closing_at_end

log = logging.getLogger("ckptd.journal")

SPARE = names.JOURNAL_SPARE


class JournalDirectory:
    """The directory of one journal, given as an open descriptor.

    Only one thread at a time may use it. All methods raise OSError.
    """

    def __init__(self, fs: FileSystem, directory: int) -> None:
        self._fs, self._directory = fs, directory

    def numbers(self) -> list[int]:
        """Return the numbers of all journal files in ascending order."""
        return sorted(
            n
            for name, _ in self._fs.entries(self._directory)
            if (n := names.parse_journal_file(name)) is not None
        )

    # -- the spare file, and files that are not needed any more

    @property
    def has_spare(self) -> bool:
        return self._fits(SPARE)

    def _fits(self, name: str) -> bool:
        """Return True if the file is fit to be the spare.

        It must be a regular file of `FILE_SIZE` bytes, and belong to the daemon's user
        or to the owner of the directory. It must have no second name, because it might
        be in use under that name.
        """
        try:
            found = self._fs.stat(name, self._directory)
        except FileNotFoundError:
            return False
        owners = (os.geteuid(), os.fstat(self._directory).st_uid)
        return (
            stat.S_ISREG(found.st_mode)
            and found.st_size == jf.FILE_SIZE
            and found.st_nlink == 1
            and found.st_uid in owners
        )

    def drop(self, name: str) -> bool:
        """Take away a file that is no longer needed: make it the spare if there is none
        and it is fit, otherwise delete it.

        Return False if the name belongs to a directory: ckptd did not make the
        directory, and it stays. The caller syncs the journal's directory.
        """
        if self._fits(name) and not self.has_spare:
            # If a directory that ckptd did not make has the name of the spare, the
            # journal works without a spare.
            with suppress(IsADirectoryError):
                self._fs.rename(name, SPARE, self._directory, replace=True)
                return True
        try:
            self.delete(name)
        except IsADirectoryError:
            log.warning(
                "%s in the journal's directory is a directory that ckptd did not make: it is left "
                "alone",
                name,
            )
            return False
        return True

    def drop_before(self, number: int) -> None:
        """Drop all journal files with lower numbers.

        File `number` must hold the whole state durably.
        """
        dropped = False
        for old, _ in self._fs.entries(self._directory):
            parsed = names.parse_journal_file(old.removesuffix(TMP_SUFFIX))
            if parsed is not None and parsed < number:
                dropped = self.drop(old) or dropped
        if dropped:
            # Otherwise each power cut could bring dropped files back, and they would
            # pile up.
            self._fs.sync_directory(self._directory)

    def delete(self, name: str) -> None:
        """Delete a file. Do nothing if it does not exist."""
        with suppress(FileNotFoundError):
            self._fs.unlink(name, self._directory)

    def make_spare(self) -> None:
        """Create the spare if there is none.

        A failure is only logged, because the journal works without a spare.
        """
        if self.has_spare:
            return
        temporary = SPARE + TMP_SUFFIX
        try:
            self.delete(temporary)
            self._fs.close(
                self._fill(
                    self._fs.create(temporary, self._directory, mode=0o600), b"", allocate=True
                )
            )
            self._fs.rename(temporary, SPARE, self._directory, replace=True)
            self._fs.sync_directory(self._directory)
        except OSError as error:
            log.warning(
                "%s: the journal has no spare file, so a full disk may stop it",
                StorageError.of("make a spare journal file", error),
            )
            with suppress(OSError):  # the next call deletes it
                self.delete(temporary)

    # -- a journal file

    def write_new(self, name: str, data: bytes, whole: int) -> int:
        """Create a file of `FILE_SIZE` bytes, `data` and then zeros, durably.

        Return its descriptor. On a full disk, use up the spare.

        whole: number of the newest file that holds the whole state, so that older files
        may become the spare; 0 if there is none.
        """
        try:
            return self._fill(
                self._fs.create(name, self._directory, mode=0o600), data, allocate=True
            )
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.drop(name)
            if not self.has_spare and whole:
                # The daemon that renamed that file may have died before it synced the
                # name.
                self._fs.sync_directory(self._directory)
                self.drop_before(whole)
            if not self.has_spare:
                raise
        log.warning("there is no room for a new journal file: the spare file is used")
        self._fs.rename(SPARE, name, self._directory, replace=True)
        # Sync before overwriting: the spare may once have been a journal file, and a
        # power cut must not bring back that name.
        self._fs.sync_directory(self._directory)
        return self.write_over(name, data)

    def write_over(self, name: str, data: bytes) -> int:
        """Overwrite a whole file in place with `data` and then zeros, durably.

        Return its descriptor.
        """
        fd = self._fs.open(name, self._directory, write=True)
        return self._fill(fd, data.ljust(jf.FILE_SIZE, b"\0"), allocate=False)

    def _fill(self, fd: int, data: bytes, *, allocate: bool) -> int:
        try:
            if allocate:
                self._fs.allocate(fd, jf.FILE_SIZE)
            self._fs.write(fd, data, 0)
            self._fs.sync(fd)
        except BaseException:
            self._fs.close(fd)
            raise
        return fd

    # -- damage

    def move_aside(self, name: str) -> None:
        """Rename a corrupt file, so that it is no longer a journal file and can still
        be examined.
        """
        self._fs.rename(
            name, f"{name}.corrupt.{secrets.token_hex(4)}", self._directory, replace=False
        )

    def copy_aside(self, name: str, data: bytes, suffix: str) -> bool:
        """Write damaged bytes to a file of their own.

        Return False if there is no room, because the daemon must start all the same.
        """
        copy = f"{name}{suffix}.{secrets.token_hex(4)}"
        try:
            with closing_at_end(self._fs.create(copy, self._directory), self._fs.close) as fd:
                self._fs.write(fd, data, 0)
                self._fs.sync(fd)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("journal %s: there is no room to keep a copy of the damaged bytes", name)
            self.delete(copy)
            return False
        return True

    def make_way(self, name: str) -> None:
        """Take away an unreadable journal file: make it the spare if there is none and
        it is fit, otherwise move it aside.
        """
        if self.has_spare or not self._fits(name):
            self.move_aside(name)
        else:
            self.drop(name)
