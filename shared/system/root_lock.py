"""Names the daemon that holds the lock of a root. The lock decides whether there is one,
and the text in the lock file is a hint that says where it listens.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptd.shared import names
from ckptd.shared.errors import Forbidden, storage_errors
from ckptd.shared.location import Location
from ckptd.shared.system import machine
from ckptd.shared.system.fs import closing_at_end
from ckptd.shared.system.owners import own_directories

_TRIES, _PAUSE = 10, 0.01
_MOST = 4096
"""The most bytes of a hint that are read."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The daemon that holds the lock of a root.

    pid, socket: the hint of the daemon, or 0 and None if it has written none: it is
    starting, it is of an older version, or the disk is full. uid: the owner of the lock.
    """

    pid: int
    socket: Path | None
    uid: int


def take(fd: int) -> bool:
    """Take the exclusive lock of a lock file, and clear the hint of an earlier daemon.

    Return False if another process holds it. A process that only looks whether the lock
    is held has it for a moment, and is waited for. Raises OSError.
    """
    for number in range(_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if number + 1 < _TRIES:
                time.sleep(_PAUSE)
            continue
        os.ftruncate(fd, 0)
        return True
    return False


def write_hint(fd: int, socket: Path) -> None:
    """Write where this process, which holds the lock, listens. Raises OSError."""
    text = json.dumps({"pid": os.getpid(), "socket": os.fsdecode(socket)}).encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def holder_of(root: Location) -> LockHolder | None:
    """Return the daemon that holds the lock of a root on this host, or None.

    Raises Forbidden if only another user could tell, and StorageError if the file system
    of the root does not.
    """
    for path in lock_files(root):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if (own := _unsearchable(path)) is not None:
                raise Forbidden(
                    f"uid {os.geteuid()} has no permission to search {own}, which it owns, and "
                    f"cannot see whether a daemon serves {root}: run `chmod u+rwx "
                    f"{shlex.quote(str(own))}`"
                ) from None
            raise Forbidden(
                f"uid {os.geteuid()} may not look whether a daemon of {_named(path)} serves "
                f"{root}, which may hold snapshots in memory only: run this command as that user "
                f"or as root"
            ) from None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link, which no daemon has made
                continue
            with storage_errors(f"read {path}"):
                raise
        with closing_at_end(fd):
            if _is_held(fd):
                return holder(fd)
    return None


def lock_files(root: Location) -> Iterator[Path]:
    """Yield the files that the daemon of a root on this host may have locked."""
    if isinstance(root, Path):
        yield root.resolve() / names.control(machine.host()) / names.LOCK
        return
    plain = machine.plain_directory()
    directories = own_directories(plain)
    if os.geteuid() == 0:  # the lock of each user's daemon is in a directory of that user
        directories = sorted({*directories, *plain.parent.glob("ckptd-[0-9]*")})
    for directory in directories:
        yield directory / object_lock(machine.root_digest(root), machine.host())


def object_lock(digest: str, host: str) -> str:
    """Return the name of the local lock for a root in an object store."""
    return f"{names.LOCK}-{digest}-{host}"


def may_hold(pid: int) -> bool:
    """Return True if a process has the lock file of a root open, or if this user may not
    see its files. Asks no file system of a root, because it may hang.
    """
    directory = f"/proc/{pid}/fd"
    try:
        files = os.listdir(directory)
    except PermissionError:
        return True
    except OSError:  # the process has ended
        return False
    for file in files:
        with suppress(OSError):
            path = Path(os.readlink(f"{directory}/{file}").removesuffix(" (deleted)"))
            if path.name.startswith(f"{names.LOCK}-") or path.parts[-3:] == (
                names.CONTROL,
                path.parent.name,
                names.LOCK,
            ):
                return True
    return False


def owner_of(root: Location) -> int | None:
    """Return the user whose daemons serve a root on this host: the owner of its lock.
    None if there is no lock, or it cannot be seen.
    """
    for path in lock_files(root):
        with suppress(OSError):
            return path.lstat().st_uid
    return None


def _unsearchable(path: Path) -> Path | None:
    """Return the directory above a path that this user owns and may not search, or None."""
    for directory in reversed(path.parents):
        if not os.access(directory, os.X_OK):
            with suppress(OSError):
                return directory if directory.lstat().st_uid == os.geteuid() else None
    return None


def _named(path: Path) -> str:
    try:
        return f"uid {path.lstat().st_uid}"
    except OSError:
        return "another user"


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def holder(fd: int) -> LockHolder:
    """Return what the daemon that holds this lock file has written into it."""
    uid = os.fstat(fd).st_uid
    try:
        found = json.loads(os.pread(fd, _MOST, 0))
        return LockHolder(int(found["pid"]), Path(found["socket"]), uid)
    except (ValueError, TypeError, LookupError):
        return LockHolder(0, None, uid)
