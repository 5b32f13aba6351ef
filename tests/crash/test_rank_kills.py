"""The short version of `python -m tests.crash.rank_kills`: a whole torchrun is killed
and started again, and nothing is lost.
"""

from __future__ import annotations

from tests.crash import rank_kills


def test_random_kills_of_all_ranks_lose_nothing() -> None:
    result = rank_kills.run(2, megabytes=4, seed=20, meshes=["tp"], worlds=[3])
    assert result.lost == []
    assert result.kills == result.recovered == 2
    assert len(result.checked) == 2
