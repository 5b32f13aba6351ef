"""The order of things on storage, and what it refuses to commit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon import records as r
from ckptd.daemon.catalog import Catalog, Shard, Snapshot
from ckptd.daemon.config import Config
from ckptd.daemon.pipeline import Pipeline
from ckptd.daemon.saver import Saver
from ckptd.daemon.slots import Slot, Slots
from ckptd.shared.errors import NotFound
from ckptd.shared.fs import PosixFileSystem
from ckptd.shared.lifecycle import State
from ckptd.shared.plan import MIN_CHUNK
from ckptd.shared.segment import SegmentHeader, SlotState, read_check, write_check, write_header
from ckptd.shared.storage import PosixStorage
from tests.shared.samples import sample_plan, seal

PLAN = sample_plan(30_000)


@dataclass
class Journal:
    """What was appended, in order."""

    records: list[r.Record] = field(default_factory=list)
    state: r.JournalState = field(default_factory=r.JournalState)

    async def append(self, *records: r.Record) -> None:
        for record in records:
            self.records.append(record)
            self.state.apply(record)


class World:
    """A saver on a real disk and real slots, one for each rank of a snapshot; `told`: where the snapshot was when ranks heard of it."""

    def __init__(self, place: Path, world_size: int = 1) -> None:
        (place / "root").mkdir()
        (place / "shm").mkdir()
        fs = PosixFileSystem()
        self.storage, self.journal = PosixStorage(place / "root", fs), Journal()
        self.pipeline = Pipeline(fs, 1, 1 << 20, MIN_CHUNK)
        self.slots = Slots(fs, place / "shm", "segments", 1 << 30)
        self.catalog, self.told, self.counters = Catalog(), list[State](), Counter[str]()
        self.saver = Saver(
            Config(root=place / "root", socket=place / "s", codec="raw"), self.catalog, self.slots, self.journal, self.storage,  # type: ignore[arg-type]
            self.pipeline, counters=self.counters, tell=lambda snapshot: self.told.append(snapshot.state), settled=lambda job: None,
        )  # fmt: skip
        self.snapshot = Snapshot("gpt", 1, 5, "step-00000005.a0001", world_size, persist=True, state=State.SEALED)
        self.held: list[Slot] = []
        for rank in range(world_size):
            header = SegmentHeader(job="gpt", attempt=1, rank=rank, world_size=world_size, slot=0, capacity=200_000, chunk_size=MIN_CHUNK)
            slot = self.slots.add(self.slots.create(header, -1))
            seal(slot.fd, header, PLAN)
            slot.refresh()
            self.held.append(slot)
            self.snapshot.shards[rank] = Shard(rank, slot.name, slot.header.generation, slot.header.signature)

    def run(self) -> None:
        async def save() -> None:
            await self.saver.start(self.snapshot)

        asyncio.run(save())

    def committed(self) -> bool:
        try:
            self.storage.read_manifest("gpt", self.snapshot.tag)
        except NotFound:
            return False
        return True

    def close(self) -> None:
        self.slots.close()
        self.pipeline.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def failed(world: World, words: str) -> None:
    """Nothing is committed, nothing lies about, and ranks were told why."""
    assert words in world.snapshot.reason
    assert world.told == [State.FAILED]
    assert not world.committed()
    assert world.storage.tags("gpt") == []
    assert (world.counters["failed"], world.counters["persisted"]) == (1, 0)


def test_the_order_of_a_save(world: World) -> None:
    world.run()
    assert [type(record) for record in world.journal.records] == [r.Staging, r.PartDurable, r.Committed]
    assert world.told == [State.DURABLE]
    assert world.storage.read_newest("gpt") == world.snapshot.tag
    manifest = world.storage.read_manifest("gpt", world.snapshot.tag)
    assert [part.file for part in manifest.parts] == [world.journal.records[0].file]  # type: ignore[attr-defined]
    assert world.counters["persisted"] == 1


def test_a_damaged_slot_is_not_saved(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.shards[0].checked = False
    slot = world.held[0]
    crcs = read_check(slot.fd, slot.header)
    assert crcs is not None
    write_check(slot.fd, slot.header, [crcs[0] ^ 1, *crcs[1:]])
    world.run()
    failed(world, "the copy in memory has changed since it was sealed")
    assert world.counters["verify_failures"] == 1


def filled_again(world: World) -> None:
    write_header(world.held[0].fd, world.held[0].header.next(SlotState.FILLING, step=6))


def test_a_slot_that_is_filled_again_while_it_is_checked_is_not_saved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = world.pipeline.checksum

    async def checksum(slot: Any) -> list[int]:
        found = await before(slot)
        filled_again(world)
        return found

    monkeypatch.setattr(world.pipeline, "checksum", checksum)
    world.run()
    failed(world, "the slot was filled again while it was being checked")


def test_a_slot_that_was_filled_again_before_it_is_saved_is_not(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.shards[0].generation -= 1
    world.run()
    failed(world, "the slot was filled again while it was being saved")


@pytest.mark.parametrize("change", [lambda crcs: crcs[:-1], lambda crcs: [*crcs, 0]], ids=["fewer", "more"])
def test_a_slot_without_its_checksums_is_not_saved(world: World, change: Callable[[list[int]], list[int]]) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    slot = world.held[0]
    crcs = read_check(slot.fd, slot.header)
    assert crcs is not None
    write_check(slot.fd, slot.header, change(crcs))
    world.run()
    failed(world, "its checksums in memory are gone")


def two(tmp_path: Path, change: Callable[[World], None]) -> None:
    world = World(tmp_path, world_size=2)
    try:
        change(world)
        world.run()
        assert not world.committed()
        assert world.told == [State.FAILED]
    finally:
        world.close()


def test_a_snapshot_that_lacks_a_rank_is_not_committed(tmp_path: Path) -> None:
    two(tmp_path, lambda world: world.snapshot.shards.pop(1))  # type: ignore[arg-type]


def test_ranks_that_sealed_different_plans_are_not_committed(tmp_path: Path) -> None:
    def other_plan(world: World) -> None:
        slot = world.held[1]
        plan = sample_plan(30_000)
        plan = type(plan)(**{name: getattr(plan, name) for name in plan.__struct_fields__} | {"global_plan": bytes(32)})
        seal(slot.fd, slot.header, plan)
        slot.refresh()
        world.snapshot.shards[1] = Shard(1, slot.name, slot.header.generation, slot.header.signature)

    two(tmp_path, other_plan)


def test_two_ranks_are_committed_together(tmp_path: Path) -> None:
    world = World(tmp_path, world_size=2)
    world.run()
    assert [part.rank for part in world.storage.read_manifest("gpt", world.snapshot.tag).parts] == [0, 1]
    assert world.told == [State.DURABLE]
    world.close()
