"""Tests ranges of a packed slot that are gathered chunk by chunk."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.part import ChunkSource, PartReader
from ckptd.shared.formats.plan import MIN_CHUNK, ChunkRange, Plan, Region, chunk_ranges
from ckptd.shared.formats.scatter import scatter, verify
from tests.shared.samples import (
    encode_part,
    flip,
    memory_file,
    packed_slot,
    sample_plan,
    steady,
    values_after,
)
from tests.support.cases import each_case
from tests.support.storage import source

REGIONS = [Region(0, 100, 4), Region(128, 90, 2), Region(256, 1, 1)]
DATA = bytes((7 * n + n // 5) % 256 for n in range(257))


class Source:
    """Chunks of 40 bytes over `DATA`.

    `damaged` is a chunk that writes its bytes and then fails, as a decoder may.
    """

    remote = False

    def __init__(self, damaged: int = -1, chunk_size: int = 40) -> None:
        self.plan = Plan(REGIONS, [], [], None, {})
        self.values = (256, 1)
        self.ranges: list[ChunkRange] = chunk_ranges(REGIONS, chunk_size)
        self.reads: Counter[int] = Counter()
        self._damaged, self._lock = damaged, threading.Lock()

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        return False

    def read_chunk(self, number: int, raw: memoryview) -> None:
        chunk = self.ranges[number]
        assert len(raw) == chunk.length
        with self._lock:
            self.reads[number] += 1
        raw[:] = DATA[chunk.offset : chunk.offset + chunk.length]
        if number == self._damaged:
            raise IntegrityError(f"chunk {number}")


def test_it_works_on_any_source_of_chunks() -> None:
    source: ChunkSource = Source()
    assert verify(source) == 191


@pytest.mark.parametrize("threads", [None, 1, 3, 100])
def test_verify_reads_every_chunk_once(threads: int | None) -> None:
    source = Source()
    assert verify(source, threads=threads) == 191
    assert source.reads == dict.fromkeys(range(7), 1)


ranges_inside = st.sampled_from(REGIONS).flatmap(
    lambda r: st.tuples(
        st.integers(r.offset, r.offset + r.length), st.integers(r.offset, r.offset + r.length)
    ).map(lambda pair: (min(pair), max(pair) - min(pair)))
)


@steady
@given(st.lists(ranges_inside, max_size=12), st.integers(1, 60), st.integers(1, 4))
def test_every_range_gets_its_bytes(
    wanted: list[tuple[int, int]], chunk_size: int, threads: int
) -> None:
    source = Source(chunk_size=chunk_size)
    buffers = [bytearray(b"\xee" * length) for _, length in wanted]
    raw = scatter(
        source,
        [(offset, memoryview(b)) for (offset, _), b in zip(wanted, buffers, strict=True)],
        threads=threads,
    )
    assert [bytes(b) for b in buffers] == [
        DATA[offset : offset + length] for offset, length in wanted
    ]
    touched = {
        number
        for number, chunk in enumerate(source.ranges)
        for offset, length in wanted
        if length and offset < chunk.offset + chunk.length and chunk.offset < offset + length
    }
    assert source.reads == dict.fromkeys(touched, 1)  # each needed chunk once, and no other
    assert raw == sum(source.ranges[number].length for number in touched)


def test_without_targets_no_chunk_is_read() -> None:
    source = Source()
    assert scatter(source, []) == 0
    assert scatter(source, [(50, memoryview(bytearray()))]) == 0
    assert source.reads == {}


@each_case(
    ("offset", "length"),
    [
        (-1, 5),
        (-10, 3),
        (95, 6),
        (100, 1),
        (110, 5),
        (120, 20),
        (0, 257),
        (218, 1),
        (200, 60),
        (257, 1),
        (1 << 40, 1),
    ],
)
def test_bytes_of_no_chunk_are_refused_before_anything_is_read(offset: int, length: int) -> None:
    source, before, beside = Source(), bytearray(b"\xee" * 10), bytearray(b"\xee" * length)
    with pytest.raises(IntegrityError, match="lie in no chunk"):
        scatter(source, [(0, memoryview(before)), (offset, memoryview(beside))])
    assert source.reads == {}
    assert bytes(before) == b"\xee" * 10


@pytest.mark.parametrize("threads", [1, 4])
def test_unverified_bytes_are_never_copied_out(threads: int) -> None:
    """They lie in the buffer of a thread: two targets share the damaged chunk."""
    source, buffer = Source(damaged=1), bytearray(b"\xee" * 100)
    with pytest.raises(IntegrityError, match="chunk 1"):
        scatter(
            source, [(0, memoryview(buffer)[:60]), (60, memoryview(buffer)[60:])], threads=threads
        )
    assert bytes(buffer[40:80]) == b"\xee" * 40


def test_a_chunk_that_fills_a_part_of_one_target_is_read_in_place() -> None:
    places: list[int] = []

    class Noting(Source):
        def read_chunk(self, number: int, raw: memoryview) -> None:
            if raw.obj is buffer:
                places.append(number)
            super().read_chunk(number, raw)

    buffer, other = bytearray(95), bytearray(5)
    assert (
        scatter(Noting(), [(3, memoryview(buffer)), (98, memoryview(other)[:2])], threads=1) == 100
    )
    assert buffer == DATA[3:98]
    assert places == [1], "chunks 0 and 2 are wanted only in part"


def test_targets_that_share_memory_are_not_read_in_place() -> None:
    """Two chunks would be read into the same bytes at once, and one of them would seem
    to be damaged.
    """
    both_read = threading.Barrier(2, timeout=30)

    class Verifying(Source):
        def read_chunk(self, number: int, raw: memoryview) -> None:
            super().read_chunk(number, raw)
            both_read.wait()
            if raw != DATA[self.ranges[number].offset : self.ranges[number].offset + len(raw)]:
                raise IntegrityError(f"chunk {number}")

    buffer = bytearray(60)
    memory = memoryview(buffer)
    assert scatter(Verifying(), [(0, memory[:40]), (40, memory[20:])], threads=2) == 80
    assert buffer[:20] == DATA[:20]
    assert buffer[40:] == DATA[60:80]


def test_verify_raises_at_damage() -> None:
    for damaged in range(7):
        with pytest.raises(IntegrityError, match=f"chunk {damaged}"):
            verify(Source(damaged=damaged))


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes"])
def test_scatter_reads_a_part_file(codec: str) -> None:
    plan = sample_plan(floats=40_000)
    values = values_after(plan, 70_000)
    slot = packed_slot(plan, values)
    data, _ = encode_part(slot, plan, values, codec=codec, chunk_size=MIN_CHUNK)
    wanted = [(item.offset, item.length) for item in plan.items] + [
        values,
        (64 + 65_530, 12),
        (64 + 3, 150_000),
    ]
    buffers = [bytearray(length) for _, length in wanted]
    with memory_file(data) as fd:
        raw = scatter(
            PartReader(source(fd), "p"),
            [(offset, memoryview(b)) for (offset, _), b in zip(wanted, buffers, strict=True)],
        )
    assert raw == 16 + 160_000 + 5 + 70_000
    assert all(
        slot[offset : offset + length] == b
        for (offset, length), b in zip(wanted, buffers, strict=True)
    )
    with memory_file(flip(data, 8 * 4096 * 3)) as fd, pytest.raises(IntegrityError):
        scatter(PartReader(source(fd), "p"), [(64, memoryview(bytearray(160_000)))])
