"""The daemon's listening sockets: makes them where no other user can replace them, or
takes the one for clients over from systemd.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from ckptd.daemon.http_address import HttpAddress
from ckptd.daemon.process import notify
from ckptd.shared.errors import Busy, CkptdError, InvalidConfig, StorageError
from ckptd.shared.location import Location
from ckptd.shared.system import machine
from ckptd.shared.system.owners import check_socket_directory, own_directory

BACKLOG = 4096
"""Connections that may wait to be accepted. The kernel lowers the number to
net.core.somaxconn.
"""
_HTTP_BACKLOG = 16
_PROBE_SECONDS = 5.0


def listen(path: Path) -> tuple[socket.socket, bool]:
    """Return the listening socket, and True if this daemon has made the socket's file
    and must remove it.

    A socket that systemd has passed is taken, whatever `path` is. Raises Busy if
    another daemon listens at `path`, StorageError if the socket cannot be made there,
    and Forbidden if another user could replace it.
    """
    passed = notify.passed_socket()
    if passed is not None:
        return passed, False
    return _listen_at(path, "--socket"), True


class Door:
    """The socket that clients connect to: `listener` accepts them at `path`.

    Its file may vanish while the daemon runs: the system removes the runtime directory of
    a user at the last logout, and cleaners remove old files in /tmp. `mend` then listens
    again. root: the root of the daemon, whose private socket is the way out if the
    directory is gone.
    """

    def __init__(self, path: Path, root: Location) -> None:
        """Raises what `listen` raises."""
        self._named, self._root = path, root
        self.listener, self._ours = listen(path)
        self.path = Path(self.listener.getsockname())
        self._status = _status(self.path)

    def mend(self) -> bool:
        """Listen again if the file of the socket is gone: where it was, or at the private
        socket of the root if that directory is gone. Return to the first place once its
        directory is back.

        Return True if there is a new listener; the caller closes the old one. Raises
        CkptdError if clients cannot connect, and no place for a socket is found.
        """
        here = _status(self.path) == self._status
        if here and (not self._ours or os.path.lexists(self._named)):
            return False
        problem: CkptdError | None = None
        for place in (self._named, *([] if here else self._others())):
            try:
                if place == self._named and not place.parent.is_dir():
                    raise StorageError(f"{place.parent} is gone")
                listener = _listen_at(place, "--socket")
            except CkptdError as error:
                problem = problem or error
                continue
            if here:
                self.path.unlink(missing_ok=True)
            self.listener, self.path = listener, place
            self._ours = True
            self._status = _status(place)
            return True
        if not here and problem is not None:
            raise problem
        return False

    def _others(self) -> Iterator[Path]:
        yield machine.private_socket(self._root)
        name = machine.private_socket(self._root).name
        yield own_directory(machine.plain_directory()) / name

    def close(self) -> None:
        """Close the socket, and remove its file if this daemon has made it."""
        self.listener.close()
        if self._ours and _status(self.path) == self._status:
            self.path.unlink(missing_ok=True)


def _status(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def listen_for_http(address: HttpAddress) -> socket.socket:
    """Return a socket that listens at the address of the metrics.

    Raises Busy if another process listens there, InvalidConfig or StorageError if the
    socket cannot be made, and Forbidden if another user could replace it.
    """
    if address.path is not None:
        return _listen_at(address.path, "--http")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with ExitStack() as held:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            held.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
            listener.listen(_HTTP_BACKLOG)
        except OSError as error:
            raise _cannot_listen(address, error) from None
        held.pop_all()
    return listener


def _cannot_listen(address: HttpAddress, error: OSError) -> CkptdError:
    if error.errno == errno.EADDRINUSE:
        return Busy(
            f"another process listens at {address}: name another port with --http, or stop it first"
        )
    hint = ""
    if error.errno == errno.EAFNOSUPPORT:
        hint = " (a unit of systemd may forbid it with RestrictAddressFamilies)"
    return InvalidConfig(
        f"cannot listen at {address}: {error.strerror}{hint}; name another address with --http"
    )


def _listen_at(path: Path, flag: str) -> socket.socket:
    """Return a socket that listens at `path`, which the setting `flag` names.

    Raises what `listen` raises.
    """
    listener = socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_socket_directory(path)
        _remove_dead(path, flag)
        mask = os.umask(0o077)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _taken(path) from None
        raise StorageError.of(f"listen at {path}", error) from None
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path, flag: str) -> None:
    """Remove the socket that a dead daemon of this user has left at `path`, and nothing
    else.

    Raises Busy if a process listens there, and StorageError if the file is not a socket
    of this user.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise StorageError(
            f"cannot listen at {path}: a file that is not a socket has this name and was left "
            f"alone; name another {flag}"
        )
    if status.st_uid != os.geteuid():
        raise StorageError(
            f"cannot listen at {path}: this socket belongs to uid {status.st_uid}, not to uid "
            f"{os.geteuid()}, and was left alone; "
            f"name another {flag}"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):
            pass  # the queue of new connections is full, so a process listens there
    raise _taken(path)


def _taken(path: Path) -> Busy:
    return Busy(f"another ckptd listens at {path}: name another socket, or stop it first")
