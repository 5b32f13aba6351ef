"""Tests when a delta pays, and what attempts at deltas may cost, by a clock that stands
still but for the work of a model of a save.
"""

from __future__ import annotations

import pytest

from ckptd.shared.codecs.speeds import MOST_IN_VAIN, Speeds
from tests.support.cases import each_case

CHUNK = 8 << 20
GB = 1e-9
"""The seconds that a byte takes at 1 GB/s."""
EVERY_WORD, FEW_WORDS = (0.31, 1.0), (0.006, 0.01)
"""The share of its bytes that a delta takes, and that of the words that it lists, if a
training changes all fp32 words by little, or one bf16 word in a hundred.
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def after_saves(storage: float, encode: float, *, raw: bool = False) -> tuple[Speeds, Clock]:
    """Return the speeds after some chunks that were encoded and written whole, in so many
    seconds a byte. With `raw`, as with the codec `auto` on a fast disk, most chunks were
    stored as they are.
    """
    speeds = Speeds(1, clock := Clock())
    for number in range(40):
        shrunk = not raw or number == 0
        with speeds.encoding() as spent:
            clock.now += CHUNK * encode if shrunk else 0.0
        speeds.add_whole(spent, CHUNK, shrunk=shrunk)
        with speeds.writing(CHUNK):
            clock.now += CHUNK * storage
    return speeds, clock


@each_case(
    ("storage", "raw", "delta", "pays"),
    [
        (0.5 * GB, False, EVERY_WORD, False),  # made in twice the time, and nobody waits for disks
        (0.5 * GB, False, FEW_WORDS, True),
        (5.0 * GB, False, EVERY_WORD, True),  # the storage is the slower one
        (5.0 * GB, False, FEW_WORDS, True),
        (0.9 * GB, True, EVERY_WORD, False),
        (0.9 * GB, True, FEW_WORDS, True),
        (0.1 * GB, True, FEW_WORDS, False),  # memory takes the chunk before the delta is made
    ],
)
def test_a_delta_pays_if_it_is_durable_no_later(
    storage: float, raw: bool, delta: tuple[float, float], pays: bool
) -> None:
    speeds, _ = after_saves(storage, 0.75 * GB, raw=raw)
    assert speeds.delta_pays(*delta, 1.0 if raw else 0.83) is pays


def test_before_anything_is_known_a_delta_is_tried() -> None:
    assert Speeds().delta_pays(*EVERY_WORD, 0.83)


def test_deltas_that_were_made_correct_what_they_are_expected_to_take() -> None:
    speeds, clock = after_saves(1.5 * GB, 0.75 * GB)
    assert not speeds.delta_pays(*EVERY_WORD, 0.83)
    for _ in range(40):
        with speeds.encoding() as spent:
            clock.now += CHUNK * 0.75 * GB  # as fast as the whole chunk
        speeds.add_delta(spent, CHUNK, 1.0)
    assert speeds.delta_pays(*EVERY_WORD, 0.83)
    for _ in range(40):
        with speeds.encoding() as spent:
            clock.now += CHUNK * 9 * GB
        speeds.add_delta(spent, CHUNK, 1.0)
    assert not any(speeds.delta_pays(*EVERY_WORD, 0.83) for _ in range(400))


def test_a_disturbed_measurement_does_not_end_deltas_for_ever() -> None:
    speeds, clock = after_saves(0.5 * GB, 0.75 * GB)
    with speeds.encoding() as spent:
        clock.now += 10.0
    speeds.add_delta(spent, CHUNK, 0.01)
    asked = [speeds.delta_pays(*FEW_WORDS, 0.83) for _ in range(1000)]
    assert not asked[0]
    assert asked[-1]


def test_writes_at_the_same_time_are_one_storage() -> None:
    """Two writes that wait for each other do not make the storage half as fast, and short
    ones say nothing about it.
    """
    speeds = Speeds(1, clock := Clock())
    for _ in range(20):
        with speeds.writing(CHUNK), speeds.writing(4096):
            clock.now += 1.0
            with speeds.writing(CHUNK):
                clock.now += 1.0
        clock.now += 9.0  # the storage is idle
    with speeds.writing(4096):
        clock.now += 50.0
    assert speeds.whole_seconds(0, CHUNK) == pytest.approx(1.0, rel=0.5)


def test_encoders_at_the_same_time_share_the_cores() -> None:
    """With two cores, a chunk takes half of the time, and with four encoders on them a
    quarter.
    """
    for encoders, part in ((1, 2), (2, 2), (4, 4)):
        clock = Clock()
        speeds = Speeds(2, clock)
        holds = [speeds.encoding() for _ in range(encoders)]
        spent = [hold.__enter__() for hold in holds]
        clock.now += 1.0
        for hold in reversed(holds):
            hold.__exit__(None, None, None)
        assert spent[-1].seconds == pytest.approx(1.0 / part)


def test_attempts_in_vain_may_take_three_hundredths_of_the_time_of_a_part() -> None:
    """The limit goes by the slower of encoders and storage."""
    assert MOST_IN_VAIN == 0.03
    for storage, encode in ((1.0, 0.5), (0.5, 1.0)):
        speeds, _ = after_saves(storage * GB, encode * GB)
        assert speeds.whole_seconds(1e9, 0.8e9) == pytest.approx(max(0.8 * storage, encode))
