"""Tests messages: each is decoded as it was encoded, bounds are checked, and noise
raises only ProtocolError.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import ProtocolError
from ckptd.shared.wire import messages as m
from tests.shared.samples import steady
from tests.shared.wire.samples import MESSAGES
from tests.support.cases import each_case

RECOVERED = {
    "type": "recovered", "id": 1, "step": None, "attempt": 1, "tag": "best.a0001",
    "source": "storage", "seconds": 0.0, "bytes": 0,
}  # fmt: skip
"""A ReportRecovery that is sound."""


def test_there_is_one_of_every_type() -> None:
    assert sorted({type(message) for message in MESSAGES}, key=str) == sorted(
        get_args(m.Message), key=str
    )


@each_case("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message
    plain = msgspec.msgpack.decode(m.encode(message))
    assert plain["type"] == type(message).__struct_config__.tag
    assert set(plain) <= {"type", *message.__struct_fields__}


@each_case("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_unknown_keys_are_ignored(message: m.Message) -> None:
    plain = {**msgspec.msgpack.decode(m.encode(message)), "novelty": [1, {"x": None}]}
    assert m.decode(msgspec.msgpack.encode(plain)) == message


def test_types_on_the_wire() -> None:
    assert {cls.__struct_config__.tag for cls in get_args(m.Message)} == {
        "hello", "welcome", "status", "status-report", "begin", "began", "allocate", "segments",
        "acquire", "granted", "refused", "seal", "sealed", "abandon", "plan", "persist", "find",
        "found", "fetch", "fetched", "forget", "forgotten", "detach", "done", "progress", "error",
        "heard", "deliver", "delivered", "holds", "uploads",
            "waiting", "remark", "recovered", "lend", "lent", "drain", "drained", "host", "hosted",
        "copy-failed", "peer-replicas",
    }  # fmt: skip


def test_defaults_are_left_out() -> None:
    assert msgspec.msgpack.decode(m.encode(m.Sealed(re=6))) == {"type": "sealed", "re": 6}
    assert m.decode(
        msgspec.msgpack.encode({"type": "begin", "id": 1, "job": "gpt", "rank": 0, "world_size": 1})
    ) == m.Begin(id=1, job="gpt", rank=0, world_size=1, attempt=0)


@each_case(
    "plain",
    [
        {"type": "hello", "id": -1, "min_version": 1, "max_version": 1},
        {"type": "hello", "id": 1 << 62, "min_version": 1, "max_version": 1},
        {"type": "hello", "id": 1, "min_version": "1", "max_version": 1},
        {"type": "hello", "id": 1, "min_version": 1},
        {"type": "hello", "min_version": 1, "max_version": 1},
        {"type": "hello", "id": 1, "min_version": 1, "max_version": 1, "client": "x" * 257},
        {"type": "hello", "id": 1, "min_version": 1, "max_version": 1, "features": [1]},
        {"type": "begin", "id": 1, "job": "x" * 129, "rank": 0, "world_size": 1},
        {"type": "begin", "id": 1, "job": "x", "rank": -1, "world_size": 1},
        {"type": "begin", "id": 1, "job": "x", "rank": 1 << 24, "world_size": 1},
        {"type": "begin", "id": 1, "job": "x", "rank": 0, "world_size": 0},
        {"type": "begin", "id": 1, "job": "x", "rank": 0, "world_size": 1 << 24},
        {"type": "begin", "id": 1, "job": "x", "rank": 0, "world_size": 1, "attempt": 10**9},
        {"type": "begin", "id": 1, "job": "x", "rank": 0, "world_size": 1, "attempt": -1},
        {"type": "begin", "id": 1, "job": None, "rank": 0, "world_size": 1},
        {"type": "allocate", "id": 1, "capacity": -1, "count": 1},
        {"type": "allocate", "id": 1, "capacity": 1 << 62, "count": 1},
        {"type": "allocate", "id": 1, "capacity": 1, "count": 0},
        {"type": "allocate", "id": 1, "capacity": 1, "count": 17},
        {"type": "acquire", "id": 1, "step": -1, "wait": 1.0},
        {"type": "acquire", "id": 1, "step": 10**18, "wait": 1.0},
        {"type": "acquire", "id": 1, "step": 1, "wait": -0.1},
        {"type": "acquire", "id": 1, "step": 1, "wait": 3600.1},
        {"type": "acquire", "id": 1, "step": 1, "wait": float("nan")},
        {"type": "acquire", "id": 1, "step": 1, "wait": float("inf")},
        {"type": "acquire", "id": 1, "step": 1, "wait": 1.0, "name": "x" * 4097},
        {"type": "seal", "id": 1, "segment": "x" * 129, "attempt": 1, "step": 1},
        {"type": "seal", "id": 1, "segment": b"x", "attempt": 1, "step": 1},
        {"type": "fetch", "id": 1, "attempt": 1, "step": None},
        {"type": "find", "id": 1, "step": 1.5},
        RECOVERED | {"step": -1},
        RECOVERED | {"source": "x" * 17},
        RECOVERED | {"seconds": -0.1},
        RECOVERED | {"bytes": -1},
        {"type": "granted", "re": 1, "segment": "x" * 129},
        {"type": "fetched", "re": 1, "ranks": [1 << 24]},
        {"type": "done", "re": -1},
        {"type": "done", "id": 1},
        {"type": "nonsense", "id": 1},
        {"type": 7, "id": 1},
        {"id": 1},
        {},
        [],
        None,
        "hello",
    ],
)
def test_values_out_of_bounds_are_refused(plain: Any) -> None:
    with pytest.raises(ProtocolError, match="a message cannot be decoded"):
        m.decode(msgspec.msgpack.encode(plain))


@each_case(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x81\xa4type\xdb\xff\xff\xff\xff",
        b"\x83\xa4type\xa5hello\xa2id\x01\xa8features\xdd\xff\xff\xff\xff",
        b"\x83\xa4type\xa5hello\xa2id\x01\xa1z\xdf\xff\xff\xff\xff",
        b"\x83\xa4type\xa5hello\xa2id\x01\xa1z" + b"\x91" * 100_000,
        b"\x91" * 100_000,
        b"\x81\xa4type\xa2\xff\xff",
        m.encode(m.Status(id=1)) + b"\0",
    ],
    ids=[
        "nothing",
        "reserved",
        "cut short",
        "4 GB of text",
        "4 billion features",
        "4 billion keys",
        "deep unknown",
        "deep",
        "no UTF-8",
        "more",
    ],
)
def test_hostile_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode(payload)


@steady
@given(st.binary(max_size=80))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode(noise)


@steady
@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_are_messages_or_protocol_errors(
    message: m.Message, data: st.DataObject
) -> None:
    payload = bytearray(m.encode(message))
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        payload[at] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(m.decode(bytes(payload)), get_args(m.Message))
    except ProtocolError:
        pass


def test_a_welcome_of_an_older_daemon_has_no_instance() -> None:
    """`instance` was added after version 0.1.0.

    Older agents ignore it, as they ignore every unknown key.
    """
    new = m.Welcome(re=1, version=1, instance="ab" * 16)
    assert m.decode(m.encode(new)) == new
    old = msgspec.msgpack.encode({"type": "welcome", "re": 1, "version": 1})
    assert m.decode(old) == m.Welcome(re=1, version=1, instance="")
    with pytest.raises(ProtocolError):
        m.decode(
            msgspec.msgpack.encode({"type": "welcome", "re": 1, "version": 1, "instance": "x" * 65})
        )


def _map_of(*members: tuple[str, Any]) -> bytes:
    """Return a msgpack map with these members, which may have a key twice."""
    return bytes([0x80 + len(members)]) + b"".join(
        msgspec.msgpack.encode(each) for member in members for each in member
    )


def test_of_a_key_that_comes_twice_the_last_value_counts() -> None:
    """PROTOCOL.md, section 1: no sender does this, and a receiver may refuse it."""
    assert m.decode(_map_of(("id", 1), ("type", "status"), ("id", 2))) == m.Status(id=2)
    with pytest.raises(ProtocolError):
        m.decode(_map_of(("type", "status"), ("type", "persist"), ("id", 2)))
