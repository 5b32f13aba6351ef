"""Tests that plain values of the standard library come back equal, with their zones and
folds.
"""

from __future__ import annotations

import datetime as dt
import io
import uuid
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from ckptd.agent.state.packer import Packer
from ckptd.agent.state.values import decode
from ckptd.shared.errors import IntegrityError, NewerFormat, UnsavableValue
from ckptd.shared.formats.standard import make, parts_of
from tests.support.cases import each_case

ZURICH, EAST = (
    zoneinfo.ZoneInfo("Europe/Zurich"),
    dt.timezone(dt.timedelta(hours=-5, microseconds=3), "east"),
)
VALUES = [
    dt.datetime(2026, 10, 25, 2, 30, 1, 7, ZURICH, fold=1),
    dt.datetime(1, 1, 1, tzinfo=EAST),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC),
    dt.datetime(2026, 1, 2),
    dt.date(2026, 2, 28),
    dt.time(1, 2, 3, 4, ZURICH),
    dt.time(23, 59, fold=1),
    dt.timedelta(days=-1, seconds=3, microseconds=5),
    dt.UTC,
    EAST,
    ZURICH,
    Decimal("1.50"),
    Decimal("-Infinity"),
    Fraction(-2, 3),
    uuid.UUID(int=5),
    range(0, 10**30, -7),
]


@each_case("value", VALUES, ids=repr)
def test_every_value_comes_back(value: Any) -> None:
    found = decode(Packer().encode({"value": value}))["value"]
    assert (type(found), repr(found)) == (type(value), repr(value))
    assert getattr(found, "fold", 0) == getattr(value, "fold", 0)


def test_a_time_in_a_zone_of_another_class_is_refused() -> None:
    class Moon(dt.tzinfo):
        def utcoffset(self, when: dt.datetime | None) -> dt.timedelta:
            return dt.timedelta(0)

        dst = utcoffset

        def tzname(self, when: dt.datetime | None) -> str:
            return "moon"

    assert parts_of(dt.datetime(2026, 1, 1, tzinfo=Moon())) is None
    with pytest.raises(
        UnsavableValue, match=r"^when: a value of type datetime.datetime could not be brought back"
    ):
        Packer().encode({"when": dt.datetime(2026, 1, 1, tzinfo=Moon())})
    assert parts_of("text") is None


@each_case(
    "parts", [[5, "1"], [], ["date", 1], ["range", "a", "1", "1"], ["ZoneInfo", "../../etc/passwd"]]
)
def test_parts_that_make_no_value_are_damage(parts: list[Any]) -> None:
    import msgspec

    document = msgspec.msgpack.encode(
        {"value": msgspec.msgpack.Ext(23, msgspec.msgpack.encode(parts))}
    )
    with pytest.raises(IntegrityError, match="values document cannot be read"):
        decode(document)
    with pytest.raises(Exception, match=".*"):
        make(parts)


def test_a_type_of_a_later_version_is_no_damage() -> None:
    document = msgspec.msgpack.encode(
        {"value": msgspec.msgpack.Ext(23, msgspec.msgpack.encode(["exec", "1"]))}
    )
    with pytest.raises(
        NewerFormat,
        match="^a value has the unknown type 'exec': it was written by a newer ckptd; upgrade this "
        "one$",
    ):
        decode(document)
    for kind in (28, 30):
        with pytest.raises(
            NewerFormat,
            match="^a value has the unknown kind 'a': it was written by a newer ckptd; upgrade "
            "this one$",
        ):
            decode(
                msgspec.msgpack.encode(
                    msgspec.msgpack.Ext(
                        kind, msgspec.msgpack.encode(["a", "b", 0][: 2 if kind == 28 else 3])
                    )
                )
            )


def stream(content: str | bytes, position: int, newline: str | None = "\n") -> Any:
    made: Any = (
        io.BytesIO(content) if isinstance(content, bytes) else io.StringIO(content, newline=newline)
    )
    made.seek(position)
    return made


@each_case(
    "value",
    [
        stream(b"", 0),
        stream(b"abc\x00", 2),
        stream(b"abc", 9),
        stream("", 0),
        stream("a\nü", 1),
        stream("a\r\nb\rc", 4, ""),
        stream("a\r\nb", 3, None),
    ],
    ids=lambda value: repr(value.__getstate__()),
)
def test_a_stream_in_memory_comes_back_with_its_position_and_goes_on_in_the_same_way(
    value: Any,
) -> None:
    found = decode(Packer().encode({"value": value}))["value"]
    # The last is its attributes.
    assert (type(found), found.__getstate__()[:-1]) == (type(value), value.__getstate__()[:-1])
    for one in (found, value):
        one.write("\n\r" if isinstance(one, io.StringIO) else b"xyz")
    assert found.__getstate__()[:-1] == value.__getstate__()[:-1]


class Stream(io.BytesIO):
    """A stream of a program's own."""


def test_streams_that_would_come_back_as_others_are_refused() -> None:
    closed, with_attribute = io.BytesIO(b"x"), io.BytesIO(b"x")
    closed.close()
    with_attribute.name = "x"
    for value in (closed, with_attribute, Stream()):
        with pytest.raises(UnsavableValue, match="^buffer: a value of type "):
            Packer().encode({"buffer": value})
    with pytest.raises(UnsavableValue, match="^buffer: a text or key holds surrogates"):
        Packer().encode({"buffer": io.StringIO("\ud800")})


def fraction(text: str) -> bytes:
    """Return a values document with a fraction that has this text."""
    payload = msgspec.msgpack.encode(["Fraction", text])
    return msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(23, payload)})


@each_case("text", ["1e999999999", "1/0", "0.5", "nan", "1/-2", "", " 1"])
def test_a_fraction_is_two_integers(text: str) -> None:
    """`Fraction` itself accepts an exponent, and would compute its power of ten."""
    with pytest.raises(IntegrityError):
        decode(fraction(text))
    assert decode(fraction("-3/4")) == {"x": Fraction(-3, 4)}
