"""The page of a root for tests, served in this process, and a plain HTTP client for it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.daemon.commands.page_command import daemon_view
from ckptd.daemon.page.access import Access
from ckptd.daemon.page.server import PageServer

HOSTILE = "<img src=x onerror=\"document.title='taken'\">"
"""A name that a page which inserts it as markup would obey."""


@dataclass(frozen=True, slots=True)
class Served:
    """A page at a port of this machine."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, target: str, **headers: str) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as client:
            client.request("GET", target, headers=headers)
            answer = client.getresponse()
            return answer.status, answer.read()

    def json(self, target: str) -> Any:
        status, body = self.get(target)
        assert status == 200, body
        return json.loads(body)

    def connect(self, target: str = "/api/live", *, slow: bool = False) -> socket.socket:
        """Return a connection that has sent a request and has read nothing.

        slow: let the kernel keep little for it.
        """
        made = socket.socket()
        if slow:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.settimeout(60)
        made.connect(("127.0.0.1", self.port))
        made.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return made


def documents(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the documents of the live data. The answer must be a stream of events."""
    rest = bytearray()
    while data := connection.recv(1 << 16):
        rest += data
        if b"\n" not in data:
            continue
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        for line in lines:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
            else:
                assert not line.startswith(b"HTTP/1.1 ") or line == b"HTTP/1.1 200 OK\r"


@contextmanager
def page_of(
    root: Path, ask: Callable[[], Mapping[str, Any]], access: Access | None = None
) -> Iterator[Served]:
    """Serve the page of a root. `ask` returns the status of its daemon."""
    listener = socket.create_server(("127.0.0.1", 0))
    served = Served(listener.getsockname()[1])
    server = PageServer(listener, access or Access(), root, daemon_view(ask), root / "no-history")
    server.start()
    try:
        yield served
    finally:
        server.close()
