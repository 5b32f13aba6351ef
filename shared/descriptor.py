"""A file descriptor with one owner.

A plain integer says nothing about who may close it. Closing it twice closes whatever file has got the number since, which may be another
job's segment. Code that keeps a descriptor longer than one function keeps it as a `Descriptor`.
"""

from __future__ import annotations

import errno
import os


class Descriptor:
    """An open file descriptor. `close` closes it once; any use after that raises OSError (EBADF) and touches no other file."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        """Take over `fd`: nobody else closes it from now on."""
        self._fd = fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def fileno(self) -> int:
        """Return the number. Raises OSError (EBADF) if the descriptor is closed."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "this descriptor has been closed")
        return self._fd

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"<Descriptor {'closed' if self.closed else self._fd}>"
