"""Tests files of every format version, as they are in use: this version reads them,
every field is compared, and they are written again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ckptd.daemon.journal import file as jf
from ckptd.daemon.journal import records as r
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.codecs import codec
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.metadata_object import MetadataReader
from ckptd.shared.formats.part import Chunk, PartReader
from ckptd.shared.formats.plan import Plan
from ckptd.shared.formats.scatter import scatter, verify
from ckptd.shared.formats.segment import SegmentHeader, read_check, read_document, read_header
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import parse_part_file
from ckptd.shared.storage.locate import open_root
from ckptd.shared.wire import frames
from ckptd.shared.wire import messages as m
from tests.golden import make, make_ranks, make_v2
from tests.shared.wire.samples import MESSAGES
from tests.support.cases import each_case
from tests.support.storage import source

PLACE = make.PLACE


@contextmanager
def opened(name: str) -> Iterator[int]:
    fd = os.open(PLACE / name, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def read(name: str) -> bytes:
    return (PLACE / name).read_bytes()


def test_one_small_file_of_each_format() -> None:
    found = {
        str(path.relative_to(PLACE)): path.stat().st_size
        for path in PLACE.rglob("*")
        if path.is_file()
    }
    assert set(found) == {
        *make.files(),
        *(f"two-ranks/{name}" for name in make_ranks.files()),
        "part-zstd.ckpt",
        "values.msgpack",
        *make.LATER_VALUES,
        "node.tar.xz",
        "names.tar.xz",
    }
    assert max(found.values()) <= 40_000


@each_case("name", make.files())
def test_every_golden_file_is_written_again_byte_for_byte(name: str) -> None:
    assert make.files()[name] == read(name)


def test_the_golden_segment_has_every_field() -> None:
    with opened("segment.seg") as fd:
        header = read_header(fd)
        assert header == make.SEALED
        assert SegmentHeader.decode(os.pread(fd, 4096, 4096)) == make.FILLING
        assert read_check(fd, header) == make.CRCS
        assert read_check(fd, make.FILLING) is None
        assert os.fstat(fd).st_size == header.file_length == 16384
        assert Plan.decode(read_document(fd, header, header.plan, "plan")) == make.PLAN
        assert (
            SnapshotRequest.decode(read_document(fd, header, header.request, "request"))
            == make.REQUEST
        )
        assert read_document(fd, header, header.values, "values") == make.SMALL_VALUES
        slot = make.packed_slot()
        assert os.pread(fd, len(slot), header.data_offset) == slot


def test_the_golden_raw_part_has_every_field() -> None:
    with opened("part-raw.ckpt") as fd:
        reader = PartReader(source(fd), "p", make.MANIFEST.parts[0].index_sha256)
        index = reader.index
        assert (index.job, index.attempt, index.step, index.rank, index.world_size, index.tag) == (
            "gpt",
            2,
            1000,
            0,
            2,
            make.TAG,
        )
        assert (index.values, index.chunk_size) == (make.VALUES, 65536)
        assert index.signature == hashlib.sha256(index.plan).digest()
        assert reader.plan == make.PLAN
        assert SnapshotRequest.decode(index.request) == make.REQUEST
        raw = [
            (0, 16, 16),
            (64, 16, 8),
            (128, 24, 4),
            (192, 10, 2),
            (256, 11, 1),
            (320, make.VALUES[1], 1),
        ]
        assert index.chunks == [
            Chunk(offset, length, 4096 * number, length, codec.RAW, width, crc, crc)
            for number, ((offset, length, width), crc) in enumerate(
                zip(raw, make.CRCS, strict=True), start=1
            )
        ]
        assert verify(reader) == make.MANIFEST.parts[0].raw_bytes
        slot, found = make.packed_slot(), bytearray(384)
        view = memoryview(found)
        scatter(reader, [(offset, view[offset : offset + length]) for offset, length, _ in raw])
        assert found[: len(slot)] == slot
        assert os.pread(fd, 16, 16) == make.NONCE


def test_the_golden_zstd_part_has_every_field() -> None:
    with opened("part-zstd.ckpt") as fd:
        reader = PartReader(source(fd), "p")
        index = reader.index
        assert (index.job, index.attempt, index.step, index.rank, index.world_size, index.tag) == (
            "gpt",
            2,
            None,
            0,
            1,
            "best.a0002",
        )
        assert (reader.plan, SnapshotRequest.decode(index.request)) == (
            make.ZSTD_PLAN,
            SnapshotRequest(tag="best"),
        )
        assert [(c.codec, c.raw_length, c.element_size) for c in index.chunks] == [
            (codec.ZSTD, 2000, 4),
            (codec.RAW, 1, 1),
        ]
        assert index.chunks[0].stored_length < 50
        found = bytearray(b"\xee" * 2000)
        last = bytearray(1)
        scatter(reader, [(0, memoryview(found)), (2048, memoryview(last))])
        assert (bytes(found), bytes(last)) == (bytes(2000), b"\x80")


def test_the_golden_manifest_has_every_field() -> None:
    manifest = Manifest.decode(read("manifest.json"))
    assert manifest == make.MANIFEST
    assert (manifest.format, manifest.version, manifest.features) == ("ckptd-manifest", 1, [])
    assert [parse_part_file(part.file) for part in manifest.parts] == [
        (0, make.NONCE),
        (1, make.NONCE[::-1]),
    ]
    assert manifest.metrics == {"loss": 0.25, "scale": "inf"}
    assert manifest.parts[0].bytes == len(read("part-raw.ckpt"))


def test_manifest_and_part_make_a_place_in_a_root(tmp_path: Path) -> None:
    place = tmp_path / make.JOB / make.TAG
    place.mkdir(parents=True)
    (place / "manifest.json").write_bytes(read("manifest.json"))
    (place / make.PART_FILE).write_bytes(read("part-raw.ckpt"))
    (tmp_path / make.JOB / "newest").write_bytes(read("newest"))
    storage = open_root(tmp_path)
    assert storage.read_newest(make.JOB) == make.TAG
    part = storage.read_manifest(make.JOB, make.TAG).parts[0]
    reader = storage.open_part(make.JOB, make.TAG, part.file, part.index_sha256)
    try:
        assert (verify(reader), len(reader.plan.items)) == (part.raw_bytes, part.items)
    finally:
        reader.close()


@pytest.mark.parametrize("length", [0, jf.FILE_SIZE], ids=["as it is", "preallocated"])
def test_the_golden_journal_has_every_record(length: int) -> None:
    scan = jf.scan(read("journal.log").ljust(length, b"\0"), 1)
    assert scan.header == make.JOURNAL_HEADER
    assert (scan.ending, scan.end) == (jf.Ending.CLEAN, len(read("journal.log")) - 64)
    assert [(record.sequence, record.durable, record.flags) for record in scan.records] == [
        (1, 0, 0), (2, 1, 0), (3, 1, 0), (4, 1, 0), (5, 1, 0), (6, 5, 0), (7, 5, 0), (8, 5, 0), (9,
        5, 0),
    ]  # fmt: skip
    assert [record.type for record in scan.records] == [r.STATE, *r.TYPES]
    state = r.decode_state(scan.records[0].payload)
    assert state == make.STATE
    records = [r.decode(record.type, record.payload) for record in scan.records[1:]]
    assert tuple(records) == make.RECORDS
    for record in records:
        state.apply(record)
    assert state == r.JournalState(
        jobs={"gpt": r.JobState(attempt=2, world_size=2, sealed_step=1000, seq=7)},
        staged={},
        retiring={"gpt/step-00000100.a0001": [make.PART_FILE]},
    )


def test_the_golden_documents_have_every_field() -> None:
    assert Plan.decode(read("plan.msgpack")) == make.PLAN
    assert SnapshotRequest.decode(read("request.msgpack")) == make.REQUEST
    assert read("newest") == b"step-00001000.a0002\n"


@each_case("message", MESSAGES, ids=make.tag_of)
def test_the_golden_frames_have_every_message(message: m.Message) -> None:
    (payload,) = frames.Decoder().feed(read(f"frames/{make.tag_of(message)}.frame"))
    assert m.decode(payload) == message


def test_golden_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="never overwritten"):
        make.write(tmp_path, {"a": b"1", "b": b"2", "d/c": b"3"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"b": b"old"}
    make.write(tmp_path, {"a": b"1", "d/c": b"3"})
    assert (tmp_path / "d" / "c").read_bytes() == b"3"
    before = read("newest")
    with pytest.raises(FileExistsError):
        make.write(PLACE, {"newest": b"other"})
    assert read("newest") == before


def test_a_checkpoint_of_two_ranks_with_two_files_each() -> None:
    made = make_ranks.files()
    assert {name: read(f"two-ranks/{name}") for name in made} == made
    with ArrayCheckpoint.open(make_ranks.PLACE) as checkpoint:
        found = checkpoint.load()
        assert checkpoint.verify() == sum(part.raw_bytes for part in checkpoint.manifest.parts)
        assert [part.files for part in checkpoint.manifest.parts] == [2, 2]
    assert (
        found | {"model": {name: array.tolist() for name, array in found["model"].items()}}
        == make_ranks.LOADED
    )


def test_the_golden_manifest_of_version_2_and_its_metadata_object() -> None:
    manifest = Manifest.decode((make_v2.PLACE / "manifest.json").read_bytes())
    assert manifest.version == 2
    assert manifest.parts == make_v2.PARTS
    assert manifest.features == ["files", "linked-files", "metadata-object"]
    entry = manifest.metadata_object
    assert entry is not None
    assert {file.name for file in make_v2.PLACE.iterdir()} == {"manifest.json", entry.file}
    with closing(
        MetadataReader(
            source(os.open(make_v2.PLACE / entry.file, os.O_RDONLY)), entry, 4, entry.file
        )
    ) as reader:
        assert reader.meshes == make_v2.MESHES
        assert dict(reader.entries()) == make_v2.METADATA
        assert reader.find("model.divided") == make_v2.METADATA["model.divided"]
        assert reader.verify() == manifest.tensors == 5
