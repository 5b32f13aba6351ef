"""Identifies the process at the other end of a connection: its number, its user, when
it started, and a pidfd to notice its death. Also tells whether a process is stopped.
"""

from __future__ import annotations

import errno
import os
import socket

import psutil

from ckptd.shared.system.owners import peer_of

SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5
NOTHING_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""The error numbers that say that descriptors or memory have run out."""
_NONE_LEFT = -2  # stands for the pidfd if no descriptor was left for it


class Peer:
    """The client of one connection.

    `pid` is 0 if the process cannot be seen from here, as in another container.
    """

    def __init__(self, client: socket.socket) -> None:
        self.pid, self.uid = peer_of(client)
        self._pidfd = _pidfd_of(client, self.pid)

    @property
    def lacks_descriptor(self) -> bool:
        """True if no descriptor was left to watch this process."""
        return self._pidfd == _NONE_LEFT

    def watch(self) -> int:
        """Return a new pidfd of the process, or -1 if it has none: it is dead, or the
        kernel is older than 5.3. Raises OSError.
        """
        return os.dup(self._pidfd) if self._pidfd >= 0 else -1

    def watch_if_possible(self) -> int:
        """Return a new pidfd of the process, or -1 if it has none, or if no descriptor is
        left.
        """
        try:
            return self.watch()
        except OSError:
            return -1

    def started(self) -> float:
        """Return when the process started, in Unix seconds, or 0.0 if that is not
        known.
        """
        try:
            return float(psutil.Process(self.pid).create_time()) if self.pid > 0 else 0.0
        except (psutil.Error, OSError):
            return 0.0

    def close(self) -> None:
        """Close the descriptor. May be called again."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __str__(self) -> str:
        return f"pid {self.pid}"


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal, or by a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OSError):
        return False


def _pidfd_of(client: socket.socket, pid: int) -> int:
    """Return a pidfd of the peer, -1 if the peer is dead or the kernel is older than
    5.3, or `_NONE_LEFT` if descriptors have run out.
    """
    try:
        return client.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        return _NONE_LEFT if error.errno in NOTHING_LEFT else -1
