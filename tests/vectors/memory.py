"""The test vectors of segments and journals, sound ones and others, with what a reader
must find (FORMAT.md, section 17).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
from crc32c import crc32c

from ckptd.shared.formats.binary import ALIGN, align, preamble
from tests.vectors.build import ATTEMPT, JOB, STEP, TAG, WRITER, nonce_of

CAPACITY, CHUNK = 4000, 65536
CHECK_LENGTH = align(64 + 4 * 9)
DATA = 2 * ALIGN + CHECK_LENGTH
BOOT, IDENTITY = bytes(range(32, 48)), bytes(range(48, 64))
WEIGHT = bytes(range(24))
VALUES = msgspec.msgpack.encode(
    {"state": {"weight": msgspec.msgpack.Ext(1, b"weight")}, "rng": None}
)
PLAN = msgspec.msgpack.encode(
    {
        "regions": [[0, 24, 4]],
        "items": [["weight", "float32", [6], [0], [6], None, 0, "cpu", False]],
        "aliases": [],
        "metadata": {"weight": {"dtype": "float32", "size": [6], "chunks": [[[0], [6]]]}},
        "writer": WRITER,
        "global_plan": bytes(32),
        "version": 1,
    }
)
REQUEST = msgspec.msgpack.encode(
    {"tag": None, "persist": True, "metrics": {}, "user_content": "null", "created": 1767323045.0}
)
PLACES = {"values": (64, VALUES), "plan": (512, PLAN), "request": (1024, REQUEST)}
CHUNKS = [crc32c(WEIGHT), crc32c(VALUES)]


@dataclass(frozen=True)
class Memory:
    """A segment or a journal, and its entry in `vectors.json`."""

    data: bytes
    entry: dict[str, Any]


def head(
    generation: int,
    state: int,
    *,
    step: int = STEP,
    version: int = 1,
    capacity: int = CAPACITY,
    check_length: int = CHECK_LENGTH,
    places: dict[str, tuple[int, bytes]] | None = None,
    features: int = 0,
    chunk_size: int = CHUNK,
    zero: int = 0,
    job: bytes = JOB.encode(),
    world_size: int = 1,
) -> bytes:
    """Return one copy of a header, 4096 bytes.

    `zero` takes the place of the zeros behind each crc32c of a document.
    """
    extents = b""
    for name in ("plan", "request", "values"):
        at, document = (places or {}).get(name, (0, b""))
        extents += struct.pack(
            "<QQII", at, len(document), crc32c(document) if document else 0, zero
        )
    body = (
        preamble(b"CKPTDSEG", features, version)
        + struct.pack(
            "<QIIIIQ16sQQII128s32s",
            generation,
            state,
            0,
            world_size,
            ATTEMPT,
            step,
            BOOT,
            capacity,
            check_length,
            chunk_size,
            1,
            job,
            hashlib.sha256((places or PLACES)["plan"][1]).digest() if state == 3 else bytes(32),
        )
        + extents
    )
    assert len(body) == 320
    return (body + struct.pack("<I", crc32c(body))).ljust(ALIGN, b"\0")


def checks(
    generation: int,
    crcs: list[int],
    behind: bytes = b"",
    *,
    chunk_size: int = CHUNK,
    version: int = 1,
    zero: bytes = b"\0",
) -> bytes:
    """Return a check area. Bytes 36 to 64 are filled with `zero`."""
    start = preamble(b"CKPTDCHK", 0, version) + struct.pack(
        "<QII", generation, len(crcs), chunk_size
    )
    entries = struct.pack(f"<{len(crcs)}I", *crcs)
    return (
        (start + struct.pack("<I", crc32c(entries, crc32c(start)))).ljust(64, zero)
        + entries
        + behind
    )


def mark(place: bytes = b"/ckpts", version: int = 1) -> bytes:
    start = preamble(b"CKPTDROT", 0, version) + IDENTITY + struct.pack("<I", len(place))
    return (start + struct.pack("<I", crc32c(place, crc32c(start))) + place).ljust(ALIGN, b"\0")


SEALED, FILLING = head(4, 3, places=PLACES), head(3, 2)


def segment(
    copy_0: bytes,
    copy_1: bytes,
    check: bytes = b"",
    root_mark: bytes = b"",
    places: dict[str, tuple[int, bytes]] = PLACES,
) -> bytes:
    data = bytearray(align(CAPACITY))
    data[:24] = WEIGHT
    for at, document in places.values():
        data[at : at + len(document)] = document
    return copy_0 + copy_1 + check.ljust(CHECK_LENGTH, b"\0") + bytes(data) + root_mark


def told(generation: int, state: str, **more: Any) -> dict[str, Any]:
    return {
        "generation": generation,
        "state": state,
        "job": JOB,
        "attempt": ATTEMPT,
        "rank": 0,
        "world_size": 1,
        "step": STEP,
    } | more


def segments() -> dict[str, Memory]:
    by_client = checks(4, CHUNKS, behind=b"left over from an earlier snapshot")

    def case(
        about: str,
        data: bytes,
        header: dict[str, Any],
        crcs: list[int] | None,
        identity: str | None = None,
    ) -> Memory:
        return Memory(
            data,
            {
                "about": about,
                "expect": "read",
                "header": header,
                "checks": crcs,
                "identity": identity,
            },
        )

    def refused(about: str, copy_0: bytes, copy_1: bytes, *, newer: bool = False) -> Memory:
        why = "newer" if newer else "damaged"
        return Memory(
            segment(copy_0, copy_1),
            {
                "about": about,
                "expect": "refused",
                "why": why,
                "at": "open",
                "check": "segment-header",
            },
        )

    broken = bytes([SEALED[0] ^ 1]) + SEALED[1:]

    def changed(about: str, check: str, at: str, place: int, data: bytes | None = None) -> Memory:
        """Return a refused segment with one byte of its data changed, at this place in
        the data.
        """
        sound = data or segment(SEALED, FILLING, by_client)
        byte = DATA + place
        found = sound[:byte] + bytes([sound[byte] ^ 1]) + sound[byte + 1 :]
        return Memory(
            found, {"about": about, "expect": "refused", "why": "damaged", "at": at, "check": check}
        )

    def ignored(about: str, check: bytes, root_mark: bytes = b"") -> Memory:
        """Return a sound segment whose check area, and whose root mark if it has one,
        does not count.
        """
        return case(about, segment(SEALED, FILLING, check, root_mark), told(4, "sealed"), None)

    of_both = msgspec.msgpack.encode(
        {
            "state": {
                "weight": msgspec.msgpack.Ext(1, b"weight"),
                "other": msgspec.msgpack.Ext(1, b"other"),
            }
        }
    )
    of_two_ranks = PLACES | {"values": (64, of_both)}
    long_tag = msgspec.msgpack.decode(REQUEST) | {"tag": "t" * 129}

    def sealed_with(
        about: str, check: str, name: str, document: bytes, at: int | None = None
    ) -> Memory:
        """Return a segment that is sealed with another document of this name.

        Its crc32c and the signature are right.
        """
        places = PLACES | {name: (PLACES[name][0] if at is None else at, document)}
        return Memory(
            segment(head(4, 3, places=places), FILLING, by_client, places=places),
            {"about": about, "expect": "refused", "why": "damaged", "at": "open", "check": check},
        )

    other_plan = bytes([PLAN[0]]) + PLAN[1:].replace(b"weight", b"height", 1)
    signed = head(4, 3, places=PLACES | {"plan": (512, other_plan)})
    body = signed[:216] + hashlib.sha256(PLAN).digest() + signed[248:320]
    unsigned = segment(
        (body + struct.pack("<I", crc32c(body))).ljust(ALIGN, b"\0"), FILLING, by_client
    )
    unsigned = unsigned[: DATA + 512] + other_plan + unsigned[DATA + 512 + len(other_plan) :]
    return {
        "checks-by-the-client": case(
            "sealed with a check area that the client wrote before the seal; the bytes behind its "
            "entries mean nothing",
            segment(SEALED, FILLING, by_client, mark()),
            told(4, "sealed"),
            CHUNKS,
            IDENTITY.hex(),
        ),
        "without-checks": case(
            "sealed; nobody has computed the checksums yet, and there is no root mark, as earlier "
            "versions made segments",
            segment(SEALED, FILLING),
            told(4, "sealed"),
            None,
        ),
        "checks-of-another-seal": case(
            "the check area is that of generation 2, and does not count",
            segment(SEALED, FILLING, checks(2, CHUNKS)),
            told(4, "sealed"),
            None,
        ),
        "checks-damaged": case(
            "the crc32c of the check area is wrong, so that it does not count",
            segment(SEALED, FILLING, by_client[:64] + b"\0" + by_client[65:]),
            told(4, "sealed"),
            None,
        ),
        "torn-seal": case(
            "the write of generation 4 was interrupted, and the copy of generation 3 counts",
            segment(broken, FILLING),
            told(3, "filling"),
            None,
        ),
        "newer-copy": case(
            "copy 0 was written by a newer ckptd, and copy 1 is valid",
            segment(head(4, 3, version=2, places=PLACES), FILLING),
            told(3, "filling"),
            None,
        ),
        "free": case(
            "a slot as the daemon makes it: generation 1 in copy 1, and zeros in copy 0",
            segment(bytes(ALIGN), head(1, 1, step=(1 << 64) - 1)),
            told(1, "free", step=None),
            None,
        ),
        "mark-of-an-url": case(
            "the root is in an object store",
            segment(SEALED, FILLING, b"", mark(b"s3://bucket/runs")),
            told(4, "sealed"),
            None,
            IDENTITY.hex(),
        ),
        "plan-damaged": changed(
            "a bit of the plan document is another", "segment-documents", "open", 530
        ),
        "request-damaged": changed(
            "a bit of the request document is another", "segment-documents", "open", 1030
        ),
        "signature": Memory(
            unsigned,
            {
                "about": "the signature is that of another plan document, and its crc32c is right",
                "expect": "refused",
                "why": "damaged",
                "at": "open",
                "check": "part-identity",
            },
        ),
        "data-changed": changed(
            "a bit of a tensor is another than when the slot was sealed",
            "segment-checks",
            "read",
            3,
        ),
        "values-changed": changed(
            "a bit of the values document is another than when the slot was sealed",
            "segment-checks",
            "read",
            70,
        ),
        "both-damaged": refused("neither copy of the header is valid", broken, bytes(ALIGN)),
        "version": refused(
            "both copies have version 2", head(4, 3, version=2), head(3, 2, version=2), newer=True
        ),
        "feature": refused(
            "both copies have an unknown feature bit",
            head(4, 3, features=2),
            head(3, 2, features=2),
            newer=True,
        ),
        "state": refused("state 4", head(4, 4), bytes(ALIGN)),
        "check-length": refused(
            "the check area has a length that does not follow from the capacity",
            head(4, 2, check_length=ALIGN * 2),
            bytes(ALIGN),
        ),
        "document-outside": refused(
            "the plan document reaches beyond the data",
            head(4, 3, places=PLACES | {"plan": (CAPACITY - 8, PLAN)}),
            bytes(ALIGN),
        ),
        "padding": refused(
            "a byte behind the header is not zero", SEALED[:-1] + b"\1", bytes(ALIGN)
        ),
        "chunk-size": refused("the chunk size is 4,096", head(4, 2, chunk_size=4096), bytes(ALIGN)),
        "zeros": refused(
            "the zero behind the crc32c of a document is 1",
            head(4, 3, places=PLACES, zero=1),
            bytes(ALIGN),
        ),
        "job": refused(
            "the job is not UTF-8", head(4, 3, places=PLACES, job=b"\xff"), bytes(ALIGN)
        ),
        "one-newer": refused(
            "copy 0 has version 2, and copy 1 is damaged", head(4, 3, version=2), broken, newer=True
        ),
        "wrong-copy": case(
            "both generations are in the copy of the other: a reader does not check that",
            segment(FILLING, SEALED, by_client),
            told(4, "sealed"),
            CHUNKS,
        ),
        "checks-reserved": ignored(
            "a byte of the check area that must be zero is not", checks(4, CHUNKS, zero=b"\1")
        ),
        "checks-version": ignored("the check area has version 2", checks(4, CHUNKS, version=2)),
        "checks-chunk-size": ignored(
            "the check area has another chunk size", checks(4, CHUNKS, chunk_size=2 * CHUNK)
        ),
        "checks-count": ignored("the check area has a checksum too few", checks(4, CHUNKS[:1])),
        "mark-damaged": ignored(
            "the root mark is damaged, and does not count", b"", bytes([mark()[0] ^ 1]) + mark()[1:]
        ),
        "plan-item-beyond": sealed_with(
            "the plan has an item that reaches beyond its region",
            "plan-items",
            "plan",
            PLAN.replace(b"\x91\x93\x00\x18\x04", b"\x91\x93\x00\x14\x04"),
        ),
        "values-inside": sealed_with(
            "the values document begins inside the tensors", "values-place", "values", VALUES, 16
        ),
        "mark-version": ignored(
            "the root mark has version 2: the segment is none of this root, and its identity is "
            "not known",
            b"",
            mark(version=2),
        ),
        "of-two-ranks": case(
            "rank 0 of 2, whose values name a tensor that only rank 1 stores: one segment cannot "
            "tell whether that is so",
            segment(head(4, 3, places=of_two_ranks, world_size=2), FILLING, places=of_two_ranks),
            told(4, "sealed", world_size=2),
            None,
        ),
        "plan-cut": Memory(
            segment(SEALED, FILLING)[: DATA + 600],
            {
                "about": "the file ends inside the plan document",
                "expect": "refused",
                "why": "damaged",
                "at": "open",
                "check": "segment-documents",
            },
        ),
        "request-tag": sealed_with(
            "the tag in the request has 129 characters",
            "limits",
            "request",
            msgspec.msgpack.encode(long_tag),
        ),
        "request-garbage": sealed_with(
            "the request document is no msgpack", "segment-documents", "request", b"\xc1" * 8
        ),
    }


# -- journals

SALT = bytes(range(16, 32))
FILE = f"rank-00000.{nonce_of(0).hex()}.ckpt"


def record(
    previous: int,
    kind: int,
    sequence: int,
    durable: int,
    payload: Any,
    *,
    flags: int = 0,
    version: int = 1,
) -> tuple[bytes, int]:
    """Return the bytes of a record, and its crc."""
    packed = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
    body = struct.pack("<IIBBHQQ", len(packed), previous, kind, flags, version, sequence, durable)
    crc = crc32c(packed, crc32c(body, crc32c(SALT)))
    data = struct.pack("<I", crc) + body + packed
    return data.ljust(-(-len(data) // 8) * 8, b"\0"), crc


def journals() -> dict[str, Memory]:
    def header(number: int = 1, **options: Any) -> tuple[bytes, int]:
        """Return a header, and its crc."""
        start = preamble(b"CKPTDJNL", **options) + struct.pack("<Q16sI", number, SALT, 0)
        return (start + struct.pack("<I", crc32c(start))).ljust(64, b"\0"), crc32c(start)

    before = {
        "jobs": {"gpt": {"attempt": 1, "world_size": 2, "sealed_step": 900, "seq": 6}, "idle": {}},
        "staged": {"gpt/step-00000900.a0001": {FILE: None}},
        "retiring": {"gpt/step-00000100.a0001": [FILE]},
    }
    common = {"job": JOB, "attempt": ATTEMPT, "step": STEP, "rank": 0, "tag": TAG, "file": FILE}
    part = common | {"bytes": 8192, "index_sha256": "ab" * 32}
    records: list[tuple[int, Any]] = [
        (1, before),
        (2, {"job": JOB, "attempt": ATTEMPT, "world_size": 2}),
        (
            3,
            {
                "job": JOB,
                "attempt": ATTEMPT,
                "step": STEP,
                "rank": 0,
                "world_size": 2,
                "tag": TAG,
                "segment": f"{'0' * 32}.seg",
                "generation": 4,
                "persist": True,
            },
        ),
        (4, common),
        (5, part),
        (
            7,
            {
                "job": JOB,
                "attempt": 1,
                "step": 900,
                "tag": "step-00000900.a0001",
                "reason": "the daemon ended",
            },
        ),
        (9, {"job": JOB, "tag": "step-00000100.a0001"}),
        (8, {"job": JOB, "tag": "step-00000200.a0001", "files": [FILE]}),
    ]
    first, crc = header()
    pieces = [first]
    for sequence, (kind, payload) in enumerate(records, start=1):
        data, crc = record(crc, kind, sequence, 4 if sequence > 4 else 0, payload)
        pieces.append(data)
    state = {
        "jobs": {"gpt": {"attempt": 2, "world_size": 2, "sealed_step": 1000, "seq": 6}, "idle": {}},
        "staged": {f"gpt/{TAG}": {FILE: part}},
        "retiring": {"gpt/step-00000200.a0001": [FILE]},
    }
    sound = b"".join(pieces)

    def whole(data: bytes) -> bytes:
        return data.ljust(4 << 20, b"\0")

    def case(
        about: str, data: bytes, ending: str, count: int, found: dict[str, Any] | None
    ) -> Memory:
        return Memory(
            whole(data),
            {
                "about": about,
                "expect": "read",
                "number": 1,
                "ending": ending,
                "records": count,
                "state": found,
            },
        )

    def refused(about: str, check: str, data: bytes, *, newer: bool = False) -> Memory:
        why = "newer" if newer else "damaged"
        return Memory(
            data,
            {
                "about": about,
                "expect": "refused",
                "why": why,
                "at": "open",
                "check": check,
                "number": 1,
            },
        )

    def with_record(
        about: str, kind: int, payload: Any, *, newer: bool = False, **options: int
    ) -> Memory:
        """Return a refused journal with one record more."""
        data, _ = record(crc, kind, 9, 4, payload, **options)
        return refused(about, "journal-records", whole(sound + data), newer=newer)

    last = len(sound) - len(pieces[-1])
    one, _ = record(header()[1], *(2, 1, 0), {"job": JOB, "attempt": ATTEMPT, "world_size": 2})
    broken_one = one[:40] + bytes([one[40] ^ 1]) + one[41:]
    unrelated, _ = record(77, *(2, 2, 1), {"job": JOB, "attempt": ATTEMPT, "world_size": 2})
    nothing: dict[str, Any] = {"jobs": {}, "staged": {}, "retiring": {}}
    third = sum(map(len, pieces[:3]))
    again, _ = record(crc, 5, 9, 4, part)
    ignorable, _ = record(crc, 200, 9, 4, b"\xc1", flags=1)
    return {
        "clean": case("a STATE record and seven others", sound, "clean", 8, state),
        "replayed": case(
            "the PART record again: records are merged", sound + again, "clean", 9, state
        ),
        "ignorable": case(
            "a record of an unknown type with bit 0 of the flags: its payload is not read",
            sound + ignorable,
            "clean",
            9,
            state,
        ),
        "torn": case(
            "the last record is damaged, and no later record says that it was durable",
            sound[: last + 40] + b"\xff" + sound[last + 41 :],
            "torn tail",
            7,
            state | {"retiring": {}},
        ),
        "corrupt": case(
            "record 3 is damaged, and later records say that record 4 was durable",
            sound[: third + 40] + b"\xff" + sound[third + 41 :],
            "corrupt",
            2,
            None,
        ),
        "without-records": case("a header, and no record", first, "clean", 0, nothing),
        "torn-first": case(
            "the only record is damaged", first + broken_one, "torn tail", 0, nothing
        ),
        "corrupt-first": case(
            "record 1 is damaged, and record 2 says that it was durable; record 2 names another "
            "crc of the record before",
            first + broken_one + unrelated,
            "corrupt",
            0,
            None,
        ),
        "another-sequence": case(
            "the record behind record 8 has the sequence number 10",
            sound + record(crc, 5, 10, 4, part)[0],
            "torn tail",
            8,
            state,
        ),
        "short": refused(
            "the file has 4,096 bytes", "journal-header", sound[:4096].ljust(4096, b"\0")
        ),
        "long": refused("a byte follows the 4 MiB", "journal-header", whole(sound) + b"\0"),
        "header-checksum": refused(
            "one bit of the salt is another",
            "journal-header",
            whole(first[:24] + b"\0" + sound[25:]),
        ),
        "header-magic": refused(
            "the magic is that of a part",
            "journal-header",
            whole(_resealed(b"CKPTDPRT" + first[8:]) + sound[64:]),
        ),
        "header-padding": refused(
            "a byte behind the header is not zero",
            "journal-header",
            whole(first[:63] + b"\1" + sound[64:]),
        ),
        "number": refused(
            "the number is not that in the name", "journal-header", whole(header(2)[0])
        ),
        "version": refused("version 2", "journal-header", whole(header(version=2)[0]), newer=True),
        "feature": refused(
            "an unknown feature bit", "journal-header", whole(header(features=1)[0]), newer=True
        ),
        "type": with_record("a record of an unknown type", 200, {}, newer=True),
        "record-version": with_record(
            "a record of a higher version", 5, part, newer=True, version=2
        ),
        "payload": with_record("the payload of a record is no msgpack", 5, b"\xc1"),
        "payload-member": with_record(
            "the payload of a record has no `file`",
            4,
            {name: common[name] for name in common if name != "file"},
        ),
    }


def _resealed(header: bytes) -> bytes:
    """Return the header of a journal file with its crc32c made again."""
    return header[:44] + struct.pack("<I", crc32c(header[:44])) + header[48:]
