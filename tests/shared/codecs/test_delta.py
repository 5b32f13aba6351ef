"""Tests the codec `delta`: the base and what is encoded give the chunk bit for bit, and
hostile deltas are refused.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.codecs.delta import Delta
from ckptd.shared.codecs.planes import Planes, word_size
from ckptd.shared.errors import IntegrityError
from tests.shared.samples import apply, encoded, steady
from tests.support.cases import each_case

SIZES = (1, 2, 4, 8, 16)
HEAD = struct.Struct("<IIII")


def encode(raw: bytes, base: bytes, element_size: int) -> bytes | None:
    stored = memoryview(bytearray(len(raw)))
    length = Delta().encode(
        memoryview(bytearray(raw)), memoryview(bytearray(base)), element_size, stored
    )
    return None if length is None else bytes(stored[:length])


def decoded(stored: bytes, base: bytes, element_size: int) -> bytes:
    raw = bytearray(base)
    apply(Delta(), [memoryview(stored)], [memoryview(raw)], element_size)
    return bytes(raw)


def changed(base: bytes, width: int, numbers: list[int], by: int) -> bytes:
    """Return `base` after `by` has been added to the words with these numbers."""
    words = np.frombuffer(bytearray(base), f"<u{width}")
    words[numbers] += np.array(by % (1 << 8 * width), words.dtype)
    return words.tobytes()


@steady
@given(st.binary(max_size=400), st.sampled_from(SIZES), st.data())
def test_what_is_encoded_is_decoded(base: bytes, element_size: int, data: st.DataObject) -> None:
    base = (base * 9)[: len(base * 9) // element_size * element_size]
    raw = bytearray(base)
    for at in data.draw(st.lists(st.integers(0, max(0, len(base) - 1)), max_size=40)):
        if base:
            raw[at] ^= 1 + at % 255
    stored = encode(bytes(raw), base, element_size)
    assert stored is None or len(stored) < len(raw)
    assert stored is None or decoded(stored, base, element_size) == raw


@each_case("element_size", SIZES)
@each_case("share", [0.0, 0.001, 0.05, 0.39, 0.41, 1.0])
def test_every_density_comes_back(element_size: int, share: float) -> None:
    draw, width = np.random.default_rng(3), word_size(element_size)
    words = 48_000 // width * 4
    base = draw.bytes(words * width)
    numbers = sorted(draw.choice(words, int(share * words), replace=False).tolist())
    for by in (1, -1, 100, -(1 << 8 * width - 1)):
        raw = changed(base, width, numbers, by)
        stored = encode(raw, base, element_size)
        assert stored is not None, by
        assert decoded(stored, base, element_size) == raw


def test_a_chunk_that_has_not_changed_takes_16_bytes() -> None:
    assert encode(bytes(range(256)), bytes(range(256)), 4) == HEAD.pack(0, 0, 0, 0)


def test_few_changes_take_few_bits() -> None:
    """One word of 2 bytes in 66, by one: 7.5 bits for a place, and one for the sign."""
    draw = np.random.default_rng(5)
    base = draw.integers(0, 60_000, 1 << 20).astype("<u2")
    raw = base.copy()
    places = np.flatnonzero(draw.random(1 << 20) < 1 / 66)
    raw[places] += draw.choice([1, 65535], len(places)).astype("<u2")
    stored = encode(raw.tobytes(), base.tobytes(), 2)
    assert stored is not None
    assert 8 * len(stored) < 9.5 * len(places)


def test_gaps_say_where_the_listed_words_are() -> None:
    """The example of FORMAT.md in bytes: words 3 and 1,000 of 2,000."""
    base = bytes(2 * 2000)
    raw = changed(changed(base, 2, [3], 5), 2, [1000], -5)
    stored = encode(raw, base, 2)
    gaps = bytes([3, 255, 255, 255, 231])
    assert 3 + 1 + 3 * 255 + 231 == 1000
    assert stored == HEAD.pack(2, 0, 5, 5) + gaps + struct.pack("<HH", 5, 0x8000 | 4)


def test_deltas_add_up() -> None:
    draw = np.random.default_rng(9)
    slots = [draw.integers(0, 60_000, 500_000).astype("<u2")]
    for _ in range(5):
        slots.append(slots[-1].copy())
        slots[-1][draw.integers(0, 500_000, 3000 + 400_000 * (len(slots) == 3))] += np.uint16(3)
    deltas, found = list[memoryview](), slots[0].tobytes()
    for older, newer in pairwise(slots):
        stored = encode(newer.tobytes(), older.tobytes(), 2)
        assert stored is not None
        deltas.append(memoryview(stored))
        found = decoded(stored, found, 2)
        together = bytearray(slots[0].tobytes())
        apply(Delta(), deltas[::-1], [memoryview(together)], 2)
        assert found == bytes(together) == newer.tobytes()


def test_a_chunk_without_likeness_is_not_encoded() -> None:
    draw = np.random.default_rng(1)
    assert encode(draw.bytes(1 << 16), draw.bytes(1 << 16), 4) is None
    assert encode(b"abc", b"abd", 2) is None, "half a word"
    assert encode(b"", b"", 2) is None


def test_the_result_may_take_the_place_of_the_chunk() -> None:
    base = bytes(4000)
    raw = bytearray(changed(base, 4, list(range(0, 1000, 7)), 9))
    wanted = encode(bytes(raw), base, 4)
    here = memoryview(raw)
    length = Delta().encode(here, memoryview(bytearray(base)), 4, here)
    assert wanted == bytes(raw[:length])


# -- hostile deltas

BASE = bytes(800)


def _frame(content: bytes) -> bytes:
    return bytes(zstandard.ZstdCompressor().compress(content))


@each_case(
    ("stored", "why"),
    [
        (b"", "not possible"),
        (HEAD.pack(0, 0, 0, 0)[:-1], "not possible"),
        (HEAD.pack(401, 0, 0, 0) + bytes(802), "not possible"),
        (HEAD.pack(1, 1, 1, 1) + b"\0ab", "not possible"),
        (HEAD.pack(1, 3, 1, 1) + b"\0ab", "not possible"),
        (HEAD.pack(1, 0, 1, 2) + b"\0\0ab", "not possible"),
        (HEAD.pack(1, 0, 401, 401) + bytes(403), "not possible"),
        (HEAD.pack(400, 0, 1, 1) + bytes(801), "not possible"),
        (HEAD.pack(1, 0, 9, 9) + b"\0ab", "not possible"),
        (HEAD.pack(1, 0, 1, 1) + b"\0a", "listed words"),
        (HEAD.pack(1, 0, 1, 1) + b"\0abc", "listed words"),
        (HEAD.pack(0, 0, 0, 0) + b"a", "listed words"),
        (HEAD.pack(0, 2, 0, 0) + b"a", "listed words"),
        (HEAD.pack(1, 2, 1, 1) + b"\0ab", "planes"),
        (HEAD.pack(1, 0, 0, 0) + b"ab", "do not place"),
        (HEAD.pack(1, 0, 2, 2) + b"\0\0ab", "do not place"),
        (HEAD.pack(2, 0, 1, 1) + b"\0abcd", "do not place"),
        (HEAD.pack(1, 0, 3, 3) + b"\xff\xff\0ab", "do not place"),
        (HEAD.pack(1, 0, 2, 2) + b"\xff\x91ab", "do not place"),
        (HEAD.pack(0, 0, 1, 1) + b"\xff", "not possible"),
        (HEAD.pack(1, 0, 9, 4) + b"gaps" + b"ab", "cannot be decoded"),
    ],
)
def test_an_impossible_delta_is_refused(stored: bytes, why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        decoded(stored, BASE, 2)


def test_gaps_that_decode_to_another_length_are_refused() -> None:
    frame = _frame(bytes(300))
    for claimed in (299, 301):
        with pytest.raises(IntegrityError, match="frame header that says 300"):
            decoded(HEAD.pack(300, 0, claimed, len(frame)) + frame + bytes(600), BASE, 2)
    decoded(HEAD.pack(300, 0, 300, len(frame)) + frame + bytes(600), BASE, 2)


def test_half_a_word_is_refused() -> None:
    with pytest.raises(IntegrityError, match="not possible"):
        decoded(HEAD.pack(0, 0, 0, 0), b"abc", 2)


def test_a_bomb_is_refused_before_it_takes_memory() -> None:
    frame = _frame(bytes(1 << 26))
    with pytest.raises(IntegrityError, match="not possible"):
        decoded(HEAD.pack(1, 0, 1 << 26, len(frame)) + frame + b"ab", BASE, 2)
    small = frame[:100]
    with pytest.raises(IntegrityError, match="frame header"):
        decoded(HEAD.pack(390, 0, 400, len(small)) + small + bytes(780), BASE, 2)


def test_the_listed_words_are_those_of_planes() -> None:
    words = np.arange(400, dtype="<u2")
    planes = encoded(Planes(), words.tobytes(), 2)
    assert planes is not None
    found = decoded(HEAD.pack(400, 2, 0, 0) + planes, BASE, 2)
    assert found == words.tobytes()
