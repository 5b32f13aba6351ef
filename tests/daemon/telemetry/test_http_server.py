"""Tests the server with clients that send too much, too little or nothing, and with a
page that fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path

import pytest

from ckptd.daemon.telemetry import http_server
from ckptd.daemon.telemetry.http_answers import (
    MAX_HEAD_BYTES,
    EventStream,
    Page,
    Pages,
    parse_request,
)
from ckptd.daemon.telemetry.http_server import MAX_CLIENTS, HttpServer
from tests.support.daemons import until

REQUEST = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
Client = Callable[[], socket.socket]


@pytest.fixture
def pages() -> Pages:
    return {"/x": lambda: Page.of(HTTPStatus.OK, "y")}


@pytest.fixture
def connect(pages: Pages) -> Iterator[Client]:
    """Serve the pages, and return a function that connects a client."""
    with ExitStack() as held:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        server = HttpServer(listener, pages)
        server.start()
        held.callback(server.close)

        def client() -> socket.socket:
            return held.enter_context(socket.create_connection(address, timeout=60))

        yield client


def answer(client: socket.socket) -> bytes:
    """Return all that is received until the end."""
    with client.makefile("rb") as file:
        return file.read()


def test_a_request_in_pieces_is_answered_and_the_connection_ends(connect: Client) -> None:
    client = connect()
    for byte in REQUEST:
        client.sendall(bytes([byte]))
    found = answer(client)
    assert (found[:15], found[-6:]) == (b"HTTP/1.1 200 OK", b"\r\n\r\ny\n")


def test_a_request_that_is_too_long_is_refused(connect: Client) -> None:
    client = connect()
    client.sendall(b"GET /x HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * (MAX_HEAD_BYTES + 1))
    assert answer(client).startswith(b"HTTP/1.1 431 ")


def test_a_request_that_does_not_come_is_refused(
    monkeypatch: pytest.MonkeyPatch, connect: Client
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.1)
    client = connect()
    client.sendall(REQUEST[:-1])
    assert answer(client).startswith(b"HTTP/1.1 408 ")


def test_the_oldest_client_without_a_request_gives_way(connect: Client) -> None:
    waiting = [connect() for _ in range(MAX_CLIENTS)]
    for client in waiting:
        client.sendall(REQUEST[:-1])
    for gone in (waiting[0], waiting[1]):
        client = connect()
        client.sendall(REQUEST)
        assert answer(client).startswith(b"HTTP/1.1 200 ")
        assert answer(gone).endswith(b"\r\n\r\n16 clients are served already\n")
        waiting.append(connect())
        waiting[-1].sendall(REQUEST[:-1])
    waiting[-1].sendall(REQUEST[-1:])
    assert answer(waiting[-1]).startswith(b"HTTP/1.1 200 ")


def test_idle_clients_use_few_descriptors_and_keep_nobody_out(connect: Client) -> None:
    before = len(os.listdir("/proc/self/fd"))
    clients = [connect() for _ in range(20 * MAX_CLIENTS)]
    client = connect()
    client.sendall(REQUEST)
    assert answer(client).startswith(b"HTTP/1.1 200 ")
    of_server = len(os.listdir("/proc/self/fd")) - before - len(clients) - 1
    assert 0 < of_server <= MAX_CLIENTS + 1


def test_a_client_that_leaves_is_forgotten(connect: Client) -> None:
    for _ in range(2 * MAX_CLIENTS):
        connect().close()
    found = b" 503 "
    while b" 503 " in found:  # the ends of all these clients have not come yet
        client = connect()
        client.sendall(REQUEST)
        found = answer(client)
    assert found.startswith(b"HTTP/1.1 200 ")


class TestAPageThatFails:
    @pytest.fixture
    def pages(self) -> Pages:
        def divides() -> Page:
            return Page.of(HTTPStatus.OK, f"{1 / 0}")

        return {"/x": lambda: [][0], "/y": divides, "/z": lambda: Page.of(HTTPStatus.OK, "z")}

    def test_is_logged_again_after_a_while_and_another_failure_at_once(
        self,
        connect: Client,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        now = [100.0]
        monkeypatch.setattr(http_server, "_clock", lambda: now[0])
        for path, passed in ((b"/x", 0), (b"/y", 0), (b"/x", 59), (b"/y", 59), (b"/x", 60)):
            now[0] = 100.0 + passed
            client = connect()
            client.sendall(REQUEST.replace(b"/x", path))
            assert answer(client).startswith(b"HTTP/1.1 500 ")
        kinds = [r.exc_info[0] for r in caplog.records if r.name == "ckptd.http" and r.exc_info]
        assert kinds == [IndexError, ZeroDivisionError, IndexError]

    def test_is_logged_once_and_the_server_goes_on(
        self, connect: Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(2):
            client = connect()
            client.sendall(REQUEST)
            assert answer(client).startswith(b"HTTP/1.1 500 ")
        client = connect()
        client.sendall(REQUEST.replace(b"/x", b"/z"))
        assert answer(client).endswith(b"\r\n\r\nz\n")
        assert [r.levelno for r in caplog.records if r.name == "ckptd.http"] == [logging.ERROR]


def test_the_end_closes_the_socket(pages: Pages) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = HttpServer(listener, pages)
    server.start()
    waiting = socket.create_connection(address, timeout=60)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=60)
    waiting.close()


class Streaming(HttpServer):
    """A server that streams at /stream, and works without an end at any other path.

    `ended` has the paths whose work was cancelled.
    """

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener, {})
        self.ended = queue.Queue[str]()

    async def reply(self, head: bytes) -> bytes | EventStream:
        request = parse_request(head)
        assert not isinstance(request, Page)
        if request.path == "/stream":
            return EventStream(b"HTTP/1.1 200 OK\r\n\r\n", self._pieces())
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.put(request.path)
        return b""

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"first\n"
            yield b"second\n"
            await asyncio.Event().wait()
        finally:
            self.ended.put("/stream")


class TestWorkForAClient:
    @pytest.fixture
    def streaming(self) -> Iterator[tuple[Streaming, Client]]:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        server = Streaming(listener)
        server.start()
        yield server, lambda: socket.create_connection(address, timeout=60)
        server.close()

    @pytest.mark.parametrize("path", ["/stream", "/long"])
    def test_ends_when_the_client_leaves(
        self, streaming: tuple[Streaming, Client], path: str
    ) -> None:
        server, connect = streaming
        with connect() as client, connect() as other:
            other.sendall(REQUEST.replace(b"/x", b"/other"))
            client.sendall(REQUEST.replace(b"/x", path.encode()))
            client.sendall(b"more")
            assert path != "/stream" or client.recv(1) == b"H"
        assert {server.ended.get(timeout=60) for _ in range(2)} == {path, "/other"}

    def test_is_not_dropped_for_a_new_client(self, streaming: tuple[Streaming, Client]) -> None:
        _, connect = streaming
        with ExitStack() as held:
            clients = [held.enter_context(connect()) for _ in range(MAX_CLIENTS)]
            for client in clients:
                client.sendall(REQUEST.replace(b"/x", b"/stream"))
                assert client.recv(1) == b"H"
            refused = held.enter_context(connect())
            assert answer(refused).endswith(b"\r\n\r\n16 clients are served already\n")

    def test_pieces_of_a_stream_come_as_they_are_made(
        self, streaming: tuple[Streaming, Client]
    ) -> None:
        _, connect = streaming
        with connect() as client, client.makefile("rb") as file:
            client.sendall(REQUEST.replace(b"/x", b"/stream"))
            lines = [file.readline() for _ in range(4)]
        assert lines == [b"HTTP/1.1 200 OK\r\n", b"\r\n", b"first\n", b"second\n"]


class TestALargeAnswer:
    SIZE = 8 << 20

    @pytest.fixture
    def pages(self) -> Pages:
        return {"/x": lambda: Page.of(HTTPStatus.OK, "y" * self.SIZE)}

    def test_reaches_a_client_that_reads_slowly(
        self, connect: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.5)
        client = connect()
        client.sendall(REQUEST)
        received = 0
        while data := client.recv(1 << 19, socket.MSG_WAITALL):
            received += len(data)
            time.sleep(0.1)
        assert received > self.SIZE

    def test_is_cut_for_a_client_that_does_not_read(
        self, connect: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.1)
        client = connect()
        client.sendall(REQUEST)
        assert client.recv(1) == b"H"
        until(lambda: left(client), "end of the connection")


def left(client: socket.socket) -> bool:
    """Return whether the server has closed its socket of a client."""
    port = f":{client.getsockname()[1]:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    states = [fields[3] for line in lines if (fields := line.split())[2].endswith(port)]
    return "01" not in states
