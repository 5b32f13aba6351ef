"""Tests a directory that holds one checkpoint by itself: the files that a sweep
removes, and those that a lock keeps from it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.scatter import verify
from ckptd.shared.names import MANIFEST, part_file
from ckptd.shared.storage.locks import exclude
from ckptd.shared.storage.marker import MARKER
from ckptd.shared.storage.standalone import StandaloneDirectory
from tests.shared.samples import NONCE, write_checkpoint
from tests.support.descriptors import opened

TAG = "step-00001000.a0002"
PART = part_file(0, NONCE)


@pytest.fixture
def alone(tmp_path: Path) -> StandaloneDirectory:
    """A directory that is one checkpoint, with a part of three files."""
    write_checkpoint(tmp_path, floats=3 << 16, files=3)
    return StandaloneDirectory(tmp_path / "gpt" / TAG)


def files_of(storage: StandaloneDirectory) -> set[str]:
    return set(os.listdir(storage.path))


def other(number: int = 0, rank: int = 0) -> str:
    return part_file(rank, bytes([rank] * 16), number)


def test_a_sweep_deletes_everything_that_is_left(alone: StandaloneDirectory) -> None:
    before = files_of(alone)
    for file in (
        other(),
        other(1),
        other(2),
        other(7, rank=3),
        f"{MANIFEST}.{'ab' * 16}.tmp",
        f"{MANIFEST}.{NONCE.hex()}.tmp",
        f".metadata.{'cd' * 16}.tmp",
    ):
        (alone.path / file).write_bytes(b"left")
    (alone.path / other(0, rank=5)).symlink_to("/etc/passwd")
    (alone.path / "notes.txt").write_text("mine")
    alone.sweep()
    assert files_of(alone) == {*before, "notes.txt"}


def test_a_sweep_keeps_a_locked_part_and_its_data_files(alone: StandaloneDirectory) -> None:
    before = files_of(alone)
    held_files = {other(), other(1), f"{MANIFEST}.{bytes(16).hex()}.tmp"}
    for file in (*held_files, other(0, rank=3)):
        (alone.path / file).write_bytes(b"left")
    held = alone.hold(other())
    alone.sweep()
    assert files_of(alone) == before | held_files
    held.close()
    alone.sweep()
    assert files_of(alone) == before


def test_a_sweep_keeps_the_manifest_of_a_saver_that_has_just_committed(
    alone: StandaloneDirectory,
) -> None:
    """Where the manifest is published by a link, its temporary name exists for a moment
    after the commit.
    """
    unpublished = alone.path / f"{MANIFEST}.{NONCE.hex()}.tmp"
    unpublished.write_bytes(b"left")
    held = alone.hold(PART)
    alone.sweep()
    assert unpublished.exists()
    held.close()
    alone.sweep()
    assert not unpublished.exists()


def test_a_sweep_keeps_a_part_that_is_committed_during_the_sweep(
    alone: StandaloneDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = alone._named()
    answers = [set[str](), named]
    monkeypatch.setattr(alone, "_named", lambda: answers.pop(0))
    before = files_of(alone)
    alone.sweep()
    assert answers == []
    assert files_of(alone) == before


def test_many_left_parts_are_swept(alone: StandaloneDirectory) -> None:
    before = files_of(alone)
    for rank in range(150):
        (alone.path / other(0, rank=rank)).write_bytes(b"left")
    open_before = opened(alone.path)
    alone.sweep()
    assert files_of(alone) == before
    assert opened(alone.path) == open_before


def test_nothing_is_swept_while_an_earlier_version_has_locked_the_directory(
    alone: StandaloneDirectory,
) -> None:
    (alone.path / other()).write_bytes(b"left")
    shared = alone.share()
    alone.sweep()
    assert (alone.path / other()).exists()
    shared.close()
    alone.sweep()
    assert not (alone.path / other()).exists()


def test_an_opened_part_is_locked(alone: StandaloneDirectory) -> None:
    reader = alone.open_part(alone.job, alone.tag, PART)
    fd = os.open(alone.path / PART, os.O_RDWR)
    assert not exclude(fd)
    assert verify(reader) > 0
    reader.close()
    assert exclude(fd)
    os.close(fd)


def test_a_part_swept_before_it_is_locked_is_reported_as_gone(
    alone: StandaloneDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(fd: int) -> bool:
        (alone.path / PART).unlink()
        return True

    monkeypatch.setattr("ckptd.shared.storage.locks.share", late)
    before = opened(alone.path)
    with pytest.raises(FileNotFoundError, match="No such file"):
        alone.hold(PART)
    assert opened(alone.path) == before
    with pytest.raises(IntegrityError, match="is missing"):
        alone.open_part(alone.job, alone.tag, PART)


def test_a_marker_is_repaired_and_dcps_own_metadata_stay(alone: StandaloneDirectory) -> None:
    marker, manifest = alone.path / ".metadata", alone.path / MANIFEST
    alone.repair_marker()
    assert marker.read_bytes() == MARKER
    marker.write_bytes(b"\x80 of DCP")
    alone.repair_marker()
    assert marker.read_bytes() == b"\x80 of DCP"
    alone.mark(NONCE.hex())
    manifest.unlink()
    alone.repair_marker()
    assert not marker.exists()
    StandaloneDirectory(alone.path / "missing").repair_marker()
    assert not (alone.path / "missing").exists()


def test_a_marker_is_not_lost_to_a_repair_beside_a_commit(
    alone: StandaloneDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other save commits after the repair has looked for a manifest, and its marker
    is deleted.
    """
    alone.mark(NONCE.hex())
    looks = iter([False])
    has_manifest = StandaloneDirectory.has_manifest
    monkeypatch.setattr(
        StandaloneDirectory,
        "has_manifest",
        lambda self: next(looks, None) is None and has_manifest(self),
    )
    alone.repair_marker()
    assert (alone.path / ".metadata").read_bytes() == MARKER
