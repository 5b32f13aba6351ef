"""Tests failpoints: what a specification may say, and what each action does."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ckptd.shared.system import failpoints
from ckptd.shared.system.failpoints import arm, failpoint


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    arm("")


def test_names_are_registered_once() -> None:
    groups = (
        failpoints.AGENT,
        failpoints.DAEMON,
        failpoints.NODES,
        failpoints.STAGE,
        failpoints.MARKER,
        failpoints.PEERS,
    )
    assert sum(map(len, groups)) == len(failpoints.NAMES)


def test_an_unarmed_point_does_nothing() -> None:
    arm("commit.synced=error(EIO)")
    assert all(failpoint(name) is False for name in failpoints.NAMES - {"commit.synced"})


@pytest.mark.parametrize(
    "entry",
    [
        "nope=kill", "commit.written", "commit.written=", "=kill", "commit.written=die",
        "commit.written=error", "commit.written=error()", "commit.written=error(EWHAT)",
        "commit.written=error(5)", "commit.written=sleep", "commit.written=sleep()",
        "commit.written=sleep(x)", "commit.written=sleep(-1)", "commit.written=kill@",
        "commit.written=kill@x", "commit.written=kill@1@2", "commit.written=KILL",
        "commit.written=kill;commit.synced=kill", "commit.written = kill",
    ],
)  # fmt: skip
def test_a_typo_is_an_error_that_names_the_entry(entry: str) -> None:
    arm("commit.synced=short_write")
    with pytest.raises(ValueError, match="CKPTD_FAILPOINTS") as caught:
        arm(f"commit.renamed=hang,{entry}")
    assert repr(entry) in str(caught.value)
    assert failpoint("commit.synced") is True  # the armed points are as before


@pytest.mark.parametrize("entry", ["commit.written=sleep(1.2.3)", "commit.written=sleep(.)"])
def test_an_argument_that_is_not_a_number_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match="CKPTD_FAILPOINTS"):
        arm(entry)


def test_several_entries_with_spaces() -> None:
    arm(" commit.written=short_write , commit.synced=error(ENOSPC),, ")
    assert failpoint("commit.written") is True
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        failpoint("commit.synced")
    arm("")
    assert failpoint("commit.written") is False
    assert failpoint("commit.synced") is False


def test_error_comes_every_time() -> None:
    arm("commit.written=error(EIO)")
    for _ in range(3):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
            failpoint("commit.written")
        assert caught.value.errno == errno.EIO


def test_at_n_means_the_nth_time_alone() -> None:
    arm("commit.written=error(EIO)@3,commit.synced=short_write@1")
    assert [failpoint("commit.synced") for _ in range(3)] == [True, False, False]
    assert [failpoint("commit.written") for _ in range(2)] == [False, False]
    with pytest.raises(OSError):
        failpoint("commit.written")
    assert [failpoint("commit.written") for _ in range(3)] == [False, False, False]


def test_arming_resets_the_count() -> None:
    arm("commit.written=short_write@2")
    assert failpoint("commit.written") is False
    arm("commit.written=short_write@2")
    assert [failpoint("commit.written") for _ in range(3)] == [False, True, False]


def test_at_n_counts_all_threads() -> None:
    arm("commit.written=short_write@100")
    hits: list[bool] = []
    threads = [
        threading.Thread(target=lambda: hits.extend(failpoint("commit.written") for _ in range(50)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(hits), hits.count(True)) == (400, 1)


@pytest.mark.parametrize(
    ("action", "seconds"), [("sleep(0.25)", 0.25), ("sleep(3)", 3.0), ("hang", 1e9)]
)
def test_sleep_and_hang_sleep_for_their_seconds(
    action: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    arm(f"commit.written={action}")
    assert failpoint("commit.written") is False
    assert slept == [seconds]


def _python(code: str, specification: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CKPTD_FAILPOINTS": specification}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.usefixtures("processes")
def test_kill_is_a_sigkill_at_the_point() -> None:
    code = """
from ckptd.shared.system.failpoints import failpoint
for n in range(5):
    print(n, flush=True)
    failpoint("commit.written")
"""
    done = _python(code, "commit.written=kill@2")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "0\n1\n"


@pytest.mark.usefixtures("processes")
def test_a_typo_in_the_environment_is_an_error_at_import() -> None:
    done = _python("import ckptd.shared.system.failpoints", "comit.written=kill")
    assert done.returncode == 1
    assert "'comit.written=kill' is not of the form" in done.stderr
