"""Tests the plain values of several ranks: which are compared, and the one tree from
which another set of ranks recovers.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.agent.state.merge import Foreign, OfRanks, bare, merge, own_part, value_digests
from ckptd.agent.state.tree import ObjectNode, PerRank, TensorRef
from ckptd.shared.errors import UnsavableValue


def optimizer(*groups: tuple[float, list[Any]]) -> dict[str, Any]:
    """Return an optimizer state with a learning rate for each group and a state for
    each parameter.
    """
    return {
        "state": {
            name: {"step": TensorRef(f"{name}.step")} for _, names in groups for name in names
        },
        "param_groups": [{"lr": lr, "params": names} for lr, names in groups],
    }


def test_shared_values_have_a_digest() -> None:
    tree = {
        "step": 3, "tensor": TensorRef("tensor"), "own": PerRank({"position": 1}), "pair": (1, 2),
        "mixed": [TensorRef("mixed.0"), 5], "model": ObjectNode("module",
        {"weight": TensorRef("model.weight"), "extra": "x"}), "empty": {},
    }  # fmt: skip
    found = value_digests(tree)
    # Containers count by their kind.
    assert set(found) == {"step", "pair", "mixed.1", "model.extra", "", "mixed", "model", "empty"}
    assert all(len(digest) == 8 for digest in found.values())
    other = value_digests({**tree, "step": 4})
    assert {key for key in found if found[key] != other[key]} == {"step"}
    assert value_digests({**tree, "step": 3.0})["step"] != found["step"]
    for container in ([{"a": 1}], [{"a": 1}, {"a": 1}], {"a": 1}, 1, [1]):
        assert value_digests({"v": container})["v"] != value_digests({"v": [{"a": 1}] * 3})["v"]
    assert value_digests({"v": {}})["v"] == value_digests({"v": {"of another rank": 1}})["v"]


def test_groups_are_compared_by_parameter() -> None:
    """Ranks may number their groups differently, and hold different parameters."""
    one = value_digests({"optim": optimizer((0.1, ["a"]), (0.2, ["b", "c"]))})
    other = value_digests({"optim": optimizer((0.2, ["c", "b"]), (0.1, ["a"]))})
    assert one == other
    assert {key for key in one if "groups" in key} == {
        f"optim.param_groups.{name}" for name in "abc"
    }
    changed = value_digests({"optim": optimizer((0.1, ["a", "b"]), (0.2, ["c"]))})
    assert {key for key in one if one[key] != changed[key]} == {"optim.param_groups.b"}
    with pytest.raises(
        UnsavableValue, match=r"^optim: each rank numbers the parameters of this optimizer state"
    ):
        value_digests({"optim": optimizer((0.1, [0, 1]))})


def test_merge_has_the_keys_of_all_and_the_values_of_the_lowest() -> None:
    trees = [
        {"a": 1, "both": 0, "deep": {"x": [TensorRef("x"), 1]}},
        {"both": 1, "b": 2, "deep": {"x": [TensorRef("x"), 2], "y": None}},
    ]
    assert merge(trees) == {
        "a": 1,
        "both": 0,
        "deep": {"x": [TensorRef("x"), 1], "y": None},
        "b": 2,
    }
    assert merge(trees, 1) == {
        "both": 1,
        "b": 2,
        "deep": {"x": [TensorRef("x"), 2], "y": None},
        "a": 1,
    }
    assert list(merge(trees, 1)) == ["both", "b", "deep", "a"]  # the order of this rank comes first


def test_values_that_only_other_ranks_had_are_known() -> None:
    first, second = (
        ObjectNode("stateful", {"x": [{"k": 0}]}),
        ObjectNode("stateful", {"x": [{"l": 1}], "y": 3}),
    )
    trees: list[Any] = [{"a": 1, "o": first}, {"b": 2, "o": second}]
    foreign: Foreign = {}
    merged = merge(trees, 1, foreign)
    assert merged == {
        "b": 2,
        "o": ObjectNode("stateful", {"x": [{"l": 1, "k": 0}], "y": 3}),
        "a": 1,
    }
    assert own_part(merged, foreign) == trees[1]
    assert own_part(merged, {}) is merged
    of_the_first: Foreign = {}
    assert own_part(merge(trees, 0, of_the_first), of_the_first) == trees[0]
    lost: Foreign = {}
    # This rank has no such dict of its own.
    assert own_part(merge([{}, {"d": {"x": 1}}], 0, lost)["d"], lost) == {"x": 1}


def test_groups_that_only_others_had_are_known() -> None:
    trees: list[Any] = [
        {"optim": {**optimizer((0.1, ["a"])), "more": 1}},
        {"optim": optimizer((0.2, ["b"]), (0.3, ["c"]))},
    ]
    for own, tree in enumerate(trees):
        foreign: Foreign = {}
        merged = merge(trees, own, foreign)
        assert {name for group in merged["optim"]["param_groups"] for name in group["params"]} == {
            "a",
            "b",
            "c",
        }
        # Otherwise another dict could get the same id.
        assert {id(found.node) for found in foreign.values()} == set(foreign)
        assert own_part(merged, foreign) == tree


def test_merge_keeps_each_ranks_own() -> None:
    trees = [{"own": PerRank(10)}, {}, {"own": PerRank(12)}]
    assert merge(trees) == {"own": OfRanks([10, 12], None)}
    assert merge(trees, 2) == {"own": OfRanks([10, 12], 1)}
    assert merge(trees, 1) == {"own": OfRanks([10, 12], None)}


def test_merge_of_objects_and_of_other_kinds() -> None:
    trees = [
        {"o": ObjectNode("module", {"a": 1}), "p": (1, PerRank(1))},
        {"o": ObjectNode("module", {"b": 2}), "p": (1, PerRank(2))},
    ]
    assert merge(trees) == {
        "o": ObjectNode("module", {"a": 1, "b": 2}),
        "p": (1, OfRanks([1, 2], None)),
    }
    assert merge([{"v": {"a": 1}}, {"v": 3}]) == {"v": {"a": 1}}
    assert merge([{"v": [PerRank(1)]}, {"v": [PerRank(1), PerRank(2)]}]) == {
        "v": [OfRanks([1], None)]
    }


def test_every_parameter_stands_in_one_group() -> None:
    trees = [optimizer((0.1, ["a", "b"]), (0.2, ["c"])), optimizer((0.1, ["b", "d"]), (0.3, []))]
    found = merge(trees)
    assert found["param_groups"] == [
        {"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}, {"lr": 0.1,
        "params": ["d"]}, {"lr": 0.3, "params": []},
    ]  # fmt: skip
    assert set(found["state"]) == {"a", "b", "c", "d"}


def test_bare_removes_marks_of_objects_and_ranks() -> None:
    own, alone = OfRanks([1, [2]], 0), OfRanks([(3,)], None)
    tree = {
        "model": ObjectNode("module", {"w": TensorRef("w")}),
        "own": own,
        "alone": alone,
        "n": (1, [None]),
    }
    assert bare(tree) == {
        "model": {"w": TensorRef("w")},
        "own": [1, [2]],
        "alone": (3,),
        "n": (1, [None]),
    }
