"""Tests the coder of `_huffman.c`: zstd decodes every frame to the bytes that it was made
of, whatever they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.shared.samples import steady
from tests.support.cases import each_case

huffman = pytest.importorskip("ckptd.shared.codecs._huffman", reason="no compiler was found")
BLOCK, GROUP = 1 << 17, 1 << 19
Bytes = np.ndarray[Any, Any]


def compressed(content: bytes) -> bytes:
    room = memoryview(bytearray(len(content) + 1000))
    length = huffman.compress(content, room)
    assert 0 <= length < len(content) + 1000
    return bytes(room[:length])


def decoded(frame: bytes) -> bytes:
    head = zstandard.get_frame_parameters(frame)
    assert (head.has_checksum, head.dict_id) == (False, 0)
    content: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    assert head.content_size == len(content)
    return content


def drawn(kind: str, length: int) -> bytes:
    """Return bytes of one kind, as the planes of tensors have them."""
    random = np.random.default_rng(length)
    found: Bytes
    match kind:
        case "exponents":
            found = random.normal(115, 1.2, length)
        case "wide":
            found = random.normal(0, 18, length).astype(np.int64) % 256
        case "all":
            found = random.normal(128, 60, length).clip(0, 255)
        case "gaps":
            found = random.geometric(0.02, length).clip(0, 255)
        case "two":
            found = random.choice([7, 255], length)
        case "rare":  # bytes that no sample shows
            found = np.where(
                random.random(length) < 1e-4,
                random.integers(0, 256, length),
                random.normal(100, 3, length),
            )
        case "skewed":  # codes would be longer than those of the format
            found = 255 - random.geometric(0.5, length).clip(0, 60)
        case "changing":  # a later group has other bytes
            found = random.normal(60, 2, length) + np.arange(length) // GROUP * 50
        case "noise":
            found = random.integers(0, 256, length)
        case _:
            found = np.full(length, 9)
    return found.astype(np.uint8).tobytes()


@each_case(
    "kind",
    ["exponents", "wide", "all", "gaps", "two", "rare", "skewed", "changing", "noise", "same"],
)
@each_case("length", [511, 512, 1021, BLOCK - 1, BLOCK, BLOCK + 1, GROUP + BLOCK + 700])
def test_zstd_decodes_what_is_coded(kind: str, length: int) -> None:
    content = drawn(kind, length)
    same = decoded(compressed(content)) == content
    assert same


@steady
@given(st.binary(max_size=300), st.integers(1, 60), st.binary(max_size=20))
def test_zstd_decodes_any_bytes(piece: bytes, times: int, end: bytes) -> None:
    content = piece * times + end
    same = decoded(compressed(content)) == content
    assert same


@steady
@given(st.lists(st.integers(0, 3000), min_size=256, max_size=256), st.integers(0, 255))
def test_bytes_of_any_frequencies_are_coded(counts: list[int], last: int) -> None:
    """Fibonacci numbers among them would take codes of more bits than the format has."""
    content = np.repeat(np.arange(256, dtype=np.uint8), counts)[::-1]
    content = np.random.default_rng(last).permutation(content[content <= last])
    assert decoded(compressed(content.tobytes())) == content.tobytes()


def test_frequencies_that_need_the_longest_codes_are_coded() -> None:
    counts = [1, 1]
    while len(counts) < 24:
        counts.append(counts[-1] + counts[-2])
    for first in (0, 120, 232):
        content = np.repeat(np.arange(first, first + 24, dtype=np.uint8), counts)
        content = np.random.default_rng(1).permutation(content)
        assert decoded(frame := compressed(content.tobytes())) == content.tobytes()
        assert len(frame) < 0.34 * len(content), "a code takes 2.6 bits at least"


@each_case(("kind", "most"), [("exponents", 1.04), ("wide", 1.03), ("gaps", 1.02), ("all", 1.02)])
def test_a_frame_is_hardly_longer_than_the_entropy(kind: str, most: float) -> None:
    content = np.frombuffer(drawn(kind, 1 << 21), np.uint8)
    share = np.bincount(content, minlength=256) / len(content)
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum() / 8
    length = len(compressed(content.tobytes()))
    assert length < most * entropy * len(content)


def test_a_frame_never_exceeds_its_room() -> None:
    content = drawn("wide", 40_000)
    whole = compressed(content)
    for room in (*range(40), len(whole) // 2, len(whole) - 1):
        behind = bytearray(b"\xee" * (room + 64))
        assert huffman.compress(content, memoryview(behind)[:room]) == -1
        assert behind[room:] == b"\xee" * 64
    exact = bytearray(len(whole))
    assert huffman.compress(content, exact) == len(whole)
    assert bytes(exact) == whole
