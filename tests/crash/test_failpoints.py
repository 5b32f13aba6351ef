"""Kills the trainer or the daemon at every failpoint: after a restart everything that
was acknowledged is there, bit for bit.

Each point is tried alone, and again with a second death during the recovery from the
first.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from typing import Any

import pytest

from ckptd.agent import Agent, Checkpoint
from ckptd.shared import names
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import failpoints
from tests.support import trainers
from tests.support.daemons import Daemon, Home, running

FIRST = (0, 3)
SECOND = (4, 8)
KEEP = ("--keep-last", "2", "--codec", "zstd:1", "--files-per-rank", "2")
SECOND_KILLS = [
    p for p in failpoints.DAEMON if p.startswith(("start.", "journal.", "seal.", "commit."))
] + [p for p in failpoints.AGENT if p.startswith("agent.recover.")]


def first_life(place: Home, diary: trainers.Diary) -> None:
    """Save some steps, sealed and durable, then kill everything."""
    with running(place, *KEEP, forked=True) as daemon:
        trainer = trainers.start(place.socket, diary, *FIRST, environ=place.environ)
        assert finished(diary, 1, trainer, daemon)
        trainer.kill()
        trainer.join()
        daemon.kill()


def finished(diary: trainers.Diary, lives: int, trainer: Any, daemon: Daemon) -> bool:
    """Wait until `lives` trainers have taken all their steps.

    Return False if this trainer or its daemon has died before.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if diary.count("finished") >= lives:
            return True
        if not trainer.is_alive() or daemon.process.poll() is not None:
            return diary.count("finished") >= lives
        time.sleep(0.005)
    raise AssertionError("neither the end nor a death")


def second_life(place: Home, diary: trainers.Diary, point: str) -> None:
    """Recover and continue, with `point` armed to kill the process that passes it.

    Afterwards everything is dead.
    """
    deadly = f"{point}=kill"
    daemon = Daemon(
        place, *KEEP, failpoints=deadly if point in failpoints.DAEMON else "", forked=True
    )
    try:
        if not daemon.reached_ready():
            assert daemon.died() == -signal.SIGKILL, place.log_text()
            return
        trainer = trainers.start(
            place.socket,
            diary,
            *SECOND,
            armed=deadly if point in failpoints.AGENT else "",
            environ=place.environ,
        )
        through = finished(diary, diary.count("finished") + 1, trainer, daemon)
        if point in failpoints.AGENT:
            assert not through, f"{point} was never reached"
            trainer.join()
            assert trainer.exitcode == -signal.SIGKILL
            return
        trainer.kill()
        trainer.join()
        assert daemon.died() == -signal.SIGKILL, place.log_text()
    finally:
        daemon.close()


def check_all(place: Home, diary: trainers.Diary) -> None:
    """Start once more, without deaths: nothing acknowledged is lost, all bytes are
    right, the job saves again, and nothing leaks.
    """
    sealed, durable = diary.newest("sealed", "durable"), diary.newest("durable")
    with running(place, *KEEP, forked=True) as daemon:
        agent = Agent(trainers.JOB, socket=place.socket)
        state = trainers.blank()
        recovered = agent.recover(state)
        assert recovered is not None
        assert recovered.step is not None
        assert not recovered.passed_over
        assert (recovered.attempt, recovered.step) >= max(sealed, durable), (
            f"{recovered} is older than {sealed}"
        )
        trainers.assert_equal(state, recovered.step)
        agent.snapshot(trainers.expected(100), step=100).wait("durable", timeout=120)
        agent.close()
        assert place.segment_files() == []
        status = daemon.status()
        assert status["jobs"][0]["last_durable"]["step"] == 100
        assert status["jobs"][0]["pending"] == []
        assert daemon.stop() == 0
    check_storage(place.root)


def check_storage(root: Location) -> None:
    """Check that every manifest verifies and has the tensors of its step, and that no
    other file is left.
    """
    repository = open_root(root)
    newest = repository.read_newest(trainers.JOB)
    assert newest is not None
    assert newest.startswith("step-00000100.")
    for tag in repository.tags(trainers.JOB):
        files = Counter(names.part_of(name) or name for name in repository.files(trainers.JOB, tag))
        if not files:
            continue  # a store may list an empty prefix for a while
        with Checkpoint.open(root / trainers.JOB, tag) as checkpoint:
            checkpoint.verify()
            assert checkpoint.step is not None
            trainers.assert_equal(checkpoint.load(), checkpoint.step)
            assert files == {"manifest.json": 1} | {
                part.file: part.files for part in checkpoint.manifest.parts
            }


def die_at(place: Home, *points: str) -> None:
    """Live once, then die at each of the points in a life of its own, and check that
    nothing is lost.
    """
    diary = trainers.Diary(place.path / "diary")
    first_life(place, diary)
    for point in points:
        second_life(place, diary, point)
    check_all(place, diary)


@pytest.mark.parametrize("point", failpoints.AGENT + failpoints.DAEMON)
def test_death_at_every_point(place: Home, point: str) -> None:
    die_at(place, point)


@pytest.mark.parametrize(
    ("point", "second"),
    list(zip(failpoints.AGENT + failpoints.DAEMON, itertools.cycle(SECOND_KILLS), strict=False)),
)
def test_second_death_during_recovery(place: Home, point: str, second: str) -> None:
    die_at(place, point, second)


def test_there_are_at_least_25_distinct_failpoints() -> None:
    assert len(failpoints.AGENT + failpoints.DAEMON) >= 25
    assert len(set(failpoints.AGENT + failpoints.DAEMON)) == len(
        failpoints.AGENT + failpoints.DAEMON
    )
