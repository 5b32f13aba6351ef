"""Encodes the header and the records of one journal file, and reads a whole file back
(FORMAT.md, section 7).

This module does no I/O. `scan` distinguishes a torn tail from corruption: damage at
sequence number k is a torn tail, unless a later record says that record k was durable.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from crc32c import crc32c

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.binary import check_preamble, preamble

MAGIC = b"CKPTDJNL"
FILE_SIZE = 4 << 20
HEADER_SIZE = 64
MAX_PAYLOAD = 1 << 20
# For a STATE record, which begins a file with the state that all earlier records add up
# to.
MAX_STATE = 2 << 20
STATE_TYPE = 1
IGNORABLE = 1
PAYLOAD_VERSION = 1
_HEADER = struct.Struct("<16sQ16sI")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<IIIBBHQQ")
RECORD_SIZE = _RECORD.size


@dataclass(frozen=True, slots=True)
class FileHeader:
    number: int
    salt: bytes
    previous_crc: int

    def encode(self) -> bytes:
        body = _HEADER.pack(preamble(MAGIC), self.number, self.salt, self.previous_crc)
        return (body + _CRC.pack(crc32c(body))).ljust(HEADER_SIZE, b"\0")

    @property
    def crc(self) -> int:
        return crc32c(self.encode()[: _HEADER.size])


@dataclass(frozen=True, slots=True)
class RawRecord:
    type: int
    flags: int
    sequence: int
    durable: int
    payload: bytes
    version: int = PAYLOAD_VERSION


class Ending(enum.Enum):
    CLEAN = "clean"
    TORN = "torn tail"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Scan:
    """The content of one journal file up to the first damage.

    `ending` says how the file ends.

    `end` is the offset behind the last good record. `last_crc` is the crc of that
    record, or of the header if there is no record; the next record must repeat it.
    """

    header: FileHeader
    records: list[RawRecord]
    ending: Ending
    end: int
    last_crc: int


def encode_record(salt: bytes, previous_crc: int, record: RawRecord) -> tuple[bytes, int]:
    """Return the bytes of a record, padded to 8 bytes, and its crc.

    Raises ValueError if the payload has more than `MAX_PAYLOAD` bytes, or more than
    `MAX_STATE` bytes in a STATE record.
    """
    if len(record.payload) > _most(record.type):
        raise ValueError(
            f"a journal record has {len(record.payload)} bytes; expected at most "
            f"{_most(record.type)}"
        )
    head = _RECORD.pack(
        0,
        len(record.payload),
        previous_crc,
        record.type,
        record.flags,
        record.version,
        record.sequence,
        record.durable,
    )
    crc = crc32c(record.payload, crc32c(head[4:], crc32c(salt)))
    data = _CRC.pack(crc) + head[4:] + record.payload
    return data.ljust(_aligned(len(data)), b"\0"), crc


def scan(data: bytes, number: int) -> Scan:
    """Read the bytes of a whole journal file, and return its header, its good records,
    and how the file ends.

    Raises NewerFormat if a newer ckptd wrote the file, IntegrityError if the header is
    damaged or belongs to a file of another number.
    """
    if len(data) < HEADER_SIZE:
        raise IntegrityError("journal header is cut short")
    check_preamble(data, MAGIC, "journal header", body=_HEADER.size)
    _, found, salt, previous = _HEADER.unpack_from(data)
    header = FileHeader(found, salt, previous)
    if header.encode() != data[:HEADER_SIZE] or found != number:
        raise IntegrityError("journal header does not match its name, or its padding is not zero")
    records: list[RawRecord] = []
    position, crc, sequence = HEADER_SIZE, header.crc, None
    while (found_record := _read(data, position, salt)) is not None:
        record, its_crc, before, length = found_record
        if before != crc or (sequence is not None and record.sequence != sequence + 1):
            break
        records.append(record)
        position, crc, sequence = position + length, its_crc, record.sequence
    if not any(data[position:]):
        return Scan(header, records, Ending.CLEAN, position, crc)
    ending = (
        Ending.CORRUPT
        if _proved_durable(data, position, salt, (sequence or 0) + 1)
        else Ending.TORN
    )
    return Scan(header, records, ending, position, crc)


def _most(kind: int) -> int:
    return MAX_STATE if kind == STATE_TYPE else MAX_PAYLOAD


def _aligned(length: int) -> int:
    return -(-length // 8) * 8


def _read(data: bytes, position: int, salt: bytes) -> tuple[RawRecord, int, int, int] | None:
    if position + RECORD_SIZE > len(data):
        return None
    crc, length, before, kind, flags, version, sequence, durable = _RECORD.unpack_from(
        data, position
    )
    end = position + RECORD_SIZE + length
    if (
        kind == 0
        or length > _most(kind)
        or end > len(data)
        or crc32c(data[position + 4 : end], crc32c(salt)) != crc
        or any(data[end : position + _aligned(RECORD_SIZE + length)])
    ):
        return None
    return (
        RawRecord(kind, flags, sequence, durable, data[position + RECORD_SIZE : end], version),
        crc,
        before,
        _aligned(RECORD_SIZE + length),
    )


def _proved_durable(data: bytes, position: int, salt: bytes, sequence: int) -> bool:
    """Return True if a record behind the damage says that the record with number
    `sequence` was durable.
    """
    for at in range(_aligned(position), len(data) - RECORD_SIZE, 8):
        if data[at + 4 : at + 8] == b"\0\0\0\0" and not data[at + 12]:
            continue  # length 0 and type 0: no record starts here, these are zeros
        found = _read(data, at, salt)
        if found is not None and found[0].sequence >= sequence and found[0].durable >= sequence:
            return True
    return False
