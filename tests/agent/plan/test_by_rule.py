"""Tests which tensors a rule describes: the rule gives the shard that torch gives, or
the tensor is listed shard by shard.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset as where_torch_puts_it,
)
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from ckptd.agent.plan.by_rule import WHOLE, ByRule, RuledShare, _splits_of, digest_of, stacked
from ckptd.agent.plan.layout import plan_locally
from ckptd.shared.formats.sharding import Mesh, place
from tests.support.cases import each_case


def strided(dimension: int, factor: int) -> Any:
    return _StridedShard(dimension, split_factor=factor)


@each_case(
    ("shape", "placements", "splits"),
    [
        ((4,), [Shard(0)], ((0, 0),)),
        ((4,), [Replicate()], ()),
        ((2, 2), [Replicate(), Shard(1)], ((1, 1),)),
        ((2, 3), [Shard(0), Shard(0)], ((0, 0), (1, 0))),
        ((2, 3), [strided(0, 3), Shard(0)], ((1, 0), (0, 0))),
        ((2, 3), [strided(0, 1), Shard(1)], ((0, 0), (1, 1))),
        ((2, 2, 2), [strided(0, 4), strided(0, 2), Shard(0)], ((2, 0), (1, 0), (0, 0))),
        ((2, 2, 2), [strided(0, 2), Shard(1), Shard(0)], ((1, 1), (2, 0), (0, 0))),
        ((2, 2, 2), [Shard(0), strided(0, 2), Shard(0)], ((0, 0), (2, 0), (1, 0))),
    ],
)
def test_placements_as_splits(
    shape: tuple[int, ...], placements: list[Any], splits: tuple[tuple[int, int], ...]
) -> None:
    assert _splits_of(placements, shape) == splits
    mesh = Mesh.of(shape, range(torch.Size(shape).numel()))
    coordinates = list(mesh.coordinates())
    assert len(coordinates) == torch.Size(shape).numel()
    for coordinate in coordinates:
        sizes, offsets = where_torch_puts_it((24, 12), shape, list(coordinate), placements)
        assert place((24, 12), mesh, splits, coordinate) == (tuple(offsets), tuple(sizes))


@pytest.mark.parametrize(
    "placements",
    [[Partial(), Shard(0)], [strided(0, 4), Shard(0)]],
    ids=["partial", "a factor of another mesh"],
)
def test_placements_without_a_rule(placements: list[Any]) -> None:
    assert _splits_of(placements, (2, 2)) is None


def test_whole_tensors_buffers_and_aliases() -> None:
    base = torch.arange(6.0)
    tensors = {"w": base, "tied": base.view(2, 3), "mean": torch.ones(2)}
    local = plan_locally(tensors, buffers={"mean"}, world_size=2)
    described = ByRule.of(local, tensors, {"lr": b"1"}, 1, {"mean"})
    assert [(t.fqn, t.size, t.mesh, t.buffer, t.base) for t in described.structured.tensors] == [
        ("w", (6,), WHOLE, False, ""), ("tied", (2, 3), WHOLE, False, "w"), ("mean", (2,), WHOLE,
        True, ""),
    ]  # fmt: skip
    assert [bool(t.digest) for t in described.structured.tensors] == [True, True, False]
    assert (described.summary.extras, described.summary.meshes, described.structured.values) == (
        [],
        [],
        {"lr": b"1"},
    )
    assert described.summary.structure == digest_of(described.structured)
    share = RuledShare([], [WHOLE] * 3, [1, 1, 0], {}, b"plan")
    layout = described.lay_out(share, 1, None)
    assert [item.fqn for item in layout.plan.items] == ["w"]
    assert [alias.fqn for alias in layout.plan.aliases] == ["tied"]
    assert layout.plan.global_plan == b"plan"


def test_tensors_of_each_ranks_own_make_no_class_of_their_own() -> None:
    def described(rank: int) -> ByRule:
        tensors = {
            "w": torch.ones(2),
            f"loader@{rank}.seen": torch.ones(rank + 1),
            f"own@{rank}": torch.ones(1),
        }
        return ByRule.of(plan_locally(tensors, world_size=4), tensors, {}, rank)

    first, last = described(0), described(3)
    assert first.summary.structure == last.summary.structure
    assert [row.fqn for row in last.summary.extras] == ["loader@3.seen", "own@3"]
    layout = last.lay_out(RuledShare([], [WHOLE], [0], {}, b"plan"), 3, None)
    assert [item.fqn for item in layout.plan.items] == ["loader@3.seen", "own@3"]


def test_a_structure_is_found_again_by_its_digest_on_other_ranks_only_if_it_is_the_same() -> None:
    def structure(**tensors: torch.Tensor) -> bytes:
        return ByRule.of(plan_locally(tensors, world_size=2), tensors, {}, 0).summary.structure

    first = structure(w=torch.ones(2))
    assert structure(w=torch.ones(2)) == first
    others = [
        structure(w=torch.ones(3)),
        structure(v=torch.ones(2)),
        structure(w=torch.ones(2).double()),
        structure(w=torch.zeros(2)),
    ]
    assert first not in others
    assert len(set(others)) == 4


def test_the_splits_of_a_mesh_count_from_its_last_dimension_in_a_row_of_meshes() -> None:
    assert stacked(((0, 1), (1, 0)), Mesh((4, 2, 3), 0, (6, 3, 1)), (2, 3)) == ((1, 1), (2, 0))
    assert stacked(((0, 1),), Mesh((4,), 0, (1,)), (4,)) == ((0, 1),)
