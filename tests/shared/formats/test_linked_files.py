"""Tests parts that link files of older parts: what was saved is read back, and no
checkpoint needs another one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from obstore.store import MemoryStore

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.part import Linked, PartIndex, encode_end, encode_header
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.scatter import verify
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import parse_part_file, part_file
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.fs import PosixFileSystem
from tests.support.parts import PLAN, RANGES, SLOT, Parts, changed, tag_of


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


def path_of(disk: Parts, step: int, number: int = 0) -> Path:
    parsed = parse_part_file(disk.entries[step].file)
    assert parsed is not None
    return Path(disk.repository.where("gpt", tag_of(step), part_file(*parsed, number)))


@pytest.mark.parametrize("codec_name", ["raw", "zstd", "planes"])
@pytest.mark.parametrize(("files", "most"), [(1, 0), (3, 0), (2, 2 * MIN_CHUNK)])
def test_unchanged_chunks_are_linked_and_read_back(
    root: Parts, codec_name: str, files: int, most: int
) -> None:
    first = root.save(1, SLOT, files=files, codec_name=codec_name, most=most)
    assert (first.linked_bytes, first.new_bytes) == (0, first.bytes)
    for step in (2, 3, 4):
        entry = root.save(step, changed(SLOT, step), files=files, codec_name=codec_name, most=most)
        assert entry.linked_bytes > 0
        assert entry.new_bytes < first.bytes / 2
    for step in (1, 2, 3, 4):
        root.check(step)


def test_each_checkpoint_stands_alone(root: Parts) -> None:
    """The chunks of step 3 were written with step 1, and some with step 2."""
    root.save(1, SLOT)
    root.save(2, changed(SLOT, 0, 1))
    root.save(3, changed(SLOT, 0, 1, 2))
    root.delete(1)
    root.check(2)
    root.delete(2)
    root.check(3)
    root.save(4, changed(SLOT, 0, 1, 2, 3))
    root.delete(3)
    root.check(4)


def test_a_linked_file_is_one_file_on_the_disk(disk: Parts) -> None:
    disk.save(1, SLOT)
    disk.save(2, changed(SLOT, 5))
    assert path_of(disk, 1).samefile(path_of(disk, 2, 1))
    index = disk.open(2).index
    parsed = parse_part_file(disk.entries[1].file)
    assert parsed is not None
    assert index.linked == [Linked(1, parsed[1], 0, 1)]
    assert index.files == [disk.entries[1].bytes] == [disk.entries[2].linked_bytes]


def test_chunks_in_a_file_that_is_not_worth_a_link_are_gathered_in_one_that_is(disk: Parts) -> None:
    """A third of the chunks stays.

    In step 2 it gets a file of its own, and from step 3 on this file is linked.
    """
    stay = len(RANGES) // 3
    disk.save(1, SLOT)
    second = disk.save(2, changed(SLOT, *range(stay, len(RANGES))))
    assert (second.files, second.linked_bytes) == (2, 0)
    third = disk.save(3, SLOT)
    assert (third.files, third.linked_bytes) == (2, disk.open(2).index.files[0])
    assert path_of(disk, 2, 1).samefile(path_of(disk, 3, 1))
    fourth = disk.save(4, changed(SLOT, *range(stay, len(RANGES))))
    assert fourth.linked_bytes == third.linked_bytes
    assert disk.open(4).index.linked[0].step == 2, "the origin is the part that wrote the file"
    for step in (1, 2, 3, 4):
        disk.check(step)


def test_files_that_are_mostly_unused_are_not_linked_for_ever(disk: Parts) -> None:
    """Each step changes other chunks.

    No step keeps more than twice the bytes that it needs.
    """
    chance, slot = random.Random(1), SLOT
    for step in range(1, 20):
        slot = changed(slot, *chance.sample(range(len(RANGES)), 3))
        entry = disk.save(step, slot)
        assert entry.bytes < 2.3 * disk.entries[1].bytes
        disk.check(step)
        if step > 2:
            disk.delete(step - 2)
    assert (
        sum(disk.entries[step].new_bytes for step in range(2, 20))
        < 19 * disk.entries[1].bytes * 0.7
    )


@pytest.mark.parametrize("why", ["gone", "another length", "a link", "no links", "no status"])
def test_chunks_are_stored_if_their_file_cannot_be_linked(
    disk: Parts, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.save(1, SLOT)
    path = path_of(disk, 1)
    if why == "gone":
        disk.delete(1)
    elif why == "another length":
        os.truncate(path, path.stat().st_size + ALIGN)
    elif why == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    elif why == "no links":
        monkeypatch.setattr(os, "link", _refuse)
    else:
        monkeypatch.setattr(PosixFileSystem, "stat", _refuse)
    entry = disk.save(2, changed(SLOT, 5))
    assert (entry.files, entry.linked_bytes) == (1, 0)
    assert disk.repository.files("gpt", tag_of(2)) == [entry.file]
    disk.check(2)


def _refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_part_that_is_discarded_leaves_no_links(root: Parts) -> None:
    root.save(1, SLOT)
    root.save(2, changed(SLOT, 5))
    root.writer.discard()
    assert root.repository.files("gpt", tag_of(2)) == []
    root.check(1)


def test_older_versions_refuse_a_part_and_a_manifest_with_links(disk: Parts) -> None:
    disk.save(1, SLOT)
    entry = disk.save(2, changed(SLOT, 5, 6, 7), files=3)
    assert path_of(disk, 1).read_bytes()[12:16] == bytes(4), "a part without links is as it was"
    assert path_of(disk, 2).read_bytes()[12:16] == b"\3\0\0\0"
    own = next(
        n for n in range(1, entry.files) if not path_of(disk, 2, n).samefile(path_of(disk, 1))
    )
    assert path_of(disk, 2, own).read_bytes()[12:16] == b"\1\0\0\0"
    manifest = Manifest.of(
        PLAN,
        SnapshotRequest(),
        [entry],
        job="gpt",
        attempt=2,
        step=2,
        tag=tag_of(2),
        seq=2,
        codec="raw",
    )
    assert manifest.features == ["files", "linked-files"]
    assert Manifest.decode(manifest.encode()).parts[0] == entry


# -- damage


def refused(disk: Parts, match: str) -> None:
    with pytest.raises(IntegrityError, match=match):
        disk.open(2)


@pytest.mark.parametrize("damage", ["gone", "cut", "longer", "own file", "file of another job"])
def test_another_file_in_the_place_of_a_linked_one_is_seen(
    disk: Parts, damage: str, tmp_path: Path
) -> None:
    disk.save(1, SLOT)
    disk.save(2, changed(SLOT, 5))
    path = path_of(disk, 2, 1)
    data = path.read_bytes()
    path.unlink()
    others = {
        "cut": data[:-ALIGN],
        "longer": data + bytes(ALIGN),
        "own file": path_of(disk, 2).read_bytes().ljust(len(data), b"\0"),
    }
    others["file of another job"] = (
        encode_header(msgspec.structs.replace(disk.open(1).index, job="other"), _nonce(disk, 1))
        + data[ALIGN:]
    )
    if damage != "gone":
        path.write_bytes(others[damage])
    refused(disk, "is missing" if damage == "gone" else "its data file 1 ")


def test_every_flip_in_the_header_of_a_linked_file_is_seen(disk: Parts) -> None:
    disk.save(1, SLOT)
    disk.save(2, changed(SLOT, 5))
    path = path_of(disk, 2, 1)
    data = path.read_bytes()
    with path.open("r+b") as file:
        for bit in range(8 * 200):
            at = bit // 8
            file.seek(at)
            file.write(bytes([data[at] ^ (1 << bit % 8)]))
            file.flush()
            with pytest.raises(IntegrityError) as caught:
                disk.open(2).close()
            assert caught.type is IntegrityError, "a damaged version is no newer version"
            file.seek(at)
            file.write(data[at : at + 1])
            file.flush()
    disk.check(2)


def test_a_flip_in_a_linked_chunk_is_seen_and_named(disk: Parts) -> None:
    disk.save(1, SLOT)
    disk.save(2, changed(SLOT, 5))
    with path_of(disk, 2, 1).open("r+b") as file:
        file.seek(2 * ALIGN)
        file.write(b"?")
    reader = disk.open(2)
    with pytest.raises(
        IntegrityError, match=r"chunk 1 .* of data file 1\) does not match its checksum"
    ):
        verify(reader)


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "number 0": lambda d: d["linked"][0].__setitem__(0, 0),
    "number beyond": lambda d: d["linked"][0].__setitem__(0, 9),
    "twice": lambda d: d["linked"].append(d["linked"][0]),
    "another nonce": lambda d: d["linked"][0].__setitem__(1, bytes(16)),
    "a short nonce": lambda d: d["linked"][0].__setitem__(1, b"x"),
    "another number there": lambda d: d["linked"][0].__setitem__(2, 1),
    "another step": lambda d: d["linked"][0].__setitem__(3, 7),
    "no step": lambda d: d["linked"][0].__setitem__(3, None),
    "not linked": lambda d: d.pop("linked"),
    "a chunk in the header": lambda d: d["chunks"][0].__setitem__(2, 0),
    "a chunk between pages": lambda d: d["chunks"][0].__setitem__(2, ALIGN + 1),
    "a chunk beyond the end": lambda d: d["chunks"][0].__setitem__(2, d["files"][0]),
    "a file without chunks": lambda d: d.update(placed=[0] * len(d["placed"])),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_a_forged_index_is_refused(disk: Parts, change: Callable[[dict[str, Any]], object]) -> None:
    disk.save(1, SLOT)
    disk.save(2, changed(SLOT, 5))
    reader, path = disk.open(2), path_of(disk, 2)
    plain = msgspec.msgpack.decode(reader.index.encode())
    end = ALIGN + MIN_CHUNK

    def write(plain: dict[str, Any]) -> None:
        document = msgspec.msgpack.encode(plain)
        try:
            header = encode_header(
                msgspec.msgpack.decode(document, type=PartIndex), _nonce(disk, 2)
            )
        except msgspec.ValidationError:
            header = path.read_bytes()[:ALIGN]
        path.write_bytes(header + path.read_bytes()[ALIGN:end] + encode_end(end, document))

    write(plain)
    disk.repository.open_part("gpt", tag_of(2), disk.entries[2].file).close()
    change(plain)
    write(plain)
    with pytest.raises(IntegrityError):
        disk.repository.open_part("gpt", tag_of(2), disk.entries[2].file)


def _nonce(disk: Parts, step: int) -> bytes:
    parsed = parse_part_file(disk.entries[step].file)
    assert parsed is not None
    return parsed[1]
