"""Tests that the daemon of a root is found by every user of it, wherever it listens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptd.shared import names
from ckptd.shared.errors import DaemonUnreachable, Forbidden
from ckptd.shared.system import machine, root_lock
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import NoDaemon
from ckptd.shared.wire.root_daemon import connect
from tests.support.cases import each_case
from tests.support.fake_daemon import FakeDaemon, fake_daemon

SECONDS = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / names.control(machine.host())).mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def daemon(root: Path) -> Iterator[FakeDaemon]:
    """A daemon of the root, at a socket that is not a usual one."""
    with fake_daemon(m.Welcome(re=0, version=1, root=str(root))) as found:
        yield found


@pytest.fixture
def lock(root: Path) -> Iterator[Descriptor]:
    """The lock of the root, which this process holds."""
    (path,) = root_lock.lock_files(root)
    with Descriptor(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as held:
        assert root_lock.take(held.fileno())
        yield held


def test_a_daemon_at_a_usual_socket_is_found_without_the_file_system_of_its_root(
    root: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_lock, "holder_of", lambda root: pytest.fail("the root is asked"))
    usual = [root / "no", daemon.socket]
    with closing(connect(root, SECONDS, usual=usual)) as channel:
        assert channel.path == daemon.socket


def test_a_daemon_elsewhere_is_found_by_the_lock_of_its_root(
    root: Path, daemon: FakeDaemon, lock: Descriptor
) -> None:
    root_lock.write_hint(lock.fileno(), daemon.socket)
    link = root.with_name("link")
    link.symlink_to("root")
    for named in (root, link):
        with closing(connect(named, SECONDS, usual=())) as channel:
            assert channel.path == daemon.socket


def test_without_a_lock_there_is_no_daemon_whatever_the_hint_says(
    root: Path, daemon: FakeDaemon, lock: Descriptor
) -> None:
    root_lock.write_hint(lock.fileno(), daemon.socket)
    lock.close()
    with pytest.raises(NoDaemon, match=f"none holds the lock of {root}"):
        connect(root, SECONDS, usual=())


@each_case("told", [False, True])
def test_a_daemon_that_holds_the_lock_and_cannot_be_reached_is_not_none(
    tmp_path: Path, told: bool
) -> None:
    path = tmp_path / names.control(machine.host()) / names.LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with Descriptor(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as held:
        assert root_lock.take(held.fileno())
        if told:
            root_lock.write_hint(held.fileno(), tmp_path / "gone")
        with pytest.raises(DaemonUnreachable, match=f"holds the lock of {tmp_path}") as raised:
            connect(tmp_path, SECONDS, usual=())
    assert not isinstance(raised.value, NoDaemon)


def test_a_daemon_that_serves_a_root_that_was_moved_is_named(
    root: Path, daemon: FakeDaemon, lock: Descriptor
) -> None:
    root_lock.write_hint(lock.fileno(), daemon.socket)
    moved = root.with_name("moved")
    root.rename(moved)
    with pytest.raises(DaemonUnreachable, match=f"serves it as {root}: the root was moved"):
        connect(moved, SECONDS, usual=())


def test_only_a_command_of_the_superuser_speaks_to_the_daemon_of_another_user(
    root: Path, daemon: FakeDaemon, lock: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.shared.system.owners.peer_of", lambda connection: (7, 4711))
    root_lock.write_hint(lock.fileno(), daemon.socket)
    monkeypatch.setattr(
        "ckptd.shared.wire.root_daemon.holder_of",
        lambda root: root_lock.LockHolder(7, daemon.socket, 4711),
    )
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("ckptd.shared.system.owners.check_socket", lambda path, owner: None)
    monkeypatch.setattr("ckptd.shared.wire.channel.check_socket", lambda path, owner: None)
    with closing(connect(root, SECONDS, usual=(), any_user=True)) as channel:
        assert channel.owner == 4711
    with pytest.raises(Forbidden, match="belongs to uid 4711"):
        connect(root, SECONDS, usual=())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Forbidden, match="belongs to uid 4711"):
        connect(root, SECONDS, usual=(), any_user=True)
