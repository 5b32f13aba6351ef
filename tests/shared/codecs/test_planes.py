"""Tests the codec `planes`: what is encoded is decoded bit for bit, and hostile chunks
are refused.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.codecs.codec import decoder, encoder
from ckptd.shared.codecs.planes import PLANES, Planes, word_size
from ckptd.shared.errors import IntegrityError
from tests.shared.samples import encoded, steady
from tests.support.cases import each_case

SIZES = (1, 2, 4, 8, 16)


def decoded(stored: bytes, length: int, element_size: int) -> bytes:
    raw = bytearray(b"\xee" * length)
    Planes().decode(memoryview(stored), memoryview(raw), element_size)
    return bytes(raw)


def weights(count: int, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return numbers like those of a trained layer: normal, with a scale for each row
    of 256.
    """
    random = np.random.default_rng(seed)
    return (
        random.standard_normal(count)
        * np.exp(random.normal(-4, 1, -(-count // 256))).repeat(256)[:count]
    ).astype(np.float32)


def test_it_is_known_by_name_and_number() -> None:
    assert isinstance(encoder("planes"), Planes)
    assert isinstance(decoder(PLANES), Planes)


@steady
@given(st.binary(max_size=300), st.sampled_from(SIZES), st.integers(1, 40))
def test_what_is_encoded_is_decoded(piece: bytes, element_size: int, times: int) -> None:
    raw = (piece * times)[: len(piece * times) // element_size * element_size]
    stored = encoded(Planes(), raw, element_size)
    assert stored is None or len(stored) < len(raw)
    assert stored is None or decoded(stored, len(raw), element_size) == raw


@each_case("dtype", [np.float16, np.float32, np.float64, np.int64, np.complex64, np.complex128])
@each_case("count", [70_000, 200_003])
def test_numbers_of_every_kind_shrink_and_come_back(dtype: type, count: int) -> None:
    numbers: np.ndarray[Any, Any] = (weights(count) * (1000 if dtype is np.int64 else 1)).astype(
        dtype
    )
    raw = numbers.tobytes()
    stored = encoded(Planes(), raw, numbers.itemsize)
    assert stored is not None
    assert len(stored) < 0.9 * len(raw)
    assert decoded(stored, len(raw), numbers.itemsize) == raw


def test_every_pattern_of_bits_comes_back() -> None:
    """All words of 16 bits, NaN payloads, infinities, zeros of both signs and denormals
    among them, in float32 in the upper half.
    """
    half = np.arange(1 << 16, dtype="<u2")
    for raw, width in (
        (half.tobytes() * 4, 2),
        ((half.astype("<u4") << 16).tobytes(), 4),
        ((half.astype("<u8") << 48).tobytes(), 8),
    ):
        stored = encoded(Planes(), raw, width)
        assert stored is not None
        assert decoded(stored, len(raw), width) == raw


def test_trained_numbers_become_smaller_than_with_zstd() -> None:
    raw = weights(1 << 20).tobytes()
    brain = np.frombuffer(raw, "<u4") >> 16
    for data, width, most in ((raw, 4, 0.86), (brain.astype("<u2").tobytes(), 2, 0.71)):
        stored, plain = encoded(Planes(), data, width), encoded(encoder("zstd"), data, width)
        assert stored is not None
        assert plain is not None
        assert len(stored) < most * len(data) < len(plain)


def test_integers_and_text_are_searched_for_matches() -> None:
    """Entropy coding alone would leave more than half of them."""
    tokens = np.random.default_rng(1).integers(0, 50_000, 5_000).repeat(40).astype("<i8").tobytes()
    text = b"".join(f"line {number}: the same words again\n".encode() for number in range(20_000))
    for data, width in ((tokens, 8), (text, 1)):
        stored = encoded(Planes(), data, width)
        assert stored is not None
        assert len(stored) < len(data) / 5
        assert decoded(stored, len(data), width) == data


def test_noise_and_nothing_are_not_encoded() -> None:
    assert encoded(Planes(), np.random.default_rng(1).bytes(1 << 20), 4) is None
    assert encoded(Planes(), b"", 4) is None
    assert encoded(Planes(), b"abc" * 1000, 2) is not None
    assert encoded(Planes(), b"abc" * 1001, 2) is None, "half a word"


def test_the_stored_form_is_that_of_format_md() -> None:
    """The word 0xBF81 is 0x7F03 when it is rotated left by one bit."""
    stored = struct.pack("<4I", 0, 3, 0, 3) + b"\x03\x03\x03" + b"\x7f\x7f\x7f"
    assert decoded(stored, 6, 2) == b"\x81\xbf" * 3
    frame = zstandard.ZstdCompressor().compress(b"\x7f" * 1000)
    stored = struct.pack("<4I", 1, len(frame), 1, len(frame)) + frame + frame
    assert decoded(stored, 2000, 2) == ((0x7F7F >> 1) | 0x8000).to_bytes(2, "little") * 1000
    assert [word_size(size) for size in range(1, 17)] == [
        1,
        2,
        1,
        4,
        1,
        1,
        1,
        8,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
        8,
    ]


def test_damage_is_refused_or_changes_the_bytes() -> None:
    """A reader compares the checksum of what is decoded.

    Every cut is refused by the codec itself.
    """
    raw = weights(300).tobytes() * 2
    stored = encoded(Planes(), raw, 4)
    assert stored is not None
    for length in range(len(stored)):
        with pytest.raises(IntegrityError):
            decoded(stored[:length], len(raw), 4)
    with pytest.raises(IntegrityError):
        decoded(stored + b"\0", len(raw), 4)
    table, refused = 8 * 32, 0
    for bit in range(8 * len(stored)):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = decoded(bytes(flipped), len(raw), 4)
        except IntegrityError:
            refused += 1
            continue
        assert len(found) == len(raw)
        assert bit >= table or found != raw, "a bit of the table of planes does not count"
    assert table / 2 < refused < 8 * len(stored)


FRAME = zstandard.ZstdCompressor().compress(bytes(1000))


@each_case(
    ("entries", "rest", "words"),
    [
        ((2, 1000, 0, 1000), bytes(2000), "stored by method 2"),
        ((0, 999, 0, 1001), bytes(2000), "stored by method 0 in 999 of 999"),
        ((0, 1000, 0, 0xFFFFFFFF), bytes(2000), "stored by method 0 in 1000 of 4294967295"),
        ((0, 1000, 1, 5), bytes(1005), "a plane cannot be decoded"),
        ((0, 1000, 1, len(FRAME)), bytes(1000) + FRAME + b"x", "the planes of a chunk take"),
        ((0, 1000, 1, 2 * len(FRAME)), bytes(1000) + FRAME * 2, "a plane cannot be decoded"),
    ],
)
def test_a_hostile_chunk_is_refused(entries: tuple[int, ...], rest: bytes, words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        decoded(struct.pack("<4I", *entries) + rest, 2000, 2)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(
        IntegrityError, match="a plane of 1000 bytes has a frame header that says 67108864"
    ):
        decoded(struct.pack("<4I", 0, 1000, 1, len(bomb)) + bytes(1000) + bomb, 2000, 2)
    with pytest.raises(IntegrityError, match="is not possible"):
        decoded(b"", 2000, 2)
