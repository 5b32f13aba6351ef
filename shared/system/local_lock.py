"""A lock by which processes of one user on one machine keep one another out, where the
thing itself cannot be locked.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckptd.shared.system import machine, root_lock
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.owners import make_own_directory


class LocalLock(Descriptor):
    """An open and locked file in this user's directory in /tmp.

    `close` deletes the file; the kernel unlocks it if the process dies.

    In a forked child `close` leaves the file, because the parent still has the lock.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        )
        self._path, self._pid = path, os.getpid()

    @classmethod
    def take(cls, name: str) -> LocalLock | None:
        """Return the lock of this name, or None if another process, or another part of
        this one, has it. Raises OSError.
        """
        path = make_own_directory(machine.plain_directory()) / name
        while True:
            lock = cls(path)
            if not root_lock.take(lock.fileno()):
                Descriptor.close(lock)
                return None
            if os.fstat(lock.fileno()).st_nlink:
                return lock
            Descriptor.close(lock)  # its holder has just ended, and has deleted the file

    def close(self) -> None:
        if not self.closed and os.getpid() == self._pid:
            with suppress(FileNotFoundError):
                self._path.unlink()
        super().close()
