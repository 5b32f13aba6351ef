"""Seals every kind of nonsense, and lets `verify` and `load` judge what the daemon
accepts.

`python -m tests.crash.nonsense --tries 2000 [--seed N]`. Each try makes a sound slot
for one rank or two, and changes its plan, metadata, values or request at random. What
the daemon acknowledges must become durable, verify and load. What `verify` calls sound
must load, with torch and without it. Every error must be a CkptdError of one line, and
an error that refuses a seal must name what was changed.

Some values can only be judged with torch, such as bytes of `torch.save`. The daemon may
accept them, and then `verify` must find them.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import torch
from crc32c import crc32c

from ckptd.agent import Checkpoint, CkptdError
from ckptd.daemon.commands.report import verification
from ckptd.shared import errors
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.formats.binary import align
from ckptd.shared.formats.plan import align_region, element_size
from ckptd.shared.formats.segment import Extent, SlotState, read_header, write_header
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel
from tests.shared.samples import WRITER
from tests.support.daemons import Home, home, running

Ext = msgspec.msgpack.Ext
CAPACITY = 12 << 20
SECONDS = 60.0
"""Timeout in seconds for an outcome. It measures nothing."""
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex128", "float16", "uint8")
LONG = 9000
"""The length of the names in a case whose manifest is so large that its metadata get an
object of their own.
"""


# -- sound cases


@dataclass
class Part:
    """The share of one rank, as plain values that a mutation may change.

    `plan` and `values` take the place of the encoded documents.
    """

    items: list[list[Any]]
    aliases: list[list[Any]]
    metadata: dict[str, Any] | None
    values: Any
    regions: list[list[int]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    request: Any = None
    raw_plan: bytes | None = None
    raw_values: bytes | None = None
    raw_request: bytes | None = None
    data: bytes = b""
    header: dict[str, Any] = field(default_factory=dict)


@dataclass
class Case:
    """Holds what all ranks of one step seal.

    what: the names of the mutations. named: a refusal must contain one of these words,
    if there are any.
    """

    parts: list[Part]
    what: list[str] = field(default_factory=list)
    named: list[tuple[str, ...]] = field(default_factory=list)
    needs_torch: bool = False


@cache
def _blob() -> bytes:
    buffer = io.BytesIO()
    torch.save({"note": [1, 2.5]}, buffer)
    return buffer.getvalue()


def _plain(chance: Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: None, lambda: chance.random() < 0.5, lambda: chance.randrange(-(1 << 40), 1 << 40),
        lambda: chance.uniform(-1, 1), lambda: "text", lambda: b"bytes",
    ]  # fmt: skip
    if depth < 3:
        kinds += [
            lambda: [_plain(chance, depth + 1) for _ in range(chance.randrange(4))],
            lambda: {f"k{n}": _plain(chance, depth + 1) for n in range(chance.randrange(4))},
            lambda: _extension(chance, depth + 1),
        ]
    return chance.choice(kinds)()


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


@cache
def _array() -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.arange(6, dtype="<f4").reshape(2, 3), allow_pickle=False)
    return buffer.getvalue()


@cache
def _scalar() -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.array(2.5), allow_pickle=False)
    return buffer.getvalue()


def _extension(chance: Random, depth: int) -> Ext:
    """Return a sound value of an extension type."""
    plain = [_plain(chance, depth) for _ in range(2)]
    sound: dict[int, Any] = {
        2: plain, 3: [1, 2, "x"], 4: [1], 5: [[1, plain[0]], [Ext(2, _pack([1, 2])), 3]],
        6: b"-123456789012345678901234567890", 7: [1.5, -2.0], 8: _array(), 9: _scalar(),
        10: ["no.module", "Color", "RED"], 11: ["PurePosixPath", "/tmp/x"], 12: b"float32",
        13: b"cpu", 14: [2, 3], 15: [["a", plain[0]]], 16: [["a", 2]], 17: [plain,
        chance.choice([None, 5])], 18: _blob(), 19: b"raw", 20: ["module", {"w": 1}],
        21: _pack(plain[0]), 22: ["optimizer", {"state": {}, "param_groups": [{"params": ["w"],
        "lr": 0.1}]}, "a.B"], 23: chance.choice([["date", 2026, 1, 2], ["Decimal", "1.5"],
        ["timedelta", 1, 2, 3], ["UUID", bytes(16)], ["range", "0", "5", "1"],
                           ["datetime", 2026, 1, 2, 3, 4, 5, 6, 0, "Europe/Zurich"], ["timezone", 0,
                           3600, 0, "x"]]),
        24: ["dataclass", "a.B", {"x": plain[0]}], 25: ["list", [["a", []]]], 26: b"some.Class",
        27: ["no.module", "Flags", ["A"], 4], 28: ["layout", "strided"], 29: ["no.module", "Class"],
        30: chance.choice([["BytesIO", b"abc", 1], ["StringIO", "abc", 1, None]]),
    }  # fmt: skip
    code = chance.choice(list(sound))
    payload = sound[code]
    return Ext(code, payload if isinstance(payload, bytes) else _pack(payload))


def sound_case(chance: Random, ranks: int, *, large: bool) -> Case:
    """Return a case that must be saved."""
    parts = [Part([], [], None, {"state": {}, "rng": None}) for _ in range(ranks)]
    metadata: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    names = [f"layer{number}.w" for number in range(chance.randrange(1, 6))]
    if large:
        names += [f"{'long' * (LONG // 4)}.{number}" for number in range(130)]
    for name in names:
        dtype, rows, columns = (
            chance.choice(DTYPES),
            chance.randrange(1, 9),
            chance.choice([0, 1, 3]),
        )
        if name.startswith("long"):
            dtype, rows, columns = "uint8", 1, 1
        size = [rows, columns]
        pieces = chance.randrange(1, min(rows, 3) + 1) if columns else 1
        cuts = [0, *sorted(chance.sample(range(1, rows), pieces - 1)), rows]
        chunks, owners = [], []
        for start, end in pairwise(cuts):
            rank = chance.randrange(ranks)
            box = [[start, 0], [end - start, columns]]
            parts[rank].items.append([name, dtype, size, *box, None, 0, "cpu", False])
            chunks.append(box)
            owners.append(rank)
        metadata[name] = {"dtype": dtype, "size": size, "chunks": chunks}
        if any(owners):
            metadata[name]["ranks"] = owners
        if pieces == 1 and columns and chance.random() < 0.3:
            alias = f"{name}.tied"
            parts[owners[0]].aliases.append([alias, name, 0, dtype, [columns], [1], False, "cpu"])
            metadata[alias] = {"dtype": dtype, "size": [columns], "chunks": [[[0], [columns]]]}
            if owners[0]:
                metadata[alias]["ranks"] = owners[:1]
            tree[alias] = Ext(1, alias.encode())
        tree[name] = Ext(1, name.encode())
    if chance.random() < 0.3:
        rank = chance.randrange(ranks)
        parts[rank].items.append(
            ["blob", "bytes", [len(_blob())], [0], [len(_blob())], None, 0, "cpu", False]
        )
        metadata["blob"] = {"dtype": "bytes"} | ({"ranks": [rank]} if rank else {})
        tree["blob"] = Ext(1, b"blob")
    for part in parts:
        part.values["state"] = {
            "model": dict(tree),
            "more": {f"v{n}": _plain(chance) for n in range(3)},
        }
        part.request = msgspec.to_builtins(SnapshotRequest(), builtin_types=(bytes,))
    parts[0].metadata = metadata
    for part in parts:
        lay_out(part)
    return Case(parts)


def lay_out(part: Part) -> None:
    """Lay the items out in regions, and fill in the bytes of the blob."""
    end, data = 0, bytearray()
    part.regions = []
    for width in (16, 8, 4, 2, 1):
        of_width = [item for item in part.items if element_size(item[1]) == width]
        if not of_width:
            continue
        start = end = align_region(end)
        data = data.ljust(end, b"\0")
        for item in of_width:
            item[6] = end
            length = width
            for size in item[4]:
                length *= size
            data += _blob() if item[1] == "bytes" else bytes(length)
            end += length
        part.regions.append([start, end - start, width])
    part.data = bytes(data)


def simple_case(*items: tuple[str, str, list[int]], ranks: int = 1) -> Case:
    """Return a sound case in which rank 0 stores these tensors, given by name, dtype
    and size.

    The values of each rank name all of them.
    """
    metadata = {
        name: {"dtype": dtype, "size": size, "chunks": [[[0] * len(size), size]]}
        for name, dtype, size in items
    }
    tree = {name: Ext(1, name.encode()) for name, _, _ in items}
    rows = [
        [name, dtype, size, [0] * len(size), size, None, 0, "cpu", False]
        for name, dtype, size in items
    ]
    parts = [
        Part(
            [] if rank else rows, [], None if rank else metadata, {"state": dict(tree), "rng": None}
        )
        for rank in range(ranks)
    ]
    for part in parts:
        part.request = msgspec.to_builtins(SnapshotRequest(), builtin_types=(bytes,))
        lay_out(part)
    return Case(parts)


# -- mutations

Mutation = Callable[[Random, Case], tuple[str, ...] | None]
"""Change a case. Return words, or () if there is none to name, or None if the change does
not apply. The refusal must contain one of the words.
"""


def _part(chance: Random, case: Case) -> Part:
    return chance.choice(case.parts)


def _item(chance: Random, case: Case) -> list[Any] | None:
    items = [item for part in case.parts for item in part.items]
    return chance.choice(items) if items else None


def _entry(chance: Random, case: Case) -> tuple[str, dict[str, Any]] | None:
    metadata = case.parts[0].metadata
    if not metadata:
        return None
    name = chance.choice(sorted(metadata))
    if not isinstance(metadata[name], dict):
        return None
    return name, metadata[name]


def _shown(name: str) -> tuple[str, ...]:
    return (name[:100],)


def hole(chance: Random, case: Case) -> tuple[str, ...] | None:
    part = _part(chance, case)
    if not part.items:
        return None
    return _shown(part.items.pop(chance.randrange(len(part.items)))[0])


def item_field(chance: Random, case: Case) -> tuple[str, ...] | None:
    if (item := _item(chance, case)) is None:
        return None
    name = item[0]
    which = chance.randrange(8)
    if which == 0:
        item[0] = chance.choice(["other", "", "~hidden", name + "x"])
        return ()
    if which == 1:
        item[1] = chance.choice([*DTYPES, "bytes", "unknown", "foo/4", ""])
    elif which in (2, 3, 4):
        item[which] = [max(0, n + chance.choice([-1, 0, 1, 2])) for n in item[which]] + (
            [1] if chance.random() < 0.1 else []
        )
    elif which == 5:
        item[5] = [chance.randrange(9) for _ in item[4]]
    elif which == 6:
        item[6] += chance.choice([1, 64, -8, 1 << 40])
    else:
        item[7] = chance.choice(["meta", "cuda", "", "no such"])
    return _shown(name)


def item_twice(chance: Random, case: Case) -> tuple[str, ...] | None:
    if (item := _item(chance, case)) is None:
        return None
    _part(chance, case).items.append(list(item))
    return _shown(item[0])


def regions(chance: Random, case: Case) -> tuple[str, ...]:
    part = _part(chance, case)
    if part.regions and chance.random() < 0.7:
        region = chance.choice(part.regions)
        region[chance.randrange(3)] = chance.choice([0, 1, 3, 64, 100, 1 << 30])
    else:
        part.regions.append(
            [chance.randrange(10) * 64, chance.randrange(100), chance.choice([1, 2, 4])]
        )
    return ()


def no_metadata(chance: Random, case: Case) -> tuple[str, ...]:
    case.parts[0].metadata = chance.choice([None, {}])
    return ("metadata", *(item[0][:100] for part in case.parts for item in part.items))


def metadata_elsewhere(chance: Random, case: Case) -> tuple[str, ...] | None:
    if len(case.parts) < 2:
        return None
    case.parts[1].metadata = case.parts[0].metadata
    return ("metadata",)


def entry_gone(chance: Random, case: Case) -> tuple[str, ...] | None:
    if (found := _entry(chance, case)) is None:
        return None
    del case.parts[0].metadata[found[0]]  # type: ignore[union-attr]
    return _shown(found[0])


def entry_new(chance: Random, case: Case) -> tuple[str, ...] | None:
    if case.parts[0].metadata is None:
        return None
    size = [chance.randrange(4)]
    case.parts[0].metadata["nobody"] = chance.choice([
        {"dtype": "float32", "size": size, "chunks": [[[0], size]]}, {"dtype": "bytes"}, {},
        {"dtype": "float32"}, {"dtype": "float32", "size": size, "chunks": []}, {"size": size},
        {"dtype": "float32", "size": [4], "rule": [0, [[0, 0]], 0]}, {"dtype": "bytes",
        "ranks": []}, {"dtype": "float32", "size": size, "chunks": [[[0], size]], "ranks": []},
    ])  # fmt: skip
    return ("nobody",)


def entry_field(chance: Random, case: Case) -> tuple[str, ...] | None:
    if (found := _entry(chance, case)) is None:
        return None
    name, entry = found
    which = chance.choice(["dtype", "size", "chunks", "ranks", "rule", "gone"])
    if which == "dtype":
        entry["dtype"] = chance.choice([*DTYPES, "bytes", "unknown", ""])
    elif which == "size":
        entry["size"] = chance.choice([[], [3], [9, 9], [1, 1, 1], [1 << 61, 4]])
    elif which == "chunks":
        entry["chunks"] = chance.choice(
            [
                [],
                [[[0, 0], [1, 1]]],
                [[[0], [1]]],
                [[[0, 0], [1, 1]], [[0, 0], [1, 1]]],
                [[[1 << 40, 0], [1, 1]]],
            ]
        )
    elif which == "ranks":
        entry["ranks"] = chance.choice([[], [5], [1], [0, 0, 0, 0], [1, 0], [1 << 31]])
    elif which == "rule":
        entry["rule"] = chance.choice([[0, [], 0], [0, [[0, 0]], 0], [3, [[9, 9]], 7]])
        case.parts[0].more["meshes"] = chance.choice(
            [[], [[[1], 0, [1], []]], [[[2], 0, [1], []]], [[[2], 5, [0], []]]]
        )
    else:
        entry.pop(chance.choice(sorted(entry)), None)
    return (*_shown(name), "mesh")


def meshes(chance: Random, case: Case) -> tuple[str, ...]:
    case.parts[0].more["meshes"] = [
        chance.choice(
            [[[2, 2], 0, [2, 1], []], [[1], 7, [1], []], [[2], 0, [0], []], [[2], 0, [], [0, 0]]]
        )
    ]
    return ("mesh",)


def aliases(chance: Random, case: Case) -> tuple[str, ...]:
    part = _part(chance, case)
    base = chance.choice([item[0] for item in part.items] or ["layer0.w"])
    alias = [
        "odd",
        base,
        chance.choice([0, 1, 4, 1 << 30]),
        chance.choice([*DTYPES, "bytes", "?"]),
        [chance.randrange(3)],
        [1],
        False,
        "cpu",
    ]
    part.aliases.append(alias)
    return ("odd",)


def same_alias(chance: Random, case: Case) -> tuple[str, ...] | None:
    """List a tensor of one rank as an alias, or an alias twice."""
    found = [alias for part in case.parts for alias in part.aliases]
    if not found:
        return None
    alias = list(chance.choice(found))
    _part(chance, case).aliases.append(alias)
    return _shown(alias[0])


def global_plan(chance: Random, case: Case) -> tuple[str, ...]:
    _part(chance, case).more["global_plan"] = chance.choice([b"", bytes(64), bytes(65), b"other"])
    return ()


def plan_member(chance: Random, case: Case) -> tuple[str, ...]:
    which = chance.choice(
        ["version", "writer", "items", "regions", "aliases", "metadata", "meshes", "global_plan"]
    )
    _part(chance, case).more[which] = chance.choice(
        [None, 0, 1, 2, -1, "x", [], {}, {"a": 1}, [[]], b"y", 1 << 63]
    )
    return ()


def plan_bytes(chance: Random, case: Case) -> tuple[str, ...]:
    part = _part(chance, case)
    encoded = bytearray(plan_bytes_of(part))
    if chance.random() < 0.3:
        part.raw_plan = chance.choice(
            [b"", b"\xc1", chance.randbytes(40), bytes(encoded[: chance.randrange(len(encoded))])]
        )
    else:
        for _ in range(chance.randrange(1, 4)):
            encoded[chance.randrange(len(encoded))] = chance.randrange(256)
        part.raw_plan = bytes(encoded)
    return ()


def values_bytes(chance: Random, case: Case) -> tuple[str, ...]:
    """The bytes may be those of a value that only torch can judge."""
    part = _part(chance, case)
    encoded = bytearray(_pack(part.values))
    case.needs_torch = True
    if chance.random() < 0.4:
        case.needs_torch = False
        part.raw_values = chance.choice(
            [
                b"",
                b"\xc1",
                b"\xc0",
                chance.randbytes(60),
                bytes(encoded[: chance.randrange(len(encoded))]),
            ]
        )
    else:
        for _ in range(chance.randrange(1, 4)):
            encoded[chance.randrange(len(encoded))] = chance.randrange(256)
        part.raw_values = bytes(encoded)
    return ()


def values_top(chance: Random, case: Case) -> tuple[str, ...]:
    part = _part(chance, case)
    part.values = chance.choice([
        None, [], {}, 1, "state", {"state": None}, {"rng": None}, {"state": [1, 2]}, {"state": {},
        "rng": 3}, {"State": {}}, {"state": Ext(5, _pack([[1, 2]]))}, Ext(2, _pack([1])), {1: 2},
        {"state": Ext(21, _pack(1))}, {"state": 7, "versions": 7}, {"state": Ext(15, _pack([["a",
        1]])), "versions": {"": 3}}, {"state": {"a": Ext(15, _pack([]))},
        "versions": {"a": {"": 1}}}, {"state": {}, "versions": {"x": None}}, {"state": {},
        "parameters": 4}, {"state": {}, "planner_data": 9, "save_id": []}, {"state": {},
        "versions": {1: {}}},
    ])  # fmt: skip
    return ()


def unknown_tensor(chance: Random, case: Case) -> tuple[str, ...]:
    name = chance.choice(["nobody", "layer0", "layer0.w.", "~hidden", ""])
    _put(chance, case, Ext(1, name.encode()))
    return ("nobody", "layer0", "hidden", "''", "tensor")


def odd_reference(chance: Random, case: Case) -> tuple[str, ...]:
    _put(
        chance,
        case,
        Ext(1, chance.choice([b"\xff\xfe", b"", b"\xed\xa0\x80", chance.randbytes(5)])),
    )
    return ()


def nonsense_value(chance: Random, case: Case) -> tuple[str, ...]:
    """A value of an extension type whose payload is random."""
    code = chance.choice([*range(1, 31), *range(1, 31), 0, 31, 99, -1, 127])
    payload = chance.choice([_pack(_any(chance)), chance.randbytes(chance.randrange(12)), b""])
    case.needs_torch |= code in (18, 24)
    _put(chance, case, Ext(code, payload))
    return ()


def nearly_sound_value(chance: Random, case: Case) -> tuple[str, ...]:
    """A sound value of an extension type in which one byte or one part is wrong."""
    value = _extension(chance, 2)
    payload = bytearray(value.data)
    if chance.random() < 0.5 and payload:
        payload[chance.randrange(len(payload))] = chance.randrange(256)
    else:
        try:
            parts = msgspec.msgpack.decode(payload)
            if isinstance(parts, list) and parts and chance.random() < 0.7:
                parts[chance.randrange(len(parts))] = _any(chance)
            else:
                parts = [*parts, _any(chance)] if isinstance(parts, list) else _any(chance)
            payload = bytearray(_pack(parts))
        except (msgspec.DecodeError, UnicodeDecodeError):
            payload = payload[: chance.randrange(len(payload) + 1)]
    case.needs_torch |= value.code in (18, 24)
    # A value inside of torch's own.
    case.needs_torch |= bytes([18]) in bytes(payload) and value.code in (
        2,
        5,
        15,
        17,
        20,
        21,
        22,
        25,
    )
    _put(chance, case, Ext(value.code, bytes(payload)))
    return ()


def garbage_for_torch(chance: Random, case: Case) -> tuple[str, ...]:
    case.needs_torch = True
    _put(chance, case, Ext(18, chance.choice([b"", b"garbage", _blob()[:100], b"\x80\x02K\x01."])))
    return ()


def garbage_blob(chance: Random, case: Case) -> tuple[str, ...] | None:
    if "blob" not in (case.parts[0].metadata or {}):
        return None
    case.needs_torch = True
    for part in case.parts:
        part.data = part.data.replace(_blob(), bytes(len(_blob())))
    return ()


def odd_key(chance: Random, case: Case) -> tuple[str, ...]:
    key = chance.choice(
        [
            [1],
            {"a": 1},
            Ext(3, _pack([1])),
            Ext(8, _array()),
            Ext(20, _pack(["module", {}])),
            Ext(1, b"layer0.w"),
            1.5,
            None,
        ]
    )
    code = chance.choice([5, 15, 16, 25, 3, 4])
    parts: Any = [key] if code in (3, 4) else [[key, 1]]
    _put(chance, case, Ext(code, _pack(["list", parts] if code == 25 else parts)))
    return ()


def odd_optimizer(chance: Random, case: Case) -> tuple[str, ...]:
    groups = chance.choice([
        [{"params": [[1]]}], [{"params": [Ext(3, _pack([1]))]}], [{"params": [{}]}],
        [{"params": 3}], [{}], [1], 7, [], [{"params": [None, 1.5]}],
    ])  # fmt: skip
    tree: Any = {"state": chance.choice([{}, 3, None, {"w": 1}]), "param_groups": groups}
    _put(
        chance,
        case,
        chance.choice(
            [tree, Ext(22, _pack(["optimizer", tree, "a.B"])), Ext(20, _pack(["optimizer", tree]))]
        ),
    )
    return ()


def deep(chance: Random, case: Case) -> tuple[str, ...]:
    depth, inner = chance.choice([50, 120, 250, 255, 256, 260, 400, 900, 2000]), b"\x01"
    how = chance.randrange(4)
    for _ in range(depth):
        if how == 0 or len(inner) > 60_000:
            inner = b"\x91" + inner
        elif how == 1:
            inner = b"\x81\xa1a" + inner
        else:
            inner = _pack(Ext(2 if how == 2 else 21, b"\x91" + inner if how == 2 else inner))
    _put(chance, case, msgspec.Raw(inner))
    return ()


def odd_versions(chance: Random, case: Case) -> tuple[str, ...] | None:
    part = _part(chance, case)
    if not isinstance(part.values, dict):
        return None
    part.values["versions"] = chance.choice([
        7, [], {"model": 7}, {"model": {"": 7}}, {"model": {"": {"version": 1}}},
        {"model.layer0": {}}, {7: {}}, {"": []}, {"more": None},
    ])  # fmt: skip
    if isinstance(part.values.get("state"), dict):
        part.values["state"]["model"] = Ext(
            20, _pack(["module", part.values["state"].get("model", {})])
        )
    return ()


def ranks_differ(chance: Random, case: Case) -> tuple[str, ...] | None:
    """The ranks have trees of different forms under the same keys."""
    if len(case.parts) < 2:
        return None
    for part in case.parts:
        if isinstance(part.values, dict) and isinstance(part.values.get("state"), dict):
            part.values["state"]["odd"] = _plain(chance)
        elif isinstance(part.values, dict):
            part.values["state"] = _plain(chance)
    return ()


def request(chance: Random, case: Case) -> tuple[str, ...]:
    part = _part(chance, case)
    if chance.random() < 0.3:
        part.raw_request = chance.choice([b"", b"\xc1", chance.randbytes(20)])
        return ()
    which, value = chance.choice([
        ("tag", "../x"), ("tag", "step-1"), ("tag", "x" * 300), ("metrics", {"a": float("nan")}),
        ("metrics", {"a": "b"}), ("metrics", 7), ("user_content", "{"), ("user_content",
        "[" * 400 + "]" * 400), ("user_content", "\ud800"), ("created", -1.0), ("created", 1e300),
        ("created", float("nan")), ("retention", ["?"]), ("retention", 7), ("persist", "yes"),
        ("node", 7), ("replicas", [[b"", b"", 0, b""]]), ("retention", ["LatestN(n=0)"]),
        ("metrics", {"x" * 70_000: 1.0}), ("user_content", '"\\ud800"'),
    ])  # fmt: skip
    part.request[which] = value
    return ()


def header(chance: Random, case: Case) -> tuple[str, ...]:
    part = _part(chance, case)
    which = chance.choice(["values", "plan", "request"])
    part.header[which] = chance.choice(["crc", "offset", "length", "zero"])
    return ()


def _any(chance: Random) -> Any:
    return chance.choice(
        [
            None,
            True,
            0,
            -1,
            1 << 63,
            1.5,
            float("nan"),
            "",
            "x",
            b"",
            b"\xff",
            [],
            [1],
            [[1]],
            [[1, 2]],
            {},
            {"a": 1},
            ["a", "b"],
        ]
    )


def _put(chance: Random, case: Case, value: Any) -> None:
    """Put a value into the state of one rank, or of all ranks."""
    parts = case.parts if chance.random() < 0.7 else [_part(chance, case)]
    where = chance.randrange(3)
    for part in parts:
        if not isinstance(part.values, dict) or not isinstance(part.values.get("state"), dict):
            part.values = {"state": {}, "rng": None}
        if where == 0:
            part.values["state"]["odd"] = value
        elif where == 1:
            part.values["state"]["list"] = [1, {"odd": value}]
        else:
            part.values["rng" if chance.random() < 0.2 else "state"] = {"odd": value}


MUTATIONS: dict[str, Mutation] = {
    function.__name__: function
    for function in (
        hole, item_field, item_twice, regions, no_metadata, metadata_elsewhere, entry_gone,
        entry_new, entry_field, meshes, aliases, same_alias, global_plan, plan_member, plan_bytes,
        values_bytes, values_top, unknown_tensor, odd_reference, nonsense_value, nearly_sound_value,
        garbage_for_torch, garbage_blob, odd_key, odd_optimizer, deep, odd_versions, ranks_differ,
        request, header,
    )
}  # fmt: skip


def case_of(chance: Random) -> Case:
    """Return a case with up to two mutations, most often with one."""
    case = sound_case(chance, 2 if chance.random() < 0.3 else 1, large=chance.random() < 0.25)
    for _ in range(chance.choice([0, 1, 1, 1, 1, 1, 1, 2])):
        name = chance.choice(list(MUTATIONS))
        if (named := MUTATIONS[name](chance, case)) is not None:
            case.what.append(name)
            case.named.append(named)
    return case


# -- the client


def plan_bytes_of(part: Part) -> bytes:
    """Return the plan document of a part as it is sealed."""
    if part.raw_plan is not None:
        return part.raw_plan
    plan = {
        "regions": part.regions, "items": part.items, "aliases": part.aliases,
        "metadata": part.metadata, "writer": WRITER, "global_plan": bytes(32), "version": 1,
        **part.more,
    }  # fmt: skip
    return _pack(plan)


class Client:
    """Plays one rank of a job, with one slot.

    `seal` fills the slot and reports the seal.
    """

    def __init__(self, place: Home, job: str, rank: int, world_size: int, attempt: int = 0) -> None:
        self.channel = Channel(place.socket, SECONDS, later=SECONDS)
        began = self._ask(
            m.Begin(
                id=self.channel.new_id(), job=job, rank=rank, world_size=world_size, attempt=attempt
            )
        )
        assert isinstance(began, m.Began), began
        self.attempt = began.attempt
        segments = self._ask(m.Allocate(id=self.channel.new_id(), capacity=CAPACITY, count=2))
        assert isinstance(segments, m.Segments), segments
        self._files: dict[str, Descriptor] = {}
        for held in segments.segments:
            self._files[held.segment], lock = self.channel.take(2)
            lock.close()
        self.news: dict[int, m.Progress] = {}

    def _ask(self, request: m.Request) -> Any:
        self.channel.send(request)
        return self._answer(request.id)

    def _answer(self, number: int) -> Any:
        while True:
            for message in self._receive():
                if getattr(message, "re", None) == number:
                    return message

    def _receive(self) -> list[m.Message]:
        """Return the messages that have arrived. Keep the progress of each step."""
        messages = self.channel.receive()
        for message in messages:
            if isinstance(message, m.Progress):
                self.news[message.step] = message
        return messages

    def acquire(self, step: int) -> m.Granted:
        granted = self._ask(m.Acquire(id=self.channel.new_id(), step=step, wait=30.0))
        assert isinstance(granted, m.Granted), granted
        return granted

    def seal(self, step: int, segment: str, part: Part) -> int:
        """Write a slot and report its seal. Return the number of the request."""
        fd = self._files[segment].fileno()
        head = read_header(fd)
        plan = plan_bytes_of(part)
        values, asked = values_bytes_of(part), request_bytes_of(part)
        at = align_region(
            max(
                len(part.data),
                max(
                    (sum(region[:2]) for region in part.regions if sum(region[:2]) < 1 << 20),
                    default=0,
                ),
            )
        )
        extents = {}
        os.pwrite(fd, part.data, head.data_offset)
        for name, document in (("values", values), ("plan", plan), ("request", asked)):
            os.pwrite(fd, document, head.data_offset + at)
            offset, length, crc = at, len(document), crc32c(document)
            how = part.header.get(name)
            crc ^= how == "crc"
            offset = 0 if how == "offset" else offset
            length = 0 if how == "zero" else max(0, length - 3) if how == "length" else length
            extents[name] = Extent(offset, length, crc)
            at = align(at + len(document))
        sealed = head.next(SlotState.SEALED, step=step, signature=_sha256(plan), **extents)
        write_header(fd, sealed)
        number = self.channel.new_id()
        self.channel.send(m.Seal(id=number, segment=segment, attempt=self.attempt, step=step))
        return number

    def outcome(self, number: int) -> Any:
        return self._answer(number)

    def wait(self, step: int) -> m.Progress:
        while step not in self.news:
            self._receive()
        return self.news[step]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self.channel.close()


def _sha256(data: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(data).digest()


def values_bytes_of(part: Part) -> bytes:
    """Return the values document of a part as it is sealed."""
    return part.raw_values if part.raw_values is not None else _pack(part.values)


def request_bytes_of(part: Part) -> bytes:
    """Return the request document of a part as it is sealed."""
    if part.raw_request is not None:
        return part.raw_request
    try:
        return _pack(part.request)
    except (UnicodeEncodeError, ValueError):
        return b"\x81\xacuser_content\xa3\xed\xa0\x80"


class Nonsense:
    """A daemon's root with two jobs, one of one rank and one of two.

    `problems`: what was wrong, by its kind, with its first try.
    """

    def __init__(self, place: Home) -> None:
        self.place = place
        self.counts = Counter[str]()
        self.problems: dict[str, str] = {}
        self._step = 0
        self._jobs: dict[int, list[Client]] = {}

    def close(self) -> None:
        for clients in self._jobs.values():
            for client in clients:
                client.close()
        self._jobs.clear()

    def _clients(self, world_size: int) -> list[Client]:
        if world_size not in self._jobs:
            first = Client(self.place, f"job{world_size}", 0, world_size)
            others = [
                Client(self.place, f"job{world_size}", rank, world_size, first.attempt)
                for rank in range(1, world_size)
            ]
            self._jobs[world_size] = [first, *others]
        return self._jobs[world_size]

    def attempt(self, case: Case, label: str) -> None:
        """Seal a case and judge the outcome."""
        self._step += 1
        what = "+".join(case.what) or "sound"

        def problem(kind: str, text: object = "") -> None:
            self.problems.setdefault(f"{what}: {kind}", f"{label}: {text}"[:600])

        clients = self._clients(len(case.parts))
        step = self._step
        try:
            granted = [client.acquire(step) for client in clients]
            numbers = [
                client.seal(step, each.segment, part)
                for client, each, part in zip(clients, granted, case.parts, strict=True)
            ]
            answers = [
                client.outcome(number) for client, number in zip(clients, numbers, strict=True)
            ]
        except (CkptdError, AssertionError) as error:
            problem("the daemon does not answer", f"{error!r} {self.place.log_text()[-2000:]}")
            self.close()
            return
        refusals = [answer for answer in answers if isinstance(answer, m.Error)]
        if refusals:
            self.counts[" refused"] += 1
            text = "; ".join(answer.message for answer in refusals)
            if "\n" in text or any(answer.code == "internal" for answer in refusals):
                problem("refused with an internal error or more than a sentence", text)
            if not case.what:
                problem("refused", text)
            if (
                len(case.what) == 1
                and case.named[0]
                and not any(word in text for word in case.named[0])
            ):
                problem("refused without naming it", f"{text}; expected one of {case.named[0][:3]}")
            return
        self.counts[" sealed"] += 1
        progress = clients[0].wait(step)
        tag = f"step-{step:08}.a{clients[0].attempt:04}"
        directory = self.place.root / f"job{len(clients)}" / tag
        try:
            if progress.state != "durable":
                problem("sealed, and then not durable", progress.reason)
                return
            self._judge(directory, case, problem)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _judge(self, directory: Any, case: Case, problem: Callable[..., None]) -> None:
        unchecked: list[str] = []
        verified = _called(
            lambda: _with_torch(directory, lambda checkpoint: checkpoint.verify(unchecked))
        )
        loaded = _called(lambda: _with_torch(directory, Checkpoint.load))
        plain_verified, plain_loaded = (
            _called(lambda: _without(directory, "verify")),
            _called(lambda: _without(directory, "load")),
        )
        (row,) = verification(directory)
        for name, error in (
            ("verify", verified),
            ("load", loaded),
            ("array verify", plain_verified),
            ("array load", plain_loaded),
        ):
            if error is not None and not isinstance(error, CkptdError):
                problem(f"{name} raises {type(error).__name__}", error)
        if verified is None and loaded is not None and not unchecked:
            problem("verify calls it sound, and load fails", repr(loaded))
        if verified is not None and loaded is None:
            problem("verify fails, and load succeeds", repr(verified))
        if plain_verified is None and plain_loaded is not None:
            problem("verify without torch calls it sound, and load fails", repr(plain_loaded))
        if isinstance(verified, errors.NewerFormat) or case.needs_torch:
            return
        if (verified is not None or loaded is not None) and not unchecked:
            problem("sealed, and cannot be loaded", repr(verified or loaded))
        if not row["ok"]:
            problem("sealed, and `ckptd verify` calls it damaged", row["error"])
        if plain_loaded is not None:
            problem("sealed, and cannot be loaded without torch", repr(plain_loaded))


def _called(function: Callable[[], Any]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _with_torch(directory: Any, how: Callable[[Checkpoint], Any]) -> None:
    with Checkpoint.open(directory) as checkpoint:
        how(checkpoint)


def _without(directory: Any, how: str) -> None:
    with ArrayCheckpoint.open(directory) as checkpoint:
        getattr(checkpoint, how)()


@contextmanager
def nonsense() -> Iterator[Nonsense]:
    """Context manager. Run a daemon, and yield the clients that seal nonsense."""
    with ExitStack() as stack:
        place = stack.enter_context(home())
        stack.enter_context(running(place, "--keep-last", "0", "--codec", "raw", "--threads", "1"))
        made = Nonsense(place)
        stack.callback(made.close)
        yield made


def run(count: int, seed: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how many cases were tried, by their mutations, and what went wrong."""
    end = time.monotonic() + seconds
    with nonsense() as made:
        for number in range(count):
            if time.monotonic() > end:
                break
            case = case_of(Random(f"{seed}/{number}"))
            made.attempt(case, f"try {number + 1} of seed {seed}")
            made.counts["+".join(case.what) or "sound"] += 1
        return made.counts, [f"{kind}: {text}" for kind, text in made.problems.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    tried, problems = run(options.tries, options.seed)
    alone = {name: count for name, count in tried.items() if "+" not in name}
    print(*(f"{name:24} {count}" for name, count in sorted(alone.items())), *problems, sep="\n")
    print(
        f"{sum(n for name, n in tried.items() if not name.startswith(' '))} tries, seed "
        f"{options.seed}, {len(problems)} problems"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
