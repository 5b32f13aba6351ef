"""Tests the way from a sealed slot to a durable part: what is read is checked, and a
part is whole or not there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.daemon.chunks import base_slot
from ckptd.daemon.chunks.base_slot import BaseSlot
from ckptd.daemon.chunks.pipeline import Pipeline, first_and_rest
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.shared.codecs import codec
from ckptd.shared.codecs.codec import RAW
from ckptd.shared.codecs.delta import DELTA
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.part_writer import PartWriter
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.reuse import ChunkCheck, StoredPart
from ckptd.shared.formats.scatter import verify
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import new_nonce
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.fs import Buffer, FileSystem, PosixFileSystem
from tests.shared.samples import NONCE, memory_file, packed_slot, sample_plan, seal, values_after
from tests.support.storage import files_in, source

PLAN = sample_plan(50_000)  # several chunks
OLDER, TAG = "step-00000004.a0001", "step-00000005.a0001"
HEADER = SegmentHeader(
    job="gpt", attempt=1, rank=0, world_size=1, slot=0, capacity=300_000, chunk_size=MIN_CHUNK
)


@pytest.fixture
def fd() -> Iterator[int]:
    with memory_file(bytes(HEADER.file_length)) as made:
        yield made


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    made = Pipeline(2, 1 << 20, MIN_CHUNK)
    yield made
    made.close()


def part(
    pipeline: Pipeline,
    slot: SealedSlot,
    directory: Path,
    *,
    codec_name: str = "raw",
    change: bool = False,
    fs: FileSystem | None = None,
) -> PartReader:
    """Make the checksums, then the part.

    With `change`, a byte of the slot changes in between.
    """

    async def save() -> str:
        found = await pipeline.checksum(slot)
        if change:
            os.pwrite(slot.fd, b"?", slot.header.data_offset + 100_000)

        async def checks() -> list[ChunkCheck]:
            return found

        entry, _ = await pipeline.write_part(
            slot, PartWriter(files_in(directory, fs), NONCE, codec.encoder(codec_name)), TAG, checks
        )
        return entry.file

    file = asyncio.run(save())
    return PartReader(source(os.open(directory / file, os.O_RDONLY)), file)


@pytest.mark.parametrize("codec_name", ["raw", "zstd:1", "planes"])
def test_a_part_holds_the_slot_and_its_documents(
    fd: int, pipeline: Pipeline, tmp_path: Path, codec_name: str
) -> None:
    slot = SealedSlot.read(
        fd, seal(fd, HEADER, PLAN, request=SnapshotRequest(tag="mine", metrics={"loss": 0.5}))
    )
    assert len(slot.ranges) > 3
    reader = part(pipeline, slot, tmp_path, codec_name=codec_name)
    wanted = packed_slot(PLAN, values_after(PLAN))
    for number, chunk in enumerate(slot.ranges):
        raw = bytearray(chunk.length)
        reader.read_chunk(number, memoryview(raw))
        assert raw == wanted[chunk.offset : chunk.offset + chunk.length]
    assert (reader.plan, SnapshotRequest.decode(reader.index.request)) == (
        PLAN,
        SnapshotRequest(tag="mine", metrics={"loss": 0.5}),
    )
    assert (reader.index.job, reader.index.attempt, reader.index.step, reader.index.tag) == (
        "gpt",
        1,
        5,
        TAG,
    )
    assert pipeline.bytes_read == sum(chunk.length for chunk in slot.ranges)
    reader.close()


def test_a_slot_with_larger_chunks_than_the_present_setting_is_saved(
    fd: int, pipeline: Pipeline, tmp_path: Path
) -> None:
    """The slot was made before a restart with another chunk_size."""
    header = replace(HEADER, chunk_size=4 * MIN_CHUNK)
    slot = SealedSlot.read(fd, seal(fd, header, PLAN))
    assert max(chunk.length for chunk in slot.ranges) > MIN_CHUNK
    reader = part(pipeline, slot, tmp_path)
    assert verify(reader) == sum(chunk.length for chunk in slot.ranges)
    reader.close()


def test_a_segment_cut_short_is_refused(fd: int, pipeline: Pipeline) -> None:
    slot = SealedSlot.read(fd, seal(fd, HEADER, PLAN))
    os.ftruncate(fd, HEADER.data_offset + 90_000)
    with pytest.raises(
        IntegrityError, match="the slot of step 5 has been cut short: that copy in memory is lost"
    ):
        asyncio.run(pipeline.checksum(slot))


def test_memory_that_changes_after_the_checksums_leaves_no_part(
    fd: int, pipeline: Pipeline, tmp_path: Path
) -> None:
    slot = SealedSlot.read(fd, seal(fd, HEADER, PLAN))
    with pytest.raises(
        IntegrityError, match="chunk [0-9] of gpt step 5 has changed in memory since it was sealed"
    ):
        part(pipeline, slot, tmp_path, change=True)
    assert os.listdir(tmp_path) == []


def test_a_changed_chunk_is_not_linked_because_its_old_checksum_is_that_of_the_part_before(
    fd: int, pipeline: Pipeline, tmp_path: Path
) -> None:
    slot = SealedSlot.read(fd, seal(fd, HEADER, PLAN))

    async def save_twice() -> None:
        crcs = [ChunkCheck(check.crc) for check in await pipeline.checksum(slot)]

        async def checks() -> list[ChunkCheck]:
            return crcs

        writer = PartWriter(files_in(tmp_path), NONCE, codec.encoder("raw"))
        _, before = await pipeline.write_part(slot, writer, TAG, checks, with_digests=True)
        same = await pipeline._with_digests(slot, before, crcs)
        assert [check.digest for check in same] == before.digests
        os.pwrite(fd, b"?", slot.header.data_offset + 100_000)
        again = PartWriter(files_in(tmp_path), NONCE[::-1], codec.encoder("raw"))
        await pipeline.write_part(slot, again, TAG, checks, before=before, with_digests=True)

    with pytest.raises(
        IntegrityError, match="chunk [0-9] of gpt step 5 has changed in memory since it was sealed"
    ):
        asyncio.run(save_twice())


def test_a_chunk_that_its_samples_take_for_a_short_delta_is_stored_whole(
    fd: int, pipeline: Pipeline, tmp_path: Path
) -> None:
    """The chunk has changed between its samples. When its delta turns out to be too long,
    the delta has overwritten the buffer of the chunk.
    """
    repository = Repository(PosixStorage(tmp_path))

    async def save(
        slot: SealedSlot, tag: str, before: StoredPart | None = None, base: BaseSlot | None = None
    ) -> tuple[PartEntry, StoredPart]:
        place = "gpt", tag
        writer = PartWriter(
            repository.part_files(*place), new_nonce(), codec.encoder("planes"),
            linker=repository.linker(*place),
        )  # fmt: skip
        return await pipeline.write_part(
            slot, writer, tag, lambda: pipeline.checksum(slot),
            before=before, base_slot=base, most_deltas=1,
        )  # fmt: skip

    with memory_file(bytes(HEADER.file_length)) as older:
        base = BaseSlot(older, seal(older, HEADER, PLAN))
        _, before = asyncio.run(save(SealedSlot.read(older, base.header), OLDER))
        slot = SealedSlot.read(fd, seal(fd, HEADER, PLAN))
        chunk = slot.ranges[3]
        os.pwrite(fd, random.Random(1).randbytes(chunk.length), HEADER.data_offset + chunk.offset)
        for offset, length in base_slot._samples(chunk):
            at = HEADER.data_offset + offset
            os.pwrite(fd, os.pread(older, length, at), at)
        assert base.foreseen(slot, chunk) == base.foreseen(slot, slot.ranges[2])
        entry, _ = asyncio.run(save(slot, TAG, before, base))
    with closing(repository.open_part("gpt", TAG, entry.file, entry.index_sha256)) as reader:
        assert [found.codec for found in reader.index.chunks[2:4]] == [DELTA, RAW]
        assert verify(reader) == entry.raw_bytes


@pytest.mark.parametrize(
    ("chunks", "sampled"), [(0, 0), (1, 1), (7, 7), (8, 4), (20, 4), (40, 5), (160, 20)]
)
def test_few_chunks_are_sampled_before_the_rest(chunks: int, sampled: int) -> None:
    """The chunks that are sampled first are from all over the part, and others each time."""
    numbers, seen = list(range(chunks)), set[int]()
    for turn in range(8):
        first, rest = first_and_rest(numbers, turn)
        assert sorted(first + rest) == numbers
        assert len(first) == sampled
        seen |= set(first)
    assert seen == set(numbers)


def test_every_chunk_has_a_result_or_nothing_is_written(
    fd: int, pipeline: Pipeline, tmp_path: Path
) -> None:
    slot = SealedSlot.read(fd, seal(fd, HEADER, PLAN))
    pipeline._memory.threads = 0  # no worker does anything, and none fails
    with pytest.raises(IntegrityError, match=f"there are 0 results for {len(slot.ranges)} chunks"):
        part(pipeline, slot, tmp_path)
    assert os.listdir(tmp_path) == []


def test_an_error_of_any_worker_fails_the_part(fd: int, tmp_path: Path) -> None:
    """pytorch/pytorch#191391: DCP's threads lost the error, and the checkpoint lacked
    tensors.
    """

    class Full(PosixFileSystem):
        writes = 0

        def write(self, fd: int, data: Buffer, offset: int) -> None:
            self.writes += 1
            if self.writes == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(fd, data, offset)

    pipeline = Pipeline(2, 1 << 20, MIN_CHUNK)
    slot = SealedSlot.read(fd, seal(fd, HEADER, PLAN))
    with pytest.raises(OSError, match="No space left"):
        part(pipeline, slot, tmp_path, fs=Full())
    assert os.listdir(tmp_path) == []
    pipeline.close()
