"""Tests part files: what is written is read, and no damage passes."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from obstore.store import MemoryStore

from ckptd.shared.codecs import codec
from ckptd.shared.codecs.codec import encoder
from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats.binary import ALIGN, align
from ckptd.shared.formats.part import (
    TRAILER_SIZE,
    PartIndex,
    PartReader,
    encode_end,
    encode_header,
    end_bound,
)
from ckptd.shared.formats.plan import MIN_CHUNK, ChunkRange, Plan, Region
from ckptd.shared.formats.scatter import verify
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_streams import ObjectSource
from tests.shared.samples import (
    NONCE,
    WRITER,
    encode_part,
    flip,
    memory_file,
    packed_slot,
    resealed,
    sample_plan,
    values_after,
)
from tests.support.cases import each_case
from tests.support.storage import source

PLAN = sample_plan(floats=40_000)  # 160,000 bytes: three chunks of 64 KiB
VALUES = values_after(PLAN, 70_000)
SLOT = packed_slot(PLAN, VALUES)
LARGE = {
    name: encode_part(SLOT, PLAN, VALUES, codec=name, chunk_size=MIN_CHUNK)[0]
    for name in ("raw", "zstd")
}
SMALL_PLAN = sample_plan()
SMALL_VALUES = values_after(SMALL_PLAN)
SMALL, SMALL_INDEX = encode_part(
    packed_slot(SMALL_PLAN, SMALL_VALUES), SMALL_PLAN, SMALL_VALUES, codec="zstd"
)


def read(data: bytes, index_sha256: str | None = None) -> dict[int, bytes]:
    """Return every chunk, by its offset in the packed slot."""
    with memory_file(data) as fd:
        reader = PartReader(source(fd), "p", index_sha256)
        found = {}
        for number, chunk in enumerate(reader.ranges):
            raw = bytearray(chunk.length)
            reader.read_chunk(number, memoryview(raw))
            found[chunk.offset] = bytes(raw)
        return found


def check(data: bytes, index_sha256: str | None = None) -> None:
    with memory_file(data) as fd:
        verify(PartReader(source(fd), "p", index_sha256), threads=1)


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_every_byte_comes_back(name: str) -> None:
    data = LARGE[name]
    found = read(data)
    assert [len(raw) for raw in found.values()] == [16, 65536, 65536, 28928, 5, 65536, 4464]
    assert all(SLOT[offset : offset + len(raw)] == raw for offset, raw in found.items())
    with memory_file(data) as fd:
        assert verify(PartReader(source(fd), "p")) == 16 + 160_000 + 5 + 70_000


def test_the_reader_has_the_index_plan_and_request() -> None:
    request = SnapshotRequest(tag="best", metrics={"loss": 0.25}, created=1.5)
    data, index = encode_part(
        SLOT, PLAN, VALUES, step=None, tag="best.a0002", rank=3, world_size=8, request=request
    )
    with memory_file(data) as fd:
        reader = PartReader(source(fd), "gpt/best.a0002/x")
        assert (reader.name, reader.index, reader.plan, reader.values) == (
            "gpt/best.a0002/x",
            index,
            PLAN,
            VALUES,
        )
        assert SnapshotRequest.decode(reader.index.request) == request
        assert (index.step, index.rank, index.world_size, index.attempt, index.job) == (
            None,
            3,
            8,
            2,
            "gpt",
        )


def test_zstd_takes_less_and_chunks_that_do_not_shrink_are_raw() -> None:
    assert len(LARGE["zstd"]) < len(LARGE["raw"])
    with memory_file(LARGE["zstd"]) as fd:
        kinds = [
            (c.codec, c.stored_length < c.raw_length)
            for c in PartReader(source(fd), "p").index.chunks
        ]
    assert (codec.ZSTD, True) in kinds
    assert (codec.RAW, False) in kinds
    assert all((kind == codec.ZSTD) == shrunk for kind, shrunk in kinds)


def test_chunks_may_lie_in_any_order_in_the_file() -> None:
    """Several threads write them, each as soon as it is encoded."""
    plan = Plan(
        regions=[Region(0, 3 * MIN_CHUNK, 4)], items=[], aliases=[], metadata=None, writer=WRITER
    )
    values = values_after(plan, 10)
    slot = packed_slot(plan, values)
    _, index = encode_part(slot, plan, values)
    order = [2, 0, 3, 1]
    body, moved = bytearray(ALIGN), {}
    for number in order:
        chunk = index.chunks[number]
        moved[number] = msgspec.structs.replace(chunk, offset=len(body))
        body += bytes(slot[chunk.raw_offset : chunk.raw_offset + chunk.raw_length]).ljust(
            -(-chunk.raw_length // ALIGN) * ALIGN, b"\0"
        )
    index = msgspec.structs.replace(index, chunks=[moved[n] for n in range(4)])
    body[:ALIGN] = encode_header(index, NONCE)
    found = read(bytes(body) + encode_end(len(body), index.encode()))
    assert all(slot[offset : offset + len(raw)] == raw for offset, raw in found.items())


def test_an_empty_slot_is_a_part() -> None:
    plan = Plan(regions=[], items=[], aliases=[], metadata=None, writer=WRITER)
    data, _ = encode_part(b"", plan, (0, 0))
    assert read(data) == {}
    assert len(data) == 2 * ALIGN


def bound(ranges: list[ChunkRange], documents: int) -> int:
    return ALIGN + sum(align(chunk.length) for chunk in ranges) + end_bound(len(ranges), documents)


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_the_file_stays_within_its_bound(name: str) -> None:
    with memory_file(LARGE[name]) as fd:
        ranges = PartReader(source(fd), "p").ranges
    assert len(LARGE[name]) <= bound(ranges, len(PLAN.encode()))


def test_the_bound_holds_for_a_request_of_any_size() -> None:
    """The user chooses metrics, user content and names, and the space is reserved
    before the first chunk is written.
    """
    request = SnapshotRequest(user_content='"' + "x" * 20_000 + '"')
    data, index = encode_part(SLOT, PLAN, VALUES, job="j" * 128, request=request)
    with memory_file(data) as fd:
        ranges = PartReader(source(fd), "p").ranges
    assert len(data) <= bound(ranges, len(PLAN.encode()) + len(index.request))


# -- damage


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_every_truncation_is_seen(name: str) -> None:
    data = LARGE[name]
    lengths = {
        *range(0, len(data), 1021),
        *range(0, len(data), ALIGN),
        *range(len(data) - 200, len(data)),
        1,
        15,
        16,
        200,
    }
    for length in sorted(lengths):
        with pytest.raises(IntegrityError, match=r"^p: "):
            check(data[:length])


def test_bytes_behind_the_end_are_seen() -> None:
    for more in (b"\0", bytes(ALIGN), SMALL[-ALIGN:]):
        with pytest.raises(IntegrityError, match=r"^p: "):
            check(SMALL + more)


def test_a_damaged_header_is_named() -> None:
    with pytest.raises(IntegrityError, match="p: part header does not match its checksum"):
        check(flip(SMALL, 8 * 20))


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_random_flips_are_seen_across_the_file(name: str) -> None:
    data = LARGE[name]
    with memory_file(data) as fd:
        for bit in random.Random(11).sample(range(8 * len(data)), 400):
            os.pwrite(fd, bytes([data[bit >> 3] ^ (1 << (bit & 7))]), bit >> 3)
            with pytest.raises(IntegrityError, match=r"^p: "):
                verify(PartReader(source(fd), "p"), threads=1)
            os.pwrite(fd, data[bit >> 3 : (bit >> 3) + 1], bit >> 3)
        assert verify(PartReader(source(fd), "p")) == 230_021


def test_every_flip_is_seen_where_the_bytes_mean_most() -> None:
    """Every bit of header, index and trailer is flipped.

    The rest of the first and the last page is padding.
    """
    used = len(SMALL_INDEX.encode())
    index_offset = len(SMALL) - -(-(used + TRAILER_SIZE) // ALIGN) * ALIGN
    places = [
        range(200),
        range(index_offset, index_offset + used + 8),
        range(len(SMALL) - TRAILER_SIZE - 8, len(SMALL)),
    ]
    bytes_that_count = [at for place in places for at in place]
    assert len(bytes_that_count) > 200 + used
    with memory_file(SMALL) as fd:
        for at in bytes_that_count:
            for bit in range(8):
                os.pwrite(fd, bytes([SMALL[at] ^ (1 << bit)]), at)
                with pytest.raises(IntegrityError, match=r"^p: "):
                    PartReader(source(fd), "p")
            os.pwrite(fd, SMALL[at : at + 1], at)
        PartReader(source(fd), "p")


def test_a_damaged_chunk_names_its_place() -> None:
    with memory_file(flip(SMALL, 8 * ALIGN + 1)) as fd:
        reader = PartReader(source(fd), "gpt/x")
        with pytest.raises(
            IntegrityError,
            match=r"^gpt/x: chunk 0 \(bytes 4096 to 4112\) does not match its checksum",
        ):
            reader.read_chunk(0, memoryview(bytearray(16)))
        reader.read_chunk(1, memoryview(bytearray(24)))


def test_a_chunk_beyond_the_end_of_the_file_is_seen() -> None:
    with memory_file(SMALL) as fd:
        reader = PartReader(source(fd), "p")
        os.ftruncate(fd, ALIGN + 100)
        with pytest.raises(IntegrityError, match="cut short"):
            reader.read_chunk(0, memoryview(bytearray(16)))


def test_an_object_that_ends_within_the_padding_of_a_chunk_is_seen() -> None:
    bucket = Bucket(MemoryStore(), "memory://b")
    bucket.put("p", LARGE["zstd"], create=True)
    place = ObjectSource(bucket, "p")
    reader = PartReader(place, "p")
    number, chunk = next((n, c) for n, c in enumerate(reader.index.chunks) if c.codec == codec.ZSTD)
    assert chunk.stored_length % ALIGN
    place.size = chunk.offset + chunk.stored_length
    with pytest.raises(IntegrityError, match=f"^p: chunk {number} .* is cut short$"):
        reader.read_chunk(number, memoryview(bytearray(chunk.raw_length)))


def test_an_index_must_match_the_digest_in_the_manifest() -> None:
    right = hashlib.sha256(SMALL_INDEX.encode()).hexdigest()
    check(SMALL, right)
    for wrong in (
        right[:-1] + ("0" if right[-1] != "0" else "1"),
        "",
        hashlib.sha256(b"").hexdigest(),
    ):
        with pytest.raises(IntegrityError, match="index does not match its digest"):
            check(SMALL, wrong)


def test_a_newer_part_is_not_called_damaged() -> None:
    trailer = len(SMALL) - TRAILER_SIZE
    for start, body, what in ((0, 184, "part header"), (trailer, 60, "part trailer")):
        for at, value in ((8, 2), (12, 8)):
            newer = resealed(SMALL, start + at, value, start=start, body=body)
            with pytest.raises(NewerFormat, match=rf"^p: {what} was written by a newer ckptd"):
                check(newer)
            with pytest.raises(
                IntegrityError, match=f"^p: {what} does not match its checksum$"
            ) as caught:
                check(SMALL[: start + at] + bytes([value]) + SMALL[start + at + 1 :])
            assert type(caught.value) is IntegrityError, "a damaged version is damage"


# -- forged files: every checksum is right, and the content is impossible


def forge(change: Callable[[dict[str, Any]], object], *, header: bytes | None = None) -> bytes:
    """Return the small part with another index, and with header, trailer and checksums
    that match it.
    """
    plain: dict[str, Any] = msgspec.msgpack.decode(SMALL_INDEX.encode())
    change(plain)
    index = msgspec.msgpack.encode(plain)
    end = ALIGN + sum(-(-chunk.stored_length // ALIGN) * ALIGN for chunk in SMALL_INDEX.chunks)
    if header is None:
        try:
            header = encode_header(msgspec.msgpack.decode(index, type=PartIndex), NONCE)
        except (msgspec.ValidationError, struct.error):
            header = SMALL[:ALIGN]
    return header + SMALL[ALIGN:end] + encode_end(end, index)


def test_a_forged_part_without_a_change_is_sound() -> None:
    assert forge(lambda d: None) == SMALL
    check(forge(lambda d: d.update(novelty=1)))


def _chunk(number: int, field: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda d: d["chunks"][number].__setitem__(field, value)


def _swap_plan(d: dict[str, Any]) -> None:
    d["plan"] = sample_plan(7).encode()


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another plan": _swap_plan,
    "another signature": lambda d: d.update(signature=bytes(32)),
    "no plan": lambda d: d.update(plan=b"", signature=hashlib.sha256(b"").digest()),
    "a chunk too few": lambda d: d["chunks"].pop(),
    "a chunk too many": lambda d: d["chunks"].append(d["chunks"][-1]),
    "no chunks": lambda d: d.update(chunks=[]),
    "chunks out of order": lambda d: d["chunks"].reverse(),
    "chunk of other raw bytes": _chunk(0, 0, 8),
    "chunk of another raw length": _chunk(0, 1, 8),
    "chunk over the header": _chunk(0, 2, 0),
    "two chunks at one place": _chunk(1, 2, ALIGN),
    "chunk behind the file": _chunk(3, 2, 1 << 40),
    "chunk with a gap before it": _chunk(3, 2, 6 * ALIGN),
    "chunk of enormous length": _chunk(0, 3, 1 << 61),
    "chunk stored in nothing": _chunk(0, 3, 0),
    "chunk of another element size": _chunk(0, 5, 4),
    "chunk of an impossible element size": _chunk(0, 5, 17),
    "chunk with an impossible checksum": _chunk(0, 6, 1 << 32),
    "values over the tensors": lambda d: d.update(values=[0, 40]),
    "values elsewhere": lambda d: d.update(values=[SMALL_VALUES[0] + 64, 40]),
    "values longer": lambda d: d.update(values=[SMALL_VALUES[0], 41]),
    "negative values": lambda d: d.update(values=[-1, 40]),
    "chunk size 0": lambda d: d.update(chunk_size=0),
    "chunk size beyond the limit": lambda d: d.update(chunk_size=1 << 30),
    "no job": lambda d: d.pop("job"),
    "no request": lambda d: d.pop("request"),
    "a job that is a number": lambda d: d.update(job=7),
    "a rank that is a text": lambda d: d.update(rank="0"),
}


@each_case("change", FORGED.values(), ids=FORGED.keys())
def test_a_forged_index_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(IntegrityError, match=r"^p: "):
        check(forge(change))


@each_case("field", ["attempt", "rank", "world_size", "step"])
@each_case("value", [-1, 1 << 33, (1 << 64) - 1], ids=["negative", "33 bits", "64 bits"])
def test_an_impossible_number_is_an_integrity_error(field: str, value: int) -> None:
    with pytest.raises(IntegrityError):
        check(forge(lambda d: d.update({field: value}), header=SMALL[:ALIGN]))


@each_case("field", ["attempt", "rank", "world_size", "step", "job"])
def test_header_and_index_speak_of_the_same_snapshot(field: str) -> None:
    with pytest.raises(IntegrityError, match="different snapshots"):
        check(
            forge(
                lambda d: d.update({field: "other" if field == "job" else 5}), header=SMALL[:ALIGN]
            )
        )


def test_a_values_document_that_overlaps_the_tensors_is_refused() -> None:
    """This holds even if chunks and checksums agree."""
    data, _ = encode_part(packed_slot(SMALL_PLAN, SMALL_VALUES), SMALL_PLAN, (64, 40))
    with pytest.raises(IntegrityError, match="its values document overlaps its tensors"):
        check(data)


def test_a_values_document_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader allocates memory for the whole document at once."""
    data, _ = encode_part(packed_slot(PLAN, VALUES), PLAN, VALUES)
    monkeypatch.setattr("ckptd.shared.formats.part.MAX_DOCUMENT", 70_000)
    check(data)
    monkeypatch.setattr("ckptd.shared.formats.part.MAX_DOCUMENT", 69_999)
    with pytest.raises(
        IntegrityError, match="p: its values document has 70,000 bytes; expected at most 69,999"
    ):
        check(data)


def test_pages_that_no_chunk_claims_are_refused() -> None:
    end = ALIGN + sum(-(-chunk.stored_length // ALIGN) * ALIGN for chunk in SMALL_INDEX.chunks)
    check(SMALL[:end] + encode_end(end, SMALL_INDEX.encode()))
    with pytest.raises(IntegrityError, match="do not fill the file"):
        check(SMALL[:end] + bytes(ALIGN) + encode_end(end + ALIGN, SMALL_INDEX.encode()))


def test_a_chunk_with_an_unknown_codec_counts_as_newer() -> None:
    with memory_file(forge(_chunk(0, 4, 7))) as fd:
        reader = PartReader(source(fd), "p")
        with pytest.raises(NewerFormat, match=r"^p: chunk 0 .*codec 7"):
            reader.read_chunk(0, memoryview(bytearray(16)))


def test_wrong_raw_bytes_of_a_sound_frame_are_seen() -> None:
    with memory_file(forge(_chunk(0, 6, 12345))) as fd:
        reader = PartReader(source(fd), "p")
        with pytest.raises(IntegrityError, match="holds other bytes than were saved"):
            reader.read_chunk(0, memoryview(bytearray(16)))


@each_case(
    ("field", "why"), [(6, "holds other bytes than were saved"), (7, "does not match its checksum")]
)
@each_case("codec", ["raw", "zstd", "planes"])
def test_a_sound_chunk_with_another_checksum_in_the_index_is_refused(
    codec: str, field: int, why: str
) -> None:
    """No decoder can notice this: both checksums of a chunk must be compared, whatever
    its codec.
    """
    data, index = encode_part(packed_slot(PLAN, VALUES), PLAN, VALUES, codec=codec)
    number = next(n for n, chunk in enumerate(index.chunks) if chunk.codec == encoder(codec).number)
    plain: dict[str, Any] = msgspec.msgpack.decode(index.encode())
    plain["chunks"][number][field] ^= 1
    end = len(data) - len(encode_end(0, index.encode()))
    with memory_file(data[:end] + encode_end(end, msgspec.msgpack.encode(plain))) as fd:
        reader = PartReader(source(fd), "p")
        with pytest.raises(IntegrityError, match=why):
            reader.read_chunk(number, memoryview(bytearray(index.chunks[number].raw_length)))


@pytest.mark.parametrize("where", ["values", "regions"])
def test_a_part_that_claims_an_enormous_slot_costs_no_memory(where: str) -> None:
    """The claim is 8 GiB here.

    With 2^61 bytes, a reader without the check would never return.
    """
    claimed = 1 << 33

    def change(d: dict[str, Any]) -> None:
        if where == "values":
            d["values"] = [SMALL_VALUES[0], claimed]
        else:
            plan = Plan(
                regions=[Region(0, claimed, 4)], items=[], aliases=[], metadata=None, writer=WRITER
            ).encode()
            d.update(plan=plan, signature=hashlib.sha256(plan).digest(), values=[claimed, 0])

    data = forge(change)
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            check(data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@each_case(
    ("offset", "length", "whole"),
    [
        (0, 10, None),
        (ALIGN + 1, 10, None),
        (1 << 62, 10, None),
        (None, 1 << 40, None),
        (None, None, 3 * ALIGN),
        (None, 0, None),
    ],
)
def test_a_trailer_that_points_elsewhere_is_refused(
    offset: int | None, length: int | None, whole: int | None
) -> None:
    trailer = bytearray(SMALL[-TRAILER_SIZE:])
    for at, value in ((16, offset), (24, length), (32, whole)):
        if value is not None:
            trailer[at : at + 8] = struct.pack("<Q", value)
    trailer[60:] = struct.pack("<I", crc32c(bytes(trailer[:60])))
    with pytest.raises(IntegrityError, match=r"^p: "):
        check(SMALL[:-TRAILER_SIZE] + bytes(trailer))


def test_the_zeros_of_the_trailer_are_verified() -> None:
    trailer = bytearray(SMALL[-TRAILER_SIZE:])
    trailer[50] = 1
    trailer[60:] = struct.pack("<I", crc32c(bytes(trailer[:60])))
    with pytest.raises(IntegrityError, match="padding is not zero"):
        check(SMALL[:-TRAILER_SIZE] + bytes(trailer))
