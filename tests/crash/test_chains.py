"""Runs some jobs with chains of deltas; see `chains.py`."""

from __future__ import annotations

import pytest

from tests.crash import chains, places
from tests.crash.images import Unavailable
from tests.support.seen_chains import CHAINS


def test_chains_of_deltas_lose_nothing_in_a_directory() -> None:
    done, problems = chains.run(6, number=4)
    assert problems == []
    assert min(done[CHAINS], done["load"], done[" refused"]) > 0
    assert any(done[f" {kind}"] for kind in chains.TROUBLES)
    assert any(done[f"damage: {kind}"] for kind in chains.DAMAGES)


def test_chains_of_deltas_lose_nothing_in_an_object_store() -> None:
    try:
        done, problems = chains.run(2, number=3, where=places.where("seaweed"))
    except Unavailable as error:
        pytest.skip(str(error))
    assert problems == []
    assert min(done[CHAINS], done["load"], done[" refused"]) > 0
