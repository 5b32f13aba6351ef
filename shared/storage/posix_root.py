"""Checks the owners of a POSIX root and of the directories in it, and locks the root
for one daemon.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ckptd.shared.errors import Busy, StorageError, storage_errors
from ckptd.shared.names import LOCK
from ckptd.shared.system import root_lock
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.owners import stranger

log = logging.getLogger("ckptd.storage")

RECORDS = "that user could replace the daemon's records; remove it, or use another root"
CHECKPOINTS = "that user could replace checkpoints; use a directory of your own in it"


def check_owner(path: Path, remedy: str) -> None:
    """Raise StorageError if a user other than this process's and root owns the path.

    A daemon that runs as root only logs a warning.
    """
    reason = stranger(path)
    if not reason:
        return
    if os.geteuid() != 0:
        raise StorageError(f"{reason}: {remedy}")
    log.warning(
        "%s; it is used because this daemon runs as root, as in a container with a mounted root",
        reason,
    )


def check_control(control: Path) -> None:
    """Check the owners of all directories in the root's `.ckptd`, including those of
    claims, pins and other hosts. Raises StorageError.
    """
    for name in sorted(os.listdir(control)):
        if (control / name).is_dir():
            check_owner(control / name, RECORDS)


def warn_if_open_to_all(root: Path) -> None:
    """Log a warning if every user may write to the root."""
    if os.stat(root).st_mode & 0o002:
        log.warning(
            "every user of this node may write to the root %s: run `chmod o-w %s`", root, root
        )


def refusal(directory: int, called: str) -> str:
    """Return the reason why the directory of a job cannot be used, or "" if it can.

    A directory of another user cannot be used, because that user could replace the
    checkpoints in it. A daemon that runs as root uses it nevertheless, as it uses a
    root of another user. `called` is the path of the directory. Raises OSError.
    """
    if os.geteuid() == 0:
        return ""
    reason = stranger(".", directory, called)
    return (
        f"{reason}, who could replace checkpoints in it: use another job name or another root"
        if reason
        else ""
    )


def lock(directory: int, root: Path, host: str) -> Descriptor:
    """Lock the root for one daemon of this host, and return the descriptor that holds
    the lock.

    directory: an open descriptor of the directory of `host` in the root. Raises Busy if
    another daemon holds the lock, StorageError if the lock file cannot be opened or
    locked.
    """
    with storage_errors(f"use {root} as the root for checkpoints"):
        fd = os.open(
            LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
        )
    try:
        taken = root_lock.take(fd)
    except OSError as error:
        os.close(fd)
        raise StorageError.of(
            f"lock {root}, which keeps a second daemon out of it", error
        ) from None
    if not taken:
        other = root_lock.holder(fd)
        os.close(fd)
        where = f", at {other.socket} (pid {other.pid})" if other.socket else ""
        raise Busy(
            f"another ckptd already serves {root}{where}, under the host name {host}: use that "
            f"one, or stop it first; if it runs on another node, give each node a name of its own"
        )
    return Descriptor(fd)
