"""Tests how the output of an export is made: beside its place, compared with what was written, and published whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from ckptd.agent.convert.output import CheckedFile, check_place, published
from ckptd.shared.errors import AlreadyExists, IntegrityError, StorageError


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


def test_a_place_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    check_place(tmp_path / "out", 10)
    with pytest.raises(StorageError, match="nowhere is not a directory: make it first$"):
        check_place(tmp_path / "nowhere" / "out", 1)
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(AlreadyExists, match="link exists already: choose another name, or remove it first$"):
        check_place(tmp_path / "link", 1)
    with pytest.raises(StorageError, match="^no room for 1000000.00 TB at .*out: .* are free there$"):
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

    with pytest.raises(IntegrityError, match="^damaged: the bytes at 0 are not those that were written$"):
        damaged()
    with pytest.raises(FileExistsError):
        CheckedFile(tmp_path / "sound", counted.append)
