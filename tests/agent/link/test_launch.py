"""Tests private daemons: they are started if none runs, shared by ranks, outlive the trainer, and end when nothing is left to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from ckptd.agent import Agent, Checkpoint, close, recover, snapshot
from ckptd.daemon.report import daemon_status
from ckptd.shared import errors, names
from ckptd.shared.state_directory import configured_state_dir, state_directory
from tests.support.daemons import Home


@pytest.fixture
def private(place: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    for key in [key for key in os.environ if key.startswith("CKPTD_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.path))
    monkeypatch.setenv("CKPTD_ROOT", str(place.root))
    monkeypatch.setenv("CKPTD_IDLE_TIMEOUT", "0.2")
    yield place
    close()
    for process in psutil.process_iter(["cmdline"]):
        if str(place.root) in (process.info["cmdline"] or []):
            process.kill()


def daemon_pid(home: Home) -> int:
    return int(daemon_status(names.private_socket(home.root))["pid"])


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it never left"
        time.sleep(0.02)


def test_snapshot_and_recover_need_only_a_root(private: Home) -> None:
    state = {"w": torch.ones(10), "n": 1}
    assert recover(state) is None
    snapshot(state, step=1).wait("durable", timeout=60)
    pid = daemon_pid(private)
    assert os.getsid(pid) == pid
    state["w"].zero_()  # type: ignore[attr-defined]
    recovered = recover(state)
    assert recovered is not None
    assert recovered.source == "memory"
    assert state["w"].tolist() == [1.0] * 10  # type: ignore[attr-defined]
    close()
    until_gone(pid)
    assert not names.private_socket(private.root).exists()
    assert private.segment_files() == []
    with Checkpoint.open(private.root / "default") as checkpoint:
        assert checkpoint.step == 1
    recovered = recover(state)
    assert recovered is not None
    assert recovered.source == "storage"


def test_a_private_daemon_outlives_its_trainer_and_is_restarted_when_killed(private: Home) -> None:
    script = (
        "import torch, os; from ckptd.agent import snapshot\n"
        "snapshot({'w': torch.ones(5)}, step=3, persist=False).wait('sealed'); os.kill(os.getpid(), 9)"
    )
    result = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert result.returncode == -9
    agent = Agent()
    state = {"w": torch.zeros(5)}
    recovered = agent.recover(state)
    assert recovered is not None
    assert (recovered.step, recovered.source) == (3, "memory")
    pid = daemon_pid(private)
    os.kill(pid, 9)
    deadline = time.monotonic() + 60
    while (pending := agent.snapshot(state, step=4 + int(1000 * time.monotonic()))).state != "sealed":
        assert time.monotonic() < deadline, pending
        time.sleep(0.05)
    pending.wait("durable", timeout=60)
    assert daemon_pid(private) != pid
    agent.close()


def test_two_agents_share_one_private_daemon(private: Home) -> None:
    one, two = Agent("one"), Agent("two")
    assert daemon_status(names.private_socket(private.root))["counters"]["connections_refused"] == 0
    for agent in (one, two):
        agent.snapshot({"x": torch.ones(2)}, step=1).wait("durable", timeout=60)
        agent.close()


def test_a_root_that_cannot_be_used_is_an_error(private: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_ROOT", "/proc/nope")
    with pytest.raises(
        errors.DaemonUnreachable, match="the private daemon did not start: cannot use /proc/nope as the root for checkpoints"
    ):
        recover({"w": torch.ones(1)})
    pending = snapshot({"w": torch.ones(1)}, step=1)
    assert pending.state == "failed"


def test_an_invalid_setting_of_the_private_daemon_is_quoted(private: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_CODEC", "lz5")
    with pytest.raises(
        errors.DaemonUnreachable, match=r"the private daemon did not start: .*codec 'lz5' is not known.*the whole log is .*daemon\.log"
    ):
        Agent()


def test_without_a_root_and_a_daemon_the_error_says_what_to_do(private: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTD_ROOT")
    with pytest.raises(errors.DaemonUnreachable, match="no daemon runs on this node and no root is known"):
        Agent()


# -- obstacles that another user of the node may have made


def give_away(path: Path) -> None:
    if os.getuid():
        pytest.skip("giving a file away needs root")
    os.chown(path, 65534, 65534, follow_symlinks=False)


def saves(root: Path, job: str = "job") -> None:
    """Check that a private daemon starts, and that its files belong to this user."""
    state = {"w": torch.ones(10)}
    agent = Agent(job, root=root)
    agent.snapshot(state, step=1).wait("durable", timeout=60)
    state["w"].zero_()
    assert agent.recover(state) is not None
    assert state["w"].tolist() == [1.0] * 10
    agent.close()


@pytest.fixture
def plain(private: Home, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that stands for /tmp/ckptd-UID. $XDG_RUNTIME_DIR is not set."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("ckptd.shared.names._plain_socket_directory", lambda: private.path / "plain")
    return private.path / "plain"


@pytest.mark.parametrize("kind", ["directory", "link", "FIFO"])
def test_a_taken_name_of_the_socket_directory_does_not_block_the_daemon(private: Home, plain: Path, kind: str) -> None:
    if kind == "directory":
        plain.mkdir(mode=0o777)
    elif kind == "link":
        (private.path / "elsewhere").mkdir(mode=0o777)
        plain.symlink_to("elsewhere")
    else:
        os.mkfifo(plain)
    give_away(plain)
    saves(private.root)
    (used,) = private.path.glob("plain.*")
    assert used.stat().st_mode & 0o777 == 0o700
    assert names.private_socket(private.root).parent == used
    saves(private.root)
    assert kind == "FIFO" or list(plain.iterdir()) == []


def test_a_runtime_directory_of_another_user_does_not_block_the_daemon(private: Home, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = private.path / "theirs"
    theirs.mkdir(mode=0o777)
    give_away(theirs)
    for stale in (theirs, private.path / "gone"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(stale))
        saves(private.root)
    assert list(theirs.iterdir()) == []
    assert plain.is_dir()


def test_a_private_daemon_is_found_where_another_environment_has_put_it(
    private: Home, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Agent("first", root=private.root)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private.path))
    saves(private.root)
    first.close()


@contextmanager
def stranger(path: Path) -> Iterator[list[bytes]]:
    """Context manager. Run another user's process that listens at `path`. Yields a list of everything that it is sent."""
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        give_away(path)
        os.chmod(path.parent, 0o1777)
        os.seteuid(65534)
        try:
            listener.listen(10)
        finally:
            os.seteuid(0)

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                    with client:
                        heard.append(client.recv(65536))
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_named_daemon_of_another_user_is_refused(private: Home) -> None:
    with stranger(private.socket) as heard:
        with pytest.raises(errors.Forbidden, match=f"{private.socket} belongs to uid 65534"):
            Agent(socket=private.socket)
        os.chown(private.socket, 0, 0)
        with pytest.raises(errors.Forbidden, match=f"the process that listens at {private.socket} belongs to uid 65534"):
            Agent(socket=private.socket)
    assert b"".join(heard) == b""


@pytest.mark.parametrize("with_root", [True, False])
def test_a_daemon_of_another_user_at_a_default_path_is_not_used(
    private: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, with_root: bool
) -> None:
    monkeypatch.setattr(names, "default_sockets", lambda: [private.socket])
    with stranger(private.socket) as heard:
        if with_root:
            os.chmod(private.path, 0o700)
            saves(private.root)
        else:
            monkeypatch.delenv("CKPTD_ROOT")
            with pytest.raises(errors.DaemonUnreachable, match="no daemon runs on this node and no root is known"):
                Agent()
    assert b"".join(heard) == b""
    assert f"is not used: the socket {private.socket} belongs to uid 65534" in caplog.text


@pytest.mark.parametrize("kind", ["link", "FIFO", "second name", "another user's"])
def test_a_log_that_is_not_our_own_file_is_not_written(private: Home, kind: str) -> None:
    target, log = private.path / "target", state_directory(configured_state_dir(), private.root) / "daemon.log"
    target.write_text("mine")
    log.parent.mkdir(parents=True)
    if kind == "link":
        log.symlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(log)
    elif kind == "second name":
        os.link(target, log)
    else:
        log.touch()
        give_away(log)
    with pytest.raises(errors.DaemonUnreachable, match=r"its log cannot be written: .*daemon\.log is not a regular file.*: remove it"):
        Agent()
    assert target.read_text() == "mine"


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_root_that_is_a_url_is_refused(private: Home, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.chdir(private.path)
    monkeypatch.setenv("CKPTD_ROOT", "s3://bucket/runs" if by == "environment" else str(private.root))
    with pytest.raises(errors.InvalidRequest, match=r"the root s3://bucket/runs is a URL, .* saves to directories only: mount"):
        Agent(root="s3://bucket/runs" if by == "argument" else None)
    assert list(private.path.iterdir()) == []
