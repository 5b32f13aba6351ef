"""Test which node holds the copies of which other node."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.agent.link.placement import NodePlace, holders, peer_rank
from ckptd.shared.errors import InvalidRequest
from tests.support.cases import each_case


def places(domains: list[str], ranks: int = 2) -> list[NodePlace]:
    """Return one node for each domain, each with so many ranks."""
    return [
        NodePlace(range(number * ranks, (number + 1) * ranks), domain)
        for number, domain in enumerate(domains)
    ]


@each_case("count", [2, 3, 4, 7, 16])
def test_without_domains_the_nodes_form_a_ring(count: int) -> None:
    found = holders(places([""] * count))
    assert found == {2 * n: 2 * ((n + 1) % count) for n in range(count)}


@each_case(
    ("domains", "expected"),
    [
        ("aabb", {0: 2, 1: 3, 2: 0, 3: 1}),
        ("abab", {0: 1, 2: 3, 1: 0, 3: 2}),
        ("abc", {0: 1, 1: 2, 2: 0}),
        ("aab", {0: 2, 1: 2, 2: 0}),  # the only node outside holds the copies of two
        ("aaabc", {0: 3, 1: 4, 2: 3, 3: 0, 4: 1}),
    ],
)
def test_a_node_has_its_copies_in_another_domain(domains: str, expected: dict[int, int]) -> None:
    assert holders(places(list(domains), ranks=1)) == expected


def test_a_node_without_a_domain_fails_alone() -> None:
    assert holders(places(["a", "", "a", ""], ranks=1)) == {0: 1, 2: 3, 1: 0, 3: 2}


DOMAINS = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=2, max_size=16)


@given(DOMAINS.filter(lambda names: "" in names or len(set(names)) > 1), st.randoms())
def test_no_node_holds_more_than_it_must(domains: list[str], random) -> None:  # type: ignore[no-untyped-def]
    made = places(domains, ranks=1)
    most = max(Counter(name for name in domains if name).values(), default=1)
    found = holders(made)
    shuffled = made.copy()
    random.shuffle(shuffled)
    assert holders(shuffled) == found
    assert sorted(found) == list(range(len(domains)))
    assert not any(node == holder for node, holder in found.items())
    assert not any(
        domains[node] and domains[node] == domains[holder] for node, holder in found.items()
    )
    rest = len(domains) - most
    assert max(Counter(found.values()).values()) == max(1, -(-most // rest))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "a single node has no other node for its copies"),
        (3, r"^all 3 nodes are in the domain 'rack7', and none could hold the copies of another "),
    ],
)
def test_nodes_that_have_no_peer(count: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        holders(places(["rack7"] * count))


def test_the_ranks_of_a_node_are_shared_out_over_the_ranks_of_its_holder() -> None:
    node, holder = NodePlace([4, 5, 6]), NodePlace([0, 1])
    assert [peer_rank(node, rank, holder) for rank in node.ranks] == [0, 1, 0]
