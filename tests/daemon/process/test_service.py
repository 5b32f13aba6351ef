"""Tests how a recovery waits for the saves of a job of several nodes, with a saver
whose saves end as each test says.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.daemon import recovery
from ckptd.daemon.job.catalog import Catalog, Job, Step
from ckptd.daemon.job.changed import Changed
from ckptd.daemon.job.snapshot import Key, RankSeal, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.process.service import MAX_REPORT, Service, report_text
from ckptd.shared.errors import StorageError
from ckptd.shared.formats.membership import Membership
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.support.cases import each_case


def made(**parts: Any) -> Service:
    """Return a service of a daemon that has only these parts, and a socket."""
    config = SimpleNamespace(socket=Path("/s"))
    return Service(SimpleNamespace(config=config, **parts))  # type: ignore[arg-type]


class Saver:
    """In the place of the saver.

    `ends` says how the saves of each step end, one after the other; a save without an
    entry does not end.

    An end is "durable", "delivered", or the code of the error. After "delivered", the
    save waits for the outcome until `refuse`.
    """

    def __init__(self, job: Any, ends: dict[int, list[str]], refused: bool = False) -> None:
        self.job, self.ends, self.refused, self.started = job, ends, refused, list[int]()
        self.joint, self._running, self._waiting = (
            self,
            dict[int, asyncio.Task[None]](),
            asyncio.Event(),
        )

    def start(self, snapshot: Held) -> asyncio.Task[None]:
        task = self._running.get(snapshot.key[1])
        if task is None or task.done():
            self.started.append(snapshot.key[1])
            task = self._running[snapshot.key[1]] = asyncio.ensure_future(self._save(snapshot))
        return task

    async def _save(self, snapshot: Held) -> None:
        ends = self.ends.get(snapshot.key[1], [])
        end = ends.pop(0) if ends else await asyncio.Future[str]()
        if end == "delivered":
            snapshot.delivered = True
            self.job.changed.notify()
            await self._waiting.wait()
            end, snapshot.delivered = "storage", False
        if end == "durable":
            snapshot.state = SnapshotState.DURABLE
            self.job.newest = SimpleNamespace(order=(*snapshot.key, 1))
        else:
            snapshot.state, snapshot.code = SnapshotState.FAILED, end
        self.job.changed.notify()

    async def abandon_refused(self, snapshot: Held) -> bool:
        refused, self.refused = self.refused, False
        if refused:
            self._waiting.set()
        return refused


class Held:
    """In the place of a snapshot that is sealed on this node."""

    def __init__(self, step: int, attempt: int = 2, *, persist: bool = False) -> None:
        self.key, self.attempt, self.persist = (attempt, step), attempt, persist
        self.state, self.code = SnapshotState.SEALED, ""
        self.in_memory, self.delivered = True, False


async def deliver(ends: dict[int, list[str]], *snapshots: Held, refused: bool = False) -> list[int]:
    """Have the daemon deliver these snapshots of a job in attempt 2.

    Return the steps whose saves were started, in order.
    """
    job = SimpleNamespace(
        attempt=2,
        changed=Changed(),
        newest=None,
        is_dead=lambda s: False,
        is_durable=lambda *key: False,
    )
    job.newest_durable = lambda: job.newest
    saver = Saver(job, ends, refused)
    service = made(saver=saver)
    await asyncio.wait_for(service._deliver(job, snapshots), 20)  # type: ignore[arg-type]
    return saver.started


async def test_a_step_that_no_other_node_holds_is_not_waited_for_once_a_newer_one_is_durable() -> (
    None
):
    assert await deliver({6: ["durable"]}, Held(5), Held(6)) == [5, 6]


async def test_a_step_that_was_to_be_saved_is_waited_for_although_a_newer_one_is_durable() -> None:
    older = Held(5, persist=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(deliver({6: ["durable"]}, older, Held(6)), 0.2)
    assert await deliver({5: ["durable"], 6: ["durable"]}, Held(5, persist=True), Held(6)) == [5, 6]


@pytest.mark.parametrize(
    ("ends", "started"),
    [
        (["storage", "durable"], [5, 5]),
        (["storage", "storage", "durable"], [5, 5]),
        (["integrity", "durable"], [5]),
    ],
)
async def test_a_save_that_failed_on_storage_is_tried_once_more(
    ends: list[str], started: list[int]
) -> None:
    assert await deliver({5: ends}, Held(5)) == started


async def test_a_step_of_an_older_attempt_needs_only_to_be_delivered() -> None:
    assert await deliver({5: ["delivered"]}, Held(5, attempt=1)) == [5]


async def test_a_delivered_step_that_another_node_has_refused_gets_another_try() -> None:
    assert await deliver({5: ["delivered", "durable"]}, Held(5, attempt=1), refused=True) == [5, 5]


async def test_what_is_durable_or_no_longer_in_memory_is_left_alone() -> None:
    durable, gone = Held(5), Held(6)
    durable.state, gone.in_memory = SnapshotState.DURABLE, False
    assert await deliver({}, durable, gone) == []


async def test_copies_are_waited_for_although_their_saves_have_begun_before() -> None:
    """After ten seconds without their node, copies are saved on its behalf unasked."""
    catalog = Catalog()
    job = catalog.job("gpt")
    job.attempt, job.world_size = 2, 5
    for rank, step, state in (
        (1, 3, SnapshotState.WRITTEN), (2, 4, SnapshotState.WRITING), (3, 5, SnapshotState.SEALED),
        (4, 6, SnapshotState.WRITING),
    ):  # fmt: skip
        replica = job.peer_replicas[(1, step), rank] = Snapshot(
            "gpt", 1, step, f"step-0000000{step}.a0001", 5, True, state,
            node=Membership(run_id="0" * 32, ranks=[rank]), peer_replica=True,
        )  # fmt: skip
        replica.seals[rank] = RankSeal(rank, f"{step}/{rank}", 1, b"", checks=[])
    job.peer_replicas[(1, 3), 1].delivered = True
    saver = Saver(job, {4: ["delivered"], 5: ["delivered"], 6: ["integrity"]})
    service = made(saver=saver, catalog=catalog)
    assert await asyncio.wait_for(service.deliver_copies("gpt"), 20) == [1, 2, 3]
    assert sorted(saver.started) == [4, 5, 6]


async def test_an_attempt_on_one_node_delivers_only_what_older_ones_on_several_left() -> None:
    """The node recovers its own snapshots from memory, without storage."""
    catalog, two = Catalog(), Membership(run_id="0" * 32, ranks=[0])
    job = catalog.job("gpt")
    job.attempt = 3
    for attempt, node in ((1, two), (2, None), (3, None)):
        snapshot = Snapshot(
            "gpt", attempt, 5, "step", 2, persist=False, state=SnapshotState.SEALED, node=node
        )  # fmt: skip
        snapshot.seals[0] = RankSeal(0, f"{attempt}/0", 1, b"", checks=[])
        job.steps[attempt, 5] = Step((attempt, 5), snapshot=snapshot)
    delivered = list[Key]()

    async def note(_: Job, snapshots: Sequence[Snapshot]) -> None:
        delivered.extend(s.key for s in snapshots)

    service = made(catalog=catalog, uploader=None)
    service._deliver = note  # type: ignore[method-assign, assignment]
    await service.deliver("gpt")
    assert delivered == [(1, 5)]
    job.node = two
    await service.deliver("gpt")
    assert sorted(delivered) == [(1, 5), (1, 5), (2, 5), (3, 5)]


@each_case(
    ("node", "in_memory", "stored", "raises"),
    [
        (Membership(run_id="0" * 32, ranks=[0]), (2, 5), None, True),
        (None, None, None, True),
        (None, (2, 5), (2, 6), True),
        (None, (2, 5), (2, 5), False),
        (None, (2, 5), None, False),
    ],
)
async def test_memory_is_offered_alone_only_if_nothing_newer_can_be_on_storage(
    monkeypatch: pytest.MonkeyPatch,
    node: Membership | None,
    in_memory: Key | None,
    stored: Key | None,
    raises: bool,
) -> None:
    """The storage does not answer.

    Snapshots of several nodes are not offered from memory, and an older step must not
    come back.
    """
    catalog = Catalog()
    job = catalog.job("gpt")
    job.attempt, job.node = 3, node
    if stored is not None:
        job.in_root["x.a0002"] = StoredCheckpoint(
            "gpt", "x.a0002", *stored, 1, 1, (), user_tag=True
        )
    snapshot = Snapshot(
        "gpt",
        *(in_memory or (2, 5)),
        "step",
        1,
        persist=True,
        state=SnapshotState.SEALED,
        node=node,
    )
    offered = [snapshot] if in_memory and node is None else []

    async def scan_job(*_: Any, **__: Any) -> None:
        raise StorageError("the storage has not answered", errno.ETIMEDOUT)

    monkeypatch.setattr(recovery, "scan_job", scan_job)

    async def there(job: Any) -> None:
        pass

    service = made(
        catalog=catalog,
        engine=SimpleNamespace(memory_candidates=lambda name: offered),
        repository=None,
        calls=None,
        uploader=None,
        served=SimpleNamespace(check=there),
    )
    if raises:
        with pytest.raises(StorageError, match="has not answered"):
            await service.find("gpt", None)
    else:
        assert [
            (c.attempt, c.step, c.source) for c in (await service.find("gpt", None)).candidates
        ] == [(2, 5, "memory")]


def test_a_report_that_is_too_long_leaves_jobs_out_and_counts_them() -> None:
    def reported(name: str, **changes: Any) -> dict[str, Any]:
        quiet = {"job": name, "ranks_connected": 0, "last_error": None, "damaged": {}}
        return quiet | {"announced": "é" * 500} | changes

    idle = [reported(f"idle{number:03d}") for number in range(500)]
    failed, runs = reported("y", damaged={"t": "why"}), reported("z", ranks_connected=1)
    jobs = [*idle, failed, runs]
    status = {"version": "9", "jobs": jobs, "jobs_not_shown": 7}
    text = report_text(status)
    assert len(text) <= MAX_REPORT < len(json.dumps(status))
    found = json.loads(text)
    left = len(found["jobs"]) - 2
    assert found["jobs"] == [*idle[:left], failed, runs]
    assert found["jobs_not_shown"] == 507 - left
    assert left > 200
    assert report_text(found) == text
