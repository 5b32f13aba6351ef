"""Test the check of a slot, and the checksums that it leaves in the segment.

`test_saver.py` has whole saves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from ckptd.daemon.chunks.pipeline import SealedSlot
from ckptd.daemon.chunks.slot_check import SlotCheck
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.formats.segment import read_check
from tests.support.saving import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def check(world: World) -> None:
    checks = SlotCheck(world.catalog, world.slots, world.pipeline, link_unchanged=True)
    asyncio.run(checks.check(world.snapshot))


def test_checksums_are_written_once_and_then_compared(world: World) -> None:
    check(world)
    seal, slot = world.snapshot.seals[0], world.held[0]
    assert seal.checks is not None
    crcs = [one.crc for one in seal.checks]
    assert read_check(slot.fd, slot.header) == crcs
    seal.checks = None
    check(world)
    again = world.snapshot.seals[0].checks
    assert again is not None
    assert [one.crc for one in again] == crcs


def test_several_callers_share_one_check(world: World) -> None:
    checks, read = (
        SlotCheck(world.catalog, world.slots, world.pipeline, link_unchanged=True),
        list[object](),
    )
    checksum = world.pipeline.checksum

    async def counting(sealed: SealedSlot, *, with_digests: bool) -> list[ChunkCheck]:
        read.append(sealed)
        return await checksum(sealed, with_digests=with_digests)

    async def several() -> None:
        await asyncio.gather(*(checks.check(world.snapshot) for _ in range(4)))

    with mock.patch.object(world.pipeline, "checksum", counting):
        asyncio.run(several())
    assert len(read) == len(world.snapshot.seals)


def test_a_slot_that_has_changed_since_it_was_sealed_is_damaged(world: World) -> None:
    check(world)
    slot = world.held[0]
    os.pwrite(slot.fd, b"\xff", slot.header.data_offset)
    world.snapshot.seals[0].checks = None
    with pytest.raises(IntegrityError, match="has changed since it was sealed"):
        check(world)
