"""Parts that are written one after another, each with the files of the part before, as
a daemon writes them.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection

from crc32c import crc32c

from ckptd.shared.codecs import codec
from ckptd.shared.codecs.speeds import Speeds
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.part import Chunk, PartIndex, PartReader
from ckptd.shared.formats.part_writer import PartWriter, Spread
from ckptd.shared.formats.plan import MIN_CHUNK, ChunkRange, chunk_ranges, signature, with_values
from ckptd.shared.formats.reuse import (
    MOST_IN_CHAIN,
    NOTHING,
    ChunkCheck,
    StoredPart,
    choose,
    is_steady,
    new_hasher,
)
from ckptd.shared.formats.scatter import scatter, verify
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import new_nonce, tag_directory
from ckptd.shared.storage.repository import Repository
from tests.shared.samples import packed_slot, sample_plan, values_after

PLAN = sample_plan(200_000)  # 800,000 bytes: 13 chunks of 64 KiB, and some small ones
VALUES = values_after(PLAN, 70_000)
SLOT = packed_slot(PLAN, VALUES)
RANGES = chunk_ranges(with_values(PLAN.regions, VALUES), MIN_CHUNK)


def tag_of(step: int) -> str:
    return tag_directory(step, None, 2)


def changed(slot: bytearray, *numbers: int) -> bytearray:
    """Return the slot with other bytes in these chunks."""
    made = bytearray(slot)
    for number in numbers:
        made[RANGES[number].offset] ^= 1
    return made


def checks_of(slot: bytearray) -> list[ChunkCheck]:
    found = []
    for chunk in RANGES:
        raw, hasher = slot[chunk.offset : chunk.offset + chunk.length], new_hasher()
        hasher.update(raw)
        found.append(ChunkCheck(crc32c(raw), hasher.digest()))
    return found


class Parts:
    """The checkpoints of a root.

    `save` writes a part as the daemon does, and remembers it for the next one.
    """

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.before: StoredPart | None = None
        self.speeds = Speeds()
        self.entries: dict[int, PartEntry] = {}
        self.slots: dict[int, bytearray] = {}

    def save(
        self,
        step: int,
        slot: bytearray,
        *,
        files: int = 1,
        codec_name: str = "raw",
        most: int = 0,
        share: float | None = None,
        numbers: Collection[int] = range(len(RANGES)),
        most_deltas: int = MOST_IN_CHAIN,
    ) -> PartEntry:
        """Save a slot. With `share`, the chunks in `numbers` may be deltas, and are
        expected to take this share of their bytes.
        """
        checks, reuse = checks_of(slot), NOTHING
        if self.before is not None:
            shares = {} if share is None else dict.fromkeys(numbers, share)
            reuse = choose(self.before, RANGES, checks, shares, most_deltas)
        index = PartIndex(
            job="gpt", attempt=2, step=step, rank=0, world_size=1, tag=tag_of(step),
            signature=signature(PLAN.encode()), plan=PLAN.encode(),
            request=SnapshotRequest().encode(), values=VALUES, chunk_size=MIN_CHUNK, chunks=[],
        )  # fmt: skip
        place = "gpt", tag_of(step)
        writer = PartWriter(
            self.repository.part_files(*place),
            new_nonce(),
            codec.encoder(codec_name),
            Spread(files, most),
            self.repository.linker(*place),
            self.speeds,
        )
        self.writer = writer
        writer.create(index, RANGES, len(index.plan) + len(index.request), reuse)
        entries = {offset: known.entry for offset, known in reuse.chunks.items()}
        for chunk in writer.ranges:
            entries[chunk.offset] = self._write(writer, chunk, slot)
        entry = writer.finish(
            index, [entries[chunk.offset] for chunk in RANGES], items=len(PLAN.items)
        )
        self.before = writer.stored(
            [check.digest for check in checks], steady=is_steady(self.before, RANGES, checks)
        )
        self.entries[step], self.slots[step] = entry, slot
        return entry

    def _write(self, writer: PartWriter, chunk: ChunkRange, slot: bytearray) -> Chunk:
        raw, other = mmap.mmap(-1, MIN_CHUNK), mmap.mmap(-1, MIN_CHUNK)
        here = slice(chunk.offset, chunk.offset + chunk.length)
        raw[: chunk.length] = slot[here]
        crc, wanted = crc32c(slot[here]), writer.base_of(chunk)
        if wanted is not None:
            base = self.slots[max(self.slots)][here]
            assert crc32c(base) == wanted.raw_crc
            other[: chunk.length] = base
            delta = writer.delta(chunk, memoryview(raw), memoryview(other), crc)
            if delta is not None:
                return delta
            raw[: chunk.length] = slot[here]
        return writer.chunk(chunk, memoryview(raw), memoryview(other), crc)

    def open(self, step: int) -> PartReader:
        entry = self.entries[step]
        return self.repository.open_part("gpt", tag_of(step), entry.file, entry.index_sha256)

    def check(self, step: int) -> None:
        """Read and compare everything."""
        reader, found = self.open(step), bytearray(len(SLOT))
        try:
            scatter(
                reader,
                [(c.offset, memoryview(found)[c.offset : c.offset + c.length]) for c in RANGES],
            )
            assert found == self.slots[step]
            assert verify(reader) == self.entries[step].raw_bytes
            assert (reader.nbytes, reader.linked_bytes) == (
                self.entries[step].bytes,
                self.entries[step].linked_bytes,
            )
            assert 1 + len(reader.index.files) == self.entries[step].files
        finally:
            reader.close()

    def delete(self, step: int) -> None:
        self.repository.delete_files("gpt", tag_of(step), [self.entries[step].file])
        assert self.repository.files("gpt", tag_of(step)) == []
