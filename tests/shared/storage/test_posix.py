"""Tests leases: a reader keeps a checkpoint from being deleted, and no other process
keeps the reader out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from ckptd.shared import names
from ckptd.shared.errors import Busy, NotFound
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.storage import locks
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.fs import Buffer, PosixFileSystem
from tests.shared.samples import write_checkpoint
from tests.support.forks import context
from tests.support.strangers import KINDS, NOBODY, holding, open_place

TAG = "step-00001000.a0002"
PLACE = ("gpt", TAG)


@pytest.fixture
def storage() -> Iterator[Repository]:
    with open_place() as place:
        write_checkpoint(place)
        yield open_root(place)


def manifest(storage: Repository) -> Path:
    return Path(storage.where()) / "gpt" / TAG / names.MANIFEST


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_of_another_user_delays_a_deletion_but_no_reader(
    storage: Repository, kind: str
) -> None:
    with holding(kind, manifest(storage), manifest(storage).parent):
        storage.lease(*PLACE).close()
        with (
            pytest.raises(Busy, match=f"checkpoint gpt/{TAG} is being read, or deleted, by "),
            storage.exclude(*PLACE),
        ):
            pass
    with storage.exclude(*PLACE):
        pass


@pytest.mark.usefixtures("processes")
def test_a_reader_beside_a_lock_of_another_user_is_protected(storage: Repository) -> None:
    """The other process kept the reader from taking the flock, and has ended before the
    deletion.
    """
    with holding("flock-ex", manifest(storage)):
        held = storage.lease(*PLACE)
    with pytest.raises(Busy), storage.exclude(*PLACE):
        pass
    assert f"pid {os.getpid()} (" in storage.readers(*PLACE)
    held.close()
    assert storage.readers(*PLACE) == ""


def test_a_lock_that_cannot_be_taken_raises_busy_and_not_not_found(
    storage: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    with storage.exclude(*PLACE):
        with pytest.raises(
            Busy,
            match=f"checkpoint gpt/{TAG} in .* cannot be read now: .* by pid {os.getpid()} .*; try "
            f"again later",
        ):
            storage.lease(*PLACE)
        manifest(storage).unlink()
        with pytest.raises(NotFound, match=f"no checkpoint gpt/{TAG}"):
            storage.lease(*PLACE)


def test_a_deleter_of_an_earlier_version_finds_the_reader(storage: Repository) -> None:
    held = storage.lease(*PLACE)
    with manifest(storage).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    held.close()


def test_the_second_of_two_deleters_is_refused(storage: Repository) -> None:
    with storage.exclude(*PLACE), pytest.raises(Busy), storage.exclude(*PLACE):
        pass


@pytest.mark.parametrize("removed", [False, True])
def test_a_reader_waits_for_a_running_deletion(storage: Repository, removed: bool) -> None:
    working = threading.Event()

    def delete() -> None:
        with storage.exclude(*PLACE):
            working.set()
            time.sleep(0.3)
            if removed:
                manifest(storage).unlink()

    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(delete)
        assert working.wait(60)
        assert storage.readers(*PLACE) == ""
        deleted.result()


def test_a_deleter_that_takes_too_long_is_named(
    storage: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    with storage.exclude(*PLACE):
        assert f"pid {os.getpid()} " in storage.readers(*PLACE)


def test_a_directory_without_a_commit_is_not_locked(storage: Repository) -> None:
    with storage.exclude("gpt", "step-00002000.a0002"), storage.exclude("other", TAG):
        pass
    assert storage.readers("other", TAG) == ""


def delete_as_nobody(told: Connection, root: str) -> None:
    storage = open_root(root)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        with storage.exclude(*PLACE):
            told.send("deleting")
    except Busy as error:
        told.send(str(error))


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_a_deleter_that_may_not_write_the_manifest_is_told_what_to_do(storage: Repository) -> None:
    heard, told = context().Pipe(duplex=False)
    process = context().Process(target=delete_as_nobody, args=(told, storage.where()))
    process.start()
    assert heard.poll(100)
    assert heard.recv() == (
        f"checkpoint gpt/{TAG} cannot be deleted by uid {NOBODY}: its manifest belongs to uid 0 "
        f"and may not be written; delete it as uid 0"
    )
    process.join()


# -- directories


def test_the_names_of_a_directory_that_another_process_made_are_synced_once(tmp_path: Path) -> None:
    synced = list[int]()

    class Syncs(PosixFileSystem):
        def sync_directory(self, directory: int) -> None:
            synced.append(os.fstat(directory).st_ino)

    (tmp_path / "gpt" / TAG).mkdir(parents=True)
    storage = PosixStorage(tmp_path, Syncs())
    for _ in range(2):
        storage.ensure(f"gpt/{TAG}")
        assert synced == [tmp_path.stat().st_ino, (tmp_path / "gpt").stat().st_ino]


def test_a_file_is_synced_when_nothing_in_it_changes_any_more(tmp_path: Path) -> None:
    """A change after the sync would not be durable when the save is acknowledged."""

    class Noted(PosixFileSystem):
        def write(self, fd: int, data: Buffer, offset: int) -> None:
            calls.append("write")

        def truncate(self, fd: int, length: int) -> None:
            calls.append("truncate")
            super().truncate(fd, length)

        def sync(self, fd: int) -> None:
            calls.append("sync")
            super().sync(fd)

        def sync_directory(self, directory: int) -> None:
            calls.append("sync_directory")

    calls = list[str]()
    storage = PosixStorage(tmp_path, Noted())
    storage.ensure("gpt")
    calls.clear()
    sink = storage.create("gpt/rank-00000.ckpt", 3 * ALIGN, b"head")
    sink.append(bytes(100))
    sink.finish()
    assert calls == ["write", "write", "truncate", "sync", "sync_directory"]


# -- a root that is lost


def test_a_root_is_lost_once_it_was_deleted_moved_or_replaced(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "root")
    assert not storage.is_lost()
    held = storage.serve("here")
    assert not storage.is_lost()
    (tmp_path / "root").rename(tmp_path / "elsewhere")
    assert storage.is_lost()
    other = PosixStorage(tmp_path / "root").serve("here")
    assert storage.is_lost()
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "elsewhere").rename(tmp_path / "root")
    assert not storage.is_lost()
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "root").touch()
    assert storage.is_lost()
    held.close()
    other.close()


def test_a_root_that_does_not_answer_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = PosixStorage(tmp_path / "root")
    storage.serve("here").close()
    monkeypatch.setattr(os, "stat", Mock(side_effect=OSError(errno.ESTALE, "stale")))
    assert not storage.is_lost()
