"""Runs a few rounds of a disk that hangs; see `hung.py`."""

from __future__ import annotations

import itertools
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ckptd.agent import Agent, CkptdError
from tests.crash import hung
from tests.support import trainers
from tests.support.daemons import Daemon, Home, until


def test_memory_does_not_wait_for_the_disk() -> None:
    done, problems = hung.run(2, 1)
    assert problems == []
    assert done.total() == 2


def test_a_daemon_ends_while_a_disk_call_hangs(place: Home) -> None:
    """Otherwise Python would wait for the thread at exit, and no new daemon could
    start.
    """
    flag = place.path / "hangs"
    daemon = Daemon(
        place, forked=partial(hung.make_calls_wait, flag, place.root, ("statvfs",))
    ).wait_ready()
    flag.touch()
    time.sleep(2.5)  # the daemon measures the free space of the root each second
    assert daemon.stop() == 0
    assert "the disk still blocks ckptd-storage" in place.log_text()


def hang_from(number: int, root: Path, hangs: Path) -> None:
    """Make this process's call of this number under the root wait for ever, and each
    later one, and create the file `hangs` then.
    """
    flag, left = root.parent / "never", itertools.count(1)
    flag.touch()

    def at() -> bool:
        if next(left) < number:
            return False
        hangs.touch()
        return True

    hung.make_calls_wait(flag, root, (*hung.CALLS, "scandir"), at)


def left_over(place: Home) -> None:
    """Leave a deletion, a save and a snapshot in memory to the next daemon."""
    hasty = {"CKPTD_STALL_BUDGET": "0.5"}
    daemon = Daemon(
        place,
        "--keep-last",
        "1",
        failpoints="retire.uncommitted=kill@1",
        environment=hasty,
        forked=True,
    ).wait_ready()
    agent = Agent("gpt", socket=place.socket)
    for step in (1, 2):
        with suppress(CkptdError):
            agent.snapshot(trainers.expected(step, 100), step=step).wait("durable", timeout=60)
    assert daemon.died() == -signal.SIGKILL
    with suppress(CkptdError):
        agent.close()
    daemon.close()


@pytest.mark.parametrize("number", [1, 10, 20, 30, 40, 50, 60, 70, 80])
def test_a_start_on_a_root_that_hangs_at_any_time_can_be_ended(place: Home, number: int) -> None:
    left_over(place)
    hangs = place.path / "hangs"
    daemon = Daemon(place, "--keep-last", "1", forked=partial(hang_from, number, place.root, hangs))
    try:
        until(lambda: hangs.exists() or daemon.process.poll() is not None, "a call that hangs")
        deadline = time.monotonic() + 60
        while daemon.process.poll() is None:
            assert time.monotonic() < deadline, place.log_text()
            daemon.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert daemon.process.poll() in (-signal.SIGTERM, 130), place.log_text()
    finally:
        daemon.kill()
