"""Tests plans by rule on synthetic jobs: every element is written once, in equal
shares, and a rule that does not hold is not used.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.agent.plan.by_rule import WHOLE
from ckptd.agent.plan.layout import Row
from ckptd.shared.formats.coverage import check_cover
from ckptd.shared.formats.sharding import Mesh, Rule, stored_shards
from tests.shared.samples import steady
from tests.support.cases import each_case
from tests.support.synthetic import Job, Planned, Tensor, fsdp, grid, rows_of, transformer


def checked(job: Job) -> Planned:
    """Plan a job.

    Check that each element is written by one rank, and that the metadata of rank 0 says
    by which.
    """
    planned = job.plan()
    assert planned is not None
    stored = planned.stored()
    sizes = {item.fqn: item.size for layout in planned.layouts for item in layout.plan.items}
    for fqn, shards in stored.items():
        assert len(shards) == len({(offsets, sizes) for offsets, sizes, _ in shards}), (
            f"{fqn} is written twice"
        )
        check_cover(fqn, sizes[fqn], [(offsets, sizes) for offsets, sizes, _ in shards])
    metadata = planned.layouts[0].plan.metadata
    assert metadata is not None
    assert [layout.plan.metadata for layout in planned.layouts[1:]] == [None] * (job.world_size - 1)
    assert len({layout.plan.global_plan for layout in planned.layouts}) == 1
    for fqn, entry in metadata.items():
        if "rule" in entry:
            rule = Rule(*entry["rule"])  # type: ignore[misc]
            said = [
                (*where, rank)
                for where, rank in stored_shards(entry["size"], planned.meshes[rule.mesh], rule)
            ]
        else:
            ranks = entry.get("ranks", [0] * len(entry["chunks"]))
            said = [
                (tuple(offsets), tuple(sizes), rank)
                for (offsets, sizes), rank in zip(entry["chunks"], ranks, strict=True)
            ]
        listed = [layout.plan.aliases for layout in planned.layouts]
        if fqn in stored:
            assert sorted(said) == sorted(stored[fqn]), fqn
        else:
            assert [
                rank
                for rank, aliases in enumerate(listed)
                if fqn in [alias.fqn for alias in aliases]
            ] in ([said[0][2]], [])
    assert {fqn for fqn in stored if not fqn.startswith("~")} <= metadata.keys()
    return planned


def loads(planned: Planned) -> list[int]:
    return [sum(item.length for item in layout.plan.items) for layout in planned.layouts]


def test_whole_tensors_are_written_once_in_equal_shares() -> None:
    planned = checked(Job(4, [Tensor(f"w{number}", (100,)) for number in range(10)]))
    assert sorted(loads(planned)) == [800, 800, 1200, 1200]
    planned = checked(
        Job(2, [Tensor("large", (3000,)), *(Tensor(f"w{number}", (1000,)) for number in range(3))])
    )
    assert loads(planned) == [12_000, 12_000]


def test_the_leftovers_of_several_groups_are_not_all_the_same_ranks() -> None:
    planned = checked(
        Job(4, [Tensor("divided", (8,), 0, ((1, 0),)), Tensor("whole", (8,))], [grid(4, 1)])
    )
    assert loads(planned) == [32, 32, 0, 0]


def test_a_rank_writes_its_own_shard_and_one_of_each_replicas() -> None:
    planned = checked(Job(8, transformer(2, 16, mesh=0, splits=((1, 0),)), [grid(2, 4)]))
    assert max(loads(planned)) - min(loads(planned)) <= 4 * 16 * 16
    assert {sum(load > 0 for load in loads(planned))} == {8}


def test_meshes_that_do_not_know_of_each_other_hold_replicas() -> None:
    """Tensor parallelism within rows of ranks, and data parallelism between them, whose
    tensors are not on one mesh of two dimensions.
    """
    tensors = [Tensor(f"w{number}", (64,), 0, ((0, 0),)) for number in range(8)]
    planned = checked(Job(8, tensors, [rows_of(2)]))
    assert planned.meshes == [Mesh((4, 2), 0, (2, 1))]
    assert loads(planned) == [256] * 8


def test_shards_that_do_not_divide_evenly_and_empty_ones() -> None:
    planned = checked(
        Job(4, [Tensor("w", (5, 2), 0, ((0, 0),)), Tensor("b", (2,), 0, ((0, 0),))], [fsdp(4)])
    )
    assert planned.stored()["w"] == [((0, 0), (2, 2), 0), ((2, 0), (2, 2), 1), ((4, 0), (1, 2), 2)]
    assert planned.stored()["b"] == [((0,), (1,), 0), ((1,), (1,), 1)]


def test_a_buffer_is_written_by_the_lowest_rank_that_has_it() -> None:
    tensors = [
        Tensor("w", (4,)),
        Tensor("mean", (100,), buffer=True),
        Tensor("divided", (8,), 0, ((1, 0),), buffer=True),
    ]
    job = Job(
        4,
        tensors,
        [grid(2, 2)],
        content=lambda tensor, rank: b"%08d" % (rank if tensor.buffer else 0),
    )
    assert {rank for *_, rank in checked(job).stored()["mean"]} == {0}
    assert [rank for *_, rank in checked(job).stored()["divided"]] == [0, 1]
    later = job.changed(has=lambda tensor, rank: tensor.fqn != "mean" or rank >= 2)
    assert {rank for *_, rank in checked(later).stored()["mean"]} == {2}


def test_an_alias_is_listed_beside_its_base() -> None:
    tensors = [
        *(Tensor(f"w{number}", (100,)) for number in range(3)),
        Tensor("tied", (100,), base="w2"),
        Tensor("~hidden", (400,), dtype="uint8"),
    ]
    planned = checked(Job(4, [*tensors, Tensor("view", (50,), base="~hidden")]))
    assert planned.decision.metadata.keys() == {"w0", "w1", "w2", "tied", "view"}
    (rank,) = {rank for *_, rank in planned.stored()["w2"]}
    assert planned.decision.metadata["tied"].get("ranks", [0]) == [rank]


def test_stages_of_a_pipeline_are_classes_of_their_own() -> None:
    tensors = [Tensor(f"layer{number}.w", (8,), 0, ((0, 0),)) for number in range(4)] + [
        Tensor("shared", (6,))
    ]
    job = Job(
        4,
        tensors,
        [rows_of(2)],
        has=lambda tensor, rank: tensor.fqn == "shared" or int(tensor.fqn[5]) // 2 == rank // 2,
    )
    planned = checked(job)
    assert len(planned.decision.shares) == 2
    assert planned.meshes == [Mesh((2,), 0, (1,)), Mesh((2,), 2, (1,))]
    assert {rank for *_, rank in planned.stored()["layer3.w"]} == {2, 3}


def test_a_rank_with_a_tensor_more_is_a_class_of_its_own_and_the_others_are_planned_by_rule() -> (
    None
):
    job = Job(
        4,
        [Tensor("w", (8,), 0, ((0, 0),)), Tensor("own", (2,))],
        [fsdp(4)],
        has=lambda tensor, rank: tensor.fqn == "w" or rank == 1,
    )
    planned = checked(job)
    assert planned.stored()["own"] == [((0,), (2,), 1)]
    assert planned.decision.metadata["w"] == {
        "dtype": "float32",
        "size": (8,),
        "rule": [0, ((0, 0),), 0],
    }


def test_tensors_without_a_rule_are_planned_beside_the_others() -> None:
    def extras(rank: int) -> list[Row]:
        own = Row(f"loader@{rank}.seen", "int64", (3,), (0,), (3,), None, "cpu", False)
        shard = Row("old", "float32", (8,), (2 * rank,), (2,), None, "cpu", False, False)
        twice = Row(
            "both", "float32", (4,), (0,), (4,), None, "cpu", False, True, digest=b"12345678"
        )
        return [own, shard, *([twice] if rank < 2 else [])]

    planned = checked(Job(4, [Tensor("w", (8,), 0, ((0, 0),))], [fsdp(4)], extras=extras))
    assert [rank for *_, rank in planned.stored()["old"]] == [0, 1, 2, 3]
    assert len(planned.stored()["both"]) == 1
    assert planned.stored()["loader@2.seen"] == [((0,), (3,), 2)]


GRID = Job(4, [Tensor("w", (8, 4), 0, ((1, 0),)), Tensor("norm", (4,))], [grid(2, 2)])


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            GRID.changed(content=lambda tensor, rank: b"%08d" % rank),
            id="replicas of a whole tensor differ",
        ),
        pytest.param(
            GRID.changed(content=lambda t, rank: b"%08d" % (rank if t.mesh == 0 else 0)),
            id="replicas of a shard differ",
        ),
        pytest.param(
            GRID.changed(has=lambda tensor, rank: tensor.fqn != "w" or rank != 3),
            id="a rank of the mesh lacks the tensor",
        ),
        pytest.param(
            Job(
                4,
                [Tensor("w", (8,), 0, ((0, 0),))],
                [lambda rank: Mesh((2,), 0, (1,)) if rank < 2 else Mesh((2,), 2, (1,))],
                extras=lambda rank: (
                    [Row("w", "float32", (8,), (0,), (8,), None, "cpu", False)] if rank == 3 else []
                ),
            ),
            id="a tensor has a rule on some ranks only",
        ),
        pytest.param(
            Job(
                3,
                [Tensor("w", (8,), 0, ((0, 0),))],
                [lambda rank: Mesh((2,), 0, (1,)) if rank < 2 else Mesh((1,), 2, (0,))],
            ),
            id="meshes of different shapes",
        ),
        pytest.param(
            Job(
                3,
                [Tensor("w", (8,), 0, ((0, 0),))],
                [
                    lambda rank: [Mesh((2,), 0, (1,)), Mesh((2,), 1, (1,)), Mesh((2,), 1, (1,))][
                        rank
                    ]
                ],
            ),
            id="meshes that overlap",
        ),
        pytest.param(
            Job(
                2,
                [Tensor("a", (4,)), Tensor("b", (4,), base="a")],
                has=lambda tensor, rank: tensor.fqn == "a" or rank == 1,
            ),
            id="an alias on some ranks only",
        ),
    ],
)
def test_ranks_that_may_differ_send_their_items(job: Job) -> None:
    assert job.plan() is None


@each_case(
    "change",
    [
        {"dtype": "float64"},
        {"size": (9,)},
        {"buffer": True},
        {"mesh": 0, "splits": ((0, 0),)},
        {"base": "b"},
    ],
)
def test_a_tensor_that_is_described_in_two_ways_is_planned_item_by_item(
    change: dict[str, Any],
) -> None:
    other = Tensor(**({"fqn": "w", "size": (8,)} | change))
    tensors = [Tensor("w", (8,)), other, Tensor("b", (8,))]

    def has(tensor: Tensor, rank: int) -> bool:
        return tensor.fqn == "b" or (tensor is other) == (rank == 1)

    assert Job(2, tensors, [fsdp(2)], has=has).plan() is None


def test_plain_values_that_differ_are_named_item_by_item() -> None:
    first = GRID.changed(values={"lr": b"1", "only": b"3"})
    assert first.plan() is not None

    class Differs(Job):
        def description(self, rank: int) -> Any:
            return GRID.changed(values={"lr": b"%d" % rank}).description(rank)

    assert Differs(4, GRID.tensors, GRID.meshes).plan() is None


@steady
@given(st.integers(0, 10**9))
def test_any_job_is_covered(seed: int) -> None:
    chance = random.Random(seed)
    rows, columns = chance.randint(1, 3), chance.randint(1, 3)
    meshes: list[Callable[[int], Mesh]] = [
        fsdp(rows * columns),
        grid(rows, columns),
        rows_of(columns),
    ]
    shuffled = chance.sample(range(rows * columns), rows * columns)
    meshes.append(lambda rank: Mesh.of((rows, columns), shuffled))
    tensors = []
    for number in range(chance.randint(1, 6)):
        size = tuple(chance.randint(1, 5) for _ in range(chance.randint(1, 3)))
        mesh = chance.choice([WHOLE, 0, 1, 2, 3])
        along = (
            []
            if mesh == WHOLE
            else chance.sample(range([1, 2, 1, 2][mesh]), chance.randint(0, [1, 2, 1, 2][mesh]))
        )
        splits = tuple((each, chance.randrange(len(size))) for each in along)
        tensors.append(
            Tensor(
                f"w{number}",
                size,
                mesh,
                splits,
                chance.choice(["float32", "bfloat16"]),
                chance.random() < 0.2,
            )
        )
    checked(Job(rows * columns, tensors, meshes))
