"""Checks a values document without building its values (FORMAT.md, section 3), and
lists the tensors that it names.

The check walks over the bytes, so that it takes no memory in proportion to the
document, and a thread that runs it never keeps the interpreter from other threads for
long. It needs neither torch nor NumPy. What only torch can judge, such as the bytes of
`torch.save`, is counted in `Checked.unjudged`, and values of a newer version in
`Checked.newer`.
"""

from __future__ import annotations

import ast
import codecs
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound
from ckptd.shared.formats import standard
from ckptd.shared.formats.bounds import BYTES_OF_A_LIST, MAX_DEPTH_READ, MAX_OBJECTS, most_lists
from ckptd.shared.formats.plan import MAX_TEXT

REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "dataclass": (), "namedtuple": (), "namespace": (), "simple-namespace": (), "config": (),
    "chain-map": ("maps",), "slice": ("start", "stop", "step"), "generator": ("device", "state"),
    "numpy-generator": ("state",), "numpy-random-state": ("state",), "python-random": ("state",),
    "sparse": ("layout", "size"), "nested": ("jagged", "parts"), "subclass": ("__size__",
    "__stride__"),
}  # fmt: skip
"""The kinds of records, each with the fields that a reader needs."""
_MADE_OF_FIELDS = frozenset(REQUIRED_FIELDS) - {"dataclass", "namedtuple", "config"}
"""The kinds of records that a reader makes again, so that their fields must fit. A dict
takes the place of the others.
"""
_CONSTANTS = frozenset({"layout", "memory_format", "qscheme", "finfo", "iinfo", "version"})
PATHS = frozenset({"PurePosixPath", "PureWindowsPath", "PosixPath", "Path", "PurePath"})
"""The classes of paths that a document may name."""

_WINDOW = 1 << 20
"""The most bytes that one call looks at. A thread cannot be interrupted within such a
call.
"""
_RUN = 1 << 16
"""The most numbers that one call looks at."""
_SMALL = 1 << 20
"""The most bytes of a value of the standard library. It is made to see whether it can
be made.
"""
_MOST_DIGITS = 4300
"""The most digits of an integer beyond 64 bits, as Python reads them by default."""
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNTED = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_WIDTHS = {
    **dict.fromkeys([*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3], 1),
    **dict.fromkeys([0xCC, 0xD0], 2), **dict.fromkeys([0xCD, 0xD1], 3),
    **dict.fromkeys([0xCA, 0xCE, 0xD2], 5), **dict.fromkeys([0xCB, 0xCF, 0xD3], 9),
}  # fmt: skip
"""Gives the length in bytes of a number, None, True or False, by its first byte."""
_RUNS = {
    width: re.compile(
        b"(?:[%s].{%d})++"
        % (b"".join(b"\\x%02x" % kind for kind, of in _WIDTHS.items() if of == width), width - 1),
        re.DOTALL,
    )
    for width in set(_WIDTHS.values())
}
"""Matches a run of numbers that have the same length in bytes, by this length."""
_HASHED = frozenset({1, 2, 4, 6, 7, 9, 10, 11, 12, 13, 14, 23, 27, 28, 29})
"""The extension types whose values have a hash, 2 and 4 if their items have one."""
_LAST = 30
"""The highest extension type that this version knows."""


@dataclass(slots=True)
class Checked:
    """Collects what the check of one values document finds.

    tensors: the names of the tensors and blobs that the document names. unjudged: how
    many values only torch can judge. newer: how many values have a type of a newer
    version.
    """

    tensors: set[str] = field(default_factory=set)
    unjudged: int = 0
    newer: int = 0


class _Wrong(Exception):
    """Raised inside the check. `keys` has the path of the value, innermost key first."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.keys: list[str] = []


def check_values(data: bytes, levels: int = MAX_DEPTH_READ) -> Checked:
    """Return what a values document holds.

    Raises IntegrityError, naming the key, if a reader could not make its values.

    levels: the most levels of containers.
    """
    walk = _Walk(data, levels)
    try:
        walk.document()
    except _Wrong as wrong:
        where = ".".join(reversed(wrong.keys))[-200:]
        raise IntegrityError(
            f"values document: {where!r} {wrong.why}" if where else f"values document {wrong.why}"
        ) from None
    except RecursionError:
        raise IntegrityError(f"values document is nested more than {levels} levels deep") from None
    if walk.lists > most_lists(len(data), BYTES_OF_A_LIST) or walk.others > MAX_OBJECTS:
        raise IntegrityError(
            f"values document has {walk.lists:,d} lists, and {walk.others:,d} maps and texts: "
            f"more than any reader accepts"
        )
    return walk.found


class _Walk:
    """A walk over the bytes of one values document.

    Each method takes the offset of a value, and returns the offset behind it.

    `lists` and `others` count the objects as `bounds.check_msgpack` does.
    """

    def __init__(self, data: bytes, levels: int) -> None:
        self._data = data
        self._end = len(data)
        self._levels = levels
        self.found = Checked()
        self.lists = self.others = 0

    def document(self) -> None:
        count, at = self._map(0, "is not a map")
        members: dict[str, tuple[int, int]] = {}
        for _ in range(count):
            key, at = self._text(at)
            start = at
            at = self._member(key, self.value, at, 1)
            members[key] = start, at
        if at != self._end:
            raise _Wrong(f"has {self._end - at} bytes behind its end")
        if "state" not in members:
            raise _Wrong("has no member 'state'")
        if "rng" in members:
            self._member("rng", self._map_or_null, members["rng"][0])
        if "parameters" in members:
            self._member("parameters", self._map, members["parameters"][0], "is not a map")
        if "versions" in members:
            self._member("versions", self._versions, members["versions"][0])

    @staticmethod
    def _member(key: str, check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except _Wrong as wrong:
            wrong.keys.append(key)
            raise

    def _map_or_null(self, at: int) -> None:
        if self._data[at] != 0xC0:
            self._map(at, "is neither a map nor null")

    def _versions(self, at: int) -> None:
        count, at = self._map(at, "is not a map")
        for _ in range(count):
            key, at = self._text(at)
            at = self._member(key, self._prefixes, at)

    def _prefixes(self, at: int) -> int:
        count, at = self._map(at, "is not a map")
        for _ in range(count):
            key, at = self._text(at)
            self._member(key, self._map, at, "is not a map")
            at = self.value(at, 0)
        return at

    # -- any value

    def value(self, at: int, depth: int, role: str = "") -> int:
        """Check a value.

        `depth`: the number of containers around it. `role`: what it is, if it must have
        a hash.
        """
        if at >= self._end:
            raise _Wrong("is cut short")
        kind = self._data[at]
        if (width := _WIDTHS.get(kind)) is not None:
            return self._within(at + width)
        if 0xA0 <= kind < 0xC0 or kind in (0xD9, 0xDA, 0xDB):
            return self._text(at)[1]
        if kind in (0xC4, 0xC5, 0xC6):
            start, length = self._sized(at, _SIZED[kind])
            return self._within(start + length)
        is_list, is_map = (
            0x90 <= kind < 0xA0 or kind in (0xDC, 0xDD),
            0x80 <= kind < 0x90 or kind in (0xDE, 0xDF),
        )
        if role and (is_list or is_map):
            raise _Wrong(f"has a {'list' if is_list else 'dict'} as {role}")
        if is_list:
            return self._items(at, depth + 1)
        return self._members(at, depth + 1) if is_map else self._extension(at, depth, role)

    def _enter(self, depth: int) -> None:
        """Raise _Wrong if a container is at a deeper level than a reader accepts.

        `depth` counts this container.
        """
        if depth > self._levels:
            raise _Wrong(f"is nested more than {self._levels} levels deep")

    def _within(self, end: int) -> int:
        if end > self._end:
            raise _Wrong("is cut short")
        return end

    def _sized(self, at: int, width: int) -> tuple[int, int]:
        start = self._within(at + 1 + width)
        return start, int.from_bytes(self._data[at + 1 : start])

    def _text(self, at: int) -> tuple[str, int]:
        """Return a text, or its beginning if it is long, and the offset behind it."""
        data = self._data
        kind = data[at] if at < self._end else 0xC1
        if 0xA0 <= kind < 0xC0:
            start, length = at + 1, kind & 0x1F
        elif kind in (0xD9, 0xDA, 0xDB):
            start, length = self._sized(at, _SIZED[kind])
        else:
            raise _Wrong("has a key that is not a text, where a text is expected")
        end = self._within(start + length)
        self.others += 1
        return self._decoded(start, end), end

    def _decoded(self, start: int, end: int) -> str:
        try:
            if end - start <= _WINDOW:
                return self._data[start:end].decode()
            decoder, first = codecs.getincrementaldecoder("utf-8")(), ""
            for at in range(start, end, _WINDOW):
                part = decoder.decode(
                    self._data[at : min(end, at + _WINDOW)], final=at + _WINDOW >= end
                )
                first = first or part[:MAX_TEXT]
            return first
        except UnicodeDecodeError:
            raise _Wrong("has a text that is not UTF-8") from None

    def _list(self, at: int, why: str) -> tuple[int, int]:
        """Return the number of items of a list, and the offset of the first."""
        return self._container(at, 0x90, 0x10, (0xDC, 0xDD), why)

    def _map(self, at: int, why: str) -> tuple[int, int]:
        return self._container(at, 0x80, 0x10, (0xDE, 0xDF), why)

    def _container(
        self, at: int, first: int, most: int, long: tuple[int, int], why: str
    ) -> tuple[int, int]:
        if at >= self._end:
            raise _Wrong("is cut short")
        kind = self._data[at]
        if first <= kind < first + most:
            count, at = kind - first, at + 1
        elif kind in long:
            start, count = self._sized(at, _COUNTED[kind])
            at = start
        else:
            raise _Wrong(why)
        if count > self._end - at:
            raise _Wrong("is cut short")
        if first == 0x90:
            self.lists += 1
        else:
            self.others += 1
        return count, at

    def _items(self, at: int, depth: int, role: str = "") -> int:
        """Check a list.

        `depth` counts the list. `role`: what its items are, if they must have a hash.
        """
        self._enter(depth)
        left, at = self._list(at, "is not a list")
        data, end, number = self._data, self._end, 0
        while number < left:
            kind = data[at] if at < end else 0xC1
            if (width := _WIDTHS.get(kind)) is not None:
                run = _RUNS[width].match(
                    data, at, min(end, at + width * (left - number), at + _RUN * width)
                )
                if run is None:
                    raise _Wrong("is cut short")
                number += (run.end() - at) // width
                at = run.end()
                continue
            try:
                if 0xA0 <= kind < 0xC0 and (after := at + 1 + (kind & 0x1F)) <= end:
                    data[at + 1 : after].decode()
                    self.others += 1
                    at = after
                else:
                    at = self.value(at, depth, role)
            except UnicodeDecodeError:
                raise _Wrong("has a text that is not UTF-8") from None
            except _Wrong as wrong:
                wrong.keys.append(str(number))
                raise
            number += 1
        return at

    def _members(self, at: int, depth: int) -> int:
        # Most of a document is maps of tensors, so the usual forms of a key and a
        # tensor are read here.
        self._enter(depth)
        count, at = self._map(at, "is not a map")
        data, end, add, others, key = self._data, self._end, self.found.tensors.add, 0, ""
        try:
            for _ in range(count):
                kind = data[at]
                if 0xA0 <= kind < 0xC0:
                    start = at + 1
                    at = start + (kind & 0x1F)
                elif kind == 0xD9:
                    start = at + 2
                    at = start + data[at + 1]
                else:
                    key, at = self._text(at)
                    start, others = at, others - 1
                if at >= end:
                    raise _Wrong("is cut short")
                if start < at:
                    key = data[start:at].decode()
                others += 1
                kind = data[at]
                if kind == 0xC7 and data[at + 2] == 1 and (after := at + 3 + data[at + 1]) <= end:
                    add(data[at + 3 : after].decode())
                    others += 1
                    at = after
                elif (width := _WIDTHS.get(kind)) is not None:
                    at += width
                else:
                    try:
                        at = self.value(at, depth)
                    except _Wrong as wrong:
                        wrong.keys.append(key)
                        raise
        except UnicodeDecodeError:
            raise _Wrong("has a text that is not UTF-8") from None
        except IndexError:
            raise _Wrong("is cut short") from None
        self.others += others
        return self._within(at)

    # -- extensions

    def _head(self, at: int) -> tuple[int, int, int]:
        """Return the code of an extension, and the start and the end of its payload."""
        data, kind = self._data, self._data[at]
        if kind in _FIXED:
            start, length = at + 2, _FIXED[kind]
        elif 0xC7 <= kind <= 0xC9:
            start, length = self._sized(at, _SIZED[kind])
            start += 1
        else:
            raise _Wrong("is not msgpack")
        end = self._within(start + length)
        code = data[start - 1]
        return code - 256 if code > 127 else code, start, end

    def _extension(self, at: int, depth: int, role: str) -> int:
        code, start, end = self._head(at)
        self.others += 1
        if role and code <= _LAST and code not in _HASHED:
            raise _Wrong(f"has a value of type {code} as {role}")
        if code == 1:
            self.found.tensors.add(self._decoded(start, end))
            return end
        if code > _LAST:
            self.found.newer += 1
            return end
        if code < 1:
            raise _Wrong(f"has the extension type {code}, which no version of ckptd writes")
        outer, self._end, after = self._end, end, end
        try:
            if (check := _OF_BYTES.get(code)) is not None:
                check(self, start, end)
            elif code in (2, 3, 4):
                after = self._items(start, depth + 1, role if code == 2 else "an item of a set")
            else:
                after = _OF_ITEMS[code](self, start, depth)
            if after != end:
                raise _Wrong(f"is a value of type {code} with {end - after} bytes behind its end")
        finally:
            self._end = outer
        return end

    def _several(self, at: int, count: int, code: int) -> int:
        """Return the offset of the first of exactly `count` parts."""
        found, at = self._list(at, f"is a value of type {code} whose payload is not a list")
        if found != count:
            raise _Wrong(f"is a value of type {code} with {found} parts; expected {count}")
        return at

    def _pairs(self, at: int, depth: int) -> int:
        self._enter(depth + 1)
        count, at = self._list(at, "is a dict whose payload is not a list of pairs")
        for number in range(count):
            try:
                at = self._several(at, 2, 5)
                at = self.value(self.value(at, depth + 1, "the key of a dict"), depth + 1)
            except _Wrong as wrong:
                wrong.keys.append(str(number))
                raise
        return at

    def _plain(self, at: int, what: type | tuple[type, ...]) -> tuple[Any, int]:
        """Return a small value that has no maps and extensions, and the offset behind
        it.
        """
        end = self._flat(at)
        if end - at > _SMALL:
            raise _Wrong("has a part that is too long")
        try:
            found = msgspec.msgpack.decode(self._data[at:end])
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _Wrong("cannot be read") from None
        if not isinstance(found, what) or (
            isinstance(found, bool) and bool not in (what if isinstance(what, tuple) else (what,))
        ):
            raise _Wrong(
                f"has a part of the type {type(found).__name__}, where another one is expected"
            )
        return found, end

    def _flat(self, at: int) -> int:
        """Return the offset behind a value that is no map and no extension, and no list
        of others than these.
        """
        kind = self._data[at] if at < self._end else 0xC1
        if not (0x90 <= kind < 0xA0 or kind in (0xDC, 0xDD)):
            return self._leaf(at)
        count, at = self._list(at, "is not a list")
        for _ in range(count):
            at = self._leaf(at)
        return at

    def _leaf(self, at: int) -> int:
        kind = self._data[at] if at < self._end else 0xC1
        if (
            0x80 <= kind < 0xA0
            or kind in _COUNTED
            or kind in _FIXED
            or kind in (0xC1, 0xC7, 0xC8, 0xC9)
        ):
            raise _Wrong("has a part that is neither a number nor a text")
        return self.value(at, 0)

    def _texts(self, at: int, count: int, code: int) -> int:
        at = self._several(at, count, code)
        for _ in range(count):
            _, at = self._text(at)
        return at

    def _deque(self, at: int, depth: int) -> int:
        at = self._items(self._several(at, 2, 17), depth + 1)
        most, at = self._plain(at, (int, type(None)))
        if most is not None and not 0 <= most < 1 << 63:
            raise _Wrong(f"is a deque of at most {most} items")
        return at

    def _default_dict(self, at: int, depth: int) -> int:
        _, at = self._text(self._several(at, 2, 25))
        return self._pairs(at, depth)

    def _object(self, at: int, depth: int) -> int:
        self._enter(depth + 1)
        _, at = self._text(self._several(at, 2, 20))
        return self.value(at, depth + 1)

    def _object_of_class(self, at: int, depth: int) -> int:
        self._enter(depth + 1)
        _, at = self._text(self._several(at, 3, 22))
        at = self.value(at, depth + 1)
        return self._text(at)[1]

    def _own(self, at: int, depth: int) -> int:
        self._enter(depth + 1)
        return self.value(at, depth + 1)

    def _constant(self, at: int, depth: int) -> int:
        kind, at = self._text(self._several(at, 2, 28))
        self.found.newer += kind not in _CONSTANTS
        return self._text(at)[1]

    def _record(self, at: int, depth: int) -> int:
        self._enter(depth + 2)
        kind, at = self._text(self._several(at, 3, 24))
        _, at = self._text(at)
        count, at = self._map(at, f"is a record of kind {kind!r} whose fields are not a map")
        names = set[str]()
        for _ in range(count):
            name, at = self._text(at)
            names.add(name)
            try:
                at = self.value(at, depth + 2)
            except _Wrong as wrong:
                wrong.keys.append(name)
                raise
        if kind not in REQUIRED_FIELDS:
            self.found.newer += 1
        elif missing := [name for name in REQUIRED_FIELDS[kind] if name not in names]:
            raise _Wrong(f"is a record of kind {kind!r} without {', '.join(map(repr, missing))}")
        self.found.unjudged += kind in _MADE_OF_FIELDS
        return at

    def _complex(self, at: int, depth: int) -> int:
        at = self._several(at, 2, 7)
        for _ in range(2):
            _, at = self._plain(at, (float, int))
        return at

    def _path(self, at: int, depth: int) -> int:
        cls, at = self._text(self._several(at, 2, 11))
        if cls not in PATHS:
            raise _Wrong(f"is a path of the unknown class {cls!r}")
        return self._text(at)[1]

    def _size(self, at: int, depth: int) -> int:
        self._enter(depth + 1)
        count, at = self._list(at, "is a torch.Size whose payload is not a list")
        for _ in range(count):
            number, at = self._plain(at, int)
            if not 0 <= number < 1 << 63:
                raise _Wrong(f"is a torch.Size with the length {number}")
        return at

    def _standard(self, at: int, depth: int) -> int:
        parts, end = self._plain(at, list)
        try:
            hash(standard.make(parts))
        except NotFound:
            pass
        except NewerFormat:
            self.found.newer += 1
        except Exception:  # the makers raise errors of many types
            raise _Wrong(
                f"is a value of the standard library that cannot be made: {str(parts)[:100]}"
            ) from None
        return end

    def _flag(self, at: int, depth: int) -> int:
        at = self._several(at, 4, 27)
        for _ in range(2):
            _, at = self._text(at)
        count, at = self._list(at, "is a flag whose members are not a list")
        for _ in range(count):
            _, at = self._text(at)
        # A flag of more than 64 bits.
        if at < self._end and 0xC7 <= self._data[at] <= 0xC9 and self._head(at)[0] == 6:
            return self.value(at, depth)
        return self._plain(at, int)[1]

    def _stream(self, at: int, depth: int) -> int:
        count, at = self._list(at, "is a stream whose payload is not a list")
        if count not in (3, 4):
            raise _Wrong(f"is a stream with {count} parts; expected 3 or 4")
        kind, at = self._text(at)
        if kind not in ("BytesIO", "StringIO"):
            self.found.newer += 1
            for _ in range(count - 1):
                at = self.value(at, depth + 1)
            return at
        if kind == "StringIO":
            _, at = self._text(at)
        else:
            if at >= self._end or self._data[at] not in (0xC4, 0xC5, 0xC6):
                raise _Wrong("is a stream of bytes without bytes")
            at = self.value(at, depth + 1)
        position, at = self._plain(at, int)
        if not 0 <= position < 1 << 63 or (count == 3) != (kind == "BytesIO"):
            raise _Wrong(f"is a {kind} at the position {position} with {count} parts")
        if kind == "StringIO":
            newline, at = self._plain(at, (str, type(None)))
            if newline not in (None, "", "\n", "\r", "\r\n"):
                raise _Wrong(f"is a stream whose lines end with {newline!r}")
        return at

    def _digits(self, start: int, end: int) -> None:
        try:
            if end - start > 2 * _MOST_DIGITS:
                raise ValueError
            int(self._data[start:end])
        except ValueError:
            raise _Wrong("is an integer that is not written in digits") from None

    def _utf8(self, start: int, end: int) -> None:
        self._decoded(start, end)

    def _anything(self, start: int, end: int) -> None:
        """Accept any bytes."""

    def _for_torch(self, start: int, end: int) -> None:
        self.found.unjudged += 1

    def _array(self, start: int, end: int) -> None:
        self._npy(start, end)

    def _scalar(self, start: int, end: int) -> None:
        if self._npy(start, end):
            raise _Wrong("is a NumPy scalar that has dimensions")

    def _npy(self, start: int, end: int) -> tuple[int, ...]:
        """Check the bytes of a `.npy` file, and return the shape."""
        data = self._data
        version, width = data[start + 6 : start + 8], 2
        if data[start : start + 6] != b"\x93NUMPY" or version not in (
            b"\x01\x00",
            b"\x02\x00",
            b"\x03\x00",
        ):
            raise _Wrong("is a NumPy array that is no .npy file of version 1 to 3")
        width = 2 if version == b"\x01\x00" else 4
        body = start + 8 + width
        length = int.from_bytes(data[start + 8 : body], "little")
        if body + length > end or length > _MOST_OF_A_HEADER:
            raise _Wrong("is a NumPy array whose header is cut short, or too long")
        try:
            head = ast.literal_eval(
                data[body : body + length].decode("utf-8" if version == b"\x03\x00" else "latin1")
            )
            shape, descr = head["shape"], head["descr"]
            fits = (
                set(head) == {"shape", "descr", "fortran_order"}
                and type(head["fortran_order"]) is bool
                and type(shape) is tuple
            )
        except Exception:  # literal_eval raises errors of many types
            fits = False
        if not fits or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise _Wrong("is a NumPy array whose header cannot be read")
        size = _itemsize(descr)
        if size is None:
            raise _Wrong(
                f"is a NumPy array of the dtype {str(descr)[:60]!r}, which cannot be read without "
                f"pickles"
            )
        if end - body - length < math.prod(shape) * size:
            raise _Wrong(f"is a NumPy array of shape {list(shape)} that is cut short")
        return tuple(shape)


_MOST_OF_A_HEADER = 10_000
"""The most bytes of the header of a `.npy` file, as NumPy reads it."""


def _itemsize(descr: Any) -> int | None:
    """Return the size of one element of a NumPy dtype in bytes, or None if NumPy reads
    no arrays of this dtype.

    descr: as in the header of a `.npy` file, a text or a list of fields.
    """
    if type(descr) is str:
        found = _DTYPE.fullmatch(descr)
        if found is None or (
            found[1] in _ITEM_SIZES and int(found[2]) not in _ITEM_SIZES[found[1]]
        ):
            return None
        return int(found[2]) * (4 if found[1] == "U" else 1)
    if type(descr) is not list or not descr:
        return None
    total = 0
    for member in descr:
        if (
            type(member) is not tuple
            or len(member) not in (2, 3)
            or (size := _itemsize(member[1])) is None
        ):
            return None
        for length in member[2] if len(member) == 3 and type(member[2]) is tuple else member[2:]:
            if type(length) is not int or length < 0:
                return None
            size *= length
        total += size
    return total


_DTYPE = re.compile(
    r"[<>|=]?([biufcSVUMm])(\d{1,9})(?:(?<=[Mm]8)\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_ITEM_SIZES = {
    "b": {1},
    "i": {1, 2, 4, 8},
    "u": {1, 2, 4, 8},
    "f": {2, 4, 8, 12, 16},
    "c": {8, 16, 24, 32},
    "M": {8},
    "m": {8},
}
_OF_BYTES: dict[int, Callable[[_Walk, int, int], None]] = {
    6: _Walk._digits, 8: _Walk._array, 9: _Walk._scalar, 12: _Walk._utf8, 13: _Walk._utf8,
    18: _Walk._for_torch, 19: _Walk._anything, 26: _Walk._utf8,
}  # fmt: skip
_OF_ITEMS: dict[int, Callable[[_Walk, int, int], int]] = {
    5: _Walk._pairs, 7: _Walk._complex,
    10: lambda walk, at, depth: walk._texts(at, 3, 10),
    11: _Walk._path, 14: _Walk._size, 15: _Walk._pairs, 16: _Walk._pairs, 17: _Walk._deque,
    20: _Walk._object, 21: _Walk._own,
    22: _Walk._object_of_class, 23: _Walk._standard, 24: _Walk._record, 25: _Walk._default_dict,
    27: _Walk._flag, 28: _Walk._constant,
    29: lambda walk, at, depth: walk._texts(at, 2, 29),
    30: _Walk._stream,
}  # fmt: skip
"""Extension types: the checks of those whose payload is bytes, and of those whose
payload is msgpack, except 2 to 4.
"""
