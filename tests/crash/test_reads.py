"""Runs some daemons that cannot read; see `reads.py`."""

from __future__ import annotations

from tests.crash import reads


def test_what_is_sealed_outlives_a_daemon_that_cannot_read_it() -> None:
    done, problems = reads.run(6, number=2)
    assert problems == []
    assert done["reads that fail"] == 6
