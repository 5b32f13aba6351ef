"""Tests the page over its socket, with readers that are slow, many or gone."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.page import server as module
from ckptd.daemon.page.access import Access
from ckptd.daemon.page.document import document
from ckptd.daemon.telemetry import http_server
from ckptd.daemon.telemetry.http_answers import MAX_HEAD_BYTES
from ckptd.shared.errors import DaemonUnreachable
from tests.support.daemons import Daemon, until
from tests.support.page import Served, documents, page_of

TOKEN = "0123456789abcdef"
WELL: dict[str, Any] = {
    "ready": True, "event_loop_lag_seconds": 0.0, "disk_free_bytes": 1, "root": "/r",
    "descriptors": {"accepting_paused": ""}, "jobs": [], "history": None,
}  # fmt: skip


class Daemons:
    """A daemon that answers, with a large answer if `padding` is set."""

    def __init__(self) -> None:
        self.asked, self.padding = 0, ""

    def ask(self) -> dict[str, Any]:
        self.asked += 1
        return {**WELL, "padding": self.padding}


@pytest.fixture
def daemons() -> Daemons:
    return Daemons()


@pytest.fixture
def served(tmp_path: Path, daemons: Daemons) -> Iterator[Served]:
    with page_of(tmp_path, daemons.ask) as page:
        yield page


def test_a_daemon_is_shown_and_its_end_too(daemon: Daemon) -> None:
    with page_of(daemon.home.root, daemon.status) as page:
        with closing(page.connect()) as reader:
            live = documents(reader)
            first = next(live)
            assert (first["level"], first["status"]["root"]) == ("well", str(daemon.home.root))
            daemon.kill()
            while (found := next(live))["level"] != "silent":
                pass
        assert found["text"].startswith("The daemon does not answer. What is shown about it is ")
        assert found["status"]["pid"] == first["status"]["pid"]
        with closing(page.connect()) as reader:
            assert next(documents(reader))["level"] == "silent", "it is asked before it is shown"
        assert page.json("/api/jobs") == []


def test_twenty_readers_ask_the_daemon_once_a_second(served: Served, daemons: Daemons) -> None:
    begun = time.monotonic()
    readers = [served.connect() for _ in range(20)]
    for reader in readers:
        live = documents(reader)
        assert [next(live)["level"] for _ in range(2)] == ["well", "well"]
    most = time.monotonic() - begun + 1
    assert 2 <= daemons.asked <= most
    for reader in readers:
        reader.close()


def test_a_reader_that_never_reads_is_dropped_and_keeps_nobody_else_waiting(
    served: Served, daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped, closed = threading.Event(), http_server.HttpServer._closed

    def tell(server: http_server.HttpServer, task: asyncio.Task[None]) -> None:
        closed(server, task)
        dropped.set()

    monkeypatch.setattr(http_server.HttpServer, "_closed", tell)
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 1.0)
    daemons.padding = "x" * 400_000
    with closing(served.connect(slow=True)) as slow, closing(served.connect()) as quick:
        live = documents(quick)
        while not dropped.is_set():
            assert len(next(live)["status"]["padding"]) == 400_000
        received = 0
        while data := slow.recv(1 << 16):
            received += len(data)
        assert 0 < received < 400_000, "it was dropped before one document was sent"


def test_a_client_that_sends_nothing_is_dropped(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.1)
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=60)) as client:
        assert client.recv(12) == b"HTTP/1.1 408"


def test_a_huge_query_is_refused(served: Served) -> None:
    status, body = served.get(f"/api/checkpoints?job={'x' * MAX_HEAD_BYTES}")
    assert (status, body) == (431, b"a request may have at most 8192 bytes\n")


def test_more_clients_than_allowed_are_refused(
    tmp_path: Path, daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CLIENTS", 3)
    with page_of(tmp_path, daemons.ask) as page:
        readers = [page.connect() for _ in range(3)]
        for reader in readers:
            next(documents(reader))
        assert page.get("/") == (503, b"3 clients are served already\n")
        readers[0].close()
        until(lambda: page.get("/")[0] == 200, "client that is served")
        for reader in readers[1:]:
            reader.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.org"}, 403), ({"Origin": "http://evil.org"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403), ({}, 200),
    ],
)  # fmt: skip
def test_another_site_is_refused(served: Served, headers: dict[str, str], status: int) -> None:
    assert served.get("/api/jobs", **headers)[0] == status


def test_a_token_is_needed_once(tmp_path: Path, daemons: Daemons) -> None:
    with page_of(tmp_path, daemons.ask, Access(TOKEN, (), 1)) as page:
        assert [page.get(path)[0] for path in ("/", "/api/live", "/?token=wrong")] == [401] * 3
        assert page.get("/api/jobs", Authorization=f"Bearer {TOKEN}") == (200, b"[]")
        with closing(http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)) as client:
            client.request("GET", f"/?token={TOKEN}")
            cookie = client.getresponse().getheader("Set-Cookie")
        assert cookie is not None
        assert page.get("/", Cookie=cookie.partition(";")[0]) == (200, document())


def test_a_daemon_that_is_gone_leaves_the_checkpoints(tmp_path: Path) -> None:
    def ask() -> dict[str, Any]:
        raise DaemonUnreachable("no daemon at /s")

    (tmp_path / "gpt").mkdir()
    with page_of(tmp_path, ask) as page:
        with closing(page.connect()) as reader:
            found = next(documents(reader))
        assert (found["level"], found["text"]) == (
            "silent", "No daemon has answered yet: no daemon at /s",
        )  # fmt: skip
        assert page.json("/api/jobs") == ["gpt"]
        assert page.json("/api/history")["note"].startswith("there is no history ")
