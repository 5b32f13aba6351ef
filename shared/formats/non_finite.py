"""Counts the values of parameters and of optimizer state that are NaN or infinite
(FORMAT.md, section 3).

A NaN or an infinity has the greatest exponent that the dtype has, so that a count needs
no arithmetic. This module does no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec

from ckptd.shared.formats.plan import BLOB, Plan, Size, element_size


def _count_with_numpy(
    raw: bytes | bytearray | memoryview, width: int, mask: int, pattern: int, /
) -> int:
    import numpy as np  # costs memory that a daemon with the extension saves

    words = np.frombuffer(raw, f"<u{width}", len(raw) // width)
    return int(np.count_nonzero((words & words.dtype.type(mask)) == pattern))


count_words: Callable[[bytes | bytearray | memoryview, int, int, int], int] = _count_with_numpy
"""`count` of `_non_finite.c`, or NumPy's where that could not be compiled."""
with suppress(ImportError):
    from ckptd.shared.formats._non_finite import count as count_words

MOST_NAMED = 16
"""The most tensors that a part names with their counts."""

_HALF, _SINGLE, _DOUBLE = (
    (2, 0x7C00, 0x7C00),
    (4, 0x7F80_0000, 0x7F80_0000),
    (8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
)
_WORDS: dict[str, tuple[int, int, int]] = {
    "float16": _HALF,
    "complex32": _HALF,
    "bfloat16": (2, 0x7F80, 0x7F80),
    "float32": _SINGLE,
    "complex64": _SINGLE,
    "float64": _DOUBLE,
    "complex128": _DOUBLE,
    "float8_e5m2": (1, 0x7C, 0x7C),
    "float8_e4m3fn": (1, 0x7F, 0x7F),
    "float8_e4m3fnuz": (1, 0xFF, 0x80),
    "float8_e5m2fnuz": (1, 0xFF, 0x80),
    "float8_e8m0fnu": (1, 0xFF, 0xFF),
}
"""The size of a word in bytes, and the mask and the bits of a word that is no finite
number, by the name of the dtype. A complex number is two words.

Sources: IEEE 754; the OCP 8-bit floating point specification for e5m2 and e4m3fn, whose
only NaN has all bits set; https://arxiv.org/abs/2206.02915 for the fnuz types, whose
only NaN is the negative zero; the OCP microscaling formats for e8m0fnu.
"""


class NonFinite(msgspec.Struct, frozen=True, kw_only=True):
    """The count of one part.

    values: how many values are not finite. tensors: in how many items and aliases they
    are. most: the number and the values of those that have the most, at most MOST_NAMED.
    """

    values: Size
    tensors: Size
    most: Annotated[list[tuple[Size, Size]], msgspec.Meta(max_length=MOST_NAMED)]

    @classmethod
    def of(cls, counts: Iterable[Mapping[int, int]]) -> NonFinite:
        """Return the count of a part, given the values of each item or alias, by number,
        in each of its chunks.
        """
        total = Counter[int]()
        for found in counts:
            total.update(found)
        worst = sorted(total.items(), key=lambda found: (-found[1], found[0]))
        return cls(values=total.total(), tensors=len(total), most=worst[:MOST_NAMED])

    def named(self, plan: Plan) -> list[tuple[str, int]]:
        """Return the names and the values of the tensors in `most`. Numbers that the plan
        does not have, as in a damaged part, are left out.
        """
        names = [*(item.fqn for item in plan.items), *(alias.fqn for alias in plan.aliases)]
        return [(names[number], values) for number, values in self.most if number < len(names)]


class _Place(NamedTuple):
    """The bytes of one tensor in the packed slot, its number in the plan, and the words
    of its dtype.
    """

    start: int
    end: int
    number: int
    word: tuple[int, int, int]


class Learned:
    """The places in a packed slot whose values should be finite.

    The places are kept in *runs*: tensors of one kind of words, side by side. A run is
    counted as a whole, and its tensors only if it has such values.
    """

    def __init__(self, places: Iterable[_Place]) -> None:
        """places: in the order of their bytes, without overlap."""
        self._places = list(places)
        self._ends = [place.end for place in self._places]
        self._runs: list[int] = []
        """The number of the first place of each run, and at last that of all places."""
        for number, place in enumerate(self._places):
            before = self._places[number - 1] if number else None
            if before is None or (before.word, before.end) != (place.word, place.start):
                self._runs.append(number)
        self._runs.append(len(self._places))

    @classmethod
    def of(cls, plan: Plan) -> Learned | None:
        """Return the places that the plan calls learned, or None if it does not say which
        are.
        """
        if not isinstance(plan.learned, list):
            return None
        found = sorted(_places(plan, plan.learned), key=lambda place: (place.start, -place.end))
        return cls(_apart(found))

    def count(self, raw: memoryview, offset: int) -> Counter[int]:
        """Return how many values are not finite, by the numbers of their tensors.

        raw: bytes of the packed slot, which begin at `offset`. A value that begins before
        them or ends behind them does not count.
        """
        found, end = Counter[int](), offset + len(raw)
        number = bisect_right(self._ends, offset)
        run = bisect_right(self._runs, number)
        while number < len(self._places) and self._places[number].start < end:
            last = self._runs[run] - 1
            first = self._places[number]
            if _in(raw, offset, first.start, self._ends[last], first.word):
                while number <= last and self._places[number].start < end:
                    place = self._places[number]
                    if values := _in(raw, offset, place.start, place.end, place.word):
                        found[place.number] += values
                    number += 1
            number, run = last + 1, run + 1
        return found


def _in(raw: memoryview, offset: int, start: int, end: int, word: tuple[int, int, int]) -> int:
    """Count in the bytes from `start` to `end` of the packed slot, as far as `raw` has
    them.
    """
    first = max(start, start - (start - offset) // word[0] * word[0])  # a whole word in `raw`
    return count_words(raw[first - offset : max(end - offset, 0)], *word)


def _places(plan: Plan, learned: Iterable[tuple[int, int]]) -> Iterator[_Place]:
    items = {item.fqn: item for item in plan.items} if plan.aliases else {}
    seen = -1
    for first, count in learned:
        for number in range(
            max(first, seen + 1), min(first + count, len(plan.items) + len(plan.aliases))
        ):
            seen = number
            if number < len(plan.items):
                item = plan.items[number]
                dtype, start, length = item.dtype, item.offset, item.length
            else:
                alias = plan.aliases[number - len(plan.items)]
                dtype, start = alias.dtype, items[alias.base].offset + alias.offset
                length = alias.extent * element_size(dtype)
            word = None if dtype == BLOB else _WORDS.get(dtype.partition("/")[0])
            if length and word is not None:
                yield _Place(start, start + length, number, word)


def _apart(places: Iterable[_Place]) -> Iterator[_Place]:
    """Yield places without the bytes that belong to an earlier place, too.

    places: sorted by their first byte.
    """
    end = 0
    for place in places:
        width = place.word[0]
        start = max(place.start, place.start - (place.start - end) // width * width)
        if start < place.end:
            yield place._replace(start=start)
            end = place.end


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as [first, count] of each run, as `Plan.learned` has
    them.
    """
    ordered = list(numbers)
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1)]
    ends = [*starts[1:], len(ordered)]
    return [(ordered[a], b - a) for a, b in zip(starts, ends, strict=True)] if ordered else []
