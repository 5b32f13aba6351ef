"""Runs some trainers that roll back; see `rollbacks.py`."""

from __future__ import annotations

from tests.crash import rollbacks


def test_rollbacks_leave_nothing_behind() -> None:
    done, problems = rollbacks.run(4, number=1)
    assert problems == []
    assert min(done["snapshots"], done["rollbacks"], done["new agents"], done["  Progress"]) > 0
