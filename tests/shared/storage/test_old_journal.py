"""Tests that a journal in a root is moved once, even if the daemon dies meanwhile.

An earlier version then refuses the root.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.journal import file as jf
from ckptd.shared import names
from ckptd.shared.errors import NewerFormat
from ckptd.shared.storage import old_journal
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.system.fs import PosixFileSystem

HOST = "node-a"
FILES = {names.journal_file(7): b"seven" * 100, names.journal_file(8): b"eight" * 100}
OTHER = {"spare": b"room", "0000000000000001.log.torn.ab": b"evidence"}


def lay_out(top: Path) -> Path:
    """Make a root with the journal of an earlier version, and return the journal's
    directory.
    """
    journal = top / "root" / ".ckptd" / HOST / "journal"
    journal.mkdir(parents=True)
    (top / "state").mkdir()
    for name, data in {**FILES, **OTHER}.items():
        (journal / name).write_bytes(data)
    return journal


def content(directory: Path) -> dict[str, bytes]:
    return (
        {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else {}
    )


def move(top: Path, fs: PosixFileSystem | None = None) -> dict[str, bytes]:
    PosixStorage(top / "root", fs).take_journal(HOST, top / "state" / "journal")
    return content(top / "state" / "journal")


def test_the_journal_is_moved_and_an_earlier_version_refuses_the_root(tmp_path: Path) -> None:
    journal = lay_out(tmp_path)
    assert move(tmp_path) == FILES
    left = content(journal)
    assert {name: left[f"{name}.moved"] for name in FILES} == FILES
    assert OTHER.items() <= left.items()
    assert sorted(
        number for name in left if (number := names.parse_journal_file(name)) is not None
    ) == [0]
    with pytest.raises(NewerFormat, match="journal header was written by a newer ckptd"):
        jf.scan(left[old_journal.BARRIER], 0)


def test_a_second_start_changes_nothing(tmp_path: Path) -> None:
    journal = lay_out(tmp_path)
    move(tmp_path)
    (tmp_path / "state" / "journal" / names.journal_file(8)).write_bytes(b"newer")
    before = content(journal)
    assert move(tmp_path) == {**FILES, names.journal_file(8): b"newer"}
    assert content(journal) == before


def test_without_an_old_journal_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "state").mkdir()
    assert move(tmp_path) == {}
    assert list((tmp_path / "root").iterdir()) == []


class Died(Exception):
    """The process was killed."""


class Dying(PosixFileSystem):
    """A file system under a process that is killed after `steps` changes."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        for call in (
            "make_directory",
            "create",
            "write",
            "sync",
            "sync_directory",
            "rename",
            "unlink",
        ):
            setattr(self, call, self._counted(getattr(self, call)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if not self.left:
                raise Died
            self.left -= 1
            return call(*arguments, **options)

        return counted


def test_a_start_that_is_killed_at_any_step_is_repeated(tmp_path: Path) -> None:
    """The next start moves the journal whole.

    In between, an earlier version sees the whole journal or refuses the root.
    """
    for steps in itertools.count():
        top = tmp_path / str(steps)
        journal = lay_out(top)
        try:
            move(top, Dying(steps))
            break
        except Died:
            refuses, copied = (
                old_journal.BARRIER in content(journal),
                content(top / "state" / "journal"),
            )
            assert refuses or FILES.items() <= content(journal).items()
            assert copied in ({}, FILES)
            assert refuses or not copied
            assert move(top) == FILES
            assert sorted(name for name in content(journal) if name.endswith(".moved")) == [
                f"{name}.moved" for name in sorted(FILES)
            ]
    assert steps > 15
