"""Tests the measurement of a directory with a fake clock, and that nothing is left."""

from __future__ import annotations

import errno
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
    # The clock is read once before each block, and at both ends.
    assert found.nbytes == MOST_BYTES
    assert found.write == pytest.approx(MOST_BYTES / ((blocks + 1) * 0.001))
    assert found.read == pytest.approx(MOST_BYTES / 0.001)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_directory_is_measured_with_few_blocks(tmp_path: Path) -> None:
    found = measure(tmp_path, ticking(posix_rates.MOST_SECONDS - 0.1))
    assert found is not None
    assert found.nbytes == BLOCK


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

    monkeypatch.setattr(os, "open", refuse)
    found = measure(tmp_path, ticking(0.001))
    assert isinstance(found, Rates)
    assert (found.direct, found.nbytes) == (False, MOST_BYTES)


def test_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []
