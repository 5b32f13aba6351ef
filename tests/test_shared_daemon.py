"""Tests the shared daemon: each test finds it clean, and a test that leaves it dirty
fails, with its own part of the log.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.shared.errors import DaemonUnreachable
from tests.support.daemons import until
from tests.support.shared_daemon import MOST_TESTS, Dirty, LentDaemon, SharedDaemon, add_log

pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture
def shared() -> Iterator[SharedDaemon]:
    made = SharedDaemon(settle=2.0)
    yield made
    made.close()


def save(lent: LentDaemon) -> None:
    with closing(Agent(lent.job, socket=lent.home.socket)) as agent:
        agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable")


def test_each_test_has_a_job_of_its_own_in_one_daemon(shared: SharedDaemon) -> None:
    pids, names = set(), set()
    for _ in range(2):
        with shared.lent() as lent:
            assert lent.status()["jobs"] == []
            save(lent)
            (job,) = lent.status()["jobs"]
            assert job["job"] == lent.job
            with Checkpoint.open(lent.directory) as checkpoint:
                assert checkpoint.step == 1
            assert [line for line in lent.log_text().splitlines() if "attempt 1 begins" in line]
            pids.add(lent.status()["pid"])
            names.add(lent.job)
    assert (len(pids), len(names)) == (1, 2)


def pid(shared: SharedDaemon) -> int:
    with shared.lent() as lent:
        found: int = lent.status()["pid"]
    return found


def keep_an_agent(shared: SharedDaemon) -> None:
    with shared.lent() as lent, suppress(DaemonUnreachable):
        agent = Agent(lent.job, socket=lent.home.socket)
        agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable")


def test_an_agent_that_is_not_closed_fails_the_test(shared: SharedDaemon) -> None:
    before = pid(shared)
    with pytest.raises(Dirty, match=r"job job-2 has ranks .*, the segment .*\.seg"):
        keep_an_agent(shared)
    assert pid(shared) != before


def test_a_daemon_that_a_test_has_killed_is_replaced(shared: SharedDaemon) -> None:
    before = pid(shared)
    with pytest.raises(Dirty, match="it has ended with -9"), shared.lent():
        os.kill(before, signal.SIGKILL)
    assert pid(shared) != before


def test_a_daemon_that_hangs_is_replaced(shared: SharedDaemon) -> None:
    before = pid(shared)
    with pytest.raises(Dirty, match="it does not answer"), shared.lent():
        os.kill(before, signal.SIGSTOP)
    assert pid(shared) != before


def test_a_connection_that_stays_fails_the_test(shared: SharedDaemon) -> None:
    def connect() -> None:
        with shared.lent() as lent:
            other.connect(str(lent.home.socket))
            until(lambda: lent.status()["descriptors"]["clients"] == 2, "second client")

    with (
        socket.socket(socket.AF_UNIX) as other,
        pytest.raises(Dirty, match=r"\d connections"),
    ):
        connect()


class Item:
    """A test that uses the shared daemon."""

    def __init__(self, lent: LentDaemon) -> None:
        self.funcargs = {"shared_daemon": lent}


def sections(lent: LentDaemon, *, failed: bool = True) -> list[tuple[str, str]]:
    report: Any = SimpleNamespace(failed=failed, sections=[])
    item: Any = Item(lent)
    add_log(report, item)
    found: list[tuple[str, str]] = report.sections
    return found


def test_the_report_of_a_failed_test_has_its_part_of_the_log(shared: SharedDaemon) -> None:
    with shared.lent() as lent:
        save(lent)
    with shared.lent() as lent:
        save(lent)
        assert sections(lent, failed=False) == []
        ((name, text),) = sections(lent)
    assert name == "Log of the shared daemon"
    assert "job job-2: attempt 1 begins" in text
    assert "job-1" not in text


def test_a_daemon_is_replaced_after_many_tests(
    shared: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_TESTS > 100
    monkeypatch.setattr("tests.support.shared_daemon.MOST_TESTS", 2)
    assert len({pid(shared) for _ in range(4)}) == 2


def test_a_test_that_leaves_the_daemon_dirty_is_shown_the_log(shared: SharedDaemon) -> None:
    def kill() -> None:
        with shared.lent() as lent:
            save(lent)
            os.kill(lent.status()["pid"], signal.SIGKILL)

    with pytest.raises(Dirty, match="job job-1: attempt 1 begins"):
        kill()
