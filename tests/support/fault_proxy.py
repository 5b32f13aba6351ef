"""A proxy in front of an object store that spoils chosen requests, as a store, a
network or a load balancer can.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("500", "503", "409", "412", "dropped", "lost answer", "truncated", "slow", "timeout")
"""500, 503, 409, 412: this answer, without the request being carried out. dropped: the
connection ends, and the request is not carried out. lost answer: the request is carried
out, and then the connection ends. truncated: half of the body of the answer comes.
slow: the answer comes after a moment. timeout: the answer comes after the client has
given up.
"""
SLOW_SECONDS = 0.05


@dataclass
class Proxy:
    """A running proxy.

    `fault` chooses the fault of a request by its number, its method and its path; "" is
    none.

    seen: the method and the path of each request, in order. timeout: seconds that the
    fault of this name takes.
    """

    port: int = 0
    timeout: float = 1.0
    fault: Callable[[int, str, str], str] = lambda number, method, path: ""
    seen: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, method: str, path: str) -> str:
        with self.lock:
            self.seen.append((method, path))
            number = len(self.seen) - 1
        return self.fault(number, method, path)

    def begin(
        self, fault: Callable[[int, str, str], str] = lambda number, method, path: ""
    ) -> None:
        """Count requests from 0 again, and choose their faults with `fault`."""
        with self.lock:
            self.seen, self.fault = [], fault


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """Run a proxy in front of the server on this port of 127.0.0.1."""
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            fault = proxy.choose(self.command, self.path)
            if fault == "dropped":
                self._end()
                return
            if fault.isdigit():
                self._answer(int(fault), [], b"")
                return
            try:
                status, headers, answer = _forward(
                    port, self.command, self.path, dict(self.headers.items()), body
                )
            except OSError:
                self._end()
                return
            if fault == "lost answer":
                self._end()
                return
            if fault == "timeout":
                time.sleep(proxy.timeout)
            if fault == "slow":
                time.sleep(SLOW_SECONDS)
            self._answer(status, headers, answer, cut=fault == "truncated")

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def _answer(
            self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False
        ) -> None:
            try:
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                length = next(
                    (value for name, value in headers if name.lower() == "content-length"),
                    str(len(body)),
                )
                self.send_header(
                    "Content-Length", length if self.command == "HEAD" else str(len(body))
                )
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if cut else body)
                self.wfile.flush()
                if cut and body:
                    self._end()
            except OSError:
                self.close_connection = True

        def _end(self) -> None:
            self.close_connection = True
            try:
                self.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *client: Any) -> None:
            """Say nothing of a client that has ended, as killed ones do."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _forward(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Make the request with the headers of the client, whose signature covers the name
    of the host.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()
