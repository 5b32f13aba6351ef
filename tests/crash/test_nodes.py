"""The short version of `python -m tests.crash.nodes`: a job on three nodes loses
nothing, whatever dies. `make trust` draws other seeds.
"""

from __future__ import annotations

import pytest

from tests.crash import nodes
from tests.crash.images import Unavailable
from tests.support.seen_chains import CHAINS

SEED = 1
SECONDS = 170.0
SECONDS_IN_A_STORE = 60.0


def test_every_failpoint_meets_every_fault() -> None:
    turns = range(len(nodes.POINTS) * len(nodes.FAULTS))
    assert len({nodes.pair(turn, nodes.POINTS) for turn in turns}) == len(turns)


def test_kills_of_ranks_daemons_and_nodes_lose_nothing() -> None:
    hits, lost = nodes.run(1000, SEED, SECONDS)
    assert lost == []
    assert set(hits) == {*nodes.FAULTS, CHAINS}
    assert hits[CHAINS] > 0


def test_kills_of_a_job_whose_root_is_an_object_store_lose_nothing() -> None:
    try:
        hits, lost = nodes.run(1000, SEED, SECONDS_IN_A_STORE, where=nodes.in_store)
    except Unavailable as error:
        pytest.skip(str(error))
    assert lost == []
    assert hits.total() - hits[CHAINS] > 1
    assert hits[CHAINS] > 0
