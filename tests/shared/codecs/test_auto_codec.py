"""Tests that `auto` encodes while the storage is busy, and only then."""

from __future__ import annotations

import pytest

from ckptd.shared.codecs import codec
from ckptd.shared.codecs.auto_codec import Auto
from ckptd.shared.codecs.planes import PLANES, Planes
from ckptd.shared.errors import InvalidConfig
from tests.shared.samples import encoded
from tests.support.cases import each_case

RAW = bytes(range(64)) * 5000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def after_writes(seconds: float, clock: Clock) -> Auto:
    """Return an encoder whose storage has taken `seconds` for each of some writes of a
    chunk.
    """
    encoder = Auto(clock)
    for _ in range(40):
        with encoder.writing(len(RAW)):
            clock.now += seconds
    return encoder


def test_nothing_is_encoded_before_a_write_was_measured() -> None:
    encoder = codec.encoder("auto")
    assert (encoder.name, encoder.number) == ("auto", PLANES)
    with encoder.writing(len(RAW)):
        assert encoded(encoder, RAW, 4) is None
    with encoder.writing(len(RAW)):
        assert encoded(encoder, RAW, 4) == encoded(Planes(), RAW, 4)


@each_case(
    ("write", "encode", "beside", "alone"),
    [
        (1.0, 0.5, True, False),
        (1.0, 0.8, False, False),
        (0.7, 0.4, True, False),
        (0.1, 0.4, False, False),
        (1.0, 0.1, True, True),
    ],
)
def test_a_chunk_is_encoded_only_if_a_write_takes_longer(
    write: float, encode: float, beside: bool, alone: bool
) -> None:
    """Compare both with another write under way and without one, as with a single
    thread.
    """
    encoder = after_writes(write, Clock())
    encoder._encoding.add(encode, len(RAW))
    assert (encoded(encoder, RAW, 4) is not None) == alone
    encoder._encoding.seconds_per_byte = encode / len(RAW)
    with encoder.writing(len(RAW)):
        assert (encoded(encoder, RAW, 4) is not None) == beside


def test_encoding_is_measured_and_both_measurements_follow_the_present_speeds() -> None:
    encoder = after_writes(1.0, clock := Clock())

    def slow(raw: memoryview, element_size: int, stored: memoryview) -> int:
        clock.now += 3.0
        return 1

    encoder._planes.encode = slow  # type: ignore[method-assign]
    with encoder.writing(1), encoder.writing(1):
        assert encoded(encoder, RAW, 4) is not None, "how long encoding takes is not known yet"
        assert encoded(encoder, RAW, 4) is None
    for _ in range(40):
        with encoder.writing(len(RAW)):
            clock.now += 6.0
    with encoder.writing(1), encoder.writing(1):
        assert encoded(encoder, RAW, 4) is not None, (
            "the storage has become slower than the encoder"
        )


def test_an_encoder_that_was_slow_once_is_tried_again() -> None:
    encoder = after_writes(1.0, Clock())
    encoder._encoding.add(10.0, len(RAW))
    with encoder.writing(len(RAW)), encoder.writing(len(RAW)):
        found = [encoded(encoder, RAW, 4) is not None for _ in range(600)]
    # The first one shows that encoding takes no time by the clock, and hardly anything is
    # left of the old measurement.
    assert found.index(True) > 500
    assert all(found[found.index(True) :])


@each_case(("encode", "most"), [(1.0, 5), (2.0, 2)])
def test_an_encoder_that_is_too_slow_is_seldom_tried(encode: float, most: int) -> None:
    """Each try costs time, on a storage that takes what it gets at once."""
    encoder, tries = after_writes(1.0, clock := Clock()), 0

    def slow(raw: memoryview, element_size: int, stored: memoryview) -> int:
        nonlocal tries
        tries, clock.now = tries + 1, clock.now + encode
        return 1

    encoder._planes.encode = slow  # type: ignore[method-assign]
    with encoder.writing(1):
        for _ in range(400):
            encoded(encoder, RAW, 4)
    assert 1 < tries <= 1 + most


def test_short_writes_say_nothing_about_the_storage() -> None:
    encoder = after_writes(1.0, clock := Clock())
    for _ in range(40):
        with encoder.writing(4096):
            clock.now += 9.0
    assert encoder._writing.seconds_per_byte == pytest.approx(1.0 / len(RAW))


def test_a_failed_write_is_over_too() -> None:
    encoder = Auto()
    for _ in range(3):
        with pytest.raises(OSError, match="full"), encoder.writing(1):
            raise OSError("full")
    assert encoder._writes == 0


def test_it_takes_no_option() -> None:
    with pytest.raises(
        InvalidConfig, match="codec 'auto:3' is not known: use raw, .*, planes, auto"
    ):
        codec.encoder("auto:3")
