"""Tests the codecs: what is encoded is decoded again, and hostile chunks are refused."""

from __future__ import annotations

import random
import struct
import threading
import tracemalloc

import pytest
import zstandard
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptd.shared.codecs import codec
from ckptd.shared.errors import IntegrityError, InvalidConfig, NewerFormat
from ckptd.shared.formats.plan import MAX_CHUNK
from tests.shared.samples import encoded, steady
from tests.support.cases import each_case

RAW = b"checkpoint " * 9000  # 99,000 bytes
SKIPPABLE = struct.pack("<II", 0x184D2A50, len(RAW)) + RAW  # RFC 8878, section 3.1.2


def _encode(specification: str, raw: bytes) -> bytes | None:
    return encoded(codec.encoder(specification), raw, 4)


def _decode(number: int, stored: bytes, length: int) -> bytes:
    raw = memoryview(bytearray(b"\xee" * length))
    codec.decoder(number).decode(memoryview(stored), raw, 4)
    return bytes(raw)


def _frame(content_size: int, window_byte: int, blocks: list[tuple[int, int]]) -> bytes:
    """Build a zstd frame by hand (RFC 8878, section 3.1.1): 4 bytes of content size, a
    window descriptor, RLE blocks of (length, byte).
    """
    body = b"".join(
        ((length << 3) | (1 << 1) | (number == len(blocks) - 1)).to_bytes(3, "little")
        + bytes([value])
        for number, (length, value) in enumerate(blocks)
    )
    return struct.pack("<IBBI", 0xFD2FB528, 2 << 6, window_byte, content_size) + body


def test_raw_stores_nothing_of_its_own() -> None:
    assert _encode("raw", RAW) is None
    assert _decode(codec.RAW, RAW, len(RAW)) == RAW


@pytest.mark.parametrize("length", [0, 1, len(RAW) - 1, len(RAW) + 1])
def test_raw_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(IntegrityError, match="raw chunk"):
        _decode(codec.RAW, RAW[:length].ljust(length, b"x"), len(RAW))


@pytest.mark.parametrize("specification", ["zstd", "zstd:1", "zstd:3", "zstd:19"])
def test_zstd_round_trips(specification: str) -> None:
    stored = _encode(specification, RAW)
    assert stored is not None
    assert len(stored) < len(RAW) // 100
    assert _decode(codec.ZSTD, stored, len(RAW)) == RAW
    frame = zstandard.get_frame_parameters(stored)
    assert (frame.content_size, frame.has_checksum, frame.dict_id) == (len(RAW), False, 0)
    assert frame.window_size <= codec.MAX_WINDOW


@steady
@given(st.binary(min_size=1, max_size=300), st.integers(1, 400))
def test_zstd_encodes_only_what_it_shrinks(piece: bytes, times: int) -> None:
    raw = piece * times
    stored = _encode("zstd", raw)
    # Nine repetitions of some length shrink in any case.
    assert stored is not None or times < 10 or len(raw) < 101
    assert stored is None or len(stored) < len(raw)
    assert stored is None or _decode(codec.ZSTD, stored, len(raw)) == raw


def test_zstd_does_not_encode_noise() -> None:
    assert _encode("zstd", random.Random(1).randbytes(10_000)) is None


def test_the_largest_chunk_fits_the_window() -> None:
    raw = random.Random(2).randbytes(1 << 16) * 256
    assert len(raw) == MAX_CHUNK
    stored = _encode("zstd:3", raw)
    assert stored is not None
    assert _decode(codec.ZSTD, stored, len(raw)) == raw


GOOD = zstandard.ZstdCompressor(level=3).compress(RAW)
HALF = zstandard.ZstdCompressor(level=3).compress(RAW[: len(RAW) // 2])
HOSTILE = {
    "nothing": b"",
    "no frame": b"checkpoint",
    "another size": zstandard.ZstdCompressor().compress(RAW[:-1]),
    "more than it should": zstandard.ZstdCompressor().compress(RAW + b"x"),
    "no content size": zstandard.ZstdCompressor(write_content_size=False).compress(RAW),
    "200 MB": zstandard.ZstdCompressor().compress(bytes(200_000_000)),
    "trailing garbage": GOOD + b"x",
    "trailing zeros": GOOD + bytes(8),
    "twice": GOOD + GOOD,
    "two halves": HALF + HALF,
    "skippable": SKIPPABLE,
    "skippable, then good": SKIPPABLE + GOOD,
    "good, then skippable": GOOD + SKIPPABLE,
    "window of 2 GB": _frame(len(RAW), 21 << 3, [(len(RAW), 65)]),
    "window of 16 MB": _frame(len(RAW), 14 << 3, [(len(RAW), 65)]),
    "more blocks than content": _frame(len(RAW), 7 << 3, [(len(RAW), 65), (len(RAW), 66)]),
    "thousands of blocks": _frame(len(RAW), 7 << 3, [(100_000, 65)] * 2000),
    "fewer blocks than content": _frame(len(RAW), 7 << 3, [(len(RAW) - 1, 65)]),
}


def test_a_frame_by_hand_is_a_frame() -> None:
    assert _decode(codec.ZSTD, _frame(len(RAW), 7 << 3, [(len(RAW), 65)]), len(RAW)) == b"A" * len(
        RAW
    )


@each_case("stored", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_chunk_is_refused_and_costs_no_memory(stored: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            _decode(codec.ZSTD, stored, len(RAW))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_every_truncation_is_seen() -> None:
    noise = random.Random(3)
    noisy = b"".join(noise.randbytes(20) * 3 for _ in range(60))
    stored = zstandard.ZstdCompressor(level=3).compress(noisy)
    assert len(stored) > 1000
    for length in range(len(stored)):
        with pytest.raises(IntegrityError):
            _decode(codec.ZSTD, stored[:length], len(noisy))


@steady
@given(st.binary(max_size=100))
def test_noise_is_no_frame(noise: bytes) -> None:
    """A frame with the head of a good one is refused unless its blocks are good."""
    assume(not GOOD[9:].startswith(noise[: len(GOOD) - 9]))
    with pytest.raises(IntegrityError):
        _decode(codec.ZSTD, GOOD[:9] + noise, len(RAW))


def test_a_flipped_bit_is_an_integrity_error_or_gives_bytes_of_the_right_length() -> None:
    """zstd has no checksum here: the checksums of chunks see what a bit has changed."""
    lengths = set()
    for bit in range(8 * len(GOOD)):
        flipped = bytearray(GOOD)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        try:
            lengths.add(len(_decode(codec.ZSTD, bytes(flipped), len(RAW))))
        except IntegrityError:
            lengths.add(-1)
    assert lengths == {-1, len(RAW)}


@pytest.mark.parametrize("name", ["zstd", "planes"])
def test_one_codec_serves_many_threads(name: str) -> None:
    encoder, wrong = codec.encoder(name), []

    def work(seed: int) -> None:
        for n in range(30):
            raw = random.Random(100 * seed + n).randbytes(50) * 200 * (n + 1)
            stored = encoded(encoder, raw, 4)
            if stored is None or _decode(encoder.number, stored, len(raw)) != raw:
                wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_codec_numbers_are_those_of_format_md() -> None:
    assert [codec.decoder(number).name for number in range(3)] == ["raw", "zstd", "planes"]


@pytest.mark.parametrize("number", [3, 255, -1])
def test_an_unknown_codec_number_counts_as_newer(number: int) -> None:
    with pytest.raises(NewerFormat, match=f"codec {number}"):
        codec.decoder(number)


@each_case(
    "specification",
    [
        "",
        "lz4",
        "zstd:0",
        "zstd:20",
        "zstd:-1",
        "zstd:x",
        "zstd:1:2",
        "raw:1",
        "RAW",
        " zstd",
        "zstd:1.5",
        "zstd:²",
    ],
)
def test_an_unknown_specification_is_refused(specification: str) -> None:
    with pytest.raises(InvalidConfig, match="is not known"):
        codec.encoder(specification)


def test_the_level_is_passed_on() -> None:
    noise = random.Random(4)
    words = [noise.randbytes(5) for _ in range(200)]
    raw = b"".join(noise.choice(words) for _ in range(20_000))
    fast, best = _encode("zstd:1", raw), _encode("zstd:19", raw)
    assert fast is not None
    assert best is not None
    assert len(best) < len(fast)
