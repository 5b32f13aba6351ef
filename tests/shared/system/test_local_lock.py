"""Tests the lock that processes of one user share."""

from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path
from unittest import mock

import pytest

from ckptd.shared.system import machine
from ckptd.shared.system.local_lock import LocalLock


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "plain_directory", lambda: tmp_path / "mine")
    return tmp_path / "mine"


def test_one_holder_at_a_time(directory: Path) -> None:
    lock = LocalLock.take("it")
    assert lock is not None
    assert LocalLock.take("it") is None
    other = LocalLock.take("other")
    assert other is not None
    assert sorted(os.listdir(directory)) == ["it", "other"]
    lock.close()
    lock.close()
    again = LocalLock.take("it")
    assert again is not None
    again.close()
    other.close()
    assert os.listdir(directory) == []


def take_and_die(directory: Path) -> None:
    with mock.patch.object(machine, "plain_directory", return_value=directory):
        assert LocalLock.take("it") is not None
        os._exit(0)


@pytest.mark.usefixtures("processes")
def test_the_lock_of_a_dead_process_is_free(directory: Path) -> None:
    process = mp.get_context("spawn").Process(target=take_and_die, args=(directory,))
    process.start()
    process.join()
    lock = LocalLock.take("it")
    assert lock is not None
    lock.close()


def test_a_file_that_its_holder_has_just_deleted_is_not_taken(directory: Path) -> None:
    """Lock the new file instead: another process could lock a file of that name at the
    same time.
    """
    opened, init = list[LocalLock](), LocalLock.__init__

    def open_and_delete(self: LocalLock, path: Path) -> None:
        init(self, path)
        opened.append(self)
        if len(opened) == 1:
            path.unlink()

    with mock.patch.object(LocalLock, "__init__", open_and_delete):
        lock = LocalLock.take("it")
    assert lock is opened[1]
    assert (directory / "it").exists()
    lock.close()
