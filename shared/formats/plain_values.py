"""Decodes a values document into plain Python values, without torch (FORMAT.md, section
3), and merges the documents of all ranks.

A reader that has no torch, and none of the classes of the program that saved the state,
gets the same containers, numbers and texts. Enums, flags, classes, dtypes and devices
come as their names, and records as dicts of their fields. `Undecoded` takes the place
of a value that only torch can decode.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound
from ckptd.shared.formats import standard
from ckptd.shared.formats.bounds import (
    MAX_DEPTH_READ,
    check_msgpack,
    deeper_than,
    is_flat,
    is_group,
    joined_groups,
)
from ckptd.shared.system.collector import paused_collector


@dataclass(frozen=True, slots=True)
class Undecoded:
    """A value that only torch can decode, that was left out of the save, or that this
    machine cannot make.

    kind: "torch", "not saved" or "not available". data: its bytes, the name of its
    class, or the reason.
    """

    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class _OwnValue:
    """A value of one rank's own."""

    value: Any


class _Tree(dict[Any, Any]):
    """The tree of an object, or the fields of a record.

    `merged` unites it with others of this class alone, and makes a dict of it.
    """


class _Deque(list[Any]):
    """The items of a deque.

    `merged` unites it with others of this class alone, and makes a list of it.
    """


@paused_collector()
def decode_plain(document: bytes, resolve: Callable[[str], Any]) -> Any:
    """Return the content of a values document.

    `resolve` returns what takes the place of a tensor, given its name.

    Raises IntegrityError for an invalid document, NewerFormat for an unknown extension
    type.
    """

    def hook(code: int, data: memoryview) -> Any:
        if code == 1:
            return resolve(str(data, "utf-8"))
        if code in _BY_ITEMS:
            items = msgspec.msgpack.decode(data, ext_hook=hook)
            try:
                return _BY_ITEMS[code](items)
            except NotFound as error:
                return Undecoded("not available", str(error).encode())
        if code in _BY_BYTES:
            return _BY_BYTES[code](bytes(data))
        raise NewerFormat(
            f"a value has the unknown type {code}: it was written by a newer ckptd; upgrade this "
            f"one"
        )

    check_msgpack(document, "values document", frozenset(_BY_ITEMS))
    try:
        found = msgspec.msgpack.decode(document, ext_hook=hook)
    except IntegrityError:
        raise
    except Exception as error:  # the makers raise errors of many types
        raise IntegrityError(f"values document cannot be read: {error}") from None
    if deeper_than(found, MAX_DEPTH_READ):
        raise IntegrityError(f"values document is nested more than {MAX_DEPTH_READ} levels deep")
    return found


def _flag(parts: Any) -> str:
    _, qualname, members, value = parts
    return f"{qualname}.{'|'.join([*members, *([hex(value)] if value or not members else [])])}"


def _hashed(kind: type, items: list[Any]) -> Any:
    """Return a set or a frozenset of the items.

    Return the list of the items if one of them has no hash, such as an array.
    """
    try:
        return kind(items)
    except TypeError:
        return items


def _array(data: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _dict(pairs: Any) -> dict[Any, Any]:
    return {key: value for key, value in pairs}  # noqa: C416 (a list of lists, not of pairs)


def _tree(value: Any) -> Any:
    return _Tree(value) if isinstance(value, dict) else value


_BY_ITEMS: dict[int, Callable[[Any], Any]] = {
    2: tuple,
    3: lambda items: _hashed(set, items),
    4: lambda items: _hashed(frozenset, items),  # a frozenset may be the key of a dict
    5: _dict,
    7: lambda parts: complex(*parts),
    10: lambda parts: f"{parts[1]}.{parts[2]}",
    11: lambda parts: str(parts[1]),
    14: tuple,
    15: _dict,
    16: _dict,
    17: lambda parts: _Deque(parts[0]),
    20: lambda parts: _tree(parts[1]),
    21: _OwnValue,
    22: lambda parts: _tree(parts[1]),
    23: standard.make,
    24: lambda parts: _tree(parts[2]),
    25: lambda parts: _dict(parts[1]),
    27: _flag,
    28: lambda parts: str(parts[1]),
    29: lambda parts: f"{parts[0]}.{parts[1]}",
    30: standard.make_stream,
}
_BY_BYTES: dict[int, Callable[[bytes], Any]] = {
    6: int,
    8: _array,
    9: lambda data: _array(data)[()],
    12: bytes.decode,
    13: bytes.decode,
    18: lambda data: Undecoded("torch", data),
    19: bytearray,
    26: lambda data: Undecoded("not saved", data),
}
"""Extension types: the makers of those whose payload is msgpack, and of those whose
payload is bytes.
"""


def merged(trees: Sequence[Any]) -> Any:
    """Return one tree with the keys of all ranks, given the trees of all ranks in their
    order.

    A value comes from the lowest rank that has it. A value of each rank's own becomes
    the list of the values of all ranks that have one, or the value itself if only one
    rank has. Parameter groups of optimizers are matched by their parameters.
    """
    first = trees[0]
    if isinstance(first, _OwnValue):
        values = [merged([tree.value]) for tree in trees if isinstance(tree, _OwnValue)]
        return values[0] if len(values) == 1 else values
    if isinstance(first, dict):
        dicts = [
            tree
            for tree in trees
            if isinstance(tree, dict) and (type(tree) is _Tree) == (type(first) is _Tree)
        ]
        if len(dicts) == 1 and is_flat(first.values()):
            return dict(first) if type(first) is _Tree else first
        keys = {key: None for tree in dicts for key in tree}
        made = {key: merged([tree[key] for tree in dicts if key in tree]) for key in keys}
        if _is_optimizer(first):
            made["param_groups"] = joined_groups(
                [merged([group]) for group in tree["param_groups"]]
                for tree in dicts
                if _is_optimizer(tree)
            )
        return made
    if type(first) in (list, tuple, _Deque):
        if is_flat(first):
            return list(first) if type(first) is _Deque else first
        alike = [tree for tree in trees if type(tree) is type(first) and len(tree) == len(first)]
        return (tuple if type(first) is tuple else list)(
            merged([tree[number] for tree in alike]) for number in range(len(first))
        )
    return first


def _is_optimizer(tree: dict[Any, Any]) -> bool:
    groups = tree.get("param_groups") if "state" in tree else None
    return isinstance(groups, list) and all(map(is_group, groups))
