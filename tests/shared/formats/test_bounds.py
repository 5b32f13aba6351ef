"""Tests small documents that would cost much: each is refused in one sentence, and in
little memory. Nothing here asserts a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats import bounds
from ckptd.shared.formats.bounds import (
    MAX_DIMENSIONS,
    MAX_OBJECTS,
    check_json,
    check_msgpack,
    deeper_than,
    is_group,
    is_same,
)
from ckptd.shared.formats.manifest import MAX_MANIFEST, Manifest
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plan import (
    MAX_CHUNKS,
    MAX_DOCUMENT,
    MAX_ITEMS,
    MAX_TEXT,
    Alias,
    Item,
    Plan,
    Region,
    chunk_ranges,
)
from ckptd.shared.formats.snapshot_request import MAX_REQUEST, SnapshotRequest
from ckptd.shared.names import part_file
from tests.shared.samples import (
    NONCE,
    WRITER,
    encode_part,
    memory_file,
    packed_slot,
    sample_plan,
    steady,
    values_after,
)
from tests.support.cases import each_case
from tests.support.limited import SCALE, outcomes
from tests.support.storage import source

MANY = (20 << 20) // SCALE
MILLION = (1 << 20) // SCALE


def array(count: int, element: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4) + element * count


def document(**members: bytes) -> bytes:
    """Return a plan document of these members, each already encoded, and of the usual
    ones.
    """
    members = {
        "regions": b"\x90",
        "items": b"\x90",
        "aliases": b"\x90",
        "metadata": b"\xc0",
        "writer": b"\x80",
        **members,
    }
    return bytes([0x80 + len(members)]) + b"".join(
        msgspec.msgpack.encode(key) + value for key, value in members.items()
    )


def described(**members: bytes) -> bytes:
    """Return the metadata of one tensor."""
    inner = bytes([0x80 + len(members)]) + b"".join(
        msgspec.msgpack.encode(key) + value for key, value in members.items()
    )
    return b"\x81\xa1w" + inner


ITEM = msgspec.msgpack.encode(Item("w", "bool", (), (), (), None, 0))
LONG = (1,) * 90_000


def plans() -> dict[str, bytes]:
    return {
        "metadata of lists": document(metadata=b"\x81\xa1w" + array(MANY, b"\x90")),
        "metadata of maps": document(
            metadata=described(chunks=array(5 * MILLION, b"\x81\xa1a\x01"))
        ),
        "shards without dimensions": document(
            metadata=described(chunks=array(3 * MILLION, b"\x92\x90\x90"))
        ),
        "metadata of other names": document(
            metadata=b"\xdf"
            + (5 * MILLION).to_bytes(4)
            + b"".join(b"\xa4%04x\x80" % n for n in range(MILLION)) * 5
        ),
        "millions of items": document(items=array(2 * MILLION, ITEM)),
        "millions of regions": document(regions=array(MANY // 4, b"\x93\x00\x00\x01")),
        "many writers": document(
            writer=b"\xdf"
            + (1 << 20).to_bytes(4)
            + b"".join(b"\xa5%05x\xa1a" % n for n in range(1 << 20))
        ),
        "90,000 dimensions": Plan(
            [Region(0, 4, 4)], [Item("w", "float32", LONG, LONG, LONG, LONG, 0)], [], None, WRITER
        ).encode(),
        "an alias of 90,000 dimensions": Plan(
            [Region(0, 4, 4)],
            [Item("w", "float32", (1,), (0,), (1,), None, 0)],
            [Alias("a", "w", 0, "float32", LONG, LONG)],
            None,
            WRITER,
        ).encode(),
        "2^3900 elements": Plan(
            [],
            [Item("w", "bool", ((1 << 61),) * 64, (0,) * 64, (0,) * 64, None, 0)],
            [],
            None,
            WRITER,
        ).encode(),
        "an alias of 2^122 elements": Plan(
            [Region(0, 4, 4)],
            [Item("w", "float32", (1,), (0,), (1,), None, 0)],
            [Alias("a", "w", 0, "float32", (1 << 61, 1 << 61), (0, 0))],
            None,
            WRITER,
        ).encode(),
        "nested": document(metadata=b"\x81\xa1w" * 100_000 + b"\xc0"),
    }


PART = {
    "rank": 0,
    "file": part_file(0, NONCE),
    "bytes": 1,
    "raw_bytes": 1,
    "items": 1,
    "index_sha256": "0" * 64,
}


def manifest(change: Callable[[dict[str, Any]], object] = lambda members: None) -> bytes:
    members: dict[str, Any] = {
        "format": "ckptd-manifest", "version": 1, "features": [], "job": "gpt", "attempt": 1,
        "step": 1, "tag": "step-00000001.a0001", "seq": 1, "world_size": 1, "created": "",
        "parts": [PART], "metadata": {}, "metrics": {}, "user_content": None, "writer": {},
    }  # fmt: skip
    change(members)
    return sealed(json.dumps(members))


def sealed(text: str) -> bytes:
    body = text[:-1].encode() + b","
    return body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def spliced(value: str) -> bytes:
    return sealed(manifest_text().replace('"HERE"', value))


def manifest_text() -> str:
    return json.dumps(
        json.loads(manifest(lambda m: m.update(user_content="HERE"))) | {"sha256": ""}
    ).replace(', "sha256": ""', "")


def manifests() -> dict[str, bytes]:
    return {
        "2^62 ranks": manifest(lambda m: m.update(world_size=(1 << 62) - 1)),
        "lists": spliced("[" + "[]," * (9 * MILLION) + "[]]"),
        "texts": spliced("[" + '"ab",' * (9 * MILLION) + '""]'),
        "maps": spliced("[" + '{"ab":1},' * (5 * MILLION) + "{}]"),
        "nested": spliced("[" * 300 + "]" * 300),
        "nested further": spliced("[" * 100_000 + "]" * 100_000),
        "a number without end": spliced("9" * 5000),
        "a number beyond every float": spliced("1e999"),
        "metadata of a list": manifest(lambda m: m.update(metadata=[1])),
        "metadata of another shape": manifest(
            lambda m: m.update(metadata={"state_dict_metadata": [1]})
        ),
        "a tensor of another shape": manifest(
            lambda m: m.update(metadata={"state_dict_metadata": {"w": 1}})
        ),
        "a size of another shape": manifest(
            lambda m: m.update(
                metadata={"state_dict_metadata": {"w": {"dtype": "bool", "size": {"a": 1}}}}
            )
        ),
        "90,000 dimensions": manifest(
            lambda m: m.update(metadata={"state_dict_metadata": {"w": {"size": [1] * 90_000}}})
        ),
        "many files": manifest(lambda m: m.update(parts=[PART | {"files": 1 << 60}])),
        "an endless job": manifest(lambda m: m.update(job="x" * 257)),
        "many writers": manifest(lambda m: m.update(writer={str(n): "" for n in range(65)})),
    }


def requests() -> dict[str, bytes]:
    return {
        "beyond its limit": SnapshotRequest(user_content=" " * (1 << 20) + "1").encode(),
        "nested": SnapshotRequest(user_content="[" * 300 + "]" * 300).encode(),
        "no time": SnapshotRequest(created=float("nan")).encode(),
    }


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("module", "function", "made"),
    [
        ("ckptd.shared.formats.plan", "Plan.decode", plans),
        ("ckptd.shared.formats.manifest", "Manifest.decode", manifests),
        ("ckptd.shared.formats.snapshot_request", "SnapshotRequest.decode", requests),
    ],
    ids=["plans", "manifests", "requests"],
)
def test_hostile_documents_are_refused_in_little_memory(
    module: str, function: str, made: Callable[[], dict[str, bytes]], tmp_path: Path
) -> None:
    documents = made()
    found = outcomes(module, function, documents, tmp_path)
    assert {name: kind for name, (kind, _) in found.items()} == dict.fromkeys(
        documents, "IntegrityError"
    ), found
    assert [
        name for name, (_, sentence) in found.items() if len(sentence) >= 2_500 or "\n" in sentence
    ] == []


@pytest.mark.usefixtures("processes")
def test_a_plan_at_its_limits_is_read_in_little_memory(tmp_path: Path) -> None:
    """The largest number of objects that passes, in the form that costs most for its
    bytes.
    """
    most = {
        "maps": document(
            metadata=described(novelty=array(MAX_OBJECTS // 2 - 100, b"\x81\xa1a\x01"))
        ),
        "shards": document(
            metadata=described(chunks=array(MAX_OBJECTS // 3 - 100, b"\x92\x90\x90"))
        ),
    }
    assert {
        kind
        for kind, _ in outcomes(
            "ckptd.shared.formats.plan", "Plan.decode", most, tmp_path, scale=1
        ).values()
    } == {"nothing"}


def test_tensors_of_too_many_elements_are_refused() -> None:
    at_most = Item(
        "w", "bool", (1,) * MAX_DIMENSIONS, (0,) * MAX_DIMENSIONS, (1,) * MAX_DIMENSIONS, None, 0
    )
    assert Plan.decode(Plan([Region(0, 1, 1)], [at_most], [], None, WRITER).encode()).items == [
        at_most
    ]
    for size, sound in (
        ((1 << 61,), True),
        ((1 << 31, 1 << 31), False),
        ((0, 1 << 61, 2), False),
        ((0, 1 << 61, 1), True),
    ):
        plan = Plan(
            [],
            [Item("w", "bool", size, (0,) * len(size), (0,) * len(size), None, 0)],
            [],
            None,
            WRITER,
        ).encode()
        if sound:
            assert Plan.decode(plan).items[0].size == size
        else:
            with pytest.raises(
                IntegrityError, match=r"'w' has the size .*; expected fewer than 2\^62 elements"
            ):
                Plan.decode(plan)


def test_chunks_are_counted_before_any_is_made() -> None:
    assert len(chunk_ranges([Region(0, 4 * 65536, 4)], 65536)) == 4
    with pytest.raises(IntegrityError, match="a part has at most 4,194,304"):
        chunk_ranges([Region(0, 1 << 61, 1)], 1 << 16)
    assert MAX_CHUNKS == 4_194_304
    assert MAX_ITEMS == 1 << 20


@each_case(
    ("change", "reason"),
    [
        (lambda d: d.update(chunks=d["chunks"][:1] * (MAX_CHUNKS + 1)), "index cannot be read"),
        (lambda d: d.update(placed=[0] * (MAX_CHUNKS + 1)), "index cannot be read"),
        (lambda d: d.update(files=[0] * (MAX_CHUNKS + 1)), "index cannot be read"),
        (
            lambda d: d.update(values=[d["values"][0], 1 << 30]),
            "its values document has 1,073,741,824 bytes; expected at most 268,435,456",
        ),
        (lambda d: d.update(tag="x" * 257), "index cannot be read"),
    ],
    ids=["chunks", "placed", "files", "values", "tag"],
)
def test_an_index_beyond_its_limits_is_refused(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    from tests.shared.formats.test_part import forge

    with memory_file(forge(change)) as fd, pytest.raises(IntegrityError, match=f"^p: {reason}"):
        PartReader(source(fd), "p")


def test_the_manifest_is_sound_before_it_is_made_hostile() -> None:
    assert Manifest.decode(manifest()).parts[0].files == 1
    assert Manifest.decode(spliced("[" * 250 + "]" * 250)).user_content


def test_a_manifest_beyond_its_limit_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(IntegrityError, match="manifest has more than 268,435,456 bytes"):
        Manifest.decode(bytes(MAX_MANIFEST + 1))


def test_unknown_codecs_are_refused_before_a_chunk_is_read() -> None:
    plan = sample_plan()
    values = values_after(plan)
    with memory_file(encode_part(packed_slot(plan, values), plan, values)[0]) as fd:
        reader = PartReader(source(fd), "p")
        reader.check_codecs()
        reader.index.chunks[0] = msgspec.structs.replace(reader.index.chunks[0], codec=7)
        with pytest.raises(NewerFormat, match="^p: chunks are encoded with codec 7"):
            reader.check_codecs()


# -- the limits themselves


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.builds(_ext, st.integers(0, 9), inner)
    ),
    max_leaves=30,
)


def objects(value: Any) -> int:
    """Count the lists, maps, texts and extensions in a value, and those in an extension
    of type 5.
    """
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(objects, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(objects, value))
    if isinstance(value, msgspec.msgpack.Ext):
        return 1 + (objects(msgspec.msgpack.decode(value.data)) if value.code == 5 else 0)
    return int(isinstance(value, str))


@steady
@given(VALUES)
def test_the_count_is_the_number_of_decoded_objects(value: Any) -> None:
    assert sum(
        bounds._count(msgspec.msgpack.encode(value), frozenset({5}), MAX_OBJECTS)
    ) == objects(value)


@steady
@given(st.binary(max_size=60))
def test_the_count_ends_on_noise(noise: bytes) -> None:
    assert 0 <= sum(bounds._count(noise, frozenset({5}), MAX_OBJECTS)) <= len(noise)


def test_the_shards_of_a_large_model_on_many_ranks_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 tensors on 1,024 ranks: 9.2 million lists in 23 MB, or as JSON in 43 MB.

    Here all numbers are smaller by `SCALE`.
    """
    monkeypatch.setattr(bounds, "MAX_OBJECTS", MAX_OBJECTS // SCALE)
    chunk, count = msgspec.msgpack.encode([[200], [8]]), 3000 * 1024 // SCALE
    assert 3 * count > bounds.MAX_OBJECTS
    check_msgpack(array(count, chunk), "plan")
    check_json(b"[" + b"[[8176],[8]]," * count + b"1]", "manifest")


def test_payload_bytes_do_not_count_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MAX_OBJECTS // SCALE
    monkeypatch.setattr(bounds, "MAX_OBJECTS", most)
    payload = msgspec.msgpack.encode(
        {"rng": b"\x90" * (most + 1), "ext": msgspec.msgpack.Ext(8, b"\x90" * 100)}
    )
    check_msgpack(payload, "it")
    with pytest.raises(
        IntegrityError,
        match=rf"^it has more than {most:,d} lists, or {most:,d} maps and texts, the most that "
        rf"ckptd ",
    ):
        check_msgpack(array(most, b"\x90"), "it")
    nested = msgspec.msgpack.encode(msgspec.msgpack.Ext(2, array(most, b"\x90")))
    check_msgpack(nested, "it")
    with pytest.raises(IntegrityError):
        check_msgpack(nested, "it", {2})
    check_json(b"1," * most, "it")
    with pytest.raises(IntegrityError):
        check_json(b"[" * (most + 1), "it")


@pytest.mark.parametrize("levels", [0, 1, 2, 200])
def test_nesting_is_measured(levels: int) -> None:
    value: Any = 1
    for number in range(levels):
        value = {"a": value, "b": 1} if number % 2 else [2, value]
    assert not deeper_than(value, levels)
    assert levels == 0 or deeper_than(value, levels - 1)


def test_format_md_lists_these_limits() -> None:
    text = (Path(bounds.__file__).parents[1] / "FORMAT.md").read_text()
    limits = text[text.index("## 9. Limits") :]
    for number in (
        MAX_OBJECTS,
        MAX_DOCUMENT,
        MAX_MANIFEST,
        MAX_REQUEST,
        MAX_ITEMS,
        MAX_CHUNKS,
        MAX_TEXT,
    ):
        assert f"| {number:,d}" in limits, number
    assert f"| dimensions of a tensor | {MAX_DIMENSIONS} |" in limits
    assert f"| {bounds.MAX_DEPTH} when written, {bounds.MAX_DEPTH_READ} when read |" in limits


def test_a_group_has_names_with_a_hash() -> None:
    assert is_group({"params": ["w", 1], "lr": 0.1})
    assert is_group({"params": []})
    assert not any(
        map(is_group, [None, [], {}, {"params": "w"}, {"params": [[1]]}, {"params": [{}]}])
    )


def test_values_are_the_same() -> None:
    assert is_same({"a": [1, (2, "b")]}, {"a": [1, (2, "b")]})
    assert is_same([np.arange(3)], [np.arange(3)])
    assert not is_same([np.arange(3)], [np.arange(4)])
    assert not is_same(np.arange(3), [0, 1, 2])
    assert not is_same({"a": 1}, {"b": 1})
    assert not is_same([1, 2], (1, 2))
    assert not is_same([1, 2], [1])


def test_the_types_of_many_values_are_those_of_each() -> None:
    """A long list of floats is judged by its bytes, which no other list has."""
    floats = [0.5] * 2000

    class Float(float):
        pass

    others: list[Any] = [1, None, "x" * 8, b"y" * 7, [0.5], Float(0.5), object(), "\ud800", 1 << 70]
    assert bounds.types_of(floats) == {float}
    for other in others:
        for values in ([*floats, other], [0.5, other, *floats]):
            assert bounds.types_of(values) == {float, type(other)}
    assert bounds.types_of(tuple(floats)) == {float}


def test_a_long_list_of_floats_is_encoded_once() -> None:
    floats, short, encoded = [0.5] * 2000, [0.5] * 3, bounds.Encoded()
    for values in (floats, short, [0.5, 1] * 1000, tuple(floats)):
        bounds.types_of(values, encoded)
    assert encoded == {id(floats): (floats, msgspec.msgpack.encode(floats))}
    floats[0] = "changed"  # type: ignore[call-overload]
    assert bounds.types_of(floats, encoded) == {float}, "the list was looked at again"
