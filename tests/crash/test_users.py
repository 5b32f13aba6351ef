"""Tests that another user of the node gets nothing and stops nobody: one try of each
kind that the rig draws by the hundred.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
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


def test_a_drain_of_the_daemon_of_another_user_asks_it_or_says_that_it_cannot(python: str) -> None:
    """An epilog or a preStop hook runs as root, and must not take such a daemon for none."""
    case = users.Case("drain", "-", 0o755, 23_458, python)
    script = (
        "import os, sys, time, torch; from ckptd.agent import snapshot\n"
        "snapshot({'w': torch.ones(5)}, step=3, persist=False).wait('sealed')\n"
        "print('sealed', flush=True); time.sleep(600)"
    )
    environment = {"HOME": str(case.home), "CKPTD_ROOT": str(case.root), "CKPTD_JOB": "gpt"}
    trainer = subprocess.Popen(
        [python, "-c", script], stdout=subprocess.PIPE, text=True, env=environment,
        user=case.uid, group=case.uid, extra_groups=[],
    )  # fmt: skip
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "sealed\n"

        def drained(uid: int, *arguments: str) -> tuple[int, str]:
            done = subprocess.run(
                [python, "-m", "ckptd.daemon", "drain", *arguments], capture_output=True, text=True,
                env={}, user=uid, group=uid, extra_groups=[],
            )  # fmt: skip
            return done.returncode, done.stdout + done.stderr

        code, said = drained(users.THIEF, str(case.root))
        assert code == 12
        assert f"uid {users.THIEF} may not look whether a daemon of uid {case.uid} serves" in said
        assert drained(0)[0] != 0  # which names no root
        code, said = drained(0, str(case.root))
        assert (code, said.splitlines()[0]) == (0, "saved gpt/step-00000003.a0001")
        assert (case.root / "gpt" / "step-00000003.a0001" / "manifest.json").exists()
    finally:
        trainer.kill()
        trainer.communicate()
        case.remove()
