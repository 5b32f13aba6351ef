"""Tests which plans of a snapshot are refused because they do not fit together, and
which are not.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.plan import Alias, Item, Plan, Region
from ckptd.shared.formats.plan_check import check_plans
from ckptd.shared.formats.sharding import Mesh, Rule
from tests.shared.samples import WRITER
from tests.support.cases import each_case


def shard(name: str, start: int, length: int, *, total: int = 8, dtype: str = "float32") -> Item:
    return Item(name, dtype, (total,), (start,), (length,), None, 0)


def plan(
    *items: Item, aliases: tuple[Alias, ...] = (), metadata: Any = None, meshes: Any = msgspec.UNSET
) -> Plan:
    return Plan(
        [Region(0, 64, 4)], list(items), list(aliases), metadata, WRITER, bytes(32), meshes=meshes
    )


def described(*ranks: int, dtype: str = "float32") -> dict[str, Any]:
    """The entry of a tensor of 8 elements. Each of these ranks stores one
    piece.
    """
    piece = 8 // len(ranks)
    entry = {
        "dtype": dtype,
        "size": [8],
        "chunks": [[[piece * n], [piece]] for n in range(len(ranks))],
    }
    return {**entry, "ranks": list(ranks)} if any(ranks) else entry


TIED = Alias("tied", "w", 0, "float32", (4,), (1,))
TIED_ENTRY = {"dtype": "float32", "size": [4], "chunks": [[[0], [4]]]}
BLOB = Item("blob", "bytes", (3,), (0,), (3,), None, 0)
WHOLE = shard("w", 0, 8)


def test_sound_plans_give_the_names_that_values_may_use() -> None:
    first = plan(
        shard("w", 0, 4), shard("~0", 0, 8), shard("both", 0, 8), BLOB, aliases=(Alias("tied", "~0",
        0, "float32", (4,), (1,)),), metadata={"w": described(0, 1), "both": described(0),
        "blob": {"dtype": "bytes"}, "tied": TIED_ENTRY},
    )  # fmt: skip
    # A replica that is stored twice counts once.
    second = plan(shard("w", 4, 4), shard("both", 0, 8))
    assert check_plans({0: first, 1: second}, 2) == frozenset({"w", "both", "blob", "tied"})


def test_a_tensor_without_elements_and_an_empty_shard_are_whole() -> None:
    nothing = Item("nothing", "float32", (0, 3), (0, 0), (0, 3), None, 0)
    entry = {"dtype": "float32", "size": [0, 3], "chunks": [[[0, 0], [0, 3]]]}
    chunks = {"dtype": "float32", "size": [8], "chunks": [[[0], [8]], [[8], [0]]], "ranks": [0, 1]}
    assert check_plans(
        {0: plan(nothing, WHOLE, metadata={"nothing": entry, "w": chunks}), 1: plan()}, 2
    ) == frozenset({"nothing", "w"})


MESH = Mesh((2,), 0, (1,))
RULED = {"dtype": "float32", "size": [8], "rule": Rule(0, ((0, 0),))}


def test_a_rule_describes_the_shards_of_its_ranks() -> None:
    first = plan(shard("w", 0, 4), metadata={"w": RULED}, meshes=[MESH])
    assert check_plans({0: first, 1: plan(shard("w", 4, 4))}, 2) == frozenset({"w"})
    with pytest.raises(
        IntegrityError,
        match=r"rank 1 stores the shard \[4\] at \[4\] of 'w'; the plan of that rank has no such "
        r"item",
    ):
        check_plans(
            {
                0: plan(shard("w", 0, 4), shard("w", 4, 4), metadata={"w": RULED}, meshes=[MESH]),
                1: plan(),
            },
            2,
        )


def test_a_node_of_several_checks_what_its_ranks_and_the_metadata_tell() -> None:
    first = plan(shard("w", 0, 4), metadata={"w": described(0, 1), "other": described(1)})
    assert check_plans({0: first}, 2) == frozenset({"w", "other"})
    assert check_plans({1: plan(shard("w", 4, 4))}, 2) is None
    hole = plan(
        shard("w", 0, 4),
        metadata={
            "w": {
                "dtype": "float32",
                "size": [8],
                "chunks": [[[0], [4]], [[5], [3]]],
                "ranks": [0, 1],
            }
        },
    )
    with pytest.raises(IntegrityError, match="w: only 7 of 8 elements are stored"):
        check_plans({0: hole}, 2)


def without_ranks(*names: str) -> dict[str, Any]:
    return {
        name: {key: value for key, value in described(0, 1).items() if key != "ranks"}
        for name in names
    }


def test_metadata_of_an_earlier_version_name_no_ranks() -> None:
    halves = {rank: shard("w", 4 * rank, 4) for rank in (0, 1)}
    plans = {0: plan(halves[0], metadata=without_ranks("w")), 1: plan(halves[1])}
    assert check_plans(plans, 2) == frozenset({"w"})
    assert check_plans({0: plans[0]}, 2) == frozenset({"w"})
    with pytest.raises(
        IntegrityError,
        match=r"rank 0 stores the shard \[4\] at \[0\] of 'v'; the plan of that rank has no such "
        r"item",
    ):
        check_plans(
            {
                0: plan(halves[0], metadata=without_ranks("w", "v")),
                1: plan(halves[1], shard("v", 0, 8)),
            },
            2,
        )


def test_large_metadata_must_name_the_ranks_because_readers_need_them() -> None:
    names = [f"{'long' * 2000}.{number}" for number in range(140)]
    first = plan(*(shard(name, 0, 4) for name in names), metadata=without_ranks(*names))
    with pytest.raises(IntegrityError, match="the plan of that rank has no such item"):
        check_plans({0: first, 1: plan(*(shard(name, 4, 4) for name in names))}, 2)


WRONG: list[tuple[dict[int, Plan], int, str]] = [
    ({0: plan(shard("w", 0, 7), metadata={"w": described(0)})}, 1, "w: only 7 of 8 elements are "
        "stored"),
    ({0: plan(shard("w", 0, 6), metadata={"w": described(0, 1)}), 1: plan(shard("w", 4, 4))}, 2,
    "w: "
        "the shards .* overlap"),
    ({0: plan(shard("w", 0, 4)), 1: plan(shard("w", 4, 4, dtype="int32"))}, 2, "'w' has two "
        "dtypes: float32, and int32 in"),
    ({0: plan(shard("w", 0, 4)), 1: plan(shard("w", 4, 5, total=9))}, 2, r"w has two sizes: \[9\] "
        r"and "
        r"\[8\]"),
    ({0: plan(WHOLE), 1: plan(aliases=(Alias("w", "x", 0, "float32", (8,), (1,)),))}, 2, "'w' is "
        "an item and an alias"),
    ({0: plan(WHOLE, aliases=(Alias("~t", "w", 0, "float32", (8,), (1,)),))}, 1, "'~t' has the "
        "name of a hidden item"),
    ({0: plan(Item("blob", "bytes", (3, 1), (0, 0), (3, 1), None, 0))}, 1, "'blob' is a value of "
        "the size"),
    ({0: plan(WHOLE)}, 1, "the metadata in the plan of rank 0 are missing: they must describe 'w', "
        "which rank 0 stores"),
    ({0: plan(WHOLE, BLOB, metadata={"w": described(0)})}, 1, "do not describe 'blob', which rank "
        "0 stores"),
    ({0: plan(WHOLE, aliases=(TIED,), metadata={"w": described(0)})}, 1, "do not describe 'tied', "
        "which rank 0 stores"),
    ({0: plan(metadata={"w": described(0)})}, 1, "the metadata say that rank 0 stores .* of 'w'; "
        "the plan of that rank has no such item"),
    ({0: plan(metadata={"blob": {"dtype": "bytes"}})}, 1, "the metadata say that rank 0 stores "
        "'blob'; the plan of that rank"),
    ({0: plan(WHOLE, metadata={"w": described(1)}), 1: plan()}, 2, "the metadata say that rank 1 "
        "stores"),
    ({0: plan(WHOLE, metadata={"w": described(0, dtype="int32")})}, 1, "'w' has the dtype int32 "
        ".*; rank 0 stores it as float32"),
    ({0: plan(WHOLE, metadata={"w": {**described(0), "size": [9]}})}, 1, r"'w' has the dtype "
        r"float32 "
        r"and "
        r"the "
        r"size "
        r"\[9\]; "
        r"rank "
        r"0 "
        r"stores "
        r"it"),
    ({0: plan(WHOLE, metadata={"w": {"dtype": "bytes"}})}, 1, "'w' has the dtype bytes"),
    ({0: plan(shard("w", 0, 4), shard("w", 4, 4), metadata={"w": described(0)})}, 1, "the plan of "
        "that rank has no such item"),
    ({0: plan(WHOLE, shard("w", 2, 2), metadata={"w": described(0)})}, 1, "overlap"),
    ({0: plan(WHOLE, metadata={"w": described(0), "~x": described(0)})}, 1, "the metadata have an "
        "entry for '~x', but a name that starts with '~' is the name of a hidden item"),
    ({0: plan(WHOLE, metadata={"w": {"dtype": "float32"}})}, 1, "'w' is described by"),
    ({0: plan(WHOLE, metadata={"w": {**described(0), "ranks": [1]}})}, 1, "'w' is said to be on "
        "ranks that the job does not have"),
    ({0: plan(WHOLE, metadata={"w": RULED})}, 1, "'w' is divided among a mesh that is not "
        "described"),
    ({0: plan(WHOLE, metadata={"w": RULED}, meshes=[MESH])}, 1, "a mesh of shape"),
]  # fmt: skip


@each_case(("plans", "world_size", "words"), WRONG)
def test_plans_that_do_not_fit_together_are_refused_by_the_name_of_the_tensor(
    plans: dict[int, Plan], world_size: int, words: str
) -> None:
    with pytest.raises(IntegrityError, match=words):
        check_plans(plans, world_size)


def test_an_error_in_one_of_many_tensors_that_are_alike_names_it() -> None:
    """Tensors of one shape and one entry are checked once, each other one by itself."""
    names = [f"w{number}" for number in range(5)]

    def made(**odd: Any) -> Plan:
        whole = plan(*(shard(name, 0, 8) for name in names))
        entry = described(0)
        return msgspec.structs.replace(whole, metadata=dict.fromkeys(names, entry) | odd)

    assert check_plans({0: made()}, 1) == frozenset(names)
    with pytest.raises(IntegrityError, match="'w3' has the dtype int32"):
        check_plans({0: made(w3=described(0, dtype="int32"))}, 1)
    with pytest.raises(IntegrityError, match="'w3'; the plan of that rank has no such item"):
        check_plans({0: made(w3=described(0, 0))}, 1)
    short = msgspec.structs.replace(made(), items=[*made().items[:4], shard("w4", 0, 7)])
    with pytest.raises(IntegrityError, match="w4: only 7 of 8 elements are stored"):
        check_plans({0: short}, 1)
