"""Checkpoints written by hand.

All their digests are right, so only their content is wrong.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from ckptd.shared.formats.binary import ALIGN, align
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.part import encode_end, encode_header
from ckptd.shared.formats.plan import ITEM_SIZES, Described, Item, Plan, Region
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import part_file, tag_directory
from tests.shared.samples import NONCE, WRITER, encode_part, values_after

Shards = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Offsets and sizes of the shards that one rank stores."""


def forge(
    root: Path,
    size: tuple[int, ...],
    ranks: list[Shards],
    *,
    step: int = 1,
    attempt: int = 1,
    name: str = "w",
    plan_version: int = 1,
    extension: int = 1,
    codec: int = 0,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """Write the checkpoint `root/gpt/step-...` and return its directory.

    It holds a float32 tensor of ones, of this size and in these shards.

    `dtype` is another name for the dtype of its elements of four bytes. `plan_version`,
    `extension` (the type that stands for the tensor among the values) and `codec` can
    be those of a newer ckptd. `changes` replaces members of the manifest.
    """
    tag = tag_directory(step, None, attempt)
    place = root / "gpt" / tag
    place.mkdir(parents=True)
    document = msgspec.msgpack.encode(
        {"state": {name: msgspec.msgpack.Ext(extension, name.encode())}, "rng": None}
    )
    entries = []
    for rank, shards in enumerate(ranks):
        items, end = [], 0
        for offsets, sizes in shards:
            items.append(Item(name, dtype, size, offsets, sizes, None, end))
            end += items[-1].length
        metadata: dict[str, Described] = {
            name: {
                "dtype": dtype,
                "size": list(size),
                "chunks": [[list(o), list(s)] for of in ranks for o, s in of],
            }
        }
        plan = Plan(
            [Region(0, end, 4)],
            items,
            [],
            metadata if rank == 0 else None,
            WRITER,
            bytes(32),
            plan_version,
        )
        values = values_after(plan, len(document))
        slot = bytearray(values[0]) + document
        slot[:end] = b"\0\0\x80\x3f" * (end // ITEM_SIZES["float32"])
        data, index = encode_part(
            slot,
            plan,
            values,
            job="gpt",
            attempt=attempt,
            step=step,
            rank=rank,
            world_size=len(ranks),
            tag=tag,
            request=SnapshotRequest(),
        )
        if codec:
            index = msgspec.structs.replace(
                index,
                chunks=[msgspec.structs.replace(chunk, codec=codec) for chunk in index.chunks],
            )
            end = max(chunk.offset + align(chunk.stored_length) for chunk in index.chunks)
            data = encode_header(index, NONCE) + data[ALIGN:end] + encode_end(end, index.encode())
        (place / part_file(rank, NONCE)).write_bytes(data)
        entries.append(
            PartEntry(
                rank=rank, file=part_file(rank, NONCE), bytes=len(data),
                raw_bytes=sum(c.raw_length for c in index.chunks), items=len(items),
                index_sha256=hashlib.sha256(index.encode()).hexdigest(),
            )
        )  # fmt: skip
    fields: dict[str, Any] = {
        "job": "gpt", "attempt": attempt, "step": step, "tag": tag, "seq": step,
        "world_size": len(ranks), "created": "2026-01-02T03:04:05+00:00", "parts": entries,
        "metadata": {"state_dict_metadata": {}, "planner_data": None}, "metrics": {},
        "user_content": None, "writer": WRITER,
    }  # fmt: skip
    (place / "manifest.json").write_bytes(Manifest(**{**fields, **changes}).encode())
    return place
