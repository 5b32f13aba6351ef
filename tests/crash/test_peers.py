"""The short version of `python -m tests.crash.peers`: a job with copies on other nodes
loses no more than the table in docs/how-to/replicas.md says. `make trust` draws other
seeds.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.crash import peers
from tests.crash.peers import Job, Life
from tests.support.nodes import Nodes
from tests.support.trainers import Diary

SEED = 1
SECONDS = 120.0
PAGE = Path(__file__).parents[2] / "docs/how-to/replicas.md"


def test_the_rig_tries_each_line_of_the_table() -> None:
    survived = PAGE.read_text().partition("## What is survived")[2].partition("\n## ")[0]
    first, *lines = re.findall(r"^\| (.*?) \|", survived, re.MULTILINE)
    assert (first, tuple(lines)) == ("what is lost", peers.LINES)


@pytest.mark.timeout(6 * SECONDS)
def test_nodes_lost_with_their_memory_lose_nothing_that_was_promised() -> None:
    hits, lost = peers.run(1000, SEED, SECONDS, all_troubles=True)
    assert lost == []
    assert peers.missing(hits) == []


# -- what is promised


def lived(path: Path, lost: set[int], *, to: dict[int, int]) -> Life:
    """Return a life of three nodes with one rank each. All have sealed step 9, rank 2 knows
    that step 7 is replicated, and rank 0 that step 4 is durable.
    """
    diaries = [Diary(path / str(rank)) for rank in range(3)]
    diaries[0].note("durable", 1, 4)
    diaries[2].note("replicated", 1, 7)
    diaries[2].note("sealed", 1, 10)
    for diary in diaries:
        diary.note("sealed", 1, 9)
    return Life([0, 1, 2], to, diaries, lost)


RING = {0: 1, 1: 2, 2: 0}


@pytest.mark.parametrize(
    ("lost", "to", "step"),
    [
        (set(), RING, 9),
        ({1}, RING, 7),
        ({1, 5}, RING, 7),  # node 5 was not part of this life
        ({1, 2}, RING, 4),
        ({0, 1, 2}, RING, 4),
        ({0, 1}, {0: 2, 1: 2, 2: 0}, 7),
        ({0, 2}, {0: 2, 1: 2, 2: 0}, 4),
        ({1}, {}, 4),
        (set(), {}, 9),
    ],
)
def test_a_loss_takes_away_what_only_the_lost_nodes_have(
    tmp_path: Path, lost: set[int], to: dict[int, int], step: int
) -> None:
    assert lived(tmp_path, lost, to=to).promised() == (1, step)


# -- which nodes a trouble can strike


def job(*domains: str) -> Job:
    place = Nodes(len(domains))
    try:
        return Job(place, 2, {}, domains)
    finally:
        place.remove()


def test_the_first_place_has_nodes_for_each_trouble() -> None:
    made = job(*peers.DOMAINS_OF_PLACES[0])
    made.lost = {3}
    assert [trouble for trouble in peers.TROUBLES if not peers.groups(trouble, made)] == []


def test_nodes_are_told_apart_by_the_copies_that_they_hold() -> None:
    made = job("", "", "", "")
    assert made.holders() == {0: 1, 1: 2, 2: 3, 3: 0}
    assert peers.groups(peers.APART, made) == [{0, 2}, {1, 3}]
    assert len(peers.groups(peers.TOGETHER, made)) == 4
    assert peers.groups(peers.DOMAIN, made) == []
    made.away = {1: peers.AWAY}
    assert made.holders() == {0: 2, 2: 3, 3: 0}
    assert peers.groups(peers.APART, made) == []
    assert made.ranks_of({3}) == [4, 5]


def test_a_place_whose_nodes_are_all_in_one_domain_has_no_copies_to_lose() -> None:
    made = job("rack0", "rack0", "rack1")
    made.away = {2: peers.BACK}
    assert made.holders() == {}
    assert [
        peers.groups(trouble, made) for trouble in (peers.TOGETHER, peers.DOMAIN, peers.COPY)
    ] == [[], [], []]


def test_the_trouble_that_has_come_least_often_comes_next() -> None:
    made = job(*peers.DOMAINS_OF_PLACES[0])
    hits = Counter(dict.fromkeys((*peers.TROUBLES, *peers.RETURNS), 5))
    hits[peers.DOMAIN] = hits[peers.BACK] = 4
    assert peers._next(made, random.Random(1), hits) == (peers.DOMAIN, peers.BACK)
    hits[peers.ANOTHER], made.lost = 3, {0}
    assert peers._next(made, random.Random(1), hits)[0] == peers.ANOTHER
    hits[peers.ALL] = 1
    assert peers._next(made, random.Random(1), hits) == (peers.ALL, peers.EMPTY)
    assert peers.ALL not in peers.missing(hits)
    assert peers.missing({**hits, peers.ALL: 0, peers.COPIED: 1}) == [peers.ALL]
