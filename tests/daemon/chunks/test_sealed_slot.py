"""Tests the reading of a sealed slot: its documents are verified before they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from ckptd.daemon.chunks.sealed_slot import Plans, SealedSlot
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import Extent, SegmentHeader
from tests.shared.samples import memory_file, sample_plan, seal

PLAN = sample_plan(50_000)  # several chunks
HEADER = SegmentHeader(
    job="gpt", attempt=1, rank=0, world_size=1, slot=0, capacity=300_000, chunk_size=MIN_CHUNK
)


@pytest.fixture
def fd() -> Iterator[int]:
    with memory_file(bytes(HEADER.file_length)) as made:
        yield made


def test_a_slot_with_a_damaged_document_is_refused(fd: int) -> None:
    header = seal(fd, HEADER, PLAN)
    os.pwrite(fd, b"?", HEADER.data_offset + header.plan.offset + 10)
    with pytest.raises(
        IntegrityError, match="plan document of job 'gpt', step 5, is damaged in memory"
    ):
        SealedSlot.read(fd, header)


def test_a_plan_that_does_not_match_the_signature_is_refused(fd: int) -> None:
    header = seal(fd, HEADER, PLAN, signature=bytes(32))
    with pytest.raises(IntegrityError, match="is not the one that was sealed"):
        SealedSlot.read(fd, header)


def test_documents_that_overlap_the_tensors_are_refused(fd: int) -> None:
    header = seal(fd, HEADER, PLAN)
    values = Extent(header.values.offset - 64, header.values.length, header.values.crc)
    with pytest.raises(IntegrityError, match="overlap its tensors"):
        SealedSlot.read(fd, seal(fd, HEADER, PLAN, values=values))


def test_plans_are_decoded_once_and_not_kept_for_ever() -> None:
    plans = Plans(most=len(PLAN.encode()) + 10)
    first = plans.decode(b"1", PLAN.encode())
    assert plans.decode(b"1", b"not looked at")[0] is first[0]
    other = msgspec.structs.replace(PLAN, writer={"ckptd": "9"})
    assert plans.decode(b"2", other.encode()) == (other, None)
    with pytest.raises(IntegrityError):
        plans.decode(b"1", b"gone")
