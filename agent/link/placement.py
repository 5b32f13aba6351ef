"""Chooses the node that holds the copies of each node's slots, by the failure domains of
the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptd.shared.errors import InvalidRequest


class NodePlace(NamedTuple):
    """The ranks of a node, ascending, and the name of its failure domain, or ""."""

    ranks: Sequence[int]
    domain: str = ""


def holders(nodes: Sequence[NodePlace]) -> dict[int, int]:
    """Return the node that holds the copies of each node, both by their lowest ranks.

    It is never the node itself, and never a node of the same domain; a node without a
    domain fails alone. Each node holds the copies of one node, unless more than half of
    all nodes are in one domain: the others then share the copies of that domain evenly.
    The order of `nodes` does not matter.

    Raises InvalidRequest if a node has no node to go to.
    """
    domains: dict[object, list[int]] = {}
    for node in sorted(nodes, key=lambda node: node.ranks[0]):
        domains.setdefault(node.domain or node.ranks[0], []).append(node.ranks[0])
    largest = max(domains.values(), key=len)
    in_order = [leader for group in domains.values() for leader in group]
    others = [leader for leader in in_order if leader not in largest]
    if not others:
        name = next(iter(domains))
        raise InvalidRequest(
            f"all {len(nodes)} nodes are in the domain {name!r}, and none could hold the copies of "
            f"another one: give nodes that do not fail together different domains, or none"
            if len(nodes) > 1
            else "a single node has no other node for its copies"
        )
    if len(largest) > len(others):
        to_others = {leader: others[n % len(others)] for n, leader in enumerate(largest)}
        return to_others | {leader: largest[n] for n, leader in enumerate(others)}
    # The nodes of a domain are next to each other, and are no more than the shift.
    shift, count = len(largest), len(in_order)
    return {leader: in_order[(n + shift) % count] for n, leader in enumerate(in_order)}


def peer_rank(node: NodePlace, rank: int, holder: NodePlace) -> int:
    """Return the rank of the node `holder` to which a rank of `node` copies its slots."""
    return holder.ranks[node.ranks.index(rank) % len(holder.ranks)]
