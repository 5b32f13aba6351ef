"""Tests the measurement of a directory with a fake clock, and that nothing is left."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.shared.storage import posix_rates
from ckptd.shared.storage.posix_rates import BLOCK, MOST_BYTES, Rates, measure


def ticking(seconds: float) -> Callable[[], float]:
    """Return a clock that goes on by so many seconds whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * seconds


def test_the_whole_file_is_written_and_read_and_deleted(tmp_path: Path) -> None:
    found = measure(tmp_path, ticking(0.001))
    assert found is not None
    blocks = MOST_BYTES // BLOCK
    # The clock is read at both ends, and before each block but the first one.
    assert found.nbytes == MOST_BYTES
    assert found.write == pytest.approx(MOST_BYTES / (blocks * 0.001))
    assert found.read == pytest.approx(MOST_BYTES / (blocks * 0.001))
    assert list(tmp_path.iterdir()) == []


def test_a_slow_directory_is_measured_with_few_blocks(tmp_path: Path) -> None:
    found = measure(tmp_path, ticking(posix_rates.MOST_SECONDS))
    assert found is not None
    assert (found.nbytes, found.write) == (BLOCK, BLOCK / 6.0)


def test_the_reading_ends_after_the_same_time(tmp_path: Path) -> None:
    blocks = MOST_BYTES // BLOCK
    # Writing takes no time. Reading begins at 0, and the second block of it is too late.
    times = iter([0.0] * (blocks + 2) + [1.0, 3.5, 4.0])
    found = measure(tmp_path, lambda: next(times))
    assert found is not None
    assert (found.nbytes, found.read) == (MOST_BYTES, 2 * BLOCK / 4.0)


def test_at_most_a_tenth_of_what_is_free_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(nbytes: int) -> None:
        space = SimpleNamespace(f_bavail=nbytes, f_frsize=1)
        monkeypatch.setattr(posix_rates.os, "statvfs", lambda path: space)  # type: ignore[attr-defined]

    free(20 * BLOCK)
    found = measure(tmp_path)
    assert found is not None
    assert found.nbytes == 2 * BLOCK
    free(10 * BLOCK - 1)
    assert measure(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_page_cache_is_used_where_nothing_else_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *more, **others)

    synced, sync = list[int](), os.fsync

    def count(fd: int) -> None:
        sync(fd)
        synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "fsync", count)
    found = measure(tmp_path, ticking(0.001))
    assert isinstance(found, Rates)
    assert (found.direct, found.nbytes) == (False, MOST_BYTES)
    assert synced == [BLOCK * (number + 1) for number in range(MOST_BYTES // BLOCK)]


def test_a_write_that_is_refused_without_the_page_cache_goes_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def refuse(fd: int, data: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse)
    found = measure(tmp_path, ticking(0.001))
    assert isinstance(found, Rates)
    assert (found.direct, found.nbytes) == (False, MOST_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []
