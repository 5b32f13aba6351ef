"""Tests that the public API raises nothing but CkptdErrors, whatever is in the files
that it reads.
"""

from __future__ import annotations

from tests.crash import hostile


def test_every_error_is_one_of_ckptd() -> None:
    tried, problems = hostile.run(60, seed=20)
    assert problems == []
    assert {"another tool", "damaged", "nonsense"} <= tried.keys()
