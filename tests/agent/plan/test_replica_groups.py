"""Rank 0 finds which ranks hold the same shards, by rule and item by item, and each
rank learns the groups of its own rows.
"""

from __future__ import annotations

import torch

from ckptd.agent.plan.layout import Row, plan_locally
from ckptd.agent.plan.replica_groups import (
    ALONE,
    ReplicaGroup,
    SharedRows,
    grouped,
    held_by_each,
    members,
)
from ckptd.agent.plan.shares import Offer, share_out
from ckptd.shared.formats.sharding import Mesh


def rows(names: list[str], buffers: tuple[str, ...] = (), **changed: torch.Tensor) -> list[Row]:
    tensors = {name: changed.get(name, torch.ones(4, 2)) for name in names}
    return plan_locally(tensors, buffers=buffers, world_size=3).rows


def test_shards_that_several_ranks_hold_are_grouped_by_these_ranks() -> None:
    offers = [rows(["a", "b", "c"]), rows(["a", "b"]), rows(["a", "own"])]
    held = held_by_each(offers)
    assert held == [
        SharedRows([[0, 1, 2], [0, 1]], [0, 1, ALONE]),
        SharedRows([[0, 1, 2], [0, 1]], [0, 1]),
        SharedRows([[0, 1, 2]], [0, ALONE]),
    ]


def test_buffers_and_empty_tensors_are_in_no_group() -> None:
    offers = [rows(["a", "b"], ("a",), b=torch.ones(0)) for _ in range(2)]
    assert held_by_each(offers) == [SharedRows(), SharedRows()]


def test_rows_that_are_out_of_order_on_any_rank_are_named_on_all() -> None:
    offers = [rows(["a", "b"]), rows(["a", "b"], b=torch.ones(2, 4).t())]
    assert [held.scattered for held in held_by_each(offers)] == [[1], [1]]


def test_all_ranks_of_a_group_have_the_keys_in_one_order() -> None:
    mine = rows(["b", "a", "c"])
    found = grouped(mine, [(0, (0, 1)), (1, (0, 1)), (2, (0,))], [1, 2])
    assert found == [ReplicaGroup((0, 1), [1, 0], frozenset({1}))]


def test_a_share_has_the_groups_of_the_rank() -> None:
    offers = [Offer(rows(["a", "b"])), Offer(rows(["a"]))]
    shares = share_out(offers)
    assert shares[1].replica_groups(plan_locally({"a": torch.ones(4, 2)}, world_size=2)) == [
        ReplicaGroup((0, 1), [0])
    ]
    assert share_out(offers[:1])[0].held == SharedRows()


def test_members_have_the_same_coordinate_along_what_is_divided() -> None:
    mesh = Mesh.of((2, 3), [0, 1, 2, 3, 4, 5])
    assert members(mesh, [1], (0, 2)) == (2, 5)
    assert members(mesh, [0, 1], (1, 1)) == (4,)
    assert members(mesh, [], (1, 1)) == (0, 1, 2, 3, 4, 5)
