"""Tests that the lock of a root decides whether a daemon serves it, and that the hint in
the lock says where.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.shared import names
from ckptd.shared.errors import Forbidden
from ckptd.shared.location import Url
from ckptd.shared.system import machine, root_lock
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.local_lock import LocalLock
from ckptd.shared.system.root_lock import LockHolder, holder_of

SOCKET = Path("/run/s")


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Descriptor]:
    """The lock file of the root `tmp_path`, which nobody has locked."""
    path = tmp_path / names.control(machine.host()) / names.LOCK
    path.parent.mkdir(parents=True)
    with Descriptor(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as held:
        yield held


def test_the_holder_of_the_lock_is_named(lock: Descriptor, tmp_path: Path) -> None:
    assert root_lock.take(lock.fileno())
    assert holder_of(tmp_path) == LockHolder(0, None, os.geteuid())
    root_lock.write_hint(lock.fileno(), SOCKET)
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    assert holder_of(link) == holder_of(tmp_path) == LockHolder(os.getpid(), SOCKET, os.geteuid())
    root_lock.write_hint(lock.fileno(), Path("/s"))
    found = holder_of(tmp_path)
    assert found is not None
    assert found.socket == Path("/s")


def test_a_hint_without_a_lock_is_nothing(lock: Descriptor, tmp_path: Path) -> None:
    assert holder_of(tmp_path / "other") is None
    root_lock.write_hint(lock.fileno(), SOCKET)
    assert holder_of(tmp_path) is None
    # A daemon that starts does not go by the name of the one before.
    assert root_lock.take(lock.fileno())
    assert holder_of(tmp_path) == LockHolder(0, None, os.geteuid())


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"pid": "x"}', b'{"pid": 1, "socket": 2}'])
def test_a_hint_that_cannot_be_read_is_none(lock: Descriptor, tmp_path: Path, text: bytes) -> None:
    assert root_lock.take(lock.fileno())
    os.pwrite(lock.fileno(), text, 0)
    assert holder_of(tmp_path) == LockHolder(0, None, os.geteuid())


def test_the_second_daemon_is_refused_the_lock(lock: Descriptor, tmp_path: Path) -> None:
    assert root_lock.take(lock.fileno())
    (path,) = root_lock.lock_files(tmp_path)
    with Descriptor(os.open(path, os.O_RDWR)) as second:
        assert not root_lock.take(second.fileno())


def test_a_process_with_the_lock_file_of_a_root_open_may_hold_it(
    lock: Descriptor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert root_lock.may_hold(os.getpid())
    (path,) = root_lock.lock_files(tmp_path)
    path.unlink()  # the root is deleted, and its daemon still runs
    assert root_lock.may_hold(os.getpid())
    lock.close()
    (tmp_path / names.LOCK).touch()
    with (tmp_path / names.LOCK).open():  # a file of this name that is no lock of a root
        assert not root_lock.may_hold(os.getpid())
    with (tmp_path / root_lock.object_lock("349c6015", "node1")).open("w"):
        assert root_lock.may_hold(os.getpid())
    assert not root_lock.may_hold(2**30)  # no process has this number

    def refuse(path: str) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(os, "listdir", refuse)
    assert root_lock.may_hold(os.getpid())


def test_a_lock_that_only_another_user_may_read_is_not_taken_for_none(
    lock: Descriptor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Forbidden, match=f"may not look whether a daemon of uid {os.geteuid()} ser"):
        holder_of(tmp_path)


def test_a_root_of_ones_own_without_its_mode_is_not_taken_for_that_of_another_user(
    lock: Descriptor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path.resolve())
    with pytest.raises(Forbidden, match=f"search {tmp_path.resolve()}, .* `chmod u[+]rwx "):
        holder_of(tmp_path)


def test_the_lock_of_a_root_in_an_object_store_is_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "plain_directory", lambda: tmp_path / "ckptd-7")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid())
    root = Url("s3", "bucket", ("ckpts",))
    assert holder_of(root) is None
    held = LocalLock.take(root_lock.object_lock(machine.root_digest(root), machine.host()))
    assert held is not None
    root_lock.write_hint(held.fileno(), SOCKET)
    assert holder_of(root) == LockHolder(os.getpid(), SOCKET, os.getuid())
    held.close()
    assert holder_of(root) is None
