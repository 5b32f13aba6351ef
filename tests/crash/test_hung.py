"""Runs a few rounds of a disk that hangs; see `hung.py`."""

from __future__ import annotations

import time
from functools import partial

from tests.crash import hung
from tests.support.daemons import Daemon, Home


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
