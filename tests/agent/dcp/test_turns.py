"""Tests the turns of processes at saving to one job: a lock that the saves of one
process share.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest

from ckptd.agent.dcp import turns
from ckptd.agent.dcp.turns import take_turn
from ckptd.shared.system import machine
from ckptd.shared.system.local_lock import LocalLock
from tests.support.clock import Clock


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "locks"
    monkeypatch.setattr(machine, "plain_directory", lambda: made)
    return made


def other_process_could_take(job: str = "gpt") -> bool:
    """Return True if the lock of the job is free.

    A second lock of this process conflicts as one of another process does.
    """
    lock = LocalLock.take(f"dcp-{machine.root_digest(Path('/ckpts') / job)}")
    if lock is not None:
        lock.close()
    return lock is not None


def test_a_turn_keeps_other_processes_out_until_its_last_save_is_over() -> None:
    first, second = take_turn("/ckpts", "gpt", 0.0), take_turn("/ckpts", "gpt", 0.0)
    assert (
        first.held,
        second.held,
        other_process_could_take(),
        other_process_could_take("bert"),
    ) == (True, True, False, True)
    first.close()
    assert not other_process_could_take()
    second.close()
    second.close()
    assert other_process_could_take()


def test_a_save_that_is_gone_has_no_turn() -> None:
    turn = take_turn("/ckpts", "gpt", 0.0)
    assert not other_process_could_take()
    del turn
    gc.collect()
    assert other_process_could_take()


def test_a_turn_comes_when_the_other_process_is_ready_and_the_wait_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = LocalLock.take(f"dcp-{machine.root_digest(Path('/ckpts/gpt'))}")
    assert taken is not None
    others = [taken]
    del taken

    class Ends(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 3:
                others.pop().close()

    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    assert not take_turn("/ckpts", "gpt", clock.now + 1.0).held
    monkeypatch.setattr(turns, "time", Ends())
    assert take_turn("/ckpts", "gpt", clock.now + 60.0).held


def test_without_a_place_for_locks_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LocalLock, "take", lambda _: (_ for _ in ()).throw(OSError(30, "Read-only file system"))
    )
    assert not take_turn("/ckpts", "gpt", 0.0).held


@pytest.mark.usefixtures("processes")
def test_a_forked_child_neither_has_nor_ends_the_turn_of_its_parent(directory: Path) -> None:
    turn = take_turn("/ckpts", "gpt", 0.0)
    context: Any = mp.get_context("fork")
    said = context.Queue()

    def work() -> None:
        turn.close()
        said.put((len(turns._taken), other_process_could_take()))

    child = context.Process(target=work)
    child.start()
    assert said.get(timeout=60) == (0, False)
    child.join(60)
    assert (len(os.listdir(directory)), other_process_could_take()) == (1, False)
    turn.close()
    assert os.listdir(directory) == []
