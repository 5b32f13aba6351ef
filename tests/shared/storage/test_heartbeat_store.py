"""Heartbeats in a directory: they are not synced, and other files stay.

`test_conformance.py` has every kind of storage.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.shared import names
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.heartbeat import Heartbeat
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.system.fs import PosixFileSystem

BEAT = Heartbeat(job="gpt", attempt=2, host="node", boot="0" * 32, beat="0" * 32)


class Counted(PosixFileSystem):
    """Counts syncs."""

    syncs = 0

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)

    def sync_directory(self, directory: int) -> None:
        self.syncs += 1
        super().sync_directory(directory)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / names.runs("gpt")


@pytest.fixture
def store(tmp_path: Path) -> HeartbeatStore:
    return HeartbeatStore(PosixStorage(tmp_path))


def test_a_renewal_is_not_synced(tmp_path: Path) -> None:
    fs = Counted()
    store = HeartbeatStore(PosixStorage(tmp_path, fs))
    store.publish(BEAT)
    made = fs.syncs
    for _ in range(3):
        store.publish(BEAT.again())
    assert fs.syncs == made


def test_a_job_without_heartbeats_gets_its_directory_and_nothing_else(
    store: HeartbeatStore, place: Path
) -> None:
    store.publish(BEAT)
    assert os.listdir(place) == ["a0002"]
    store.delete("gpt", [2])
    assert os.listdir(place) == []


def test_an_unfinished_publication_is_no_heartbeat_and_is_deleted_with_it(
    store: HeartbeatStore, place: Path
) -> None:
    place.mkdir(parents=True)
    (place / "a0002.tmp").write_bytes(b"half")
    (place / "notes").write_bytes(b"mine")
    (place / "a0003").mkdir()
    assert store.attempts("gpt") == []
    store.delete("gpt", [2])
    assert sorted(os.listdir(place)) == ["a0003", "notes"]


def test_what_is_not_a_file_is_not_read(store: HeartbeatStore, place: Path) -> None:
    place.mkdir(parents=True)
    os.mkfifo(place / "a0002")
    (place / "a0003").symlink_to("/etc/passwd")
    with pytest.raises(IntegrityError, match="a0002 is not a regular file"):
        store.read("gpt", 2)
    with pytest.raises(OSError):
        store.read("gpt", 3)


def test_messages_name_the_place(store: HeartbeatStore, place: Path) -> None:
    assert store.where("gpt") == str(place)
