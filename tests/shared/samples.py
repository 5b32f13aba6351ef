"""Sound values of every format, small enough to be damaged bit by bit.

Tests use them, and never share state through them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crc32c import crc32c
from hypothesis import settings

from ckptd.shared.codecs import codec as codecs
from ckptd.shared.codecs.delta import Delta
from ckptd.shared.formats.binary import ALIGN, align
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.part import Chunk, PartIndex, encode_end, encode_header
from ckptd.shared.formats.part_writer import PartWriter, Spread
from ckptd.shared.formats.plan import (
    MIN_CHUNK,
    Alias,
    Item,
    Plan,
    Region,
    align_region,
    chunk_ranges,
    signature,
    with_values,
)
from ckptd.shared.formats.segment import (
    Extent,
    SegmentHeader,
    SlotState,
    write_document,
    write_header,
)
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import new_nonce, part_file, tag_directory
from ckptd.shared.system.storage_seam import Creator
from tests.support.storage import files_in

steady = settings(deadline=None)
"""The settings of every property test. It has no deadline: how long an example takes
says nothing on a shared machine.
"""

NONCE = bytes(range(16))
WRITER = {"ckptd": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}


def resealed(data: bytes, at: int, value: int, *, start: int, body: int) -> bytes:
    """Change one byte, and make the checksum match that protects the `body` bytes from
    `start` on and follows them.
    """
    changed = bytearray(data)
    changed[at] = value
    changed[start + body : start + body + 4] = crc32c(
        bytes(changed[start : start + body])
    ).to_bytes(4, "little")
    return bytes(changed)


def encoded(encoder: codecs.Encoder, raw: bytes, element_size: int) -> bytes | None:
    """Return the stored form of a chunk, or None if it would not be smaller."""
    stored = bytearray(b"\xee" * len(raw))
    length = encoder.encode(memoryview(raw), element_size, memoryview(stored))
    return None if length is None else bytes(stored[:length])


def apply(
    codec: Delta, deltas: Iterable[memoryview], pieces: Sequence[memoryview], element_size: int
) -> None:
    """Add the deltas of a chain to the chunk that lies in `pieces`."""
    for differences in codec.decoded(deltas, sum(map(len, pieces)), element_size):
        for piece in pieces:
            differences.add_to(piece)
        differences.check()


def sample_plan(floats: int = 6) -> Plan:
    """Return a plan with regions of 8, 4 and 1 byte elements.

    The one item of the second region has `floats` elements and an alias.
    """
    last = align_region(64 + 4 * floats)
    return Plan(
        regions=[Region(0, 16, 8), Region(64, 4 * floats, 4), Region(last, 5, 1)],
        items=[
            Item("optim.state.weight.step", "int64", (2,), (0,), (2,), None, 0),
            Item("model.weight", "float32", (floats,), (0,), (floats,), None, 64, "cuda", True),
            Item("model.empty", "float32", (0, 3), (0, 0), (0, 3), None, 64),
            Item("model.mask", "bool", (5,), (0,), (5,), None, last),
        ],
        aliases=[Alias("model.tied", "model.weight", 4, "float32", (2,), (2,), True, "cuda")],
        metadata={
            "model.weight": {"dtype": "float32", "size": [floats], "chunks": [[[0], [floats]]]}
        },
        global_plan=bytes(range(32)),
        writer=WRITER,
    )


def values_after(plan: Plan, length: int = 40) -> tuple[int, int]:
    """Return the region in which a values document of `length` bytes lies."""
    return (align_region(plan.data_length), length)


def packed_slot(plan: Plan, values: tuple[int, int]) -> bytearray:
    """Return a packed slot with fixed bytes in every region and zeros in the gaps.

    Only the first half of each region can be compressed.
    """
    slot = bytearray(values[0] + values[1])
    noise = random.Random(7)
    for region in with_values(plan.regions, values):
        half = region.length // 2
        data = b"ckptd---" * (half // 8 + 1)
        slot[region.offset : region.offset + region.length] = data[:half] + noise.randbytes(
            region.length - half
        )
    return slot


def encode_part(
    slot: bytes | bytearray,
    plan: Plan,
    values: tuple[int, int],
    *,
    codec: str = "raw",
    chunk_size: int = MIN_CHUNK,
    job: str = "gpt",
    attempt: int = 2,
    step: int | None = 1000,
    rank: int = 0,
    world_size: int = 1,
    tag: str = "step-00001000.a0002",
    request: SnapshotRequest | None = None,
    nonce: bytes = NONCE,
) -> tuple[bytes, PartIndex]:
    """Return a whole part file, with its chunks one behind the other, and its index."""
    encoder = codecs.encoder(codec)
    body, chunks = bytearray(ALIGN), []
    for number in chunk_ranges(with_values(plan.regions, values), chunk_size):
        raw = memoryview(slot)[number.offset : number.offset + number.length]
        shrunk = encoded(encoder, bytes(raw), number.element_size)
        stored, kind = (bytes(raw), codecs.RAW) if shrunk is None else (shrunk, encoder.number)
        entry = Chunk(
            number.offset,
            number.length,
            len(body),
            len(stored),
            kind,
            number.element_size,
            crc32c(raw),
            crc32c(stored),
        )
        chunks.append(entry)
        body += stored.ljust(align(len(stored)), b"\0")
    document = plan.encode()
    index = PartIndex(
        job=job, attempt=attempt, step=step, rank=rank, world_size=world_size, tag=tag,
        signature=signature(document), plan=document,
        request=(request or SnapshotRequest()).encode(), values=values, chunk_size=chunk_size,
        chunks=chunks,
    )  # fmt: skip
    body[:ALIGN] = encode_header(index, nonce)
    return bytes(body) + encode_end(len(body), index.encode()), index


@contextmanager
def memory_file(data: bytes | bytearray) -> Iterator[int]:
    """Context manager. Yields a descriptor of a file without a name that holds `data`."""
    fd = os.memfd_create("ckptd-test", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        yield fd
    finally:
        os.close(fd)


def flip(data: bytes | bytearray, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit >> 3] ^= 1 << (bit & 7)
    return bytes(damaged)


def write_checkpoint(
    root: Path,
    job: str = "gpt",
    step: int = 1000,
    attempt: int = 2,
    world_size: int = 1,
    floats: int = 6,
    files: int = 1,
) -> Manifest:
    """Write a committed checkpoint by hand.

    Each part is spread over `files` files, if it has that many chunks.
    """
    tag = tag_directory(step, None, attempt)
    place = root / job / tag
    place.mkdir(parents=True)
    plan = sample_plan(floats)
    values = values_after(plan)
    entries = []
    for rank in range(world_size):
        data, index = encode_part(
            packed_slot(plan, values),
            plan,
            values,
            job=job,
            attempt=attempt,
            step=step,
            rank=rank,
            world_size=world_size,
            tag=tag,
        )
        file = part_file(rank, NONCE)
        if files > 1:
            entries.append(
                write_part(files_in(place), packed_slot(plan, values), plan, index, files)
            )
            continue
        (place / file).write_bytes(data)
        entries.append(
            PartEntry(
                rank=rank, file=file, bytes=len(data),
                raw_bytes=sum(c.raw_length for c in index.chunks), items=len(plan.items),
                index_sha256=hashlib.sha256(index.encode()).hexdigest(),
            )
        )  # fmt: skip
    manifest = Manifest(
        features=["files"] if files > 1 else [], job=job, attempt=attempt, step=step, tag=tag,
        seq=7, world_size=world_size, created="2026-01-02T03:04:05+00:00", parts=entries,
        metadata={"state_dict_metadata": plan.metadata or {}, "planner_data": None},
        metrics={"loss": 0.5}, user_content=None, writer=WRITER,
    )  # fmt: skip
    (place / "manifest.json").write_bytes(manifest.encode())
    return manifest


TAG = "step-00001000.a0002"


def write_parts(creator: Creator, *, world_size: int, files: int = 1) -> Manifest:
    """Write the parts of checkpoint gpt/TAG with a new nonce, and return the manifest
    that would commit it.
    """
    plan, nonce = sample_plan(3 << 16), new_nonce()
    values = values_after(plan)
    slot = packed_slot(plan, values)
    common: dict[str, Any] = {
        "job": "gpt",
        "attempt": 2,
        "step": 1000,
        "tag": TAG,
        "world_size": world_size,
    }
    entries = [
        write_part(
            creator,
            slot,
            plan,
            encode_part(slot, plan, values, rank=rank, **common)[1],
            files,
            nonce,
        )
        for rank in range(world_size)
    ]
    return Manifest(
        **common, features=["files"] if files > 1 else [], seq=7,
        created="2026-01-02T03:04:05+00:00", parts=entries,
        metadata={"state_dict_metadata": plan.metadata or {}, "planner_data": None}, metrics={},
        user_content=None, writer=WRITER,
    )  # fmt: skip


def write_part(
    creator: Creator,
    slot: bytearray,
    plan: Plan,
    index: PartIndex,
    files: int,
    nonce: bytes = NONCE,
) -> PartEntry:
    """Write the part of this index in several files."""
    writer = PartWriter(creator, nonce, codecs.encoder("raw"), Spread(files))
    ranges, chunks = chunk_ranges(with_values(plan.regions, index.values), index.chunk_size), []
    writer.create(index, ranges, len(index.plan))
    for chunk in ranges:
        raw, stored = mmap.mmap(-1, index.chunk_size), mmap.mmap(-1, index.chunk_size)
        raw[: chunk.length] = slot[chunk.offset : chunk.offset + chunk.length]
        chunks.append(
            writer.chunk(
                chunk, memoryview(raw), memoryview(stored), crc32c(memoryview(raw)[: chunk.length])
            )
        )
    return writer.finish(index, chunks, items=len(plan.items))


def seal(
    fd: int,
    header: SegmentHeader,
    plan: Plan,
    *,
    step: int = 5,
    request: SnapshotRequest | None = None,
    **changes: Any,
) -> SegmentHeader:
    """Seal a slot as a trainer does: write the bytes of `packed_slot`, the documents,
    and the sealed header with `changes`.
    """
    values = values_after(plan)
    slot = packed_slot(plan, values)
    os.pwrite(fd, slot, header.data_offset)
    document = plan.encode()
    at = align(sum(values))
    sealed = header.next(
        SlotState.SEALED,
        step=step,
        signature=signature(document),
        values=Extent(*values, crc32c(slot[values[0] :])),
        plan=write_document(fd, header, at, document),
        request=write_document(
            fd, header, at + align(len(document)), (request or SnapshotRequest()).encode()
        ),
    )
    sealed = dataclasses.replace(sealed, **changes)
    write_header(fd, sealed)
    return sealed
