"""Tests one journal file as bytes, and how the reader sees any damage to it.

The oracle knows what was written. All records before the first damaged one must be
found, and no others. The rest of the file is clean if it holds only zeros, corrupt if a
later record says that the damaged one was durable, and a torn tail otherwise.
"""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.journal.file import (
    HEADER_SIZE,
    IGNORABLE,
    MAX_PAYLOAD,
    MAX_STATE,
    RECORD_SIZE,
    Ending,
    FileHeader,
    RawRecord,
    encode_record,
    scan,
)
from ckptd.shared.errors import IntegrityError, NewerFormat
from tests.shared.samples import flip, resealed, steady
from tests.support.cases import each_case

HEADER = FileHeader(number=7, salt=bytes(range(16)), previous_crc=0x1234)


class Written:
    """A journal with known contents.

    `places` has the offsets of its records, padding included.
    """

    def __init__(
        self, batches: list[list[bytes]], tail: int = 0, header: FileHeader = HEADER
    ) -> None:
        self.records: list[RawRecord] = []
        self.places: list[tuple[int, int]] = []
        self.crcs: list[int] = []
        data, crc, sequence = bytearray(header.encode()), header.crc, 0
        for batch in batches:
            durable = sequence
            for payload in batch:
                sequence += 1
                record = RawRecord(1 + sequence % 9, sequence % 2, sequence, durable, payload)
                encoded, crc = encode_record(header.salt, crc, record)
                self.places.append((len(data), len(data) + len(encoded)))
                self.records.append(record)
                self.crcs.append(crc)
                data += encoded
        self.end = len(data)
        self.data = bytes(data) + bytes(tail)

    def check(self, damaged: bytes) -> Ending:
        """Compare what `scan` returns with what is known."""
        found = scan(damaged, 7)
        intact = [
            damaged[start:end].ljust(end - start, b"\0") == self.data[start:end]
            for start, end in self.places
        ]
        good = next((n for n, ok in enumerate(intact) if not ok), len(intact))
        end = self.places[good - 1][1] if good else HEADER_SIZE
        if not any(damaged[end:]):
            ending = Ending.CLEAN
        elif any(
            ok and record.durable > good
            for ok, record in zip(intact[good:], self.records[good:], strict=True)
        ):
            ending = Ending.CORRUPT
        else:
            ending = Ending.TORN
        assert found.records == self.records[:good]
        assert (found.ending, found.end, found.header) == (ending, end, HEADER)
        assert found.last_crc == (self.crcs[good - 1] if good else HEADER.crc)
        return ending


def _journal() -> Written:
    noise = random.Random(3)
    lengths = [[300], [1, 402], [203, 404, 205], [506], [7, 208], [333], [444, 222]]
    return Written([[noise.randbytes(length) for length in batch] for batch in lengths], tail=128)


JOURNAL = _journal()


def test_the_sample_has_4_kb_and_payloads_of_every_length_modulo_8() -> None:
    assert 3800 < len(JOURNAL.data) < 4200
    assert {len(record.payload) % 8 for record in JOURNAL.records} == set(range(8))


# -- layout


def test_header_is_as_documented() -> None:
    data = HEADER.encode()
    assert data == b"CKPTDJNL\x01\0\0\0\0\0\0\0" + struct.pack("<Q", 7) + bytes(
        range(16)
    ) + struct.pack("<II", 0x1234, HEADER.crc) + bytes(16)
    assert crc32c(data[:44]) == HEADER.crc
    assert len(data) == HEADER_SIZE == 64


def test_record_is_as_documented() -> None:
    data, crc = encode_record(b"s" * 16, 0xAABBCCDD, RawRecord(5, IGNORABLE, 9, 8, b"payload"))
    assert data == struct.pack("<IIIBBHQQ", crc, 7, 0xAABBCCDD, 5, 1, 1, 9, 8) + b"payload" + bytes(
        1
    )
    assert crc == crc32c(b"s" * 16 + data[4:39])
    assert len(data) % 8 == 0
    assert RECORD_SIZE == 32


@steady
@given(st.lists(st.lists(st.binary(max_size=100), max_size=4), max_size=6), st.integers(0, 300))
def test_written_records_are_read(batches: list[list[bytes]], tail: int) -> None:
    written = Written(batches, tail)
    found = scan(written.data, 7)
    assert (found.header, found.records, found.ending, found.end) == (
        HEADER,
        written.records,
        Ending.CLEAN,
        written.end,
    )


def test_the_largest_payload_is_written_and_a_larger_one_refused() -> None:
    for kind, most in ((1, MAX_STATE), (2, MAX_PAYLOAD), (9, MAX_PAYLOAD)):
        record = RawRecord(kind, 0, 1, 0, bytes(most))
        data = HEADER.encode() + encode_record(HEADER.salt, HEADER.crc, record)[0] + bytes(64)
        assert scan(data, 7).records == [record]
        with pytest.raises(ValueError, match=f"has {most + 1} bytes; expected at most {most}"):
            encode_record(b"", 0, RawRecord(kind, 0, 1, 0, bytes(most + 1)))
    assert (MAX_STATE, MAX_PAYLOAD) == (2 << 20, 1 << 20)


# -- damage


def test_every_flipped_bit() -> None:
    seen = dict.fromkeys(Ending, 0)
    for bit in range(8 * HEADER_SIZE):
        with pytest.raises(IntegrityError):
            scan(flip(JOURNAL.data, bit), 7)
    for bit in range(8 * HEADER_SIZE, 8 * len(JOURNAL.data)):
        seen[JOURNAL.check(flip(JOURNAL.data, bit))] += 1
    assert seen[Ending.CLEAN] == 0
    assert seen[Ending.TORN] > 1000
    assert seen[Ending.CORRUPT] > 10_000


def test_every_truncation() -> None:
    for length in range(HEADER_SIZE):
        with pytest.raises(IntegrityError):
            scan(JOURNAL.data[:length], 7)
    for length in range(HEADER_SIZE, len(JOURNAL.data) + 1):
        assert JOURNAL.check(JOURNAL.data[:length]) is not Ending.CORRUPT


def test_every_zero_filled_tail() -> None:
    for length in range(48):  # the rest of the header is zeros in any case
        with pytest.raises(IntegrityError):
            scan(JOURNAL.data[:length].ljust(len(JOURNAL.data), b"\0"), 7)
    for length in range(48, len(JOURNAL.data)):
        assert (
            JOURNAL.check(JOURNAL.data[:length].ljust(len(JOURNAL.data), b"\0"))
            is not Ending.CORRUPT
        )


def test_every_lost_sector() -> None:
    """Wherever 512 bytes come back as zeros, the loss of an acknowledged record is
    reported.
    """

    def ending(start: int) -> Ending:
        damaged = JOURNAL.data[:start] + bytes(512) + JOURNAL.data[start + 512 :]
        return JOURNAL.check(damaged[: len(JOURNAL.data)])

    late = JOURNAL.end - 512 - 1000  # from there on the lost records may be the last ones
    assert {ending(start) for start in range(HEADER_SIZE, late, 8)} == {Ending.CORRUPT}
    assert Ending.TORN in {ending(start) for start in range(late, JOURNAL.end, 8)}


def test_a_torn_last_write_is_never_taken_for_corruption() -> None:
    """Any subset of the sectors of the last batch may have reached the disk.

    No record of it was acknowledged as durable.
    """
    noise = random.Random(5)
    written = Written(
        [
            [noise.randbytes(90)] * 3,
            [noise.randbytes(100)] * 4,
            [noise.randbytes(400) for _ in range(8)],
        ],
        tail=600,
    )
    first = written.places[7][0]
    sectors = range(first // 512, written.end // 512 + 1)
    assert len(sectors) >= 7
    endings = set()
    for lost in itertools.product([False, True], repeat=len(sectors)):
        damaged = bytearray(written.data)
        for sector, gone in zip(sectors, lost, strict=True):
            if gone:
                start, end = max(first, 512 * sector), min(512 * (sector + 1), len(damaged))
                damaged[start:end] = bytes(end - start)
        endings.add(written.check(bytes(damaged)))
        assert scan(bytes(damaged), 7).records[:7] == written.records[:7]
    assert endings == {Ending.CLEAN, Ending.TORN}


def test_random_damage_never_gives_a_record_that_was_not_written() -> None:
    noise = random.Random(9)
    for _ in range(1500):
        damaged = bytearray(JOURNAL.data)
        for _ in range(noise.randint(1, 4)):
            at, length = noise.randrange(HEADER_SIZE, len(damaged)), noise.choice([1, 2, 8, 100])
            damaged[at : at + length] = noise.randbytes(min(length, len(damaged) - at))
        JOURNAL.check(bytes(damaged))


def test_a_tail_written_twice_is_not_read_twice() -> None:
    assert len(JOURNAL.places) > 10
    for start, _ in JOURNAL.places:
        doubled = JOURNAL.data[: JOURNAL.end] + JOURNAL.data[start : JOURNAL.end] + bytes(64)
        found = scan(doubled, 7)
        assert (found.records, found.ending) == (JOURNAL.records, Ending.TORN)


def test_records_in_another_order_are_not_read() -> None:
    (a, b), (c, d) = JOURNAL.places[3], JOURNAL.places[4]
    swapped = JOURNAL.data[:a] + JOURNAL.data[c:d] + JOURNAL.data[a:b] + JOURNAL.data[d:]
    found = scan(swapped, 7)
    assert (found.records, found.ending) == (JOURNAL.records[:3], Ending.CORRUPT)


def test_records_of_another_file_are_not_read() -> None:
    """Blocks of an old file may come back behind the end.

    The old file has another salt.
    """
    old = Written([[b"old"] * 5] * 5, header=FileHeader(6, b"another salt....", 0))
    for cut in (HEADER_SIZE, JOURNAL.places[7][1], JOURNAL.end):
        spliced = JOURNAL.data[:cut] + old.data[HEADER_SIZE:]
        found = scan(spliced, 7)
        assert (
            found.records == JOURNAL.records[: len([1 for _, end in JOURNAL.places if end <= cut])]
        )
        assert found.ending is Ending.TORN


@pytest.mark.parametrize(
    ("crc", "sequence"),
    [(0, 0), (1, 0), (0, 1), (0, -1)],
    ids=["right", "another chain", "one left out", "one again"],
)
def test_a_record_follows_the_one_before_in_chain_and_number(crc: int, sequence: int) -> None:
    last = JOURNAL.records[-1]
    record = RawRecord(2, 0, last.sequence + 1 + sequence, last.sequence - 1, b"next")
    data = (
        JOURNAL.data[: JOURNAL.end] + encode_record(HEADER.salt, JOURNAL.crcs[-1] ^ crc, record)[0]
    )
    found = scan(data, 7)
    assert found.records == (
        [*JOURNAL.records, record] if (crc, sequence) == (0, 0) else JOURNAL.records
    )
    assert (found.ending is Ending.CLEAN) == ((crc, sequence) == (0, 0))


def test_a_file_is_known_by_its_number() -> None:
    with pytest.raises(IntegrityError, match="its name"):
        scan(JOURNAL.data, 8)


@pytest.mark.parametrize(("at", "value"), [(8, 2), (12, 1)])
def test_a_newer_file_is_not_called_damaged(at: int, value: int) -> None:
    with pytest.raises(NewerFormat):
        scan(resealed(JOURNAL.data, at, value, start=0, body=44), 7)
    damaged = bytearray(JOURNAL.data)
    damaged[at] = value
    with pytest.raises(
        IntegrityError, match="^journal header does not match its checksum$"
    ) as caught:
        scan(bytes(damaged), 7)
    assert type(caught.value) is IntegrityError


@each_case(
    "data",
    [b"", bytes(10), bytes(64), bytes(4096), b"CKPTDJNL" + bytes(56)],
    ids=["none", "10", "64", "4096", "magic"],
)
def test_anything_but_a_journal_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        scan(data, 7)


def test_a_record_that_claims_too_many_bytes_is_a_torn_tail() -> None:
    for length in (1, MAX_PAYLOAD, MAX_PAYLOAD + 1, (1 << 32) - 1):
        damaged = JOURNAL.data[: JOURNAL.end] + struct.pack(
            "<IIIBBHQQ", 1, length, JOURNAL.crcs[-1], 2, 0, 1, 99, 98
        )
        found = scan(damaged, 7)
        assert (found.records, found.ending) == (JOURNAL.records, Ending.TORN)
