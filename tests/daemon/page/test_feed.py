"""Tests that the daemon is asked once for all readers, and what they get if it is slow or
gone. Time passes only when a test says so.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptd.daemon.commands.health import Problem
from ckptd.daemon.page import feed as module
from ckptd.daemon.page.feed import DaemonView, Feed
from ckptd.shared.errors import DaemonUnreachable


class FakeDaemon:
    """A daemon that answers what the test says. `hangs` holds its answers back."""

    def __init__(self) -> None:
        self.asked, self.gone = 0, False
        self.free = threading.Event()
        self.free.set()
        self.wrong = list[Problem]()
        self.pid, self.jobs = 1, list[dict[str, Any]]()

    def ask(self) -> dict[str, Any]:
        self.asked += 1
        assert self.free.wait(60)
        if self.gone:
            raise DaemonUnreachable("no daemon at /s")
        return {"jobs": self.jobs, "number": self.asked, "pid": self.pid}


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    made = FakeDaemon()
    yield made
    made.free.set()


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def feed(daemon: FakeDaemon, now: list[float]) -> Iterator[Feed]:
    view = DaemonView(daemon.ask, lambda status: daemon.wrong, lambda status: "it is")

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    with ThreadPoolExecutor(2) as pool:
        yield Feed(view, pool, lambda: 7, clock)
        daemon.free.set()


async def following(documents: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        found: dict[str, Any] = json.loads(await anext(documents))
    return found


async def test_a_reader_gets_the_answer_and_newer_ones(feed: Feed) -> None:
    documents = feed.documents()
    first = await following(documents)
    assert (first["level"], first["text"]) == ("well", "All is well: it is")
    assert (first["status"], first["history_mark"]) == ({"jobs": [], "number": 1, "pid": 1}, 7)
    while (await following(documents))["status"]["number"] == 1:
        pass
    await documents.aclose()


async def test_many_readers_ask_the_daemon_once(
    feed: Feed, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 600.0)
    readers = [feed.documents() for _ in range(20)]
    found = [await following(reader) for reader in readers]
    assert [one["status"]["number"] for one in found] == [1] * 20
    assert daemon.asked == 1
    for reader in readers:
        await reader.aclose()


async def test_without_readers_nobody_is_asked(feed: Feed, daemon: FakeDaemon) -> None:
    assert daemon.asked == 0
    documents = feed.documents()
    await following(documents)
    await documents.aclose()
    await asyncio.sleep(0.05)
    asked = daemon.asked
    await asyncio.sleep(0.1)
    assert daemon.asked == asked
    again = feed.documents()
    assert (await following(again))["status"]["number"] > 1
    await again.aclose()


async def test_a_slow_reader_gets_the_newest_and_misses_the_others(
    feed: Feed, daemon: FakeDaemon
) -> None:
    slow, quick = feed.documents(), feed.documents()
    await following(slow)
    while (last := await following(quick))["status"]["number"] < 10:
        pass
    assert (await following(slow))["status"]["number"] >= last["status"]["number"]
    await slow.aclose()
    await quick.aclose()


async def test_a_daemon_that_hangs_is_said_not_to_answer(
    feed: Feed, daemon: FakeDaemon, now: list[float]
) -> None:
    documents = feed.documents()
    await following(documents)
    daemon.free.clear()
    await following(documents)
    now[0] += 12
    while (found := await following(documents))["level"] != "silent":
        pass
    said = r"The daemon has not answered for 1\d s. What is shown about it is 1\d s old"
    assert re.fullmatch(said, found["text"])
    assert found["status"]["number"] >= 1
    daemon.free.set()
    while (await following(documents))["level"] == "silent":
        pass
    await documents.aclose()


async def test_a_daemon_that_is_gone_is_named(feed: Feed, daemon: FakeDaemon) -> None:
    daemon.gone = True
    documents = feed.documents()
    assert (await following(documents))["text"] == "No daemon has answered yet: no daemon at /s"
    daemon.gone = False
    while (found := await following(documents))["level"] == "silent":
        pass
    assert found["text"] == "All is well: it is"
    await documents.aclose()


@pytest.mark.parametrize("hangs", [False, True])
async def test_after_a_pause_silence_counts_from_the_first_question(
    feed: Feed, daemon: FakeDaemon, now: list[float], hangs: bool
) -> None:
    daemon.wrong = [Problem("room", "gpt", "it is full"), Problem("room", "llama", "it is full")]
    documents = feed.documents()
    assert len((await following(documents))["problems"]) == 2
    daemon.gone = True
    while (await following(documents))["level"] != "silent":
        pass
    await documents.aclose()
    if hangs:
        daemon.free.clear()
    now[0] += 600
    documents = feed.documents()
    found = await following(documents)
    said = r"The daemon (does not answer|has not answered for \d s). .* is 10 min old"
    assert re.match(said, found["text"])
    assert (found["level"], found["problems"]) == ("silent", [])
    now[0] += 17
    while "for 1" not in (found := await following(documents))["text"]:
        pass
    assert re.match("The daemon has not answered for 1[789] s. ", found["text"])
    await documents.aclose()


async def test_a_question_that_hangs_is_waited_for_by_the_next_reader(
    feed: Feed, daemon: FakeDaemon
) -> None:
    daemon.free.clear()
    for _ in range(4):  # more than there are threads
        documents = feed.documents()
        assert (await following(documents))["text"] == "No daemon has answered yet"
        await documents.aclose()
    assert daemon.asked == 1


async def test_what_was_known_of_another_daemon_is_dropped(feed: Feed, daemon: FakeDaemon) -> None:
    def job(done: int) -> list[dict[str, Any]]:
        saving = {"tag": "t", "done_bytes": done, "total_bytes": 100, "bytes_per_second": 7}
        return [{"job": "gpt", "saving": [saving]}]

    documents = feed.documents()
    daemon.jobs = job(50)
    while (found := await following(documents))["status"]["jobs"] == []:
        pass
    daemon.pid, daemon.jobs = 2, job(10)
    while (found := await following(documents))["status"]["pid"] == 1:
        pass
    assert found["status"]["jobs"][0]["saving"][0]["bytes_per_second"] == 7
    await documents.aclose()


async def test_a_bug_is_raised_in_all_readers(feed: Feed, daemon: FakeDaemon) -> None:
    def bug(status: object) -> str:
        raise RuntimeError("a bug")

    feed._daemon = DaemonView(daemon.ask, lambda status: [], bug)
    readers = [following(feed.documents()) for _ in range(2)]
    errors = await asyncio.gather(*readers, return_exceptions=True)
    assert [repr(error) for error in errors] == ["RuntimeError('a bug')"] * 2


async def test_an_answer_of_another_version_is_said_to_be(feed: Feed) -> None:
    feed._daemon = DaemonView(lambda: {"jobs": 3}, lambda status: [], lambda status: "")
    documents = feed.documents()
    found = await following(documents)
    assert found["level"] == "silent"
    assert found["text"] == (
        "No daemon has answered yet: its answer is not understood (TypeError(\"'int' object is not "
        'iterable")), because it is of another version than this page'
    )
    await documents.aclose()
