"""Tests segments in memory: they are unmapped once, by the process that mapped them,
and a forked child never keeps them.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.copy.mapping import map_segment, present
from ckptd.shared.errors import IntegrityError
from ckptd.shared.system.huge_pages import _map
from tests.support.daemons import Daemon, Home

SIZE = 1 << 20
MAP_FIXED_NOREPLACE = 0x100000


@contextmanager
def child(work: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Context manager.

    Run `work` in a forked process, which then waits. Yields its pid once `work` is
    done. It exits with 0 if `work` returned True.
    """
    told, tell = os.pipe()
    wait, go_on = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go_on)
            right = work()
            os.write(tell, b"x")
            os.read(wait, 1)
            os._exit(not right)
        except BaseException:
            os._exit(2)
    os.close(tell)
    os.close(wait)
    try:
        os.read(told, 1)
        yield pid
    finally:
        os.close(told)
        os.close(go_on)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0


def held(pid: int | str, segments: Path) -> list[str]:
    """Return the mappings and descriptors that a process has of segments in this
    directory.
    """
    mapped = [
        line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if str(segments) in line
    ]
    opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return mapped + [target for target in opened if str(segments) in target]


def held_here(segments: Path) -> list[str]:
    return held("self", segments)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "segment", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, SIZE)
    yield fd
    os.close(fd)


def is_mapped(address: int) -> bool:
    return any(
        line.startswith(f"{address:x}-")
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


def test_a_forked_child_does_not_keep_replaced_slots(daemon: Daemon) -> None:
    home = daemon.home
    agent = Agent("job", socket=home.socket)
    agent.snapshot({"x": torch.ones(1000)}, step=1).wait("durable", timeout=60)
    before = home.segment_files()
    assert before
    with child() as pid:
        assert held(pid, home.segments) == []
        # Larger slots replace these.
        agent.snapshot({"x": torch.ones(1_000_000)}, step=2).wait("durable", timeout=60)
        agent.snapshot({"x": torch.ones(1_000_000)}, step=3).wait("durable", timeout=60)
        gone = [path for path in before if not path.exists()]
        assert gone
        assert [
            line for line in held_here(home.segments) if any(path.name in line for path in gone)
        ] == []
        agent.close()
        assert home.segment_files() == []
        assert held(pid, home.segments) == held_here(home.segments) == []


def test_the_space_of_a_closed_agent_is_freed_although_a_child_lives(
    place: Home, tmp_path: Path
) -> None:
    """Return the free bytes of the tmpfs.

    Any file system would do, so the segment here is a plain unlinked file on /dev/shm.
    """
    path = Path("/dev/shm") / f"ckptd-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, SIZE)
        array = map_segment(fd, SIZE)
        inode = os.fstat(fd).st_ino
    finally:
        path.unlink()
        os.close(fd)
    assert [
        line for line in Path("/proc/self/maps").read_text().splitlines() if f" {inode} " in line
    ]
    with child() as pid:
        assert not [
            line
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if f" {inode} " in line
        ]
        assert not [
            fd
            for fd in Path(f"/proc/{pid}/fd").iterdir()
            if fd.is_symlink() and path.name in os.readlink(fd)
        ]
        del array
        gc.collect()
        assert not [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if f" {inode} " in line
        ]


def test_a_segment_is_unmapped_once_when_its_last_view_is_gone(segment: int) -> None:
    array = map_segment(segment, SIZE)
    address = ctypes.addressof(array)
    tensor = torch.frombuffer(array, dtype=torch.uint8)
    view = tensor[10:20].view(2, 5)
    view.fill_(7)
    del array, tensor
    gc.collect()
    assert is_mapped(address)
    assert os.pread(segment, 12, 9) == bytes([0, *[7] * 10, 0])
    del view
    gc.collect()
    assert not is_mapped(address)


def test_a_child_that_lets_go_keeps_memory_of_its_own_at_that_address(segment: int) -> None:
    kept = [map_segment(segment, SIZE)]

    def work() -> bool:
        address = ctypes.addressof(kept[0])
        if is_mapped(address):
            return False
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        assert _map(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1) == address
        ctypes.memset(address, 5, SIZE)
        kept.clear()
        gc.collect()
        return is_mapped(address) and ctypes.string_at(address, SIZE) == bytes([5]) * SIZE

    with child(work):
        pass


def test_a_segment_cut_short_is_not_mapped(segment: int) -> None:
    with pytest.raises(IntegrityError, match="cut short by another process"):
        map_segment(segment, SIZE + 1)


def test_a_failed_mapping_raises_the_systems_error(segment: int) -> None:
    read_only = os.open(f"/proc/self/fd/{segment}", os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            map_segment(read_only, SIZE)
    finally:
        os.close(read_only)


def test_a_range_that_is_present_can_be_read_and_one_behind_the_end_is_refused(
    tmp_path: Path,
) -> None:
    """An access behind the end of the file would end the process."""
    file = os.open(tmp_path / "a.seg", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, bytes(range(256)) * (SIZE // 256), 0)
    mapped = map_segment(file, SIZE, writable=False)
    address = ctypes.addressof(mapped)
    with present(address + 5000, 100_000):
        assert ctypes.string_at(address + 5000, 3) == bytes(range(256))[5000 % 256 :][:3]
    os.ftruncate(file, SIZE // 2)
    with present(address, SIZE // 2):
        assert ctypes.string_at(address + 1, 1) == b"\1"
    with (
        pytest.raises(OSError, match="Bad address|Hardware|Cannot"),
        present(address + SIZE // 2 - 1, 2),
    ):
        raise AssertionError("its last page is not there")
    os.close(file)


def test_a_mapping_for_reading_cannot_be_written_to(tmp_path: Path) -> None:
    file = os.open(tmp_path / "a.seg", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, SIZE)
    mapped = map_segment(file, SIZE, writable=False)
    assert mapped[0] == 0
    (line,) = [x for x in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in x]
    assert line.split()[1] == "r--s"
    os.close(file)
