"""Tests leases: a reader keeps a checkpoint from being deleted, and no other process keeps the reader out."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ckptd.shared import locks, names
from ckptd.shared.errors import Busy, NotFound
from ckptd.shared.leases import deletion, give_back, holders, lease
from ckptd.shared.storage import PosixStorage
from tests.shared.samples import write_checkpoint
from tests.support.forks import context
from tests.support.strangers import KINDS, NOBODY, holding, open_place

TAG = "step-00001000.a0002"
PLACE = ("gpt", TAG)


@pytest.fixture
def storage() -> Iterator[PosixStorage]:
    with open_place() as place:
        write_checkpoint(place)
        yield PosixStorage(place)


def manifest(storage: PosixStorage) -> Path:
    return storage.root / "gpt" / TAG / names.MANIFEST


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_of_another_user_delays_a_deletion_but_no_reader(storage: PosixStorage, kind: str) -> None:
    with holding(kind, manifest(storage), manifest(storage).parent):
        give_back(lease(storage, *PLACE))
        with pytest.raises(Busy, match=f"checkpoint gpt/{TAG} is being read, or deleted, by "), deletion(storage, *PLACE):
            pass
    with deletion(storage, *PLACE):
        pass


def test_a_reader_beside_a_lock_of_another_user_is_protected(storage: PosixStorage) -> None:
    """The other process kept the reader from taking the flock, and has ended before the deletion."""
    with holding("flock-ex", manifest(storage)):
        held = lease(storage, *PLACE)
    with pytest.raises(Busy), deletion(storage, *PLACE):
        pass
    assert f"pid {os.getpid()} (" in holders(storage, *PLACE)
    give_back(held)
    assert holders(storage, *PLACE) == ""


def test_a_lock_that_cannot_be_taken_raises_busy_and_not_not_found(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    with deletion(storage, *PLACE):
        with pytest.raises(Busy, match=f"checkpoint gpt/{TAG} in .* cannot be read now: .* by pid {os.getpid()} .*; try again later"):
            lease(storage, *PLACE)
        manifest(storage).unlink()
        with pytest.raises(NotFound, match=f"no checkpoint gpt/{TAG}"):
            lease(storage, *PLACE)


def test_a_deleter_of_an_earlier_version_finds_the_reader(storage: PosixStorage) -> None:
    held = lease(storage, *PLACE)
    with manifest(storage).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    give_back(held)


def test_of_two_deleters_the_second_is_refused(storage: PosixStorage) -> None:
    with deletion(storage, *PLACE), pytest.raises(Busy), deletion(storage, *PLACE):
        pass


@pytest.mark.parametrize("removed", [False, True])
def test_a_reader_waits_for_a_running_deletion(storage: PosixStorage, removed: bool) -> None:
    working = threading.Event()

    def delete() -> None:
        with deletion(storage, *PLACE):
            working.set()
            time.sleep(0.3)
            if removed:
                manifest(storage).unlink()

    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(delete)
        assert working.wait(60)
        assert holders(storage, *PLACE) == ""
        deleted.result()


def test_a_deleter_that_takes_too_long_is_named(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    with deletion(storage, *PLACE):
        assert f"pid {os.getpid()} " in holders(storage, *PLACE)


def test_a_directory_without_a_commit_is_not_locked(storage: PosixStorage) -> None:
    with deletion(storage, "gpt", "step-00002000.a0002"), deletion(storage, "other", TAG):
        pass
    assert holders(storage, "other", TAG) == ""


def delete_as_nobody(told: Connection, storage: PosixStorage) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        with deletion(storage, *PLACE):
            told.send("deleting")
    except Busy as error:
        told.send(str(error))


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_a_deleter_that_may_not_write_the_manifest_is_told_what_to_do(storage: PosixStorage) -> None:
    heard, told = context().Pipe(duplex=False)
    process = context().Process(target=delete_as_nobody, args=(told, storage))
    process.start()
    assert heard.poll(100)
    assert heard.recv() == (
        f"checkpoint gpt/{TAG} cannot be deleted by uid {NOBODY}: its manifest belongs to uid 0 and may not be written; delete it as uid 0"
    )
    process.join()
