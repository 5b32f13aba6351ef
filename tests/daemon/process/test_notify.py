"""The protocol of systemd over a real socket, and passed sockets by descriptor."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ckptd.daemon.process import notify


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_hears_each_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, abstract: bool
) -> None:
    name = f"ckptd-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        notify.notify("READY=1")
        notify.notify("WATCHDOG=1")
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"WATCHDOG=1"]


def test_without_a_service_manager_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notify.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify.notify("READY=1")


@pytest.mark.parametrize(
    ("pid", "microseconds", "seconds"),
    [
        (None, None, 0.0),
        (None, "30000000", 15.0),
        ("own", "3000000", 1.5),
        ("other", "3000000", 0.0),
    ],
)
def test_the_watchdog_is_told_twice_in_its_time(
    monkeypatch: pytest.MonkeyPatch, pid: str | None, microseconds: str | None, seconds: float
) -> None:
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() if pid == "own" else os.getpid() + 1))
    if microseconds is not None:
        monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    assert notify.watchdog_seconds() == seconds


@pytest.mark.parametrize(("pid", "count"), [(None, "1"), ("other", "1"), ("own", "0")])
def test_a_socket_that_was_not_passed_to_this_process_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, pid: str | None, count: str
) -> None:
    if pid is not None:
        monkeypatch.setenv("LISTEN_PID", str(os.getpid() if pid == "own" else os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", count)
    assert notify.passed_socket() is None


def test_a_passed_socket_is_taken_and_not_inherited_further(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Descriptor 3 of this process may be in use, so another number stands for it."""
    assert notify.FIRST_PASSED == 3
    passed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    passed.bind(str(tmp_path / "s"))
    passed.listen()
    os.set_inheritable(passed.fileno(), True)
    monkeypatch.setattr(notify, "FIRST_PASSED", passed.detach())
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    found = notify.passed_socket()
    assert found is not None
    with found:
        assert (found.getsockname(), found.getblocking(), os.get_inheritable(found.fileno())) == (
            str(tmp_path / "s"),
            False,
            False,
        )
