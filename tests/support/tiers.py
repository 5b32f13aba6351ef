"""Sorts the tests into tiers, and keeps a test that starts processes from running in the
tier of those that do not.

`make test` runs every test that stays in the process, and one test with processes for
each promise of `docs/explanation/promises.md`. `make test-all` and `make crashes` run
the others. A test says that it starts daemons, ranks or interpreters by asking for the
fixture `processes`, or for one that asks for it, such as `daemon`. Without it, the first
process that it starts fails the test. A process that a fixture of a module or of the
session starts is shared by many tests, and may run in either tier.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks

PROMISES = Path(__file__).parents[2] / "docs" / "explanation" / "promises.md"
MAY_SKIP = re.compile(
    r"\b(accelerator|CUDA|Chromium|promtool|prometheus|deepspeed|ray|torchtitan|torchdata|triton"
    r"|torch_checkpointing|torch)\b"
)
"""The reasons for which CI may skip a test. Any other reason fails the run."""
_SPAWNS = ("subprocess.Popen", "os.posix_spawn")


class NotAllowed(AssertionError):
    """Raised in a test that starts a process and has not asked for `processes`."""


class _Guard:
    """Refuses to start processes in this process, unless they are allowed."""

    def __init__(self) -> None:
        self.allowed, self.refused = True, False
        self._owner = os.getpid()
        sys.addaudithook(self._audit)
        forks.before_start.append(self.check)

    def check(self) -> None:
        if not self.allowed and os.getpid() == self._owner:
            self.refused = True
            raise NotAllowed(
                "this test starts a process: let it ask for the fixture `processes`, so that "
                "it runs in `make test-all`"
            )

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _SPAWNS:
            self.check()


_guard = _Guard()


def begin(*, allowed: bool) -> None:
    """Refuse to start processes from now on, unless they are allowed."""
    _guard.allowed, _guard.refused = allowed, False


def end() -> None:
    """Allow processes again. Raises NotAllowed if one was refused, and the test has
    caught that.
    """
    try:
        if _guard.refused:
            _guard.check()
    finally:
        _guard.allowed = True


@contextmanager
def shared() -> Iterator[None]:
    """Context manager. Processes that are started in it are shared by many tests, and
    are allowed in every test.
    """
    before, _guard.allowed = _guard.allowed, True
    try:
        yield
    finally:
        _guard.allowed = before


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that start processes, those under `tests/crash`, and the one test of
    each promise.
    """
    first: dict[tuple[str, str], pytest.Item] = {}
    for item in items:
        path, _, function = item.nodeid.partition("::")
        path = path.partition("tests/")[2]
        crash = path.startswith("crash/")
        if crash:
            item.add_marker("crash")
        if crash or "processes" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
            first.setdefault((path, function.partition("[")[0]), item)
    for tests in promised(PROMISES.read_text()):
        for test in tests:
            if test in first:
                first[test].add_marker("promise")
                break


def promised(page: str) -> list[list[tuple[str, str]]]:
    """Return file and function of the tests that each row of a table names."""
    rows = []
    for line in page.splitlines():
        if line.startswith("| ") and line.count("|") > 2:
            tests, file = [], ""
            for named, function in re.findall(r"`((?:\w+/)*test_\w+\.py)?(?:::(test_\w+))?`", line):
                file = named or file
                if function:
                    tests.append((file, function))
            rows.append(tests)
    return [tests for tests in rows if tests]
