"""A file descriptor with one owner.

A plain integer says nothing about who may close it. Closing it twice closes whatever file has got the number since, which may be another
job's segment. Code that keeps a descriptor longer than one function keeps it as a `Descriptor`.
"""

from __future__ import annotations

import io


class Descriptor(io.FileIO):
    """An open descriptor. `Descriptor(fd)` takes it over; `fileno` raises ValueError once it is closed; a second `close` does nothing.

    It is made in C, so that no signal handler can run between receiving a number and owning it.
    """

    def __del__(self) -> None:
        """Close it with the object, without Python's warning: the owner of a slot may be gone without a word."""
        self.close()
