"""Tests when a process that the daemon refuses is reported, with a clock that stands still."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ckptd.daemon.log_events import event_of, facts_of
from ckptd.daemon.telemetry.refusals import AGAIN_SECONDS, LASTING_SECONDS, MOST_WATCHED, Refusals
from ckptd.shared.errors import Fenced, StorageError
from tests.support.forks import context


class Refusing:
    """A daemon that refuses, and the processes that are dead."""

    def __init__(self) -> None:
        self.dead, self._pids = set[int](), dict[int, int]()
        self.refusals = Refusals(lambda pidfd: self._pids[pidfd] not in self.dead)

    def refuse(
        self, now: float, pid: int = 7, job: str = "gpt", rank: int = 0,
        reason: str = "the disk is full", code: str = StorageError.code, *, seen: bool = True,
    ) -> None:  # fmt: skip
        self.refusals.note(
            pid, job, rank, reason, code, now, lambda: self._watch(pid) if seen else -1
        )

    def _watch(self, pid: int) -> int:
        pidfd = os.open("/dev/null", os.O_RDONLY)
        self._pids[pidfd] = pid
        return pidfd

    def lasting(self, now: float) -> list[tuple[str, tuple[int, ...], float]]:
        return [(one.job, one.pids, one.seconds) for one in self.refusals.lasting(now)]


@pytest.fixture
def daemon() -> Iterator[Refusing]:
    made = Refusing()
    yield made
    made.refusals.close()


def again(daemon: Refusing, until: float, rank: int = 0, pid: int = 7) -> None:
    """Have a rank refused every 5 s, as an agent asks."""
    for now in range(0, int(until) + 1, 5):
        daemon.refuse(now, pid, rank=rank)


def test_a_refusal_is_reported_once_it_has_lasted(daemon: Refusing) -> None:
    again(daemon, LASTING_SECONDS)
    assert daemon.lasting(LASTING_SECONDS - 0.1) == []
    assert daemon.lasting(LASTING_SECONDS) == [("gpt", (7,), 60.0)]
    (report,) = [one.report() for one in daemon.refusals.lasting(LASTING_SECONDS)]
    assert report == {
        "job": "gpt", "pids": [7], "seconds": 60.0, "reason": "the disk is full",
        "message": "process 7 has been refused for 1 min, and nothing is saved there: the disk is "
        "full",
    }  # fmt: skip


def test_a_refusal_is_over_once_the_rank_has_begun_or_asks_no_more(daemon: Refusing) -> None:
    again(daemon, LASTING_SECONDS)
    daemon.refusals.admit(7, "gpt", 1)  # another rank
    assert len(daemon.lasting(LASTING_SECONDS + AGAIN_SECONDS)) == 1
    assert daemon.lasting(LASTING_SECONDS + AGAIN_SECONDS + 0.1) == []
    again(daemon, LASTING_SECONDS)
    daemon.refusals.admit(7, "gpt", 0)
    assert daemon.lasting(LASTING_SECONDS) == []


def test_a_process_that_is_dead_is_not_reported(daemon: Refusing) -> None:
    again(daemon, LASTING_SECONDS)
    daemon.dead.add(7)
    assert daemon.lasting(LASTING_SECONDS) == []


def test_a_run_that_another_one_has_replaced_is_reported_as_long_as_it_lives(
    daemon: Refusing,
) -> None:
    """The agent of a fenced rank does not ask again."""
    daemon.refuse(0, reason="attempt 2 has begun", code=Fenced.code)
    daemon.refuse(0, pid=8, reason="attempt 2 has begun", code=Fenced.code, seen=False)
    assert daemon.lasting(5000.0) == [("gpt", (7,), 5000.0)]
    daemon.dead.add(7)
    assert daemon.lasting(5000.0) == []


def test_ranks_are_reported_together_and_an_event_tells_it_once(
    daemon: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(2):
        again(daemon, LASTING_SECONDS + 30, rank=rank, pid=7 + rank)
    again(daemon, LASTING_SECONDS + 30, rank=2, pid=0)
    for now in (59.0, 60.0, 70.0):
        daemon.refusals.look(now)
    (record,) = caplog.records
    assert (event_of(record), record.getMessage()) == (
        "trainer.refused",
        "job gpt: processes 7, 8 have been refused for 1 min, and nothing is saved there: the disk "
        "is full",
    )
    facts = {"job": "gpt", "pid": 0, "seconds": 60.0, "reason": "the disk is full"}
    assert (dict(facts_of(record)), daemon.refusals.count) == (facts, 3)
    for rank in range(3):
        daemon.refusals.admit(7 + rank if rank < 2 else 0, "gpt", rank)
    daemon.refusals.look(80.0)
    assert daemon.refusals.count == 0


def test_a_process_that_cannot_be_seen_or_connect_has_no_name(daemon: Refusing) -> None:
    again(daemon, LASTING_SECONDS, pid=0)
    (one,) = daemon.refusals.lasting(LASTING_SECONDS)
    assert str(one).startswith("a process that this daemon cannot see has been refused for 1 min")


def test_few_descriptors_are_taken(daemon: Refusing) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for pid in range(1, 100):
        daemon.refuse(0, pid)
    assert len(os.listdir("/proc/self/fd")) == before + MOST_WATCHED
    daemon.refusals.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("processes")
def test_a_process_is_alive_until_it_has_ended() -> None:
    process = context().Process(target=int, daemon=True)
    process.start()
    pidfd = os.pidfd_open(os.getpid())
    refusals = Refusals()
    refusals.note(1, "gpt", 0, "over", Fenced.code, 0.0, lambda: pidfd)
    assert len(list(refusals.lasting(100.0))) == 1
    refusals.close()
    assert process.pid is not None
    pidfd = os.pidfd_open(process.pid)
    process.join(60)
    refusals.note(1, "gpt", 0, "over", Fenced.code, 0.0, lambda: pidfd)
    assert list(refusals.lasting(100.0)) == []
