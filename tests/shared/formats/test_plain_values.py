"""Tests values that are decoded without torch: each extension type of the golden
document, and the trees of several ranks.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.agent.state.merge import bare, merge
from ckptd.agent.state.packer import Packer
from ckptd.agent.state.tree import ObjectNode, PerRank
from ckptd.agent.state.values import decode
from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats.plain_values import Undecoded, decode_plain, merged
from tests.golden import make
from tests.support.cases import each_case

Ext = msgspec.msgpack.Ext


def decoded(value: Any) -> Any:
    return decode_plain(msgspec.msgpack.encode(value), lambda name: f"tensor {name}")


def test_the_golden_document() -> None:
    document = (make.PLACE / "values.msgpack").read_bytes()
    found, expected = decode_plain(document, lambda name: f"tensor {name}")["state"], make.values()
    assert list(found) == list(expected)
    plain = {
        "tensor": "tensor "
            "tensor", "object": {"epoch": 3, "seen": (1, 2)}, "ordered": dict(expected["ordered"]),
        "deque": list(expected["deque"]), "counter": dict(expected["counter"]),
        "path": str(expected["path"]), "dtype": "bfloat16", "device": "cuda:1",
    }  # fmt: skip
    assert {key: found[key] for key in plain} == plain
    assert isinstance(found["layout"], Undecoded)  # as torch.save has encoded it
    assert np.array_equal(found["array"], expected["array"])
    assert merged([found])["own"] == {"position": 7}


def test_names_stand_for_classes_and_constants_and_streams_are_streams() -> None:
    found = decode_plain(
        (make.PLACE / "values-with-names.msgpack").read_bytes(), lambda name: name
    )["state"]
    data, text = found.pop("bytes"), found.pop("text")
    assert (data.getvalue(), data.tell(), text.getvalue(), text.tell()) == (b"abc", 2, "a\r\nb", 1)
    assert found == {
        "flag": f"Mode.WRITE|{hex(1 << 70)}", "no "
            "flag": "Mode.0x0", "member": "Mode.BOTH", "layout": "sparse_coo",
        "scheme": "per_channel_affine", "memory "
            "format": "channels_last", "finfo": "bfloat16", "iinfo": "int16",
            "version": "2.13.0+cpu",
        "class": "torch.optim.adamw.AdamW", "type": "builtins.int",
    }  # fmt: skip


def test_a_time_in_a_zone_that_this_machine_lacks_does_not_hide_the_rest() -> None:
    found = decoded(
        {"when": Ext(23, msgspec.msgpack.encode(["ZoneInfo", "Mars/Olympus"])), "epoch": 3}
    )
    assert found["epoch"] == 3
    assert found["when"].kind == "not available"
    assert b"zone 'Mars/Olympus'" in found["when"].data


def test_other_types_of_version_1() -> None:
    state: dict[str, Any] = {
        "set": {1, 2},
        "frozen": frozenset((3,)),
        "default": collections.defaultdict(int, a=1),
        "big": 1 << 80,
        "c": 1 - 0j,
    }
    found = decode_plain(Packer().encode(state), lambda name: name)
    assert found == {"set": {1, 2}, "frozen": {3}, "default": {"a": 1}, "big": 1 << 80, "c": 1 - 0j}
    assert decoded({"x": Ext(26, b"a.Class")}) == {"x": Undecoded("not saved", b"a.Class")}


def test_an_unknown_type_is_newer_and_damage_is_damage() -> None:
    with pytest.raises(NewerFormat, match="unknown type 99"):
        decoded({"x": Ext(99, b"")})
    for wrong in (Ext(7, b"\x01"), Ext(8, b"x"), Ext(6, b"x"), Ext(10, b"\x90")):
        with pytest.raises(IntegrityError, match="values document cannot be read") as caught:
            decoded({"x": wrong})
        assert type(caught.value) is IntegrityError
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    with pytest.raises(IntegrityError, match="nested more than 256 levels deep"):
        decoded(deep)


@pytest.mark.parametrize(
    ("values", "count"), [(((1, 2), (1, 2)), 1), (((1, 2), (1, 3)), 2), (((1, 2), (1, 2, 3)), 2)]
)
def test_groups_without_parameters_may_hold_arrays(
    values: Sequence[Sequence[int]], count: int
) -> None:
    trees = [
        {"state": {}, "param_groups": [{"params": [], "own": [np.array(each)]}]} for each in values
    ]
    assert len(bare(merge(trees))["param_groups"]) == count
    documents = [decode_plain(Packer().encode(tree), lambda name: name) for tree in trees]
    assert len(merged(documents)["param_groups"]) == count


GROUPS = (
    [{"params": ["a", "b"], "lr": 1}, {"params": []}],
    [{"params": ["b", "c"], "lr": 2}],
    [{"params": ["c"], "lr": 3}],
)


@each_case(
    "trees",
    [
        [{"a": 1, "b": {"x": 1}}, {"b": {"y": 2}, "c": 3}],
        [{"own": PerRank(1)}, {"own": PerRank(2)}, {"other": PerRank(3)}],
        [[{"a": 1}, 2], [{"b": 2}, 3]],
        [({"a": 1},), ({"a": 2},)],
        [
            {"optim": {"state": {f"p{rank}": rank}, "param_groups": groups}}
            for rank, groups in enumerate(GROUPS)
        ],
        [{"optim": {"state": {}, "param_groups": [{"params": [], "lr": lr}]}} for lr in (1, 1, 2)],
        [{"a": {"x": 1}}, {"a": 3}],
        [[1, 2], [3]],
    ],
)
def test_trees_of_ranks_are_merged_as_with_torch(trees: list[Any]) -> None:
    documents = [decode_plain(Packer().encode(tree), lambda name: name) for tree in trees]
    assert merged(documents) == bare(merge(trees))


def ext(code: int, value: Any) -> Any:
    return Ext(code, msgspec.msgpack.encode(value))


OBJECT, OTHER = ext(20, ["module", {"x": 1}]), ext(22, ["stateful", {"y": 2}, "train.A"])
RECORD = ext(24, ["dataclass", "train.B", {"z": 3}])


@each_case(
    ("trees", "expected"),
    [
        ([OBJECT, {"y": 2}], {"x": 1}),
        ([{"y": 2}, OBJECT], {"y": 2}),
        ([OBJECT, ext(15, [["y", 2]])], {"x": 1}),
        ([OBJECT, OTHER, RECORD], {"x": 1, "y": 2, "z": 3}),
        ([RECORD, OBJECT], {"z": 3, "x": 1}),
        ([ext(17, [[{"x": 1}], None]), [{"y": 2}]], [{"x": 1}]),
        ([[{"x": 1}], ext(17, [[{"y": 2}], None])], [{"x": 1}]),
        ([ext(17, [[{"x": 1}], None]), ext(17, [[{"y": 2}], 5])], [{"x": 1, "y": 2}]),
        ([{"state": {}, "param_groups": [{"params": ["w"], "own": ext(17, [[1], None])}]}], None),
    ],
)
def test_objects_records_and_deques_merge_with_their_kind_alone(
    trees: list[Any], expected: Any
) -> None:
    documents = [msgspec.msgpack.encode(tree) for tree in trees]
    found = merged([decode_plain(document, str) for document in documents])
    with_torch = bare(merge([decode(document) for document in documents]))
    assert expected is None or found == expected
    assert msgspec.msgpack.encode(found) == msgspec.msgpack.encode(plain_of(with_torch))
    assert type(found) in (dict, list)


def plain_of(tree: Any) -> Any:
    """Return a merged tree as the reader without torch shows it."""
    if isinstance(tree, ObjectNode):
        return plain_of(tree.tree)
    if isinstance(tree, dict):
        return {key: plain_of(value) for key, value in tree.items()}
    return list(map(plain_of, tree)) if isinstance(tree, (list, collections.deque)) else tree
