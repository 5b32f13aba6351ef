"""Tests the selection of parts, names and dtypes on plain trees, without files."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest
import torch

from ckptd.agent.convert.contents import Leaf
from ckptd.agent.convert.selection import Selection, part_of
from ckptd.shared.errors import InvalidRequest, NotFound
from tests.support.cases import each_case


def leaf(name: str, dtype: torch.dtype = torch.float32) -> Leaf:
    return Leaf(name, dtype, dtype, (2,), (1,), 0, name)


STATE: dict[Any, Any] = {
    "model": OrderedDict(
        {
            "wte.weight": leaf("model.wte.weight"),
            "h.0.w": leaf("model.h.0.w"),
            "h.1.w": leaf("model.h.1.w"),
        }
    ),
    "groups": [{"m": leaf("groups.0.m")}],
    "steps": leaf("steps", torch.int64),
    "queue": deque([4, 5]),
    3: "three",
}


@each_case(
    ("path", "expected"),
    [
        ("", STATE),
        ("model", STATE["model"]),
        ("model.wte.weight", STATE["model"]["wte.weight"]),
        ("model.h", {"0.w": STATE["model"]["h.0.w"], "1.w": STATE["model"]["h.1.w"]}),
        ("model.h.1", {"w": STATE["model"]["h.1.w"]}),
        ("groups.0", STATE["groups"][0]),
        ("queue.1", 5),
        ("3", "three"),
    ],
)
def test_parts_by_their_dotted_names(path: str, expected: Any) -> None:
    assert part_of(STATE, path) == expected


@each_case("path", ["x", "model.x", "model.h.1.w.x", "groups.1", "steps.x", "model."])
def test_a_part_that_is_not_there_is_refused(path: str) -> None:
    with pytest.raises(
        NotFound,
        match="^the checkpoint has no '.*'; at its top are model, groups, steps, queue, 3$",
    ):
        part_of(STATE, path)


def test_only_floating_point_tensors_get_the_new_dtype() -> None:
    found = Selection(dtype=torch.float16).of(STATE)
    assert (found["groups"][0]["m"].dtype, found["groups"][0]["m"].saved) == (
        torch.float16,
        torch.float32,
    )
    assert found["steps"].dtype is torch.int64
    assert type(found["model"]) is OrderedDict
    assert STATE["groups"][0]["m"].dtype is torch.float32


def test_names_come_first_and_patterns_in_turn() -> None:
    selection = Selection(
        "model",
        rename=((r"^h\.(\d)", r"layers.\1"), ("layers.0", "first")),
        names={"wte.weight": "h.2.w"},
    )
    assert list(selection.of(STATE)) == ["layers.2.w", "first.w", "layers.1.w"]
    assert list(selection.flat(STATE)[0]) == ["layers.2.w", "first.w", "layers.1.w"]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(
        InvalidRequest,
        match="^two tensors would have the name 'a.b': choose a part with one of them with `only`$",
    ):
        Selection().flat({"a": {"b": leaf("x")}, "a.b": leaf("y")})
    with pytest.raises(
        InvalidRequest,
        match="^h.0.w and h.1.w would both get the name 'w': give each tensor a name of its own$",
    ):
        Selection("model", rename=((r"h\.\d\.", ""),)).of(STATE)
    with pytest.raises(InvalidRequest, match="^'h.0.w' would get an empty name$"):
        Selection("model", rename=((r"^h.*", ""),)).of(STATE)
