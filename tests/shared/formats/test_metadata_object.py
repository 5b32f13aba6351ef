"""Tests the metadata object: each tensor is found in few bytes, damage is found, and
entries that readers would refuse are not written.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats import metadata_object
from ckptd.shared.formats.metadata_object import BLOCK, MetadataObjectEntry, MetadataReader, encode
from ckptd.shared.formats.sharding import Mesh, Rule
from ckptd.shared.names import is_metadata_file
from tests.support.cases import each_case

MESHES = [Mesh((4, 2), 0, (2, 1))]


class Memory:
    """An object in memory that counts what is read of it."""

    remote = True

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[int] = []

    @property
    def size(self) -> int:
        return len(self.data)

    def view(self, offset: int, length: int) -> memoryview:
        found = memoryview(self.data)[offset : offset + length]
        self.reads.append(len(found))
        return found

    def read(self, buffer: memoryview, offset: int) -> int:
        raise AssertionError("a metadata object is read by views")

    def close(self) -> None:
        pass


def sample(count: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"layers.{number}.weight": {
            "dtype": "float32",
            "size": [8, 4],
            "rule": Rule(0, ((0, 0),), 1),
        }
        for number in range(count)
    }
    return found | {
        "explicit": {
            "dtype": "int64",
            "size": [4],
            "chunks": [[[0], [2]], [[2], [2]]],
            "ranks": [3, 7],
        },
        "of.rank.0": {"dtype": "bool", "size": [1], "chunks": [[[0], [1]]]},
        "blob": {"dtype": "bytes", "ranks": [5]},
        "épsilon": {"dtype": "bytes"},
    }


def opened(
    metadata: dict[str, Any], meshes: list[Mesh] = MESHES
) -> tuple[MetadataReader, Memory, MetadataObjectEntry]:
    data, entry = encode(metadata, meshes, 8)
    return MetadataReader(source := Memory(data), entry, 8, "metadata"), source, entry


@pytest.mark.parametrize("count", [0, 1, 30_000])
def test_every_entry_is_found_and_listed_in_order(count: int) -> None:
    metadata = sample(count)
    reader, source, entry = opened(metadata)
    assert (entry.tensors, entry.bytes, is_metadata_file(entry.file)) == (
        len(metadata),
        len(source.data),
        True,
    )
    assert [name for name, _ in reader.entries()] == sorted(metadata)
    assert dict(reader.entries()) == metadata
    assert reader.meshes == MESHES
    assert reader.verify() == len(metadata)
    for name in random.Random(count).sample(sorted(metadata), 4):
        assert reader.find(name) == metadata[name]
    for absent in ("", "a", "layers.7", "zzz", "explicit "):
        assert reader.find(absent) is None


def test_one_tensor_is_found_with_two_reads_of_the_object() -> None:
    metadata = sample(30_000)
    data, entry = encode(metadata, MESHES, 8)
    source = Memory(data)
    assert (
        MetadataReader(source, entry, 8, "metadata").find("layers.12345.weight")
        == metadata["layers.12345.weight"]
    )
    assert len(source.reads) == 2
    assert sum(source.reads) < BLOCK
    assert len(source.reads) == 2


def test_no_entries_at_all() -> None:
    reader, _, entry = opened({}, [])
    assert (list(reader.entries()), reader.find("w"), entry.tensors) == ([], None, 0)


def test_an_entry_that_is_larger_than_a_block_has_one_of_its_own() -> None:
    chunks = [[[number], [1]] for number in range(60_000)]
    metadata = {
        "a": {"dtype": "bytes"},
        "large": {"dtype": "int8", "size": [60_000], "chunks": chunks},
        "z": {"dtype": "bytes"},
    }
    reader, _, _ = opened(metadata)
    assert [block.first for block in reader._index.blocks] == ["a", "large", "z"]
    assert dict(reader.entries()) == metadata


def test_the_same_metadata_have_the_same_name_and_others_another() -> None:
    (_, one), (_, again), (_, other) = (
        encode(metadata, MESHES, 8)
        for metadata in (sample(3), dict(reversed(sample(3).items())), sample(4))
    )
    assert one == again
    assert one.file != other.file


def test_every_flipped_bit_of_a_small_object_is_found() -> None:
    data, entry = encode(sample(3), MESHES, 8)
    for number in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[number // 8] ^= 1 << number % 8
        with pytest.raises(IntegrityError):
            MetadataReader(Memory(bytes(damaged)), entry, 8, "metadata").verify()


@pytest.mark.parametrize("length", [0, 15, 100, -1])
def test_an_object_that_is_cut_short_is_refused(length: int) -> None:
    data, entry = encode(sample(3), MESHES, 8)
    with pytest.raises(IntegrityError, match=f"^metadata.* bytes; expected {len(data)}$"):
        MetadataReader(Memory(data[:length]), entry, 8, "metadata")


@each_case(
    ("entry", "said"),
    [
        (
            {"dtype": "int8", "size": [8, 4], "rule": [1, [[0, 0]], 0]},
            "a mesh that is not described",
        ),
        (
            {"dtype": "int8", "size": [8, 4], "rule": [0, [[2, 0]], 0]},
            "dimensions that its mesh does not have",
        ),
        ({"dtype": "int8", "size": [8, 4], "rule": [0, [[0, 2]], 0]}, "does not fit its size"),
        (
            {"dtype": "int8", "size": [8], "chunks": [[[0], [8]]], "ranks": [8]},
            "ranks that the job does not have",
        ),
        (
            {"dtype": "int8", "size": [8], "chunks": [[[0], [4]], [[4], [4]]], "ranks": [1]},
            "ranks that the job does not have",
        ),
        ({"dtype": "bytes", "ranks": []}, "ranks that the job does not have"),
        ({}, "does not say what it is"),
        ({"dtype": "float32"}, "does not say what it is"),
        ({"dtype": "float32", "size": [2]}, "does not say what it is"),
        ({"dtype": "bytes", "size": [2], "chunks": [[[0], [2]]]}, "does not say what it is"),
        ({"dtype": "float32", "size": [2], "chunks": []}, "shards of other dimensions, or none"),
        (
            {"dtype": "float32", "size": [2], "chunks": [[[0, 0], [2, 1]]]},
            "shards of other dimensions, or none",
        ),
    ],
)
def test_an_entry_that_readers_would_refuse_is_not_written(entry: Any, said: str) -> None:
    with pytest.raises(IntegrityError, match=f"^'w' .*{said}"):
        encode({"w": entry}, MESHES, 8)
    with pytest.raises(IntegrityError, match="does not have one rank of 7"):
        encode({}, MESHES, 7)


def forged(change: Any) -> tuple[bytes, MetadataObjectEntry]:
    """Return an object whose blocks were changed, with an index that fits them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metadata_object, "check_entry", lambda *arguments: None)
        patched.setattr(metadata_object, "_raw_blocks", lambda *arguments: change)
        return encode({}, MESHES, 8)


@each_case(
    "blocks",
    [
        [("a", msgspec.msgpack.encode([["b", {"dtype": "bytes"}]]))],
        [("a", msgspec.msgpack.encode([["a", {"dtype": "bytes"}], ["a", {"dtype": "bytes"}]]))],
        [
            ("a", msgspec.msgpack.encode([["a", {"dtype": "bytes"}], ["c", {"dtype": "bytes"}]])),
            ("b", msgspec.msgpack.encode([["b", {"dtype": "bytes"}]])),
        ],
        [("a", msgspec.msgpack.encode([]))],
        [
            (
                "a",
                msgspec.msgpack.encode([["a", {"dtype": "int8", "size": [2], "rule": [9, [], 0]}]]),
            )
        ],
        [("a", msgspec.msgpack.encode("no list"))],
    ],
)
def test_a_hostile_block_is_refused(blocks: Any) -> None:
    data, entry = forged(blocks)
    with pytest.raises(IntegrityError):
        list(MetadataReader(Memory(data), entry, 8, "metadata").entries())


def test_a_block_at_an_impossible_place_is_refused() -> None:
    reader, source, _ = opened(sample(3))
    block = reader._index.blocks[0]
    reader._index.blocks[0] = msgspec.structs.replace(block, offset=len(source.data) - 4)
    with pytest.raises(IntegrityError, match="impossible place"):
        reader.find("blob")


def test_the_whole_object_is_what_its_name_says() -> None:
    reader, source, _ = opened(sample(3))
    assert reader.whole() == source.data
    source.data = source.data[:-1] + b"?"
    with pytest.raises(IntegrityError, match="does not match the digest in its name"):
        reader.whole()


def test_small_objects_that_would_take_much_memory_are_refused() -> None:
    """A block or an index of many megabytes of zeros takes few bytes, and a file with
    holes takes none.
    """
    large = [("a", bytes(metadata_object.MAX_RAW + 1))]
    data, entry = forged(large)
    assert len(data) < 4096
    with pytest.raises(IntegrityError):
        MetadataReader(Memory(data), entry, 8, "metadata")
    data, entry = encode(sample(3), MESHES, 8)

    class Sparse(Memory):
        size = entry.index + metadata_object.MAX_RAW * 2

    with pytest.raises(IntegrityError, match="no ckptd writes one of this size"):
        MetadataReader(
            Sparse(data), msgspec.structs.replace(entry, bytes=Sparse.size), 8, "metadata"
        )
    reader = MetadataReader(Memory(data), entry, 8, "metadata")
    reader._index.blocks[0] = msgspec.structs.replace(
        reader._index.blocks[0], stored_length=len(data) - 40, raw_length=1
    )
    with pytest.raises(IntegrityError):
        reader.find("blob")


def test_an_entry_that_no_reader_would_accept_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_object, "MAX_RAW", 1 << 16)
    chunks = [[[number], [1]] for number in range(20_000)]
    with pytest.raises(
        IntegrityError, match="^'w' has .* bytes of metadata, and readers accept at most"
    ):
        encode({"w": {"dtype": "int8", "size": [20_000], "chunks": chunks}}, [], 8)


def test_a_closed_reader_reads_nothing() -> None:
    reader, _, _ = opened(sample(3))
    reader.close()
    reader.close()
    with pytest.raises(OSError, match="the checkpoint is closed"):
        reader.find("blob")
