"""Measures what a directory can be used for as a POSIX root: its owner, its free space,
and the calls that ckptd needs.

The probe makes a scratch directory in that directory, and removes it again.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.shared.storage import locks
from ckptd.shared.system import owners
from ckptd.shared.system.fs import closing_at_end


@dataclass(frozen=True, slots=True)
class Probe:
    """The results for one directory.

    free: bytes that this user may still use. inodes: free inodes, or None if the file
    system has no limit. uid, mode: of the directory. stranger: the reason why its owner
    cannot be trusted, or "". ahead: seconds by which the clock of the file system is
    ahead of this node's. failures: the reason why a feature does not work, by the
    feature's name.
    """

    free: int
    inodes: int | None
    uid: int
    mode: int
    stranger: str
    ahead: float
    failures: dict[str, str] = field(default_factory=dict)


def probe(directory: Path) -> Probe:
    """Measure a directory that exists. Raises OSError if this user cannot write to it."""
    status, space = directory.stat(), os.statvfs(directory)
    scratch = Path(tempfile.mkdtemp(prefix=".ckptd-doctor-", dir=directory))
    try:
        return Probe(
            free=space.f_bavail * space.f_frsize,
            inodes=space.f_favail if space.f_files else None,
            uid=status.st_uid,
            mode=stat.S_IMODE(status.st_mode),
            stranger=owners.stranger(directory),
            ahead=_ahead(scratch / "clock"),
            failures={
                name: why for name, act in FEATURES.items() if (why := _failure(act, scratch))
            },
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _ahead(file: Path) -> float:
    """Return the seconds by which the clock that stamps a new file is ahead of this
    node's, or 0.0 if the file was stamped while it was made.
    """
    before = time.time()
    file.write_bytes(b"\0")
    stamped, after = file.stat().st_mtime, time.time()
    return min(stamped - before, 0.0) or max(stamped - after, 0.0)


def _failure(act: Callable[[Path], None], scratch: Path) -> str:
    try:
        act(scratch)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _direct(scratch: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC
    with (
        closing_at_end(os.open(scratch / "direct", flags, 0o600)) as fd,
        mmap.mmap(-1, 4096) as page,
    ):
        os.pwrite(fd, page, 0)


def _sync_directory(scratch: Path) -> None:
    with closing_at_end(os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


def _flock(scratch: Path) -> None:
    with (scratch / "flock").open("w") as one, (scratch / "flock").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise OSError(0, "a second lock was granted")


def _ofd_lock(scratch: Path) -> None:
    with (scratch / "ofd").open("w") as one, (scratch / "ofd").open("w") as other:
        if not locks.description_lock(one.fileno(), fcntl.F_WRLCK):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        if locks.description_lock(other.fileno(), fcntl.F_RDLCK):
            raise OSError(0, "a second lock was granted")


FEATURES: dict[str, Callable[[Path], None]] = {
    "O_DIRECT": _direct,
    "fsync of a directory": _sync_directory,
    "flock": _flock,
    "OFD locks": _ofd_lock,
}
"""The features by their names. Each function raises OSError in a scratch directory if
the feature does not work there.
"""
