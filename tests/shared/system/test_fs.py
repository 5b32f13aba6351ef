"""Tests the seam to the operating system: the steps of `publish`, renames, links, and
what a kernel may do to a write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptd.shared.errors import OutOfInodes, StorageError
from ckptd.shared.system import failpoints, fs
from ckptd.shared.system.fs import (
    Buffer,
    FileSystem,
    PosixFileSystem,
    opened_directory,
    publish,
    read_exactly,
    read_small,
)
from tests.shared.samples import memory_file


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


class Recorder(PosixFileSystem):
    """Records what is done, in order. `fails` names the step that raises."""

    def __init__(self, fails: str = "", number: int = errno.ENOSPC) -> None:
        self.steps: list[str] = []
        self._fails, self._number = fails, number

    def _step(self, step: str) -> None:
        self.steps.append(step)
        if step == self._fails:
            raise OSError(self._number, os.strerror(self._number))

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        self._step(f"create {name}")
        return super().create(name, directory, direct=direct, mode=mode)

    def write(self, fd: int, data: Buffer, offset: int) -> None:
        self._step("write")
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._step("sync")
        super().sync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._step("close")

    def rename(self, old: str, new: str, directory: int, *, replace: bool) -> None:
        self._step(f"rename {old} {new} {replace}")
        super().rename(old, new, directory, replace=replace)

    def sync_directory(self, directory: int) -> None:
        self._step("sync directory")
        super().sync_directory(directory)


# -- publish


@pytest.mark.parametrize("replace", [True, False])
def test_publish_syncs_before_it_renames_and_the_directory_after(
    tmp_path: Path, directory: int, replace: bool
) -> None:
    recorder = Recorder()
    publish(recorder, "x", directory, b"all of it", replace=replace)
    assert recorder.steps == [
        "create x.tmp",
        "write",
        "sync",
        "close",
        f"rename x.tmp x {replace}",
        "sync directory",
    ]
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"x": b"all of it"}


def test_publish_replaces_only_if_told_to(tmp_path: Path, directory: int) -> None:
    publish(PosixFileSystem(), "x", directory, b"first", replace=False)
    with pytest.raises(FileExistsError):
        publish(PosixFileSystem(), "x", directory, b"second", replace=False)
    assert (tmp_path / "x").read_bytes() == b"first"
    publish(PosixFileSystem(), "x", directory, b"third", replace=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix != ".tmp"} == {
        "x": b"third"
    }


def test_publish_removes_the_temporary_file_of_a_dead_process(
    tmp_path: Path, directory: int
) -> None:
    (tmp_path / "x.tmp").write_bytes(b"half of something that was much longer")
    publish(PosixFileSystem(), "x", directory, b"new", replace=False)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"x": b"new"}


def test_publish_removes_a_link_in_its_way_and_does_not_follow_it(
    tmp_path: Path, directory: int
) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "x.tmp").symlink_to(tmp_path / "target")
    publish(PosixFileSystem(), "x", directory, b"new", replace=False)
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert not (tmp_path / "x").is_symlink()
    assert (tmp_path / "x").read_bytes() == b"new"


@pytest.mark.parametrize("step", ["create x.tmp", "write", "sync", "rename x.tmp x False"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_publication_shows_nothing_under_its_name(
    tmp_path: Path, directory: int, step: str, number: int
) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        publish(Recorder(step, number), "x", directory, b"data", replace=False)
    assert caught.value.errno == number
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("step", ["write", "sync", "rename x.tmp x False"])
def test_a_failed_publication_leaves_no_file_behind(
    tmp_path: Path, directory: int, step: str
) -> None:
    """The process lives on and knows that the publication failed.

    A remaining file would keep the directory from being removed.
    """
    with pytest.raises(OSError):
        publish(Recorder(step), "x", directory, b"data", replace=False)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_publication_leaves_no_file_behind(tmp_path: Path, directory: int) -> None:
    publish(PosixFileSystem(), "x", directory, b"first", replace=False)
    with pytest.raises(FileExistsError):
        publish(PosixFileSystem(), "x", directory, b"second", replace=False)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_publish_passes_its_failpoints_in_order(tmp_path: Path, directory: int) -> None:
    found: dict[str, tuple[bool, list[str]]] = {}
    for point in ("commit.written", "commit.synced", "commit.renamed"):
        recorder = Recorder()
        failpoints.arm(f"{point}=error(EDQUOT)")
        with pytest.raises(OSError, match="quota"):
            publish(recorder, "x", directory, b"data", replace=False, points="commit")
        found[point] = ((tmp_path / "x").exists(), [step.split()[0] for step in recorder.steps])
    assert found == {
        "commit.written": (False, ["create", "close"]),
        "commit.synced": (False, ["create", "write", "sync", "close"]),
        "commit.renamed": (True, ["create", "write", "sync", "close", "rename"]),
    }


def test_a_short_write_is_never_published(tmp_path: Path, directory: int) -> None:
    failpoints.arm("commit.written=short_write")
    recorder = Recorder()
    with pytest.raises(OSError, match="short write") as caught:
        publish(recorder, "x", directory, b"12345678", replace=False, points="commit")
    assert caught.value.errno == errno.EIO
    assert recorder.steps == ["create x.tmp", "write", "close"]
    assert not (tmp_path / "x").exists()


def test_publish_without_points_passes_none(tmp_path: Path, directory: int) -> None:
    failpoints.arm("commit.written=error(EIO),commit.synced=error(EIO),commit.renamed=error(EIO)")
    publish(PosixFileSystem(), "x", directory, b"data", replace=False)
    assert (tmp_path / "x").read_bytes() == b"data"


# -- rename


def _renameat2(number: int) -> object:
    def refuse(*arguments: int | bytes) -> int:
        ctypes.set_errno(number)
        return -1

    return refuse


@pytest.mark.parametrize(
    "number", [0, errno.EINVAL, errno.ENOSYS], ids=["renameat2", "einval", "enosys"]
)
def test_rename_without_replacing(
    tmp_path: Path, directory: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number:  # a file system or kernel without RENAME_NOREPLACE: link and unlink replace it
        monkeypatch.setattr(fs, "_renameat2", _renameat2(number))
    posix = PosixFileSystem()
    (tmp_path / "a").write_bytes(b"a")
    posix.rename("a", "b", directory, replace=False)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"b": b"a"}
    (tmp_path / "c").write_bytes(b"c")
    with pytest.raises(FileExistsError):
        posix.rename("c", "b", directory, replace=False)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"b": b"a", "c": b"c"}
    with pytest.raises(FileNotFoundError):
        posix.rename("nothing", "d", directory, replace=False)
    assert {p.name for p in tmp_path.iterdir()} == {"b", "c"}


def test_rename_passes_on_other_errors(
    tmp_path: Path, directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "_renameat2", _renameat2(errno.EROFS))
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        PosixFileSystem().rename("a", "b", directory, replace=False)
    assert {p.name for p in tmp_path.iterdir()} == {"a"}


def test_rename_can_replace(tmp_path: Path, directory: int) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    PosixFileSystem().rename("a", "b", directory, replace=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"b": b"a"}


# -- links


def test_symbolic_links_are_never_followed(tmp_path: Path, directory: int) -> None:
    posix = PosixFileSystem()
    (tmp_path / "real").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "dirlink").symlink_to("real")
    (tmp_path / "filelink").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(OSError) as caught:
        posix.open_directory("dirlink", directory)
    assert caught.value.errno in (errno.ENOTDIR, errno.ELOOP)
    for name in ("filelink", "dangling", "file", "real"):
        with pytest.raises(FileExistsError):
            posix.create(name, directory)
    with pytest.raises(OSError) as caught:
        read_small(PosixFileSystem(), "filelink", directory, 100)
    assert caught.value.errno == errno.ELOOP
    assert not (tmp_path / "nowhere").exists()
    assert not posix.make_directory("dangling", directory)
    posix.unlink("filelink", directory)
    assert (tmp_path / "file").read_bytes() == b"x"


# -- create, allocate, write


def test_create_makes_a_new_file_of_the_given_mode(tmp_path: Path, directory: int) -> None:
    posix: FileSystem = PosixFileSystem()
    before = os.umask(0o022)
    try:
        posix.close(posix.create("a", directory))
        posix.close(posix.create("b", directory, mode=0o600))
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600


def test_create_falls_back_where_direct_io_is_refused(
    tmp_path: Path, directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, flags_seen = os.open, []

    def without_direct(
        path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        fd = real(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
        flags_seen.append(bool(flags & os.O_DIRECT))
        if flags & os.O_DIRECT:  # some kernels create the file before they refuse
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", without_direct)
    posix = PosixFileSystem()
    fd = posix.create("x", directory, direct=True)
    posix.write(fd, b"data", 0)
    posix.close(fd)
    assert flags_seen == [True, False]
    assert (tmp_path / "x").read_bytes() == b"data"


def test_create_with_direct_passes_on_other_errors(tmp_path: Path, directory: int) -> None:
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        PosixFileSystem().create("x", directory, direct=True)
    assert (tmp_path / "x").read_bytes() == b"mine"


def test_allocate_and_truncate_set_the_length() -> None:
    posix = PosixFileSystem()
    with memory_file(b"abc") as fd:
        posix.allocate(fd, 10000)
        assert os.pread(fd, 20000, 0) == b"abc" + bytes(9997)
        posix.truncate(fd, 2)
        assert os.pread(fd, 20000, 0) == b"ab"
        posix.sync(fd)
        posix.sync_data(fd)


@pytest.mark.parametrize(
    "make", [bytes, bytearray, memoryview], ids=["bytes", "bytearray", "memoryview"]
)
def test_write_goes_on_after_a_short_write(
    make: type[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    with memory_file(b"....") as fd:
        monkeypatch.setattr(
            os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:3], offset)
        )
        PosixFileSystem().write(fd, make(b"0123456789"), 4)
        assert os.pread(fd, 100, 0) == b"....0123456789"


def test_write_takes_a_mapping() -> None:
    with memory_file(b"") as fd, mmap.mmap(-1, 4096) as data:
        data[:4] = b"abcd"
        PosixFileSystem().write(fd, data, 0)
        assert os.pread(fd, 5000, 0) == b"abcd" + bytes(4092)


def test_write_does_not_spin_when_the_kernel_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with memory_file(b"") as fd, pytest.raises(OSError) as caught:
        PosixFileSystem().write(fd, b"x", 0)
    assert caught.value.errno == errno.EIO


# -- directories


def test_make_and_remove_directories(tmp_path: Path, directory: int) -> None:
    posix = PosixFileSystem()
    assert posix.make_directory("d", directory) is True
    assert posix.make_directory("d", directory) is False
    (tmp_path / "d" / "file").write_bytes(b"")
    with pytest.raises(OSError):
        posix.remove_directory("d", directory)
    with opened_directory(posix, "d", directory) as inner:
        posix.unlink("file", inner)
    posix.remove_directory("d", directory)
    assert list(tmp_path.iterdir()) == []


def test_sync_directory_ignores_only_einval(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(number: int) -> object:
        def fsync(fd: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", fails(errno.EINVAL))
    PosixFileSystem().sync_directory(directory)
    monkeypatch.setattr(os, "fsync", fails(errno.EIO))
    with pytest.raises(OSError) as caught:
        PosixFileSystem().sync_directory(directory)
    assert caught.value.errno == errno.EIO


def test_opened_directory_closes_whatever_happens(tmp_path: Path, directory: int) -> None:
    (tmp_path / "d").mkdir()
    opened: list[int] = []

    def use() -> None:
        with opened_directory(PosixFileSystem(), "d", directory) as fd:
            opened.append(fd)
            assert os.listdir(fd) == []
            raise RuntimeError

    with pytest.raises(RuntimeError):
        use()
    with pytest.raises(OSError) as caught:
        os.fstat(opened[0])
    assert caught.value.errno == errno.EBADF


# -- reading


def test_read_small_has_a_limit(tmp_path: Path, directory: int) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_small(PosixFileSystem(), "x", directory, 5) == b"12345"
    with pytest.raises(OSError) as caught:
        read_small(PosixFileSystem(), "x", directory, 4)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        read_small(PosixFileSystem(), "y", directory, 4)


def test_read_exactly_goes_on_after_a_short_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:2]], offset)
    )
    with memory_file(b"0123456789") as fd:
        buffer = bytearray(7)
        assert read_exactly(fd, memoryview(buffer), 1) == 7
        assert bytes(buffer) == b"1234567"
        buffer = bytearray(b"......")
        assert read_exactly(fd, memoryview(buffer), 8) == 2
        assert bytes(buffer) == b"89...."
        assert read_exactly(fd, memoryview(buffer), 10) == 0


def test_a_file_system_without_inodes_is_told_from_a_full_one(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    space = SimpleNamespace(f_files=100, f_favail=0)
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: space)
    for create in (PosixFileSystem().create, PosixFileSystem().make_directory):
        space.f_files, space.f_favail = 100, 0
        with pytest.raises(OutOfInodes) as caught:
            create("name", directory)
        told = str(StorageError.of("save it", caught.value))
        assert told.startswith("cannot save it: no inodes are left on the file system (delete")
        for files, left in ((100, 3), (0, 0)):  # btrfs has no fixed number of inodes
            space.f_files, space.f_favail = files, left
            with pytest.raises(OSError, match="No space left") as full:
                create("name", directory)
            assert type(full.value) is OSError


def test_a_limit_of_file_sizes_is_named(tmp_path: Path, directory: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fd = PosixFileSystem().create("file", directory)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            PosixFileSystem().write(fd, bytes(8192), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.close(fd)
    assert str(StorageError.of("save it", caught.value)) == (
        "cannot save it: File too large (this process may not write so large a file: raise "
        "`ulimit -f`, or LimitFSIZE= of its unit)"
    )
    (tmp_path / "file").write_bytes(bytes(9))
    with pytest.raises(OSError) as caught:  # a file that a reader refuses is no such limit
        read_small(PosixFileSystem(), "file", directory, 8)
    assert "ulimit" not in str(StorageError.of("read it", caught.value))
