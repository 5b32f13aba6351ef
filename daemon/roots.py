"""The root directory: makes it, checks its owner and locks it, before anything in it is read."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from ckptd.shared import names
from ckptd.shared.errors import Busy, StorageError
from ckptd.shared.fs import make_directories
from ckptd.shared.owners import stranger
from ckptd.shared.storage import PosixStorage

log = logging.getLogger("ckptd.roots")


def prepare(root: Path, storage: PosixStorage) -> tuple[str, ...]:
    """Make the root and the daemon's own directories in it. Return the parts of the journal directory's path below the root.

    Raises StorageError if a directory cannot be made, or belongs to a user other than this daemon's and root. A daemon that runs as
    root only logs a warning about the owner.
    """
    control = (names.CONTROL, names.host(), names.JOURNAL)
    try:
        make_directories(storage.fs, root)
        _check(root, "that user could replace checkpoints; use a directory of your own in it")
        for depth in range(len(control)):
            parts = control[: depth + 1]
            storage.ensure(*parts)
            _check(root.joinpath(*parts), "that user could replace the daemon's records; remove it, or use another root")
        _check_others(root / names.CONTROL)
        if os.stat(root).st_mode & 0o002:
            log.warning("every user of this node may write to the root %s: run `chmod o-w %s`", root, root)
    except OSError as error:
        raise StorageError.of(f"use {root} as the root for checkpoints", error) from None
    return control


def _check(path: Path, remedy: str) -> None:
    reason = stranger(path)
    if not reason:
        return
    if os.geteuid() != 0:
        raise StorageError(f"{reason}: {remedy}")
    log.warning("%s; it is used because this daemon runs as root, as in a container with a mounted root", reason)


def _check_others(control: Path) -> None:
    """Check the owners of all directories in the root's `.ckptd`, including those of claims, pins and other hosts. Raises StorageError."""
    for name in sorted(os.listdir(control)):
        if (control / name).is_dir():
            _check(control / name, "that user could replace the daemon's records; remove it, or use another root")


def foreign_job(storage: PosixStorage, job: str) -> str:
    """Return the reason why the directory of `job` cannot be used, or "" if it can. Raises OSError.

    A directory of another user cannot be used, because that user could replace the checkpoints in it. A daemon that runs as root uses it
    nevertheless, as `prepare` uses a root of another user.
    """
    if os.geteuid() == 0:
        return ""
    try:
        with storage.directory(job) as directory:
            reason = stranger(".", directory, storage.root / job)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return f"{reason}, who could replace checkpoints in it: use another job name or another root" if reason else ""


def lock(directory: int, root: Path) -> int:
    """Lock the root for one daemon of this host, and return the descriptor that holds the lock.

    directory: an open descriptor of this host's directory in the root. Raises Busy if another daemon holds the lock, StorageError if the
    lock file cannot be opened.
    """
    try:
        fd = os.open(names.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError as error:
        raise StorageError.of(f"use {root} as the root for checkpoints", error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Busy(f"another ckptd already serves {root}: use that one, or stop it first") from None
    except OSError as error:
        os.close(fd)
        raise StorageError.of(f"lock {root}, which keeps a second daemon out of it", error) from None
    return fd
