"""A few rounds of a disk that hangs; see `hung.py`."""

from __future__ import annotations

from tests.crash import hung


def test_memory_does_not_wait_for_the_disk() -> None:
    done, problems = hung.run(2, 1)
    assert problems == []
    assert done.total() == 2
