"""The metadata object, which describes the tensors of a very large checkpoint
(FORMAT.md, section 10).

Its entries are sorted by name in compressed blocks, so that one tensor is found with
two reads: the index, and one block. Nothing here does I/O, except that a reader reads
from an open source.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import zstandard
from crc32c import crc32c

from ckptd.shared import names
from ckptd.shared.codecs.codec import Zstd
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.binary import PREAMBLE, check_preamble, preamble
from ckptd.shared.formats.bounds import check_msgpack
from ckptd.shared.formats.plan import BLOB, Described, Meshes, Size, Text, decode_described
from ckptd.shared.formats.sharding import Box, Mesh, Rule, check_rule, stored_shards
from ckptd.shared.system.collector import paused_collector
from ckptd.shared.system.storage_seam import Source

MAGIC = b"CKPTDMET"
BLOCK = 256 << 10
"""The most bytes of a block before compression, unless it has one entry only. A block
is read for each tensor that is looked up.
"""
MAX_RAW = 16 << 20
"""The most bytes of the index, or of a block, before compression, so that a small
hostile object takes no more memory than any document.
"""
MAX_BYTES = 1 << 30
_LEVEL = 3
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class MetadataObjectEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The member of a manifest that names a metadata object.

    file: its name, which is no path, because readers open this file and deleters unlink
    it. bytes: its size. index: the offset of its index. index_sha256: the sha256 of the
    stored index, in hexadecimal digits. tensors: the number of its entries.
    """

    file: Annotated[str, msgspec.Meta(pattern=r"^metadata\.[0-9a-f]{32}\.ckpt\Z")]
    bytes: Annotated[int, msgspec.Meta(ge=PREAMBLE.size, le=MAX_BYTES)]
    index: Annotated[int, msgspec.Meta(ge=PREAMBLE.size, le=MAX_BYTES)]
    index_sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tensors: Size


class _Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    first: Text
    offset: Size
    stored_length: Size
    raw_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_RAW)]
    crc: _U32


class _Index(msgspec.Struct, frozen=True):
    blocks: list[_Block]
    meshes: Meshes


def encode(
    metadata: Mapping[str, Described], meshes: Sequence[Mesh], world_size: int
) -> tuple[bytes, MetadataObjectEntry]:
    """Return the bytes of a metadata object, and the member of the manifest that names
    it.

    Raises IntegrityError if readers would refuse an entry or the index.
    """
    for mesh in meshes:
        mesh.check(world_size)
    data, blocks = bytearray(preamble(MAGIC)), list[_Block]()
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    with paused_collector():
        for first, raw in _raw_blocks(metadata, meshes, world_size):
            stored = compressor.compress(raw)
            blocks.append(_Block(first, len(data), len(stored), len(raw), crc32c(stored)))
            data += stored
    index = msgspec.msgpack.encode(_Index(blocks, list(meshes)))
    offset = len(data)
    data += compressor.compress(index)
    if len(index) > MAX_RAW or len(data) > MAX_BYTES:
        raise IntegrityError(
            f"the metadata would have {len(data):,d} bytes, and an index of {len(index):,d}: more "
            f"than readers accept"
        )
    return bytes(data), MetadataObjectEntry(
        file=names.metadata_file(hashlib.sha256(data).hexdigest()),
        bytes=len(data),
        index=offset,
        index_sha256=hashlib.sha256(memoryview(data)[offset:]).hexdigest(),
        tensors=len(metadata),
    )


def _raw_blocks(
    metadata: Mapping[str, Described], meshes: Sequence[Mesh], world_size: int
) -> Iterator[tuple[str, bytes]]:
    """Yield the first name and the bytes of each block before compression."""
    encoder, held, length, first = msgspec.msgpack.Encoder(), list[bytes](), 0, ""
    # Python sorts text by code points, which is the order of its UTF-8 bytes
    for fqn in sorted(metadata):
        check_entry(fqn, metadata[fqn], meshes, world_size)
        entry = encoder.encode((fqn, metadata[fqn]))
        if len(entry) > MAX_RAW - _LIST:
            raise IntegrityError(
                f"{fqn!r} has {len(entry):,d} bytes of metadata, and readers accept at most "
                f"{MAX_RAW:,d}: use fewer shards"
            )
        if held and length + len(entry) > BLOCK - _LIST:
            yield first, _joined(held)
            held, length = [], 0
        first = first if held else fqn
        held.append(entry)
        length += len(entry)
    if held:
        yield first, _joined(held)


_LIST = 5
"""The most bytes of the head of a list in msgpack."""


def _joined(entries: Sequence[bytes]) -> bytes:
    """Return a msgpack list of entries that are encoded already."""
    return b"\xdd" + len(entries).to_bytes(4, "big") + b"".join(entries)


def check_entry(fqn: str, entry: Described, meshes: Sequence[Mesh], world_size: int) -> None:
    """Raise IntegrityError if an entry does not say of each shard where it is."""
    members, size = entry.keys() - {"dtype", "ranks"}, entry.get("size", [])
    if "dtype" not in entry or members not in (
        _BLOB_MEMBERS if entry["dtype"] == BLOB else _TENSOR_MEMBERS
    ):
        raise IntegrityError(
            f"{fqn!r} is described by {sorted(entry)}, which does not say what it is and where"
        )
    if "rule" in entry:
        check_rule(fqn, size, meshes, _as_rule(entry["rule"]))
        return
    places = entry.get("chunks", [[[0], [0]]])
    if not places or (
        "chunks" in entry
        and any(len(offsets) != len(size) or len(sizes) != len(size) for offsets, sizes in places)
    ):
        raise IntegrityError(
            f"{fqn!r} of size {list(size)} has shards of other dimensions, or none"
        )
    ranks = entry.get("ranks", [0] * len(places))
    if len(ranks) != len(places) or max(ranks) >= world_size:
        raise IntegrityError(f"{fqn!r} is said to be on ranks that the job does not have")


_BLOB_MEMBERS = (set[str](),)
_TENSOR_MEMBERS = ({"size", "chunks"}, {"size", "rule"})


def _as_rule(rule: Rule | Sequence[Any]) -> Rule:
    return rule if isinstance(rule, Rule) else Rule(*rule)


def stored_places(entry: Described, meshes: Sequence[Mesh]) -> Iterator[tuple[Box | None, int]]:
    """Yield the place of each shard that is stored, and the rank that stores it.

    The place of a blob is None.
    """
    if "rule" in entry:
        rule = _as_rule(entry["rule"])
        yield from stored_shards(entry["size"], meshes[rule.mesh], rule)
    elif entry["dtype"] == BLOB:
        yield None, entry.get("ranks", [0])[0]
    else:
        for (offsets, sizes), rank in zip(
            entry["chunks"], entry.get("ranks", [0] * len(entry["chunks"])), strict=True
        ):
            yield (tuple(offsets), tuple(sizes)), rank


class MetadataReader:
    """A reader of a metadata object, given as an open source, which `close` closes.

    The constructor reads and verifies the index with one read. `entry` is the member of
    the manifest. `called` is the name of the object in error texts. Any number of
    threads may read at once. Raises IntegrityError, OSError.
    """

    def __init__(
        self, source: Source, entry: MetadataObjectEntry, world_size: int, called: str
    ) -> None:
        self._source, self._world_size = source, world_size
        self._called = called
        self._file = entry.file
        self._end = entry.index
        self._closed = False
        if entry.bytes - entry.index > _most_stored(MAX_RAW):
            raise IntegrityError(
                f"{called} has an index of {entry.bytes - entry.index:,d} bytes; no ckptd writes "
                f"one of this size"
            )
        if source.size != entry.bytes:
            raise IntegrityError(f"{called} has {source.size} bytes; expected {entry.bytes}")
        stored = self._read(entry.index, entry.bytes - entry.index)
        if hashlib.sha256(stored).hexdigest() != entry.index_sha256:
            raise IntegrityError(f"the index of {called} does not match its digest")
        self._index: _Index = _decoded(_decompressed(stored, called), _INDEX_DECODER.decode, called)
        self._firsts = [block.first for block in self._index.blocks]
        self.meshes: Sequence[Mesh] = self._index.meshes
        for mesh in self.meshes:
            mesh.check(world_size)

    def close(self) -> None:
        """Close the source. Later reads raise OSError. May be called again."""
        if not self._closed:
            self._closed = True
            self._source.close()

    def find(self, fqn: str) -> Described | None:
        """Return the entry of a tensor or blob, or None if there is none.

        One block is read. Raises IntegrityError, OSError.
        """
        return self.entries_near(fqn).get(fqn)

    def entries_near(self, fqn: str) -> dict[str, Described]:
        """Return the entries of the block that has the entry of this name, if there is
        one. Raises IntegrityError, OSError.
        """
        number = bisect.bisect_right(self._firsts, fqn) - 1
        return dict(self._block(number)) if number >= 0 else {}

    def entries(self) -> Iterator[tuple[str, Described]]:
        """Yield the name and the entry of each tensor and blob, in their order.

        Raises IntegrityError, OSError.
        """
        for number in range(len(self._index.blocks)):
            yield from self._block(number)

    def verify(self) -> int:
        """Read and check every block, and return the number of entries.

        Raises IntegrityError, OSError.
        """
        check_preamble(self._read(0, PREAMBLE.size), MAGIC, self._called)
        return sum(1 for _ in self.entries())

    def whole(self) -> bytes:
        """Return all bytes of the object.

        Raises IntegrityError if they are not those that the name of the object says,
        OSError.
        """
        data = bytes(self._read(0, self._source.size))
        if names.metadata_file(hashlib.sha256(data).hexdigest()) != self._file:
            raise IntegrityError(f"{self._called} does not match the digest in its name")
        return data

    def _block(self, number: int) -> list[tuple[str, Described]]:
        block = self._index.blocks[number]
        if block.offset + block.stored_length > self._end or block.stored_length > _most_stored(
            block.raw_length
        ):
            raise IntegrityError(f"{self._called} names a block at an impossible place")
        stored = self._read(block.offset, block.stored_length)
        if crc32c(stored) != block.crc:
            raise IntegrityError(f"a block of {self._called} does not match its checksum")
        order, entries = _decoded(
            _decompressed(stored, self._called, block.raw_length), _decoded_block, self._called
        )
        beyond = self._firsts[number + 1] if number + 1 < len(self._firsts) else None
        if (
            not order
            or order[0] != block.first
            or order != sorted(set(order))
            or (beyond is not None and order[-1] >= beyond)
        ):
            raise IntegrityError(f"{self._called} has entries that are not in their order")
        found = list(zip(order, entries, strict=True))
        # Names that share an entry need one check of it.
        for name, entry in {id(entry): (name, entry) for name, entry in found}.values():
            check_entry(name, entry, self.meshes, self._world_size)
        return found

    def _read(self, offset: int, length: int) -> memoryview:
        if self._closed:
            raise OSError(errno.EBADF, "the checkpoint is closed", self._called)
        data = self._source.view(offset, length)
        if len(data) != length:
            raise IntegrityError(f"{self._called} is cut short")
        return data


def _most_stored(raw_length: int) -> int:
    """Return the most bytes of a zstd frame with so much content (ZSTD_COMPRESSBOUND in
    zstd.h, rounded up).
    """
    return raw_length + raw_length // 256 + 1024


def _decompressed(stored: memoryview, called: str, length: int | None = None) -> bytearray:
    """Return the content of a frame.

    `length` is its size if that is known. Raises IntegrityError.
    """
    try:
        size = zstandard.get_frame_parameters(stored).content_size if length is None else length
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{called} cannot be read: {error}") from None
    if size > MAX_RAW:
        raise IntegrityError(
            f"{called} has an index of {size:,d} bytes; expected at most {MAX_RAW:,d}"
        )
    raw = bytearray(size)
    _ZSTD.decode(stored, memoryview(raw), 1)
    return raw


_Decoded = TypeVar("_Decoded")


def _decoded(raw: bytearray, decode: Callable[[bytearray], _Decoded], called: str) -> _Decoded:
    check_msgpack(raw, called)
    with paused_collector():
        try:
            return decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise IntegrityError(f"{called} cannot be read: {error}") from None


_ZSTD = Zstd()
_INDEX_DECODER = msgspec.msgpack.Decoder(_Index)
_BLOCK_DECODER = msgspec.msgpack.Decoder(list[tuple[Text, msgspec.Raw]])


def _decoded_block(raw: bytearray) -> tuple[list[str], list[Described]]:
    """Return the names in a block, and their entries as of `decode_described`."""
    found = _BLOCK_DECODER.decode(raw)
    return [name for name, _ in found], decode_described(entry for _, entry in found)
