"""Tests locks: a process that may only read a file cannot use them against other
readers, and their holders can be named.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ckptd.shared.errors import Busy
from ckptd.shared.storage import locks
from tests.support.strangers import KINDS, NOBODY, holding, is_another_user, open_place


@pytest.fixture
def path() -> Iterator[Path]:
    with open_place() as place:
        made = place / "file"
        made.write_bytes(b"x")
        made.chmod(0o644)
        yield made


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def description_lock(fd: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))


def test_readers_share_the_lock_and_exclude_a_deleter(path: Path) -> None:
    with (
        opened(path, os.O_RDONLY) as one,
        opened(path, os.O_RDONLY) as other,
        opened(path) as deleter,
        opened(path) as second,
    ):
        assert locks.share(one)
        assert locks.share(other)
        assert not locks.exclude(deleter)
        locks.unlock(one)
        assert not locks.exclude(deleter)
        locks.unlock(other)
        assert locks.exclude(deleter)
        assert not locks.share(one)
        assert not locks.exclude(second)
        locks.unlock(deleter)
        assert locks.share(one)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_may_only_read_delays_deleters_but_no_reader(path: Path, kind: str) -> None:
    with holding(kind, path), opened(path, os.O_RDONLY) as reader, opened(path) as deleter:
        assert not locks.exclude(deleter)
        assert locks.share(reader)
    with opened(path) as deleter:
        assert locks.exclude(deleter)


def test_an_exclusive_lock_needs_a_descriptor_that_is_open_for_writing(path: Path) -> None:
    with opened(path, os.O_RDONLY) as fd:
        with pytest.raises(OSError) as caught:
            locks.exclude(fd)
        assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_locks_of_earlier_versions_are_respected(path: Path, kind: int) -> None:
    with opened(path, os.O_RDONLY) as earlier, opened(path) as deleter:
        fcntl.flock(earlier, kind)
        assert not locks.exclude(deleter)
        fcntl.flock(earlier, fcntl.LOCK_UN)
        assert locks.share(deleter)
        with pytest.raises(BlockingIOError):
            fcntl.flock(earlier, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_open_file_description_locks_flocks_count(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def missing(fd: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks, "_set", missing)
    with opened(path) as one, opened(path) as other:
        assert locks.share(one)
        assert not locks.exclude(other)
        locks.unlock(one)
        assert locks.exclude(other)
        assert not locks.share(one)


def test_without_any_locks_everything_is_granted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr("fcntl.flock", missing)
    monkeypatch.setattr("fcntl.fcntl", missing)
    with opened(path) as one, opened(path) as other:
        assert locks.share(one)
        assert locks.exclude(other)
        locks.unlock(one)


def test_a_file_system_that_fails_lets_readers_read_and_nobody_delete(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int, kind: int) -> None:
        raise OSError(errno.EIO, "the server is gone")

    monkeypatch.setattr(locks, "_set", failing)
    with opened(path) as fd:
        assert locks.share(fd)
        with pytest.raises(OSError, match="the server is gone"):
            locks.exclude(fd)


def test_a_reader_waits_until_its_deadline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    with opened(path) as deleter, opened(path) as reader:
        assert locks.exclude(deleter)
        with pytest.raises(Busy, match=f"the file cannot be read now: .* by pid {os.getpid()} "):
            locks.wait_to_share(reader, "the file")
        path.unlink()
        assert not locks.wait_to_share(reader, "the file")
        locks.unlock(deleter)
        assert not locks.wait_to_share(reader, "the file")


def test_a_forked_child_keeps_no_lock_that_its_parent_has_released(path: Path) -> None:
    end, told = os.pipe()
    fd = os.open(path, os.O_RDONLY)
    assert locks.share(fd)
    child = os.fork()
    if child == 0:
        os.close(told)
        os.read(end, 1)
        os._exit(0)
    os.close(end)
    try:
        locks.release(fd)
        with opened(path) as deleter:
            assert locks.exclude(deleter)
    finally:
        os.close(told)
        os.waitpid(child, 0)


# -- naming the holders


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", KINDS)
def test_holders_are_named(path: Path, kind: str) -> None:
    """The kernel keeps no pid for an open file description lock, so that the holder
    must be searched for.
    """
    uid = NOBODY if is_another_user() else os.getuid()
    with holding(kind, path) as pid, opened(path) as fd:
        found = locks.holders(fd, search=True)
        assert found.startswith(f"pid {pid} (python")
        assert found.endswith(f", uid {uid})")
        if kind == "ofd-read":
            assert (
                locks.holders(fd)
                == "a process that /proc does not show here (of another user, container or machine)"
            )
        else:
            assert locks.holders(fd) == found


def test_a_holder_whose_parent_took_the_lock_and_ended_is_named(path: Path) -> None:
    """/proc/locks still shows the pid of the parent."""
    end, told = os.pipe()
    shown, show = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(told)
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH)
        child = os.fork()
        if child == 0:
            os.write(show, str(os.getpid()).encode())
            os.read(end, 1)
        os._exit(0)
    os.close(end)
    os.waitpid(parent, 0)
    try:
        child = int(os.read(shown, 20))
        with opened(path) as fd:
            assert f"pid {child} (" in locks.holders(fd, search=True)
    finally:
        for fd in (told, shown, show):
            os.close(fd)


@pytest.mark.usefixtures("processes")
def test_some_of_many_holders_are_named_and_the_others_are_counted(path: Path) -> None:
    with ExitStack() as held, opened(path) as fd:
        pids = [held.enter_context(holding("flock-sh", path)) for _ in range(7)]
        found = locks.holders(fd)
        assert sum(f"pid {pid} (" in found for pid in pids) == 5
        assert found.endswith(" and 2 more")
