"""Tests segments: they are made within the quota, passed on, adopted and released, and
their holders are known.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.daemon.memory import segment_directory
from ckptd.daemon.memory.segment_directory import SegmentDirectory
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.shared import names
from ckptd.shared.errors import (
    Busy,
    IntegrityError,
    NotFound,
    OutOfInodes,
    QuotaExceeded,
    SharedMemoryFull,
    StorageError,
)
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import (
    SegmentHeader,
    SlotState,
    read_header,
    this_boot,
    write_header,
)
from ckptd.shared.system.fs import PosixFileSystem
from tests.shared.samples import resealed
from tests.support.control_groups import System, v1

SIZE = 16384  # two headers, a page of checksums, a page of data
STRANGE = "0123456789abcdef0123456789abcdef.seg"


def header(slot: int = 0, **changes: Any) -> SegmentHeader:
    fields: dict[str, Any] = {
        "job": "gpt",
        "attempt": 2,
        "rank": 0,
        "world_size": 2,
        "capacity": 1000,
        "chunk_size": MIN_CHUNK,
        **changes,
    }
    return SegmentHeader(slot=slot, **fields)


def open_descriptors() -> int:
    """Return this process's descriptors of segments.

    Others come and go with objects of earlier tests.
    """
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += ".seg" in os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
    return found


class Shm:
    """A directory that plays the tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inside = path / "ckptd-test"
        self._opened: list[Slots] = []

    def open(self, quota: int = 1 << 30, fs: PosixFileSystem | None = None) -> Slots:
        """Open the slots as a daemon does that starts after the earlier daemons have
        died.
        """
        for dead in self._opened:
            with suppress(OSError):  # a test has closed it itself
                fcntl.flock(dead._memory.fd, fcntl.LOCK_UN)
        slots = Slots(fs or PosixFileSystem(), self.path, "ckptd-test", quota)
        self._opened.append(slots)
        return slots

    def files(self) -> list[str]:
        return sorted(path.name for path in self.inside.iterdir())

    def close(self) -> None:
        for slots in self._opened:
            try:
                slots.close()
            except OSError:  # a test has closed it itself
                pass


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Shm]:
    made = Shm(tmp_path)
    yield made
    made.close()


@contextmanager
def trainer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Context manager. Run a process that holds an flock on `path`."""
    code = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', "
        "flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


# -- the directory


def test_the_directory_is_accessible_to_its_user_only(shm: Shm) -> None:
    before = os.umask(0)
    try:
        slots = shm.open()
    finally:
        os.umask(before)
    assert shm.inside.stat().st_mode & 0o777 == 0o700
    assert slots.path == shm.inside


def take(path: Path, kind: str) -> None:
    """Take the name `path` before its owner needs it, as another user may in a
    directory like /dev/shm.
    """
    if os.getuid():
        pytest.skip("giving a file away needs root")
    if kind == "directory":
        path.mkdir(mode=0o700)
    elif kind == "open directory":
        path.mkdir()
        path.chmod(0o777)
    elif kind == "link":
        (path.parent / "elsewhere").mkdir(mode=0o777)
        path.symlink_to("elsewhere")
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.touch()
    os.chown(path, 65534, 65534, follow_symlinks=False)


@pytest.mark.parametrize("kind", ["directory", "open directory", "link", "FIFO", "file"])
def test_a_name_taken_by_another_user_is_left_alone_and_the_substitute_is_found_again(
    shm: Shm, kind: str
) -> None:
    take(shm.inside, kind)
    slots = shm.open()
    made = slots.add(slots.create(header()))
    assert slots.path.parent == shm.path
    assert re.fullmatch(r"ckptd-test\.[0-9a-f]{16}", slots.path.name)
    assert slots.path.stat().st_mode & 0o777 == 0o700
    assert shm.inside.lstat().st_uid == 65534
    if kind != "FIFO" and kind != "file":
        assert list(shm.inside.iterdir()) == []
    again = shm.open()
    assert again.path == slots.path
    assert [slot.name for slot in again.adopt()] == [made.name]
    again.release(again.get(made.name))
    again.close()
    assert not slots.path.exists()
    assert shm.inside.lstat().st_uid == 65534


def test_a_second_daemon_of_the_machine_is_refused_the_directory(shm: Shm) -> None:
    """A daemon under another host name has another lock in the root.

    It would remove the segments that it cannot read.
    """
    slots = shm.open()
    made = slots.add(slots.create(header()))
    with pytest.raises(
        Busy,
        match=f"uses {shm.inside} for a root with the same path: use that daemon, stop it first",
    ):
        Slots(PosixFileSystem(), shm.path, "ckptd-test", 1 << 30)
    assert shm.files() == [made.name]
    slots.close()
    Slots(PosixFileSystem(), shm.path, "ckptd-test", 1 << 30).close()


def test_the_quota_is_nine_tenths_unless_given(shm: Shm, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        total = 1000

    monkeypatch.setattr("psutil.disk_usage", lambda path: Usage)
    assert shm.open(quota=0).quota == 900
    assert shm.open(quota=77).quota == 77


# -- create


def test_create_makes_a_segment_with_its_header(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    assert shm.files() == [made.name]
    assert names.is_segment_file(made.name)
    status = (shm.inside / made.name).stat()
    assert (status.st_size, status.st_mode & 0o777, status.st_blocks * 512 >= SIZE) == (
        SIZE,
        0o600,
        True,
    )
    assert read_header(made.fd) == header() == made.header
    assert (made.nbytes, slots.used, made.owner) == (SIZE, SIZE, ("gpt", 2, 0))
    assert slots.get(made.name) is made
    assert repr(made) == f"<Slot {made.name[:8]} gpt.a2 rank 0 FREE>"
    other = slots.add(slots.create(header(1)))
    assert other.name != made.name
    assert slots.used == 2 * SIZE


def test_a_segment_is_allocated_near_the_requested_node(
    shm: Shm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel zeroes the pages on the thread that allocates them, and takes them
    from near that thread.
    """
    asked: list[int] = []

    @contextmanager
    def near(node: int) -> Iterator[None]:
        asked.append(node)
        yield
        asked.append(-7)

    class Watched(PosixFileSystem):
        def allocate(self, fd: int, length: int) -> None:
            asked.append(length)

    monkeypatch.setattr("ckptd.daemon.memory.slots.near", near)
    slots = shm.open(fs=Watched())
    slots.add(slots.create(header(), 1))
    slots.add(slots.create(header()))
    assert asked == [1, SIZE, -7, -1, SIZE, -7]


def test_a_segment_is_known_once_it_is_added(shm: Shm) -> None:
    """`create` runs on a worker thread while the event loop iterates over `slots`."""
    slots = shm.open()
    made = slots.create(header())
    assert (slots.slots, slots.used) == ({}, 0)
    assert slots.add(made) is made
    assert (list(slots.slots), slots.used) == ([made.name], SIZE)
    slots.release(made)
    assert (slots.slots, slots.used) == ({}, 0)


def test_slots_are_found_by_name_and_by_owner(shm: Shm) -> None:
    slots = shm.open()
    made = [slots.add(slots.create(header(number))) for number in (1, 0, 2)]
    slots.add(slots.create(header(rank=1)))
    slots.add(slots.create(header(attempt=3)))
    slots.add(slots.create(header(job="bert")))
    assert slots.of("gpt", 2, 0) == [made[1], made[0], made[2]]
    assert slots.of("gpt", 4, 0) == []
    with pytest.raises(NotFound, match=f"no segment '{STRANGE}'"):
        slots.get(STRANGE)


def test_the_quota_counts_whole_files(shm: Shm) -> None:
    slots = shm.open(quota=2 * SIZE)
    first = slots.add(slots.create(header()))
    slots.add(slots.create(header(1)))
    with pytest.raises(
        QuotaExceeded, match=r"a slot of \d+\.\d kB does not fit: .* are taken; raise shm_quota"
    ):
        slots.create(header(2))
    assert len(shm.files()) == 2
    slots.release(first)
    slots.add(slots.create(header(2)))
    assert slots.used == 2 * SIZE


def test_the_quota_names_both_sizes(shm: Shm) -> None:
    with pytest.raises(
        QuotaExceeded,
        match=r"a slot of 2\.5 GB does not fit: 0 B of the quota of 1\.0 GB are taken",
    ):
        shm.open(quota=10**9).create(header(capacity=2_500_000_000))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_a_full_tmpfs_leaves_nothing_behind(shm: Shm, number: int) -> None:
    class Full(PosixFileSystem):
        full = True

        def allocate(self, fd: int, length: int) -> None:
            super().allocate(fd, length // 2)
            if self.full:
                raise OSError(number, os.strerror(number))
            super().allocate(fd, length)

    fs = Full()
    slots = shm.open(fs=fs)
    before = open_descriptors()
    with pytest.raises(
        SharedMemoryFull, match=rf"no room for a slot of \d+\.\d kB in {shm.path}: .* are free"
    ):
        slots.create(header())
    assert (shm.files(), slots.used, slots.slots) == ([], 0, {})
    assert open_descriptors() == before
    fs.full = False
    slots.add(slots.create(header()))
    assert slots.used == SIZE


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, SharedMemoryFull), (errno.EMFILE, StorageError)]
)
def test_a_segment_whose_file_cannot_be_made_is_an_error(
    shm: Shm, number: int, kind: type[Exception]
) -> None:
    class Full(PosixFileSystem):
        def create(self, *_: Any, **__: Any) -> int:
            raise OSError(number, os.strerror(number))

    slots = shm.open(fs=Full())
    with pytest.raises(kind, match="no room for a slot|cannot make a segment in"):
        slots.create(header())
    assert (shm.files(), slots.slots) == ([], {})


def test_a_tmpfs_without_locks_is_refused_in_one_sentence(
    shm: Shm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = open_descriptors()
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageError, match=f"cannot lock {shm.path}.*: No locks available"):
        shm.open()
    assert open_descriptors() == before


def test_any_other_error_leaves_no_file_behind(shm: Shm, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = shm.open()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 100)
    with pytest.raises(StorageError, match="cannot make a segment"):
        slots.create(header())
    assert (shm.files(), slots.slots) == ([], {})


# -- open again, and locks


def test_open_again_is_another_description(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    write, read = slots.open_again(made, write=True), slots.open_again(made, write=False)
    try:
        os.pwrite(write, b"data", 12288)
        assert os.pread(read, 4, 12288) == b"data"
        with pytest.raises(OSError) as caught:
            os.pwrite(read, b"x", 0)
        assert caught.value.errno == errno.EBADF
        fcntl.flock(write, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(made.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert os.get_inheritable(write) is False
    finally:
        os.close(write)
        os.close(read)
    fcntl.flock(made.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("how", ["removed", "replaced", "link", "fifo", "directory"])
def test_a_removed_or_replaced_segment_is_reported_as_lost(shm: Shm, how: str) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    path = shm.inside / made.name
    if how == "replaced":
        path.rename(shm.path / "old")
        path.write_bytes((shm.path / "old").read_bytes())
    elif how == "link":
        path.rename(shm.path / "old")
        path.symlink_to(shm.path / "old")
    else:
        path.unlink()
        if how != "removed":
            # Opening a FIFO for reading would wait for a writer.
            (os.mkfifo if how == "fifo" else os.mkdir)(path)
    before = open_descriptors()
    for write in (False, True):
        with pytest.raises(NotFound, match=f"segment {made.name} has been re(mov|plac)ed"):
            slots.open_again(made, write=write)
    assert slots.is_held(made) is False
    assert open_descriptors() == before
    assert read_header(made.fd) == header()  # the daemon's own descriptor still has the segment


@pytest.mark.usefixtures("processes")
def test_a_segment_is_held_while_its_trainer_lives(shm: Shm) -> None:
    slots = shm.open()
    made, other = slots.add(slots.create(header())), slots.add(slots.create(header(1)))
    assert slots.is_held(made) is False
    before = open_descriptors()
    with trainer(shm.inside / made.name) as process:
        opened = open_descriptors()
        assert slots.is_held(made) is True
        assert slots.is_held(made) is True
        assert slots.is_held(other) is False
        assert open_descriptors() == opened
        process.kill()
        process.wait()
        assert slots.is_held(made) is False
    assert open_descriptors() == before


@pytest.mark.usefixtures("processes")
def test_a_test_of_the_lock_leaves_no_lock(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    assert slots.is_held(made) is False
    with trainer(shm.inside / made.name):
        assert slots.is_held(made) is True


def test_a_lack_of_descriptors_is_not_taken_for_a_lost_segment(
    shm: Shm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(
            StorageError, match=f"cannot open the segment {made.name}: Too many open files"
        ):
            slots.open_again(made, write=False)
        assert slots.is_held(made) is True  # True, because the lock could not be tested
    assert slots.is_held(made) is False


# -- refresh


def test_refresh_sees_what_the_trainer_wrote(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    filling = made.header.next(SlotState.FILLING, step=5)
    write_header(made.fd, filling)
    assert made.header.state is SlotState.FREE
    assert made.refresh() == filling == made.header


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "bert"},
        {"attempt": 3},
        {"rank": 1},
        {"capacity": 1001},
        {"chunk_size": 2 * MIN_CHUNK},
    ],
)
def test_a_header_of_another_segment_is_refused(shm: Shm, changes: dict[str, Any]) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    write_header(made.fd, replace(header(), generation=2, **changes))
    with pytest.raises(IntegrityError, match="does not have the header that it was made with"):
        made.refresh()
    assert made.header == header()


def test_a_damaged_header_is_refused(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    os.ftruncate(made.fd, 100)
    with pytest.raises(IntegrityError):
        made.refresh()


def test_an_error_while_a_segment_is_read_names_it_and_is_no_damage_of_the_snapshot(
    shm: Shm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    wanted = f"cannot read the segment {made.name} of job gpt in .*: Input/output error"
    with pytest.raises(StorageError, match=wanted):
        made.refresh()
    with pytest.raises(StorageError, match=wanted), made.reading() as fd:
        os.pread(fd, 1, 0)
    assert (made.pins, shm.files()) == (0, [made.name])


# -- release and close


def test_release_removes_the_file_and_frees_the_quota(shm: Shm) -> None:
    slots = shm.open()
    made, other = slots.add(slots.create(header())), slots.add(slots.create(header(1)))
    slots.release(made)
    assert shm.files() == [other.name]
    assert slots.used == SIZE
    with pytest.raises(NotFound):
        os.fstat(made.fd)
    os.unlink(shm.inside / other.name)
    slots.release(other)  # another process has removed it already
    assert (shm.files(), slots.used) == ([], 0)
    third = slots.add(slots.create(header(2)))
    os.unlink(shm.inside / third.name)
    os.mkdir(shm.inside / third.name)
    slots.release(third)  # or another file has its name
    assert (shm.files(), slots.used) == ([third.name], 0)


def test_a_second_release_closes_nothing(shm: Shm) -> None:
    """By then the number may belong to another file, which would be closed."""
    slots = shm.open()
    made = slots.add(slots.create(header()))
    number = made.fd
    slots.release(made)
    other = os.open("/dev/zero", os.O_RDONLY)
    os.dup2(other, number)
    slots.release(made)
    assert os.read(number, 2) == b"\0\0"
    assert slots.used == 0
    os.close(number)
    if other != number:
        os.close(other)


def test_a_released_slot_cannot_be_read(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    with made.pinned():
        slots.release(made)
        assert made.refresh() == header()  # stays open while it is pinned
        with pytest.raises(NotFound, match=f"segment {made.name} has been released"), made.pinned():
            pass
    with pytest.raises(NotFound, match=f"segment {made.name} has been released"):
        made.refresh()
    with pytest.raises(NotFound, match=f"segment {made.name} has been released"):
        slots.open_again(made, write=False)
    assert slots.is_held(made) is False


def test_a_creation_that_fails_in_any_way_leaves_nothing_behind(
    shm: Shm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = shm.open()
    before = open_descriptors()

    def fail(name: str) -> bool:
        if name == "slot.created":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return False

    monkeypatch.setattr("ckptd.daemon.memory.slots.failpoint", fail)
    with pytest.raises(StorageError, match="cannot make a segment"):
        slots.create(header())
    assert (shm.files(), open_descriptors()) == ([], before)


def test_a_slot_that_is_read_keeps_its_descriptor(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    with made.pinned() as fd:
        with made.pinned():
            slots.release(made)
        assert shm.files() == []
        assert read_header(fd) == header()
    with pytest.raises(NotFound):
        os.fstat(made.fd)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_reader_that_has_a_released_segment_open_keeps_no_memory(shm: Shm, pinned: bool) -> None:
    slots = shm.open()
    made, kept = (slots.add(slots.create(header())) for _ in range(2))
    made.lent = True
    readers = [slots.open_again(slot, write=False) for slot in (made, kept)]
    mapped = mmap.mmap(readers[0], 0, prot=mmap.PROT_READ)
    assert mapped[ALIGN : ALIGN + 8] == b"CKPTDSEG"
    with made.pinned() if pinned else nullcontext():
        slots.release(made)
        if pinned:
            assert mapped[ALIGN : ALIGN + 8] == b"CKPTDSEG", "the daemon still reads it"
    slots.release(kept)
    slots.close()
    used = [os.fstat(fd).st_blocks for fd in readers]
    assert used[0] == 0
    assert used[1] > 0, "a trainer that maps a segment keeps it"
    assert mapped[ALIGN : ALIGN + 8] == bytes(8), "and no SIGBUS"
    mapped.close()
    for fd in readers:
        os.close(fd)


class Held(PosixFileSystem):
    """A tmpfs that is full as long as the memory of a freed segment is not free.

    `freeing` says when that begins, `may` when it may end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.freeing, self.may, self.is_full = threading.Event(), threading.Event(), False
        monkeypatch.setattr(segment_directory, "Descriptor", self._last)

    def _last(self, fd: int) -> Any:
        def close() -> None:
            self.freeing.set()
            assert self.may.wait(60)
            os.close(fd)
            self.is_full = False

        return SimpleNamespace(close=close)

    def allocate(self, fd: int, size: int) -> None:
        if self.is_full:
            self.may.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, size)


@pytest.mark.parametrize("read", [False, True])
def test_a_release_does_not_wait_until_the_memory_is_free_and_the_next_segment_does(
    shm: Shm, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """Freeing tens of gigabytes takes seconds, in which the event loop must serve the
    other jobs.
    """
    fs = Held(monkeypatch)
    slots = shm.open(fs=fs)
    made = slots.add(slots.create(header()))
    fs.is_full = True
    with made.pinned() if read else nullcontext():
        slots.release(made)
    assert fs.freeing.wait(60)
    assert (shm.files(), slots.used, fs.may.is_set()) == ([], 0, False)
    with pytest.raises(NotFound):
        os.fstat(made.fd)
    assert slots.create(header()).nbytes == SIZE


def test_the_end_of_a_read_does_not_close_the_slot(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    with made.pinned():
        pass
    assert read_header(made.fd) == header()


def test_close_leaves_the_segments_for_the_next_daemon(shm: Shm) -> None:
    slots = shm.open()
    made = slots.add(slots.create(header()))
    slots.close()
    assert shm.files() == [made.name]
    with pytest.raises(NotFound):
        os.fstat(made.fd)


def test_close_removes_an_empty_directory(shm: Shm) -> None:
    slots = shm.open()
    slots.release(slots.create(header()))
    slots.close()
    assert not shm.inside.exists()


def test_close_leaves_a_directory_with_strange_files(shm: Shm) -> None:
    slots = shm.open()
    (shm.inside / "notes").write_text("mine")
    slots.close()
    assert shm.files() == ["notes"]


# -- adopt


def _left(shm: Shm, *headers: SegmentHeader) -> list[str]:
    """Leave segments as an earlier daemon does."""
    slots = shm.open()
    found = [slots.add(slots.create(h)).name for h in headers]
    slots.close()
    return found


def test_adopt_registers_the_segments_of_an_earlier_daemon(shm: Shm) -> None:
    sealed = header(1, generation=8, state=SlotState.SEALED, step=1000)
    left = _left(shm, header(), sealed)
    slots = shm.open()
    assert slots.used == 0
    adopted = {slot.name: slot for slot in slots.adopt()}
    assert {name: slot.header for name, slot in adopted.items()} == dict(
        zip(left, [header(), sealed], strict=True)
    )
    assert slots.slots == adopted
    assert slots.used == 2 * SIZE
    assert all(isinstance(slot, Slot) and slot.nbytes == SIZE for slot in adopted.values())
    fd = slots.open_again(adopted[left[0]], write=True)
    os.close(fd)
    slots.release(adopted[left[0]])
    assert shm.files() == [left[1]]


def test_adopted_segments_count_for_the_quota(shm: Shm) -> None:
    _left(shm, header(), header(1))
    slots = shm.open(quota=3 * SIZE)
    slots.adopt()
    slots.add(slots.create(header(2)))
    with pytest.raises(QuotaExceeded):
        slots.create(header(3))


def test_adopt_removes_a_segment_that_says_sealed_and_names_no_step(
    shm: Shm, caplog: pytest.LogCaptureFixture
) -> None:
    sealed = replace(header(), state=SlotState.SEALED, step=None)
    bad, good = _left(shm, sealed, header(1))
    slots = shm.open()
    assert [slot.name for slot in slots.adopt()] == [good]
    assert shm.files() == [good]
    assert f"segment {bad} removed: its header says sealed, and names no step" in caplog.text


def test_adopt_removes_segments_of_another_boot(shm: Shm) -> None:
    boot = bytes(16)
    assert boot != this_boot()
    _, _, good = _left(shm, header(boot_id=boot), header(1, boot_id=bytes(range(16))), header(2))
    slots = shm.open()
    assert [slot.name for slot in slots.adopt()] == [good]
    assert shm.files() == [good]


@pytest.mark.parametrize("length", [0, 100, 4096, 8192, SIZE - 1])
def test_adopt_removes_segments_that_are_cut_short(shm: Shm, length: int) -> None:
    (name,) = _left(shm, header())
    os.truncate(shm.inside / name, length)
    slots = shm.open()
    assert slots.adopt() == []
    assert shm.files() == []


def test_adopt_removes_damaged_segments(shm: Shm) -> None:
    (name,) = _left(shm, header())
    path = shm.inside / name
    path.write_bytes(bytes(SIZE))
    slots = shm.open()
    assert slots.adopt() == []
    assert shm.files() == []


def test_adopt_leaves_a_segment_alone_that_cannot_be_read(
    shm: Shm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a disk may pass, and a later daemon finds the snapshot."""
    (name,) = _left(shm, header())
    pread = os.pread

    def fails(fd: int, length: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    assert shm.open().adopt() == []
    assert shm.files() == [name]
    monkeypatch.setattr(os, "pread", pread)
    assert [slot.name for slot in shm.open().adopt()] == [name]


def test_adopt_leaves_a_newer_ckptds_segment_alone(shm: Shm) -> None:
    """FORMAT.md, section 0: the error is "written by a newer ckptd", and nothing is
    changed.
    """
    (name,) = _left(shm, header())
    path = shm.inside / name
    data = resealed(path.read_bytes(), 4096 + 8, 2, start=4096, body=320)
    path.write_bytes(data)
    slots = shm.open()
    assert slots.adopt() == []
    assert shm.files() == [name]
    assert path.read_bytes() == data


def test_adopt_leaves_files_with_other_names_alone(shm: Shm) -> None:
    (name,) = _left(shm, header())
    content = (shm.inside / name).read_bytes()
    strange = ["notes", "x.seg", STRANGE.upper(), STRANGE + ".tmp", STRANGE[1:], "." + STRANGE]
    for other in strange:
        (shm.inside / other).write_bytes(content)
    slots = shm.open()
    assert [slot.name for slot in slots.adopt()] == [name]
    assert shm.files() == sorted([name, *strange])


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_adopt_leaves_anything_but_regular_files_alone(shm: Shm, kind: str) -> None:
    (name,) = _left(shm, header())
    path = shm.inside / STRANGE
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(name)
    slots = shm.open()
    assert [slot.name for slot in slots.adopt()] == [name]
    assert shm.files() == sorted([name, STRANGE])


def test_adopt_leaks_no_descriptor(shm: Shm) -> None:
    _left(shm, header(boot_id=bytes(16)), header(1))
    before = open_descriptors()
    slots = shm.open()
    slots.adopt()
    slots.close()
    assert open_descriptors() == before


# -- the disk


def overflowing(shm: Shm, quota: int = 0) -> Slots:
    return Slots(PosixFileSystem(), shm.path, "ckptd-test", quota, shm.path / "disk" / "segments")


def test_segments_on_the_disk_do_not_count_for_the_quota_and_are_adopted(shm: Shm) -> None:
    slots = overflowing(shm)
    assert slots.remark([]) == ""
    made = [
        slots.add(slots.create(header())),
        slots.add(slots.create_on_disk(header())),
        slots.add(slots.create_on_disk(header())),
    ]
    assert (slots.used, slots.on_disk) == (SIZE, 2 * SIZE)
    assert len(list((shm.path / "disk" / "segments").iterdir())) == 2
    assert (shm.path / "disk" / "segments").stat().st_mode & 0o777 == 0o700
    assert slots.remark(made[:1]) == ""
    assert slots.remark(made).startswith(
        f"the slots do not fit into {shm.path}, and are files in {shm.path / 'disk' / 'segments'} "
        f"now"
    )
    for slot in made:
        slot.descriptor.close()
    for directory in slots._directories():
        os.close(directory.fd)  # the daemon is killed
    again = overflowing(shm)
    assert {slot.name for slot in again.adopt()} == {slot.name for slot in made}
    assert (again.used, again.on_disk) == (SIZE, 2 * SIZE)
    for name in [slot.name for slot in made]:
        slot = again.get(name)
        os.close(again.open_again(slot, write=True))
        assert not again.is_held(slot)
        again.release(slot)
    assert (again.used, again.on_disk) == (0, 0)
    again.close()
    assert not (shm.path / "disk" / "segments").exists()


def test_a_quota_that_is_set_is_never_exceeded(shm: Shm) -> None:
    quota, full = QuotaExceeded("quota"), SharedMemoryFull("full")
    (shm.path / "a").mkdir()
    plain, limited = shm.open(), overflowing(Shm(shm.path / "a"), 10**9)
    assert (plain.may_overflow(quota), plain.may_overflow(full)) == (False, False)
    assert (limited.may_overflow(quota), limited.may_overflow(full)) == (False, True)
    limited.quota = 2 * SIZE
    made = [limited.add(limited.create_on_disk(header())), limited.add(limited.create(header()))]
    for create in (limited.create, limited.create_on_disk):
        with pytest.raises(QuotaExceeded, match="are taken; raise shm_quota"):
            create(header())
    limited.release(made[0])
    limited.release(limited.add(limited.create(header())))
    limited.close()
    (shm.path / "b").mkdir()
    free = overflowing(Shm(shm.path / "b"))
    assert (free.may_overflow(quota), free.may_overflow(full)) == (True, True)
    free.close()


def test_a_tmpfs_without_inodes_is_said_to_be(shm: Shm) -> None:
    class Empty(PosixFileSystem):
        def create(self, *arguments: Any, **options: Any) -> int:
            raise OutOfInodes(errno.ENOSPC, "no inodes")

    with pytest.raises(SharedMemoryFull, match=rf"^no inodes are left in {shm.inside} for a slot"):
        shm.open(fs=Empty()).create(header())


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def test_segments_that_do_not_fit_into_the_memory_limit_go_to_the_disk(
    tmpfs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tmpfs has room, and the kernel would kill the daemon."""
    system = System(tmp_path, v1="/job")
    group, disk = system.v1 / "job", tmp_path / "state" / "segments"
    v1(group, limit=100 * SIZE, used=88 * SIZE)
    slots = Slots(PosixFileSystem(), tmpfs, "ckptd-test", 0, disk, tmp_path)
    made = [slots.add(slots.create(header())), slots.add(slots.create(header()))]
    v1(group, limit=100 * SIZE, used=90 * SIZE)
    with pytest.raises(SharedMemoryFull) as refused:
        slots.create(header())
    assert str(refused.value) == (
        f"no room for a slot of 16.4 kB in the memory limit of 1.6 MB of {group}: 1.5 MB are "
        f"used, so that new slots may take 0 B; raise the limit (docker: --memory), or save less"
    )
    assert len(list((tmpfs / "ckptd-test").iterdir())) == 2
    assert slots.may_overflow(refused.value)
    made.append(slots.add(slots.create_on_disk(header())))
    assert [slot.directory.on_disk for slot in made] == [False, False, True]
    assert slots.remark(made) == (
        f"the slots do not fit into the memory limit of 1.6 MB of {group}, and are files in {disk} "
        f"now, which are slower: raise the limit (docker: --memory)"
    )
    assert f"slots that do not fit into the memory limit of 1.6 MB of {group} go" in caplog.text
    v1(group, limit=None, used=90 * SIZE)
    slots.create(header())
    for slot in made:
        slots.release(slot)
    slots.close()


def test_a_limit_of_memory_counts_for_an_overflow_in_a_tmpfs_and_not_for_a_disk(
    tmpfs: Path, tmp_path: Path
) -> None:
    system = System(tmp_path, v1="/job")
    v1(system.v1 / "job", limit=100 * SIZE, used=99 * SIZE)
    slots = Slots(PosixFileSystem(), tmp_path, "ckptd-test", 0, tmpfs / "segments", tmp_path)
    slots.release(slots.create(header()))
    with pytest.raises(SharedMemoryFull, match="memory limit"):
        slots.create_on_disk(header())
    slots.close()


def test_a_limit_of_memory_waits_for_the_memory_that_is_being_freed(
    tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(tmp_path, v1="/job")
    v1(system.v1 / "job", limit=100 * SIZE, used=0)
    slots = Slots(PosixFileSystem(), tmpfs, "ckptd-test", 0, None, tmp_path)
    made = slots.add(slots.create(header()))
    v1(system.v1 / "job", limit=100 * SIZE, used=99 * SIZE)
    freed: Future[None] = Future()
    monkeypatch.setattr(SegmentDirectory, "freeing", property(lambda _: [freed]))

    def free() -> None:
        v1(system.v1 / "job", limit=100 * SIZE, used=0)
        freed.set_result(None)

    slots.release(made)
    threading.Timer(0.05, free).start()
    assert slots.create(header()).nbytes == SIZE


def test_a_full_disk_is_named_beside_the_tmpfs(shm: Shm) -> None:
    class Full(PosixFileSystem):
        def allocate(self, fd: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "full")

    slots = Slots(Full(), shm.path, "ckptd-test", 0, shm.path / "segments")
    with pytest.raises(
        SharedMemoryFull,
        match=rf"^no room for a slot of .* are free, and .* in {shm.path}/segments on the disk; ",
    ):
        slots.create_on_disk(header())
    assert list((shm.path / "segments").iterdir()) == []
    slots.close()


@pytest.mark.parametrize(
    ("exists", "problem"),
    [(False, "there is no directory {shm}: mount a tmpfs there"), (True, "Read-only file system")],
)
def test_without_a_usable_tmpfs_all_segments_go_to_the_disk(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    exists: bool,
    problem: str,
) -> None:
    shm, overflow, mkdir = tmp_path / "shm", tmp_path / "state" / "segments", os.mkdir
    if exists:
        shm.mkdir()

    def read_only(path: Any, *arguments: Any, **options: Any) -> None:
        if exists and Path(path).parent == shm:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", read_only)
    slots = Slots(PosixFileSystem(), shm, "ckptd-test", 0, overflow)
    made = slots.add(slots.create(header()))
    assert [path.name for path in overflow.iterdir()] == [made.name]
    assert (slots.used, slots.on_disk, slots.disk_directory) == (0, SIZE, str(overflow))
    assert slots.remark([made]).startswith(
        "there is no shared memory that can be used, so the slots are files in "
    )
    assert problem.format(shm=shm) in caplog.text
    slots.close()
    again = Slots(PosixFileSystem(), shm, "ckptd-test", 0, overflow)
    assert [slot.name for slot in again.adopt()] == [made.name]
    again.close()
    with pytest.raises(StorageError, match=problem.format(shm=shm)):
        Slots(PosixFileSystem(), shm, "ckptd-test", 0)
