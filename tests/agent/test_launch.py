"""Private daemons: started when none is there, shared by ranks, outliving the trainer, leaving when nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from ckptd.agent import Agent, Checkpoint, close, recover, snapshot
from ckptd.daemon.report import daemon_status
from ckptd.shared import errors, names
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


def test_functions_need_nothing_but_a_root(private: Home) -> None:
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


def test_it_outlives_its_trainer_and_is_started_again_when_killed(private: Home) -> None:
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


def test_two_agents_share_one(private: Home) -> None:
    one, two = Agent("one"), Agent("two")
    assert daemon_status(names.private_socket(private.root))["counters"]["connections_refused"] == 0
    for agent in (one, two):
        agent.snapshot({"x": torch.ones(2)}, step=1).wait("durable", timeout=60)
        agent.close()


def test_a_root_that_cannot_be_used(private: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_ROOT", "/proc/nope")
    with pytest.raises(errors.DaemonUnreachable, match="cannot start a private daemon: /proc/nope cannot be used as the root"):
        recover({"w": torch.ones(1)})
    pending = snapshot({"w": torch.ones(1)}, step=1)
    assert pending.state == "failed"


def test_a_setting_that_cannot_be_is_quoted(private: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_CODEC", "lz5")
    with pytest.raises(
        errors.DaemonUnreachable, match=r"the private daemon did not start: .*codec 'lz5' is not known.*all of it in .*daemon\.log"
    ):
        Agent()


def test_no_root_and_no_daemon(private: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTD_ROOT")
    with pytest.raises(errors.DaemonUnreachable, match="no daemon runs on this node and no root is known"):
        Agent()


def test_foreign_socket_directory(private: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        # CI runs it as root.
        pytest.skip("giving a directory away needs root")  # reason: without somebody else's directory there is nothing to refuse
    theirs = private.path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(theirs))
    with pytest.raises(errors.DaemonUnreachable, match="belongs to uid 65534"):
        Agent()
