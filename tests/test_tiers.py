"""Tests the tiers: what each runs, and that a test cannot start a process unnoticed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.support import forks, tiers


class Item:
    """A test as pytest has collected it."""

    def __init__(self, nodeid: str, *fixtures: str) -> None:
        self.nodeid, self.fixturenames = nodeid, fixtures
        self.markers: set[str] = set()

    def add_marker(self, name: str) -> None:
        self.markers.add(name)


def marked(*items: Item) -> list[set[str]]:
    collected: Any = items
    tiers.mark(collected)
    return [item.markers for item in items]


def test_a_process_fails_a_test_that_has_not_asked_for_one() -> None:
    with pytest.raises(tiers.NotAllowed, match="ask for the fixture `processes`"):
        subprocess.run([sys.executable, "-c", ""])
    with pytest.raises(tiers.NotAllowed):
        forks.context()
    tiers.begin(allowed=False)  # what was refused so far was meant


def test_a_test_that_catches_the_refusal_fails_at_its_end() -> None:
    with pytest.raises(tiers.NotAllowed):
        subprocess.run([sys.executable, "-c", ""])
    with pytest.raises(tiers.NotAllowed):
        tiers.end()
    tiers.begin(allowed=False)


def test_a_shared_process_is_allowed_and_only_that_one() -> None:
    with tiers.shared():
        assert subprocess.run([sys.executable, "-c", "exit(3)"]).returncode == 3
    with pytest.raises(tiers.NotAllowed):
        subprocess.run([sys.executable, "-c", ""])
    tiers.begin(allowed=False)


def test_the_fixture_and_the_directory_decide_the_tier() -> None:
    assert marked(
        Item("tests/agent/test_a.py::test_one"),
        Item("tests/agent/test_a.py::test_two", "place", "processes"),
        Item("tests/crash/test_b.py::test_three"),
    ) == [set(), {"processes"}, {"crash", "processes"}]


def test_the_first_case_of_the_first_test_of_a_promise_is_in_the_first_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [[("agent/test_a.py", "test_in_process"), ("agent/test_a.py", "test_kill")]]
    monkeypatch.setattr(tiers, "promised", lambda page: rows)
    assert marked(
        Item("tests/agent/test_a.py::test_in_process"),
        Item("tests/agent/test_a.py::test_kill[1]", "processes"),
        Item("tests/agent/test_a.py::test_kill[2]", "processes"),
    ) == [set(), {"processes", "promise"}, {"processes"}]


def test_a_row_names_tests_with_the_file_that_was_named_last() -> None:
    page = "| what | how | `agent/test_a.py::test_one`, `::test_two` |\n| - | - | - |\n`::test_no`"
    assert tiers.promised(page) == [
        [("agent/test_a.py", "test_one"), ("agent/test_a.py", "test_two")]
    ]


def test_every_promise_has_a_test() -> None:
    assert len(tiers.promised(tiers.PROMISES.read_text())) > 40
