"""Tests the directory of a journal: each root has its own, and only one daemon at a
time and only its user may use it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ckptd.daemon.journal.place import journal_directory
from ckptd.shared.errors import Busy, StorageError
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem


def opened(state: Path, root: Path) -> AbstractContextManager[int]:
    repository = open_root(root)
    repository.storage.serve(machine.host()).close()
    return journal_directory(PosixFileSystem(), state, root, repository)


def place_of(state: Path, root: Path) -> Path:
    with opened(state, root) as directory:
        return Path(os.readlink(f"/proc/self/fd/{directory}"))


def test_the_same_root_has_the_same_journal(tmp_path: Path) -> None:
    first = place_of(tmp_path / "state", tmp_path / "root")
    (tmp_path / "link").symlink_to("root")
    assert place_of(tmp_path / "state", tmp_path / "root") == first
    assert place_of(tmp_path / "state", tmp_path / "link") == first
    assert first.parent == machine.state_directory(tmp_path / "state", tmp_path / "root")
    assert first.name == f"journal-{open_root(tmp_path / 'root').identity()}"
    assert first.stat().st_mode & 0o777 == 0o700


def test_another_root_at_the_same_path_has_another_journal(tmp_path: Path) -> None:
    first = place_of(tmp_path / "state", tmp_path / "root")
    (tmp_path / "root").rename(tmp_path / "unmounted")
    assert place_of(tmp_path / "state", tmp_path / "root") != first


def test_a_copy_of_a_root_has_another_journal(tmp_path: Path) -> None:
    first = place_of(tmp_path / "state", tmp_path / "root")
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    assert place_of(tmp_path / "state", tmp_path / "copy") != first


def test_a_second_daemon_cannot_open_the_directory(tmp_path: Path) -> None:
    with opened(tmp_path / "state", tmp_path / "root"):
        with pytest.raises(
            Busy,
            match="another ckptd uses the journal in .*: stop it, or set state_dir to another "
            "directory",
        ):
            place_of(tmp_path / "state", tmp_path / "root")
        place_of(tmp_path / "state", tmp_path / "other")
    place_of(tmp_path / "state", tmp_path / "root")


def test_the_error_for_a_directory_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(
        StorageError,
        match=r"cannot keep the journal in .*/state/.*: .* set state_dir \(--state-dir, "
        r"CKPTD_STATE_DIR\)",
    ):
        place_of(tmp_path / "state", tmp_path / "root")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o755)
    os.seteuid(12345)
    try:
        first = place_of(tmp_path / "state", tmp_path / "root")
        os.seteuid(0)
        os.chown(first, 65534, 65534)
        first.chmod(0o777)
        os.seteuid(12345)
        with pytest.raises(
            StorageError,
            match="belongs to uid 65534, .* who could replace the journal: set state_dir",
        ):
            place_of(tmp_path / "state", tmp_path / "root")
    finally:
        os.seteuid(0)
