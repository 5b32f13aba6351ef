"""Leases: whoever reads a checkpoint holds a shared lock on its manifest; whoever deletes it takes an exclusive one first.

The kernel gives a lock up when its holder dies, so that none is ever stale, and no clock is asked. Where a file system has no locks (flock
fails otherwise than with EWOULDBLOCK) a reader may be told that the checkpoint is gone, as after any deletion.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptd.shared import names
from ckptd.shared.errors import Busy, IntegrityError, NotFound
from ckptd.shared.fs import READ, open_regular
from ckptd.shared.storage import PosixStorage

_SECONDS, _LOOK_SECONDS = 3.0, 0.01
"""For which a reader waits for somebody who has the manifest locked."""


def lease(storage: PosixStorage, job: str, tag: str) -> int:
    """A descriptor; until it is closed, nobody deletes the checkpoint. Raises NotFound, IntegrityError, OSError."""
    until = time.monotonic() + _SECONDS
    while True:
        try:
            with storage.directory(job, tag) as directory:
                fd = open_regular(names.MANIFEST, directory)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"no checkpoint {job}/{tag} in {storage.root}") from None
        if _locked(fd, fcntl.LOCK_SH) and os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # somebody is about to delete it, or has only looked whether he could; or it was written over
        if time.monotonic() > until:
            raise NotFound(f"checkpoint {job}/{tag} in {storage.root} is being deleted")
        time.sleep(_LOOK_SECONDS)


def give_back(fd: int) -> None:
    """End a lease, also where a forked child still has the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        pass  # no locks here
    os.close(fd)


@contextmanager
def deletion(storage: PosixStorage, job: str, tag: str) -> Iterator[None]:
    """While it lasts nobody begins to read the checkpoint, if it is there. Raises Busy if somebody reads it; OSError."""
    try:
        with storage.directory(job, tag) as directory:
            fd = _to_lock(directory)
    except (FileNotFoundError, NotADirectoryError):
        fd = -1
    if fd < 0:
        yield
        return
    try:
        if not _locked(fd, fcntl.LOCK_EX):
            raise Busy(f"checkpoint {job}/{tag} is being read, or deleted, by somebody else")
        yield
    finally:
        os.close(fd)


def _to_lock(directory: int) -> int:
    """The manifest; -1 for what nobody can read as one. NFS locks only what may be written."""
    try:
        return open_regular(names.MANIFEST, directory, os.O_RDWR | READ)
    except PermissionError:
        return open_regular(names.MANIFEST, directory)
    except IntegrityError:
        return -1
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link
            raise
        return -1


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks here
    return True
