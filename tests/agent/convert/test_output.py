"""Tests how the output of an export is made: beside its place, compared with what was
written, and published whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptd.agent.convert import output
from ckptd.agent.convert.output import (
    CheckedFile,
    check_place,
    continued,
    finish,
    published,
    result_of,
)
from ckptd.shared.errors import AlreadyExists, Busy, IntegrityError, InvalidRequest, StorageError


def test_the_place_of_a_checkpoint_of_a_job_is_left_to_the_daemon(tmp_path: Path) -> None:
    """In a root the name alone decides, so the output would count as a damaged one."""
    job = tmp_path / "root" / "gpt"
    job.mkdir(parents=True)
    check_place(job / "step-00000007.a0001", 1)  # no root yet
    (tmp_path / "root" / ".ckptd").mkdir()
    check_place(job / "base", 1)
    with pytest.raises(
        InvalidRequest, match=rf"a checkpoint of the job {job}.*: .*`ckptd adopt PATH {job}`"
    ):
        check_place(job / "step-00000007.a0001", 1)


@pytest.mark.parametrize("directory", [True, False])
def test_the_output_appears_whole_or_not_at_all(tmp_path: Path, directory: bool) -> None:
    out = tmp_path / "out"
    with suppress(ZeroDivisionError), published(out, directory=directory) as beside:
        (beside / "x" if directory else beside).write_text("half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with published(out, directory=directory) as beside:
        (beside / "x" if directory else beside).write_text("whole")
        assert not out.exists()
    assert os.listdir(tmp_path) == ["out"]
    assert (out / "x" if directory else out).read_text() == "whole"


def test_two_exports_to_one_place_do_not_meet(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / ".out.partial").mkdir()  # not ours

    def second() -> None:
        with published(out, directory=True) as two:
            with published(out, directory=True) as one:
                assert one != two
                (one / "x").write_text("one")
            (two / "x").write_text("two")

    with pytest.raises(AlreadyExists, match="out was made by another program meanwhile"):
        second()
    assert (out / "x").read_text() == "one"
    assert sorted(os.listdir(tmp_path)) == [".out.partial", "out"]


def test_an_output_that_another_program_has_made_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write() -> None:
        with published(out, directory=False) as beside:
            beside.write_text("ours")
            out.write_text("theirs")

    with pytest.raises(AlreadyExists, match="out was made by another program meanwhile"):
        write()
    assert out.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out"]


KEY = "0123456789abcdef"


def written(path: Path, text: str) -> CheckedFile:
    with CheckedFile(path, lambda length: None) as file:
        file.write(text[:1].encode())
        file.write(text[1:].encode())
    return file


def interrupted(out: Path, key: str = KEY) -> None:
    """Begin an output with a file that is finished, one that is not, one that is gone,
    one that was changed and two torn results.
    """
    with suppress(KeyboardInterrupt), continued(out, key) as made:
        for name in ("first", "torn", "empty", "changed", "shorter", "gone"):
            finish(written(made / name, "old"), [3, 4])
        written(made / "second", "old")
        (made.parent / "torn.result").write_text("[")
        (made.parent / "empty.result").write_text("")
        (made / "changed").write_text("odd")
        (made / "shorter").write_text("ol")
        (made / "gone").unlink()
        raise KeyboardInterrupt


def test_an_interrupted_directory_is_continued_with_what_was_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(out)
    assert os.listdir(tmp_path) == [f".out.{KEY}.partial"]
    with continued(out, KEY) as made:
        assert os.listdir(made) == ["first"]
        assert sorted(os.listdir(made.parent)) == ["first.result", "lock", "made"]
        assert [result_of(made / name) for name in ("first", "torn", "second", "gone")] == [
            [3, 4],
            None,
            None,
            None,
        ]
        for name in ("torn", "gone"):
            finish(written(made / name, "new"), [6])
        assert result_of(made / "gone") == [6]
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "first": "old",
        "torn": "new",
        "gone": "new",
    }
    assert os.listdir(tmp_path) == ["out"]


def test_another_output_of_this_name_begins_anew(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    with continued(tmp_path / "out", "f" * 16) as made:
        assert os.listdir(made) == []
    assert sorted(os.listdir(tmp_path)) == [f".out.{KEY}.partial", "out"]


def test_after_an_error_nothing_is_left(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    with suppress(ZeroDivisionError), continued(tmp_path / "out", KEY):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_two_exports_do_not_write_one_directory(tmp_path: Path) -> None:
    with continued(tmp_path / "out", KEY) as made:
        (made / "x").write_text("mine")
        with pytest.raises(Busy, match="another export is writing .*out: wait until it ends$"):
            continued(tmp_path / "out", KEY).__enter__()
        assert (made / "x").exists()
    assert (tmp_path / "out" / "x").read_text() == "mine"


def test_a_lock_on_a_directory_that_is_gone_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other export fails, and removes its directory, between the opening of the
    lock and the lock.
    """
    locks: list[int] = []

    def lock(fd: int, kind: int) -> bool:
        if not locks:
            shutil.rmtree(tmp_path / f".out.{KEY}.partial")
        locks.append(fd)
        return True

    monkeypatch.setattr(output, "description_lock", lock)
    with continued(tmp_path / "out", KEY) as made:
        (made / "x").write_text("whole")
    assert len(locks) == 2
    assert (tmp_path / "out" / "x").read_text() == "whole"


def test_without_locks_nothing_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "out")
    monkeypatch.setattr(output, "description_lock", lambda fd, kind: None)
    with continued(tmp_path / "out", "e" * 16) as made:
        assert os.listdir(made) == []
        finish(written(made / "x", "whole"), True)
    assert os.listdir(tmp_path / "out") == ["x"]
    assert sorted(os.listdir(tmp_path)) == [f".out.{KEY}.partial", "out"]


def test_what_is_finished_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(16 << 20) + 7))
    check_place(tmp_path / "out", 10, KEY)  # 3 of 10 bytes are there
    for key in ("", "f" * 16):
        with pytest.raises(StorageError, match="^no room for 10 B"):
            check_place(tmp_path / "out", 10, key)


def test_a_place_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    check_place(tmp_path / "out", 10)
    with pytest.raises(StorageError, match="nowhere is not a directory: make it first$"):
        check_place(tmp_path / "nowhere" / "out", 1)
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(
        AlreadyExists, match="link exists already: choose another name, or remove it first$"
    ):
        check_place(tmp_path / "link", 1)
    with pytest.raises(
        StorageError, match="^no room for 1000000.00 TB at .*out: .* are free there$"
    ):
        check_place(tmp_path / "out", 10**18)


def test_bytes_that_change_on_the_disk_are_noticed(tmp_path: Path) -> None:
    counted: list[int] = []
    with CheckedFile(tmp_path / "sound", counted.append) as file:
        assert file.write(bytes(range(100))) == 100
        file.write_at(200, b"later")
        assert file.tell() == 100
    assert (tmp_path / "sound").read_bytes() == bytes(range(100)) + bytes(100) + b"later"
    assert counted == [100, 5]

    def damaged() -> None:
        with CheckedFile(tmp_path / "damaged", counted.append) as file:
            file.write(bytes(100))
            (tmp_path / "damaged").write_bytes(b"x" + bytes(99))

    with pytest.raises(
        IntegrityError, match="^damaged: the bytes at 0 are not those that were written$"
    ):
        damaged()
    with pytest.raises(FileExistsError):
        CheckedFile(tmp_path / "sound", counted.append)
