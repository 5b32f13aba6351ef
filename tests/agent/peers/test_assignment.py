"""Test the choice of the rank from which each rank reads a part."""

from __future__ import annotations

from collections import Counter

import pytest

from ckptd.agent.peers import assignment
from ckptd.agent.peers.assignment import assign

NOTHING: list[tuple[int, int]] = []


def test_a_rank_reads_what_it_lacks_from_a_rank_that_serves_it() -> None:
    """Ranks 2 and 3 are on a replaced node, whose peer replicas are on that of 0 and 1."""
    serves = [[0, 1, 2, 3], [0, 1, 2, 3], [], []]
    wants = [NOTHING, NOTHING, [(2, 100)], [(3, 100)]]
    assert assign(serves, wants) == [{}, {}, {2: 0}, {3: 1}]


def test_nobody_reads_what_nobody_serves_or_from_itself() -> None:
    assert assign([[0], [1]], [[(2, 9), (0, 9)], NOTHING]) == [{}, {}]
    assert assign([[], []], [[(0, 9)], [(1, 9)]]) == [{}, {}]


def test_the_bytes_are_spread_over_the_ranks_and_over_the_nodes() -> None:
    """Nodes of two ranks: ranks 0 and 1, and ranks 2 and 3, all serve part 4."""
    serves = [[4], [4], [4], [4], [], [], [], []]
    wants = [NOTHING] * 4 + [[(4, 10)]] * 4
    assert [reads[4] for reads in assign(serves, wants)[4:]] == [0, 1, 2, 3]


def test_the_largest_read_comes_first_and_others_go_where_fewer_bytes_are_read() -> None:
    serves = [[5, 6, 7], [5, 6, 7], []]
    wants = [NOTHING, NOTHING, [(5, 10), (6, 100), (7, 20)]]
    assert assign(serves, wants)[2] == {6: 0, 7: 1, 5: 1}


def test_a_rank_has_few_peers_and_reads_more_from_those() -> None:
    count = assignment.MOST_PEERS + 4
    serves = [[part] for part in range(count)] + [[]]
    serves[0] = list(range(count))
    found = assign(serves, [NOTHING] * count + [[(part, part + 1) for part in range(count)]])[-1]
    assert len(set(found.values())) == assignment.MOST_PEERS
    assert found.keys() >= {0, count - 1}
    without = assign([[], *serves[1:]], [NOTHING] * count + [[(p, p + 1) for p in range(count)]])
    assert without[-1] == {part: part for part in range(count - assignment.MOST_PEERS, count)}


def test_a_rank_has_few_readers_and_the_largest_reads_are_preferred() -> None:
    readers = assignment.MOST_READERS + 3
    wants = [NOTHING] + [[(0, 1 + reader)] for reader in range(readers)]
    found = assign([[0]] + [[]] * readers, wants)
    assert [bool(reads) for reads in found] == [False] * 4 + [True] * assignment.MOST_READERS


def test_a_job_has_a_limited_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "MOST_PAIRS", 2)
    found = assign([[0, 1], [], [], []], [NOTHING, [(0, 9), (1, 9)], [(0, 9)], [(0, 9)]])
    assert found == [{}, {0: 0, 1: 0}, {0: 0}, {}]


@pytest.mark.parametrize("nodes", [2, 16])
def test_every_rank_of_a_lost_node_finds_its_part_and_the_load_is_even(nodes: int) -> None:
    """Node 0 is replaced. Node 1 has its replicas besides its own parts."""
    ranks = 8 * nodes
    own = [list(range(rank - rank % 8, rank - rank % 8 + 8)) for rank in range(ranks)]
    serves = [[], *own[1:]]
    serves[:8] = [[]] * 8
    serves[8:16] = [[*range(8), *range(8, 16)]] * 8
    found = assign(serves, [[(rank, 1000)] for rank in range(8)] + [NOTHING] * (ranks - 8))
    assert all(found[rank].keys() == {rank} for rank in range(8))
    assert set(Counter(found[rank][rank] for rank in range(8)).values()) == {1}
