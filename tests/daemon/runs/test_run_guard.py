"""A second run of a job is refused while another one is alive on another node, and only
then. The clock and the storage are the test's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Collection
from typing import Any

import pytest

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.ranks import Owner, Process
from ckptd.daemon.runs import run_guard
from ckptd.daemon.runs.run_guard import RunGuard
from ckptd.shared.errors import IntegrityError, JobRunning
from ckptd.shared.formats.heartbeat import Heartbeat

NEW = Process(99, 0.0, "new")


def beat(number: int, attempt: int = 1, run: str = "old") -> bytes:
    made = Heartbeat(
        job="gpt", attempt=attempt, run=run, host="node7", boot="0" * 32, pid=4711,
        since=1764022080.0, beat=f"{number:032x}"
    )  # fmt: skip
    return made.encode()


class Root:
    """Plays the stored heartbeats, the storage calls and the heartbeats of a daemon.

    Each look takes a second of the clock.

    found: what each look finds, the last one again and again. It may be an error.
    """

    def __init__(self, *found: dict[int, bytes] | Exception) -> None:
        self.found, self.looks, self.kept = found, 0, list[Collection[int]]()
        self.now = dict[int, bytes]()

    def attempts(self, job: str) -> list[int]:
        now = self.found[min(self.looks, len(self.found) - 1)]
        self.looks += 1
        if isinstance(now, Exception):
            raise now
        self.now = now
        return list(now)

    def read(self, job: str, attempt: int) -> bytes | None:
        return self.now[attempt] or None

    def where(self, job: str) -> str:
        return f"/root/.ckptd/runs/{job}"

    async def run(self, call: Callable[[], Any]) -> Any:
        return call()

    def keep(self, job: Job, dead: Collection[int]) -> None:
        self.kept.append(dead)

    def clock(self) -> float:
        return 1000.0 + self.looks


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_guard, "LOOK_SECONDS", 0.0)


def guard(root: Any) -> RunGuard:
    return RunGuard(root, root, root, root.clock)


async def begin(
    root: Root,
    job: Job | None = None,
    process: Process = NEW,
    wait: float = 0.0,
    *,
    everywhere: bool = True,
) -> list[int]:
    return list(
        await guard(root).wait_for_end(job or Job("gpt"), process, wait, everywhere=everywhere)
    )


async def test_a_job_that_runs_nowhere_is_looked_for_once() -> None:
    root = Root({})
    assert await begin(root) == []
    assert root.looks == 1


async def test_a_run_on_another_node_is_named_with_the_remedies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ckptd")
    root = Root({1: beat(1)}, {1: beat(1)}, {1: beat(2)})
    with pytest.raises(JobRunning) as caught:
        await begin(root)
    assert str(caught.value) == (
        "job 'gpt' is running already, in process 4711 on node7 since 2025-11-24 22:08:00 UTC: "
        "stop that run, give this one another job name (CKPTD_JOB), or take over with "
        "takeover=True (CKPTD_TAKEOVER=1). After a takeover, both runs save, each under an attempt "
        "of its own, and the newest attempt is recovered"
    )
    assert root.looks == 3
    assert caplog.text.count("watching the heartbeat of another run in /root/.ckptd/runs/gpt") == 1


async def test_a_heartbeat_of_an_unknown_writer_is_refused_without_a_name() -> None:
    with pytest.raises(
        JobRunning, match="is running already, in a process on another node: stop that run"
    ):
        await begin(Root({1: b"1"}, {1: b"2"}))


async def test_a_run_that_ends_within_the_wait_is_waited_for() -> None:
    root = Root(*({1: beat(number)} for number in range(5)), {})
    assert await begin(root, wait=10.0) == []
    assert root.looks == 6
    with pytest.raises(JobRunning):
        await begin(Root(*({1: beat(number)} for number in range(50)), {}), wait=10.0)


async def test_a_dead_run_is_watched_once_and_its_heartbeat_is_replaced() -> None:
    root = Root({1: beat(1)})
    dead = await begin(root)
    assert (dead, root.looks) == ([1], 10)
    guard(root).began(Job("gpt"), dead)
    assert root.kept == [[1]]


async def test_a_heartbeat_that_vanishes_between_list_and_read_is_none() -> None:
    assert await begin(Root({1: b""})) == []


async def test_the_same_launch_and_the_own_attempt_are_never_watched() -> None:
    assert await begin(root := Root({1: beat(1, run="new")})) == [1]
    assert root.looks == 1
    assert await begin(root := Root({1: beat(1)}), Job("gpt", attempt=1)) == [1]
    assert root.looks == 1


async def test_other_nodes_are_not_looked_at_while_a_run_is_alive_here() -> None:
    assert await begin(root := Root({1: beat(1)}), everywhere=False) == []
    job = Job("gpt", attempt=3)
    job.ranks.join(Owner("gpt", 3, 0, 1, None, Process(5)))
    assert await begin(root, job) == []
    assert root.looks == 0
    with pytest.raises(
        JobRunning,
        match="^job 'gpt' is running already, in process 5: stop that run, .* can no longer save$",
    ):
        RunGuard.check_alone(job, NEW, takeover=False)
    RunGuard.check_alone(job, NEW, takeover=True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO)), "Input/output error"),
        (IntegrityError("a0001 is a FIFO"), "is a FIFO"),
    ],
)
async def test_a_run_begins_although_the_storage_fails(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    for root in (Root(error), Root({1: beat(1)}, error)):
        caplog.clear()
        assert await begin(root) == []
        assert "job gpt begins without knowing whether it is running on another node" in caplog.text
        assert reason in caplog.text


async def test_a_run_begins_although_the_storage_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hung(Root):
        async def run(self, call: Callable[[], Any]) -> Any:
            await asyncio.Event().wait()

    monkeypatch.setattr(run_guard, "ANSWER_SECONDS", 0.01)
    assert await begin(Hung({})) == []
    assert (
        "begins without knowing whether it is running on another node: the storage has not "
        "answered for 0.01 s" in caplog.text
    )
