"""Leases: a process that reads a checkpoint holds a shared lock on its manifest; a process that deletes it takes the exclusive one first.

The kernel releases a lock when its holder dies, so that none is ever stale, and no clock is asked. `locks.py` says why a process that may
only read the files cannot keep others from reading. Where a file system has no locks, a checkpoint may be deleted while it is read.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptd.shared import locks, names
from ckptd.shared.errors import Busy, IntegrityError, NotFound
from ckptd.shared.fs import READ, open_regular
from ckptd.shared.locks import release as give_back
from ckptd.shared.storage import PosixStorage

__all__ = ["deletion", "give_back", "holders", "lease"]


def lease(storage: PosixStorage, job: str, tag: str) -> int:
    """Return a descriptor that keeps the checkpoint from being deleted until `give_back` closes it.

    Raises NotFound; Busy if a deleter has the manifest locked for `locks.SECONDS`; IntegrityError, OSError.
    """
    until = time.monotonic() + locks.SECONDS
    while True:
        try:
            with storage.directory(job, tag) as directory:
                fd = open_regular(names.MANIFEST, directory)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"no checkpoint {job}/{tag} in {storage.root}") from None
        try:
            if locks.wait_to_share(fd, f"checkpoint {job}/{tag} in {storage.root}", until):
                return fd
            if time.monotonic() > until:
                raise Busy(f"checkpoint {job}/{tag} in {storage.root} cannot be read now: its manifest is replaced all the time; try again")
        except BaseException:
            give_back(fd)
            raise
        give_back(fd)  # the manifest was deleted or replaced before it was locked


@contextmanager
def deletion(storage: PosixStorage, job: str, tag: str) -> Iterator[None]:
    """Keep every reader from opening the checkpoint. Do nothing if it has no manifest.

    Raises Busy if another process reads or deletes it, or if its manifest may not be written; OSError.
    """
    fd = _open_to_lock(storage, job, tag)
    if fd < 0:
        yield
        return
    try:
        if not locks.exclude(fd):
            raise Busy(f"checkpoint {job}/{tag} is being read, or deleted, by {locks.holders(fd)}")
        yield
    finally:
        give_back(fd)


def holders(storage: PosixStorage, job: str, tag: str) -> str:
    """Name the processes that keep the checkpoint from being deleted. Return an empty string if none does. Raises Busy, OSError.

    This waits for another deleter, up to `locks.SECONDS`, and looks through the descriptors of all processes of the machine. The error of
    `deletion` does neither, since a daemon waits for it.
    """
    fd = _open_to_lock(storage, job, tag)
    if fd < 0:
        return ""
    until = time.monotonic() + locks.SECONDS
    try:
        while not locks.exclude(fd):
            if not os.fstat(fd).st_nlink:
                return ""
            if locks.share(fd) or time.monotonic() > until:  # no deleter has it, or one that takes too long
                locks.unlock(fd)
                found = locks.holders(fd, search=True)
                return "" if locks.exclude(fd) else found  # a reader may have ended meanwhile
            time.sleep(locks.RETRY_SECONDS)
        return ""
    finally:
        give_back(fd)


def _open_to_lock(storage: PosixStorage, job: str, tag: str) -> int:
    """Open the manifest for an exclusive lock, which needs the right to write. Return -1 if no reader can open it. Raises Busy, OSError."""
    try:
        with storage.directory(job, tag) as directory:
            try:
                return open_regular(names.MANIFEST, directory, os.O_RDWR | READ)
            except PermissionError:
                owner = os.stat(names.MANIFEST, dir_fd=directory, follow_symlinks=False).st_uid
    except (FileNotFoundError, NotADirectoryError, IntegrityError):
        return -1
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link
            raise
        return -1
    remedy = f"delete it as uid {owner}" if owner != os.geteuid() else "run `chmod u+w` on the manifest first"
    raise Busy(
        f"checkpoint {job}/{tag} cannot be deleted by uid {os.geteuid()}: its manifest belongs to uid {owner} and may not be written; "
        f"{remedy}"
    )
