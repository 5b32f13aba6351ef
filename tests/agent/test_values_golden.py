"""Tests the golden values document: every extension type of version 1 is read as it was
written, and encoded again.
"""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import msgspec
import numpy as np
import torch

from ckptd.agent.state.tree import ObjectNode, PerRank, TensorRef
from ckptd.agent.state.values import decode
from tests.golden import make

DOCUMENT = (make.PLACE / "values.msgpack").read_bytes()


def _codes(document: bytes) -> dict[int, list[bytes]]:
    """Return payloads by extension code, nested ones included."""
    found: dict[int, list[bytes]] = {}

    def hook(code: int, data: memoryview) -> None:
        found.setdefault(code, []).append(bytes(data))
        if code in (2, 3, 4, 5, 7, 10, 11, 14, 15, 16, 17, 20, 21, 22, 27, 28, 29, 30):
            msgspec.msgpack.decode(bytes(data), ext_hook=hook)

    msgspec.msgpack.decode(document, ext_hook=hook)
    return found


def test_the_golden_document_has_every_extension_type() -> None:
    assert sorted(_codes(DOCUMENT)) == list(range(1, 22))


def test_every_value_comes_back() -> None:
    found = decode(DOCUMENT)
    assert found["rng"] is None
    state, expected = found["state"], make.values()
    assert list(state) == list(expected)
    assert state.pop("tensor") == TensorRef("tensor")
    del expected["tensor"]
    assert state.pop("object") == ObjectNode("stateful", {"epoch": 3, "seen": (1, 2)})
    del expected["object"]
    assert state.pop("own") == expected.pop("own") == PerRank({"position": 7})
    array, its = state.pop("array"), expected.pop("array")
    assert (array.dtype, array.shape, array.tobytes()) == (its.dtype, its.shape, its.tobytes())
    for key, value in expected.items():
        assert type(state[key]) is type(value), key
        assert state[key] == value, key
    assert [type(item) for item in state["map"]] == [int, str, tuple]
    assert state["deque"].maxlen == 5
    assert str(state["complex"]) == "(1.5-0j)"
    assert isinstance(state["scalar"], np.float32)
    assert state["layout"] is torch.strided


def test_objects_may_be_left_out() -> None:
    assert decode(DOCUMENT, objects=False)["state"]["object"] == {"epoch": 3, "seen": (1, 2)}


def test_names_of_tensors_are_resolved() -> None:
    resolved: list[str] = []

    def resolve(name: str) -> Any:
        resolved.append(name)
        return name.upper()

    assert decode(DOCUMENT, resolve)["state"]["tensor"] == "TENSOR"
    assert resolved == ["tensor"]


def test_every_value_is_encoded_to_the_same_bytes() -> None:
    again, golden = _codes(make.values_document()), _codes(DOCUMENT)
    # A layout now has a form of its own, and torch.save is not needed.
    assert len(again.pop(28)) == len(golden.pop(18)) == 1
    assert len(again.pop(22)) == len(golden.pop(20)) == 1  # an object is now written with its class
    assert again == golden
    assert make.values_with_classes() == (make.PLACE / "values-with-classes.msgpack").read_bytes()


def test_an_object_comes_back_with_its_class() -> None:
    document = (make.PLACE / "values-with-classes.msgpack").read_bytes()
    assert decode(document)["state"]["object"] == ObjectNode(
        "stateful", {"epoch": 3}, "tests.golden.make.Stateful"
    )
    assert decode(document, objects=False)["state"]["object"] == {"epoch": 3}


def test_names_of_classes_constants_and_streams_come_back() -> None:
    document = (make.PLACE / "values-with-names.msgpack").read_bytes()
    assert make.values_with_names() == document
    assert sorted(_codes(document)) == [6, 10, 27, 28, 29, 30]
    found, expected = decode(document)["state"], make.named_values()
    assert list(found) == list(expected)
    for key in ("bytes", "text"):
        its, mine = found.pop(key), expected.pop(key)
        assert (type(its), its.__getstate__()[:3]) == (type(mine), mine.__getstate__()[:3])
    for key, value in expected.items():
        assert type(found[key]) is type(value), key
        assert str(found[key]) == str(value), key
        assert found[key] is value or key in ("finfo", "iinfo", "version"), key


def test_records_come_back_as_their_fields_and_what_was_left_out_is_named() -> None:
    document = (make.PLACE / "values-with-records.msgpack").read_bytes()
    assert make.values_with_records() == document
    found = decode(document)["state"]
    assert found.pop("point") == ObjectNode(
        "namedtuple", {"x": 1, "y": 2}, "tests.golden.make.Point"
    )
    assert repr(found.pop("function")) == "<not saved: a builtins.function>"
    assert found["default"].default_factory is int
    assert found == {
        "when": datetime.datetime(
            2026, 1, 2, 3, 4, 5, 6, datetime.timezone(datetime.timedelta(hours=1))
        ),
        "decimal": decimal.Decimal("1.50"),
        "range": range(0, 2**70, 3),
        "default": {"a": 1},
    }
