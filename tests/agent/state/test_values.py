"""Tests that damaged and hostile values documents are refused, in little memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ckptd.agent.state.values import decode
from ckptd.shared.errors import IntegrityError, NewerFormat
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


@pytest.mark.usefixtures("processes")
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


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x80\x02K\x01.", b"PK\x03\x04" + bytes(100)])
def test_bytes_that_are_not_those_of_torch_save_are_damage_in_one_sentence(data: bytes) -> None:
    document = msgspec.msgpack.encode({"state": msgspec.msgpack.Ext(18, data)})
    with pytest.raises(
        IntegrityError,
        match=r"^values document has a value whose bytes are not those of torch\.save$",
    ):
        decode(document)
