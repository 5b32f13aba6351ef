"""A blocking connection to the daemon that carries messages and descriptors; the agent
and the command line use it.

Nothing is sent until the daemon is known to belong to this user or to root. Otherwise a
process of another user that listens at the expected path would get the tensors.

One thread may call `send` while another calls `receive`. Both raise DaemonUnreachable
once the connection is lost.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from array import array
from collections import deque
from contextlib import suppress
from pathlib import Path

from ckptd.shared import __version__
from ckptd.shared.errors import DaemonUnreachable, ProtocolError, from_wire
from ckptd.shared.system import machine
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.owners import check_peer, check_socket
from ckptd.shared.wire import messages as m
from ckptd.shared.wire import session as s

MAX_DESCRIPTORS = 253
"""The most descriptors that the kernel passes with one message (SCM_MAX_FD of unix(7)).
A Fetched reply has one for each local rank.
"""
_RECEIVE = 1 << 16
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05  # seconds between two tries to connect
_FD = array("i")
_Received = tuple[bytes, list[tuple[int, int, bytes]], int, object]


class NoDaemon(DaemonUnreachable):
    """Raised if there is no daemon, and not only none that answers."""


def no_daemon(path: Path) -> NoDaemon:
    """Return the error for a socket on which no daemon of this node listens."""
    return NoDaemon(
        f"no daemon listens at {path} on {machine.host()}: start one with `ckptd run --root DIR "
        f"--socket {path}`"
    )


class Channel:
    """A connection on which the daemon has answered the greeting.

    `path` is the socket, and `welcome` the answer, with the settings of the daemon.
    """

    def __init__(
        self, path: Path, timeout: float, *, later: float | None = None, owner: int | None = None
    ) -> None:
        """Connect to the daemon's socket at `path`, and exchange the greeting.

        timeout: seconds to wait for the connection, and again for each send or receive
        of the greeting. later: the seconds for each send or receive after the greeting;
        None waits for ever. owner: a user whose daemon is trusted, too.

        Raises Forbidden, before anything is sent, if the daemon belongs to a user other
        than this one, root and `owner`. Raises DaemonUnreachable if no daemon listens or
        answers, and ProtocolError if the answer breaks the protocol. If the daemon
        answers with an Error, raises the exception for it.
        """
        self.path, self.owner = path, owner
        check_socket(path, owner)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._session = s.Session(s.Role.AGENT)
        self._descriptors: deque[Descriptor] = deque()
        # At most one result of recvmsg, until each of its descriptors has an owner.
        self._received: deque[_Received] = deque()
        self._sending = threading.Lock()
        self._next_id = 0
        self._socket.settimeout(timeout)
        try:
            self._connect(path, timeout)
            check_peer(self._socket, path, owner)
            # A daemon that has no room sends an Error and closes, maybe before it can
            # get a Hello.
            with suppress(DaemonUnreachable):
                client, known = f"ckptd {__version__}", [s.STAGE, s.WAITING, s.REMARKS, s.PEERS]
                self.send(
                    m.Hello(
                        id=self.new_id(),
                        min_version=s.MIN_VERSION,
                        max_version=s.MAX_VERSION,
                        features=known,
                        client=client,
                    )
                )
            reply = self.receive()[0]
            if isinstance(reply, m.Error):
                raise from_wire(reply.code, reply.message)
            assert isinstance(reply, m.Welcome)
            self.welcome = reply
        except (FileNotFoundError, ConnectionRefusedError):
            self.close()
            raise no_daemon(path) from None
        except TimeoutError:
            self.close()
            raise DaemonUnreachable(
                f"the daemon at {path} does not answer within {timeout:.0f} s"
            ) from None
        except OSError as error:
            self.close()
            raise DaemonUnreachable(
                f"cannot talk to the daemon at {path}: {error.strerror or error}"
            ) from None
        except BaseException:
            self.close()
            raise
        self._socket.settimeout(later)

    def _connect(self, path: Path, timeout: float) -> None:
        """Connect.

        Retry for `timeout` seconds while the daemon's queue of new connections is full.
        Raises OSError.
        """
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while True:
            try:
                return self._socket.connect(str(path))
            except (
                BlockingIOError
            ):  # a socket with a timeout does not wait for room in the queue (connect(2), EAGAIN)
                if time.monotonic() > deadline:
                    raise TimeoutError from None
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def new_id(self) -> int:
        """Return the next request id: higher than every id before it on this
        connection.
        """
        self._next_id += 1
        return self._next_id

    def send(self, message: m.Request) -> None:
        """Send a request.

        Raises DaemonUnreachable if the connection is lost, ProtocolError if the session
        does not allow it now.
        """
        with self._sending:
            frame = self._session.send(message)
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise DaemonUnreachable(f"the daemon is gone: {error.strerror or error}") from None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until data arrives or the connection ends, and return True, or return
        False after so many seconds. None waits for ever.

        Raises DaemonUnreachable if this end is closed.
        """
        waiting = select.poll()
        try:
            waiting.register(self._socket, select.POLLIN)
        except ValueError:
            raise DaemonUnreachable("the connection is closed") from None
        return bool(waiting.poll(None if seconds is None else seconds * 1000))

    def receive(self, *, wait: bool = True) -> list[m.Message]:
        """Return the messages that have arrived, at least one.

        With `wait` false, return an empty list if none is complete.

        Descriptors that came with the messages are kept for `take`. Raises
        DaemonUnreachable if the connection is lost or the daemon does not answer in
        time. Raises ProtocolError if a message breaks the protocol, or if this process
        could not receive all descriptors.
        """
        while True:
            space, wanted = (
                socket.CMSG_SPACE(MAX_DESCRIPTORS * _FD.itemsize),
                socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT),
            )
            # One call in C, because Ctrl-C between receiving and storing descriptors
            # would leak them.
            try:
                self._received.extend(map(self._socket.recvmsg, (_RECEIVE,), (space,), (wanted,)))
                # socket.recv_fds is not used, because it ignores its flags
                # (cpython#107898)
            except BlockingIOError:
                return []
            except TimeoutError:
                raise DaemonUnreachable("the daemon does not answer") from None
            except OSError as error:
                raise DaemonUnreachable(f"the daemon is gone: {error.strerror or error}") from None
            data, control, flags, _ = self._received[0]
            self._descriptors.extend(map(Descriptor, _numbers(control)))
            self._received.clear()
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError(
                    "the daemon sent more file descriptors than this process may open: raise the "
                    "limit of open files of this process (ulimit -n)"
                )
            if not data:
                raise DaemonUnreachable("the daemon closed the connection")
            if messages := self._session.receive(data):
                return messages

    def take(self, count: int) -> list[Descriptor]:
        """Return the oldest `count` descriptors that were received.

        The caller must close them. Raises ProtocolError if there are fewer.
        """
        if len(self._descriptors) < count:
            raise ProtocolError(
                f"the daemon announced {count} descriptors, and {len(self._descriptors)} have "
                f"arrived"
            )
        return [self._descriptors.popleft() for _ in range(count)]

    def end(self) -> None:
        """End the connection.

        Any thread may call this; the receiving thread notices the end and must then
        call `close`.

        No other thread may close the socket: the receiving thread could then wait for
        another file that has been given its number.
        """
        self._session.close()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and close the socket and all descriptors that were not
        taken. Only the receiving thread may call this.
        """
        self.end()
        self.abandon()

    def abandon(self) -> None:
        """Close the socket and all descriptors that were not taken, without ending the
        connection.

        A forked child calls this: its parent keeps using the connection.
        """
        owned = {descriptor.fileno() for descriptor in self._descriptors}
        # Received, but Ctrl-C came before all descriptors had an owner.
        for _, control, _, _ in list(self._received):
            for number in _numbers(control):
                if number not in owned:
                    os.close(number)
        self._received.clear()
        while self._descriptors:
            self._descriptors.popleft().close()
        self._socket.close()


def _numbers(control: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the numbers of the descriptors in the control messages of one recvmsg."""
    found: list[int] = []
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += array("i", data[: len(data) // _FD.itemsize * _FD.itemsize])
    return found
