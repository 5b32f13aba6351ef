"""Writes the golden files of format version 1: `python -m tests.golden.make` in the
root of the repository.

Run it once for each version of a format. It never overwrites a file, because files of
that version are in use. All their content is fixed here, so that a test can compare
every field.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import hashlib
import http
import io
import pathlib
import struct
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from crc32c import crc32c

from ckptd.daemon.journal import file as jf
from ckptd.daemon.journal import records as r
from ckptd.shared.formats.manifest import Manifest, PartEntry, plain_metrics
from ckptd.shared.formats.part import PartIndex
from ckptd.shared.formats.plan import (
    MIN_CHUNK,
    Alias,
    Described,
    Item,
    Plan,
    Region,
    chunk_ranges,
    signature,
    with_values,
)
from ckptd.shared.formats.segment import (
    CHECK_OFFSET,
    Extent,
    SegmentHeader,
    SlotState,
    encode_check,
)
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import part_file
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.frames import encode as encode_frame
from tests.shared.samples import encode_part
from tests.shared.wire.samples import MESSAGES

PLACE = pathlib.Path(__file__).parent / "v1"
NONCE, SALT, BOOT = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
WRITER = {"ckptd": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
JOB, ATTEMPT, STEP, TAG = "gpt", 2, 1000, "step-00001000.a0002"
SEGMENT_FILE = "000102030405060708090a0b0c0d0e0f.seg"
PART_FILE = part_file(0, NONCE)

METADATA: dict[str, Described] = {
    "model.phase": {"dtype": "complex128", "size": [1], "chunks": [[[0], [1]]]},
    "model.weight": {
        "dtype": "float32",
        "size": [4, 3],
        "chunks": [[[0, 0], [2, 3]], [[2, 0], [2, 3]]],
    },
}
PLAN = Plan(
    regions=[
        Region(0, 16, 16),
        Region(64, 16, 8),
        Region(128, 24, 4),
        Region(192, 10, 2),
        Region(256, 11, 1),
    ],
    items=[
        Item("model.phase", "complex128", (1,), (0,), (1,), None, 0),
        Item("optim.state.weight.step", "int64", (2,), (0,), (2,), None, 64),
        Item("model.weight", "float32", (4, 3), (2, 0), (2, 3), (1, 2), 128, "cuda", True),
        Item("model.norm", "bfloat16", (5,), (0,), (5,), None, 192, "cuda", True),
        Item("model.empty", "float16", (0, 3), (0, 0), (0, 3), None, 202),
        Item("~1", "uint8", (8,), (0,), (8,), None, 256),
        Item("model.mask", "bool", (3,), (0,), (3,), None, 264),
    ],
    aliases=[
        Alias("model.head", "~1", 0, "float32", (1,), (1,), True, "cpu"),
        Alias("model.tail", "~1", 2, "int16", (2, 2), (1, 1), False, "cpu"),
    ],
    metadata=METADATA,
    global_plan=hashlib.sha256(msgspec.msgpack.encode(METADATA)).digest(),
    writer=WRITER,
)
"""One item of each element size, a shard with strides of its own, an empty tensor, and
a hidden storage with two views.
"""

REQUEST = SnapshotRequest(
    tag=None,
    persist=True,
    metrics={"loss": 0.25, "scale": float("inf")},
    user_content='{"epoch":3}',
    created=1767323045.5,
)
SMALL_VALUES = msgspec.msgpack.encode(
    {"state": {"weight": msgspec.msgpack.Ext(1, b"model.weight"), "epoch": 3}, "rng": None}
)
VALUES = (320, len(SMALL_VALUES))


def packed_slot() -> bytes:
    """Return the packed slot.

    Tensor bytes count up from 0, the mask is true, false, true, and the values document
    comes last.
    """
    slot, number = bytearray(VALUES[0] + VALUES[1]), 0
    for region in PLAN.regions:
        for at in range(region.offset, region.offset + region.length):
            slot[at] = number & 0xFF
            number += 1
    slot[264:267] = b"\1\0\1"
    slot[VALUES[0] :] = SMALL_VALUES
    return bytes(slot)


CRCS = [
    crc32c(packed_slot()[c.offset : c.offset + c.length])
    for c in chunk_ranges(with_values(PLAN.regions, VALUES), MIN_CHUNK)
]

FILLING = SegmentHeader(
    job=JOB, attempt=ATTEMPT, rank=0, world_size=2, slot=1, capacity=4000, chunk_size=MIN_CHUNK,
    generation=3, state=SlotState.FILLING, step=STEP, boot_id=BOOT,
)  # fmt: skip
SEALED = FILLING.next(
    SlotState.SEALED,
    signature=signature(PLAN.encode()),
    plan=Extent(512, len(PLAN.encode()), crc32c(PLAN.encode())),
    request=Extent(2560, len(REQUEST.encode()), crc32c(REQUEST.encode())),
    values=Extent(*VALUES, crc32c(SMALL_VALUES)),
)


def segment() -> bytes:
    """Return a segment.

    Copy 0 of its header has generation 4, which is sealed and has checksums. Copy 1 has
    generation 3, which was filling.
    """
    data = bytearray(SEALED.file_length)
    data[:4096], data[4096:8192] = SEALED.encode(), FILLING.encode()
    check = encode_check(SEALED.generation, SEALED.chunk_size, CRCS)
    data[CHECK_OFFSET : CHECK_OFFSET + len(check)] = check
    for offset, content in (
        (0, packed_slot()),
        (SEALED.plan.offset, PLAN.encode()),
        (SEALED.request.offset, REQUEST.encode()),
    ):
        data[SEALED.data_offset + offset : SEALED.data_offset + offset + len(content)] = content
    return bytes(data)


def _part() -> tuple[bytes, PartIndex]:
    return encode_part(
        packed_slot(), PLAN, VALUES, codec="raw", job=JOB, attempt=ATTEMPT, step=STEP, rank=0,
        world_size=2, tag=TAG, request=REQUEST, nonce=NONCE,
    )  # fmt: skip


ZSTD_PLAN = Plan(
    regions=[Region(0, 2000, 4)],
    items=[Item("zeros", "float32", (500,), (0,), (500,), None, 0)],
    aliases=[],
    metadata=None,
    writer=WRITER,
)
ZSTD_SLOT = bytes(2048) + b"\x80"


def zstd_part() -> bytes:
    """Return a part with a chunk that zstd shrinks, and one (the values) that it does
    not.
    """
    data, _ = encode_part(
        ZSTD_SLOT,
        ZSTD_PLAN,
        (2048, 1),
        codec="zstd",
        step=None,
        tag="best.a0002",
        request=SnapshotRequest(tag="best"),
    )
    return data


RAW_PART, RAW_INDEX = _part()
MANIFEST = Manifest(
    job=JOB, attempt=ATTEMPT, step=STEP, tag=TAG, seq=7, world_size=2,
    created="2026-01-02T03:04:05+00:00", parts=[
        PartEntry(
            rank=0, file=PART_FILE, bytes=len(RAW_PART), raw_bytes=77 + VALUES[1],
            items=len(PLAN.items), index_sha256=hashlib.sha256(RAW_INDEX.encode()).hexdigest(),
        ),
        PartEntry(rank=1, file=part_file(1, NONCE[::-1]), bytes=20480, raw_bytes=64, items=3,
        index_sha256="5a" * 32),
    ],
    metadata={"state_dict_metadata": METADATA, "planner_data": None},
    metrics=plain_metrics(REQUEST.metrics), user_content={"epoch": 3}, writer={**WRITER,
    "codec": "raw"},
)  # fmt: skip

STATE = r.JournalState(
    jobs={JOB: r.JobState(attempt=1, world_size=2, sealed_step=900, seq=6)},
    staged={"gpt/step-00000900.a0001": {PART_FILE: None}},
    retiring={"gpt/step-00000100.a0001": [PART_FILE]},
)
_PART: dict[str, Any] = {
    "job": JOB,
    "attempt": ATTEMPT,
    "step": STEP,
    "rank": 0,
    "tag": TAG,
    "file": PART_FILE,
}
RECORDS: tuple[r.Record, ...] = (
    r.Begun(job=JOB, attempt=ATTEMPT, world_size=2),
    r.RankSealed(
        job=JOB, attempt=ATTEMPT, step=STEP, rank=0, world_size=2, tag=TAG, segment=SEGMENT_FILE,
        generation=4, persist=True
    ),
    r.Staging(**_PART),
    r.PartDurable(**_PART, bytes=len(RAW_PART), index_sha256=MANIFEST.parts[0].index_sha256),
    r.Committed(job=JOB, attempt=ATTEMPT, step=STEP, tag=TAG, seq=7),
    r.Dropped(job=JOB, attempt=1, step=900, tag="step-00000900.a0001", reason="the daemon ended "
        "before it was committed"),
    r.Retiring(job=JOB, tag="step-00000200.a0001", files=[PART_FILE]),
    r.Retired(job=JOB, tag="step-00000200.a0001"),
)  # fmt: skip
JOURNAL_HEADER = jf.FileHeader(number=1, salt=SALT, previous_crc=0x11223344)


def journal() -> bytes:
    """Return a journal: the state, then one record of every type in two batches.

    The file is not preallocated.
    """
    data, crc = bytearray(JOURNAL_HEADER.encode()), JOURNAL_HEADER.crc
    payloads = [(r.STATE, r.encode_state(STATE)), *map(r.encode, RECORDS)]
    for sequence, (kind, payload) in enumerate(payloads, start=1):
        durable = 0 if sequence == 1 else 1 if sequence <= 5 else 5
        encoded, crc = jf.encode_record(
            SALT, crc, jf.RawRecord(kind, 0, sequence, durable, payload)
        )
        data += encoded
    return bytes(data) + bytes(64)


def tag_of(message: m.Request | m.Reply | m.Notification) -> str:
    tag = type(message).__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def files() -> dict[str, bytes]:
    """Return the content of the files that are the same wherever they are made."""
    return {
        "segment.seg": segment(),
        "part-raw.ckpt": RAW_PART,
        "manifest.json": MANIFEST.encode(),
        "journal.log": journal(),
        "newest": f"{TAG}\n".encode(),
        "plan.msgpack": PLAN.encode(),
        "request.msgpack": REQUEST.encode(),
        **{
            f"frames/{tag_of(message)}.frame": encode_frame(m.encode(message))
            for message in MESSAGES
        },
    }


class Stateful:
    """An object that `expand` below takes for one with a state_dict."""


def values() -> dict[str, Any]:
    """Return a state with every type for which the values document has a code."""
    import numpy as np
    import torch

    from ckptd.agent.state.tree import per_rank

    return {
        "plain": [None, True, -1, 0.5, "text", b"bytes", 2**64 - 1, -(2**63)],
        "tensor": torch.zeros(2),
        "tuple": (1, "a", (2,)),
        "set": {1, 2, 3},
        "frozenset": frozenset(["a", "b"]),
        "map": {0: "int", "0": "text", (1, 2): [3]},
        "big": [2**64, -(2**63) - 1, 10**40],
        "complex": complex(1.5, -0.0),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(0.25),
        "enum": http.HTTPStatus.NOT_FOUND,
        "path": pathlib.PurePosixPath("/data/train"),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter({"x": 3}),
        "deque": collections.deque([1, 2], maxlen=5),
        "layout": torch.strided,
        "bytearray": bytearray(b"\x00\xff"),
        "object": Stateful(),
        "own": per_rank({"position": 7}),
    }


def values_document() -> bytes:
    from ckptd.agent.state.packer import Packer

    packer = Packer(
        lambda value, path: (
            ("stateful", {"epoch": 3, "seen": (1, 2)}) if isinstance(value, Stateful) else None
        )
    )
    return packer.encode_map({"state": packer.pack(values(), ""), "rng": None})


def values_with_classes() -> bytes:
    """Return a values document with the code that came after those of
    `values_document`.
    """
    from ckptd.agent.state.packer import Packer

    packer = Packer(
        lambda value, path: ("stateful", {"epoch": 3}) if isinstance(value, Stateful) else None
    )
    return packer.encode_map({"state": packer.pack({"object": Stateful()}, ""), "rng": None})


LATER_VALUES = (
    "values-with-classes.msgpack",
    "values-with-records.msgpack",
    "values-with-names.msgpack",
)
"""The golden documents of the codes that came after those of `values_document`."""


class Point(NamedTuple):
    x: int
    y: int


def values_with_records() -> bytes:
    """Return a values document with the codes that came after that of
    `values_with_classes`.
    """
    from ckptd.agent.state.packer import LenientPacker

    zone = datetime.timezone(datetime.timedelta(hours=1))
    state = {
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, zone),
        "decimal": decimal.Decimal("1.50"),
        "range": range(0, 2**70, 3),
        "point": Point(1, 2),
        "default": collections.defaultdict(int, {"a": 1}),
        "function": values_with_records,
    }
    packer = LenientPacker(lambda value, path: None, 0, {})
    return packer.encode_map({"state": packer.pack(state, ""), "rng": None})


class Mode(enum.Flag, boundary=enum.KEEP):
    READ = 1
    WRITE = 2
    BOTH = 3


def values_with_names() -> bytes:
    """Return a values document with the codes that came after those of
    `values_with_records`.
    """
    from ckptd.agent.state.packer import Packer

    packer = Packer()
    return packer.encode_map({"state": packer.pack(named_values(), ""), "rng": None})


def named_values() -> dict[str, Any]:
    import torch
    from torch.torch_version import TorchVersion

    bytes_at_2, text_at_1 = io.BytesIO(b"abc"), io.StringIO("a\r\nb", newline="")
    bytes_at_2.seek(2)
    text_at_1.seek(1)
    return {
        "flag": Mode.WRITE | Mode(1 << 70),
        "no flag": Mode(0),
        "member": Mode.BOTH,
        "layout": torch.sparse_coo,
        "memory format": torch.channels_last,
        "scheme": torch.per_channel_affine,
        "finfo": torch.finfo(torch.bfloat16),
        "iinfo": torch.iinfo(torch.int16),
        "version": TorchVersion("2.13.0+cpu"),
        "class": torch.optim.AdamW,
        "type": int,
        "bytes": bytes_at_2,
        "text": text_at_1,
    }


def write(place: pathlib.Path, contents: Mapping[str, bytes]) -> None:
    """Write all files, or none if one of them exists already. Raises FileExistsError."""
    for name in contents:
        if (place / name).exists():
            raise FileExistsError(f"{place / name} is there: golden files are never overwritten")
    for name, data in contents.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        with open(place / name, "xb") as file:
            file.write(data)


def main() -> None:
    write(
        PLACE,
        {
            **files(),
            "part-zstd.ckpt": zstd_part(),
            "values.msgpack": values_document(),
            "values-with-classes.msgpack": values_with_classes(),
            "values-with-records.msgpack": values_with_records(),
            "values-with-names.msgpack": values_with_names(),
        },
    )


def record_offsets(data: bytes) -> list[int]:
    """Return the offsets at which the records of a journal begin."""
    offsets, at = [], jf.HEADER_SIZE
    while at + jf.RECORD_SIZE <= len(data) and data[at + 12]:
        offsets.append(at)
        (length,) = struct.unpack_from("<I", data, at + 4)
        at += -(-(jf.RECORD_SIZE + length) // 8) * 8
    return offsets


if __name__ == "__main__":
    try:
        main()
    except FileExistsError as error:
        sys.exit(str(error))
