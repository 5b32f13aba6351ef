"""Checks of ownership that protect sockets, the directories of sockets, the root
directory of checkpoints and the log of a daemon from the other users of a node.

The user of this process is trusted. The superuser (uid 0) is always trusted, too,
because the superuser can read and change everything anyway. All other users are not
trusted.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
import struct
from pathlib import Path

from ckptd.shared.errors import Forbidden

_UCRED = struct.Struct("iII")
_SUFFIX = re.compile(r"[0-9a-f]{16}")
_MOST_TRIES = 8


def is_trusted(uid: int, owner: int | None = None) -> bool:
    """Return True if `uid` is the user of this process, root, or this `owner`."""
    return uid in (os.geteuid(), 0, owner)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process number and the uid of the peer of a Unix socket, as the kernel
    recorded them (SO_PEERCRED).
    """
    pid, uid, _ = _UCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid


def check_peer(connection: socket.socket, path: Path, owner: int | None = None) -> None:
    """Check that the process that listens at `path` belongs to this user, to root or to
    this `owner`.

    Raises Forbidden if it does not.

    The kernel recorded the user when the process began to listen (unix(7),
    SO_PEERCRED). systemd listens as root for the sockets that it passes to a daemon.
    """
    _, uid = peer_of(connection)
    if not is_trusted(uid, owner):
        raise Forbidden(
            f"the process that listens at {path} belongs to uid {uid}, not to uid {os.geteuid()} "
            f"or root, and nothing was sent to it: "
            "name the socket of your own daemon with socket=, --socket or CKPTD_SOCKET"
        )


def check_socket(path: Path, owner: int | None = None) -> None:
    """Check that no other user owns the socket at `path` or can replace it.

    owner: a user who may. Raises Forbidden if one does. A missing socket passes.
    """
    for place in dict.fromkeys((path, Path(os.path.realpath(path)))):
        check_socket_directory(place, owner)
        try:
            uid = os.lstat(place).st_uid
        except OSError:
            continue  # connecting to it will fail with a better message
        if not is_trusted(uid, owner):
            raise Forbidden(
                f"the socket {place} belongs to uid {uid}, not to uid {os.geteuid()} or root, and "
                f"was not used: "
                "name the socket of your own daemon with socket=, --socket or CKPTD_SOCKET"
            )


def check_socket_directory(path: Path, owner: int | None = None) -> None:
    """Check the directory of the socket `path`, with all links resolved.

    Raises Forbidden if another user than this `owner` can replace the socket in it.

    A missing directory passes.
    """
    directory = os.path.realpath(path.parent)
    try:
        status = os.stat(directory)
    except OSError:
        return
    if not is_trusted(status.st_uid, owner):
        raise Forbidden(
            f"{directory} belongs to uid {status.st_uid}, who could replace the socket "
            f"{path.name} in it: "
            "use a socket in a directory of your own"
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise Forbidden(
            f"{directory} has mode {stat.S_IMODE(status.st_mode):o}, so that other users could "
            f"replace the socket {path.name} in it: "
            f"run `chmod go-w {directory}`, or use a socket in a directory with mode 700"
        )


def is_usable_for_sockets(directory: Path) -> bool:
    """Return True if `directory` exists and belongs to this user, and if no other user
    can replace a socket in it.
    """
    try:
        check_socket_directory(directory / "socket")
        return directory.is_dir() and directory.stat().st_uid == os.geteuid()
    except (Forbidden, OSError):
        return False


def stranger(
    path: str | Path, directory: int | None = None, called: str | Path | None = None
) -> str:
    """Return the reason why `path` cannot be trusted, or "" if it belongs to this user
    or root. Raises OSError.

    directory: an open descriptor to which `path` is relative. called: the name of the
    path in the reason.

    If `path` is a link, both the link and its target are checked. A directory of
    another uid counts as this user's if files that this process makes in it get the
    same uid: some file systems map owners, for example NFS with all_squash.
    """
    for follow in (False, True):
        uid = os.stat(path, dir_fd=directory, follow_symlinks=follow).st_uid
        if not is_trusted(uid) and not owns_new_files(path, directory, uid):
            return f"{called or path} belongs to uid {uid}, not to uid {os.geteuid()} or root"
    return ""


def owns_new_files(path: str | Path, directory: int | None, uid: int) -> bool:
    """Return True if a file that this process makes in the directory `path` belongs to
    `uid`. The file is removed at once.
    """
    name = f".ckptd-owner-{secrets.token_hex(8)}"
    try:
        place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return False
    try:
        made = os.open(
            name,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=place,
        )
        try:
            return os.fstat(made).st_uid == uid
        finally:
            os.close(made)
            os.unlink(name, dir_fd=place)
    except OSError:
        return False
    finally:
        os.close(place)


def open_log(path: Path) -> int:
    """Return a descriptor that appends to the log. The caller closes it.

    Raises OSError if the log cannot be opened or belongs to another user: that user
    could read the log, or make the daemon write elsewhere.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, or a FIFO without a reader
            raise OSError(f"{path} is not a regular file: remove it") from None
        raise
    status = os.fstat(fd)
    strange = not is_trusted(status.st_uid) and not owns_new_files(path.parent, None, status.st_uid)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or strange:
        os.close(fd)
        raise OSError(
            f"{path} is not a regular file of uid {os.geteuid()} without other hard links: remove "
            f"it"
        )
    return fd


# -- this user's directories at a well-known name, or beside it if another user has taken the name


def is_own_directory(path: Path) -> bool:
    """Return True if `path` is a directory of this user, is not a link, and gives no
    rights to other users.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


def own_directories(plain: Path) -> list[Path]:
    """Return this user's directories at the name `plain`, and at `plain` with a random
    suffix, in this order.
    """
    try:
        found = os.listdir(plain.parent)
    except OSError:
        found = []
    prefix = f"{plain.name}."
    suffixed = sorted(
        name
        for name in found
        if name.startswith(prefix) and _SUFFIX.fullmatch(name.removeprefix(prefix))
    )
    return [
        path
        for path in (plain, *(plain.parent / name for name in suffixed))
        if is_own_directory(path)
    ]


def own_directory(plain: Path) -> Path:
    """Return the path of the directory to use for the name `plain`, without making it.

    A directory of this user that exists already is taken first, then `plain` if that
    name is free, then `plain` with a new random suffix.
    """
    if is_own_directory(plain):
        return plain
    if found := own_directories(plain):
        return found[0]
    return (
        plain.with_name(f"{plain.name}.{secrets.token_hex(8)}") if os.path.lexists(plain) else plain
    )


def make_own_directory(plain: Path) -> Path:
    """Make the directory that `own_directory` names, with mode 0700, unless it exists.

    Return its path. Raises OSError.
    """
    for _ in range(_MOST_TRIES):  # another user may take the free name at the same moment
        path = own_directory(plain)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        if is_own_directory(path):
            return path
    raise PermissionError(
        f"a new directory beside {plain} does not belong to uid {os.geteuid()} with mode 700"
    )
