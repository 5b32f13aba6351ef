"""Tests the arithmetic of rules: the shards of all coordinates are those of
`torch.chunk`, and a hostile mesh is refused in few steps.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.coverage import check_cover
from ckptd.shared.formats.sharding import (
    Mesh,
    Rule,
    check_rule,
    place,
    replica_of,
    replicas,
    stored_shards,
)
from tests.shared.samples import steady
from tests.support.cases import each_case


@each_case(
    ("ranks", "mesh"),
    [
        (range(6), Mesh((2, 3), 0, (3, 1))),
        ([4, 6, 5, 7], Mesh((2, 2), 4, (1, 2))),
        ([0, 4, 1, 5], Mesh((2, 2), 0, (1, 4))),
        ([7], Mesh((1, 1), 7, (0, 0))),
        ([0, 1, 3, 2], Mesh((2, 2), ranks=(0, 1, 3, 2))),
        ([3, 2, 1, 0], Mesh((2, 2), ranks=(3, 2, 1, 0))),
    ],
)
def test_a_regular_mesh_is_three_numbers_a_dimension_and_another_lists_its_ranks(
    ranks: list[int], mesh: Mesh
) -> None:
    assert Mesh.of(mesh.shape, list(ranks)) == mesh
    assert (mesh.all_ranks(), mesh.size) == (list(ranks), len(ranks))
    mesh.check(8)
    for rank, coordinate in zip(ranks, itertools.product(*map(range, mesh.shape)), strict=True):
        assert mesh.coordinate_of(rank) == coordinate
    assert mesh.coordinate_of(9) is None


@each_case(
    "mesh",
    [
        Mesh((2, 3), 0, (3,)),
        Mesh((2, 3), 0, (1, 1)),
        Mesh((2, 3), 0, (2, 1)),
        Mesh((1 << 24, 1 << 24), 0, (1 << 24, 1)),
        Mesh((1 << 24, 2), 0, (0, 1)),
        Mesh((2, 2), ranks=(0, 1, 2)),
        Mesh((2, 2), ranks=(0, 1, 2, 2)),
        Mesh((2, 2), ranks=(0, 1, 2, 9)),
        Mesh((2, 2), 6, (2, 1)),
        Mesh((2, 2)),
    ],
)
def test_what_is_no_mesh_of_this_job_is_refused(mesh: Mesh) -> None:
    with pytest.raises(IntegrityError, match="does not have one rank of 8 for each coordinate"):
        mesh.check(8)


def test_a_split_divides_as_torch_does() -> None:
    """The first split divides the tensor, and the second one what is left."""
    mesh = Mesh((2, 3), 0, (3, 1))
    assert len(list(mesh.coordinates())) == 6
    whole = torch.arange(70).view(10, 7)
    for splits in [((0, 0), (1, 0)), ((1, 0), (0, 0)), ((0, 1), (1, 0)), ((1, 1),), ()]:
        for coordinate in mesh.coordinates():
            left = whole
            for along, dimension in splits:
                pieces = torch.chunk(left, mesh.shape[along], dimension)
                left = (
                    pieces[coordinate[along]]
                    if coordinate[along] < len(pieces)
                    else left.narrow(dimension, 0, 0)
                )
            offsets, sizes = place((10, 7), mesh, splits, coordinate)
            assert sizes == tuple(left.shape)
            assert whole[
                tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            ].equal(left)


def test_replicas_are_counted_along_the_dimensions_that_divide_nothing() -> None:
    mesh = Mesh((2, 3, 2), 0, (6, 2, 1))
    assert (
        replicas(mesh, ()),
        replicas(mesh, ((1, 0),)),
        replicas(mesh, ((0, 0), (1, 0), (2, 0))),
    ) == (12, 4, 1)
    assert [replica_of(mesh, ((1, 0),), coordinate) for coordinate in mesh.coordinates()] == [
        0,
        1,
    ] * 3 + [2, 3] * 3
    assert [rank for _, rank in stored_shards((6,), mesh, Rule(0, ((1, 0),), 2))] == [6, 8, 10]


@steady
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.data(),
)
def test_the_stored_shards_are_the_whole_tensor(
    shape: list[int], size: list[int], data: st.DataObject
) -> None:
    along = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    splits = tuple((each, data.draw(st.sampled_from(range(len(size))))) for each in along)
    mesh = Mesh.of(shape, range(torch.Size(shape).numel()))
    assert replicas(mesh, splits) >= 1
    for replica in range(replicas(mesh, splits)):
        rule = Rule(0, splits, replica)
        check_rule("w", size, [mesh], rule)
        shards = list(stored_shards(size, mesh, rule))
        check_cover("w", tuple(size), [where for where, _ in shards])
        assert len({where for where, _ in shards}) == len(shards)


@each_case(
    "rule",
    [
        Rule(1, ()),
        Rule(0, ((2, 0),)),
        Rule(0, ((0, 0), (0, 1))),
        Rule(0, ((0, 2),)),
        Rule(0, ((0, 0),), 3),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rule: Rule) -> None:
    with pytest.raises(IntegrityError, match="^'w' is divided "):
        check_rule("w", (4, 4), [Mesh((2, 3), 0, (3, 1))], rule)


def test_a_tensor_without_elements_has_no_rule() -> None:
    with pytest.raises(IntegrityError, match="does not fit its size"):
        check_rule("w", (4, 0), [Mesh((2,), 0, (1,))], Rule(0, ((0, 0),)))
