"""Refuses plain values that cannot be saved, with an error that names the key and says what to save instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ckptd.shared.bounds import MAX_DEPTH
from ckptd.shared.errors import UnsavableValue


def check_text(text: str, path: str) -> None:
    """Raise UnsavableValue if a text holds surrogates, which UTF-8 cannot encode."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsavableValue(f"{path or 'the state'}: a text or key holds surrogates, which UTF-8 cannot encode: {text[:40]!r}") from None


def too_deep(above: Sequence[tuple[int, str]], path: str) -> UnsavableValue:
    """Return the error for a value that lies in MAX_DEPTH containers. The cause is either deep nesting or a container that contains itself.

    `above` has the id and the path of each of these containers, outermost first.
    """
    first: dict[int, str] = {}
    for number, where in above:
        if number in first:
            whole = first[number] or "the state"
            return UnsavableValue(f"{where}: it is the same object as {whole}, which contains itself; save a copy, or leave it out")
        first[number] = where
    return UnsavableValue(
        f"{path[:80]}...: it lies in more than {MAX_DEPTH} containers; nest the state less, or save the inner part under a key of its own"
    )


def digits(value: int, path: str) -> bytes:
    """Return an integer as decimal text. Raises UnsavableValue if the integer has more digits than Python converts to and from text."""
    try:
        return str(value).encode()
    except ValueError:
        raise UnsavableValue(
            f"{path or 'the state'}: an integer of about {value.bit_length() * 3 // 10:,d} digits; expected at most "
            f"{sys.get_int_max_str_digits():,d}, as many as Python converts to text: save it as bytes (int.to_bytes) or as a tensor"
        ) from None


def said(how: Callable[[Any], str], value: Any) -> str:
    """Return `how(value)`, where `how` is str or repr.

    Return the name of the value's type instead if the value holds an integer that is too long for Python to write. `digits` refuses that
    integer when it is packed.
    """
    try:
        return how(value)
    except ValueError:
        return type(value).__name__
