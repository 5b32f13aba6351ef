"""Heartbeats are kept while the trainers of rank 0's node live, and deleted afterwards,
whatever the storage does.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ckptd.daemon import tasks
from ckptd.daemon.composition import opened
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.ranks import NOT_KNOWN, Owner, Process
from ckptd.daemon.runs import heartbeats as module
from ckptd.daemon.runs.heartbeats import Heartbeats
from ckptd.shared.formats.heartbeat import Heartbeat
from ckptd.shared.formats.membership import Membership
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem
from tests.support.events import logged

PROCESS = Process(4711, 1000.0, "gpt-7")


class Place:
    """A root, a job in its second attempt whose rank 0 is here, and the heartbeats of a
    daemon. `claimed`: the attempt is claimed.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.store = HeartbeatStore(PosixStorage(root))
        self.job = Job("gpt", attempt=2)
        self.claimed = True
        self.kept = Heartbeats(self.store, lambda job, attempt: self.claimed)

    def join(self, process: Process = PROCESS, rank: int = 0) -> Owner:
        owner = Owner("gpt", self.job.attempt, rank, 2, None, process)
        self.job.ranks.join(owner)
        self.kept.keep(self.job)
        return owner

    def leave(self, owner: Owner) -> None:
        self.job.ranks.leave(owner, "closed")
        self.job.changed.notify()

    def next_attempt(self) -> None:
        self.job.attempt += 1
        self.job.ranks.retire(self.job.attempt)
        self.job.changed.notify()

    def read(self, attempt: int = 2) -> Heartbeat | None:
        data = self.store.read("gpt", attempt)
        return None if data is None else Heartbeat.decode(data, "gpt", attempt)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.001)


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 0.002)
    made = Place(tmp_path / "root")
    yield made
    await made.kept.close()


async def test_a_heartbeat_names_the_process_changes_and_ends_with_the_last_rank(
    place: Place,
) -> None:
    first, second = place.join(), place.join(Process(4712), rank=1)
    await place.until(place.read)
    seen = place.read()
    assert seen is not None
    assert (seen.host, seen.pid, seen.since, seen.run, seen.attempt) == (
        machine.host(),
        4711,
        1000.0,
        "gpt-7",
        2,
    )
    await place.until(lambda: place.read() != seen)
    place.leave(first)
    await place.until(lambda: (now := place.read()) is not None and now.pid == 4712)
    place.leave(second)
    await place.until(lambda: place.store.attempts("gpt") == [])


async def test_a_heartbeat_is_deleted_at_once_and_not_at_the_next_renewal(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 3600.0)
    owner = place.join()
    await place.until(place.read)
    place.leave(owner)
    await place.until(lambda: place.read() is None)


async def test_the_next_attempt_has_a_heartbeat_of_its_own(place: Place) -> None:
    place.join()
    await place.until(place.read)
    place.next_attempt()
    place.join()
    await place.until(lambda: place.store.attempts("gpt") == [3])


@pytest.mark.parametrize("leads", [True, False])
async def test_only_the_node_of_rank_0_keeps_one(place: Place, leads: bool) -> None:
    place.job.node = Membership(run_id="0" * 32, ranks=[0] if leads else [1])
    place.join()
    if leads:
        await place.until(place.read)
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert (place.read() is not None) == leads


async def test_an_attempt_without_a_durable_claim_has_none(place: Place) -> None:
    """Another daemon may have the number."""
    place.claimed = False
    place.join()
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert place.read() is None
    place.claimed = True
    await place.until(place.read)


async def test_heartbeats_of_dead_runs_are_deleted_once_there_is_a_new_one(place: Place) -> None:
    for attempt in (1, 2):
        place.store.publish(
            Heartbeat(job="gpt", attempt=attempt, host="there", boot="0" * 32, beat="0" * 32)
        )
    place.join()
    place.kept.keep(place.job, [1, 2])
    await place.until(lambda: place.store.attempts("gpt") == [2])
    seen = place.read()
    assert seen is not None
    assert seen.host == machine.host()


async def test_after_a_restart_the_heartbeat_still_names_the_process(place: Place) -> None:
    place.join()
    await place.until(place.read)
    await place.kept.close()
    before = place.read()
    assert before is not None, "the trainer lives, and the next daemon finds the heartbeat"
    later = Heartbeats(place.store, lambda job, attempt: True)
    place.job.ranks.join(Owner("gpt", 2, 0, 2, None, NOT_KNOWN))
    later.resume([place.job])
    await place.until(lambda: place.read() != before)
    after = place.read()
    assert after is not None
    assert (after.pid, after.since, after.run) == (4711, 1000.0, "gpt-7")
    await later.close()


async def test_a_daemon_that_ends_waits_for_the_deletion(place: Place) -> None:
    owner = place.join()
    await place.until(place.read)
    place.leave(owner)
    await place.kept.close()
    assert place.read() is None


async def test_a_heartbeat_of_a_newer_attempt_ends_that_of_this_one(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.join()
    await place.until(place.read)
    newer = Heartbeat(job="gpt", attempt=3, host="there", boot="0" * 32, beat="0" * 32)
    place.store.publish(newer)
    await place.until(lambda: place.store.attempts("gpt") == [3])
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert (place.read(), place.read(3)) == (None, newer)
    assert (
        caplog.text.count("attempt 3 has begun on another node, while attempt 2 is running here")
        == 1
    )
    assert logged(caplog, "run.replaced") == [{"job": "gpt", "attempt": 2, "newer": 3}]


async def test_an_outage_is_logged_once_and_ends(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckptd")
    publish, tries = HeartbeatStore.publish, list[int]()

    def fail(self: HeartbeatStore, heartbeat: Heartbeat) -> None:
        tries.append(1)
        if len(tries) in (1, 2, 3, 4, 6):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        publish(self, heartbeat)

    monkeypatch.setattr(HeartbeatStore, "publish", fail)
    place.join()
    await place.until(lambda: len(tries) > 8)
    failed = "cannot be kept, so that a second run on another node would not be refused: [Errno 5]"
    assert [caplog.text.count(said) for said in (failed, "is kept again")] == [2, 2]
    assert place.read() is not None


async def test_a_bug_ends_the_heartbeat_and_not_the_daemon(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: HeartbeatStore, heartbeat: Heartbeat) -> None:
        raise ValueError("a bug")

    errors = list[BaseException]()
    tasks.on_failure(errors.append)
    with monkeypatch.context() as broken:
        broken.setattr(HeartbeatStore, "publish", fail)
        place.join()
        await place.until(lambda: "keeping the heartbeat of job gpt failed" in caplog.text)
    place.next_attempt()
    place.join()
    await place.until(lambda: place.read(3))
    assert errors == []


async def test_a_storage_that_hangs_holds_nothing_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, publish = threading.Event(), HeartbeatStore.publish

    def hang(self: HeartbeatStore, heartbeat: Heartbeat) -> None:
        answer.wait()
        publish(self, heartbeat)

    monkeypatch.setattr(HeartbeatStore, "publish", hang)
    monkeypatch.setattr(module, "END_SECONDS", 0.01)
    try:
        owner = place.join()
        await asyncio.sleep(0.01)
        place.leave(owner)
        async with asyncio.timeout(30):
            await place.kept.close()
    finally:
        answer.set()


async def test_of_two_runs_that_begin_at_once_the_older_attempt_keeps_no_heartbeat(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 3600.0)
    place.store.publish(Heartbeat(job="gpt", attempt=3, host="there", boot="0" * 32, beat="0" * 32))
    place.join()
    await place.until(
        lambda: "attempt 3 has begun on another node" in caplog.text and place.read() is None
    )


async def test_a_daemon_that_ends_lets_the_heartbeats_of_living_trainers_stay(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 3600.0)
    config = Config(
        root=tmp_path / "root",
        socket=tmp_path / "s",
        state_dir=tmp_path / "state",
        shm_dir=tmp_path,
    )
    before, errors = asyncio.all_tasks(), list[BaseException]()
    async with opened(config, PosixFileSystem(), failed=errors.append) as parts:
        for job in ("living", "ended"):
            await parts.engine.begin(job, 0, 1, 0, lambda message: None, PROCESS, 0.0)
        await place.until(lambda: all(place.store.attempts(job) for job in ("living", "ended")))
        ended = parts.catalog.job("ended")
        parts.engine.detach(ended.ranks.owners[0])
    assert [place.store.attempts(job) for job in ("living", "ended")] == [[1], []]
    assert (asyncio.all_tasks(), errors) == (before, []), "no heartbeat is kept any more"
