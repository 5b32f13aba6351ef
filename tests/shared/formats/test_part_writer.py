"""Tests a part in one file or in several: what is written is read, and no file of it
may be missing, cut or swapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c

from ckptd.shared.codecs import codec
from ckptd.shared.errors import IntegrityError, InvalidConfig, NewerFormat
from ckptd.shared.formats.binary import ALIGN, align
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.part import Chunk, PartIndex, PartReader, encode_end, encode_header
from ckptd.shared.formats.part_writer import ONE_FILE, PartWriter, Spread
from ckptd.shared.formats.plan import MIN_CHUNK, ChunkRange, chunk_ranges, signature, with_values
from ckptd.shared.formats.reuse import (
    NOTHING,
    ChunkCheck,
    Linker,
    StoredFile,
    StoredPart,
    choose,
)
from ckptd.shared.formats.scatter import scatter, verify
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import part_file
from ckptd.shared.system.fs import PosixFileSystem
from ckptd.shared.system.storage_seam import Source
from tests.shared.samples import NONCE, packed_slot, resealed, sample_plan, values_after
from tests.support.cases import each_case
from tests.support.descriptors import opened
from tests.support.storage import files_in, source

PLAN = sample_plan(200_000)  # 800,000 bytes: 13 chunks of 64 KiB
VALUES = values_after(PLAN, 70_000)
SLOT = packed_slot(PLAN, VALUES)
RANGES = chunk_ranges(with_values(PLAN.regions, VALUES), MIN_CHUNK)
SMALLEST = 2 * MIN_CHUNK
INDEX = PartIndex(
    job="gpt", attempt=2, step=1000, rank=0, world_size=1, tag="step-00001000.a0002",
    signature=signature(PLAN.encode()), plan=PLAN.encode(), request=SnapshotRequest().encode(),
    values=VALUES, chunk_size=MIN_CHUNK, chunks=[],
)  # fmt: skip


class Place:
    """A directory with one part."""

    def __init__(self, path: Path, fs: PosixFileSystem | None = None) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.fs = fs or PosixFileSystem()

    def write(
        self,
        files_per_rank: int = 1,
        bytes_per_file: int = 0,
        codec_name: str = "raw",
        order: list[int] | None = None,
    ) -> PartEntry:
        writer = PartWriter(
            files_in(self.path, self.fs),
            NONCE,
            codec.encoder(codec_name),
            Spread.checked(files_per_rank, bytes_per_file, MIN_CHUNK),
        )
        try:
            writer.create(INDEX, RANGES, len(INDEX.plan) + len(INDEX.request))
            chunks: dict[int, Chunk] = {}
            for number in order or range(len(RANGES)):
                chunk, raw, stored = (
                    RANGES[number],
                    mmap.mmap(-1, MIN_CHUNK),
                    mmap.mmap(-1, MIN_CHUNK),
                )
                raw[: chunk.length] = SLOT[chunk.offset : chunk.offset + chunk.length]
                chunks[number] = writer.chunk(
                    chunk,
                    memoryview(raw),
                    memoryview(stored),
                    crc32c(memoryview(raw)[: chunk.length]),
                )
            return writer.finish(
                INDEX, [chunks[number] for number in range(len(RANGES))], items=len(PLAN.items)
            )
        except BaseException:
            writer.discard()
            raise

    def lengths(self) -> list[int]:
        """Return the lengths of the files, the part itself first."""
        names = [part_file(0, NONCE, number) for number in range(len(os.listdir(self.path)))]
        assert sorted(names) == sorted(os.listdir(self.path))
        return [(self.path / name).stat().st_size for name in names]

    def data_file(self, number: int = 1) -> Path:
        return self.path / part_file(0, NONCE, number)

    def read(self, index_sha256: str | None = None, *, alone: bool = False) -> PartReader:
        def beside(name: str) -> Source:
            return source(os.open(self.path / name, os.O_RDONLY))

        return PartReader(beside(part_file(0, NONCE)), "p", index_sha256, None if alone else beside)

    def check(self) -> int:
        """Read and compare everything."""
        reader = self.read()
        try:
            found = bytearray(len(SLOT))
            scatter(
                reader,
                [
                    (chunk.offset, memoryview(found)[chunk.offset : chunk.offset + chunk.length])
                    for chunk in RANGES
                ],
            )
            assert found == SLOT
            return verify(reader)
        finally:
            reader.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    os.close(made.fd)


@pytest.mark.parametrize("codec_name", ["raw", "zstd:1", "planes"])
@pytest.mark.parametrize(
    ("files", "most"),
    [(1, 0), (3, 0), (64, 0), (1, SMALLEST), (3, SMALLEST), (2, 5 * MIN_CHUNK), (1, 1 << 40)],
)
def test_what_goes_in_comes_out(place: Place, files: int, most: int, codec_name: str) -> None:
    entry = place.write(files, most, codec_name)
    lengths = place.lengths()
    assert place.check() == entry.raw_bytes == 800_000 + 70_000 + 21
    assert (entry.files, entry.bytes) == (len(lengths), sum(lengths))
    if not most:
        assert len(lengths) == min(files, len(RANGES))
    assert all(length > ALIGN for length in lengths)  # no file is without a chunk
    assert not most or max(lengths) <= most
    reader = place.read(entry.index_sha256)
    assert (reader.nbytes, 1 + len(reader.index.files)) == (entry.bytes, entry.files)
    reader.close()


def test_chunks_are_spread_evenly(place: Place) -> None:
    place.write(4)
    lengths = place.lengths()
    assert max(lengths) - min(lengths) <= MIN_CHUNK + ALIGN


def test_a_limit_of_bytes_splits_a_longer_part(place: Place) -> None:
    entry = place.write(1, 4 * MIN_CHUNK)
    # Three chunks of 64 KiB and a header in each; 14 chunks of that size, some smaller
    # ones, and the index.
    assert entry.files == 5
    assert place.check() == entry.raw_bytes


def test_chunks_may_come_in_any_order(place: Place) -> None:
    order = list(range(len(RANGES)))
    random.Random(3).shuffle(order)
    place.write(3, SMALLEST, "zstd:1", order)
    place.check()


def test_a_part_in_one_file_has_the_old_format(place: Place) -> None:
    """It has no new key and no feature bit, so that an older ckptd reads it."""
    place.write(1, 1 << 40)
    reader = place.read(alone=True)
    data = place.path.joinpath(part_file(0, NONCE)).read_bytes()
    assert data[12:16] == bytes(4)
    assert not {"files", "placed"} & set(msgspec.msgpack.decode(reader.index.encode()))
    reader.close()


def test_a_part_in_several_files_has_a_feature_bit_that_older_versions_refuse(place: Place) -> None:
    place.write(2)
    assert [path.read_bytes()[12:16] for path in place.path.iterdir()] == [b"\1\0\0\0"] * 2
    part = place.path / part_file(0, NONCE)
    part.write_bytes(resealed(part.read_bytes(), 12, 9, start=0, body=184))
    with pytest.raises(NewerFormat, match="features 0x9"):
        place.read()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (
            lambda path: path.unlink(),
            rf"^p: its data file rank-00000\.{NONCE.hex()}\.0002\.ckpt is missing",
        ),
        (
            lambda path: os.truncate(path, path.stat().st_size - ALIGN),
            "^p: its data file 2 is not as long as the index says",
        ),
        (
            lambda path: os.truncate(path, path.stat().st_size + ALIGN),
            "^p: its data file 2 is not as long as the index says",
        ),
        (
            lambda path: path.write_bytes(path.with_name(part_file(0, NONCE, 1)).read_bytes()),
            "^p: its data file 2 ",
        ),
    ],
    ids=["gone", "cut", "longer", "another"],
)
def test_a_missing_cut_long_or_swapped_data_file_is_refused(
    place: Place, damage: Callable[[Path], Any], why: str
) -> None:
    place.write(3)
    damage(place.data_file(2))
    with pytest.raises(IntegrityError, match=why):
        place.read()


def test_a_data_file_swapped_for_one_of_the_same_length_is_refused(place: Place) -> None:
    place.write(14)
    one, other = place.data_file(3), place.data_file(4)
    assert one.stat().st_size == other.stat().st_size
    other.write_bytes(one.read_bytes())
    with pytest.raises(IntegrityError, match="^p: its data file 4 belongs to another part"):
        place.read()


def test_a_data_file_that_disappears_before_it_is_read_is_an_integrity_error(place: Place) -> None:
    place.write(2)
    reader = place.read()
    place.data_file().unlink()
    with pytest.raises(IntegrityError, match=r"its data file rank-.* is missing"):
        verify(reader)
    reader.close()


def test_a_part_without_its_data_files_is_refused(place: Place) -> None:
    place.write(2)
    with pytest.raises(IntegrityError, match=r"its data file .* is missing"):
        place.read(alone=True)


def test_random_flips_are_seen_in_every_file(place: Place) -> None:
    place.write(3, codec_name="zstd:1")
    chance = random.Random(5)
    paths = sorted(place.path.iterdir())
    assert len(paths) == 3
    for path in paths:
        data = path.read_bytes()
        for bit in [*chance.sample(range(8 * 200), 20), *chance.sample(range(8 * len(data)), 60)]:
            path.write_bytes(
                data[: bit >> 3]
                + bytes([data[bit >> 3] ^ (1 << (bit & 7))])
                + data[(bit >> 3) + 1 :]
            )
            with pytest.raises(IntegrityError, match=r"^p: "):
                verify(place.read())
        path.write_bytes(data)
    place.check()


def test_a_damaged_chunk_names_its_place(place: Place) -> None:
    place.write(2)
    path = place.data_file()
    data = bytearray(path.read_bytes())
    data[ALIGN] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        IntegrityError,
        match=r"^p: chunk \d+ \(bytes 4096 to \d+ of data file 1\) does not match its checksum",
    ):
        verify(place.read())


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(files=[]),
        lambda d: d.update(placed=[]),
        lambda d: d.pop("placed"),
        lambda d: d["placed"].pop(),
        lambda d: d["placed"].append(0),
        lambda d: d["placed"].__setitem__(0, 1 - d["placed"][0]),
        lambda d: d["placed"].__setitem__(0, 7),
        lambda d: d["placed"].__setitem__(0, -1),
        lambda d: d["files"].append(ALIGN),
        lambda d: d["files"].__setitem__(0, d["files"][0] + ALIGN),
        lambda d: d["files"].__setitem__(0, 1 << 62),
        lambda d: d.update(files=[d["files"][0]] * (1 << 20)),
    ],
)
def test_a_forged_index_is_refused(place: Place, change: Callable[[dict[str, Any]], Any]) -> None:
    place.write(2)
    reader = place.read()
    plain: dict[str, Any] = msgspec.msgpack.decode(reader.index.encode())
    end = ALIGN + sum(
        align(chunk.stored_length)
        for chunk, file in zip(reader.index.chunks, reader.index.placed, strict=True)
        if file == 0
    )
    data = place.path.joinpath(part_file(0, NONCE)).read_bytes()[:end]
    change(plain)
    try:
        header = encode_header(
            msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=PartIndex), NONCE
        )
    except msgspec.ValidationError:
        header = data[:ALIGN]
    (place.path / part_file(0, NONCE)).write_bytes(
        header + data[ALIGN:] + encode_end(end, msgspec.msgpack.encode(plain))
    )
    with pytest.raises(IntegrityError, match=r"^p: "):
        place.read()


class Full(PosixFileSystem):
    def __init__(self, creations: int) -> None:
        self.left = creations

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(name, directory, direct=direct, mode=mode)


@pytest.mark.parametrize("creations", [0, 1, 2, 5])
def test_if_one_file_cannot_be_made_none_is_left(tmp_path: Path, creations: int) -> None:
    place = Place(tmp_path, Full(creations))
    before = opened(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        place.write(2, SMALLEST)
    assert os.listdir(tmp_path) == []
    assert opened(tmp_path) == before
    os.close(place.fd)


class Watched(PosixFileSystem):
    """Records the calls in order, by the name of the file."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def sync(self, fd: int) -> None:
        self.calls.append(("sync", os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2]))
        super().sync(fd)

    def sync_directory(self, directory: int) -> None:
        self.calls.append(("sync directory", ""))
        super().sync_directory(directory)


class Frugal(PosixFileSystem):
    """Measures the largest reserved size, and the largest number of open files."""

    def __init__(self) -> None:
        self.rooms: dict[int, int] = {}
        self.closed = self.most_room = self.most_open = 0

    def _has(self, fd: int, length: int) -> None:
        self.rooms[fd] = length
        self.most_open = max(self.most_open, len(self.rooms))
        self.most_room = max(self.most_room, self.closed + sum(self.rooms.values()))

    def allocate(self, fd: int, length: int) -> None:
        super().allocate(fd, length)
        self._has(fd, length)

    def truncate(self, fd: int, length: int) -> None:
        super().truncate(fd, length)
        self._has(fd, length)

    def close(self, fd: int) -> None:
        super().close(fd)
        self.closed += self.rooms.pop(fd, 0)  # 0: a directory


@each_case(
    ("files", "most", "count"),
    [(1, 0, 1), (3, 0, 3), (1, SMALLEST, 13), (2, SMALLEST, 13), (2, 5 * MIN_CHUNK, 4)],
)
def test_no_more_space_or_descriptors_are_used_than_needed(
    tmp_path: Path, files: int, most: int, count: int
) -> None:
    fs = Frugal()
    place = Place(tmp_path, fs)
    entry = place.write(files, most)
    assert entry.files == count
    assert fs.most_room <= entry.bytes + (files + 2) * MIN_CHUNK
    assert fs.most_open <= files + 2
    assert (fs.rooms, fs.closed) == ({}, entry.bytes)
    os.close(place.fd)


class Unclosable(PosixFileSystem):
    def close(self, fd: int) -> None:
        super().close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_part_is_discarded_although_its_files_cannot_be_closed(tmp_path: Path) -> None:
    place = Place(tmp_path, Unclosable())
    before = opened(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        place.write(3)
    assert os.listdir(tmp_path) == []
    assert opened(tmp_path) == before
    os.close(place.fd)


@each_case("creations", range(2, 9))
def test_every_thread_gets_the_first_error(tmp_path: Path, creations: int) -> None:
    """The error is not that of a bad descriptor of the file that could not be made."""
    place = Place(tmp_path, Full(creations))
    writer = PartWriter(
        files_in(place.path, place.fs),
        NONCE,
        codec.encoder("raw"),
        Spread.checked(2, SMALLEST, MIN_CHUNK),
    )
    writer.create(INDEX, RANGES, len(INDEX.plan))

    def write(chunk: ChunkRange) -> None:
        writer.chunk(
            chunk, memoryview(mmap.mmap(-1, MIN_CHUNK)), memoryview(mmap.mmap(-1, MIN_CHUNK)), 0
        )

    with ThreadPoolExecutor(4) as pool:
        failures = {
            type(error).__name__ + str(error)
            for error in (f.exception() for f in [pool.submit(write, c) for c in RANGES])
            if error
        }
    writer.discard()
    assert len(failures) == 1
    assert "No space left" in failures.pop()
    assert os.listdir(tmp_path) == []
    os.close(place.fd)


def test_every_file_is_durable_before_its_name(tmp_path: Path) -> None:
    fs = Watched()
    place = Place(tmp_path, fs)
    entry = place.write(2, 4 * MIN_CHUNK)
    assert entry.files > 2
    # The calls before that make the directory.
    calls = fs.calls[next(at for at, (kind, _) in enumerate(fs.calls) if kind == "sync") :]
    synced = [name for kind, name in calls if kind == "sync"]
    assert sorted(synced) == sorted(part_file(0, NONCE, number) for number in range(entry.files))
    assert synced[-1] == part_file(0, NONCE)  # the file with the index comes last
    assert all(
        calls[at + 1] == ("sync directory", "")
        for at, (kind, _) in enumerate(calls)
        if kind == "sync"
    )
    os.close(place.fd)


NO_COUNT: list[tuple[Any, Any]] = [
    (0, 0), (65, 0), ("4", 0), (2.5, 0), (True, 0), (None, 0), (1, -1), (1, 1), (1,
    2 * MIN_CHUNK - 1), (1, "4G"), (1, 4e9), (1, None),
]  # fmt: skip


@each_case(("files", "most"), NO_COUNT)
def test_impossible_settings_are_refused(files: Any, most: Any) -> None:
    with pytest.raises(
        InvalidConfig,
        match=r"^(files_per_rank is .*; expected 1 to 64|bytes_per_file is .*; expected 0 \(no "
        r"limit\), or)",
    ):
        Spread.checked(files, most, MIN_CHUNK)


# -- links


A, B, C, D = [number for number, chunk in enumerate(RANGES) if chunk.length == MIN_CHUNK][:4]
"""Numbers of chunks in the tests of links."""


class Linking(Linker):
    """A linker from one directory into the next one. `fails` has the files that cannot be
    linked, and `broken` is the number of links after which it raises an error.
    """

    def __init__(self, old: Path, new: Path) -> None:
        self.old, self.new = old, new
        self.fails: Callable[[StoredFile], bool] = lambda older: False
        self.broken: int | None = None
        self.tried: list[str] = []

    def link(self, older: StoredFile, name: str) -> bool:
        if len(self.tried) == self.broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.tried.append(older.name)
        if self.fails(older):
            return False
        os.link(self.old / older.name, self.new / name)
        return True

    def remove(self, name: str) -> None:
        (self.new / name).unlink()


class Chains:
    """Saves one step after the other, each in a directory of its own.

    At each step, one word of the chunks in `changing` changes, so that they are stored
    as deltas.
    """

    def __init__(self, path: Path, changing: set[int]) -> None:
        self.path, self.changing = path, changing
        self.slots = [bytearray(random.Random(1).randbytes(len(SLOT)))]
        self.before: StoredPart | None = None

    def save(
        self, linking: Callable[[Linking], None] = lambda linking: None
    ) -> tuple[PartEntry, PartWriter, Linking]:
        """Save the next step. `linking` may make links fail."""
        step, slot = len(self.slots), bytearray(self.slots[-1])
        for number in self.changing:
            slot[RANGES[number].offset + 8 * step] ^= 5
        base, place = self.slots[-1], self.path / str(step)
        place.mkdir()
        checks = [ChunkCheck(crc32c(raw), bytes(raw[:64])) for raw in self._chunks(slot)]
        reuse = NOTHING
        if self.before is not None:
            reuse = choose(self.before, RANGES, checks, dict.fromkeys(self.changing, 0.01))
        linker = Linking(self.path / str(step - 1), place)
        linking(linker)
        nonce = bytes([step]) * 16
        writer = PartWriter(files_in(place), nonce, codec.encoder("zstd"), ONE_FILE, linker)
        try:
            writer.create(
                msgspec.structs.replace(INDEX, step=step), RANGES,
                len(INDEX.plan) + len(INDEX.request), reuse,
            )  # fmt: skip
            entries = {offset: known.entry for offset, known in reuse.chunks.items()}
            for chunk in writer.ranges:
                raw, room = mmap.mmap(-1, MIN_CHUNK), mmap.mmap(-1, MIN_CHUNK)
                end = chunk.offset + chunk.length
                raw[: chunk.length] = slot[chunk.offset : end]
                crc, made = crc32c(memoryview(raw)[: chunk.length]), None
                if writer.base_of(chunk) is not None:
                    room[: chunk.length] = base[chunk.offset : end]
                    made = writer.delta(chunk, memoryview(raw), memoryview(room), crc)
                    if made is None:
                        raw[: chunk.length] = slot[chunk.offset : end]
                entries[chunk.offset] = made or writer.chunk(
                    chunk, memoryview(raw), memoryview(room), crc
                )
            entry = writer.finish(
                msgspec.structs.replace(INDEX, step=step),
                [entries[chunk.offset] for chunk in RANGES], items=len(PLAN.items),
            )  # fmt: skip
        except BaseException:
            writer.discard()
            raise
        self.before = writer.stored([check.digest for check in checks], steady=True)
        self.slots.append(slot)
        self._check(step, entry)
        return entry, writer, linker

    def _chunks(self, slot: bytearray) -> Iterator[bytearray]:
        for chunk in RANGES:
            yield slot[chunk.offset : chunk.offset + chunk.length]

    def _check(self, step: int, entry: PartEntry) -> None:
        """Read a step, and compare it, and its files with those that it says it has."""

        def beside(name: str) -> Source:
            return source(os.open(self.path / str(step) / name, os.O_RDONLY))

        reader = PartReader(beside(entry.file), "p", entry.index_sha256, beside)
        found = bytearray(len(SLOT))
        view = memoryview(found)
        scatter(reader, [(c.offset, view[c.offset : c.offset + c.length]) for c in RANGES])
        reader.close()
        assert list(self._chunks(found)) == list(self._chunks(self.slots[step]))
        assert sorted(os.listdir(self.path / str(step))) == sorted(
            part_file(0, bytes([step]) * 16, number) for number in range(entry.files)
        )


@pytest.fixture
def chains(tmp_path: Path) -> Chains:
    """Return some saves. Of the last one, two chunks have chains, which begin in the same
    file and end in different ones.
    """
    made = Chains(tmp_path, {A, B})
    for _ in range(3):
        made.save()
    made.changing = {A}
    entry, _, _ = made.save()
    assert entry.chain == 3
    made.changing = {A, B, C}
    return made


def chain_of(writer: PartWriter, number: int) -> int:
    """Return the number of deltas in the chain of a chunk that was written."""
    return writer._stored[number].length_of_chain - 1


def linked_by(writer: PartWriter) -> list[StoredFile]:
    """Return the files that a writer has linked, in the order of their numbers."""
    return [writer._older[position] for position in writer._numbers]


def test_the_files_of_chains_are_linked(chains: Chains) -> None:
    entry, writer, linking = chains.save()
    assert [chain_of(writer, number) for number in (A, B, C, D)] == [4, 3, 1, 0]
    assert linking.tried == [file.name for file in linked_by(writer)]
    assert entry.linked_bytes == sum(file.size for file in linked_by(writer))


def test_a_chunk_is_stored_whole_if_a_file_of_its_chain_cannot_be_linked(chains: Chains) -> None:
    """Each file in turn. The chunks whose chains do not need the file keep them."""
    assert chains.before is not None
    needed: dict[int, set[str]] = {}  # the files of the chain of each chunk
    for number in (A, B, C):
        links = chains.before.chunks[number].chain()
        needed[number] = {chains.before.files[link.file].name for link in links}
    names = sorted(set.union(*needed.values()))
    assert len(names) >= 4
    before, slots = chains.before, list(chains.slots)
    for name in names:
        chains.before, chains.slots = before, list(slots)

        def fail(linking: Linking, name: str = name) -> None:
            linking.fails = lambda older: older.name == name

        _, writer, linking = chains.save(fail)
        assert {number for number in needed if chain_of(writer, number) == 0} == {
            number for number, files in needed.items() if name in files
        }
        linked = [file.name for file in linked_by(writer)]
        assert linking.tried.count(name) == 1
        assert set(linked) == set.union(set(), *(f for f in needed.values() if name not in f))
        shutil.rmtree(linking.new)


def test_without_any_link_all_chunks_are_stored_whole(chains: Chains) -> None:
    def fail(linking: Linking) -> None:
        linking.fails = lambda older: True

    entry, writer, _ = chains.save(fail)
    assert (entry.linked_bytes, entry.chain, entry.read_bytes) == (0, 0, 0)
    assert len(writer.ranges) == len(RANGES)
    # The next save has bases again.
    assert chains.save()[0].chain == 1


def test_an_error_of_a_link_leaves_no_file(chains: Chains) -> None:
    def fail(linking: Linking) -> None:
        linking.broken = 2

    step = len(chains.slots)
    with pytest.raises(OSError, match="No space left"):
        chains.save(fail)
    assert os.listdir(chains.path / str(step)) == []
