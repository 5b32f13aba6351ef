"""Tests that ckptd's own readers read every test vector as `vectors.json` says, and
refuse those that must be refused.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import os
import re
import shutil
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.journal import file as jf
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import Journal
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound, ProtocolError
from ckptd.shared.formats import standard
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.metadata_object import MetadataReader, stored_places
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plain_values import Undecoded, decode_plain, merged
from ckptd.shared.formats.plan import BLOB, ITEM_SIZES
from ckptd.shared.formats.scatter import scatter, verify
from ckptd.shared.formats.segment import (
    RootMark,
    SlotState,
    read_check,
    read_header,
    read_root_mark,
)
from ckptd.shared.formats.sharding import Mesh
from ckptd.shared.names import journal_file
from ckptd.shared.system.fs import PosixFileSystem
from ckptd.shared.wire import frames
from ckptd.shared.wire import messages as m
from tests.golden.make import tag_of
from tests.shared.test_documents import FORMAT, PROTOCOL, code_names, rows, section
from tests.shared.wire.samples import MESSAGES
from tests.support.cases import each_case
from tests.support.storage import source
from tests.vectors import make
from tests.vectors.frames import shown

# The index is at the beginning of the archive, so that the rest stays packed here.
INDEX = json.loads(
    next(data for name, data in make.unpacked(make.ARCHIVE.read_bytes()) if name == "vectors.json")
)
VECTORS: dict[str, dict[str, Any]] = INDEX["vectors"]


def named(kind: str, expect: str) -> list[str]:
    return [
        name
        for name, entry in VECTORS.items()
        if name.startswith(f"{kind}/") and entry["expect"] == expect
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked archive."""
    there = tmp_path_factory.mktemp("vectors")
    for name, data in make.unpacked(make.ARCHIVE.read_bytes()):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(data)
    return there


def test_the_archive_is_what_its_script_makes() -> None:
    there = dict(make.unpacked(make.ARCHIVE.read_bytes()))
    assert make.contents() == there, "run python -m tests.vectors.make"


def test_the_script_makes_the_same_archive_twice() -> None:
    assert make.archive({"a": b"1", "b": bytes(9000)}) == make.archive(
        {"a": b"1", "b": bytes(9000)}
    )


def test_every_kind_of_vector_is_there() -> None:
    assert len(named("checkpoints", "read")) >= 17
    assert len(named("checkpoints", "refused")) >= 100
    assert {entry["expect"] for entry in VECTORS.values()} == {"read", "refused", "nothing"}
    assert {entry["why"] for entry in VECTORS.values() if entry["expect"] == "refused"} == {
        "damaged",
        "newer",
    }


def test_every_vector_that_must_be_refused_names_a_check_of_the_document() -> None:
    checks = {
        name for row in rows(section(FORMAT, 13), "| check | ") for name in code_names(row[0])
    }
    checks |= {code_names(row[0])[0] for row in rows(section(PROTOCOL, 1), "| check | ")}
    assert {entry["check"] for entry in VECTORS.values() if "check" in entry} <= checks


def test_every_check_of_a_file_has_a_vector() -> None:
    table = {code_names(row[0])[0]: row[-1] for row in rows(section(FORMAT, 13), "| check | ")}
    shown = {
        entry["check"]
        for entry in VECTORS.values()
        if "check" in entry and entry["kind"] != "frame"
    }
    assert {name for name, vectors in table.items() if vectors == "yes"} == shown
    of_frames = {code_names(row[0])[0] for row in rows(section(PROTOCOL, 1), "| check | ")}
    assert {
        entry["check"]
        for entry in VECTORS.values()
        if "check" in entry and entry["kind"] == "frame"
    } == of_frames


def test_every_vector_says_its_kind() -> None:
    assert {name: f"{entry['kind']}s" for name, entry in VECTORS.items()} == {
        name: name.partition("/")[0] for name in VECTORS
    }
    assert all(entry["path"].startswith(f"{entry['kind']}s/") for entry in VECTORS.values())
    assert {entry["kind"] for entry in VECTORS.values()} <= set(re.findall(r'"(\w+)"', KIND))


KIND = next(row[1] for row in rows(section(FORMAT, 17), "| member | value |") if row[0] == "`kind`")


# -- sound checkpoints


def plain(value: Any) -> Any:
    """Return a value as `vectors.json` has it."""
    match value:
        case bool() | None | str():
            return value
        case int():
            return value if abs(value) < 1 << 53 else {"$integer": str(value)}
        case float() if not isinstance(value, np.generic):
            return value if np.isfinite(value) else {"$number": str(value)}
        case complex() if not isinstance(value, np.generic):
            return {"$complex": [value.real, value.imag]}
        case bytes() | bytearray():
            return {"$bytes": value.hex()}
        case dict() if "$tensor" in value:
            return value
        case dict() if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        case dict():
            return {"$pairs": [[plain(key), plain(item)] for key, item in value.items()]}
        case list() | tuple() | deque():
            return [plain(item) for item in value]
        case set() | frozenset():
            return sorted(value)
        case Undecoded():
            return {"$undecoded": value.kind}
        case np.ndarray() | np.generic():
            return {
                "$array": [value.dtype.str, list(value.shape), np.asarray(value).tobytes().hex()]
            }
        case io.BytesIO() | io.StringIO():
            return plain(value.getvalue())
        case (
            datetime.date()
            | datetime.time()
            | datetime.timedelta()
            | datetime.tzinfo()
            | uuid.UUID()
            | range()
            | Decimal()
            | Fraction()
        ):
            return {"$standard": plain(standard.parts_of(value))}
    raise AssertionError(f"{value!r} has no form in vectors.json")


def values_of(part: PartReader) -> bytes:
    offset, length = part.values
    data = bytearray(length)
    scatter(part, [(offset, memoryview(data))])
    return bytes(data)


def opened(place: Path, entry: dict[str, Any]) -> ArrayCheckpoint:
    return ArrayCheckpoint.open((place / entry["path"]).parent, Path(entry["path"]).name)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@each_case("name", named("checkpoints", "read"))
def test_a_sound_checkpoint_without_torch(name: str, place: Path) -> None:
    entry = VECTORS[name]
    with opened(place, entry) as checkpoint:
        manifest = checkpoint.manifest
        assert (manifest.step, manifest.tag, manifest.world_size) == (
            entry["step"],
            entry["tag"],
            entry["world_size"],
        )
        given = {"metrics", "user_content", "retention"} & entry.keys()
        assert {member: plain(getattr(manifest, member)) for member in given} == {
            member: entry[member] for member in given
        }
        assert checkpoint.verify() == sum(part.raw_bytes for part in manifest.parts)
        found = {
            key: {
                "dtype": checkpoint.dtype(key),
                "shape": list(checkpoint.shape(key)),
                "sha256": digest(checkpoint.array(key).tobytes()),
            }
            for key in list(checkpoint.keys())
        }
        assert found == {
            key: each | {"dtype": each["dtype"].partition("/")[0]}
            for key, each in entry["tensors"].items()
        }
        documents = [
            decode_plain(values_of(part), lambda tensor: {"$tensor": tensor})
            for part in checkpoint._parts
        ]
        assert plain(merged([document["state"] for document in documents])) == entry["state"]
        checkpoint.load()


@each_case("name", named("checkpoints", "read"))
def test_a_sound_checkpoint_with_torch(name: str, place: Path) -> None:
    import torch

    from ckptd.agent import Checkpoint
    from ckptd.agent.read.checkpoint import opened_of

    entry = VECTORS[name]
    with Checkpoint.open((place / entry["path"]).parent, Path(entry["path"]).name) as checkpoint:
        if name == "checkpoints/torch-values":
            with pytest.raises(
                IntegrityError, match=r"a value whose bytes are not those of torch\.save"
            ):
                checkpoint.verify([])
        else:
            checkpoint.verify([])
        assert sorted(checkpoint.keys()) == sorted(entry["tensors"])
        dtypes = {key: each["dtype"].partition("/") for key, each in entry["tensors"].items()}
        unknown = {
            key for key, (name, _, size) in dtypes.items() if size and name not in ITEM_SIZES
        }
        assert unknown == ({"later"} if name == "checkpoints/unknown-dtype" else set())
        for key in unknown:
            with pytest.raises(NotFound, match="which torch .* does not have"):
                checkpoint.tensor(key)
        known = dtypes.keys() - unknown
        assert known or not dtypes
        for key in known:
            dtype, each = dtypes[key][0], entry["tensors"][key]
            found = checkpoint.tensor(key).detach()
            assert (str(found.dtype), list(found.shape)) == (
                f"torch.{dtype}",
                each["shape"],
            )
            raw = (
                found.contiguous().reshape(-1).view(torch.uint8)
                if found.numel()
                else torch.empty(0, dtype=torch.uint8)
            )
            assert digest(raw.numpy().tobytes()) == each["sha256"], key
        found_blobs = opened_of(checkpoint).saved.read_blobs(list(entry.get("blobs", {})))
        assert {
            key: {"bytes": len(data), "sha256": digest(data)} for key, data in found_blobs.items()
        } == entry.get("blobs", {})


@pytest.mark.parametrize("name", ["merging", "merging-objects"])
def test_trees_are_merged_with_torch_as_without(name: str, place: Path) -> None:
    from ckptd.agent import Checkpoint

    entry = VECTORS[f"checkpoints/{name}"]
    with Checkpoint.open((place / entry["path"]).parent, Path(entry["path"]).name) as checkpoint:
        assert plain(checkpoint.load()) == entry["state"]


@each_case("name", [name for name in named("checkpoints", "read") if "shards" in VECTORS[name]])
def test_rules_give_the_shards_that_the_vector_lists(name: str, place: Path) -> None:
    entry = VECTORS[name]
    directory = place / entry["path"]
    manifest = Manifest.decode((directory / "manifest.json").read_bytes())
    assert (manifest.metadata_object is None) == (manifest.version == 1)
    if manifest.metadata_object is None:
        described, meshes = (
            dict(manifest.metadata["state_dict_metadata"]),
            list(manifest.metadata["meshes"]),
        )
        assert len(described) >= len(entry["shards"])
    else:
        fd = os.open(directory / manifest.metadata_object.file, os.O_RDONLY)
        with closing(
            MetadataReader(
                source(fd), manifest.metadata_object, manifest.world_size, "the metadata object"
            )
        ) as reader:
            assert reader.verify() == manifest.metadata_object.tensors == len(entry["state"])
            described, meshes = dict(reader.entries()), list(reader.meshes)
    assert all(isinstance(mesh, Mesh) for mesh in meshes)
    found = {
        key: [
            [list(shard[0]), list(shard[1]), rank]
            for shard, rank in stored_places(each, meshes)
            if shard is not None
        ]
        for key, each in described.items()
        if each["dtype"] != BLOB
    }
    assert {key: sorted(each) for key, each in found.items()} == {
        key: sorted(each) for key, each in entry["shards"].items()
    }


def test_an_abandonment_is_no_checkpoint(place: Path) -> None:
    from ckptd.agent import Checkpoint

    [name] = named("checkpoints", "nothing")
    with pytest.raises(NotFound):
        Checkpoint.open((place / VECTORS[name]["path"]).parent)


# -- checkpoints that must be refused


def read_without_torch(place: Path, entry: dict[str, Any]) -> None:
    """Open a checkpoint, and read everything in it if the vector says that only a read
    shows what is wrong.
    """
    with opened(place, entry) as checkpoint:
        if entry["at"] == "read":
            checkpoint.verify()
            list(map(checkpoint.array, checkpoint.keys()))
            checkpoint.load()


def read_with_torch(place: Path, entry: dict[str, Any]) -> None:
    from ckptd.agent import Checkpoint

    with Checkpoint.open((place / entry["path"]).parent, Path(entry["path"]).name) as checkpoint:
        if entry["at"] == "read":
            checkpoint.verify()
            list(map(checkpoint.tensor, checkpoint.keys()))
            checkpoint.load()


IGNORES_METADATA = ("metadata-object", "rules", "metadata-parts")
"""The checks of metadata that a reader of parts does not look at."""


@each_case("name", named("checkpoints", "refused"))
def test_a_checkpoint_that_must_be_refused_without_torch(name: str, place: Path) -> None:
    entry = VECTORS[name]
    if entry["check"] in IGNORES_METADATA:
        with opened(place, entry) as checkpoint:
            assert checkpoint.verify() > 0
    else:
        with pytest.raises(IntegrityError) as refused:
            read_without_torch(place, entry)
        newer = isinstance(refused.value, NewerFormat)
        assert newer == (entry["why"] == "newer"), str(refused.value)


@each_case("name", named("checkpoints", "refused"))
def test_a_checkpoint_that_must_be_refused_with_torch(name: str, place: Path) -> None:
    entry = VECTORS[name]
    with pytest.raises(IntegrityError) as refused:
        read_with_torch(place, entry)
    assert isinstance(refused.value, NewerFormat) == (entry["why"] == "newer"), str(refused.value)


# -- memory


@each_case("name", named("segments", "read"))
def test_a_segment(name: str, place: Path) -> None:
    entry = VECTORS[name]
    fd = os.open(place / entry["path"], os.O_RDONLY)
    try:
        header = read_header(fd)
        found = {
            "generation": header.generation,
            "state": SlotState(header.state).name.lower(),
            "job": header.job,
            "attempt": header.attempt,
            "rank": header.rank,
            "world_size": header.world_size,
            "step": header.step,
        }
        assert found == entry["header"]
        found_checks = (
            SealedSlot.read(fd, header).crcs
            if header.state is SlotState.SEALED
            else read_check(fd, header)
        )
        assert found_checks == entry["checks"]
        try:
            mark = read_root_mark(fd, header)
        except IntegrityError:  # a damaged mark counts as none
            mark = None
        assert (mark.identity if isinstance(mark, RootMark) else None) == entry["identity"]
    finally:
        os.close(fd)


def read_segment(fd: int) -> None:
    """Read a sealed segment as a daemon does before it answers a seal, and then as an
    agent does that recovers from it.
    """
    from ckptd.agent.read.slot_source import SlotSource

    header = read_header(fd)
    SealedSlot.read(fd, header)
    assert header.step is not None
    slot = SlotSource(fd, header.attempt, header.step)
    try:
        verify(slot)
    finally:
        slot.close()


@each_case("name", named("segments", "refused"))
def test_a_segment_that_must_be_refused(name: str, place: Path) -> None:
    fd = os.open(place / VECTORS[name]["path"], os.O_RDONLY)
    try:
        with pytest.raises(IntegrityError) as refused:
            read_segment(fd)
    finally:
        os.close(fd)
    assert isinstance(refused.value, NewerFormat) == (VECTORS[name]["why"] == "newer")


def test_a_sealed_segment_with_checks_is_read(place: Path) -> None:
    fd = os.open(place / VECTORS["segments/checks-by-the-client"]["path"], os.O_RDONLY)
    try:
        read_segment(fd)
    finally:
        os.close(fd)


def records_of(scan: jf.Scan) -> Iterator[tuple[int, bytes]]:
    for record in scan.records:
        if record.type in (r.STATE, *r.TYPES):
            yield record.type, record.payload
        else:
            assert record.flags & jf.IGNORABLE


@each_case("name", named("journals", "read"))
def test_a_journal(name: str, place: Path) -> None:
    entry = VECTORS[name]
    scan = jf.scan((place / entry["path"]).read_bytes(), entry["number"])
    assert (scan.ending.value, len(scan.records)) == (entry["ending"], entry["records"])
    state = r.JournalState()
    for kind, payload in records_of(scan):
        if kind == r.STATE:
            state = r.decode_state(payload)
        else:
            state.apply(r.decode(kind, payload))
    sound = scan.ending is not jf.Ending.CORRUPT
    assert (json.loads(msgspec.json.encode(state)) if sound else None) == entry["state"]


@each_case("name", named("journals", "refused"))
def test_a_journal_that_must_be_refused(name: str, place: Path, tmp_path: Path) -> None:
    entry = VECTORS[name]
    (tmp_path / journal_file(entry["number"])).write_bytes((place / entry["path"]).read_bytes())
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(IntegrityError) as refused:
            Journal.open(PosixFileSystem(), directory, pool, strict=True)
    finally:
        os.close(directory)
    assert isinstance(refused.value, NewerFormat) == (entry["why"] == "newer"), str(refused.value)


# -- jobs


@pytest.mark.parametrize("name", named("jobs", "read"))
def test_the_newest_checkpoint_of_a_job(
    name: str, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ckptd.agent import Checkpoint

    entry = VECTORS[name]
    job = place / entry["path"]

    def passed_over() -> set[str]:
        found = {
            tag
            for tag in entry["damaged"]
            for record in caplog.records
            if f"/{tag} is passed over: " in record.getMessage()
        }
        assert len(caplog.records) == len(found)
        caplog.clear()
        return found

    with ArrayCheckpoint.open(job) as found:
        assert passed_over() == set(entry["damaged"])
        assert (found.manifest.tag, found.manifest.step) == (entry["newest"], entry["step"])
        assert {key: digest(found.array(key).tobytes()) for key in list(found.keys())} == {
            key: each["sha256"] for key, each in entry["tensors"].items()
        }
    with Checkpoint.open(job) as opened_with_torch:
        assert opened_with_torch.tag == entry["newest"]
        assert passed_over() == set(entry["damaged"])
    for tag in entry["damaged"]:
        with pytest.raises(IntegrityError):
            ArrayCheckpoint.open(job, tag)


@pytest.mark.parametrize("name", named("jobs", "read"))
def test_the_order_of_the_checkpoints_of_a_job(name: str, place: Path, tmp_path: Path) -> None:
    """Each time that the newest one is gone, the next one is the newest."""
    from ckptd.agent import Checkpoint

    entry = VECTORS[name]
    copy = tmp_path / "job"
    shutil.copytree(place / entry["path"], copy)
    found, found_with_torch = [], []
    for _ in entry["order"]:
        with ArrayCheckpoint.open(copy) as checkpoint, Checkpoint.open(copy) as opened_with_torch:
            found.append(checkpoint.manifest.tag)
            found_with_torch.append(opened_with_torch.tag)
        (copy / found[-1] / "manifest.json").unlink()
    assert found == found_with_torch == entry["order"]


@pytest.mark.parametrize("name", named("jobs", "refused"))
def test_a_job_whose_newest_checkpoint_must_be_refused(name: str, place: Path) -> None:
    from ckptd.agent import Checkpoint

    entry = VECTORS[name]
    for open_job in (ArrayCheckpoint.open, Checkpoint.open):
        with pytest.raises(IntegrityError) as refused:
            open_job(place / entry["path"])
        assert isinstance(refused.value, NewerFormat) == (entry["why"] == "newer"), str(
            refused.value
        )


@pytest.mark.parametrize("name", named("jobs", "nothing"))
def test_a_job_without_a_checkpoint(name: str, place: Path) -> None:
    from ckptd.agent import Checkpoint

    for open_job in (ArrayCheckpoint.open, Checkpoint.open):
        with pytest.raises(NotFound):
            open_job(place / VECTORS[name]["path"])


# -- frames


def message_of(data: bytes) -> tuple[bytes, m.Message]:
    """Return the payload of a frame, and its message."""
    [payload] = frames.Decoder().feed(data)
    return payload, m.decode(payload)


AS_OTHERS_WRITE = ("holds", "cost-in-integers", "defaults", "another-order", "later-keys")
"""The frames that ckptd's own encoder does not write like this."""


@each_case("name", named("frames", "read"))
def test_a_frame(name: str, place: Path) -> None:
    entry = VECTORS[name]
    data = (place / entry["path"]).read_bytes()
    payload, message = message_of(data)
    assert shown(msgspec.msgpack.decode(payload)) == entry["message"]
    again = m.encode(message)
    if name.partition("/")[2] in AS_OTHERS_WRITE:
        assert m.decode(again) == message
    else:
        written = shown(msgspec.msgpack.decode(again))
        assert written == {key: value for key, value in entry["message"].items() if key in written}
        assert m.decode(again) == message


@each_case("name", named("frames", "refused"))
def test_a_frame_that_must_be_refused(name: str, place: Path) -> None:
    with pytest.raises(ProtocolError):
        message_of((place / VECTORS[name]["path"]).read_bytes())


def test_the_frames_have_every_field_of_every_message_and_of_the_maps_in_them() -> None:
    """Together with the golden frames: see section 5 of PROTOCOL.md."""
    found: dict[str, set[str]] = {}
    for entry in VECTORS.values():
        if "message" in entry:
            collect(entry["message"]["type"], entry["message"], found)
    for message in MESSAGES:
        collect(tag_of(message), shown(msgspec.msgpack.decode(m.encode(message))), found)
    listed = [
        (code_names(row[0])[0], code_names(row[1])[0])
        for row in rows(section(PROTOCOL, 6), "| type |")
    ]
    assert len(listed) > 5
    assert [
        f"no frame has {field} of {rule}"
        for rule, field in listed
        if rule != "brief" and field not in found[rule]
    ] == []


INSIDE = {"owed": "due", "held": "segment", "segments": "segment", "candidates": "candidate"}


def collect(rule: str, value: dict[str, Any], found: dict[str, set[str]]) -> None:
    found.setdefault(rule, set()).update(value)
    for field, inner in value.items():
        if isinstance(inner, dict) and field in ("cost", "node", "holding", "answer", "copies"):
            collect(field, inner, found)
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, dict):
                collect(INSIDE[field], one, found)


def test_names_of_vectors_are_words() -> None:
    assert all(re.fullmatch(r"[a-z]+/[a-z0-9-]+", name) for name in VECTORS)
