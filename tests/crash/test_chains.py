"""Runs some jobs with chains of deltas; see `chains.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from tests.crash import chains, places
from tests.crash.images import Unavailable
from tests.crash.places import Where
from tests.support.daemons import home
from tests.support.seen_chains import CHAINS

SEEN = (CHAINS, "load", " refused")
MOST = 24
"""The most jobs that are run. How busy the machine is decides what a job meets."""


def met(kinds: Collection[str], first: int, where: Where = home) -> Counter[str]:
    """Run jobs until each of these kinds has happened, and return how often each did."""
    done = Counter[str]()
    for number in range(first, first + MOST):
        more, problems = chains.run(1, number, where=where)
        assert problems == []
        done += more
        if all(done[kind] for kind in kinds):
            break
    return done


def test_chains_of_deltas_lose_nothing_in_a_directory() -> None:
    kinds = (
        *SEEN,
        *(f" {kind}" for kind in chains.TROUBLES),
        *(f"damage: {kind}" for kind in chains.DAMAGES),
    )
    done = met(kinds, 4)
    assert [kind for kind in kinds if not done[kind]] == []


def test_chains_of_deltas_lose_nothing_in_an_object_store() -> None:
    try:
        done = met(SEEN, 3, places.where("seaweed"))
    except Unavailable as error:
        pytest.skip(str(error))
    assert [kind for kind in SEEN if not done[kind]] == []
