"""Tests segments: the two copies of the header, the documents, the check area."""

from __future__ import annotations

import gc
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from crc32c import crc32c

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats.binary import ALIGN, NO_STEP
from ckptd.shared.formats.plan import MAX_CHUNK, MIN_CHUNK
from ckptd.shared.formats.segment import (
    CHECK_HEADER,
    CHECK_OFFSET,
    Extent,
    RootMark,
    SegmentHeader,
    SlotState,
    encode_check,
    read_check,
    read_data,
    read_document,
    read_header,
    read_root_mark,
    this_boot,
    write_check,
    write_document,
    write_header,
    write_root_mark,
)
from tests.shared.samples import flip, memory_file
from tests.support.cases import each_case

BOOT = bytes(range(16, 32))
HEADER = SegmentHeader(
    job="gpt", attempt=2, rank=3, world_size=8, slot=1, capacity=200_000, chunk_size=MIN_CHUNK,
    generation=4, state=SlotState.SEALED, step=1000, boot_id=BOOT, signature=bytes(range(32)),
    plan=Extent(100_000, 500, 1), request=Extent(100_512, 60, 2), values=Extent(90_000, 40, 3),
)  # fmt: skip
CRCS = [0, 1, 0xFFFFFFFF, 0x12345678]


@pytest.fixture
def segment() -> Iterator[int]:
    with memory_file(b"") as fd:
        os.ftruncate(fd, HEADER.file_length)
        yield fd


def _sealed_again(header: bytes, at: int, value: bytes) -> bytes:
    """Change a field, and make the checksum match it."""
    body = bytearray(header[:320])
    body[at : at + len(value)] = value
    return (bytes(body) + struct.pack("<I", crc32c(bytes(body)))).ljust(ALIGN, b"\0")


def test_header_round_trips() -> None:
    data = HEADER.encode()
    assert len(data) == ALIGN
    assert SegmentHeader.decode(data) == HEADER
    assert SegmentHeader.decode(memoryview(data)).encode() == data


def test_a_new_header_is_free_and_of_this_boot() -> None:
    header = SegmentHeader(
        job="j" * 128, attempt=1, rank=0, world_size=1, slot=0, capacity=0, chunk_size=MAX_CHUNK
    )
    again = SegmentHeader.decode(header.encode())
    assert again == header
    assert (again.generation, again.state, again.step, again.boot_id) == (
        1,
        SlotState.FREE,
        None,
        this_boot(),
    )
    assert (again.signature, again.plan, again.request, again.values) == (
        bytes(32),
        Extent(),
        Extent(),
        Extent(),
    )
    assert len(this_boot()) == 16


def test_offsets_and_lengths_follow_from_the_capacity() -> None:
    assert HEADER.check_length == ALIGN
    assert HEADER.data_offset == 3 * ALIGN
    assert HEADER.file_length == 3 * ALIGN + 49 * ALIGN  # 200,000 bytes rounded up
    large = replace(HEADER, capacity=1 << 30)
    assert large.check_length == 17 * ALIGN  # 64 + 4 * (16384 + 8) bytes
    assert large.data_offset == 19 * ALIGN


def test_next_forgets_the_documents_unless_given() -> None:
    filling = HEADER.next(SlotState.FILLING, step=1001)
    assert filling == replace(
        HEADER,
        generation=5,
        state=SlotState.FILLING,
        step=1001,
        signature=bytes(32),
        plan=Extent(),
        request=Extent(),
        values=Extent(),
    )
    sealed = filling.next(SlotState.SEALED, plan=Extent(1, 2, 3), signature=b"s" * 32)
    assert (sealed.generation, sealed.state, sealed.plan, sealed.signature, sealed.values) == (
        6,
        SlotState.SEALED,
        Extent(1, 2, 3),
        b"s" * 32,
        Extent(),
    )


# -- two copies


def test_generations_alternate_between_the_copies(segment: int) -> None:
    write_header(segment, HEADER)
    assert os.pread(segment, ALIGN, 0) == HEADER.encode()
    assert os.pread(segment, ALIGN, ALIGN) == bytes(ALIGN)
    after = HEADER.next(SlotState.FREE)
    write_header(segment, after)
    assert os.pread(segment, ALIGN, 0) == HEADER.encode()
    assert os.pread(segment, ALIGN, ALIGN) == after.encode()
    assert read_header(segment) == after


@pytest.mark.parametrize("newer", [4, 5])
def test_a_torn_copy_leaves_the_one_before(segment: int, newer: int) -> None:
    before, after = (
        replace(HEADER, generation=newer - 1, state=SlotState.FILLING),
        replace(HEADER, generation=newer),
    )
    for written in range(0, 324, 3):
        write_header(segment, before)
        os.pwrite(segment, HEADER.encode()[::-1], newer % 2 * ALIGN)  # any bytes may be there
        os.pwrite(segment, after.encode()[:written], newer % 2 * ALIGN)
        assert read_header(segment) == before
    write_header(segment, after)
    assert read_header(segment) == after


def test_without_a_valid_copy_there_is_no_segment(segment: int) -> None:
    with pytest.raises(IntegrityError):
        read_header(segment)
    write_header(segment, HEADER)
    os.pwrite(segment, b"x", 100)
    with pytest.raises(IntegrityError, match="checksum"):
        read_header(segment)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 100, 4095])
def test_a_segment_cut_short_raises_an_error(segment: int, length: int) -> None:
    write_header(segment, HEADER)
    os.ftruncate(segment, length)
    with pytest.raises(IntegrityError, match="cut short"):
        read_header(segment)


def test_one_valid_copy_leaves_nothing_to_the_garbage_collector(segment: int) -> None:
    """A stored error keeps the frames that it came through alive.

    In a trainer, these hold the mapping of a slot.
    """
    write_header(segment, HEADER)
    gc.collect()
    gc.disable()
    try:
        assert read_header(segment) == HEADER
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_segment_cut_behind_its_first_copy_is_read_from_that_copy(segment: int) -> None:
    write_header(segment, HEADER)
    write_header(segment, HEADER.next(SlotState.FREE))
    os.ftruncate(segment, ALIGN + 100)
    assert read_header(segment) == HEADER


def test_every_flipped_bit_of_a_copy_is_seen() -> None:
    data = HEADER.encode()
    for bit in range(8 * ALIGN):
        with pytest.raises(IntegrityError):
            SegmentHeader.decode(flip(data, bit))


def test_any_flipped_bit_gives_the_other_copy(segment: int) -> None:
    after = HEADER.next(SlotState.FREE)
    for bit in random.Random(5).sample(range(8 * ALIGN), 300):
        os.pwrite(segment, flip(after.encode(), bit), ALIGN)
        write_header(segment, HEADER)
        assert read_header(segment) == HEADER


def test_a_newer_header_is_not_called_damaged(segment: int) -> None:
    os.pwrite(segment, _sealed_again(HEADER.encode(), 8, b"\x02"), 0)
    with pytest.raises(NewerFormat):
        read_header(segment)
    os.pwrite(segment, _sealed_again(HEADER.encode(), 12, b"\x02"), ALIGN)
    with pytest.raises(NewerFormat):
        read_header(segment)


@pytest.mark.parametrize("room", [100, 7])
def test_data_that_has_been_cut_short_is_noticed(segment: int, room: int) -> None:
    os.pwrite(segment, bytes(range(100)), HEADER.data_offset)
    os.ftruncate(segment, HEADER.data_offset + 100)
    assert read_data(segment, HEADER, 0, 100, memoryview(bytearray(room))) == crc32c(
        bytes(range(100))
    )
    os.ftruncate(segment, HEADER.data_offset + 99)
    with pytest.raises(
        IntegrityError,
        match="^the slot of step 1000 has been cut short: that copy in memory is lost$",
    ):
        read_data(segment, HEADER, 0, 100, memoryview(bytearray(room)))


def test_a_damaged_version_is_damage(segment: int) -> None:
    for copy in (0, ALIGN):
        os.pwrite(segment, HEADER.encode()[:8] + b"\x02" + HEADER.encode()[9:], copy)
    with pytest.raises(
        IntegrityError, match="^segment header does not match its checksum$"
    ) as caught:
        read_header(segment)
    assert type(caught.value) is IntegrityError


@each_case(
    ("at", "value"),
    [
        (24, struct.pack("<I", 0)),
        (24, struct.pack("<I", 4)),
        (64, struct.pack("<Q", 1 << 62)),
        (64, struct.pack("<Q", 1 << 40)),
        (72, struct.pack("<Q", 2 * ALIGN)),
        (80, struct.pack("<I", 0)),
        (80, struct.pack("<I", MIN_CHUNK - 1)),
        (80, struct.pack("<I", 2 * MAX_CHUNK)),
        (88, b"\xff\xfe"),
        (248, struct.pack("<Q", 200_000)),
        (248, struct.pack("<QQ", 1 << 63, 1 << 63)),
        (272, struct.pack("<QQ", 0, 200_001)),
        (296, struct.pack("<QQ", 199_999, 2)),
    ],
    ids=lambda v: v if isinstance(v, int) else v.hex(),
)
def test_impossible_fields_are_refused(at: int, value: bytes) -> None:
    with pytest.raises(IntegrityError):
        SegmentHeader.decode(_sealed_again(HEADER.encode(), at, value))


@pytest.mark.parametrize("at", [268, 292, 316])
def test_the_zeros_behind_the_extents_are_verified(at: int) -> None:
    """FORMAT.md, section 0: padding is zero, and a reader verifies that it is."""
    with pytest.raises(IntegrityError):
        SegmentHeader.decode(_sealed_again(HEADER.encode(), at, b"\x01"))


def test_a_header_without_a_step_stores_all_ones() -> None:
    assert NO_STEP == 0xFFFF_FFFF_FFFF_FFFF
    data = replace(HEADER, step=None).encode()
    assert data[40:48] == b"\xff" * 8
    assert SegmentHeader.decode(data).step is None


def test_a_header_that_does_not_fit_is_an_error(
    segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:100], offset))
    with pytest.raises(OSError, match="only 100 of 4096 bytes"):
        write_header(segment, HEADER)


# -- documents


def test_documents(segment: int) -> None:
    extent = write_document(segment, HEADER, 1234, b"a document")
    assert extent == Extent(1234, 10, crc32c(b"a document"))
    assert os.pread(segment, 10, HEADER.data_offset + 1234) == b"a document"
    assert read_document(segment, HEADER, extent, "plan") == b"a document"
    assert read_document(segment, HEADER, Extent(), "plan") == b""


def test_a_damaged_document_is_named(segment: int) -> None:
    extent = write_document(segment, HEADER, 0, b"a document")
    for bit in range(80):
        os.pwrite(segment, flip(b"a document", bit), HEADER.data_offset)
        with pytest.raises(IntegrityError, match="plan document of job 'gpt', step 1000, "):
            read_document(segment, HEADER, extent, "plan")
    write_document(segment, HEADER, 0, b"a document")
    os.ftruncate(segment, HEADER.data_offset + 9)
    with pytest.raises(IntegrityError, match="plan document"):
        read_document(segment, HEADER, extent, "plan")


# -- check area


def test_check_area_round_trips(segment: int) -> None:
    assert read_check(segment, HEADER) is None
    write_check(segment, HEADER, CRCS)
    assert read_check(segment, HEADER) == CRCS
    assert os.pread(segment, 80, CHECK_OFFSET) == encode_check(4, MIN_CHUNK, CRCS)
    write_check(segment, HEADER, [])
    assert read_check(segment, HEADER) == []


def test_a_check_area_of_another_seal_is_ignored(segment: int) -> None:
    write_check(segment, HEADER, CRCS)
    assert read_check(segment, HEADER.next(SlotState.SEALED)) is None
    assert read_check(segment, replace(HEADER, chunk_size=2 * MIN_CHUNK)) is None


def test_every_flipped_bit_of_the_check_area_is_seen(segment: int) -> None:
    good = encode_check(4, MIN_CHUNK, CRCS)
    fields = [*range(36 * 8), *range(CHECK_HEADER * 8, len(good) * 8)]
    for bit in fields:
        os.pwrite(segment, flip(good, bit), CHECK_OFFSET)
        assert read_check(segment, HEADER) is None


def test_the_padding_of_the_check_area_is_verified(segment: int) -> None:
    """FORMAT.md, section 0: padding is zero, and a reader verifies that it is."""
    for bit in range(36 * 8, CHECK_HEADER * 8):
        os.pwrite(segment, flip(encode_check(4, MIN_CHUNK, CRCS), bit), CHECK_OFFSET)
        assert read_check(segment, HEADER) is None


def test_a_check_area_cut_short_is_ignored(segment: int) -> None:
    write_header(segment, HEADER)
    write_check(segment, HEADER, CRCS)
    for length in reversed(range(CHECK_HEADER + 4 * len(CRCS))):
        os.ftruncate(segment, CHECK_OFFSET + length)
        assert read_check(segment, HEADER) is None


def test_a_check_area_with_too_large_a_count_is_ignored(segment: int) -> None:
    head = encode_check(4, MIN_CHUNK, CRCS)
    for count in (5, 1008, 1009, 1 << 31, (1 << 32) - 1):
        os.pwrite(segment, head[:24] + struct.pack("<I", count) + head[28:], CHECK_OFFSET)
        assert read_check(segment, HEADER) is None


# -- the root mark

MARK = RootMark("00112233445566778899aabbccddeeff", "/ckpts/ü")


def test_the_root_mark_lies_behind_the_data_as_the_format_says(segment: int) -> None:
    assert read_root_mark(segment, HEADER) is None  # as in a segment of an earlier version
    write_header(segment, HEADER)
    write_root_mark(segment, HEADER, MARK)
    assert os.fstat(segment).st_size == HEADER.file_length + ALIGN
    data = os.pread(segment, ALIGN, HEADER.file_length)
    place = "/ckpts/ü".encode()
    head = (
        b"CKPTDROT"
        + bytes([1, 0, 0, 0, 0, 0, 0, 0])
        + bytes.fromhex(MARK.identity)
        + struct.pack("<I", len(place))
    )
    assert data == (head + struct.pack("<I", crc32c(head + place)) + place).ljust(ALIGN, b"\0")
    assert read_root_mark(segment, HEADER) == MARK
    assert read_header(segment) == HEADER


def test_a_place_that_is_not_utf_8_or_too_long_is_kept_or_left_out(segment: int) -> None:
    for place, kept in (
        (os.fsdecode(b"/ckpts/\xff"), True),
        ("/" + "x" * 4055, True),
        ("/" + "x" * 4056, False),
    ):
        write_root_mark(segment, HEADER, RootMark(MARK.identity, place))
        assert read_root_mark(segment, HEADER) == RootMark(MARK.identity, place if kept else "")


def test_every_flipped_bit_of_a_root_mark_is_seen() -> None:
    data = MARK.encode()
    for bit in [*range(8 * 64), *range(8 * 64, 8 * ALIGN, 1009)]:
        with pytest.raises(IntegrityError):
            RootMark.decode(flip(data, bit))
    with pytest.raises(IntegrityError, match="cut short"):
        RootMark.decode(data[:-1])


def test_a_newer_root_mark_is_not_called_damaged() -> None:
    place = MARK.place.encode()
    head = (
        b"CKPTDROT"
        + struct.pack("<HHI", 2, 0, 0)
        + bytes.fromhex(MARK.identity)
        + struct.pack("<I", len(place))
    )
    with pytest.raises(NewerFormat, match="root mark of a segment was written by a newer ckptd"):
        RootMark.decode(
            (head + struct.pack("<I", crc32c(head + place)) + place).ljust(ALIGN, b"\0")
        )
