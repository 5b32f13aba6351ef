"""A daemon that answers only what the test tells it to, for tests of the agent's side
of a connection.

It listens at a real socket and follows the real protocol session, on threads of the
test's own process. It answers Hello by itself. Every other request waits in
`Connection.requests` until the test takes and answers it.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from ckptd.agent.link.launch import Place
from ckptd.shared.wire import frames
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.session import Role, Session

Q = TypeVar("Q", bound=m.Request)
SECONDS = 60.0  # the patience of a test on a busy machine


class Connection:
    """The daemon's end of one connection.

    `requests` has the requests that the test has not taken yet.
    """

    def __init__(self, connected: socket.socket, welcome: m.Welcome) -> None:
        self._socket, self._welcome = connected, welcome
        self._session = Session(Role.DAEMON)
        self.requests: queue.Queue[m.Request] = queue.Queue()
        self.ended = threading.Event()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        try:
            while data := self._socket.recv(1 << 16):
                for message in self._session.receive(data):
                    if isinstance(message, m.Hello):
                        self.reply(msgspec.structs.replace(self._welcome, re=message.id))
                    else:
                        assert isinstance(message, m.Request)
                        self.requests.put(message)
        except OSError:
            pass
        self.ended.set()

    def next(self, kind: type[Q]) -> Q:
        """Wait for the next request, which must be of this type."""
        request = self.requests.get(timeout=SECONDS)
        assert isinstance(request, kind), request
        return request

    def reply(self, *replies: m.Reply | m.Notification, descriptors: Sequence[int] = ()) -> None:
        """Send replies in one piece, with copies of the descriptors."""
        self.send(b"".join(map(self._session.send, replies)), descriptors)

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send bytes, whatever the protocol says."""
        socket.send_fds(self._socket, [data], list(descriptors))

    def frame(self, reply: m.Reply | m.Notification) -> bytes:
        """Return the frame for a reply, without sending it."""
        return self._session.send(reply)

    def break_protocol(self, reply: m.Reply | m.Notification) -> None:
        """Send a reply that the protocol does not allow now."""
        self.send(frames.encode(m.encode(reply)))

    def attach(self, attempt: int = 1) -> None:
        """Wait for Begin, and answer it."""
        self.reply(m.Began(re=self.next(m.Begin).id, attempt=attempt))

    def hang_up(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class FakeDaemon:
    """The listening socket at `socket`, and the connections to it.

    `place` is where the agent's `Client` finds it.
    """

    def __init__(self, directory: Path, welcome: m.Welcome | None = None) -> None:
        self.socket = directory / "s"
        self.place = Place(self.socket, None, private=False)
        self.welcome = welcome or m.Welcome(re=0, version=1, root="/ckpts", stall_budget=5.0)
        self.connections: list[Connection] = []
        self._new: queue.Queue[Connection] = queue.Queue()
        self._listener: socket.socket | None = None
        self.listen()

    def listen(self) -> None:
        """Accept connections, again after `refuse`."""
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.socket))
        listener.listen(8)
        self._accepting = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._accepting.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            connection = Connection(accepted, self.welcome)
            self.connections.append(connection)
            self._new.put(connection)

    def refuse(self) -> None:
        """Accept no connection from now on, as a daemon that is dead."""
        if self._listener is not None:
            os.unlink(self.socket)
            self._listener.shutdown(socket.SHUT_RDWR)
            self._accepting.join()
            self._listener.close()
            self._listener = None

    def accepted(self) -> Connection:
        """Return the next connection, and wait for it if it is not there yet."""
        return self._new.get(timeout=SECONDS)

    def none_accepted(self) -> bool:
        return self._new.empty()

    def close(self) -> None:
        self.refuse()
        for connection in self.connections:
            connection.hang_up()
            connection._socket.close()


@contextmanager
def fake_daemon(welcome: m.Welcome | None = None) -> Iterator[FakeDaemon]:
    directory = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
    daemon = FakeDaemon(directory, welcome)
    try:
        yield daemon
    finally:
        daemon.close()
        shutil.rmtree(directory)
