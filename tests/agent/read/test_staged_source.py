"""Tests that staged chunks are read once, and that chunks that are kept from the version
before are not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptd.agent.read.saved import Saved
from ckptd.agent.read.slot_source import SlotSource
from ckptd.agent.read.staged_source import (
    ChunkMemory,
    StagedSource,
    chunks_of,
    digest,
    fingerprint,
    slots_of,
    staged_source,
)
from ckptd.shared.errors import IntegrityError, InvalidRequest
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.scatter import scatter
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from tests.agent.read.test_slot_source import PACKED, PLAN, TENSOR, part
from tests.shared.formats.test_deltas import chain
from tests.support.parts import Parts
from tests.support.tmpfs import sealed_slot


class Counted(PartReader):
    """A part that counts the chunks that are read from it."""

    def __new__(cls, reader: PartReader) -> Counted:
        reader.__class__ = cls
        return reader  # type: ignore[return-value]

    def __init__(self, reader: PartReader) -> None:
        self.chunks: list[int] = []

    def read_chunk(self, number: int, raw: memoryview) -> None:
        self.chunks.append(number)
        super().read_chunk(number, raw)

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        return super().read_pieces(number, pieces)


def read(source: StagedSource) -> bytes:
    raw = bytearray(160_000)
    scatter(source, [(TENSOR.start, memoryview(raw))])
    return bytes(raw)


def test_staged_chunks_are_given_from_memory_and_others_from_the_part() -> None:
    kept = ChunkMemory()
    with part(codec="zstd") as reader:
        source = StagedSource(counted := Counted(reader), 0, kept)
        everything = range(len(source.ranges))
        assert source.stage([0]) == source.ranges[0].length
        assert source.stage([0]) == 0
        assert read(source) == PACKED[TENSOR]
        assert counted.chunks.count(0) == 1
        source.stage(everything)
        before = len(counted.chunks)
        assert read(source) == PACKED[TENSOR]
        assert len(counted.chunks) == before
    assert kept.nbytes == sum(chunk.length for chunk in source.ranges)


def test_only_chunks_whose_checksums_differ_are_read_again() -> None:
    kept = ChunkMemory()
    with part() as reader:
        before = StagedSource(reader, 0, kept)
        everything = range(len(before.ranges))
        before.stage(everything)
    changed = bytearray(PACKED)
    changed[TENSOR.start + 100] ^= 0xFF
    with part(changed) as reader:
        source = StagedSource(counted := Counted(reader), 0, kept)
        places = [chunk.offset for chunk in source.ranges]
        number = places.index(max(place for place in places if place <= TENSOR.start + 100))
        assert source.stage(everything) == source.ranges[number].length
        assert counted.chunks == [number]
        assert read(source) == changed[TENSOR]
    assert kept.nbytes == sum(chunk.length for chunk in source.ranges)
    with part(changed, damaged=True) as reader:
        source = StagedSource(reader, 0, kept)
        assert source.stage(everything) == 0


def test_a_read_that_fails_leaves_nothing_that_could_be_taken_for_sound() -> None:
    kept = ChunkMemory()
    with part(damaged=True) as reader, pytest.raises(IntegrityError):
        StagedSource(reader, 0, kept).stage([0])
    assert [chunk.identity for chunk in kept.chunks.values()] == [None]
    with part() as reader:
        source = StagedSource(reader, 0, kept)
        assert source.stage([0]) == source.ranges[0].length
    changed = bytes([PACKED[0] ^ 1]) + PACKED[1:]
    with part(changed, damaged=True) as reader, pytest.raises(IntegrityError):
        StagedSource(reader, 0, kept).stage([0])
    assert [chunk.identity for chunk in kept.chunks.values()] == [None]


def test_a_slot_is_always_read_and_is_gone_once_it_is_filled_again() -> None:
    kept = ChunkMemory()
    for _ in range(2):
        with sealed_slot(PLAN, SnapshotRequest()) as sealed:
            slot = SlotSource(sealed.fileno(), 1, 5, mapped=False)
            source = StagedSource(slot, 0, kept)
            assert source.stage([0]) == source.ranges[0].length
            assert list(slots_of([source])) == [slot]
            assert not slot.is_gone()
    assert slot.is_gone(), "its descriptor is closed"


def test_a_closed_source_is_not_read() -> None:
    with sealed_slot(PLAN, SnapshotRequest()) as sealed:
        source = StagedSource(SlotSource(sealed.fileno(), 1, 5), 0, ChunkMemory())
        source.stage([0])
        source.close()
        source.close()
        for call in (
            lambda: source.stage([0]),
            lambda: source.read_chunk(0, memoryview(bytearray(source.ranges[0].length))),
            lambda: source.read_pieces(0, []),
        ):
            with pytest.raises(InvalidRequest, match="^this checkpoint is closed"):
                call()


def test_fingerprints_and_digests_follow_the_checksums() -> None:
    changed = bytearray(PACKED)
    changed[TENSOR.start + 100] ^= 0xFF
    found = []
    with (
        part() as one,
        part(codec="zstd") as same,
        part(changed) as other,
        sealed_slot(PLAN, SnapshotRequest()) as sealed,
    ):
        slot = SlotSource(sealed.fileno(), 1, 5)
        for reader in (one, same, slot, other):
            source = StagedSource(reader, 0, ChunkMemory())
            saved = Saved.of([source])
            prints = {name: fingerprint(shards[0]) for name, shards in saved.shards.items()}
            first = saved.shards[next(iter(saved.shards))][0]
            assert staged_source(first.source) is source
            numbers = chunks_of(first)
            assert source.ranges[numbers[0]].offset <= first.item.offset
            found.append((digest([source]), prints))
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[3][0]
    assert found[0][1] != found[3][1]


def test_of_a_chunk_whose_base_is_kept_only_the_deltas_are_read(tmp_path: Path) -> None:
    parts = Parts(Repository(PosixStorage(tmp_path)))
    chain(parts, 4, codec_name="planes")
    kept, fetched = ChunkMemory(), dict[int, int]()
    for step in (1, 2, 4):
        reader = Counted(parts.open(step))
        source = StagedSource(reader, 0, kept)
        source.stage(range(len(source.ranges)))
        fetched[step] = len(reader.chunks)
        found = bytearray(len(parts.slots[step]))
        targets = [
            (c.offset, memoryview(found)[c.offset : c.offset + c.length]) for c in source.ranges
        ]
        scatter(source, targets)
        assert found == parts.slots[step]
        reader.close()
    assert fetched[2] < fetched[1]
    assert fetched[4] < fetched[1]
    for chunk in kept.chunks.values():
        chunk.data.zero_()
    reader = Counted(parts.open(3))
    source = StagedSource(reader, 0, kept)
    source.stage(range(len(source.ranges)))
    assert reader.chunks, "what is kept is damaged: chunks are read as a whole"
    reader.close()
