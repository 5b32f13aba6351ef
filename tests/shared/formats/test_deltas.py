"""Tests parts whose chunks are deltas: what was saved is read back, no checkpoint needs
another one, chains are bounded, and a base that is damaged or misplaced is refused.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from crc32c import crc32c
from obstore.store import MemoryStore

from ckptd.shared.codecs.delta import DELTA, MOST_DELTAS
from ckptd.shared.codecs.planes import word_size
from ckptd.shared.codecs.speeds import Speeds
from ckptd.shared.errors import CkptdError, IntegrityError
from ckptd.shared.formats import part
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.part import PartIndex, encode_end, encode_header
from ckptd.shared.formats.plan import MAX_CHUNK, MIN_CHUNK
from ckptd.shared.formats.reuse import most_deltas
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import parse_part_file, part_file
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.storage_seam import Source
from tests.support.cases import each_case
from tests.support.parts import PLAN, RANGES, SLOT, Parts, tag_of


def noise(seed: int) -> bytearray:
    """Return a slot of random bytes, with zeros in the gaps between its regions."""
    draw, made = random.Random(seed), bytearray(len(SLOT))
    for chunk in RANGES:
        made[chunk.offset : chunk.offset + chunk.length] = draw.randbytes(chunk.length)
    return made


START = noise(0)


_PLACES = np.concatenate([np.arange(c.offset, c.offset + c.length) for c in RANGES])


def drifted(slot: bytearray, seed: int, share: float = 0.01) -> bytearray:
    """Return the slot after a step that changes this share of its bytes by one."""
    draw, made = np.random.default_rng(seed), bytearray(slot)
    places = draw.choice(_PLACES, int(share * len(_PLACES)), replace=False)
    np.frombuffer(made, np.uint8)[places] += draw.choice([1, 255], len(places)).astype(np.uint8)
    return made


@pytest.fixture(params=["posix", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Parts:
    return Parts(
        Repository(
            PosixStorage(tmp_path)
            if request.param == "posix"
            else ObjectStorage(Bucket(MemoryStore(), "memory://x"), "0" * 16)
        )
    )


@pytest.fixture
def disk(tmp_path: Path) -> Parts:
    return Parts(Repository(PosixStorage(tmp_path)))


def chain(parts: Parts, steps: int, share: float = 0.01, **options: Any) -> None:
    """Save `steps` steps, from 1 on, all but the first one as deltas."""
    slot = START
    for step in range(1, steps + 1):
        parts.save(step, slot, share=share, **options)
        slot = drifted(slot, step)


@pytest.mark.parametrize("codec_name", ["zstd", "planes"])
@pytest.mark.parametrize(("files", "most"), [(1, 0), (3, 0)])
def test_deltas_are_read_back(
    root: Parts, codec_name: str, files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "PIECE", 4096)  # deltas are added to several pieces of a chunk
    chain(root, 6, files=files, codec_name=codec_name, most=most)
    for step in range(1, 7):
        root.check(step)
        reader = root.open(step)
        assert reader.longest_chain == root.entries[step].chain == step - 1
        if step > 1:
            deltas = sum(c.raw_length for c in reader.index.chunks if c.codec == DELTA)
            assert deltas > 0.9 * root.entries[step].raw_bytes
            assert reader.read_bytes == root.entries[step].read_bytes
            assert root.entries[step].new_bytes < root.entries[1].bytes / 4
        reader.close()


def test_a_chain_is_read_into_pieces_of_whole_words(disk: Parts) -> None:
    chain(disk, 4)
    reader, read, wrong = disk.open(4), 0, list[tuple[int, int]]()
    for number, chunk in enumerate(RANGES):
        wanted = disk.slots[4][chunk.offset : chunk.offset + chunk.length]
        third = chunk.length // 3 // 8 * 8
        for first in (0, third, third + 1) if third else ():
            found = memoryview(bytearray(chunk.length))
            pieces = [found[:first], found[first : 2 * third], found[2 * third :]]
            whole_words = first % word_size(chunk.element_size) == 0
            readable = whole_words or reader.index.chunks[number].codec != DELTA
            answer = reader.read_pieces(number, pieces)
            read += answer
            if answer != readable or bytes(found) != bytes(wanted if readable else len(found)):
                wrong.append((number, first))
    reader.close()
    assert wrong == []
    assert 0 < read < 3 * len(RANGES)


def test_the_files_of_a_chain_are_opened_once(disk: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = threading.Semaphore(3)
    monkeypatch.setattr(part, "_FILES", limit)
    chain(disk, 6)
    reader, opened = disk.open(6), list[Source]()
    open_file = reader._open_file
    assert open_file is not None

    def noted(name: str) -> Source:
        opened.append(open_file(name))
        return opened[-1]

    reader._open_file = noted
    for _ in range(2):
        for number, chunk in enumerate(RANGES):
            reader.read_chunk(number, memoryview(bytearray(chunk.length)))
    names = len(reader.index.files)
    assert names > 3
    assert len(set(map(id, reader._open.values()))) == 3, "no more than the limit stay open"
    in_turn = len(opened) - 3
    assert in_turn % 2 == 0, "each of the other files is opened for each chunk"
    reader.close()
    assert len(opened) > 3
    for source in opened:
        with pytest.raises((OSError, ValueError)):
            source.read(memoryview(bytearray(8)), 0)
    assert all(limit.acquire(blocking=False) for _ in range(3))


def test_no_checkpoint_needs_another_one(root: Parts) -> None:
    chain(root, 5, codec_name="planes")
    for step in (1, 2, 4, 3):
        root.delete(step)
        root.check(5)


def test_without_deltas_nothing_in_a_part_is_new(disk: Parts) -> None:
    """Older readers read a checkpoint without deltas."""
    disk.save(1, SLOT, codec_name="planes")
    disk.save(2, drifted(SLOT, 1), codec_name="planes")
    for step in (1, 2):
        reader = disk.open(step)
        assert (reader.index.bases, reader.index.based, reader.longest_chain) == ([], [], 0)
        reader.close()
    assert manifest_of(disk, 2).features == []


def manifest_of(parts: Parts, step: int) -> Manifest:
    return Manifest.of(
        PLAN, SnapshotRequest(), [parts.entries[step]], job="gpt", attempt=2, step=step,
        tag=tag_of(step), seq=1, codec="planes",
    )  # fmt: skip


def test_the_manifest_says_that_a_reader_must_know_deltas(disk: Parts) -> None:
    chain(disk, 2, codec_name="planes")
    manifest = Manifest.decode(manifest_of(disk, 2).encode())
    assert manifest.features == ["files", "linked-files", "deltas"]
    assert (manifest.parts[0].chain, manifest.parts[0].read_bytes) == (
        1,
        disk.entries[2].read_bytes,
    )


def test_chains_are_bounded_by_their_bytes(disk: Parts) -> None:
    """A chunk is written whole again before its deltas have half the bytes of it."""
    chain(disk, 30, share=0.1, codec_name="zstd")
    lengths = [disk.entries[step].chain for step in range(1, 31)]
    assert 0 in lengths[1:]
    assert max(lengths) > 3
    for step in range(1, 31):
        disk.check(step)
        entry = disk.entries[step]
        assert entry.read_bytes <= 1.6 * disk.entries[1].bytes, "1.5, and what was expected wrongly"


def test_chains_are_bounded_by_their_length(disk: Parts) -> None:
    chain(disk, 9, share=0.001, codec_name="planes", most_deltas=3)
    assert [disk.entries[step].chain for step in range(1, 10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_chunk_that_does_not_shrink_is_written_whole(disk: Parts) -> None:
    disk.save(1, START, codec_name="planes")
    other = noise(5)
    disk.save(2, other, codec_name="planes", share=0.01)
    disk.check(2)
    reader = disk.open(2)
    assert DELTA not in {chunk.codec for chunk in reader.index.chunks}
    reader.close()


@pytest.mark.parametrize("known", [1, 2, 3, 4])
def test_a_reader_with_an_older_version_reads_only_the_deltas_since(
    disk: Parts, known: int
) -> None:
    chain(disk, 4, codec_name="planes")
    assert len(RANGES) > 9
    reader, older = disk.open(4), disk.slots[known]
    deltas, whole = reader._chain(RANGES.index(max(RANGES, key=lambda chunk: chunk.length)))
    older_files = [link.file for link in (whole, *deltas) if isinstance(link, part.Base)][:known]
    assert len(older_files) == min(known, 3)
    for file in older_files:
        path_of(disk, 4, file).write_bytes(b"")  # it is open, and read no more
    for number, chunk in enumerate(RANGES):
        here = slice(chunk.offset, chunk.offset + chunk.length)
        raw = bytearray(older[here])
        if reader.index.chunks[number].codec == DELTA:
            assert reader.update_chunk(number, memoryview(raw), crc32c(raw))
            assert raw == disk.slots[4][here]
        else:
            raw[0] ^= 1
            assert not reader.update_chunk(number, memoryview(raw), crc32c(raw))
    reader.close()


def test_a_reader_with_other_bytes_reads_the_whole_chain(disk: Parts) -> None:
    chain(disk, 3, codec_name="planes")
    assert len(RANGES) > 9
    reader, other = disk.open(3), noise(9)
    for number, chunk in enumerate(RANGES):
        raw = other[chunk.offset : chunk.offset + chunk.length]
        assert not reader.update_chunk(number, memoryview(raw), crc32c(raw))
    reader.close()


def test_a_delta_that_is_longer_than_expected_is_not_written(disk: Parts) -> None:
    """Samples may miss what has changed. A chunk is never read from more than it was
    expected to be.
    """
    disk.save(1, START, codec_name="planes")
    for step, (share, written) in enumerate([(0.01, False), (0.3, True)], 2):
        newer = drifted(disk.slots[step - 1], step, 0.1)
        disk.save(step, newer, codec_name="planes", share=share)
        disk.check(step)
        reader = disk.open(step)
        codecs = {c.codec for c in reader.index.chunks if c.raw_length == MIN_CHUNK}
        assert (DELTA in codecs) is written
        reader.close()


class _Slow(Speeds):
    """A node on which a part takes a second, and each delta 0.02 seconds."""

    def __init__(self) -> None:
        super().__init__(1, itertools.count(0, 0.02).__next__)

    def whole_seconds(self, nbytes: float, stored: float) -> float:
        return 1.0


def test_deltas_are_given_up_once_those_in_vain_have_cost_three_hundredths_of_the_time(
    disk: Parts,
) -> None:
    """The other chunks are stored whole at once, and the next save knows those that were
    tried.
    """
    disk.speeds = _Slow()
    disk.save(1, START, codec_name="planes")
    disk.save(2, drifted(START, 2, 0.1), codec_name="planes", share=0.01)
    disk.check(2)
    assert len(disk.writer.offers) > 4
    assert len(disk.writer.in_vain) == 2
    assert disk.writer.in_vain < disk.writer.offers.keys()


def test_chunks_with_deltas_are_in_files_of_their_own(disk: Parts) -> None:
    """The chunks that change entirely would otherwise be kept as long as the bases."""
    few, slot = set(range(3)), START
    for step in range(1, 6):
        disk.save(step, slot, codec_name="planes", share=0.01, numbers=few)
        disk.check(step)
        fresh = noise(step)
        for number in few:
            here = slice(RANGES[number].offset, RANGES[number].offset + RANGES[number].length)
            fresh[here] = drifted(slot, step)[here]
        slot = fresh
    assert [disk.entries[step].chain for step in range(1, 6)] == [0, 0, 1, 2, 3]
    kept = sum(RANGES[number].length for number in few)
    assert disk.entries[5].linked_bytes < 2 * kept


class _Failing:
    """A linker that fails for one of the files that it is asked for."""

    def __init__(self, linker: Any, fails: int) -> None:
        self.linker, self.fails, self.names = linker, fails, set[str]()

    def link(self, older: Any, name: str) -> bool:
        self.names.add(older.name)
        if older.name == sorted(self.names)[0] and self.fails:
            return False
        return bool(self.linker.link(older, name))

    def remove(self, name: str) -> None:
        self.linker.remove(name)


def test_a_base_that_cannot_be_linked_means_a_whole_chunk(
    disk: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain(disk, 3, codec_name="planes")
    real = disk.repository.linker
    monkeypatch.setattr(disk.repository, "linker", lambda *place: _Failing(real(*place), fails=1))
    disk.save(4, drifted(disk.slots[3], 9), codec_name="planes", share=0.01)
    disk.check(4)
    assert disk.entries[4].chain == 0
    assert len(disk.repository.files("gpt", tag_of(4))) == disk.entries[4].files


def test_a_part_links_no_file_of_a_base_without_a_delta(disk: Parts) -> None:
    """The chunks of one of the two files before are written whole after all."""
    few = [n for n, chunk in enumerate(RANGES) if chunk.length == MIN_CHUNK][:4]
    disk.save(1, START)
    disk.save(2, drifted(START, 1), share=0.01, numbers=few, most_deltas=0)
    slot = noise(7)
    disk.save(3, slot, share=0.01)
    assert disk.writer.in_vain
    disk.check(3)
    assert (disk.entries[3].linked_bytes, disk.entries[3].read_bytes) == (0, 0)
    assert len(disk.repository.files("gpt", tag_of(3))) == disk.entries[3].files
    reader = disk.open(3)
    assert not reader.index.bases
    assert not reader.index.linked
    reader.close()
    mixed = bytearray(noise(8))  # only some deltas pay
    for number in few:
        here = slice(RANGES[number].offset, RANGES[number].offset + RANGES[number].length)
        mixed[here] = drifted(slot, 9)[here]
    disk.save(4, mixed, share=0.01, numbers=range(len(RANGES)))
    disk.check(4)
    reader = disk.open(4)
    used = {reader.index.bases[base - 1].file for base in reader.index.based if base}
    assert used == {link.number for link in reader.index.linked}
    assert len(reader.index.bases) == len(few)
    reader.close()


@each_case(("left", "most"), [(-1, 0), (0, 0), (1, 0), (2, 1), (9, 8), (90, 16)])
def test_one_checkpoint_outside_a_chain_is_left(left: int, most: int) -> None:
    assert most_deltas(left) == most


# -- damage


def path_of(disk: Parts, step: int, number: int = 0) -> Path:
    parsed = parse_part_file(disk.entries[step].file)
    assert parsed is not None
    return Path(disk.repository.where("gpt", tag_of(step), part_file(*parsed, number)))


def test_damage_anywhere_in_a_chain_is_found(disk: Parts) -> None:
    chain(disk, 4, codec_name="planes")
    index = disk.open(4).index
    places = [(base.file, base.offset, base.stored_length) for base in index.bases]
    places += [
        (file, chunk.offset, chunk.stored_length)
        for chunk, file in zip(index.chunks, index.placed, strict=True)
    ]
    for file, offset, length in random.Random(1).sample(places, 40):
        path = path_of(disk, 4, file)
        sound = path.read_bytes()
        damaged = bytearray(sound)
        damaged[offset + length // 2] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError):
            disk.check(4)
        path.write_bytes(sound)
    disk.check(4)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_base_is_damage(disk: Parts, number: int) -> None:
    chain(disk, 4, codec_name="planes")
    path_of(disk, 4, number).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        disk.open(4)


def _rewritten(disk: Parts, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index of a part whose part file holds no chunk, and seal it again."""
    path, reader = path_of(disk, step), disk.open(step)
    index = msgspec.msgpack.decode(reader.index.encode())
    change(index)
    document = msgspec.msgpack.encode(index)
    data = path.read_bytes()
    head = encode_header(msgspec.convert({**index}, PartIndex), data[16:32])
    path.write_bytes(head + encode_end(ALIGN, document))
    disk.entries[step] = msgspec.structs.replace(disk.entries[step], index_sha256=None)
    reader.close()


def _delta(index: dict[str, Any]) -> list[Any]:
    """Return the first base that is a delta."""
    return next(base for base in index["bases"] if base[3] == DELTA)


def _base(number: int, field: int, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["bases"][number].__setitem__(field, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["based"].pop(), "other bases"),
        (lambda index: index["based"].__setitem__(1, len(index["bases"]) + 1), "other bases"),
        (lambda index: index["based"].__setitem__(1, 0), "has no base, or needs none"),
        (lambda index: index["chunks"][1].__setitem__(4, 2), "has no base, or needs none"),
        (_base(0, 0, 0), "misplaced"),
        (_base(0, 1, ALIGN + 1), "misplaced"),
        (_base(0, 1, 1 << 40), "misplaced"),
        (_base(0, 2, 0), "misplaced"),
        (_base(0, 2, MAX_CHUNK + 1), "misplaced"),
        (_base(0, 3, DELTA), "misplaced"),
        (_base(0, 6, 1), "misplaced"),
        (lambda index: _delta(index).__setitem__(6, 1 << 20), "misplaced"),
        (
            lambda index: _delta(index).__setitem__(6, 1 + index["bases"].index(_delta(index))),
            "misplaced",
        ),
        (lambda index: _delta(index).__setitem__(6, 0), "misplaced"),
    ],
)
def test_a_hostile_chain_is_refused(
    disk: Parts, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    chain(disk, 3, codec_name="planes")
    _rewritten(disk, 3, lambda index: None)
    disk.open(3).close()
    _rewritten(disk, 3, change)
    with pytest.raises(IntegrityError, match=message):
        disk.open(3)


def test_a_chain_that_is_too_long_is_refused(disk: Parts) -> None:
    chain(disk, 3, codec_name="planes")

    def extended(index: dict[str, Any]) -> None:
        for _ in range(MOST_DELTAS):
            index["bases"].append([*_delta(index)[:6], len(index["bases"])])
        index["based"][1] = len(index["bases"])

    _rewritten(disk, 3, extended)
    with pytest.raises(CkptdError, match="expected at most 64"):
        disk.open(3)
