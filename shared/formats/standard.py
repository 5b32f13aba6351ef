"""Encodes values of the standard library that are plain data, such as dates and decimal
numbers (FORMAT.md, section 3).

A file chooses only between the types of this table, so no other code runs when a value
is decoded.
"""

from __future__ import annotations

import datetime as dt
import io
import re
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast
from uuid import UUID

from ckptd.shared.errors import NewerFormat, NotFound


def parts_of(value: Any) -> list[Any] | None:
    """Return the name of the value's type, and what its reader needs to make it again.

    Return None for any other value.

    Return None as well for a time in a zone that is neither a fixed offset nor from the
    IANA database, because only its class can make it.
    """
    parts = _PARTS.get(type(value))
    if parts is None:
        return None
    zone = _zone(value.tzinfo) if isinstance(value, (dt.datetime, dt.time)) else []
    return None if zone is None else [type(value).__name__, *parts(value), *zone]


def make(parts: Any) -> Any:
    """Return the value that consists of these parts, as `parts_of` returns them.

    Raises NewerFormat for an unknown type, and NotFound for a time zone that this
    machine does not have.
    """
    name, *rest = parts
    if isinstance(name, str) and name not in _MAKERS:
        raise NewerFormat(
            f"a value has the unknown type {name!r}: it was written by a newer ckptd; upgrade "
            f"this one"
        )
    return _MAKERS[name](*rest)


def stream_parts(stream: Any) -> list[Any] | None:
    """Return the kind, the content and the position of an open stream in memory.

    For a text stream, the last part says how it ends lines. Return None for any other
    value, for a stream of a subclass, and for a stream that has attributes of its own.
    """
    if type(stream) not in (io.BytesIO, io.StringIO) or stream.closed or vars(stream):
        return None
    if isinstance(stream, io.BytesIO):
        return ["BytesIO", stream.getvalue(), stream.tell()]
    content, newline, position, _ = cast(Any, stream).__getstate__()
    return ["StringIO", content, position, newline]


def make_stream(parts: Any) -> io.BytesIO | io.StringIO:
    """Return the stream that consists of these parts, as `stream_parts` returns them.

    Raises NewerFormat for an unknown kind.
    """
    kind, content, position, *rest = parts
    if kind == "BytesIO":
        made = io.BytesIO(content)
        made.seek(position)
        return made
    if kind != "StringIO":
        raise NewerFormat(
            f"a value has the unknown kind {kind!r}: it was written by a newer ckptd; upgrade "
            f"this one"
        )
    text = io.StringIO()
    cast(Any, text).__setstate__((content, rest[0], position, None))
    return text


def _zone(zone: dt.tzinfo | None) -> list[Any] | None:
    """Return [] for no zone, [key] for one of the IANA database, and [days, seconds,
    microseconds, name] for a fixed offset.
    """
    if zone is None:
        return []
    if isinstance(zone, zoneinfo.ZoneInfo):
        return None if zone.key is None else [zone.key]
    if type(zone) is not dt.timezone:
        return None
    offset = zone.utcoffset(None)
    return [offset.days, offset.seconds, offset.microseconds, zone.tzname(None)]


def _iana_zone(key: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError:
        raise NotFound(
            f"the checkpoint holds a time in the zone {key!r}, which this machine does not know: "
            f"install the package tzdata"
        ) from None


def _made_zone(parts: tuple[Any, ...]) -> dt.tzinfo | None:
    if len(parts) <= 1:
        return _iana_zone(*parts) if parts else None
    *offset, name = parts
    plain = dt.timezone(dt.timedelta(*offset))
    return plain if plain.tzname(None) == name else dt.timezone(dt.timedelta(*offset), name)


_PARTS: dict[type, Callable[[Any], list[Any]]] = {
    dt.datetime: lambda t: [
        t.year,
        t.month,
        t.day,
        t.hour,
        t.minute,
        t.second,
        t.microsecond,
        t.fold,
    ],
    dt.date: lambda t: [t.year, t.month, t.day],
    dt.time: lambda t: [t.hour, t.minute, t.second, t.microsecond, t.fold],
    dt.timedelta: lambda t: [t.days, t.seconds, t.microseconds],
    dt.timezone: lambda t: _zone(t) or [],
    zoneinfo.ZoneInfo: lambda t: _zone(t) or [],
    Decimal: lambda value: [str(value)],
    Fraction: lambda value: [str(value)],
    UUID: lambda value: [value.bytes],
    range: lambda value: [str(value.start), str(value.stop), str(value.step)],
}
_FRACTION = re.compile(r"(-?\d+)(?:/(\d+))?")
"""A fraction as `str` writes it. `Fraction` accepts exponents too, and 1e999999999
would never end.
"""
_MAKERS: dict[str, Callable[..., Any]] = {
    "datetime": lambda y, mo, d, h, m, s, us, fold, *zone: dt.datetime(
        y, mo, d, h, m, s, us, _made_zone(zone), fold=fold
    ),
    "date": dt.date,
    "time": lambda h, m, s, us, fold, *zone: dt.time(h, m, s, us, _made_zone(zone), fold=fold),
    "timedelta": dt.timedelta,
    "timezone": lambda *p: _made_zone(p),
    "ZoneInfo": lambda *p: _made_zone(p),
    "Decimal": Decimal,
    "Fraction": lambda text: Fraction(*map(int, _FRACTION.fullmatch(text).groups(default="1"))),  # type: ignore[union-attr]
    "UUID": lambda data: UUID(bytes=data),
    "range": lambda *p: range(*map(int, p)),
}
