"""Tests that one daemon of the machine has a directory for segments, and that no other
user may enter it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.daemon.memory.segment_directory import SegmentDirectory
from ckptd.shared.errors import Busy, StorageError
from ckptd.shared.system.fs import PosixFileSystem


def claim(path: Path) -> SegmentDirectory:
    return SegmentDirectory(PosixFileSystem(), path)


def test_a_directory_is_claimed_once_and_removed_if_it_is_empty(tmp_path: Path) -> None:
    first = claim(tmp_path / "a")
    assert (first.path, first.path.stat().st_mode & 0o777, first.on_disk) == (
        tmp_path / "a",
        0o700,
        False,
    )
    with pytest.raises(
        Busy,
        match=f"^another ckptd on this machine, .* uses {tmp_path}/a for a root with the same path",
    ):
        claim(tmp_path / "a")
    first.close()
    assert not first.path.exists()
    second = claim(tmp_path / "a")
    (second.path / "file").touch()
    second.close()
    assert second.path.exists()
    claim(tmp_path / "a").close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(mode)
    with pytest.raises(StorageError, match=f"with mode {mode:o}; expected mode 700"):
        claim(tmp_path / "a")


def test_a_link_of_this_user_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "a").symlink_to("elsewhere")
    made = claim(tmp_path / "a")
    assert made.path != tmp_path / "a"
    (made.path / "file").touch()
    made.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_missing_tmpfs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError,
        match=f"^there is no directory {tmp_path}/gone: mount a tmpfs there, or set shm_dir to "
        f"another one$",
    ):
        claim(tmp_path / "gone" / "a")
