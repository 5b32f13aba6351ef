"""A file descriptor with one owner.

A plain integer says nothing about who may close it. Closing it twice closes whatever file has got the number since, which may be another
job's segment. Code that keeps a descriptor longer than one function keeps it as a `Descriptor`.
"""

from __future__ import annotations

import io

Descriptor = io.FileIO
"""An open descriptor: `Descriptor(fd)` takes it over, `fileno()` raises ValueError once it is closed, a second `close()` does nothing.

It is closed with the object, too. And it is made in C, so that no signal handler can run between receiving a number and owning it.
"""
