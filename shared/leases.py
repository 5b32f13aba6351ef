"""Leases: locks on the manifest that keep a checkpoint from being deleted while a process reads it.

A process that reads a checkpoint holds a shared lock on the manifest. A process that deletes the checkpoint first takes the exclusive
lock. The kernel releases a lock when its holder dies, so no lease is ever stale, and no clock is needed. `locks.py` says why a process
that may only read the files cannot keep others from reading. Where a file system has no locks, a checkpoint may be deleted while it is
read.
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
    """Return a descriptor of the manifest that keeps the checkpoint from being deleted until `give_back` closes it.

    Raises NotFound if there is no checkpoint, and IntegrityError if the manifest is not a regular file. Raises Busy if a deleter holds
    its lock, or if the manifest is replaced again and again, for `locks.SECONDS`. Raises OSError if the manifest cannot be opened.
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
    """Context manager. While it is held, no reader can open the checkpoint. It does nothing if there is no manifest that can be read.

    Raises Busy if another process reads or deletes the checkpoint, or if this user may not write the manifest. Raises OSError if the
    manifest cannot be opened or locked.
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
    """Return the processes that keep the checkpoint from being deleted, as text. Return an empty string if none does.

    This waits up to `locks.SECONDS` for another deleter, and looks through the descriptors of all processes of the machine. `deletion`
    does neither when it names the processes in its error, because a daemon waits for it. Raises Busy if this user may not write the
    manifest, OSError if it cannot be opened or locked.
    """
    fd = _open_to_lock(storage, job, tag)
    if fd < 0:
        return ""
    until = time.monotonic() + locks.SECONDS
    try:
        while not locks.exclude(fd):
            if not os.fstat(fd).st_nlink:
                return ""
            if locks.share(fd) or time.monotonic() > until:  # only readers hold the lock, or a deleter has held it for too long
                locks.unlock(fd)
                found = locks.holders(fd, search=True)
                return "" if locks.exclude(fd) else found  # the last reader may have ended during the search
            time.sleep(locks.RETRY_SECONDS)
        return ""
    finally:
        give_back(fd)


def _open_to_lock(storage: PosixStorage, job: str, tag: str) -> int:
    """Open the manifest for writing, as an exclusive lock requires. Return -1 if there is no manifest that a reader can open.

    Raises Busy if this user may not write the manifest, OSError if it cannot be opened for another reason.
    """
    try:
        with storage.directory(job, tag) as directory:
            try:
                return open_regular(names.MANIFEST, directory, os.O_RDWR | READ)
            except PermissionError:
                owner = os.stat(names.MANIFEST, dir_fd=directory, follow_symlinks=False).st_uid
    except (FileNotFoundError, NotADirectoryError, IntegrityError):
        return -1
    except OSError as error:
        if error.errno != errno.ELOOP:  # a symbolic link, which no reader follows
            raise
        return -1
    remedy = f"delete it as uid {owner}" if owner != os.geteuid() else "run `chmod u+w` on the manifest first"
    raise Busy(
        f"checkpoint {job}/{tag} cannot be deleted by uid {os.geteuid()}: its manifest belongs to uid {owner} and may not be written; "
        f"{remedy}"
    )
