"""Limits that keep a small hostile document from taking much memory when it is decoded
(FORMAT.md, section 9).

The number of objects in a document is checked before it is decoded, the depth of its
nesting afterwards. In Python, a list or map takes many times the memory of the single
byte that can stand for it in the file. A number takes little more than its bytes in the
file, so that numbers are not limited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from operator import countOf
from typing import Any

import msgspec

from ckptd.shared.errors import IntegrityError

MAX_OBJECTS = 1 << 23
"""A document of any size may hold this many lists, and as many maps, texts and
extensions together. Decoded, all of these take about 1 GB at most.
"""
BYTES_OF_A_LIST, BYTES_OF_A_JSON_LIST = 2.0, 3.5
"""A large document may hold more lists than MAX_OBJECTS: one for this many of its
bytes, in msgpack and in JSON. It may not hold more maps, texts and extensions.

3,000 tensors on 1,024 ranks make 3 million shards. A shard of a two-dimensional tensor
is 3 lists, in at least 7 bytes of msgpack or 13 bytes of JSON.
"""
MAX_DIMENSIONS = 64
"""The most dimensions of a tensor. Torch's own reductions take as many and no more."""
MAX_DEPTH = 100
"""The most levels of nested lists and maps in a state, or in `user_content`, that is
saved.
"""
MAX_DEPTH_READ = 256
"""The most levels in a document that is read. This is more than MAX_DEPTH, because
earlier versions saved as many levels as the interpreter's stack allowed.
"""

PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})
"""The types of plain values: msgpack has them itself, and they contain no other values."""

_NUMBERS = re.compile(
    rb"(?:[\x00-\x7f\xc0-\xc3\xe0-\xff]++|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}|[\xcc\xd0].|[\xcd\xd1].{2})++",
    re.DOTALL,
)
"""Matches a run of numbers, None, True and False in msgpack. The quantifiers are
possessive, so that a long run takes no memory.
"""
_OBJECTS = bytes([*range(0x80, 0xC0), *range(0xC7, 0xCA), *range(0xD4, 0xE0)])
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""The width of the length field, in bytes, by the first byte of a bin, ext or str.
"""
_LISTS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""The width of the length field, in bytes, by the first byte of a long list or map.
"""
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
"""The length of the payload, in bytes, by the first byte of an ext of fixed length."""


def most_lists(length: int, bytes_of_each: float) -> int:
    """Return how many lists a document of `length` bytes may hold.

    `bytes_of_each` is BYTES_OF_A_LIST or BYTES_OF_A_JSON_LIST.
    """
    return max(MAX_OBJECTS, int(length / bytes_of_each))


def check_msgpack(
    data: bytes | bytearray | memoryview, what: str, nested: Collection[int] = (), *, room: int = 0
) -> None:
    """Raise IntegrityError if a msgpack document holds more lists than `most_lists`, or
    more maps, texts and extensions than MAX_OBJECTS.

    `what` is the name of the document in the error text. `nested` holds the extension
    types whose payload is msgpack again; the objects in such a payload are counted,
    too. `room` lowers both limits, for a document that becomes a part of a larger one.
    A document that is cut short passes, because decoding it fails anyway.
    """
    others_at_most = MAX_OBJECTS - room
    if len(data) <= others_at_most:
        return
    raw, most = bytes(data), most_lists(len(data), BYTES_OF_A_LIST)
    if len(raw) - len(raw.translate(None, _OBJECTS)) > others_at_most:
        lists, others = _count(raw, frozenset(nested), most)
        if lists > most - room or others > others_at_most:
            raise IntegrityError(_too_many(what, most))


def check_json(data: bytes, what: str) -> None:
    """Raise IntegrityError if a JSON document holds more lists than `most_lists`, or
    more maps and texts than MAX_OBJECTS.

    `what` is the name of the document in the error text. Brackets and quotes inside
    texts are counted, too.
    """
    most = most_lists(len(data), BYTES_OF_A_JSON_LIST)
    if len(data) > MAX_OBJECTS and (
        data.count(b"[") > most or data.count(b"{") + data.count(b'"') // 2 > MAX_OBJECTS
    ):
        raise IntegrityError(_too_many(what, most))


Encoded = dict[int, tuple[Collection[Any], bytes]]
"""Long lists of floats, each with its msgpack, by the id of the list. A list that is kept
here stays alive, so that no other object gets its id.
"""


def types_of(values: Collection[Any], encoded: Encoded | None = None) -> set[type]:
    """Return the types of these values.

    Takes little time for a million values, and least if all have the same type.

    encoded: lists that are known to be floats. `values` are added if they are such a list.
    """
    if encoded and id(values) in encoded:
        return {float}
    for first in values:
        if type(first) is float and len(values) >= _MANY and (found := _of_floats(values)):
            if encoded is not None:
                encoded[id(values)] = values, found
            return {float}
        if countOf(map(type, values), type(first)) == len(values):
            return {type(first)}
        break
    return set(map(type, values))


_MANY = 1024
_FLOAT = b"\xcb"


def _of_floats(values: Collection[Any]) -> bytes:
    """Return the msgpack of a list of floats, as a history of losses is, or b"" if the
    values are anything else. Takes less than half of the time that it takes to call `type`
    for each.
    """
    if type(values) is not list:
        return b""
    try:
        encoded = msgspec.msgpack.encode(values)
    except (TypeError, ValueError, OverflowError, RecursionError):  # values of other types
        return b""
    # msgpack has a head of 3 or 5 bytes, and 9 bytes for each float.
    head = len(encoded) - 9 * len(values)
    are_floats = head in (3, 5) and encoded[head::9].count(_FLOAT) == len(values)
    return encoded if are_floats else b""


def is_flat(values: Collection[Any]) -> bool:
    """Return True if all values are of `PLAIN_TYPES`, as in a history of losses."""
    return types_of(values) <= PLAIN_TYPES


def is_group(value: Any) -> bool:
    """Return True if the value has the form of a parameter group: a dict with a list of
    names as `params`.
    """
    names = value.get("params") if isinstance(value, dict) else None
    if not isinstance(names, list):
        return False
    try:
        set(names)
    except TypeError:  # the value comes from a file, and a name may have no hash
        return False
    return True


def joined_groups(optimizers: Iterable[Iterable[dict[Any, Any]]]) -> list[dict[Any, Any]]:
    """Return the parameter groups of the optimizers of all ranks, so that each parameter
    is in one group.

    The group has the settings that the parameter had on the first rank that has it. A
    group without parameters that several ranks have is one group.
    """
    seen: set[Any] = set()
    groups: list[dict[Any, Any]] = []
    for number, of_rank in enumerate(optimizers):
        for group in of_rank:
            fresh = [name for name in group["params"] if name not in seen]
            seen.update(fresh)
            if fresh or (
                not group["params"]
                and (number == 0 or not any(is_same(group, other) for other in groups))
            ):
                groups.append({**group, "params": fresh})
    return groups


def is_same(one: Any, other: Any) -> bool:
    """Return True if two decoded values are equal.

    Arrays of NumPy inside them are compared as a whole.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            is_same(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    try:
        return bool(one == other)
    except ValueError:  # one of them is an array of several elements
        if type(one) is not type(other):
            return False
        found: bool = (one.shape, one.dtype, one.tobytes()) == (
            other.shape,
            other.dtype,
            other.tobytes(),
        )
        return found


def _inside(value: Any) -> Iterable[Any] | None:
    """Return the contents of a container, or None for any other value.

    The contents are left out if all of them are plain values.
    """
    if not isinstance(value, (dict, list, tuple)):
        return None
    contents = value.values() if isinstance(value, dict) else value
    return () if is_flat(contents) else contents


def _too_many(what: str, most: int) -> str:
    return (
        f"{what} has more than {most:,d} lists, or {MAX_OBJECTS:,d} maps and texts, the most that "
        f"ckptd writes or reads"
    )


def _count(data: bytes, nested: frozenset[int], most: int) -> tuple[int, int]:
    """Return the number of lists in a msgpack document, and the number of its maps,
    texts and extensions.

    The count stops as soon as there are more lists than `most`, or more of the others
    than MAX_OBJECTS. Numbers and payloads are skipped and not decoded. The payload of
    an extension type in `nested` is counted as msgpack.
    """
    lists, found, at, end = 0, 0, 0, len(data)
    while at < end and lists <= most and found <= MAX_OBJECTS:
        kind = data[at]
        if 0x90 <= kind < 0xA0 or kind in (0xDC, 0xDD):
            lists += 1
            at += 1 + _LISTS.get(kind, 0)
        elif 0x80 <= kind < 0xC0:
            found += 1
            at += 1 + (kind & 0x1F if kind >= 0xA0 else 0)
        elif kind in _LISTS:
            found += 1
            at += 1 + _LISTS[kind]
        elif kind in _SIZED:
            width = _SIZED[kind]
            length = int.from_bytes(data[at + 1 : at + 1 + width])
            at += 1 + width
            if 0xC7 <= kind <= 0xC9:
                code = data[at] if at < end else 0
                at += 1
                length = 0 if code in nested else length
            found += kind >= 0xC7
            at += length
        elif kind in _FIXED:
            found += 1
            code = data[at + 1] if at + 1 < end else 0
            at += 2 + (0 if code in nested else _FIXED[kind])
        else:
            match = _NUMBERS.match(data, at)
            if match is None:  # the document ends inside a number
                break
            at = match.end()
    return lists, found


def deeper_than(
    value: Any, levels: int, inside: Callable[[Any], Iterable[Any] | None] = _inside
) -> bool:
    """Return True if `value` has more than `levels` levels of containers nested in each
    other.

    `inside` returns the contents of a container, or None for a value that is not a
    container.
    """
    level = [value]
    for _ in range(levels):
        level = [
            child
            for container in map(inside, level)
            if container is not None
            for child in container
        ]
        if not level:
            return False
    return any(inside(one) is not None for one in level)
