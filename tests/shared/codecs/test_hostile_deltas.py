"""Tests that any bytes are decoded as a delta exactly as FORMAT.md says, or refused, by
the compiled loops and by their stand-in in NumPy.
"""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from ckptd.shared.codecs import delta, delta_numpy
from ckptd.shared.codecs.delta import Delta
from ckptd.shared.codecs.planes import PLANES, Planes, word_size
from ckptd.shared.errors import IntegrityError
from tests.shared.samples import apply, encoded, steady
from tests.vectors.deltas import gaps_of, stored_form

SIZES = (1, 2, 4, 8, 16)
LOOPS = ("subtract", "pack", "add", "scatter")
WITH_NUMPY: dict[str, AbstractContextManager[object]] = {
    "as installed": nullcontext(),
    "NumPy": mock.patch.multiple(delta, **{name: getattr(delta_numpy, name) for name in LOOPS}),
}


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def applied(stored: bytes, base: bytes, element_size: int, times: int = 1) -> bytes | None:
    """Return what the codec makes of a chain, which has a delta several times, or None if
    it refuses it.
    """
    # The words begin at an odd address, and more bytes follow the chunk.
    buffer = bytearray(b"\xee" + base + b"\xee" * 9)
    try:
        # The chunk lies in several pieces, an empty one among them.
        chunk = memoryview(buffer)[1 : 1 + len(base)]
        width = word_size(element_size)
        ends = sorted(len(base) // width * third // 3 * width for third in (0, 1, 1, 2))
        bounds = pairwise([0, *ends, len(base)])
        pieces = [chunk[start:end] for start, end in bounds]
        apply(Delta(), [memoryview(stored)] * times, pieces, element_size)
    except IntegrityError:
        return None
    finally:
        assert buffer[:1] + buffer[1 + len(base) :] == b"\xee" * 10
    return bytes(buffer[1 : 1 + len(base)])


def as_format_md_says(stored: bytes, base: bytes, element_size: int) -> bytes | None:
    """Return the chunk of a delta, word by word, or None if it must be refused."""
    width = word_size(element_size)
    words = len(base) // width
    if len(base) % width or len(stored) < 16:
        return None
    listed, codec, number, length = struct.unpack_from("<4I", stored)
    if listed > words or codec not in (0, 2) or number > words or length > number:
        return None
    gaps, rest = stored[16 : 16 + length], stored[16 + length :]
    if len(gaps) < length or (number and listed in (0, words)):
        return None
    if length < number:
        try:
            sized = zstandard.get_frame_parameters(gaps).content_size == number
            gaps = zstandard.ZstdDecompressor().decompress(gaps, allow_extra_data=False)
        except zstandard.ZstdError:
            return None
        if not sized:
            return None
    packed = bytearray(rest)
    if codec == PLANES and listed:
        packed = bytearray(listed * width)
        try:
            Planes().decode(memoryview(rest), memoryview(packed), element_size)
        except IntegrityError:
            return None
    places = list(range(words)) if listed == words else places_of(gaps, words)
    if places is None or len(places) != listed or len(packed) != listed * width:
        return None
    chunk, highest = bytearray(base), 1 << 8 * width - 1
    for number, place in enumerate(places):
        word = int.from_bytes(packed[number * width : (number + 1) * width], "little")
        difference = word ^ (highest - 1) if word & highest else word
        there = slice(place * width, (place + 1) * width)
        found = (int.from_bytes(chunk[there], "little") + difference) % (2 * highest)
        chunk[there] = found.to_bytes(width, "little")
    return bytes(chunk)


def places_of(gaps: bytes, words: int) -> list[int] | None:
    found, place = [], 0
    for gap in gaps:
        place += gap
        if gap < 255:
            found.append(place)
            place += 1
    return found if place <= words else None


@st.composite
def deltas(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Draw a delta that is sound or nearly so, its base, and the element size."""
    element_size = draw(st.sampled_from(SIZES))
    width = word_size(element_size)
    words = draw(st.integers(0, 40) | st.integers(250, 800))
    base = (draw(st.binary(min_size=1, max_size=64)) * (words * width))[: words * width]
    places = sorted(draw(st.sets(st.integers(0, max(0, words - 1)), max_size=min(words, 30))))
    if draw(st.booleans()):
        places = list(range(0, words, draw(st.integers(1, 3))))
    packed = draw(st.binary(min_size=1, max_size=64)) * (len(places) * width)
    packed = packed[: len(places) * width]
    gaps = gaps_of(places) if len(places) < words else b""
    gaps += b"\xff" * draw(st.sampled_from([0, 0, 0, 1, 2]))
    kept = frame(gaps) if draw(st.booleans()) and len(frame(gaps)) < len(gaps) else gaps
    planes = encoded(Planes(), packed, element_size) if draw(st.booleans()) else None
    stored = stored_form(
        len(places),
        packed if planes is None else planes,
        kept,
        codec=0 if planes is None else PLANES,
        gap_bytes=len(gaps),
    )
    return (
        damaged(draw, stored),
        base[: len(base) - draw(st.sampled_from([0] * 9 + [1]))],
        element_size,
    )


def damaged(draw: st.DrawFn, stored: bytes) -> bytes:
    """Draw one of the changes that keep much of the delta, or none."""
    found = bytearray(stored)
    for kind in draw(st.lists(st.sampled_from(["head", "byte", "cut", "more"]), max_size=2)):
        if kind == "head":
            at, more = draw(st.integers(0, 3)), draw(st.integers(-3, 3) | st.just(1 << 31))
            (field,) = struct.unpack_from("<I", found.ljust(16, b"\0"), 4 * at)
            found[4 * at : 4 * at + 4] = struct.pack("<I", (field + more) % (1 << 32))
        elif kind == "byte" and found:
            found[draw(st.integers(0, len(found) - 1))] = draw(st.integers(0, 255))
        elif kind == "cut":
            del found[draw(st.integers(0, len(found))) :]
        elif kind == "more":
            found += draw(st.binary(max_size=9))
    return bytes(found)


@pytest.mark.parametrize("loops", WITH_NUMPY)
@steady
@given(deltas())
@example((stored_form(0, b"", b"\xff"), bytes(300), 1))
@example((stored_form(1, b"a", b"\x00\xff"), bytes(256), 1))
@example((stored_form(1, b"a", b"\x00\xff"), bytes(255), 1))
@example((stored_form(0, b""), b"", 4))
def test_a_delta_is_decoded_as_the_page_says_or_refused(
    loops: str, drawn: tuple[bytes, bytes, int]
) -> None:
    with WITH_NUMPY[loops]:
        assert applied(*drawn) == as_format_md_says(*drawn)


@pytest.mark.parametrize("loops", WITH_NUMPY)
@steady
@given(deltas(), st.integers(0, 64))
def test_a_chain_is_decoded_delta_by_delta(
    loops: str, drawn: tuple[bytes, bytes, int], times: int
) -> None:
    stored, base, element_size = drawn
    expected: bytes | None = base
    for _ in range(times):
        if expected is not None:
            expected = as_format_md_says(stored, expected, element_size)
    with WITH_NUMPY[loops]:
        assert applied(stored, base, element_size, times) == expected


def test_a_chain_takes_no_more_memory_than_its_chunk_allows() -> None:
    """Each delta lists all words but one, and takes some hundred bytes."""
    words = 1 << 20
    planes, gaps = encoded(Planes(), bytes(words - 1), 1), frame(bytes(words - 1))
    assert planes is not None
    stored = stored_form(words - 1, planes, gaps, codec=PLANES, gap_bytes=words - 1)
    assert len(stored) < 1000
    chunk = memoryview(bytearray(words))
    tracemalloc.start()
    try:
        apply(Delta(), [memoryview(stored)] * 64, [chunk], 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * words


@pytest.mark.parametrize("loops", WITH_NUMPY)
@steady
@given(st.binary(max_size=60), st.binary(max_size=200), st.sampled_from(SIZES))
def test_any_bytes_are_decoded_or_refused(
    loops: str, stored: bytes, base: bytes, element_size: int
) -> None:
    with WITH_NUMPY[loops]:
        assert applied(stored, base, element_size) == as_format_md_says(stored, base, element_size)


def test_the_strategy_makes_sound_deltas_and_damaged_ones() -> None:
    found = {True: 0, False: 0}

    @steady
    @given(deltas())
    def count(drawn: tuple[bytes, bytes, int]) -> None:
        found[as_format_md_says(*drawn) is None] += 1

    count()
    assert min(found.values()) > 10


def test_the_example_of_the_page() -> None:
    stored = bytes.fromhex("02000000 00000000 02000000 02000000 01 00 0300 0080")
    base, chunk = struct.pack("<3H", 1000, 1000, 1000), struct.pack("<3H", 1000, 1003, 999)
    assert applied(stored, base, 2) == as_format_md_says(stored, base, 2) == chunk
