"""Tests the request document."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.snapshot_request import END_OF_TIME, MAX_REQUEST, SnapshotRequest
from tests.shared.samples import steady
from tests.support.cases import each_case

MAPS = [bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF)]
"""The first bytes of the maps of msgpack."""


@steady
@given(
    st.none() | st.text(max_size=128), st.booleans(), st.dictionaries(st.text(),
    st.floats(allow_nan=False)), st.text(), st.floats(0, END_OF_TIME, exclude_max=True),
)  # fmt: skip
def test_round_trip(
    tag: str | None, persist: bool, metrics: dict[str, float], content: str, created: float
) -> None:
    request = SnapshotRequest(
        tag=tag, persist=persist, metrics=metrics, user_content=json.dumps(content), created=created
    )
    assert SnapshotRequest.decode(request.encode()) == request
    assert SnapshotRequest.decode(request.encode()).encode() == request.encode()


def test_defaults() -> None:
    assert SnapshotRequest.decode(b"\x80") == SnapshotRequest(
        tag=None, persist=True, metrics={}, user_content="null", created=0.0
    )


def test_metrics_may_be_anything_that_a_float_can() -> None:
    again = SnapshotRequest.decode(
        SnapshotRequest(metrics={"a": math.nan, "b": math.inf, "c": -0.0}).encode()
    ).metrics
    assert math.isnan(again["a"])
    assert again["b"] == math.inf
    assert math.copysign(1, again["c"]) == -1


def test_unknown_keys_are_ignored() -> None:
    assert SnapshotRequest.decode(
        msgspec.msgpack.encode({"tag": "best", "novelty": 1})
    ) == SnapshotRequest(tag="best")


@each_case(
    "document",
    [
        b"", b"\xc1", b"\x90", SnapshotRequest().encode()[:-1], SnapshotRequest().encode() + b"\0",
        msgspec.msgpack.encode({"tag": "x" * 129}), msgspec.msgpack.encode({"tag": 3}),
        msgspec.msgpack.encode({"persist": 1}), msgspec.msgpack.encode({"metrics": {"a": "nan"}}),
        msgspec.msgpack.encode({"metrics": [1]}), msgspec.msgpack.encode({"user_content": ""}),
        msgspec.msgpack.encode({"user_content": "{"}),
        msgspec.msgpack.encode({"user_content": "[" * 100_000 + "]" * 100_000}),
        msgspec.msgpack.encode({"user_content": None}),
        msgspec.msgpack.encode({"user_content": '"\\ud800"'}),
        msgspec.msgpack.encode({"created": "now"}), b"\x81\xa3tag\xa1\xff",
        b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    ],
)  # fmt: skip
def test_anything_but_a_request_is_refused(document: bytes) -> None:
    with pytest.raises(IntegrityError, match="request document cannot be read"):
        SnapshotRequest.decode(document)


@steady
@given(st.binary(max_size=100))
def test_noise_is_refused_unless_it_is_a_map(noise: bytes) -> None:
    assume(noise[:1] not in MAPS)
    with pytest.raises(IntegrityError, match="request document cannot be read"):
        SnapshotRequest.decode(noise)


def test_a_flipped_bit_is_refused_or_gives_a_request() -> None:
    """The document has no checksum itself."""
    whole, sound = SnapshotRequest(tag="best", metrics={"loss": 0.5}).encode(), 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        try:
            found = SnapshotRequest.decode(bytes(flipped))
        except IntegrityError:
            continue
        sound += 1
        assert SnapshotRequest.decode(found.encode()).encode() == found.encode()
    assert 0 < sound < 8 * len(whole)


@each_case(
    ("document", "reason"),
    [
        (SnapshotRequest(user_content='"' + "x" * MAX_REQUEST + '"').encode(), "at most 1,048,576"),
        (
            SnapshotRequest(user_content="[" * 300 + "]" * 300).encode(),
            "user_content that is nested more than 256 levels deep",
        ),
        (SnapshotRequest(created=math.nan).encode(), "expected a time from 1970 to 9999"),
        (SnapshotRequest(created=math.inf).encode(), "expected a time from 1970 to 9999"),
        (SnapshotRequest(created=-1.0).encode(), "expected a time from 1970 to 9999"),
        (SnapshotRequest(created=1e300).encode(), "expected a time from 1970 to 9999"),
    ],
)
def test_values_that_no_trainer_sends_are_refused(document: bytes, reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        SnapshotRequest.decode(document)


@each_case(
    ("most", "beyond"),
    [
        ({"tag": "ü" * 128}, {"tag": "ü" * 129}),
        ({"replicas": [[bytes(8), b""]] * 1024}, {"replicas": [[bytes(8), b""]] * 1025}),
        ({"replicas": [[bytes(8), bytes(4096)]]}, {"replicas": [[bytes(8), bytes(4097)]]}),
        (
            {"replicas": [[bytes(8), b"", 1, bytes(262144)]]},
            {"replicas": [[bytes(8), b"", 1, bytes(262145)]]},
        ),
        (
            {"node": {"claim": "0" * 32, "ranks": list(range(65536))}},
            {"node": {"claim": "0" * 32, "ranks": list(range(65537))}},
        ),
    ],
)
def test_members_at_their_limit_are_read_and_those_beyond_it_are_refused(
    most: dict[str, Any], beyond: dict[str, Any]
) -> None:
    SnapshotRequest.decode(msgspec.msgpack.encode(most))
    with pytest.raises(IntegrityError, match="length <="):
        SnapshotRequest.decode(msgspec.msgpack.encode(beyond))
