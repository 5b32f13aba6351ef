"""Shared and exclusive file locks: a process that may only read a file cannot use them
to keep others from reading it.

A lock here is an open file description lock and a flock on the same descriptor. The
kernel grants an exclusive open file description lock only on a descriptor that is open
for writing. It grants any flock on any descriptor. A refused flock therefore stops a
deleter, but it stops a reader only where the file system has no open file description
locks.

Nothing here waits, except `wait_to_share`, which has a deadline. FORMAT.md, section 6,
has the rules.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

from ckptd.shared.errors import Busy
from ckptd.shared.units import some_text

SECONDS = 30.0
"""Seconds that a reader waits for a deleter. A deleter holds its lock for a few fsyncs,
which take seconds on a slow disk.
"""
RETRY_SECONDS = 0.01
_NO_LOCKS = frozenset({errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""The error numbers of kernels and file systems that have no open file description
locks.
"""
_REFUSED = frozenset({errno.EAGAIN, errno.EACCES})
_MOST_NAMED = 5
_SEARCH_SECONDS = 5.0


def share(fd: int) -> bool:
    """Take the shared lock. Return False if another process holds the exclusive one.

    A refused flock counts only if the file system has no open file description locks.
    Any other error counts as "no locks here", because a lock must not keep a process
    from reading.
    """
    granted = description_lock(fd, fcntl.F_RDLCK)
    return granted is not False and (_flock(fd, fcntl.LOCK_SH) is not False or granted is True)


def exclude(fd: int) -> bool:
    """Take the exclusive lock.

    Return False if another process holds a shared or an exclusive one. `fd` must be
    open for writing.

    Raises OSError if the file system has open file description locks but fails to give
    this one: deleting without it would be a guess.
    """
    if description_lock(fd, fcntl.F_WRLCK) is False:
        return False
    if _flock(fd, fcntl.LOCK_EX) is False:
        unlock(fd)
        return False
    return True


def unlock(fd: int) -> None:
    """Release both locks, even if a forked child still has the descriptor."""
    with suppress(OSError):  # this file system may have no open file description locks
        _set(fd, fcntl.F_UNLCK)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def release(fd: int) -> None:
    """Release both locks and close the descriptor."""
    unlock(fd)
    os.close(fd)


def wait_to_share(fd: int, name: str, until: float | None = None) -> bool:
    """Take the shared lock, and wait for it while another process holds the exclusive
    one. Return False if the file has been unlinked.

    until: the deadline on the monotonic clock; None means `SECONDS` from now. Raises
    Busy after the deadline; `name` names the file in the error.
    """
    until = time.monotonic() + SECONDS if until is None else until
    while not share(fd):
        if not os.fstat(fd).st_nlink:
            return False
        if time.monotonic() > until:
            raise Busy(
                f"{name} cannot be read now: it has been locked for deletion for {SECONDS:.0f} s "
                f"by {holders(fd)}; try again later"
            )
        time.sleep(RETRY_SECONDS)
    return os.fstat(fd).st_nlink > 0


def description_lock(fd: int, kind: int) -> bool | None:
    """Set the open file description lock.

    Return True if it is granted, False if it is refused, None if this file can have
    none.

    For a shared lock, any other error counts as None. For an exclusive one, any other
    error is raised as OSError.
    """
    try:
        _set(fd, kind)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        if kind == fcntl.F_RDLCK or error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _set(fd: int, kind: int) -> None:
    whole_file = struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)  # struct flock of fcntl(2)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file)


def _flock(fd: int, kind: int) -> bool | None:
    """Set the flock.

    Return True if it is granted, False if it is refused, None after any other error.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# -- naming the holders


def holders(fd: int, *, search: bool = False) -> str:
    """Return the processes that hold a lock on this file, as text for an error: process
    number, command and user of each.

    search: if /proc/locks does not name every holder, look through the descriptors of
    all processes, too, which takes up to `_SEARCH_SECONDS`. The kernel keeps no process
    number for an open file description lock, so only the search finds its holder. The
    kernel shows the descriptors of another user's processes to root alone. If no
    process can be named, the text says so.
    """
    places = _places(fd)
    pids, unknown = _listed(places)
    if search and (unknown or not pids):
        pids += [pid for pid in _searched(places) if pid not in pids]
    named = [text for text in map(_process, pids) if text]
    if not named:
        return "a process that /proc does not show here (of another user, container or machine)"
    return some_text(named, _MOST_NAMED)


def _places(fd: int) -> set[str]:
    """Return the forms of `device:inode` under which /proc/locks may list the file.

    On btrfs and some other file systems, stat(2) gives another device number than the
    one in /proc/locks. The forms with the number in mountinfo are therefore added.
    """
    found = os.fstat(fd)
    devices = {f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"}
    mount = next(
        (
            line.split()[1]
            for line in _lines(f"/proc/self/fdinfo/{fd}")
            if line.startswith("mnt_id:")
        ),
        "",
    )
    for line in _lines("/proc/self/mountinfo"):
        fields = line.split()
        if fields[0] == mount:
            major, minor = map(int, fields[2].split(":"))
            devices.add(f"{major:02x}:{minor:02x}")
    return {f"{device}:{found.st_ino}" for device in devices}


def _listed(places: set[str]) -> tuple[list[int], bool]:
    """Return the processes that /proc/locks names for the file, and True if it also
    lists a lock without a living process.
    """
    pids: list[int] = []
    unknown = False
    for pid in _locks(_lines("/proc/locks"), places):
        # A child that shares a flock may outlive the process that took it.
        if pid <= 0 or not os.path.exists(f"/proc/{pid}"):
            unknown = True
        elif pid not in pids:
            pids.append(pid)
    return pids, unknown


def _locks(lines: Iterator[str], places: set[str]) -> Iterator[int]:
    """Yield the process number of each lock on the file; -1 for an open file
    description lock. Requests that still wait are left out.
    """
    for line in lines:
        fields = line.split()  # for example 1: OFDLCK ADVISORY READ -1 fe:00:1234 0 EOF
        if len(fields) >= 6 and fields[1] != "->" and fields[5] in places:
            yield int(fields[4])


def _searched(places: set[str]) -> Iterator[int]:
    """Yield the processes that have a descriptor with a lock on the file, as far as
    they are found within `_SEARCH_SECONDS`.
    """
    until = time.monotonic() + _SEARCH_SECONDS
    for pid in sorted(int(name) for name in _names("/proc") if name.isdigit()):
        if time.monotonic() > until:
            return
        for number in _names(f"/proc/{pid}/fdinfo"):
            lines = (
                line.removeprefix("lock:")
                for line in _lines(f"/proc/{pid}/fdinfo/{number}")
                if line.startswith("lock:")
            )
            if any(True for _ in _locks(lines, places)):
                yield pid
                break


def _process(pid: int) -> str:
    """Return a process as text, for example "pid 4711 (python, uid 1000)".

    Return an empty string if it has ended.
    """
    status = dict(
        line.split(":", 1)
        for line in _lines(f"/proc/{pid}/status")
        if line.startswith(("Name:", "Uid:"))
    )
    if not status:
        return ""
    command = "".join(
        letter if letter.isprintable() else "?" for letter in status.get("Name", "?").strip()
    )
    return f"pid {pid} ({command}, uid {status.get('Uid', '? ?').split()[0]})"


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, errors="replace") as file:
            yield from file
    except OSError:
        return
