"""Finds the replica groups of a plan: which ranks hold the same shards, so that only
one of them stores each shard.

Rank 0 knows the shards of all ranks when it plans, and sends each rank the groups of
its shards. It need not send the groups of shards that a rule places, because each rank
can evaluate the rule. Buffers of modules are in no group: ranks may differ in them, and
those of the lowest rank are stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from ckptd.agent.plan.layout import Row, RowKey
from ckptd.shared.formats.sharding import Mesh

ALONE = -1
"""Stands for the group of a shard that no other rank holds, or that is not compared."""


class SharedRows(msgspec.Struct, frozen=True, array_like=True):
    """The replica groups of the rows of one rank.

    groups: the ranks of each group. of_row: the number of each row's group, or ALONE.
    scattered: the numbers of the rows whose elements do not lie in C order on every
    rank of their group.
    """

    groups: list[list[int]] = []
    of_row: list[int] = []
    scattered: list[int] = []


class ReplicaGroup(msgspec.Struct, frozen=True):
    """A set of ranks that hold the same shards, and the rows of these shards on this
    rank.

    rows: the numbers of the rows, in the order of their keys. scattered: the numbers of
    those rows whose elements do not lie in C order on every rank.
    """

    ranks: tuple[int, ...]
    rows: list[int]
    scattered: frozenset[int] = frozenset()


def held_by_each(offers: Sequence[Sequence[Row]]) -> list[SharedRows]:
    """Return the replica groups of the rows of each rank.

    `offers` has the rows of all ranks, in the order of the ranks.
    """
    holders: dict[RowKey, list[int]] = defaultdict(list)
    out_of_order = {row.key for rows in offers for row in rows if not row.in_order}
    for rank, rows in enumerate(offers):
        for row in rows:
            if row.digest and row.nbytes:
                holders[row.key].append(rank)
    found = []
    for rows in offers:
        numbers: dict[tuple[int, ...], int] = {}
        of_row = []
        for row in rows:
            ranks = tuple(holders.get(row.key, ())) if row.digest else ()
            of_row.append(numbers.setdefault(ranks, len(numbers)) if len(ranks) > 1 else ALONE)
        scattered = [
            number
            for number, row in enumerate(rows)
            if of_row[number] != ALONE and row.key in out_of_order
        ]
        found.append(
            SharedRows(list(map(list, numbers)), of_row, scattered) if numbers else SharedRows()
        )
    return found


def members(mesh: Mesh, along: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that hold the same shards as the rank at `coordinate`.

    along: the dimensions of the mesh that divide the shards.
    """
    return tuple(sorted(
        rank for rank, other in zip(mesh.all_ranks(), mesh.coordinates(),
        strict=True) if all(other[n] == coordinate[n] for n in along)
    ))  # fmt: skip


def grouped(
    rows: Sequence[Row],
    ranks_of: Iterable[tuple[int, tuple[int, ...]]],
    scattered: Iterable[int] = (),
) -> list[ReplicaGroup]:
    """Return the groups, given pairs of a row number and the ranks that hold its shard.

    All ranks of a group get the same order of keys. scattered: the numbers of the rows
    whose elements do not lie in C order on every rank that holds them.
    """
    out_of_order = frozenset(scattered)
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, ranks in ranks_of:
        if len(ranks) > 1:
            found[ranks].append(number)
    return [
        ReplicaGroup(
            ranks,
            sorted(numbers, key=lambda number: rows[number].key),
            out_of_order.intersection(numbers),
        )
        for ranks, numbers in sorted(found.items())
    ]
