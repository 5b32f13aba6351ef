"""Tests what `ckptd status` says about the start of a daemon that has ended."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from ckptd.daemon.commands import restart
from ckptd.daemon.commands.restart import gone_root, restart_advice
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import History
from ckptd.shared.location import located
from ckptd.shared.system import machine
from tests.support.commands import ckptd
from tests.support.daemons import Home, holds, running


def ready(state: Path, root: Path, *sockets: str) -> Path:
    """Write a history with daemons at these sockets. Return its file."""
    file = machine.history_file(state, root)
    file.parent.mkdir(parents=True, exist_ok=True)
    history = History(file)
    history.take([
        LoggedEvent(float(number), "daemon.ready", 20, "ready", {"socket": socket})
        for number, socket in enumerate(sockets)
    ])  # fmt: skip
    history.close()
    return file


@pytest.mark.usefixtures("processes")
def test_the_socket_of_a_killed_daemon_is_named(place: Home) -> None:
    state = {"CKPTD_STATE_DIR": str(place.state)}
    with running(place, forked=True) as daemon:
        asked = ("history", "--root", place.root, "--event", "daemon.ready")
        assert holds(lambda: "daemon.ready" in ckptd(*asked, environment=state).stdout, 60)
        daemon.kill()
    start = (
        f"start it: `ckptd run --root {place.root} --socket {place.socket}`, or `systemctl start` "
        f"with its unit, with the settings that it had. What is in memory is saved then"
    )
    for more in ([], ["--check"]):
        told = ckptd("status", place.root, *more, environment=state)
        assert told.returncode == 14
        assert start in told.stderr


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root without a daemon, and a state directory of its own."""
    monkeypatch.setenv("CKPTD_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "my root" / ".ckptd").mkdir(parents=True)
    return tmp_path / "my root"


def test_the_last_of_several_sockets_counts(root: Path) -> None:
    ready(root.parent / "state", root, "/run/a", "/run/b c")
    assert f"`ckptd run --root '{root}' --socket '/run/b c'`" in restart_advice(root)


def test_a_usual_socket_is_not_named(root: Path) -> None:
    for socket in (machine.default_sockets()[0], machine.private_socket(root)):
        ready(root.parent / "state", root, "/run/a", str(socket))
        assert "--socket" not in restart_advice(root)


def test_a_history_that_is_missing_or_damaged_is_ignored(root: Path) -> None:
    usual = f"start it: `ckptd run --root '{root}'`, or"
    assert usual in restart_advice(root)
    file = ready(root.parent / "state", root, "/run/a")
    assert usual not in restart_advice(root)
    file.write_bytes(b"no database" * 1000)
    assert usual in restart_advice(root)


@pytest.mark.usefixtures("processes")
def test_a_root_that_is_gone_is_to_be_mounted_first(root: Path) -> None:
    ready(root.parent / "state", root, "/run/a")
    state = {"CKPTD_STATE_DIR": str(root.parent / "state")}
    mount = ": mount it first, and start its daemon then\n"
    (root / ".ckptd").rmdir()
    for more in ([], ["--check"]):
        told = ckptd("status", root, *more, environment=state)
        assert (told.returncode, "ckptd run" in told.stderr) == (14, False)
        assert told.stderr.endswith(
            f"; {root} holds no root, though a daemon has served one there{mount}"
        )
    root.rmdir()
    for more in ([], ["--check"]):
        told = ckptd("status", root, *more, environment=state)
        assert (told.returncode, "ckptd run" in told.stderr) == (14, False)
        assert told.stderr.endswith(f"; {root} does not exist{mount}")


def test_a_directory_that_was_never_a_root_is_not_gone(root: Path) -> None:
    (root / ".ckptd").rmdir()
    assert gone_root(root) == ""
    assert gone_root(located("s3://bucket/x")) == ""


def test_a_file_system_that_hangs_is_not_gone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_LOOK_SECONDS", 0.05)
    hung = Event()
    monkeypatch.setattr(Path, "exists", lambda self: self == root and not hung.wait(60))
    monkeypatch.setattr(restart, "_last_start", lambda root: None)
    try:
        assert "start it: `ckptd run" in restart_advice(root)
    finally:
        hung.set()
