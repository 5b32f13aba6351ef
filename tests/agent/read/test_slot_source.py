"""Sealed slots give what was sealed into them, and stand in for the parts that were
written from them only while they are sound.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ckptd.agent.read import slot_source
from ckptd.agent.read.slot_source import PartWithSlot, SlotSource
from ckptd.agent.read.sources import open_checkpoint, open_slots
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats import manifest as manifests
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.scatter import scatter
from ckptd.shared.formats.segment import SlotState, read_header, write_header
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system.descriptor import Descriptor
from tests.shared.samples import (
    encode_part,
    memory_file,
    packed_slot,
    sample_plan,
    values_after,
    write_checkpoint,
)
from tests.support.storage import source
from tests.support.tmpfs import sealed_slot

PLAN = sample_plan(40_000)
VALUES = values_after(PLAN)
PACKED = bytes(packed_slot(PLAN, VALUES))
TENSOR = slice(64, 64 + 160_000)


@pytest.fixture
def slot() -> Iterator[Descriptor]:
    with sealed_slot(PLAN, SnapshotRequest()) as sealed:
        yield sealed


@pytest.mark.parametrize("mapped", [True, False])
def test_a_sealed_slot_gives_its_chunks(
    slot: Descriptor, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    if not mapped:
        monkeypatch.setattr(slot_source, "copy_bytes", None)
    source = SlotSource(slot.fileno(), 1, 5)
    assert len(source.ranges) > 1
    for number, chunk in enumerate(source.ranges):
        raw = bytearray(chunk.length)
        source.read_chunk(number, memoryview(raw))
        assert raw == PACKED[chunk.offset : chunk.offset + chunk.length]
    assert not slot.closed


@pytest.mark.parametrize("mapped", [True, False])
def test_chunks_that_are_sent_on_are_not_checked(
    slot: Descriptor, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    if not mapped:
        monkeypatch.setattr(slot_source, "copy_bytes", None)
    source = SlotSource(slot.fileno(), 1, 5)
    os.pwrite(slot.fileno(), b"\xff", source.header.data_offset + source.ranges[1].offset)
    chunk = source.ranges[1]
    wanted = b"\xff" + PACKED[chunk.offset + 1 : chunk.offset + chunk.length]
    assert source.unchecked_chunk(1).numpy().tobytes() == wanted
    assert source.bytes_read == 0


@pytest.mark.parametrize("mapped", [True, False])
def test_a_slot_that_is_cut_short_while_it_is_open_does_not_end_the_trainer(
    slot: Descriptor, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    if not mapped:
        monkeypatch.setattr(slot_source, "copy_bytes", None)
    source = SlotSource(slot.fileno(), 1, 5)
    raw = memoryview(bytearray(source.ranges[0].length))
    source.read_chunk(0, raw)
    os.ftruncate(slot.fileno(), source.header.data_offset)
    with pytest.raises(
        IntegrityError, match="^the slot of step 5 has been cut short: that copy in memory is lost$"
    ):
        source.read_chunk(0, raw)


def test_a_slot_that_changes_after_it_was_opened_is_noticed_at_the_read(slot: Descriptor) -> None:
    source = SlotSource(slot.fileno(), 1, 5)
    raw = bytearray(source.ranges[0].length)
    os.pwrite(slot.fileno(), b"\xff", source.header.data_offset)
    with pytest.raises(
        IntegrityError, match="^chunk 0 of step 5 has changed in memory since it was sealed$"
    ):
        source.read_chunk(0, memoryview(raw))
    os.ftruncate(slot.fileno(), source.header.data_offset)
    with pytest.raises(IntegrityError, match="^the slot of step 5 has been cut short"):
        source.read_chunk(0, memoryview(raw))


# -- in place of a part


@contextmanager
def part(
    packed: bytes | bytearray = PACKED, *, damaged: bool = False, **options: Any
) -> Iterator[PartReader]:
    """Context manager.

    Yields a part of this packed slot. If it is damaged, no chunk of it can be read.
    """
    encoded, index = encode_part(packed, PLAN, VALUES, attempt=1, step=5, **options)
    data = bytearray(encoded)
    for chunk in index.chunks if damaged else ():
        data[chunk.offset] ^= 0xFF
    with memory_file(data) as fd:
        yield PartReader(source(fd), "gpt/x")


def read(reader: PartReader | PartWithSlot) -> bytes:
    raw = bytearray(160_000)
    scatter(reader, [(TENSOR.start, memoryview(raw))])
    return bytes(raw)


def test_a_part_is_read_from_its_slot_and_not_from_storage(slot: Descriptor) -> None:
    near = SlotSource(slot.fileno(), 1, 5)
    with part(codec="zstd") as reader:
        assert PartWithSlot.match(reader, near)
    paired = PartWithSlot(reader, near)  # the part is closed: nothing can be read from it
    assert (read(paired), near.bytes_read) == (PACKED[TENSOR], 160_000)
    assert (paired.plan, paired.values, paired.ranges) == (PLAN, VALUES, near.ranges)


@pytest.mark.parametrize("how", ["damaged", "filled again", "cut short"])
def test_a_slot_that_is_lost_is_replaced_by_storage_and_that_is_logged_once(
    slot: Descriptor, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    near = SlotSource(slot.fileno(), 1, 5)
    with part() as reader:
        paired = PartWithSlot(reader, near)
        if how == "cut short":
            os.ftruncate(slot.fileno(), near.header.data_offset)
        else:
            places = [100_000] if how == "damaged" else range(0, 160_000, 1000)
            for place in places:
                os.pwrite(slot.fileno(), b"\xa5", near.header.data_offset + place)
        with caplog.at_level(logging.WARNING, "ckptd.agent"):
            assert read(paired) == PACKED[TENSOR]
            assert read(paired) == PACKED[TENSOR]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "gpt/x is read from storage, because its copy in memory is lost"
    ]
    assert near.bytes_read < 160_000


def test_damage_to_slot_and_part_is_never_returned(slot: Descriptor) -> None:
    near = SlotSource(slot.fileno(), 1, 5)
    os.pwrite(slot.fileno(), b"\xa5", near.header.data_offset + 100_000)
    with (
        part(damaged=True) as reader,
        pytest.raises(IntegrityError, match="does not match its checksum"),
    ):
        read(PartWithSlot(reader, near))


def test_a_slot_with_other_bytes_or_other_chunks_does_not_match(slot: Descriptor) -> None:
    near = SlotSource(slot.fileno(), 1, 5)
    other = bytearray(PACKED)
    other[70_000] ^= 1
    with part(other) as reader:
        assert not PartWithSlot.match(reader, near)
    with part(chunk_size=2 * MIN_CHUNK) as reader:
        assert not PartWithSlot.match(reader, near)


def test_only_slots_that_hold_the_step_and_are_sound_are_opened(slot: Descriptor) -> None:
    assert list(open_slots({3: slot}, 1, 5)) == [3]
    assert open_slots({3: slot}, 1, 6) == {}
    assert open_slots({3: slot}, 2, 5) == {}
    header = read_header(slot.fileno())
    write_header(slot.fileno(), header.next(SlotState.FILLING, step=6))
    assert open_slots({3: slot}, 1, 5) == {}
    assert not slot.closed


@pytest.mark.parametrize("large", [False, True])
def test_a_checkpoint_is_read_from_its_slots_even_if_its_chunks_on_storage_are_damaged(
    tmp_path: Path, large: bool
) -> None:
    repository, manifest = open_root(tmp_path), write_checkpoint(tmp_path, step=5, attempt=1)
    directory = tmp_path / "gpt" / manifest.tag
    if large:  # the metadata lie in an object, and parts are opened on demand
        (directory / "manifest.json").unlink()
        with mock.patch.object(manifests, "MOST_INLINE", 0):
            document, objects = manifest.split()
        repository.publish_manifest("gpt", manifest.tag, document, objects=objects)
    file = directory / manifest.parts[0].file
    reader = repository.open_part("gpt", manifest.tag, file.name)
    data, places = bytearray(file.read_bytes()), [chunk.offset for chunk in reader.index.chunks]
    reader.close()
    for place in places:
        data[place] ^= 0xFF
    file.write_bytes(data)
    with sealed_slot(sample_plan(), SnapshotRequest()) as sealed:
        near = SlotSource(sealed.fileno(), 1, 5)
        opened = open_checkpoint(repository, "gpt", manifest.tag, slots={0: near})
        assert (opened.manifest is not None and opened.manifest.version) == (2 if large else 1)
        assert opened.verify() == near.bytes_read == sum(chunk.length for chunk in near.ranges)
        opened.close()
    opened = open_checkpoint(repository, "gpt", manifest.tag)
    with pytest.raises(IntegrityError, match="does not match its checksum"):
        opened.verify()
    opened.close()
