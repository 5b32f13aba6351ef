"""The sound test vectors: checkpoints that a reader must read, and what it must find in
them (FORMAT.md, section 17).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from crc32c import crc32c

from ckptd.shared.formats import sealed_json
from ckptd.shared.formats.binary import PREAMBLE, preamble
from ckptd.shared.formats.metadata_object import MAGIC
from ckptd.shared.names import metadata_file
from tests.vectors.build import (
    ATTEMPT,
    JOB,
    STEP,
    TAG,
    Checkpoint,
    Files,
    Part,
    Tensor,
    ext,
    frame,
    in_planes,
    nonce_of,
    plain_ext,
    shrunk,
    tensor,
    whole,
    zstd,
)

JsonTree = Any
"""A tree as the vectors have it in JSON: see `$` in section 17 of FORMAT.md."""


@dataclass
class Vector:
    """A sound checkpoint. tensors: the bytes of each tensor in C order, with its dtype
    and shape. state: what its trees are merged to.
    """

    about: str
    checkpoint: Checkpoint
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]]
    state: JsonTree
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further members of its entry in `vectors.json`."""

    def entry(self) -> dict[str, Any]:
        """Return its entry in `vectors.json`."""
        found: dict[str, Any] = {
            "about": self.about,
            "expect": "read",
            "step": self.checkpoint.step,
            "tag": self.checkpoint.tag,
            "world_size": len(self.checkpoint.parts),
            "tensors": {
                name: {
                    "dtype": dtype,
                    "shape": list(shape),
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
                for name, (dtype, shape, data) in self.tensors.items()
            },
            "state": self.state,
        }
        if self.blobs:
            found["blobs"] = {
                name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for name, data in self.blobs.items()
            }
        return found | dict(self.more)


def reference(name: str) -> dict[str, str]:
    return {"$tensor": name}


def state_of(names: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return a values document whose state has these tensors by name."""
    return {"state": {name: tensor(name) for name in names} | more, "rng": None}


def counted(count: int, width: int = 1, start: int = 0) -> bytes:
    """Return bytes that count up, `count` elements of `width` bytes."""
    return bytes((start + number) & 0xFF for number in range(count * width))


def expected(tensors: Sequence[Tensor]) -> dict[str, tuple[str, Sequence[int], bytes]]:
    """Return what a reader finds of tensors that are stored whole, in C order."""
    return {
        each.fqn: (each.dtype, each.sizes, each.data)
        for each in tensors
        if not each.fqn.startswith("~")
    }


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# -- one rank


def dtypes() -> Vector:
    """Return a checkpoint of one rank with a tensor of every dtype that has a size of
    its own, and one of an unknown dtype.
    """
    sizes = {
        "bool": 1,
        "int8": 1,
        "uint8": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int16": 2,
        "uint16": 2,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "uint32": 4,
        "float32": 4,
        "int64": 8,
        "uint64": 8,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
    tensors = [
        Tensor(
            f"as.{name}",
            name,
            (2,),
            bytes([1, 0]) if name == "bool" else counted(2, width),
            requires_grad=name == "float32",
        )
        for name, width in sizes.items()
    ]
    return Vector(
        "a tensor of each dtype",
        Checkpoint(
            [Part(tensors, state_of([each.fqn for each in tensors]), metadata=whole(tensors))]
        ),
        expected(tensors),
        {each.fqn: reference(each.fqn) for each in tensors},
    )


def unknown_dtype() -> Vector:
    tensors = [
        Tensor("later", "bcomplex32/4", (3,), counted(3, 4)),
        Tensor("known", "int16", (2,), counted(2, 2)),
    ]
    return Vector(
        "a dtype that no table lists, with the size of its elements in its name: its bytes can be "
        "read, and everything else",
        Checkpoint([Part(tensors, state_of(["later", "known"]), metadata=whole(tensors))]),
        expected(tensors),
        {"later": reference("later"), "known": reference("known")},
        more={"needs": ["dtype bcomplex32"]},
    )


def shapes() -> Vector:
    """Return a checkpoint of one rank with tensors of unusual shapes and strides, and
    with aliases.
    """
    turned = Tensor(
        "turned", "int16", (2, 3), struct.pack("<6h", 0, 10, 1, 11, 2, 12), stride=(1, 2)
    )
    ones = Tensor("ones", "float32", (1, 2, 1), floats(1, 2), stride=(99, 1, 0))
    tensors = [
        Tensor("scalar", "float64", (), struct.pack("<d", 2.5)),
        Tensor("empty", "float32", (0, 3), b""),
        Tensor("empty.inside", "float32", (2, 0, 5), b"", stride=(7, 7, 7)),
        turned,
        ones,
        Tensor("~1", "uint8", (16,), counted(16)),
        Tensor("base", "int32", (2, 2), struct.pack("<4i", 1, 2, 3, 4)),
    ]
    aliases = [
        ["rows", "base", 8, "int32", [1, 2], [2, 1], False, "cpu"],
        ["base.transposed", "base", 0, "int32", [2, 2], [1, 2], False, "cpu"],
        ["seen.as.int32", "~1", 4, "int32", [2], [1], False, "cpu"],
        ["seen.twice", "~1", 3, "uint8", [2, 2], [1, 1], False, "cpu"],
        ["spread", "~1", 0, "uint8", [2, 3], [0, 5], False, "cpu"],
        ["nothing", "~1", 16, "uint8", [0, 4], [4, 1], False, "cpu"],
    ]
    found = expected(tensors) | {
        "turned": ("int16", (2, 3), struct.pack("<6h", 0, 1, 2, 10, 11, 12)),
        "rows": ("int32", (1, 2), struct.pack("<2i", 3, 4)),
        "base.transposed": ("int32", (2, 2), struct.pack("<4i", 1, 3, 2, 4)),
        "seen.as.int32": ("int32", (2,), counted(2, 4, 4)),
        "seen.twice": ("uint8", (2, 2), bytes([3, 4, 4, 5])),
        "spread": ("uint8", (2, 3), bytes([0, 5, 10, 0, 5, 10])),
        "nothing": ("uint8", (0, 4), b""),
    }
    metadata = whole(tensors) | {
        name: {"dtype": dtype, "size": list(size), "chunks": [[[0] * len(size), list(size)]]}
        for name, (dtype, size, _) in found.items()
        if name not in whole(tensors)
    }
    return Vector(
        "a scalar, empty tensors, strides that are dense in another order, and aliases of a named "
        "item and of a hidden one",
        Checkpoint([Part(tensors, state_of(list(found)), aliases=aliases, metadata=metadata)]),
        found,
        {name: reference(name) for name in found},
    )


def later_members() -> Vector:
    """Return a checkpoint with members that no version knows, in every map and at the
    end of every list of fixed members.
    """
    tensors = [Tensor("w", "float32", (2,), floats(1, 2))]

    def plan(found: dict[str, Any]) -> dict[str, Any]:
        found["items"] = [[*item, "later", 1] for item in found["items"]]
        return found | {"later": [1]}

    def index(found: dict[str, Any]) -> dict[str, Any]:
        found["chunks"] = [[*chunk, "later"] for chunk in found["chunks"]]
        return found | {"later": {"a": 1}}

    def members(found: dict[str, Any]) -> dict[str, Any]:
        found["parts"] = [entry | {"later": 1} for entry in found["parts"]]
        return found | {"later": {"a": [1]}}

    part = Part(
        tensors,
        state_of(["w"]) | {"later": [1]},
        metadata=whole(tensors),
        edit_plan=plan,
        edit_index=index,
    )
    return Vector(
        "members that a later version may add: a reader ignores them",
        Checkpoint([part], edit_members=members),
        expected(tensors),
        {"w": reference("w")},
    )


def own_tag() -> Vector:
    """Return a checkpoint without a step, whose directory has a tag of the user's own."""
    tensors = [Tensor("w", "float32", (2,), floats(1, 2))]
    content = {
        "note": 'größer "quoted" \\ \u2028 \U0001f600',
        "deep": [[[[1]]]],
        "big": 123456789012345678901234567890,
    }
    metrics = {"loss": 0.25, "nan": "nan", "most": "inf", "least": "-inf"}
    part = Part(
        tensors,
        state_of(["w"]),
        step=None,
        tag="best.a0002",
        metadata=whole(tensors),
        request={"tag": "best"},
    )
    checkpoint = Checkpoint(
        [part],
        step=None,
        tag="best.a0002",
        members={"metrics": metrics, "user_content": content, "retention": [], "seq": 12},
    )
    return Vector(
        "no step, a tag of the user's own, metrics that JSON has no numbers for, and content "
        "beyond ASCII",
        checkpoint,
        expected(tensors),
        {"w": reference("w")},
        more={
            "metrics": metrics,
            "user_content": content | {"big": {"$integer": str(content["big"])}},
            "retention": [],
        },
    )


def values() -> Vector:
    """Return a checkpoint whose values document has each extension type that a reader
    without torch can show.
    """
    state = {
        "plain": [
            None,
            True,
            False,
            -1,
            0.5,
            "text",
            b"\x00\xff",
            2**53,
            2**64 - 1,
            -(2**63),
            math.nan,
            -math.inf,
            {},
        ],
        "tuple": ext(2, [1, "a", ext(2, [2])]),
        "set": ext(3, [1, 2, 3]),
        "frozenset": ext(4, ["a", "b"]),
        "pairs": ext(5, [[0, "int"], ["0", "text"], [ext(2, [1, 2]), [3]]]),
        "integer": plain_ext(6, "18446744073709551616"),
        "complex": ext(7, [1.5, -0.0]),
        "enum": ext(10, ["http", "HTTPStatus", "NOT_FOUND"]),
        "path": ext(11, ["PurePosixPath", "/data/train"]),
        "dtype": plain_ext(12, "bfloat16"),
        "device": plain_ext(13, "cuda:1"),
        "size": ext(14, [2, 3]),
        "ordered": ext(15, [["b", 1], ["a", 2]]),
        "counter": ext(16, [["x", 3]]),
        "deque": ext(17, [[1, 2], 5]),
        "bytearray": plain_ext(19, b"\x00\xff"),
        "module": ext(20, ["module", {"w": tensor("w")}]),
        "own": ext(21, {"position": 7}),
        "optimizer": ext(
            22, ["optimizer", {"state": {}, "param_groups": []}, "torch.optim.adamw.AdamW"]
        ),
        "date": ext(23, ["date", 2026, 1, 2]),
        "uuid": ext(23, ["UUID", bytes(range(16))]),
        "range": ext(23, ["range", "0", "10", "3"]),
        "record": ext(24, ["namedtuple", "train.Point", {"x": 1, "y": ext(2, [2])}]),
        "default": ext(25, ["int", [["a", 1]]]),
        "left out": plain_ext(26, "builtins.function"),
        "flags": ext(27, ["train", "Mode", ["WRITE"], 8]),
        "layout": ext(28, ["layout", "sparse_coo"]),
        "class": ext(29, ["torch.optim.adamw", "AdamW"]),
    }
    told = {
        "plain": [
            None,
            True,
            False,
            -1,
            0.5,
            "text",
            {"$bytes": "00ff"},
            {"$integer": str(2**53)},
            {"$integer": str(2**64 - 1)},
            {"$integer": str(-(2**63))},
            {"$number": "nan"},
            {"$number": "-inf"},
            {},
        ],
        "tuple": [1, "a", [2]],
        "set": [1, 2, 3],
        "frozenset": ["a", "b"],
        "pairs": {"$pairs": [[0, "int"], ["0", "text"], [[1, 2], [3]]]},
        "integer": {"$integer": "18446744073709551616"},
        "complex": {"$complex": [1.5, -0.0]},
        "enum": "HTTPStatus.NOT_FOUND",
        "path": "/data/train",
        "dtype": "bfloat16",
        "device": "cuda:1",
        "size": [2, 3],
        "ordered": {"b": 1, "a": 2},
        "counter": {"x": 3},
        "deque": [1, 2],
        "bytearray": {"$bytes": "00ff"},
        "module": {"w": reference("w")},
        "own": {"position": 7},
        "optimizer": {"state": {}, "param_groups": []},
        "date": {"$standard": ["date", 2026, 1, 2]},
        "uuid": {"$standard": ["UUID", {"$bytes": bytes(range(16)).hex()}]},
        "range": {"$standard": ["range", "0", "10", "3"]},
        "record": {"x": 1, "y": [2]},
        "default": {"a": 1},
        "left out": {"$undecoded": "not saved"},
        "flags": "Mode.WRITE|0x8",
        "layout": "sparse_coo",
        "class": "torch.optim.adamw.AdamW",
    }
    tensors = [Tensor("w", "float32", (2,), floats(1, 2))]
    document = {"state": state, "rng": None}
    return Vector(
        "each kind of value, as a reader without torch shows it",
        Checkpoint([Part(tensors, document, metadata=whole(tensors))]),
        expected(tensors),
        told,
        more={"needs": ["class train.Mode", "class http.HTTPStatus"]},
    )


def torch_values() -> Vector:
    """Return a checkpoint with a value that torch.save has made.

    The bytes are no archive of torch, because readers here do not look.
    """
    tensors = [Tensor("w", "float32", (2,), floats(1, 2))]
    document = state_of(["w"], other=plain_ext(18, b"PK\x03\x04 bytes of torch.save"))
    return Vector(
        "a value that only torch can decode: everything else is read",
        Checkpoint([Part(tensors, document, metadata=whole(tensors))]),
        expected(tensors),
        {"w": reference("w"), "other": {"$undecoded": "torch"}},
    )


def blobs() -> Vector:
    """Return a checkpoint that a DCP planner has planned: its values are blobs, and the
    tree refers to them.
    """
    tensors = [
        Tensor("model.w", "float32", (2,), floats(1, 2)),
        Tensor("epoch", "bytes", (5,), b"bytes"),
        Tensor("none", "bytes", (0,), b""),
    ]
    metadata = whole(tensors[:1]) | {"epoch": {"dtype": "bytes"}, "none": {"dtype": "bytes"}}
    document = {
        "state": {
            "model": {"w": tensor("model.w")},
            "epoch": tensor("epoch"),
            "none": tensor("none"),
        },
        "rng": None,
        "planner_data": {},
        "save_id": "1",
    }
    return Vector(
        "blobs: items of the dtype `bytes`, one of them without a byte",
        Checkpoint([Part(tensors, document, metadata=metadata)]),
        expected(tensors[:1]),
        {
            "model": {"w": reference("model.w")},
            "epoch": reference("epoch"),
            "none": reference("none"),
        },
        blobs={"epoch": b"bytes", "none": b""},
    )


# -- codecs


def compressible() -> list[Tensor]:
    """Return tensors of each width whose exponents hardly vary, so that planes of them
    shrink. They have chunks of several sizes.
    """
    pairs = b"".join(
        struct.pack("<2d", 1 + number / 1024, -1 - number / 1024) for number in range(64)
    )
    return [
        Tensor("complex", "complex128", (64,), pairs),
        Tensor(
            "doubles",
            "float64",
            (128,),
            b"".join(struct.pack("<d", 1 + number / 4096) for number in range(128)),
        ),
        Tensor(
            "singles",
            "float32",
            (300,),
            b"".join(
                struct.pack("<f", (-1) ** number * (1 + number / 512)) for number in range(300)
            ),
        ),
        Tensor(
            "halves",
            "bfloat16",
            (400,),
            b"".join(struct.pack("<H", 0x3F80 + number % 100) for number in range(400)),
        ),
        Tensor("bytes", "uint8", (70_000,), bytes(70_000)),
    ]


def planes_case() -> Vector:
    tensors = compressible()
    return Vector(
        "codec 2, `planes`, with words of 8 (also for elements of 16 bytes), 4, 2 and 1 bytes, "
        "and planes of both methods",
        Checkpoint(
            [
                Part(
                    tensors,
                    state_of([each.fqn for each in tensors]),
                    metadata=whole(tensors),
                    encode=in_planes(),
                )
            ],
            members={"writer": {"ckptd": "0.2.0", "codec": "planes"}},
        ),
        expected(tensors),
        {each.fqn: reference(each.fqn) for each in tensors},
    )


def zstd_case() -> Vector:
    """Return a checkpoint whose chunks are frames as different libraries make them."""
    tensors = compressible()

    def encode(number: int, data: bytes, width: int) -> tuple[int, bytes]:
        kinds = [
            frame(data),
            frame(data, window=20),
            frame(data, window=10, checksum=True),
            frame(data, window=23, checksum=True),
        ]
        return (1, kinds[number % 4]) if len(data) > 100 else (0, data)

    return Vector(
        "codec 1, `zstd`: a single segment, and windows of 1 MiB, 1 KiB and 8 MiB, with and "
        "without a checksum of the content",
        Checkpoint(
            [
                Part(
                    tensors,
                    state_of([each.fqn for each in tensors]),
                    metadata=whole(tensors),
                    encode=encode,
                )
            ]
        ),
        expected(tensors),
        {each.fqn: reference(each.fqn) for each in tensors},
    )


LIBZSTD = bytes.fromhex("28b52ffd60d0064d00001000000100cbff000b")
"""2,000 zeros as libzstd compresses them: a block with literals and sequences, which
`frame` does not make.
"""


def libzstd() -> Vector:
    tensors = [Tensor("zeros", "float32", (500,), bytes(2000))]
    part = Part(
        tensors,
        state_of(["zeros"]),
        metadata=whole(tensors),
        encode=lambda n, data, w: (1, LIBZSTD) if len(data) == 2000 else (0, data),
    )
    return Vector(
        "a block that libzstd has compressed",
        Checkpoint([part]),
        expected(tensors),
        {"zeros": reference("zeros")},
    )


def small_planes() -> Vector:
    """Return a checkpoint whose planes are frames with windows, as libraries make them
    that do not use single segments.
    """
    tensors = [Tensor("singles", "float32", (300,), compressible()[2].data)]

    def method(number: int, plane: bytes) -> tuple[int, bytes]:
        return shrunk(number, plane) if number == 3 else (1, frame(plane, window=17))

    part = Part(tensors, state_of(["singles"]), metadata=whole(tensors), encode=in_planes(method))
    return Vector(
        "planes in frames whose window of 128 KiB is larger than their content, and that have not "
        "shrunk",
        Checkpoint([part]),
        expected(tensors),
        {"singles": reference("singles")},
    )


# -- several files and ranks


def two_ranks() -> Vector:
    """Return a checkpoint of two ranks, with two files each and with `ranks` in its
    metadata.
    """
    return _of_two_ranks(
        "two ranks with two files each: a tensor divided between them, tensors of one rank, and "
        "values that are merged",
        with_ranks=True,
    )


def without_ranks() -> Vector:
    return _of_two_ranks(
        "the same without `ranks` in its metadata, as the first versions wrote it: the parts say "
        "what they have",
        with_ranks=False,
    )


def _of_two_ranks(about: str, *, with_ranks: bool) -> Vector:
    metadata: dict[str, Any] = {
        "model.weight": {
            "dtype": "float32",
            "size": [4, 3],
            "chunks": [[[0, 0], [2, 3]], [[2, 0], [2, 3]]],
        },
        "model.steps": {"dtype": "int64", "size": [2], "chunks": [[[0], [2]]]},
        "model.last": {"dtype": "int64", "size": [1], "chunks": [[[0], [1]]]},
        "model.mask": {"dtype": "bool", "size": [3], "chunks": [[[0], [3]]]},
    }
    if with_ranks:
        metadata["model.weight"]["ranks"] = [0, 1]
        metadata["model.mask"]["ranks"] = [1]
    rows = [
        Tensor(
            "model.weight", "float32", (2, 3), floats(*range(6 * n, 6 * n + 6)), (4, 3), (2 * n, 0)
        )
        for n in range(2)
    ]
    steps, mask = (
        Tensor("model.steps", "int64", (2,), struct.pack("<2q", 7, -8)),
        Tensor("model.mask", "bool", (3,), b"\1\0\1"),
    )
    group = {"lr": 0.5}

    def tree(rank: int, held: Sequence[str], more: Mapping[str, Any]) -> dict[str, Any]:
        optimizer = {
            "state": {name: {"step": rank} for name in held[:1]},
            "param_groups": [group | {"params": list(held)}],
        }
        return {
            "model": ext(
                20, ["module", {name.removeprefix("model."): tensor(name) for name in held}]
            ),
            "epoch": 3,
            "optim": ext(22, ["optimizer", optimizer, "torch.optim.sgd.SGD"]),
            "own": ext(21, {"position": 10 + rank}),
            **more,
        }

    parts = [
        Part(
            [steps, rows[0]],
            {
                "state": tree(0, ["model.weight", "model.steps", "model.last"], {"first": "a"}),
                "rng": None,
            },
            0,
            2,
            files=2,
            aliases=[["model.last", "model.steps", 8, "int64", [1], [1], False, "cpu"]],
            metadata=metadata,
        ),
        Part(
            [rows[1], mask],
            {
                "state": tree(1, ["model.weight", "model.mask"], {"second": ext(2, [1, 2])}),
                "rng": None,
            },
            1,
            2,
            files=2,
        ),
    ]
    found = {
        "model.weight": ("float32", (4, 3), floats(*range(12))),
        "model.steps": ("int64", (2,), steps.data),
        "model.last": ("int64", (1,), struct.pack("<q", -8)),
        "model.mask": ("bool", (3,), mask.data),
    }
    state = {
        "model": {name: reference(f"model.{name}") for name in ("weight", "steps", "last", "mask")},
        "epoch": 3,
        "optim": {
            "state": {"model.weight": {"step": 0}},
            "param_groups": [
                group | {"params": ["model.weight", "model.steps", "model.last"]},
                group | {"params": ["model.mask"]},
            ],
        },
        "own": [{"position": 10}, {"position": 11}],
        "first": "a",
        "second": [1, 2],
    }
    return Vector(about, Checkpoint(parts, features=["files"]), found, state)


def linked_files() -> Vector:
    """Return a checkpoint that has a data file and a part file of an older checkpoint
    as its data files.
    """
    frozen = Tensor("frozen", "float64", (40,), struct.pack("<40d", *range(40)))
    other = Tensor("frozen.too", "float32", (30,), floats(*range(30)))
    moved, before = (
        Tensor("moved", "int16", (4,), counted(4, 2)),
        Tensor("moved", "int16", (4,), counted(4, 2, 99)),
    )
    names = ["frozen", "frozen.too", "moved"]
    older, _ = Part(
        [frozen, other, before], state_of(names), step=900, tag="step-00000900.a0002", files=2
    ).built()
    part_file, data_file = older.values()
    tensors = [frozen, other, moved]
    # The chunks 0 and 2 of the older part are in its part file, and the chunks 1 and 3
    # in its data file.
    linked = {
        1: ("", part_file, [nonce_of(0, 900), 0, 900], {0: 4096}),
        2: ("", data_file, [nonce_of(0, 900), 1, 900], {1: 4096}),
    }
    part = Part(tensors, state_of(names), metadata=whole(tensors), linked=linked)
    return Vector(
        "two data files of an older part, one of which was its part file there, with chunks that "
        "this part does not use",
        Checkpoint([part], features=["files", "linked-files"]),
        expected(tensors),
        {name: reference(name) for name in names},
    )


# -- rules, and version 2

MESHES: list[list[Any]] = [[[2, 2], 0, [2, 1], []], [[2, 2], 0, [], [0, 1, 3, 2]]]
"""A regular mesh of four ranks, and an irregular one."""


def _ruled() -> tuple[
    list[Part],
    dict[str, Any],
    dict[str, tuple[str, Sequence[int], bytes]],
    dict[str, list[list[Any]]],
]:
    """Return parts of four ranks, their metadata by rule, their tensors, and the place
    and rank of each stored shard.
    """
    metadata: dict[str, Any] = {
        "divided": {"dtype": "float32", "size": [10, 2], "rule": [0, [[1, 0], [0, 0]], 0]},
        "uneven": {"dtype": "int16", "size": [5], "rule": [0, [[0, 0], [1, 0]], 0]},
        "few": {"dtype": "uint8", "size": [3], "rule": [0, [[0, 0], [1, 0]], 0]},
        "replicated": {"dtype": "bfloat16", "size": [8], "rule": [1, [[1, 0]], 1]},
        "scalar": {"dtype": "float32", "size": [], "rule": [0, [], 2]},
        "listed": {
            "dtype": "int64",
            "size": [4],
            "chunks": [[[0], [3]], [[3], [1]]],
            "ranks": [2, 3],
        },
        "whole": {"dtype": "bool", "size": [3], "chunks": [[[0], [3]]]},
        "empty": {"dtype": "float32", "size": [0, 4], "chunks": [[[0, 0], [0, 4]]], "ranks": [1]},
        "blob": {"dtype": "bytes", "ranks": [1]},
    }
    shards: dict[str, list[list[Any]]] = {
        "divided": [
            [[0, 0], [3, 2], 0],
            [[5, 0], [3, 2], 1],
            [[3, 0], [2, 2], 2],
            [[8, 0], [2, 2], 3],
        ],
        "uneven": [[[0], [2], 0], [[2], [1], 1], [[3], [1], 2], [[4], [1], 3]],
        "few": [[[0], [1], 0], [[1], [1], 1], [[2], [1], 2]],
        "replicated": [[[0], [4], 3], [[4], [4], 2]],
        "scalar": [[[], [], 2]],
        "listed": [[[0], [3], 2], [[3], [1], 3]],
        "whole": [[[0], [3], 0]],
        "empty": [[[0, 0], [0, 4], 1]],
    }
    widths = {"float32": 4, "int16": 2, "uint8": 1, "bfloat16": 2, "int64": 8, "bool": 1}
    held: list[list[Tensor]] = [[] for _ in range(4)]
    found: dict[str, tuple[str, Sequence[int], bytes]] = {}
    for name, stored in shards.items():
        dtype, size = metadata[name]["dtype"], tuple(metadata[name]["size"])
        width, row = widths[dtype], math.prod(size[1:])
        data = bytes([1, 0, 1]) if dtype == "bool" else counted(math.prod(size), width)
        found[name] = (dtype, size, data)
        for offsets, sizes, rank in stored:
            first = (offsets[0] * row if offsets else 0) * width
            piece = data[first : first + math.prod(sizes) * width]
            held[rank].append(Tensor(name, dtype, tuple(sizes), piece, size, tuple(offsets)))
    held[1].append(Tensor("blob", "bytes", (4,), b"blob"))
    names = [*shards, "blob"]
    parts = [
        Part(
            held[rank],
            {"state": {name: tensor(name) for name in names} if rank == 0 else {}, "rng": None},
            rank,
            4,
            metadata=metadata if rank == 0 else None,
            meshes=MESHES if rank == 0 else (),
        )
        for rank in range(4)
    ]
    return parts, metadata, found, shards


def rules() -> Vector:
    parts, metadata, found, shards = _ruled()
    return Vector(
        "tensors that are divided by rules among a mesh of four ranks, one of them a scalar, and "
        "one with an empty shard",
        Checkpoint(parts),
        found,
        {name: reference(name) for name in metadata},
        {"blob": b"blob"},
        {"shards": shards},
    )


def metadata_object(
    entries: Sequence[Sequence[Any]],
    meshes: Sequence[Any],
    *,
    split: int = 2,
    edit_block: Any = None,
    edit_index: Any = None,
) -> tuple[str, bytes, dict[str, Any]]:
    """Return the name and the bytes of a metadata object with `split` entries in each
    block, and its entry in the manifest.
    """
    data, blocks = bytearray(preamble(MAGIC)), []
    for at in range(0, len(entries), split):
        held = list(entries[at : at + split])
        packed = msgspec.msgpack.encode(edit_block(held) if edit_block else held)
        stored = frame(packed)
        blocks.append([held[0][0], len(data), len(stored), len(packed), crc32c(stored)])
        data += stored
    index = {"blocks": blocks, "meshes": list(meshes)}
    offset, stored = (
        len(data),
        frame(msgspec.msgpack.encode(edit_index(index) if edit_index else index)),
    )
    data += stored
    assert offset >= PREAMBLE.size
    name = metadata_file(hashlib.sha256(data).hexdigest())
    return (
        name,
        bytes(data),
        {
            "file": name,
            "bytes": len(data),
            "index": offset,
            "index_sha256": hashlib.sha256(stored).hexdigest(),
            "tensors": len(entries),
        },
    )


def second_version(found: dict[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a manifest as version 2 has them."""
    import base64

    parts = found.pop("parts")
    del found["metadata"]
    columns: dict[str, Any] = {
        "nonces": base64.b64encode(
            b"".join(bytes.fromhex(part["file"].split(".")[1]) for part in parts)
        ).decode(),
        "digests": base64.b64encode(
            b"".join(bytes.fromhex(part["index_sha256"]) for part in parts)
        ).decode(),
    }
    columns |= {name: [part[name] for part in parts] for name in ("bytes", "raw_bytes", "items")}
    return found | {
        "version": 2,
        "features": [*found["features"], "metadata-object"],
        "parts": columns,
        "metadata_object": entry,
    }


def format_2(
    edit_members: Any = lambda members: members, **options: Any
) -> tuple[Checkpoint, Any, Any, Any]:
    """Return a checkpoint of version 2, with the metadata, the tensors and the shards
    in it. The options are those of `metadata_object`.
    """
    parts, metadata, found, shards = _ruled()
    entries = [[name, metadata[name]] for name in sorted(metadata, key=str.encode)]
    name, data, entry = metadata_object(entries, MESHES, **options)
    checkpoint = Checkpoint(
        parts,
        edit_members=lambda members: edit_members(second_version(members, entry)),
        edit_files=lambda files: files | {name: data},
    )
    return checkpoint, metadata, found, shards


def of_version_2(about: str, edit_members: Any = lambda members: members) -> Vector:
    """Return the checkpoint of `format_2` as a vector."""
    checkpoint, metadata, found, shards = format_2(edit_members)
    return Vector(
        about,
        checkpoint,
        found,
        {name: reference(name) for name in metadata},
        {"blob": b"blob"},
        {"shards": shards},
    )


def version_2() -> Vector:
    return of_version_2("a manifest of version 2, and a metadata object of five blocks")


# -- clauses that a reader easily overlooks


def npy(descr: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """Return a `.npy` file of version 1.0."""
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head = head.ljust(-(-(len(head) + 11) // 64) * 64 - 11) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + data


def more_values() -> Vector:
    """Return a checkpoint with values whose form in a reader without torch is not
    plain.
    """
    state = {
        "array": plain_ext(8, npy("<f4", (2, 1), floats(1, 2))),
        "scalar": plain_ext(9, npy("<i8", (), struct.pack("<q", -7))),
        "bytes": ext(30, ["BytesIO", b"\x00ab", 1]),
        "text": ext(30, ["StringIO", "line\n", 2, None]),
        "no bits": ext(27, ["train", "Mode", [], 0]),
        "members": ext(27, ["train", "Mode", ["READ", "WRITE"], 0]),
        "rest": ext(27, ["train", "Mode", [], 255]),
        "ordered": ext(15, [[2, "b"], ["a", 1]]),
        "counter": ext(16, [[1, 3]]),
        "default": ext(25, ["other", [[1, 2]]]),
        "own": ext(21, {"list": ext(2, [1])}),
    }
    told = {
        "array": {"$array": ["<f4", [2, 1], floats(1, 2).hex()]},
        "scalar": {"$array": ["<i8", [], struct.pack("<q", -7).hex()]},
        "bytes": {"$bytes": "006162"},
        "text": "line\n",
        "no bits": "Mode.0x0",
        "members": "Mode.READ|WRITE",
        "rest": "Mode.0xff",
        "ordered": {"$pairs": [[2, "b"], ["a", 1]]},
        "counter": {"$pairs": [[1, 3]]},
        "default": {"$pairs": [[1, 2]]},
        "own": {"list": [1]},
    }
    tensors = [Tensor("w", "float32", (2,), floats(1, 2))]
    return Vector(
        "arrays, streams, flags without a name, and maps whose keys are no texts; there is no "
        "`rng`",
        Checkpoint(
            [Part(tensors, {"state": {"w": tensor("w"), **state}}, metadata=whole(tensors))]
        ),
        expected(tensors),
        {"w": reference("w"), **told},
        more={"needs": ["class train.Mode"]},
    )


def merging() -> Vector:
    """Return a checkpoint of two ranks whose trees differ in every way that a merge has
    a rule for.
    """

    def optimizer(*groups: tuple[float, list[str]]) -> dict[str, Any]:
        return {
            "state": {},
            "param_groups": [{"lr": lr, "params": params} for lr, params in groups],
        }

    trees: list[dict[str, Any]] = [
        {
            "dict or list": {"a": 1},
            "list or dict": [[1]],
            "longer": [[1], [2]],
            "same length": [{"a": 1}, 5],
            "tuple or list": ext(2, [[1], [2]]),
            "numbers": [1, 2],
            "ordered": ext(15, [["k", 1], ["j", 2]]),
            "own": ext(21, {"seen": 0}),
            "optim": optimizer((1.0, ["w", "v"]), (2.0, [])),
        },
        {
            "dict or list": [[2]],
            "list or dict": {"b": 2},
            "longer": [[1], [2], [3]],
            "same length": [{"b": 2, "a": 9}, 6],
            "tuple or list": [{"c": 3}, {"c": 3}],
            "numbers": [3, 4, 5],
            "ordered": {"l": 3, "k": 9},
            "own": 7,
            "optim": optimizer((3.0, ["v"]), (2.0, []), (4.0, []), (5.0, ["w", "u"])),
            "second": None,
        },
    ]
    names = ["w0", "w1"]
    tensors = [Tensor(name, "float32", (1,), floats(rank)) for rank, name in enumerate(names)]
    metadata = whole(tensors)
    metadata["w1"]["ranks"] = [1]
    parts = [
        Part(
            [tensors[rank]],
            {"state": tree, "rng": None},
            rank,
            2,
            metadata=metadata if rank == 0 else None,
        )
        for rank, tree in enumerate(trees)
    ]
    return Vector(
        "two ranks whose trees have values of other types and lengths, and groups of parameters "
        "that are repeated, dropped or empty",
        Checkpoint(parts),
        expected(tensors),
        {
            "dict or list": {"a": 1},
            "list or dict": [[1]],
            "longer": [[1], [2]],
            "same length": [{"a": 1, "b": 2}, 5],
            "tuple or list": [[1], [2]],
            "numbers": [1, 2],
            "ordered": {"k": 1, "j": 2, "l": 3},
            "own": {"seen": 0},
            "optim": optimizer((1.0, ["w", "v"]), (2.0, []), (4.0, []), (5.0, ["u"])),
            "second": None,
        },
    )


def replicas_twice() -> Vector:
    """Return a checkpoint of two ranks that both store one tensor, and one shard of
    another.
    """
    shared = Tensor("shared", "int16", (3,), counted(3, 2))
    rows = [
        Tensor("rows", "float32", (1, 2), floats(2 * n, 2 * n + 1), (2, 2), (n, 0))
        for n in range(2)
    ]
    metadata = {
        "shared": {"dtype": "int16", "size": [3], "chunks": [[[0], [3]]]},
        "rows": {
            "dtype": "float32",
            "size": [2, 2],
            "chunks": [[[0, 0], [1, 2]], [[1, 0], [1, 2]]],
            "ranks": [0, 1],
        },
    }
    names = ["shared", "rows"]
    parts = [
        Part([shared, rows[0]], state_of(names), 0, 2, metadata=metadata),
        Part([shared, *rows], state_of(names), 1, 2),
    ]
    return Vector(
        "a tensor and a shard that two parts store: identical shards count once, and one part has "
        "both shards of a tensor",
        Checkpoint(parts),
        {"shared": ("int16", (3,), shared.data), "rows": ("float32", (2, 2), floats(0, 1, 2, 3))},
        {name: reference(name) for name in names},
    )


def at_the_limits() -> Vector:
    """Return a checkpoint that is as large as limits of section 9 allow."""
    name = "n" * 16384
    tensors = [Tensor(name, "float32", (2,), floats(1, 2), device="d" * 64)]
    content: Any = []
    for _ in range(254):
        content = [content]
    deep: Any = []
    for _ in range(98):
        deep = [deep]
    number = "9" * 4300
    return Vector(
        "a name of 16,384 characters, a device of 64, an integer of 4,300 digits, 64 policies, "
        "content of 256 levels and a state of 100",
        Checkpoint(
            [
                Part(
                    tensors,
                    state_of([name], deep=deep, number=plain_ext(6, number)),
                    metadata=whole(tensors),
                )
            ],
            members={
                "user_content": [content, int(number)],
                "retention": ["LatestN(n=1)"] * 64,
                "writer": {f"{n}": "w" * 1024 for n in range(64)},
            },
        ),
        expected(tensors),
        {name: reference(name), "deep": deep, "number": {"$integer": number}},
        more={"user_content": [content, {"$integer": number}], "retention": ["LatestN(n=1)"] * 64},
    )


def values_anywhere() -> Vector:
    tensors = [Tensor("w", "float32", (3,), floats(1, 2, 3))]
    return Vector(
        "the values region begins at no multiple of 64, and right behind the last tensor: a "
        "reader does not mind",
        Checkpoint([Part(tensors, state_of(["w"]), metadata=whole(tensors), values_align=1)]),
        expected(tensors),
        {"w": reference("w")},
    )


def known_dtype_with_size() -> Vector:
    tensors = [Tensor("w", "float32/4", (3,), floats(1, 2, 3))]
    return Vector(
        "a known dtype that is followed by its own size, as no writer writes it: it is the dtype "
        "itself",
        Checkpoint([Part(tensors, state_of(["w"]), metadata=whole(tensors))]),
        expected(tensors),
        {"w": reference("w")},
    )


def zstd_dictionary() -> Vector:
    tensors = [Tensor("zeros", "float32", (500,), bytes(2000))]
    part = Part(tensors, state_of(["zeros"]), metadata=whole(tensors), encode=zstd(dictionary=0))
    return Vector(
        "a zstd frame with the dictionary id 0, which means that there is no dictionary",
        Checkpoint([part]),
        expected(tensors),
        {"zeros": reference("zeros")},
    )


# -- points that an implementation from the page alone had to guess


def one(
    about: str, tensors: Sequence[Tensor], *, more: Mapping[str, Any] | None = None, **options: Any
) -> Vector:
    """Return a checkpoint of one rank with these tensors, and no other values.

    The options are those of `Checkpoint`.
    """
    names = [each.fqn for each in tensors]
    part = Part(tensors, state_of(names), metadata=whole(tensors), **options.pop("part", {}))
    return Vector(
        about,
        Checkpoint([part], **options),
        expected(tensors),
        {name: reference(name) for name in names},
        more=more or {},
    )


PAIR = Tensor("w", "float32", (2,), floats(1, 2))


def own_tag_with_step() -> Vector:
    return one(
        "a tag of the user's own, and a step: the name of the directory does not tell it",
        [PAIR],
        part={"tag": "best.a0002", "request": {"tag": "best"}},
        tag="best.a0002",
    )


def empty_region() -> Vector:
    def plan(found: dict[str, Any]) -> dict[str, Any]:
        return found | {"regions": [*found["regions"], [64, 0, 2]]}

    return one("a region of length 0, which has no chunk", [PAIR], part={"edit_plan": plan})


def loose_texts() -> Vector:
    return one(
        "a job that is no valid name, and a `created` that is no time: a reader does not check "
        "their form",
        [PAIR],
        members={"job": "not a name", "created": "yesterday"},
    )


def later_numbers() -> Vector:
    return one(
        "numbers beyond 2^62, with a fraction and with an exponent, in members that no version "
        "knows",
        [PAIR],
        edit_members=lambda members: (
            members
            | {
                "later": [2**70, -1, 1.5, 1e300],
                "parts": [members["parts"][0] | {"later": -(2**63)}],
            }
        ),
    )


def hidden_items() -> Vector:
    """Return a checkpoint of two ranks whose hidden items have the same name, and other
    bytes.
    """
    aliases = [f"of.{rank}" for rank in range(2)]
    metadata: dict[str, Any] = {
        name: {"dtype": "int16", "size": [2], "chunks": [[[0], [2]]], "ranks": [rank]}
        for rank, name in enumerate(aliases)
    }
    del metadata["of.0"]["ranks"]
    parts = [
        Part(
            [Tensor("~shared", "uint8", (8,), counted(8, start=16 * rank))],
            state_of([name]),
            rank,
            2,
            aliases=[[name, "~shared", 2, "int16", [2], [1], False, "cpu"]],
            metadata=metadata if rank == 0 else None,
        )
        for rank, name in enumerate(aliases)
    ]
    return Vector(
        "two ranks with hidden items of one name and size: each alias has the bytes of its own "
        "part",
        Checkpoint(parts),
        {name: ("int16", (2,), counted(2, 2, 16 * rank + 2)) for rank, name in enumerate(aliases)},
        {name: reference(name) for name in aliases},
    )


def empty_columns() -> Vector:
    return of_version_2(
        "a manifest of version 2 with empty lists, which are as if they were missing",
        lambda members: (
            members
            | {
                "parts": members["parts"] | {"files": [], "linked_bytes": []},
                "deleter_features": [],
            }
        ),
    )


def not_finite() -> Vector:
    """Return a checkpoint with NaN in a parameter, and an infinite buffer."""
    weight = Tensor("model.weight", "float32", (3,), floats(1, float("nan"), float("inf")))
    mask = Tensor("model.mask", "float32", (1,), floats(float("-inf")))
    count = {"values": 2, "tensors": 1, "most": [[0, 2]]}

    def members(found: dict[str, Any]) -> dict[str, Any]:
        parts = [part | {"non_finite": 2} for part in found["parts"]]
        return found | {"parts": parts, "retention": ["Finite(n=1)"]}

    return one(
        "the count of values that are NaN or infinite, in the index and in the manifest; the plan "
        "names the item that counts; the policy Finite",
        [weight, mask],
        part={
            "edit_plan": lambda plan: plan | {"learned": [[0, 1]]},
            "edit_index": lambda index: index | {"non_finite": count},
            "request": {"retention": ["Finite(n=1)"]},
        },
        edit_members=members,
        more={"retention": ["Finite(n=1)"]},
    )


def counted_columns() -> Vector:
    return of_version_2(
        "a manifest of version 2 with the count of each part",
        lambda members: (
            members
            | {"parts": members["parts"] | {"non_finite": [0] * len(members["parts"]["bytes"])}}
        ),
    )


def more_keys() -> Vector:
    state = {
        "bools": ext(5, [[True, "yes"], [False, "no"], [None, 0], [0.5, 1], [b"\x00", 2]]),
        "set": ext(3, [True, False]),
        "array": plain_ext(8, npy("<i2", (2,), counted(2, 2)) + b"behind"),
        "naive": ext(23, ["datetime", 2026, 1, 2, 3, 4, 5, 6, 1]),
        "offset": ext(23, ["datetime", 2026, 1, 2, 3, 4, 5, 6, 0, 0, 3600, 0, "UTC+01:00"]),
        "zone": ext(23, ["datetime", 2026, 1, 2, 3, 4, 5, 6, 0, "Europe/Zurich"]),
        "time": ext(23, ["time", 3, 4, 5, 6, 0, -1, 82800, 0, "west"]),
        "delta": ext(23, ["timedelta", -1, 2, 3]),
        "timezone": ext(23, ["timezone", 0, 3600, 0, "UTC+01:00"]),
        "decimal": ext(23, ["Decimal", "1.50"]),
        "fraction": ext(23, ["Fraction", "-1/3"]),
    }
    told: dict[str, Any] = {
        name: {"$standard": list(msgspec.msgpack.decode(value.data))}
        for name, value in state.items()
        if value.code == 23
    }
    told |= {
        "bools": {
            "$pairs": [[True, "yes"], [False, "no"], [None, 0], [0.5, 1], [{"$bytes": "00"}, 2]]
        },
        "set": [False, True],
        "array": {"$array": ["<i2", [2], counted(2, 2).hex()]},
    }
    return Vector(
        "keys that are bools, null, floats and bytes; bytes behind the elements of an array, "
        "which are ignored; times and their zones",
        Checkpoint(
            [
                Part(
                    [PAIR],
                    {"state": {"w": tensor("w"), **state}, "rng": None},
                    metadata=whole([PAIR]),
                )
            ]
        ),
        expected([PAIR]),
        {"w": reference("w"), **told},
        more={"needs": ["time zone Europe/Zurich"]},
    )


def merging_objects() -> Vector:
    """Return a checkpoint of two ranks that shows which values of two ranks fit each
    other.
    """

    def module(**tree: Any) -> Any:
        return ext(20, ["module", tree])

    def stateful(cls: str, **tree: Any) -> Any:
        return ext(22, ["stateful", tree, cls])

    def record(kind: str, cls: str, **fields: Any) -> Any:
        return ext(24, [kind, cls, fields])

    def deque(*items: Any) -> Any:
        return ext(17, [list(items), None])

    a, b = {"a": 1}, {"b": 2}
    pairs: dict[str, tuple[Any, Any, Any]] = {
        "object and object of another class": (
            stateful("train.A", a=1),
            stateful("train.B", b=2),
            a | b,
        ),
        "code 20 and code 22": (module(a=1), stateful("train.B", b=2), a | b),
        "record and record of another kind": (
            record("dataclass", "train.A", a=1),
            record("namespace", "", b=2),
            a | b,
        ),
        "object and record": (module(a=1), record("dataclass", "train.A", b=2), a | b),
        "object and dict": (module(a=1), b, a),
        "dict and object": (a, module(b=2), a),
        "record and dict": (record("dataclass", "train.A", a=1), b, a),
        "dict and dict of another kind": (ext(15, [["a", 1]]), ext(25, ["int", [["b", 2]]]), a | b),
        "dict and counter": (a, ext(16, [["b", 2]]), a | b),
        "deque and deque": (deque(a), deque(b), [a | b]),
        "deque and list": (deque(a), [b], [a]),
        "list and deque": ([a], deque(b), [a]),
        "list and tuple": ([a], ext(2, [b]), [a]),
        "own and object": (ext(21, a), module(b=2), a),
        "object and own": (module(a=1), ext(21, b), a),
        "number and object": (1, module(b=2), 1),
    }
    trees = [{name: pair[rank] for name, pair in pairs.items()} for rank in range(2)]
    groups = [
        [{"params": [], "x": 1, "y": [1, 2]}],
        [
            {"y": [1, 2], "x": 1.0, "params": []},
            {"params": [], "x": 1, "y": ext(2, [1, 2])},
            {"params": [], "x": math.nan},
        ],
    ]
    for rank, tree in enumerate(trees):
        tree["groups"] = {"state": {}, "param_groups": groups[rank]}
    names = ["w0", "w1"]
    tensors = [Tensor(name, "float32", (1,), floats(rank)) for rank, name in enumerate(names)]
    metadata = whole(tensors)
    metadata["w1"]["ranks"] = [1]
    parts = [
        Part(
            [tensors[rank]],
            {"state": tree, "rng": None},
            rank,
            2,
            metadata=metadata if rank == 0 else None,
        )
        for rank, tree in enumerate(trees)
    ]
    return Vector(
        "two ranks with objects, records, dicts, lists and deques at one place: which of them "
        "fit, and which groups are equal",
        Checkpoint(parts),
        expected(tensors),
        {name: pair[2] for name, pair in pairs.items()}
        | {
            "groups": {
                "state": {},
                "param_groups": [
                    {"params": [], "x": 1, "y": [1, 2]},
                    {"params": [], "x": 1, "y": [1, 2]},
                    {"params": [], "x": {"$number": "nan"}},
                ],
            }
        },
    )


SOUND = {
    "dtypes": dtypes,
    "unknown-dtype": unknown_dtype,
    "shapes": shapes,
    "later-members": later_members,
    "own-tag": own_tag,
    "values": values,
    "torch-values": torch_values,
    "blobs": blobs,
    "planes": planes_case,
    "small-planes": small_planes,
    "zstd": zstd_case,
    "libzstd": libzstd,
    "two-ranks": two_ranks,
    "two-ranks-without-ranks": without_ranks,
    "linked-files": linked_files,
    "rules": rules,
    "version-2": version_2,
    "more-values": more_values,
    "merging": merging,
    "replicas-twice": replicas_twice,
    "at-the-limits": at_the_limits,
    "zstd-dictionary": zstd_dictionary,
    "values-anywhere": values_anywhere,
    "known-dtype-with-size": known_dtype_with_size,
    "own-tag-with-step": own_tag_with_step,
    "empty-region": empty_region,
    "loose-texts": loose_texts,
    "later-numbers": later_numbers,
    "hidden-items": hidden_items,
    "version-2-empty-columns": empty_columns,
    "more-keys": more_keys,
    "not-finite": not_finite,
    "version-2-not-finite": counted_columns,
    "merging-objects": merging_objects,
}


def abandoned() -> Files:
    """Return a directory whose manifest is an abandonment. It holds no checkpoint."""
    members = {
        "format": "ckptd-abandonment",
        "version": 1,
        "job": JOB,
        "attempt": ATTEMPT,
        "step": STEP,
        "tag": TAG,
        "code": "storage",
        "reason": "rank 1 on node2: disk full",
    }
    return {"manifest.json": sealed_json.encode(members)}
