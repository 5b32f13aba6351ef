"""Counts the values of parameters and of optimizer state that are NaN or infinite
(FORMAT.md, section 3).

A NaN or an infinity has the greatest exponent that the dtype has, so that a count needs
no arithmetic. This module does no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

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

    values: how many values are not finite. tensors: in how many tensors they are. most:
    the number and the values of the tensors that have the most, at most MOST_NAMED.
    """

    values: Size
    tensors: Size
    most: Annotated[list[tuple[Size, Size]], msgspec.Meta(max_length=MOST_NAMED)]

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> NonFinite:
        """Return the count of a part, given that of each tensor that has such values."""
        worst = sorted(counts.items(), key=lambda found: (-found[1], found[0]))
        return cls(values=sum(counts.values()), tensors=len(counts), most=worst[:MOST_NAMED])

    def named(self, plan: Plan) -> list[tuple[str, int]]:
        """Return the names and the values of the tensors in `most`. Numbers that the plan
        does not have, as in a damaged part, are left out.
        """
        names = [*(item.fqn for item in plan.items), *(alias.fqn for alias in plan.aliases)]
        return [(names[number], values) for number, values in self.most if number < len(names)]


@dataclass(frozen=True, slots=True)
class _Place:
    """The bytes of one tensor in the packed slot, and its number in the plan."""

    start: int
    end: int
    number: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Tensors of one kind of words that lie side by side."""

    word: tuple[int, int, int]
    places: list[_Place]

    @property
    def start(self) -> int:
        return self.places[0].start

    @property
    def end(self) -> int:
        return self.places[-1].end


class Learned:
    """The places in a packed slot whose values should be finite."""

    def __init__(self, runs: list[_Run]) -> None:
        self._runs = runs
        self._ends = [run.end for run in runs]

    @classmethod
    def of(cls, plan: Plan) -> Learned | None:
        """Return the places that the plan calls learned, or None if it does not say which
        are.
        """
        if not isinstance(plan.learned, list):
            return None
        found = sorted(_places(plan, plan.learned), key=lambda pair: (pair[1].start, -pair[1].end))
        runs: list[_Run] = []
        for word, place in found:
            before = runs[-1] if runs else None
            if before is not None and place.start < before.end:  # some bytes count already
                if place.end <= before.end or before.word != word:
                    continue
                place = replace(place, start=before.end)
            if before is not None and before.word == word and before.end == place.start:
                before.places.append(place)
            else:
                runs.append(_Run(word, [place]))
        return cls(runs)

    def count(self, raw: memoryview, offset: int) -> Counter[int]:
        """Return how many values are not finite, by the numbers of their tensors.

        raw: bytes of the packed slot, which begin at `offset`, a multiple of the size of
        each value in them, and end with a whole value.
        """
        found = Counter[int]()
        end = offset + len(raw)
        for run in self._runs[bisect_right(self._ends, offset) :]:
            if run.start >= end:
                break
            if not _in(raw, offset, run.start, run.end, run.word):
                continue
            for place in run.places:
                if values := _in(raw, offset, place.start, place.end, run.word):
                    found[place.number] += values
        return found


def _in(raw: memoryview, offset: int, start: int, end: int, word: tuple[int, int, int]) -> int:
    """Count in the bytes from `start` to `end` of the packed slot, as far as `raw` has
    them.
    """
    return count_words(raw[max(start - offset, 0) : max(end - offset, 0)], *word)


def _places(
    plan: Plan, learned: Iterable[tuple[int, int]]
) -> Iterable[tuple[tuple[int, int, int], _Place]]:
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
                length = _extent(alias.size, alias.stride) * element_size(dtype)
            if dtype != BLOB and length and (word := _WORDS.get(dtype.partition("/")[0])):
                yield word, _Place(start, start + length, number)


def _extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last one of an alias."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as [first, count] of each run, as `Plan.learned` has
    them.
    """
    ordered = list(numbers)
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1)]
    ends = [*starts[1:], len(ordered)]
    return [(ordered[a], b - a) for a, b in zip(starts, ends, strict=True)] if ordered else []
