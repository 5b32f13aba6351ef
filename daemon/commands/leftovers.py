"""Finds what dead daemons have left on this node, shared memory and sockets, and
deletes it on request.

Segments are left on purpose: the next daemon of their root saves what is sealed in
them. They are litter only if no daemon will serve that root again.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptd.shared import names
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.segment import SlotState, read_header
from ckptd.shared.system import machine
from ckptd.shared.system.fs import closing_at_end

_DIRECTORY = re.compile(r"ckptd-\d+-[0-9a-f]{16}(\.[0-9a-f]{16})?")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory of segments, or a socket, that no daemon and no trainer uses.

    `owner` is the name of its user. `nbytes` is its size, None if it belongs to another
    user. `holds` says which snapshots are sealed in it, like "gpt step 5".
    """

    path: Path
    owner: str
    nbytes: int | None
    holds: tuple[str, ...] = ()


def find(shm_dir: Path) -> Iterator[Leftover]:
    """Yield the leftovers in the tmpfs `shm_dir`, of all users, and the sockets of this
    user on which nobody listens.
    """
    for path in sorted(shm_dir.iterdir()) if shm_dir.is_dir() else ():
        if _DIRECTORY.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            if path.stat().st_uid != os.geteuid():
                yield Leftover(path, _user(path.stat().st_uid), None)
            elif (found := _directory(path)) is not None:
                yield found
    sockets = (
        path
        for directory in machine.private_socket_directories()
        for path in sorted(directory.glob("ckptd-*.sock"))
    )
    for path in sockets:
        if path.is_socket() and not path.is_symlink() and not _listens(path):
            yield Leftover(path, machine.user(), 0)


def delete(leftover: Leftover) -> bool:
    """Delete a leftover of this user. Return False if it is in use meanwhile."""
    if leftover.path.is_socket():
        if _listens(leftover.path):
            return False
        leftover.path.unlink(missing_ok=True)
        return True
    with _opened(leftover.path) as directory:
        if not _lock(directory) or _in_use(directory):
            return False
        for name in os.listdir(directory):
            if names.is_segment_file(name):
                os.unlink(name, dir_fd=directory)
        with suppress(OSError):  # it holds other files
            os.rmdir(leftover.path)
        return True


def _opened(directory: Path) -> AbstractContextManager[int]:
    return closing_at_end(
        os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    )


def _directory(path: Path) -> Leftover | None:
    """Return a directory of this user as a leftover, or None if a daemon or a trainer
    uses it.
    """
    with _opened(path) as directory:
        if not _lock(directory) or _in_use(directory):
            return None
        nbytes, sealed = 0, set[tuple[str, int]]()
        for name in filter(names.is_segment_file, os.listdir(directory)):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            # A damaged segment, or one of another version, counts with its size.
            with closing_at_end(file) as fd, suppress(IntegrityError, OSError):
                nbytes += os.fstat(fd).st_blocks * 512
                header = read_header(fd)
                if header.state is SlotState.SEALED and header.step is not None:
                    sealed.add((header.job, header.step))
        return Leftover(
            path,
            machine.user(),
            nbytes,
            tuple(f"{job} step {step}" for job, step in sorted(sealed)),
        )


def _in_use(directory: int) -> bool:
    """Return True if a trainer holds its lock on a segment: it waits for the next
    daemon.
    """
    for name in filter(names.is_segment_file, os.listdir(directory)):
        file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        with closing_at_end(file) as fd:
            if not _lock(fd):
                return True
    return False


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # it may be busy
        return True


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
