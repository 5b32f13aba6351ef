"""Tests what goes into a values document: it comes back as it was, or is refused by key."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

from ckptd.agent.state.packer import LenientPacker, Packer
from ckptd.agent.state.tree import TensorRef, per_rank
from ckptd.agent.state.values import decode
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.bounds import MAX_DEPTH
from tests.support.cases import each_case


class Point(NamedTuple):
    x: int


@each_case(
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


def refused(value: Any) -> str:
    """Return the error with which a state is refused."""
    with pytest.raises(UnsavableValue) as caught:
        Packer().encode(value)
    return str(caught.value)


def test_text_that_utf_8_cannot_encode_is_refused() -> None:
    texts = ["", "plain", "é", "\U0001f600"]
    assert decode(Packer().encode(texts)) == texts
    why = "a text or key holds surrogates, which UTF-8 cannot encode"
    for place in ("x\ud800", ["x\ud800"], {"x\ud800": 1}, {"x\ud800": torch.ones(1)}):
        where = "a.b.0" if isinstance(place, list) else "a.b"
        assert refused({"a": {"b": place, "c": 1}}) == f"{where}: {why}: 'x\\ud800'"
    assert refused("\udfff" * 100) == f"the state: {why}: {chr(0xDFFF) * 40!r}"


def test_a_container_that_contains_itself_is_told_from_deep_nesting() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = {"x": deep}
    assert refused(deep) == (
        f"{('x.' * 40)}...: it lies in more than {MAX_DEPTH} containers; nest the state less, or "
        f"save the inner part under a key of its own"
    )
    inner: dict[str, Any] = {"b": {}}
    inner["b"]["c"] = inner
    assert refused({"a": inner}) == (
        "a.b.c: it is the same object as a, which contains itself; save a copy, or leave it out"
    )
    whole: dict[str, Any] = {}
    whole["self"] = whole
    assert refused(whole).startswith(
        "self: it is the same object as the state, which contains itself"
    )


def test_an_integer_is_saved_with_as_many_digits_as_python_writes() -> None:
    longest = 10 ** (sys.get_int_max_str_digits() - 1)
    for number in (-(1 << 63) - 1, 1 << 64, longest, -longest):
        assert decode(Packer().encode(number)) == number
    assert re.fullmatch(
        r"n: an integer of about [\d,]+ digits; expected at most 4,300, as many as Python "
        r"converts to text: save it as bytes \(int\.to_bytes\) or as a tensor",
        refused({"n": longest * 10}),
    )
    assert refused(longest * 10).startswith("the state: ")


def test_a_key_that_python_cannot_write_is_named_by_its_type() -> None:
    assert refused({(10 ** (sys.get_int_max_str_digits() + 1),): 1}).startswith(
        "key tuple.0: an integer of about "
    )
