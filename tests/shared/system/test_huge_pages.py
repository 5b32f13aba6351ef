"""Tests files of a tmpfs: their huge pages, and the addresses where they are mapped."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.shared.system import huge_pages

SIZE = huge_pages.SIZE
KERNEL = tuple(map(int, platform.release().split(".")[:2]))


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/dev/shm") as made:
        yield made.fileno()


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def of_file(address: int) -> list[str]:
    """Return the lines of smaps for the mapping that begins at this address."""
    found: list[str] = []
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith(f"{address:x}-"):
                found.append(line)
            elif found and line.startswith("VmFlags"):
                break
            elif found:
                found.append(line)
    return found


@pytest.mark.skipif(
    not SIZE or KERNEL < (6, 1), reason="the kernel makes no huge pages of files when it is asked"
)
def test_a_file_gets_huge_pages_which_are_mapped_whole(file: int) -> None:
    length = 3 * SIZE + 5000
    if not huge_pages.take(file, length):
        pytest.skip("the kernel has no huge page at hand")
    os.posix_fallocate(file, 0, length)
    assert os.fstat(file).st_size == length
    address = huge_pages.map_file(file, length, mmap.PROT_READ)
    try:
        assert address % SIZE == 0
        assert bytes((ctypes.c_ubyte * length).from_address(address)) == bytes(length)
        (mapped,) = [line for line in of_file(address) if line.startswith("ShmemPmdMapped")]
        assert int(mapped.split()[1]) >= SIZE // 1024
    finally:
        huge_pages.unmap(address, length)


@pytest.mark.parametrize("length", [1, 5000, SIZE or 1 << 21, 2 * (SIZE or 1 << 21) + 1])
def test_a_mapping_has_the_bytes_of_the_file_and_leaves_nothing_beside_it(
    file: int, length: int
) -> None:
    data = bytes(number % 251 for number in range(4096)) * (length // 4096 + 1)
    os.write(file, data[:length])
    before = mappings()
    address = huge_pages.map_file(file, length, mmap.PROT_READ | mmap.PROT_WRITE)
    assert bytes((ctypes.c_ubyte * length).from_address(address)) == data[:length]
    huge_pages.unmap(address, length)
    assert mappings() == before


def test_a_file_that_cannot_be_mapped_leaves_no_memory_reserved(file: int) -> None:
    length = 2 * (SIZE or 1 << 21)
    os.ftruncate(file, length)
    for_reading = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    before = mappings()
    try:
        with pytest.raises(OSError) as raised:
            huge_pages.map_file(for_reading, length, mmap.PROT_WRITE)
    finally:
        os.close(for_reading)
    assert raised.value.errno == errno.EACCES
    assert mappings() == before


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A clock, and the seconds that the kernel takes for each piece of huge pages."""
    of = {
        "now": 0.0,
        "seconds": 0.0,
        "pieces": 0,
        "refused from": 1e9,
        "mapped": 0,
        "most mapped": 0,
    }

    def advise(address: int, length: int, advice: int) -> int:
        if advice == mmap.MADV_DONTNEED:
            of["mapped"] -= length
            return 0
        of["mapped"] += length
        of["most mapped"] = max(of["most mapped"], of["mapped"])
        of["now"] += of["seconds"]
        of["pieces"] += 1
        return errno.ENOMEM if of["pieces"] > of["refused from"] else 0

    monkeypatch.setattr(huge_pages, "SIZE", 1 << 21)
    monkeypatch.setattr(huge_pages, "advise", advise)
    monkeypatch.setattr(time, "monotonic", lambda: of["now"])
    return of


PIECE = huge_pages._PIECE << 21


def test_all_pages_that_the_kernel_has_are_taken(file: int, kernel: dict[str, float]) -> None:
    assert huge_pages.take(file, 4 * PIECE + 100) == 4 * PIECE
    assert os.fstat(file).st_size == 4 * PIECE + 100
    assert kernel["most mapped"] == PIECE, "the file does not count as memory of this process"


def test_no_more_are_taken_from_a_kernel_that_is_slow(file: int, kernel: dict[str, float]) -> None:
    kernel["seconds"] = 0.4
    assert huge_pages.take(file, 10 * PIECE) == 4 * PIECE


def test_a_kernel_that_has_no_more_is_no_error(file: int, kernel: dict[str, float]) -> None:
    kernel["refused from"] = 2
    assert huge_pages.take(file, 10 * PIECE) == 2 * PIECE
    assert os.fstat(file).st_size == 10 * PIECE


def test_a_small_file_and_a_machine_without_huge_pages_get_none(
    file: int, kernel: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert huge_pages.take(file, (1 << 21) - 1) == 0
    monkeypatch.setattr(huge_pages, "SIZE", 0)
    assert huge_pages.take(file, 1 << 22) == 0
    assert os.fstat(file).st_size == 1 << 22
    assert kernel["pieces"] == 0
