"""A file descriptor that has one owner and is closed only once.

A plain integer does not say which code may close it. A second close hits any file that
has been given the number since, which may be another job's segment. Code that keeps a
descriptor longer than one function keeps it as a `Descriptor`.
"""

from __future__ import annotations

import io


class Descriptor(io.FileIO):
    """An open file descriptor.

    `Descriptor(fd)` takes over the descriptor `fd`, and `close` closes it.

    After `close`, `fileno` raises ValueError, and a second `close` does nothing.
    Construction runs in C, so that no signal handler can run between receiving a number
    and owning it.
    """

    def __del__(self) -> None:
        """Close the descriptor without Python's ResourceWarning, because the owner of a
        slot may be deleted without closing it.
        """
        self.close()
