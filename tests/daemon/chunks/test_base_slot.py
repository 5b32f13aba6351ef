"""Tests the reading of bases from a slot that its trainer may fill again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from crc32c import crc32c

from ckptd.daemon.chunks.base_slot import BaseSlot
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import SegmentHeader
from tests.shared.samples import memory_file, sample_plan, seal

PLAN = sample_plan(100_000)
HEADER = SegmentHeader(
    job="gpt", attempt=1, rank=0, world_size=1, slot=0, capacity=600_000, chunk_size=MIN_CHUNK
)
LARGE = 2
"""The number of a whole chunk of 4-byte words."""


@pytest.fixture
def slots() -> Iterator[tuple[SealedSlot, BaseSlot]]:
    """Two slots with equal bytes, the second one as a base of the first."""
    with ExitStack() as held:
        newer, older = (held.enter_context(memory_file(bytes(HEADER.file_length))) for _ in "ab")
        sealed = SealedSlot.read(newer, seal(newer, HEADER, PLAN))
        yield sealed, BaseSlot(older, seal(older, HEADER, PLAN))


def write(fd: int, slot: SealedSlot, number: int, data: bytes) -> None:
    os.pwrite(fd, data, HEADER.data_offset + slot.ranges[number].offset)


def noise(seed: int, count: int = MIN_CHUNK) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def test_a_base_is_read_if_it_has_its_checksum(slots: tuple[SealedSlot, BaseSlot]) -> None:
    slot, base = slots
    chunk, buffer = slot.ranges[LARGE], memoryview(bytearray(MIN_CHUNK + 9))
    write(base.fd, slot, LARGE, noise(1))
    assert base.read(chunk, buffer, crc32c(noise(1)))
    assert buffer[: chunk.length] == noise(1)[: chunk.length]
    write(base.fd, slot, LARGE, b"filled again")
    assert not base.read(chunk, buffer, crc32c(noise(1)))


def test_a_base_that_is_cut_short_is_none(slots: tuple[SealedSlot, BaseSlot]) -> None:
    slot, base = slots
    os.ftruncate(base.fd, HEADER.data_offset + slot.ranges[LARGE].offset + 5)
    assert not base.read(slot.ranges[LARGE], memoryview(bytearray(MIN_CHUNK)), 0)
    assert base.foreseen(slot, slot.ranges[LARGE]) is None


@pytest.mark.parametrize(
    ("changed", "least", "most"), [(0.0, 0.0, 0.001), (0.01, 0.005, 0.02), (0.2, 0.02, 0.1)]
)
def test_the_share_of_a_delta_is_foreseen(
    slots: tuple[SealedSlot, BaseSlot], changed: float, least: float, most: float
) -> None:
    slot, base = slots
    words = np.frombuffer(noise(1), "<u4").copy()
    write(base.fd, slot, LARGE, words.tobytes())
    words[np.random.default_rng(2).random(len(words)) < changed] += 1
    write(slot.fd, slot, LARGE, words.tobytes())
    found = base.foreseen(slot, slot.ranges[LARGE])
    assert found is not None
    assert least <= found.share <= most
    assert found.listed == pytest.approx(changed, abs=0.02)


def test_a_delta_that_would_be_as_long_as_its_chunk_is_not_foreseen(
    slots: tuple[SealedSlot, BaseSlot],
) -> None:
    slot, base = slots
    write(base.fd, slot, LARGE, noise(1))
    write(slot.fd, slot, LARGE, noise(2))
    assert base.foreseen(slot, slot.ranges[LARGE]) is None
