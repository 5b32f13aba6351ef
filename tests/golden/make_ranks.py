"""Writes the golden checkpoint of two ranks, with two files a part: `python -m
tests.golden.make_ranks` in the root of the repository.

It never overwrites a file, because files of that version are in use. All its content is
fixed here.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c

from ckptd.shared.codecs import codec
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.part import PartIndex
from ckptd.shared.formats.part_writer import PartWriter, Spread
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
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from tests.golden import make
from tests.support.storage import files_in

PLACE = make.PLACE / "two-ranks"
NONCES = (bytes(range(16)), bytes(range(16, 32)))
REQUEST = SnapshotRequest(metrics={"loss": 0.5}, user_content='{"epoch":3}', created=1767323045.0)
METADATA: dict[str, Described] = {
    "model.weight": {
        "dtype": "float32",
        "size": [4, 3],
        "chunks": [[[0, 0], [2, 3]], [[2, 0], [2, 3]]],
    },
    "model.steps": {"dtype": "int64", "size": [2], "chunks": [[[0], [2]]]},
    "model.last": {"dtype": "int64", "size": [1], "chunks": [[[0], [1]]]},
    "model.mask": {"dtype": "bool", "size": [3], "chunks": [[[0], [3]]]},
}
LOADED: dict[str, Any] = {
    "model": {
        "weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]],
        "steps": [7, -8],
        "last": [-8],
        "mask": [True, False, True],
    },
    "epoch": 3,
    "own": [{"position": 10}, {"position": 11}],
    "first": "a",
    "second": (1, 2),
}
"""The state that a reader returns, with the elements of tensors."""


def _plan(rank: int) -> Plan:
    shard = Item(
        "model.weight",
        "float32",
        (4, 3),
        (2 * rank, 0),
        (2, 3),
        None,
        64 if rank == 0 else 0,
        "cpu",
        True,
    )
    if rank == 0:
        items = [Item("model.steps", "int64", (2,), (0,), (2,), None, 0), shard]
        aliases = [Alias("model.last", "model.steps", 8, "int64", (1,), (1,), False, "cpu")]
        return Plan(
            [Region(0, 16, 8), Region(64, 24, 4)], items, aliases, METADATA, make.WRITER, bytes(32)
        )
    items = [shard, Item("model.mask", "bool", (3,), (0,), (3,), None, 64)]
    return Plan([Region(0, 24, 4), Region(64, 3, 1)], items, [], None, make.WRITER, bytes(32))


def _values(rank: int) -> bytes:
    def tensor(name: str) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(1, name.encode())

    held = ("weight", "steps", "last") if rank == 0 else ("weight", "mask")
    model = msgspec.msgpack.encode(["module", {name: tensor(f"model.{name}") for name in held}])
    state: dict[str, Any] = {
        "model": msgspec.msgpack.Ext(20, model),
        "epoch": 3,
        "own": msgspec.msgpack.Ext(21, msgspec.msgpack.encode({"position": 10 + rank})),
    }
    state |= (
        {"first": "a"}
        if rank == 0
        else {"second": msgspec.msgpack.Ext(2, msgspec.msgpack.encode([1, 2]))}
    )
    return msgspec.msgpack.encode({"state": state, "rng": None})


def _slot(rank: int, values: bytes) -> bytes:
    weight = struct.pack("<6f", *range(6 * rank, 6 * rank + 6))
    first, second = (struct.pack("<2q", 7, -8), weight) if rank == 0 else (weight, b"\1\0\1")
    return first.ljust(64, b"\0") + second.ljust(64, b"\0") + values


def _part(rank: int, place: Path) -> PartEntry:
    plan, document = _plan(rank), _values(rank)
    slot, values = _slot(rank, document), (128, len(document))
    ranges = chunk_ranges(with_values(plan.regions, values), MIN_CHUNK)
    index = PartIndex(
        job=make.JOB, attempt=make.ATTEMPT, step=make.STEP, rank=rank, world_size=2, tag=make.TAG,
        signature=signature(plan.encode()), plan=plan.encode(), request=REQUEST.encode(),
        values=values, chunk_size=MIN_CHUNK, chunks=[],
    )  # fmt: skip
    writer = PartWriter(files_in(place), NONCES[rank], codec.encoder("raw"), Spread(2))
    writer.create(index, ranges, len(index.plan) + len(index.request))
    chunks = []
    for chunk in ranges:
        raw, stored = mmap.mmap(-1, MIN_CHUNK), mmap.mmap(-1, MIN_CHUNK)
        raw[: chunk.length] = slot[chunk.offset : chunk.offset + chunk.length]
        crc = crc32c(slot[chunk.offset : chunk.offset + chunk.length])
        chunks.append(writer.chunk(chunk, memoryview(raw), memoryview(stored), crc))
    return writer.finish(index, chunks, items=len(plan.items))


def files() -> dict[str, bytes]:
    """Return the contents of the files of the checkpoint."""
    with tempfile.TemporaryDirectory() as scratch:
        entries = [_part(rank, Path(scratch)) for rank in range(2)]
        found = {file.name: file.read_bytes() for file in sorted(Path(scratch).iterdir())}
    manifest = Manifest.of(
        _plan(0), REQUEST, entries, job=make.JOB, attempt=make.ATTEMPT, step=make.STEP,
        tag=make.TAG, seq=7, codec="raw"
    )  # fmt: skip
    return {"manifest.json": manifest.encode(), **found}


def main() -> None:
    contents = files()
    make.write(PLACE, contents)
    print(
        *(f"{hashlib.sha256(data).hexdigest()[:16]} {name}" for name, data in contents.items()),
        sep="\n",
    )


if __name__ == "__main__":
    try:
        main()
    except FileExistsError as error:
        sys.exit(str(error))
