"""Limits that keep a small hostile document from costing much memory (FORMAT.md, section 9). They are checked before a document is decoded.

A list or map costs Python many times the byte that says it in the file. Numbers cost little more than their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ckptd.shared.errors import IntegrityError

MAX_OBJECTS = 1 << 23
"""Lists, maps, texts and extensions that any document may hold: at most about 1 GB once they are decoded."""
BYTES_OF_A_LIST, BYTES_OF_A_JSON_LIST = 2.0, 3.5
"""A larger document may hold one list for so many of its bytes, and no more of the others. 3,000 tensors on 1,024 ranks make
3 million shards, each of which is 3 lists in 7 bytes or more, as JSON in 13."""
MAX_DEPTH = 100
"""Levels of lists and maps in what is saved."""
MAX_DEPTH_READ = 256
"""Levels in what is read: more than that, since earlier versions saved whatever the interpreter's stack allowed."""

_NUMBERS = re.compile(
    rb"(?:[\x00-\x7f\xc0-\xc3\xe0-\xff]++|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}|[\xcc\xd0].|[\xcd\xd1].{2})++",
    re.DOTALL,
)
"""Numbers, None, True and False, as many as there are in a row. Possessive, so that it takes no memory for each."""
_OBJECTS = bytes([*range(0x80, 0xC0), *range(0xC7, 0xCA), *range(0xD4, 0xE0)])
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length of a bin, ext or str."""
_LISTS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the length of a list or map."""
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
"""Bytes in an ext of fixed length."""


def most_lists(length: int, bytes_of_each: float) -> int:
    """Return how many lists a document of `length` bytes may hold."""
    return max(MAX_OBJECTS, int(length / bytes_of_each))


def check_msgpack(data: bytes | bytearray | memoryview, what: str, nested: Collection[int] = ()) -> None:
    """Raise IntegrityError if a msgpack document holds more than `most_lists`, or than MAX_OBJECTS of the others.

    `nested` are the extension types whose payload is msgpack again. A document that is cut short passes, since decoding it fails.
    """
    if len(data) <= MAX_OBJECTS:
        return
    raw, most = bytes(data), most_lists(len(data), BYTES_OF_A_LIST)
    if len(raw) - len(raw.translate(None, _OBJECTS)) > MAX_OBJECTS:
        lists, others = _count(raw, frozenset(nested), most)
        if lists > most or others > MAX_OBJECTS:
            raise IntegrityError(_too_many(what, most))


def check_json(data: bytes, what: str) -> None:
    """Raise IntegrityError if a JSON document holds more than `most_lists`, or than MAX_OBJECTS of the others.

    Brackets and quotes inside of texts count too.
    """
    most = most_lists(len(data), BYTES_OF_A_JSON_LIST)
    if len(data) > MAX_OBJECTS and (data.count(b"[") > most or data.count(b"{") + data.count(b'"') // 2 > MAX_OBJECTS):
        raise IntegrityError(_too_many(what, most))


def _inside(value: Any) -> Iterable[Any] | None:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else None


def _too_many(what: str, most: int) -> str:
    return f"{what} has more than {most:,d} lists, or {MAX_OBJECTS:,d} maps and texts, the most that ckptd writes or reads"


def _count(data: bytes, nested: frozenset[int], most: int) -> tuple[int, int]:
    """Count the lists of a msgpack document up to a few more than `most`, and its maps, texts and extensions up to MAX_OBJECTS.

    Steps over numbers and payloads without building them.
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
            if match is None:  # cut short
                break
            at = match.end()
    return lists, found


def deeper_than(value: Any, levels: int, inside: Callable[[Any], Iterable[Any] | None] = _inside) -> bool:
    """Return True if containers are nested in each other more than `levels` deep.

    `inside` returns the contents of a container, and None for any other value.
    """
    level = [value]
    for _ in range(levels):
        level = [child for container in map(inside, level) if container is not None for child in container]
        if not level:
            return False
    return any(inside(one) is not None for one in level)
