"""Each refusal names the key, and says what to save instead."""

from __future__ import annotations

import sys

import pytest

from ckptd.agent.state.refusals import check_text, digits, said, too_deep
from ckptd.shared.bounds import MAX_DEPTH
from ckptd.shared.errors import UnsavableValue


def test_text_that_utf_8_cannot_encode_is_refused() -> None:
    for text in ("", "plain", "é", "\U0001f600"):
        check_text(text, "a.b")
    with pytest.raises(UnsavableValue, match=r"^a\.b: a text or key holds surrogates, which UTF-8 cannot encode: 'x\\ud800'$"):
        check_text("x\ud800", "a.b")
    with pytest.raises(UnsavableValue, match="^the state: a text or key holds surrogates"):
        check_text("\udfff" * 100, "")


def test_a_container_that_contains_itself_is_told_from_deep_nesting() -> None:
    deep = [(number, "x" * number) for number in range(MAX_DEPTH)]
    assert str(too_deep(deep, "x" * 200)) == (
        f"{'x' * 80}...: it lies in more than {MAX_DEPTH} containers; nest the state less, or save the inner part under a key of its own"
    )
    assert str(too_deep([(1, "a"), (2, "a.b"), (1, "a.b.c")], "")) == (
        "a.b.c: it is the same object as a, which contains itself; save a copy, or leave it out"
    )
    assert str(too_deep([(1, ""), (1, "self")], "")).startswith("self: it is the same object as the state, which contains itself")


def test_an_integer_is_saved_with_as_many_digits_as_python_writes() -> None:
    most = sys.get_int_max_str_digits()
    assert digits(-(10**5), "n") == b"-100000"
    assert len(digits(10 ** (most - 1), "n")) == most
    with pytest.raises(
        UnsavableValue, match=r"^n: an integer of about [\d,]+ digits; expected at most 4,300, as many as Python converts to text"
    ):
        digits(10**most, "n")
    with pytest.raises(UnsavableValue, match="^the state: "):
        digits(10**most, "")


def test_a_value_that_python_cannot_write_is_named_by_its_type() -> None:
    assert (said(str, [1]), said(repr, "x"), said(str, [10 ** (sys.get_int_max_str_digits() + 1)])) == ("[1]", "'x'", "list")
