"""A blocking connection to the daemon: socket, session and descriptors. For the agent's client and for the command line.

Nothing is sent before it is certain that the daemon belongs to this user or to root: a process of another user that listens at the
expected path would otherwise get the tensors.

One thread may `send` while another `receive`s. Raises DaemonUnreachable when the other side is gone, or what its Error says.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from array import array
from collections import deque
from pathlib import Path

from ckptd.shared import __version__
from ckptd.shared import messages as m
from ckptd.shared import session as s
from ckptd.shared.descriptor import Descriptor
from ckptd.shared.errors import DaemonUnreachable, ProtocolError, from_wire
from ckptd.shared.owners import check_peer, check_socket

MAX_DESCRIPTORS = 64
_RECEIVE = 1 << 16
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05  # seconds between tries to connect
_FD = array("i")
_Received = tuple[bytes, list[tuple[int, int, bytes]], int, object]


class Channel:
    """Connected and greeted; `welcome` holds what the daemon said."""

    def __init__(self, path: Path, timeout: float, *, later: float | None = None) -> None:
        """Wait at most `timeout` seconds for the greeting, and `later` seconds for anything after it (None: for ever).

        Raises Forbidden, before anything is sent, if the daemon belongs to another user than this one and root.
        """
        check_socket(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._session = s.Session(s.Role.AGENT)
        self._descriptors: deque[Descriptor] = deque()
        self._received: deque[_Received] = deque()  # at most one, until its descriptors have owners
        self._sending = threading.Lock()
        self._next_id = 0
        self._socket.settimeout(timeout)
        try:
            self._connect(path, timeout)
            check_peer(self._socket, path)
            self.send(m.Hello(id=self.new_id(), min_version=s.MIN_VERSION, max_version=s.MAX_VERSION, client=f"ckptd {__version__}"))
            reply = self.receive()[0]
            if isinstance(reply, m.Error):
                raise from_wire(reply.code, reply.message)
            assert isinstance(reply, m.Welcome)
            self.welcome = reply
        except (FileNotFoundError, ConnectionRefusedError):
            self.close()
            raise DaemonUnreachable(f"no daemon listens at {path}: start one with `ckptd run --root DIR --socket {path}`") from None
        except TimeoutError:
            self.close()
            raise DaemonUnreachable(f"the daemon at {path} does not answer within {timeout:.0f} s") from None
        except OSError as error:
            self.close()
            raise DaemonUnreachable(f"cannot talk to the daemon at {path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise
        self._socket.settimeout(later)

    def _connect(self, path: Path, timeout: float) -> None:
        """Connect, and try again until `timeout` while the daemon's queue of new connections is full. Raises OSError."""
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while True:
            try:
                return self._socket.connect(str(path))
            except BlockingIOError:  # unix(7): connect does not wait for room in the queue when the socket has a timeout
                if time.monotonic() > deadline:
                    raise TimeoutError from None
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def send(self, message: m.Request) -> None:
        """Raises DaemonUnreachable, or ProtocolError if the message may not be sent now."""
        with self._sending:
            frame = self._session.send(message)
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise DaemonUnreachable(f"the daemon is gone: {error.strerror or error}") from None

    def wait(self) -> None:
        """Until there is something to receive, or the connection is over."""
        waiting = select.poll()
        try:
            waiting.register(self._socket, select.POLLIN)
        except ValueError:
            raise DaemonUnreachable("the connection is closed") from None
        waiting.poll()

    def receive(self, *, wait: bool = True) -> list[m.Message]:
        """At least one message; with `wait` false none if none is there. Descriptors that came along wait in `take`."""
        while True:
            space, wanted = (
                socket.CMSG_SPACE(MAX_DESCRIPTORS * _FD.itemsize),
                socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT),
            )
            try:  # one call in C: if Ctrl-C came between receiving and keeping, descriptors would be lost
                self._received.extend(map(self._socket.recvmsg, (_RECEIVE,), (space,), (wanted,)))
                # not recv_fds, which forgets the flags (cpython#107898)
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
                raise ProtocolError("the daemon sent more descriptors than this process may open")
            if not data:
                raise DaemonUnreachable("the daemon closed the connection")
            if messages := self._session.receive(data):
                return messages

    def take(self, count: int) -> list[Descriptor]:
        """The oldest `count` descriptors; the caller closes them. Raises ProtocolError if fewer came."""
        if len(self._descriptors) < count:
            raise ProtocolError(f"{count} descriptors were announced and {len(self._descriptors)} came")
        return [self._descriptors.popleft() for _ in range(count)]

    def end(self) -> None:
        """End the connection, from any thread. The thread that receives hears so, and is to call `close`: if another thread closed the
        socket, the receiving thread could wait for another file that has got its number."""
        self._session.close()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """End the connection and close everything that it holds. For the thread that receives."""
        self.end()
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: close this copy of the socket, and of descriptors that nobody has taken, without ending the parent's
        connection."""
        owned = {descriptor.fileno() for descriptor in self._descriptors}
        for _, control, _, _ in list(self._received):  # Ctrl-C came between
            for number in _numbers(control):
                if number not in owned:
                    os.close(number)
        self._received.clear()
        while self._descriptors:
            self._descriptors.popleft().close()
        self._socket.close()


def _numbers(control: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a message, as the kernel numbered them."""
    found: list[int] = []
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += array("i", data[: len(data) // _FD.itemsize * _FD.itemsize])
    return found
