"""Tests frames: any cut of the stream gives the same payloads, and a length is checked
before it is used.
"""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import ProtocolError
from ckptd.shared.wire.frames import MAX_FRAME, Decoder, encode
from tests.shared.samples import steady
from tests.support.cases import each_case


def test_a_frame_is_its_length_and_its_payload() -> None:
    assert encode(b"abc") == b"\x03\0\0\0abc"
    assert Decoder().feed(b"\x03\0\0\0abc") == [b"abc"]
    assert MAX_FRAME == 1_048_576


@steady
@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_any_cut_of_the_stream_gives_the_same_payloads(
    payloads: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(map(encode, payloads))
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder, found = Decoder(), []
    for start, end in itertools.pairwise(places):
        found += decoder.feed(stream[start:end])
    assert found == payloads


def test_a_stream_of_single_bytes_gives_the_same_payloads() -> None:
    decoder = Decoder()
    found = [decoder.feed(bytes([byte])) for byte in encode(b"abc") + encode(b"d")]
    assert found == [[], [], [], [], [], [], [b"abc"], [], [], [], [], [b"d"]]


def test_the_largest_frame_is_sent_and_received() -> None:
    payload = bytes(range(256)) * 4096
    assert len(payload) == MAX_FRAME
    assert Decoder().feed(encode(payload)) == [payload]


@pytest.mark.parametrize("payload", [b"", bytes(MAX_FRAME + 1)], ids=["empty", "too large"])
def test_an_empty_or_too_large_payload_cannot_be_sent(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        encode(payload)


@each_case(
    "length", [0, MAX_FRAME + 1, 1 << 24, 0x7FFFFFFF, 0xFFFFFFFF, int.from_bytes(b"GET ", "little")]
)
def test_an_impossible_length_is_refused_at_once(length: int) -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError, match=f"a length of {length} bytes"):
        decoder.feed(struct.pack("<I", length))
    with pytest.raises(ProtocolError):
        Decoder().feed(encode(b"good") + struct.pack("<I", length) + b"x")


PIECES = [encode(b"x"), encode(b"more")[:5], encode(b"more")[5:], bytes(4), b"\xff" * 4]
"""Whole frames, parts of one, and lengths that cannot be, which noise seldom has."""


@steady
@given(st.lists(st.binary(max_size=60) | st.sampled_from(PIECES), max_size=6))
def test_noise_gives_payloads_or_a_protocol_error(pieces: list[bytes]) -> None:
    """The payloads are those of the whole stream, however it is cut into pieces."""
    decoder, found, refused = Decoder(), [], False
    try:
        for piece in pieces:
            found += decoder.feed(piece)
    except ProtocolError:
        refused = True
    rest, expected, impossible = b"".join(pieces), [], False
    while len(rest) >= 4 and not impossible:
        (length,) = struct.unpack_from("<I", rest)
        impossible = not 0 < length <= MAX_FRAME
        if len(rest) < 4 + length:
            break
        expected.append(rest[4 : 4 + length])
        rest = rest[4 + length :]
    assert refused == impossible
    # A piece that is refused gives nothing, not even what came before the mistake.
    assert found == expected[: len(found)]
    assert refused or found == expected
