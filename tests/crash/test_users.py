"""Tests that another user of the node gets nothing and stops nobody: one try of each
kind that the rig draws by the hundred.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import users
from tests.crash.images import Unavailable


@pytest.fixture(autouse=True)
def _one_at_a_time() -> Iterator[None]:
    """Keep two workers from playing the same two users, who share names in /tmp."""
    with (Path(tempfile.gettempdir()) / "ckptd-test-users.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory(prefix="ckptd-users-") as place:
        os.chmod(place, 0o755)
        try:
            yield users.python(Path(place) / "venv")
        except Unavailable as error:
            pytest.skip(str(error))


@pytest.mark.parametrize(
    ("kind", "shape", "mode"),
    [
        ("daemon in the socket directory", "daemon", 0o755),
        ("socket directory", "directory", 0o755),
        ("segment directory", "link", 0o755),
        ("own file at the socket", "-", 0o755),
        ("socket", "daemon", 0o700),
        ("root", "daemon", 0o755),
        ("at work", "-", 0o755),
        ("at work", "-", 0o700),
        ("locks", "-", 0o700),
    ],
)
def test_another_user_gets_nothing_and_stops_nobody(
    python: str, kind: str, shape: str, mode: int
) -> None:
    case = users.Case(kind, shape, mode, 23_456, python)
    try:
        assert users.attempt(case) == ""
    finally:
        case.remove()


def test_locks_of_another_user_hide_no_checkpoint(python: str) -> None:
    case = users.Case("locks", "-", 0o755, 23_457, python)
    try:
        assert users.attempt(case) == ""
    finally:
        case.remove()
