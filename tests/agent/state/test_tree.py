"""Tests the functions over decoded trees: what they find in containers of each kind,
and that containers keep their types.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from ckptd.agent.state.tree import (
    ObjectNode,
    PerRank,
    TensorRef,
    filled,
    inside,
    like,
    per_rank,
    tensor_names,
)
from tests.support.cases import each_case

A, B = TensorRef("a"), TensorRef("b")


@each_case(
    ("tree", "names", "whole"),
    [
        (A, ["a"], 1),
        ({"x": A, "y": [B, 5]}, ["a", "b"], {"x": 1, "y": [2, 5]}),
        ((A, {"z": B}), ["a", "b"], (1, {"z": 2})),
        (deque([A, 7], 3), ["a"], deque([1, 7], 3)),
        (OrderedDict(x=A), ["a"], OrderedDict(x=1)),
        (ObjectNode("stateful", {"w": A}), ["a"], {"w": 1}),
        (PerRank([B]), ["b"], [2]),
        ([{"plain": (1, 2)}], [], [{"plain": (1, 2)}]),
        ("text", [], "text"),
    ],
)
def test_tensors_are_found_and_filled_in_every_container(
    tree: Any, names: list[str], whole: Any
) -> None:
    assert tensor_names(tree) == names
    made = filled(tree, {"a": 1, "b": 2}.__getitem__)
    assert made == whole
    assert type(made) is type(whole)
    assert getattr(made, "maxlen", None) == getattr(whole, "maxlen", None)


def test_like_keeps_the_type_and_the_limit() -> None:
    assert like((1, 2), [3]) == (3,)
    assert like([1], [3]) == [3]
    assert like(deque([1], 4), [3]).maxlen == 4


def test_inside_gives_the_contents_of_containers_only() -> None:
    assert list(inside({"a": [1]}) or ()) == [[1]]
    assert list(inside(ObjectNode("module", 5)) or ()) == [5]
    assert list(inside(per_rank(5)) or ()) == [5]
    assert list(inside((1, {2})) or ()) == [1, {2}]
    # No need to look into them.
    assert (inside([1, 2.5, None]), inside({"a": b""}), inside(set())) == ((), (), ())
    assert inside("text") is None
