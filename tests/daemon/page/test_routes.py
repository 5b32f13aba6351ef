"""Tests the answers of the page without sockets: what is refused, and in which words."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.page import routes as module
from ckptd.daemon.page.access import Access
from ckptd.daemon.page.checkpoints import Checkpoints
from ckptd.daemon.page.document import document, policy
from ckptd.daemon.page.feed import DaemonView, Feed
from ckptd.daemon.page.routes import Routes
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import VERSION, History
from ckptd.daemon.telemetry.http_answers import EventStream
from ckptd.shared.errors import NotFound


class Answers:
    """The answers for a root that has a history."""

    def __init__(self, root: Path, calls: StorageCalls) -> None:
        self.root, self.history = root, root / "history.sqlite3"
        self.checkpoints = Checkpoints(root)
        view = DaemonView(lambda: {"jobs": []}, lambda status: [], lambda status: "it is")
        feed = Feed(view, calls.pool, lambda: 0)
        self.history_file: Path | None = self.history
        self.routes = Routes(Access(), feed, self.checkpoints, lambda: self.history_file, calls)

    async def reply(self, target: str, method: str = "GET") -> bytes | EventStream:
        head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        return await self.routes.reply(head.encode())

    async def get(self, target: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
        found = await self.reply(target, method)
        assert isinstance(found, bytes)
        head, _, body = found.decode().partition("\r\n\r\n")
        first, *rest = head.split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body


@pytest.fixture
async def answers(tmp_path: Path) -> AsyncIterator[Answers]:
    (tmp_path / "gpt").mkdir()
    calls = StorageCalls(60.0)
    yield Answers(tmp_path, calls)
    calls.close()


async def test_every_answer_has_the_policy(answers: Answers) -> None:
    for target in ("/", "/nothing", "/api/jobs", "/api/live"):
        _, headers, _ = await answers.get(target, "HEAD")
        assert headers["Content-Security-Policy"] == policy()
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


async def test_the_page_is_at_the_root_alone(answers: Answers) -> None:
    status, headers, body = await answers.get("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body.encode() == document()
    for path in ("/index.html", "//", "/api", "/../etc/passwd", "/%2e%2e/etc/passwd", "/api/../"):
        assert (await answers.get(path))[::2] == (
            404, "there is no such page; the page is at /\n",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("/api/checkpoints", 400, "expected job= in the query"),
        ("/api/checkpoints?job=..", 400, "job '..' cannot be a name: "),
        ("/api/checkpoints?job=%2e%2e%2f%2e%2e", 400, "job '../..' cannot be a name: "),
        ("/api/checkpoints?job=gtp", 404, "there is no job gtp in "),
        ("/api/checkpoint?job=gpt", 400, "expected tag= in the query"),
        ("/api/checkpoint?job=gpt&tag=..%2f..%2fx", 404, "'../../x' is not the tag of "),
        ("/api/manifest?job=gpt&tag=step-00000001.a0001", 404, "no checkpoint gpt/step-"),
        ("/api/tensor?job=gpt&tag=step-00000001.a0001", 400, "expected name= in the query"),
        ("/api/tensor?job=gpt&tag=step-00000001.a0001&name=w", 404, "no checkpoint gpt/step-"),
        ("/api/checkpoints?job=%ff", 400, "expected a query of at most 8 fields in UTF-8"),
        (f"/api/checkpoints?{'a=b&' * 9}", 400, "expected a query of at most 8 fields in UTF-8"),
        ("/api/checkpoint?job=gpt&tag=%1b%5b31m", 404, "'\\x1b[31m' is not the tag of "),
        ("/api/history?since=yesterday", 400, "since is 'yesterday'; expected a Unix time"),
        ("/api/history?since=nan", 400, "since is 'nan'; expected a Unix time"),
        ("/api/history?since=-1", 400, "since is '-1'; expected a Unix time"),
    ],
)
async def test_a_wrong_question_is_answered_with_a_sentence(
    answers: Answers, target: str, status: int, said: str
) -> None:
    found, headers, body = await answers.get(target)
    assert (found, body[: len(said)], body.count("\n")) == (status, said, 1)
    assert headers["Content-Type"] == "text/plain; charset=utf-8"


# -- history


def written(file: Path, count: int = 1) -> None:
    history = History(file)
    history.take([
        LoggedEvent(1_000.0 + at, "save.done", logging.INFO, f"saved {at}",
                    {"job": "gpt", "tag": f"t{at}", "step": at})
        for at in range(count)
    ])  # fmt: skip
    history.close()


async def history(answers: Answers, query: str = "") -> dict[str, Any]:
    status, _, body = await answers.get(f"/api/history{query}")
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


async def test_the_history_has_snapshots_and_events(answers: Answers) -> None:
    written(answers.history, 2)
    found = await history(answers)
    assert [one["tag"] for one in found["snapshots"]] == ["t0", "t1"]
    assert [one["text"] for one in found["events"]] == ["saved 1", "saved 0"]
    assert len((await history(answers, "?since=1001"))["snapshots"]) == 1


async def test_a_long_history_is_cut(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 2)
    written(answers.history, 3)
    found = await history(answers)
    assert (found["truncated"], [one["tag"] for one in found["snapshots"]]) == (True, ["t1", "t2"])


async def test_a_history_that_is_not_there_is_no_error(answers: Answers) -> None:
    assert (await history(answers))["note"].startswith("there is no history ")
    answers.history_file = None
    assert (await history(answers))["note"].startswith("the daemon keeps no history")


def _damage(file: Path) -> None:
    file.write_bytes(b"SQLite format 3\0" + b"x" * 4096)


def _renew(file: Path) -> None:
    written(file)
    with sqlite3.connect(file) as found:
        found.execute(f"PRAGMA user_version = {VERSION + 1}")
    found.close()


@pytest.mark.parametrize(
    ("spoil", "said"), [(_damage, "is damaged ("), (_renew, f"has version {VERSION + 1}, and ")]
)
async def test_a_history_that_cannot_be_read_is_one_sentence(
    answers: Answers, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(answers.history)
    status, _, body = await answers.get("/api/history")
    assert (status, body.startswith(f"the history {answers.history} {said}")) == (500, True)
    assert (await answers.get("/api/jobs"))[::2] == (200, '["gpt"]')


# -- readers


async def test_more_readers_than_allowed_are_refused(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_STREAMS", 2)
    streams = [await answers.reply("/api/live") for _ in range(2)]
    for stream in streams:
        assert isinstance(stream, EventStream)
        assert await anext(stream.pieces) == b"retry: 2000\n\n"
        assert (await anext(stream.pieces)).startswith(b'data: {"level":"well",')
    assert (await answers.get("/api/live"))[::2] == (
        503, "2 readers have the page open already: close one of them\n",
    )  # fmt: skip
    assert isinstance(streams[0], EventStream)
    await streams[0].pieces.aclose()
    late = [await answers.reply("/api/live") for _ in range(2)]
    pieces = [stream.pieces for stream in late if isinstance(stream, EventStream)]
    assert await anext(pieces[0]) == b"retry: 2000\n\n"
    assert [piece async for piece in pieces[1]] == [], "both asked before one of them began"


async def test_tensors_are_measured_one_at_a_time_and_the_work_ends_with_the_reader(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Queue[str](), list[str]()
    loop = asyncio.get_running_loop()

    def statistics(job: str, tag: str, name: str, stopped: Callable[[], bool]) -> dict[str, Any]:
        loop.call_soon_threadsafe(begun.put_nowait, name)
        while name != "last" and not stopped():
            pass
        ended.append(name)
        if name != "last":
            raise InterruptedError
        return {"name": name}

    monkeypatch.setattr(answers.checkpoints, "statistics", statistics)
    target = "/api/tensor?job=gpt&tag=step-00000001.a0001&name="
    names = ("first", "second", "third", "last")
    readers = [asyncio.ensure_future(answers.get(target + name)) for name in names]
    assert await begun.get() == "first"
    assert begun.empty()
    assert (await answers.get(f"{target}x"))[::2] == (
        503, "other readers have tensors measured: try it again in a moment\n",
    )  # fmt: skip
    for at in (1, 0, 2):
        readers[at].cancel()
        await asyncio.gather(readers[at], return_exceptions=True)
    assert await begun.get() in ("third", "last")
    assert (await readers[3])[::2] == (200, '{"name":"last"}')
    assert ended[0] == "first"
    assert "second" not in ended


async def test_a_sentence_has_no_characters_that_a_terminal_obeys(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statistics(job: str, tag: str, tensor: str, stopped: Callable[[], bool]) -> dict[str, Any]:
        raise NotFound(f"there is no tensor {tensor}\nhere")

    monkeypatch.setattr(answers.checkpoints, "statistics", statistics)
    found = await answers.get("/api/tensor?job=gpt&tag=t&name=a%1b%5b2J%c2%9b%e2%80%ae")
    assert found[::2] == (404, "there is no tensor a\\x1b[2J\\x9b\\u202e here\n")


# -- checkpoints that many look at


async def test_readers_of_one_checkpoint_share_the_answer_and_few_are_read_at_once(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, lock = threading.Event(), threading.Lock()
    asked, now, most = list[str](), 0, 0

    def details(job: str, tag: str) -> dict[str, Any]:
        nonlocal now, most
        with lock:
            asked.append(tag)
            now += 1
            most = max(most, now)
        assert go.wait(60)
        with lock:
            now -= 1
        if tag == "t1":
            raise NotFound("t1 is gone")
        return {"tag": tag}

    monkeypatch.setattr(answers.checkpoints, "details", details)
    get = [
        asyncio.create_task(answers.get(f"/api/checkpoint?job=gpt&tag=t{at % 16}"))
        for at in range(64)
    ]
    left = asyncio.create_task(answers.get("/api/checkpoint?job=gpt&tag=t0"))
    while len(asked) < 2:
        await asyncio.sleep(0.01)
    left.cancel()
    assert (await answers.get("/api/checkpoint?job=gpt&tag=t16"))[::2] == (
        503, "other readers look at many checkpoints: try it again in a moment\n",
    )  # fmt: skip
    go.set()
    found = await asyncio.gather(*get)
    assert (sorted(asked), most) == (sorted(f"t{at}" for at in range(16)), 2)
    assert [(status, body) for status, _, body in found] == [
        (404, "t1 is gone\n")
        if at % 16 == 1
        else (200, f'{{"tag":"t{at % 16}","restore_seconds":null}}')
        for at in range(64)
    ]
    assert (await answers.get("/api/checkpoint?job=gpt&tag=t0"))[0] == 200
    assert asked.count("t0") == 2
