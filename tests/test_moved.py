"""Tests the check of the table that says where each earlier test is now."""

from __future__ import annotations

from tests.support import moved

BEFORE = {"tests/test_a.py::test_kept", "tests/test_a.py::test_gone"}
NOW = {"tests/test_a.py::test_kept", "tests/test_b.py::test_new"}


def test_classes_and_coroutines_are_found() -> None:
    source = (
        "def test_a(): ...\nasync def test_b(): ...\ndef helper(): ...\n"
        "class TestC:\n    def test_d(self): ...\n"
    )
    assert list(moved.functions(source, "f")) == ["f::test_a", "f::test_b", "f::TestC::test_d"]


def test_a_test_that_is_gone_needs_a_line() -> None:
    assert moved.problems(BEFORE, NOW, []) == [
        "tests/test_a.py::test_gone is gone, and no line says why"
    ]
    line = ["tests/test_a.py::test_gone", "tests/test_b.py::test_new", "replaced", "one loop"]
    assert moved.problems(BEFORE, NOW, [line]) == []


def test_wrong_lines_are_named() -> None:
    gone, kept = "tests/test_a.py::test_gone", "tests/test_a.py::test_kept"
    lines = [
        [gone, "tests/test_b.py::test_no", "replaced", "one loop"],
        [kept, "-", "deleted", "shows nothing"],
        ["tests/test_c.py::test_never", "-", "deleted", "shows nothing"],
    ]
    assert moved.problems(BEFORE, NOW, lines) == [
        f"{gone} is said to be replaced by tests/test_b.py::test_no, which is not there",
        f"{kept} is said to be deleted, and is there",
        "tests/test_c.py::test_never was never there",
    ]
    assert len(moved.problems(BEFORE, NOW, [[gone, "-", "deleted", ""]])) == 1
