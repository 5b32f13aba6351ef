"""Tests that the stand-in for `_delta.c` returns what the compiled loops return."""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.codecs import delta_numpy
from tests.shared.samples import steady

compiled: ModuleType = pytest.importorskip("ckptd.shared.codecs._delta")
WIDTHS = st.sampled_from([1, 2, 4, 8])
PLACES = st.integers(0, 20) | st.integers(200, 600) | st.integers(0, 2**64 - 1)


def slots(words: int, width: int, share: float, seed: int) -> tuple[bytes, bytes]:
    """Return a base and what it has become: this share of its words have changed."""
    draw = np.random.default_rng(seed)
    base = np.frombuffer(draw.bytes(words * width), f"<u{width}")
    raw = base.copy()
    raw[draw.random(words) < share] += raw.dtype.type(1 + seed % 7)
    return base.tobytes(), raw.tobytes()


@steady
@given(WIDTHS, st.integers(0, 1500), st.floats(0, 1), st.integers(0, 99))
def test_deltas_are_equal(width: int, words: int, share: float, seed: int) -> None:
    base, raw = slots(words, width, share**3, seed)
    results = []
    for loops in (compiled, delta_numpy):
        packed, gaps = bytearray(base), bytearray(words + 8)
        listed = loops.subtract(raw, packed, width)
        dense = bytes(packed)
        written = loops.pack(packed, width, gaps)
        assert loops.pack(bytearray(dense), width, bytearray(max(0, written - 1))) == (
            -1 if written else 0
        )
        added, scattered = bytearray(base), bytearray(base)
        loops.add(added, dense, width)
        places, whole = bytearray(24), memoryview(scattered)
        for first, end in ((0, words // 3), (words // 3, words)):
            piece = whole[first * width : end * width]
            differences = packed[: listed * width], gaps[:written]
            sound = loops.scatter(piece, first, width, places, *differences)
        assert sound
        assert added == scattered == raw
        results.append((listed, dense, packed[: listed * width], gaps[:written]))
    assert results[0] == results[1]


@steady
@given(WIDTHS, st.integers(0, 600), st.integers(0, 12), st.binary(max_size=12))
def test_the_same_gaps_are_refused(width: int, words: int, listed: int, gaps: bytes) -> None:
    packed = bytes(range(1, 1 + listed * width))
    first, second = bytearray(words * width), bytearray(words * width)
    sound = compiled.scatter(first, 0, width, bytearray(24), packed, gaps)
    assert delta_numpy.scatter(second, 0, width, bytearray(24), packed, gaps) is sound
    assert first == second or not sound


@pytest.mark.parametrize("width", [0, 3, -2, 16])
def test_other_words_are_refused(width: int) -> None:
    for call in (
        lambda: compiled.subtract(b"12345678", bytearray(8), width),
        lambda: compiled.pack(bytearray(8), width, bytearray(8)),
        lambda: compiled.add(bytearray(8), b"12345678", width),
        lambda: compiled.scatter(bytearray(8), 0, width, bytearray(24), b"12345678", b""),
    ):
        with pytest.raises(ValueError, match="whole words"):
            call()


def test_buffers_of_other_lengths_are_refused() -> None:
    for call in (
        lambda: compiled.subtract(b"1234", bytearray(8), 2),
        lambda: compiled.subtract(b"123", bytearray(3), 2),
        lambda: compiled.add(bytearray(8), b"1234", 2),
        lambda: compiled.scatter(bytearray(7), 0, 2, bytearray(24), b"1234", b""),
        lambda: compiled.scatter(bytearray(8), 0, 2, bytearray(24), b"123", b""),
        lambda: compiled.scatter(bytearray(8), 0, 2, bytearray(23), b"1234", b"\0\0"),
    ):
        with pytest.raises(ValueError, match="whole words"):
            call()


@steady
@given(
    WIDTHS,
    st.integers(0, 60),
    st.integers(0, 12),
    st.binary(max_size=12),
    st.integers(0, 300),
    st.tuples(PLACES, PLACES, PLACES),
)
def test_no_places_lead_out_of_the_piece(
    width: int, words: int, listed: int, gaps: bytes, first: int, places: tuple[int, ...]
) -> None:
    buffer = bytearray(b"\xee" * 4096 + bytes(words * width) + b"\xee" * 4096)
    piece = memoryview(buffer)[4096:-4096]
    so_far = bytearray(np.array(places, np.uint64).tobytes())
    with suppress(ValueError):  # refused
        for _ in range(3):
            compiled.scatter(piece, first, width, so_far, b"\1" * (listed * width), gaps)
            first += words
    assert buffer[:4096] == buffer[-4096:] == b"\xee" * 4096
