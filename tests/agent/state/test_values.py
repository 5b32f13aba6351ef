"""Tests the values document: what comes back is what was saved, or it is refused by
key; hostile ones are refused in little memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from ckptd.agent.state.tree import TensorRef, per_rank
from ckptd.agent.state.values import LenientPacker, Packer, decode
from ckptd.shared.errors import IntegrityError, NewerFormat, UnsavableValue
from tests.support.limited import SCALE, outcomes

MANY = (20 << 20) // SCALE


def array(count: int, element: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4) + element * count


def extension(code: int, payload: bytes) -> bytes:
    return b"\xc9" + len(payload).to_bytes(4) + bytes([code]) + payload


def tuples(levels: int) -> bytes:
    return b"\x90" if levels == 0 else b"\x91" + extension(2, tuples(levels - 1))


HEADER = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1125899906842624,), }\n"
HOSTILE = {
    "lists": array(MANY, b"\x90"),
    "lists in a tuple": extension(2, array(MANY, b"\x90")),
    "lists in an object of a rank": extension(
        20, b"\x92\xa6module" + extension(21, array(MANY, b"\x90"))
    ),
    "maps": array((5 << 20) // SCALE, b"\x81\xa1a\x01"),
    "tensors": array((9 << 20) // SCALE, b"\xd4\x01w"),
    "nested lists": b"\x91" * 300 + b"\x90",
    "nested tuples": tuples(300),
    "digits": extension(6, b"9" * 5_000),
    "an array of 2^50 numbers": extension(
        8, b"\x93NUMPY\x01\x00" + len(HEADER).to_bytes(2, "little") + HEADER
    ),
}


def test_hostile_values_are_refused_in_little_memory(tmp_path: Path) -> None:
    found = outcomes("ckptd.agent.state.values", "decode", HOSTILE, tmp_path)
    assert {name: kind for name, (kind, _) in found.items()} == dict.fromkeys(
        HOSTILE, "IntegrityError"
    ), found
    assert [name for name, (_, sentence) in found.items() if "\n" in sentence] == []


def test_a_document_nested_one_level_too_deep_is_refused() -> None:
    assert decode(b"\x91" * 255 + b"\x90")
    with pytest.raises(
        IntegrityError, match="values document is nested more than 256 levels deep"
    ) as caught:
        decode(b"\x91" * 256 + b"\x90")
    assert not isinstance(caught.value, NewerFormat)


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    "key",
    [
        Point(1),
        (1, Point(2)),
        frozenset([Point(1)]),
        torch.ones(2),
        (torch.ones(2), 1),
        torch.nn.Linear(1, 1),
        per_rank(1),
    ],
    ids=lambda key: type(key).__name__,
)
def test_keys_that_would_not_come_back_as_keys_are_refused(key: Any) -> None:
    packer = Packer(
        lambda value, path: ("module", {"w": 1}) if isinstance(value, torch.nn.Module) else None
    )
    with pytest.raises(
        UnsavableValue,
        match=r"^seen\.key .*: a value of type .* cannot be brought back as a (key of a dict|part "
        r"of a set): use a ",
    ):
        packer.pack({"seen": {key: 1}}, "")
    unsaved: dict[str, str] = {}
    found = decode(
        LenientPacker(lambda value, path: None, 0, unsaved).encode(
            {"seen": {Point(1): 1}, "epoch": 3}
        )
    )
    assert (repr(found["seen"]), found["epoch"], list(unsaved)) == (
        "<not saved: a builtins.dict>",
        3,
        ["seen"],
    )


def test_items_of_sets_have_a_hash_when_they_come_back() -> None:
    with pytest.raises(
        UnsavableValue,
        match=r"^seen\.0: a value of type .*Point cannot be brought back as a part of a set",
    ):
        Packer().encode({"seen": {Point(1)}})
    tensors = {torch.ones(2), torch.zeros(2)}
    assert {ref.fqn for ref in decode(Packer().encode({"seen": tensors}))["seen"]} == {
        "seen.0",
        "seen.1",
    }


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            np.bytes_(b"a\x00"),
            r"the NumPy value .* comes back as .* from NumPy's own file format; save a plain "
            r"value of Python",
        ),
        (
            np.str_("a\x00"),
            r"the NumPy value .* comes back as .* from NumPy's own file format; save a plain "
            r"value of Python",
        ),
        (
            np.zeros(2, ml_dtypes.bfloat16),
            "a NumPy value of dtype bfloat16, which NumPy's own file format does not have; save "
            "its bits",
        ),
        (
            ml_dtypes.bfloat16(1),
            "a NumPy value of dtype bfloat16, which NumPy's own file format does not have; save "
            "its bits",
        ),
    ],
    ids=repr,
)
def test_numpy_values_that_a_file_would_change_are_refused_by_key(value: Any, problem: str) -> None:
    with pytest.raises(UnsavableValue, match=rf"^x: {problem}"):
        Packer().encode({"x": value})


def test_lists_with_other_values_among_plain_ones_are_packed_one_by_one() -> None:
    big, text = 2**64, "\ud800"
    state = {
        "big": [1, big, -(2**63) - 1],
        "tensor": [1.5, torch.ones(1), 2.5],
        "numpy": [1.0, np.float64(1.0), 1, np.int64(1)],
        "keys": {big: 1},
    }
    found = decode(Packer().encode(state))
    assert found["tensor"] == [1.5, TensorRef("tensor.1"), 2.5]
    assert (found["big"], found["keys"]) == (state["big"], state["keys"])
    assert list(map(type, found["numpy"])) == [float, np.float64, int, np.int64]
    for where, value in (
        ("a.1", {"a": ["x", text]}),
        ("a", {"a": {text: 1}}),
        ("a.b", {"a": {"b": text}}),
        ("a.1", {"a": ("x", text)}),
    ):
        with pytest.raises(UnsavableValue, match=f"^{where}: a text or key holds surrogates"):
            Packer().encode(value)


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x80\x02K\x01.", b"PK\x03\x04" + bytes(100)])
def test_bytes_that_are_not_those_of_torch_save_are_damage_in_one_sentence(data: bytes) -> None:
    document = msgspec.msgpack.encode({"state": msgspec.msgpack.Ext(18, data)})
    with pytest.raises(
        IntegrityError,
        match=r"^values document has a value whose bytes are not those of torch\.save$",
    ):
        decode(document)
