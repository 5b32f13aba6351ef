"""Tests that the garbage collector is off while any thread holds the pause, and is then
as it was.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ckptd.shared.system.collector import paused_collector


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    if enabled:
        gc.enable()
    else:
        gc.disable()


def test_the_collector_is_off_until_the_last_pause_ends() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_collector():
            begun.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=pause)
    with paused_collector(), paused_collector():
        assert not gc.isenabled()
        thread.start()
        assert begun.wait(60)
    assert not gc.isenabled(), "the other thread still pauses"
    go_on.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()


@pytest.mark.usefixtures("processes")
def test_a_forked_child_does_not_inherit_the_pause() -> None:
    """A data loader forks its workers while another thread plans."""
    code = """
import gc, os
from ckptd.shared.system.collector import paused_collector
with paused_collector():
    if os.fork() == 0:
        os._exit(0 if gc.isenabled() else 1)
    assert os.wait()[1] == 0
    assert not gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(KeyError), paused_collector():
        raise KeyError
    assert gc.isenabled()
