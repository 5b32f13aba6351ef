"""Tests the manifest: it is either whole and sound, or refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats.manifest import MOST_INLINE, Manifest, PartEntry, plain_metrics
from ckptd.shared.names import part_file
from tests.shared.samples import NONCE, WRITER, flip, steady
from tests.support.cases import each_case

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def entry(rank: int) -> PartEntry:
    return PartEntry(
        rank=rank,
        file=part_file(rank, NONCE),
        bytes=12288,
        raw_bytes=500,
        items=4,
        index_sha256=f"{rank:064x}",
    )


def make(ranks: int = 2, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "job": "gpt", "attempt": 2, "step": 1000, "tag": "step-00001000.a0002", "seq": 7,
        "world_size": ranks, "created": "2026-01-02T03:04:05+00:00",
        "parts": [entry(rank) for rank in range(ranks)],
        "metadata": {"state_dict_metadata": {"w": {"dtype": "float32", "size": [4]}},
        "planner_data": None}, "metrics": {"loss": 0.25, "ratio": "nan"},
        "user_content": {"épochs": [1, 2.5, None]}, "writer": WRITER,
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


def sealed(text: str | bytes) -> bytes:
    """Return any text with the digest that makes it whole."""
    body = text.encode() if isinstance(text, str) else text
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def resealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    members = json.loads(make().encode())
    del members["sha256"]
    change(members)
    return sealed(json.dumps(members)[:-1] + ",")


def test_round_trip() -> None:
    data = make().encode()
    assert Manifest.decode(data) == make()
    assert Manifest.decode(data).encode() == data
    assert make(8).nbytes == 8 * 12288


def test_it_is_json_with_one_member_a_line_and_the_digest_last() -> None:
    data = make().encode()
    lines = data.decode().split("\n")
    assert (lines[0], lines[-2:]) == ("{", ["}", ""])
    keys = [next(iter(json.loads("{" + line.rstrip(",") + "}"))) for line in lines[1:-2]]
    assert keys == [
        "format", "version", "features", "job", "attempt", "step", "tag", "seq", "world_size",
        "created", "parts", "metadata", "metrics", "user_content", "writer", "sha256",
    ]  # fmt: skip
    before = data[: data.index(b'"sha256"')]
    assert json.loads(data)["sha256"] == hashlib.sha256(before).hexdigest()
    assert "épochs" in data.decode()


@steady
@given(JSON, st.dictionaries(st.text(), st.floats()), st.integers(0, 10**17) | st.none())
def test_user_content_and_metrics_round_trip(
    content: Any, metrics: dict[str, float], step: int | None
) -> None:
    text = json.dumps(content)
    manifest = make(
        1, user_content=msgspec.json.decode(text), metrics=plain_metrics(metrics), step=step
    )
    again = Manifest.decode(manifest.encode())
    assert again == manifest
    assert json.dumps(again.user_content) == text


def test_metrics_that_json_cannot_say_become_text() -> None:
    plain = plain_metrics(
        {"a": 0.1, "b": math.nan, "c": math.inf, "d": -math.inf, "e": -0.0, "f": 5e-324}
    )
    assert plain == {"a": 0.1, "b": "nan", "c": "inf", "d": "-inf", "e": -0.0, "f": 5e-324}
    assert Manifest.decode(make(metrics=plain).encode()).metrics == plain
    assert (
        b'"metrics": {"a":0.1,"b":"nan","c":"inf","d":"-inf","e":-0.0,"f":5e-324}'
        in make(metrics=plain).encode()
    )
    with pytest.raises(ValueError, match="JSON"):
        make(metrics={"a": math.nan}).encode()


def test_order_is_attempt_step_seq() -> None:
    manifests = [
        make(attempt=a, step=s, seq=q)
        for a, s, q in [(2, 5, 1), (1, 900, 9), (2, None, 3), (2, 5, 4), (3, 0, 2)]
    ]
    ordered = sorted(manifests, key=lambda m: m.order)
    assert [(m.attempt, m.step, m.seq) for m in ordered] == [
        (1, 900, 9),
        (2, None, 3),
        (2, 5, 1),
        (2, 5, 4),
        (3, 0, 2),
    ]


# -- damage


def test_every_flipped_bit_is_seen() -> None:
    data = make(1).encode()
    assert len(data) < 1000
    for bit in range(8 * len(data)):
        with pytest.raises(IntegrityError):
            Manifest.decode(flip(data, bit))


def test_every_truncation_is_seen() -> None:
    data = make(1).encode()
    assert len(data) > 300
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            Manifest.decode(data[:length])
        with pytest.raises(IntegrityError):
            Manifest.decode(data[:length].ljust(len(data), b"\0"))


@pytest.mark.parametrize("more", [b"\n", b"\0", b" ", b"}\n"])
def test_extra_bytes_before_or_behind_are_seen(more: bytes) -> None:
    for data in (make().encode() + more, more + make().encode(), make().encode() * 2):
        with pytest.raises(IntegrityError):
            Manifest.decode(data)


# -- whole, but not sound


@each_case(
    ("ranks", "world_size"),
    [
        ([], 1),
        ([0], 2),
        ([0, 0], 2),
        ([1, 0], 2),
        ([1, 2], 2),
        ([0, 1, 2], 2),
        ([0, 2], 2),
        ([0, 1], 1),
    ],
)
def test_a_manifest_must_list_one_part_of_each_rank(ranks: list[int], world_size: int) -> None:
    manifest = make(world_size, parts=[entry(rank) for rank in ranks])
    with pytest.raises(
        IntegrityError, match=f"manifest of {world_size} ranks lists parts of ranks"
    ):
        Manifest.decode(manifest.encode())


@each_case(
    "file",
    [
        "",
        "x",
        "../rank-00000." + "0" * 32 + ".ckpt",
        "manifest.json",
        part_file(1, NONCE),
        part_file(0, NONCE) + ".tmp",
    ],
)
def test_a_part_must_have_the_name_of_its_rank(file: str) -> None:
    with pytest.raises(IntegrityError, match="not the name of a part of rank 0"):
        Manifest.decode(make(1, parts=[msgspec.structs.replace(entry(0), file=file)]).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(version=3),
        lambda d: d.update(features=["time-travel"]),
        lambda d: d.update(version=3, parts="elsewhere", attempt=None),
        lambda d: (d.update(version=4), d.pop("world_size")),
    ],
)
def test_a_newer_manifest_is_not_called_damaged(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(NewerFormat, match="newer ckptd"):
        Manifest.decode(resealed(change))


@each_case(
    "change",
    [
        lambda d: d.update(format="something"),
        lambda d: d.update(format="something", version=2),
        lambda d: d.pop("format"),
        lambda d: d.pop("version"),
        lambda d: d.pop("job"),
        lambda d: d.pop("seq"),
        lambda d: d.update(attempt=-1),
        lambda d: d.update(attempt="2"),
        lambda d: d.update(step=1.5),
        lambda d: d.update(seq=1 << 62),
        lambda d: d.update(world_size=0, parts=[]),
        lambda d: d["parts"][0].update(index_sha256="0" * 63),
        lambda d: d["parts"][0].update(index_sha256="G" * 64),
        lambda d: d["parts"][0].update(index_sha256="0" * 64 + "\n"),
        lambda d: d["parts"][0].update(bytes=-1),
        lambda d: d["parts"][0].pop("file"),
        lambda d: d.update(metrics={"x": [1]}),
        lambda d: d.update(metadata=None),
    ],
)
def test_impossible_members_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(IntegrityError) as caught:
        Manifest.decode(resealed(change))
    assert not isinstance(caught.value, NewerFormat)


def test_unknown_members_are_ignored() -> None:
    assert Manifest.decode(resealed(lambda d: d.update(novelty={"x": 1}))) == make()


@each_case(
    "data",
    [
        b"",
        sealed(""),
        sealed("{"),
        sealed("[1, "),
        sealed('{"format": "ckptd-manifest", "version": 1, "job": ' + "[" * 100_000),
        sealed(
            '{"format": "ckptd-manifest", "version": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + ","
        ),
        sealed(b'{"format": "ckptd-manifest", "version": 1, "job": "\xff",'),
        sealed('{"format": "ckptd-manifest", "version": 1e999,'),
    ],
    ids=[
        "nothing",
        "digest alone",
        "no members",
        "no map",
        "open brackets",
        "deep",
        "no UTF-8",
        "infinite version",
    ],
)
def test_anything_but_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        Manifest.decode(data)


@steady
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(IntegrityError):
        Manifest.decode(noise)
    with pytest.raises(IntegrityError):
        Manifest.decode(sealed(noise))


def test_a_manifest_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before its digest is computed or a value is decoded."""
    data = make().encode()
    monkeypatch.setattr("ckptd.shared.formats.manifest.MAX_MANIFEST", len(data))
    assert Manifest.decode(data) == make()
    monkeypatch.setattr("ckptd.shared.formats.manifest.MAX_MANIFEST", len(data) - 1)
    with pytest.raises(IntegrityError, match=f"manifest has more than {len(data) - 1:,d} bytes"):
        Manifest.decode(data)


def test_content_that_is_nested_too_deep_is_refused() -> None:
    """A reader of the content may be recursive, and must not run out of stack."""

    def nested(levels: int) -> bytes:
        return resealed(
            lambda members: members.update(user_content=json.loads("[" * levels + "]" * levels))
        )

    assert Manifest.decode(nested(256)).user_content
    with pytest.raises(IntegrityError):
        Manifest.decode(nested(257))


def test_a_manifest_too_large_for_readers_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make().encode()
    monkeypatch.setattr("ckptd.shared.formats.manifest.MAX_MANIFEST", len(data) - 1)
    with pytest.raises(
        IntegrityError,
        match=f"manifest would have {len(data)} bytes, and readers accept at most {len(data) - 1}",
    ):
        make().encode()


def large(ranks: int = 3) -> Manifest:
    """Return a manifest that is too large for version 1 in a root."""
    tensors = {
        f"layers.{number:06d}.weight": {"dtype": "float32", "size": [4], "chunks": [[[0], [4]]]}
        for number in range(16_000)
    }
    return make(
        ranks,
        metadata={"state_dict_metadata": tensors, "planner_data": None},
        retention=["LatestN(n=5)"],
    )


@cache
def of_version_2() -> bytes:
    return large().split()[0]


def test_a_small_manifest_is_not_split() -> None:
    assert make().split() == (make().encode(), {})
    assert b"metadata_object" not in make().encode()
    assert b"deleter_features" not in make().encode()


def test_a_large_manifest_is_small_beside_its_metadata_object() -> None:
    whole = large()
    data, objects = whole.split()
    assert len(data) < 4096 < MOST_INLINE < len(whole.encode())
    small = Manifest.decode(data)
    assert (small.version, small.features, small.metadata, small.tensors) == (
        2,
        ["metadata-object"],
        {},
        16_000,
    )
    assert small.parts == whole.parts
    assert small.retention == whole.retention
    assert small.files == [*(part.file for part in whole.parts), *objects]
    assert (small.encode(), small.split()) == (data, (data, {}))


def test_parts_in_columns_keep_every_field() -> None:
    parts = [msgspec.structs.replace(entry(0), files=3, linked_bytes=4096), entry(1)]
    small = Manifest.decode(
        msgspec.structs.replace(large(2), parts=parts, features=["files", "linked-files"]).split()[
            0
        ]
    )
    assert small.parts == parts
    assert small.features == ["files", "linked-files", "metadata-object"]


@pytest.mark.parametrize(
    ("counts", "total"), [((0, 0), 0), ((3, 4), 7), ((3, None), None), ((None, None), None)]
)
def test_the_count_is_known_if_that_of_every_part_is(
    counts: tuple[int | None, ...], total: int | None
) -> None:
    parts = [
        msgspec.structs.replace(entry(rank), non_finite=count) for rank, count in enumerate(counts)
    ]
    one = Manifest.decode(make(parts=parts).encode())
    assert (one.non_finite, one.parts) == (total, parts)
    two = Manifest.decode(msgspec.structs.replace(large(2), parts=parts).split()[0])
    assert (two.version, two.non_finite) == (2, total)
    assert make().non_finite is None


@each_case(
    "change",
    [
        lambda d: d["parts"].update(nonces=d["parts"]["nonces"][:-4]),
        lambda d: d["parts"].update(non_finite=[1]),
        lambda d: d["parts"].update(nonces="?" * 64),
        lambda d: d["parts"].update(digests=d["parts"]["nonces"]),
        lambda d: d["parts"].update(items=[1, 2]),
        lambda d: d["parts"].update(files=[1, 0, 1]),
        lambda d: d.update(parts=[]),
        lambda d: d.update(world_size=4),
        lambda d: d.pop("metadata_object"),
        lambda d: d["metadata_object"].update(index=3),
        lambda d: d["metadata_object"].update(bytes=1 << 41),
        lambda d: d["metadata_object"].update(index_sha256="0"),
        lambda d: d["metadata_object"].update(file="../" + d["metadata_object"]["file"]),
        lambda d: d["metadata_object"].update(file="manifest.json"),
        lambda d: d["metadata_object"].update(file=d["metadata_object"]["file"] + "\n"),
    ],
)
def test_an_inconsistent_manifest_of_version_2_is_refused(
    change: Callable[[dict[str, Any]], object],
) -> None:
    members = json.loads(of_version_2())
    del members["sha256"]
    change(members)
    with pytest.raises(IntegrityError) as caught:
        Manifest.decode(sealed(json.dumps(members)[:-1] + ","))
    assert type(caught.value) is IntegrityError


def test_features_for_deleters_do_not_concern_readers() -> None:
    manifest = make(deleter_features=["chunk-references"])
    assert Manifest.decode(manifest.encode()) == manifest
    assert (manifest.unknown_deleter_features, make().unknown_deleter_features) == (
        ["chunk-references"],
        [],
    )
