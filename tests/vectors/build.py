"""Builds small checkpoints byte by byte, sound ones and ones that break one rule of
FORMAT.md, for `make.py`.

The files are the same wherever they are made: frames of zstd are put together by hand,
because each version of zstd compresses otherwise.
"""

from __future__ import annotations

import copy
import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash
from crc32c import crc32c

from ckptd.shared.formats import sealed_json
from ckptd.shared.formats.binary import ALIGN, NO_STEP, align, preamble
from ckptd.shared.formats.part import (
    DELTAS,
    END_MAGIC,
    LINKED_FILES,
    PART_MAGIC,
    SEVERAL_FILES,
)
from ckptd.shared.formats.plan import MIN_CHUNK, align_region, element_size
from ckptd.shared.names import part_file

JOB, ATTEMPT, STEP, TAG = "gpt", 2, 1000, "step-00001000.a0002"
WRITER = {"ckptd": "0.2.0", "torch": "2.13.0", "python": "3.12.0"}
Files = dict[str, bytes]
Edit = Callable[[Any], Any]
Encode = Callable[[int, bytes, int], tuple[int, bytes]]
"""Returns the codec and the stored form of a chunk, given its number, its raw bytes and
its element size.
"""


def nonce_of(rank: int, step: int | None = STEP) -> bytes:
    return hashlib.sha256(f"{rank} {step}".encode()).digest()[:16]


def ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    """Return an extension type whose payload is msgpack."""
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def plain_ext(code: int, data: str | bytes) -> msgspec.msgpack.Ext:
    """Return an extension type whose payload is text or bytes."""
    return msgspec.msgpack.Ext(code, data.encode() if isinstance(data, str) else data)


def tensor(name: str) -> msgspec.msgpack.Ext:
    return plain_ext(1, name)


# -- zstd


def frame(
    data: bytes,
    *,
    window: int | None = None,
    checksum: bool = False,
    size: int | None = None,
    sized: bool = True,
    dictionary: int | None = None,
) -> bytes:
    """Return one zstd frame, whose blocks are runs of one byte or stored as they are
    (RFC 8878).

    window: the exponent of the window, at least 10, or None for a single segment. size:
    the content size that the frame names, if it is not the true one. sized: False if it
    names none, which needs a window. dictionary: the id of a dictionary, in one byte,
    or None.
    """
    size = len(data) if size is None else size
    flag, stated = (3, struct.pack("<Q", size)) if size >= 1 << 32 else (2, struct.pack("<I", size))
    if size < 256 and window is None:
        flag, stated = 0, bytes([size])
    elif 256 <= size < 65792:
        flag, stated = 1, struct.pack("<H", size - 256)
    if not sized:
        assert window is not None
        flag, stated = 0, b""
    descriptor = flag << 6 | (window is None) << 5 | checksum << 2 | (dictionary is not None)
    head = struct.pack("<IB", 0xFD2FB528, descriptor) + (
        b"" if window is None else bytes([(window - 10) << 3])
    )
    head += (b"" if dictionary is None else bytes([dictionary])) + stated
    pieces = [data[at : at + 1024] for at in range(0, len(data), 1024)] or [b""]
    blocks = b""
    for number, piece in enumerate(pieces):
        run = len(set(piece)) == 1
        header = (number == len(pieces) - 1) | run << 1 | len(piece) << 3
        blocks += header.to_bytes(3, "little") + (piece[:1] if run else piece)
    return head + blocks + (xxhash.xxh64(data).digest()[::-1][:4] if checksum else b"")


def raw(number: int, data: bytes, width: int) -> tuple[int, bytes]:
    return 0, data


def zstd(**options: Any) -> Encode:
    return lambda number, data, width: (1, frame(data, **options)) if len(data) > 100 else (0, data)


def planes(
    data: bytes, width: int, method: Callable[[int, bytes], tuple[int, bytes]] | None = None
) -> bytes:
    """Return the stored form of a chunk in the codec `planes`.

    `method` returns method and stored form of a plane, given its number.
    """
    size = {2: 2, 4: 4, 8: 8, 16: 8}.get(width, 1)
    words = [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]
    if size > 1:
        most = (1 << 8 * size) - 1
        words = [(word << 1 | word >> (8 * size - 1)) & most for word in words]
    split = [bytes(word >> 8 * plane & 0xFF for word in words) for plane in range(size)]
    stored = [(method or shrunk)(number, plane) for number, plane in enumerate(split)]
    return b"".join(struct.pack("<II", kind, len(body)) for kind, body in stored) + b"".join(
        body for _, body in stored
    )


def shrunk(number: int, plane: bytes) -> tuple[int, bytes]:
    compressed = frame(plane)
    return (1, compressed) if len(compressed) < len(plane) else (0, plane)


def in_planes(method: Callable[[int, bytes], tuple[int, bytes]] | None = None) -> Encode:
    return lambda number, data, width: (
        (2, planes(data, width, method)) if len(data) > 100 else (0, data)
    )


# -- parts


@dataclass(frozen=True)
class Tensor:
    """Holds one item of a part, and its bytes in the order of their addresses."""

    fqn: str
    dtype: str
    sizes: tuple[int, ...]
    data: bytes
    size: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    device: str = "cpu"
    requires_grad: bool = False


@dataclass
class Part:
    """Holds one part before it is encoded.

    The edits break a rule, and all checksums that follow are made afterwards.
    """

    tensors: Sequence[Tensor]
    values: Any
    rank: int = 0
    world_size: int = 1
    attempt: int = ATTEMPT
    step: int | None = STEP
    tag: str = TAG
    aliases: Sequence[Sequence[Any]] = ()
    metadata: Mapping[str, Any] | None = None
    meshes: Sequence[Any] = ()
    request: Mapping[str, Any] = field(default_factory=dict)
    encode: Encode = raw
    files: int = 1
    values_align: int = 64
    edit_plan: Edit = lambda plan: plan
    edit_index: Edit = lambda index: index
    edit_stored: Edit = lambda stored: stored
    """Changes the list of [codec, stored bytes, crc32c of the raw bytes] of the chunks."""
    edit_files: Edit = lambda files: files
    linked: Mapping[int, tuple[str, bytes, list[Any], dict[int, int]]] = field(default_factory=dict)
    """By the number of a data file that is a file of an older part: its name, its
    bytes, its entry of `linked` without the number, and the offsets of the chunks in
    it, by their number in this part.
    """

    def built(self) -> tuple[Files, dict[str, Any]]:
        """Return the files of the part, and its entry in the manifest."""
        plan, slot, regions = self._slot()
        items = len(plan["items"])
        document = msgspec.msgpack.encode(self.edit_plan(plan))
        ranges = [
            (at, min(MIN_CHUNK, o + n - at), w)
            for o, n, w in regions
            for at in range(o, o + n, MIN_CHUNK)
        ]
        stored = []
        for number, (at, length, width) in enumerate(ranges):
            data = slot[at : at + length]
            stored.append([*self.encode(number, data, width), crc32c(data)])
        stored = self.edit_stored(stored)
        nonce, count = (
            nonce_of(self.rank, self.step),
            max([self.files, *(number + 1 for number in self.linked)]),
        )
        names = [part_file(self.rank, nonce, number) for number in range(count)]
        bodies = [bytearray(ALIGN) for _ in range(count)]
        chunks, placed = [], []
        elsewhere = {
            number: (file, at)
            for file, (_, _, _, places) in self.linked.items()
            for number, at in places.items()
        }
        for number, ((at, length, width), (codec, data, crc)) in enumerate(
            zip(ranges, stored, strict=True)
        ):
            file, offset = elsewhere.get(number) or (
                number % self.files,
                len(bodies[number % self.files]),
            )
            if number not in elsewhere:
                bodies[file] += data.ljust(align(len(data)), b"\0")
            chunks.append([at, length, offset, len(data), codec, width, crc, crc32c(data)])
            placed.append(file)
        index: dict[str, Any] = {
            "job": JOB,
            "attempt": self.attempt,
            "step": self.step,
            "rank": self.rank,
            "world_size": self.world_size,
            "tag": self.tag,
            "signature": hashlib.sha256(document).digest(),
            "plan": document,
            "request": msgspec.msgpack.encode(self._request()),
            "values": list(regions[-1][:2]),
            "chunk_size": MIN_CHUNK,
            "chunks": chunks,
        }
        for number, (_, data, _, _) in self.linked.items():
            bodies[number] = bytearray(data)
        if count > 1:
            index |= {"files": [len(body) for body in bodies[1:]], "placed": placed}
        if self.linked:
            index["linked"] = [[number, *entry] for number, (_, _, entry, _) in self.linked.items()]
        index = self.edit_index(index)
        for number, body in enumerate(bodies):
            if number not in self.linked:
                body[:ALIGN] = header(index, nonce, number)
        end = msgspec.msgpack.encode(index)
        bodies[0] += index_and_trailer(end, len(bodies[0]))
        found = self.edit_files(dict(zip(names, map(bytes, bodies), strict=True)))
        entry = {
            "rank": self.rank,
            "file": names[0],
            "bytes": sum(map(len, bodies)),
            "raw_bytes": sum(length for _, length, _ in ranges),
            "items": items,
            "index_sha256": hashlib.sha256(end).hexdigest(),
        }
        if count > 1:
            entry["files"] = count
        if self.linked:
            entry["linked_bytes"] = sum(len(data) for _, data, _, _ in self.linked.values())
        return found, entry

    def _request(self) -> dict[str, Any]:
        return {
            "tag": None,
            "persist": True,
            "metrics": {},
            "user_content": "null",
            "created": 1767323045.0,
        } | dict(self.request)

    def _slot(self) -> tuple[dict[str, Any], bytes, list[tuple[int, int, int]]]:
        """Return the plan, the packed slot, and its regions with that of the values."""
        regions, items, slot = list[tuple[int, int, int]](), list[list[Any]](), bytearray()
        for width in (16, 8, 4, 2, 1):
            held = [each for each in self.tensors if element_size(each.dtype) == width]
            if not held:
                continue
            slot = slot.ljust(align_region(len(slot)), b"\0")
            start = len(slot)
            for each in held:
                assert len(each.data) == math.prod(each.sizes) * width, each.fqn
                items.append(
                    [
                        each.fqn,
                        each.dtype,
                        each.size or each.sizes,
                        each.offsets or (0,) * len(each.sizes),
                        each.sizes,
                        each.stride,
                        len(slot),
                        each.device,
                        each.requires_grad,
                    ]
                )
                slot += each.data
            if len(slot) > start:
                regions.append((start, len(slot) - start, width))
        values = (
            self.values if isinstance(self.values, bytes) else msgspec.msgpack.encode(self.values)
        )
        at = -(-len(slot) // self.values_align) * self.values_align
        slot = slot.ljust(at, b"\0") + values
        plan: dict[str, Any] = {
            "regions": copy.copy(regions),
            "items": items,
            "aliases": list(self.aliases),
            "metadata": self.metadata,
            "writer": WRITER,
            "global_plan": bytes(32),
            "version": 1,
        }
        if self.meshes:
            plan["meshes"] = list(self.meshes)
        return plan, bytes(slot), [*regions, (at, len(values), 1)]


def header(
    index: Mapping[str, Any],
    nonce: bytes,
    number: int,
    features: int | None = None,
    version: int = 1,
) -> bytes:
    """Return the header of a file of a part."""
    if features is None:
        features = (
            (SEVERAL_FILES if index.get("files") else 0)
            | (LINKED_FILES if index.get("linked") and number == 0 else 0)
            | (DELTAS if index.get("bases") and number == 0 else 0)
        )
    step = NO_STEP if index["step"] is None else index["step"]
    return sealed(
        preamble(PART_MAGIC, features, version)
        + nonce
        + struct.pack(
            "<IIIIQ128s",
            index["attempt"],
            index["rank"],
            index["world_size"],
            number,
            step,
            index["job"].encode(),
        )
    )


def sealed(body: bytes) -> bytes:
    """Return a body with its crc32c, padded to 4096 bytes."""
    return (body + struct.pack("<I", crc32c(body))).ljust(ALIGN, b"\0")


def trailer(
    offset: int,
    length: int,
    whole: int,
    crc: int,
    *,
    version: int = 1,
    zero: bytes = bytes(16),
    features: int = 0,
) -> bytes:
    body = preamble(END_MAGIC, features, version) + struct.pack(
        "<QQQI16s", offset, length, whole, crc, zero
    )
    return body + struct.pack("<I", crc32c(body))


def index_and_trailer(index: bytes, offset: int) -> bytes:
    length = align(len(index) + 64)
    return index.ljust(length - 64, b"\0") + trailer(
        offset, len(index), offset + length, crc32c(index)
    )


# -- checkpoints


@dataclass
class Checkpoint:
    """A checkpoint before its manifest is encoded."""

    parts: Sequence[Part]
    attempt: int = ATTEMPT
    step: int | None = STEP
    tag: str = TAG
    features: Sequence[str] = ()
    members: Mapping[str, Any] = field(default_factory=dict)
    edit_members: Edit = lambda members: members
    edit_manifest: Edit = lambda data: data
    edit_files: Edit = lambda files: files

    def built(self) -> Files:
        """Return the files of the checkpoint's directory."""
        files, entries = Files(), []
        for part in self.parts:
            found, entry = part.built()
            files |= found
            entries.append(entry)
        first = self.parts[0]
        metadata: dict[str, Any] = {
            "state_dict_metadata": first.metadata or {},
            "planner_data": None,
        }
        if first.meshes:
            metadata["meshes"] = first.meshes
        members: dict[str, Any] = {
            "format": "ckptd-manifest",
            "version": 1,
            "features": list(self.features),
            "job": JOB,
            "attempt": self.attempt,
            "step": self.step,
            "tag": self.tag,
            "seq": 7,
            "world_size": len(self.parts),
            "created": "2026-01-02T03:04:05+00:00",
            "parts": entries,
            "metadata": metadata,
            "metrics": {},
            "user_content": None,
            "writer": WRITER | {"codec": "raw"},
        }
        members = self.edit_members({**members, **self.members})
        written: Files = self.edit_files(
            files | {"manifest.json": self.edit_manifest(sealed_json.encode(members))}
        )
        return written


def resealed(data: bytes) -> bytes:
    """Return a manifest with its digest made again, after its lines were changed."""
    body = data[: data.rindex(b'"sha256": "')]
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def whole(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the metadata of tensors that are stored as one shard by rank 0."""
    return {
        each.fqn: {
            "dtype": each.dtype,
            "size": list(each.sizes),
            "chunks": [[[0] * len(each.sizes), list(each.sizes)]],
        }
        for each in tensors
        if not each.fqn.startswith("~")
    }
