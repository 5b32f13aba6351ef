"""A few rounds of a disk that hangs; see `hung.py`."""

from __future__ import annotations

import time
from functools import partial

from tests.crash import hung
from tests.support.daemons import Daemon, Home


def test_memory_does_not_wait_for_the_disk() -> None:
    done, problems = hung.run(2, 1)
    assert problems == []
    assert done.total() == 2


def test_a_daemon_ends_past_a_call_that_hangs(place: Home) -> None:
    """Python itself would wait for the thread, so that no new daemon could start."""
    flag = place.path / "hangs"
    daemon = Daemon(place, forked=partial(hung.make_calls_wait, flag, place.root, ("statvfs",))).wait_ready()
    flag.touch()
    time.sleep(2.5)  # the room of the root is measured each second
    assert daemon.stop() == 0
    assert "the disk still holds up ckptd-storage" in place.log_text()
