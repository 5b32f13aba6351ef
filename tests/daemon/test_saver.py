"""Tests the order of a save's operations on storage, and what is never committed."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.daemon import records as r
from ckptd.daemon.catalog import Job
from ckptd.daemon.pipeline import SealedSlot
from ckptd.daemon.recovery import scan_job
from ckptd.daemon.snapshot import RankSeal
from ckptd.shared import names
from ckptd.shared.errors import Fenced, StorageError
from ckptd.shared.lifecycle import SnapshotState
from ckptd.shared.membership import Membership
from ckptd.shared.reuse import ChunkCheck
from ckptd.shared.segment import SlotState, read_check, write_check, write_header
from tests.shared.samples import seal, write_checkpoint
from tests.support.saving import PLAN, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def failed(world: World, words: str) -> None:
    """Check that nothing is committed, that no file is left, and that the ranks got the reason."""
    assert words in world.snapshot.reason
    assert world.told == [SnapshotState.FAILED]
    assert not world.committed()
    assert world.storage.tags("gpt") == []
    assert (world.counters["failed"], world.counters["persisted"]) == (1, 0)


def test_a_save_syncs_and_journals_in_order(world: World) -> None:
    world.run()
    assert [type(record) for record in world.journal.records] == [r.Staging, r.PartDurable, r.Committed]
    assert world.told == [SnapshotState.DURABLE]
    assert world.storage.read_newest("gpt") == world.snapshot.tag
    manifest = world.storage.read_manifest("gpt", world.snapshot.tag)
    assert [part.file for part in manifest.parts] == [world.journal.records[0].file]  # type: ignore[attr-defined]
    assert world.counters["persisted"] == 1


def test_a_save_is_logged_in_one_line(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        world.run()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "INFO" and world.snapshot.tag in record.getMessage()]
    words = rf"saved gpt/{world.snapshot.tag}: 120\.1 kB as \d+\.\d kB \(\d+ %\), durable after \d+\.\d\d s, \d+\.\d [kM]B/s"
    assert re.fullmatch(words, line), line


def test_the_log_says_how_long_the_slowest_rank_was_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path, world_size=2)
    world.snapshot.seals[0].training_held, world.snapshot.seals[1].training_held = 0.25, 1.5
    with caplog.at_level("INFO"):
        world.run()
    assert " %), training held 1.500 s, durable after" in caplog.text
    world.close()


def test_the_progress_of_a_save_counts_every_byte_and_starts_again_with_the_part(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fs.faults["create"] = 1, errno.EIO
    seen: list[tuple[float | int | None, ...]] = []
    before = world.pipeline.write_part

    async def write_part(*arguments: Any, **options: Any) -> Any:
        progress = world.snapshot.progress
        assert progress is not None
        progress.add(0, 7)  # of a try that may fail
        seen.append(tuple(progress.report(progress.begun + 1).values()))
        return await before(*arguments, **options)

    monkeypatch.setattr(world.pipeline, "write_part", write_part)
    world.run()
    assert world.told == [SnapshotState.DURABLE]
    values = world.held[0].header.values
    total = values.offset + values.length
    assert seen == [(7, total, 7, round((total - 7) / 7, 1))] * 2
    assert world.snapshot.progress is not None
    chunks = SealedSlot.read(world.held[0].fd, world.held[0].header).ranges
    assert world.snapshot.progress.report(0.0)["done_bytes"] == 7 + sum(chunk.length for chunk in chunks)


def test_a_damaged_slot_is_not_saved(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.seals[0].checks = None
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

    async def checksum(slot: Any, **options: Any) -> list[ChunkCheck]:
        found = await before(slot, **options)
        filled_again(world)
        return found

    monkeypatch.setattr(world.pipeline, "checksum", checksum)
    world.run()
    failed(world, "the slot was filled again while it was being checked")


def test_a_slot_that_was_filled_again_before_its_save_is_not_saved(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.seals[0].generation -= 1
    world.run()
    failed(world, "the slot was filled again while it was being saved")


def test_a_slot_that_changes_after_its_check_is_not_saved(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    os.pwrite(world.held[0].fd, b"?", world.held[0].header.data_offset + 3)
    world.run()
    failed(world, "chunk 0 of gpt step 5 has changed in memory since it was sealed")


def test_the_parts_are_written_while_the_slots_are_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, checksum, write_part = asyncio.Event(), world.pipeline.checksum, world.pipeline.write_part

    async def slow_checksum(slot: SealedSlot, **options: Any) -> list[ChunkCheck]:
        await writing.wait()
        return await checksum(slot, **options)

    async def noted_write_part(*arguments: Any, **options: Any) -> Any:
        writing.set()
        return await write_part(*arguments, **options)

    monkeypatch.setattr(world.pipeline, "checksum", slow_checksum)
    monkeypatch.setattr(world.pipeline, "write_part", noted_write_part)
    world.run()
    assert world.told == [SnapshotState.DURABLE]


def test_the_parts_of_all_ranks_are_written_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, meeting = World(tmp_path, world_size=2), asyncio.Barrier(2)
    write_part = world.pipeline.write_part

    async def met(*arguments: Any, **options: Any) -> Any:
        await meeting.wait()
        return await write_part(*arguments, **options)

    monkeypatch.setattr(world.pipeline, "write_part", met)
    world.run()
    world.close()
    assert world.told == [SnapshotState.DURABLE]


def test_a_part_that_finds_no_room_beside_the_others_is_written_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part reserves the room that it would take raw. Together they may not fit, although what they store does."""
    world, writing, calls = World(tmp_path, world_size=3), 0, 0
    write_part, meeting = world.pipeline.write_part, asyncio.Barrier(3)

    async def crowded(*arguments: Any, **options: Any) -> Any:
        nonlocal writing, calls
        calls, writing = calls + 1, writing + 1
        try:
            if calls <= 3:
                await meeting.wait()
            if writing > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return await write_part(*arguments, **options)
        finally:
            writing -= 1

    monkeypatch.setattr(world.pipeline, "write_part", crowded)
    world.run()
    world.close()
    assert world.told == [SnapshotState.DURABLE]
    assert calls == 5, "two of three parts found no room, and were written again"


def test_a_snapshot_that_is_to_be_saved_after_all_is_saved_once_it_is_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a snapshot wanted while it is checked, as the death of its trainer does, or a SIGTERM to the daemon."""
    checksum = world.pipeline.checksum
    world.snapshot.persist = False

    async def meanwhile(slot: SealedSlot, **options: Any) -> list[ChunkCheck]:
        world.snapshot.persist = True
        world.saver.start(world.snapshot)
        return await checksum(slot, **options)

    monkeypatch.setattr(world.pipeline, "checksum", meanwhile)
    world.run()
    assert world.told == [SnapshotState.DURABLE]
    assert world.committed()


def two(tmp_path: Path, change: Callable[[World], None]) -> None:
    world = World(tmp_path, world_size=2)
    try:
        change(world)
        world.run()
        assert not world.committed()
        assert world.told == [SnapshotState.FAILED]
    finally:
        world.close()


def test_a_snapshot_that_lacks_a_rank_is_not_committed(tmp_path: Path) -> None:
    two(tmp_path, lambda world: world.snapshot.seals.pop(1))  # type: ignore[arg-type]


def test_ranks_that_sealed_different_plans_are_not_committed(tmp_path: Path) -> None:
    def other_plan(world: World) -> None:
        slot = world.held[1]
        plan = msgspec.structs.replace(PLAN, global_plan=bytes(32))
        seal(slot.fd, slot.header, plan)
        slot.refresh()
        world.snapshot.seals[1] = RankSeal(1, slot.name, slot.header.generation, slot.header.signature)

    two(tmp_path, other_plan)


def test_two_ranks_are_committed_together(tmp_path: Path) -> None:
    world = World(tmp_path, world_size=2)
    world.run()
    assert [part.rank for part in world.storage.read_manifest("gpt", world.snapshot.tag).parts] == [0, 1]
    assert world.told == [SnapshotState.DURABLE]
    world.close()


# -- what fails on storage


def test_after_an_io_error_a_part_is_written_again_under_another_name(world: World) -> None:
    world.fs.faults["create"] = 1, errno.EIO
    world.run()
    first, second = (record.file for record in world.journal.records if isinstance(record, r.Staging))
    assert first != second
    assert [part.file for part in world.storage.read_manifest("gpt", world.snapshot.tag).parts] == [second]
    assert (world.told, world.counters["rewrites"]) == ([SnapshotState.DURABLE], 1)


@pytest.mark.parametrize(("count", "number", "words"), [(2, errno.EIO, "Input/output error"), (1, errno.ENOSPC, "No space left")])
def test_a_part_that_cannot_be_written_fails_the_snapshot(world: World, count: int, number: int, words: str) -> None:
    world.fs.faults["create"] = count, number
    world.run()
    failed(world, words)
    assert isinstance(world.journal.records[-1], r.Dropped)


def test_an_io_error_after_room_was_made_is_tried_once_more_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [errno.ENOSPC, errno.ENOSPC, errno.EIO, errno.EIO, errno.EIO]
    made: list[Job] = []

    async def write_part(*_: Any, **__: Any) -> None:
        number = faults.pop(0)
        raise OSError(number, os.strerror(number))

    async def make_room(job: Job, needed: int) -> bool:
        made.append(job)
        return True

    monkeypatch.setattr(world.saver, "_config", dataclasses.replace(world.saver._config, make_room=True))
    monkeypatch.setattr(world.pipeline, "write_part", write_part)
    monkeypatch.setattr(world.saver.deleter, "make_room", make_room)
    world.run()
    failed(world, "Input/output error")
    assert (made, faults) == ([world.job, world.job], [errno.EIO])


def test_a_failed_save_is_reported_although_its_files_cannot_be_swept(world: World) -> None:
    world.fs.faults |= {"create": (1, errno.ENOSPC), "remove_directory": (1, errno.EIO)}
    world.run()
    assert (world.told, world.storage.tags("gpt")) == ([SnapshotState.FAILED], [world.snapshot.tag])
    assert list(world.journal.state.staged) == [f"gpt/{world.snapshot.tag}"]  # the next start sweeps it


def test_a_bug_is_reported_as_an_internal_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write_part(*_: Any, **__: Any) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(world.pipeline, "write_part", write_part)
    world.run()
    failed(world, "internal error while saving gpt/step-00000005.a0001: RuntimeError('odd')")
    assert world.snapshot.code == "internal"


def test_a_checkpoint_that_exists_is_left_alone(world: World) -> None:
    there = write_checkpoint(world.root, step=5, attempt=1)
    world.run()
    assert "is committed already; choose another tag" in world.snapshot.reason
    assert world.storage.files("gpt", world.snapshot.tag) == sorted([names.MANIFEST, there.parts[0].file])
    assert world.told == [SnapshotState.FAILED]


def test_beside_a_manifest_that_cannot_be_read_nothing_is_deleted(world: World) -> None:
    place = world.root / "gpt" / world.snapshot.tag
    place.mkdir(parents=True)
    (place / names.MANIFEST).write_bytes(b"{}")
    world.run()
    assert len(world.storage.files("gpt", world.snapshot.tag)) == 2  # the part stays as well
    assert world.told == [SnapshotState.FAILED]


@pytest.mark.parametrize("record", [r.Staging, r.PartDurable, r.Committed])
def test_a_journal_that_breaks_ends_a_save_without_a_report(world: World, record: type[r.Record]) -> None:
    world.journal.breaks = (record,)
    world.run()
    assert world.told == []


def test_a_journal_that_breaks_during_the_sweep_ends_a_save_without_a_report(world: World) -> None:
    world.fs.faults["create"] = 1, errno.ENOSPC
    world.journal.breaks = (r.Dropped,)
    world.run()
    assert world.told == []


def test_a_journal_that_breaks_at_a_deletion_leaves_the_snapshot_durable(world: World) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.journal.breaks = (r.Retiring,)
    world.run()
    assert (world.told, world.counters["retired"]) == ([SnapshotState.DURABLE], 0)


def test_a_slot_is_held_as_soon_as_its_check_is_requested(world: World) -> None:
    """Otherwise a newer seal could release it before the check runs, and the slot, filled again, would be taken for damage."""
    world.snapshot.persist = False

    async def save() -> None:
        task = world.saver.start(world.snapshot)
        assert not world.job.is_settled(world.snapshot)
        await task
        await asyncio.sleep(0)
        assert world.job.is_settled(world.snapshot)

    asyncio.run(save())
    assert world.told == []


def test_nothing_is_saved_before_its_attempt_is_claimed(world: World) -> None:
    world.run()
    assert world.claimed == [("gpt", 1)]

    async def lost(job: Job, attempt: int) -> None:
        raise Fenced("claimed by another daemon")

    world.saver._claimed = lost
    world.snapshot.state = SnapshotState.SEALED
    world.job.checkpoints.clear()
    world.told.clear()
    records = len(world.journal.records)
    world.run()
    assert (world.told, world.snapshot.reason) == ([SnapshotState.FAILED], "claimed by another daemon")
    assert len(world.journal.records) == records


# -- what is not to be saved


def test_a_memory_only_snapshot_is_checked_and_not_saved(world: World) -> None:
    world.snapshot.persist = False
    world.run()
    assert (world.snapshot.state, world.told, world.journal.records) == (SnapshotState.SEALED, [], [])
    assert read_check(world.held[0].fd, world.held[0].header) is not None


def test_a_slot_that_was_sealed_with_checksums_is_not_read_for_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def checksum(*_: Any, **__: Any) -> None:
        raise AssertionError("the checksums are known")

    asyncio.run(world.saver.check(world.snapshot))
    monkeypatch.setattr(world.pipeline, "checksum", checksum)
    world.run()
    assert world.told == [SnapshotState.DURABLE]


def test_existing_checksums_are_compared_and_kept(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.seals[0].checks = None
    asyncio.run(world.saver.check(world.snapshot))
    checks = world.snapshot.seals[0].checks
    assert checks is not None
    assert [check.crc for check in checks] == read_check(world.held[0].fd, world.held[0].header)


def test_a_snapshot_released_meanwhile_is_not_reported(world: World) -> None:
    world.snapshot.state = SnapshotState.RELEASED
    asyncio.run(world.saver._fail(world.job, world.snapshot, StorageError("gone")))
    assert (world.told, world.snapshot.state) == ([], SnapshotState.RELEASED)


def test_a_replaced_task_does_not_remove_its_successor(world: World) -> None:
    async def again() -> None:
        first = world.saver.start(world.snapshot)
        while not first.done():
            await asyncio.sleep(0)
        world.saver._tasks[world.snapshot] = first
        second = world.saver.start(world.snapshot)
        world.saver._done(world.snapshot, ExitStack(), first)
        assert world.saver._tasks == {world.snapshot: second}
        await world.saver.drain()

    asyncio.run(again())


async def settled(world: World) -> None:
    task = world.saver.start(world.snapshot)
    await world.saver.settle(world.snapshot)
    assert task.done()
    await world.saver.settle(world.snapshot)


def test_settle_waits_until_no_save_is_under_way(world: World) -> None:
    asyncio.run(settled(world))
    assert world.told == [SnapshotState.DURABLE]


def test_a_step_of_several_nodes_is_not_saved_to_a_stage(tmp_path: Path) -> None:
    """Trainers may have begun a job of several nodes before the daemon was started again with a stage."""
    world = World(tmp_path)
    world.saver._config = dataclasses.replace(world.saver._config, stage=tmp_path / "stage")
    world.snapshot.node = Membership(claim="0" * 32, ranks=[0])
    world.run()
    assert "start the daemons of such a job without --stage" in world.snapshot.reason
    assert not world.committed()
    world.close()


def test_a_full_stage_is_tried_again_after_each_local_copy_that_could_go(world: World) -> None:
    world.fs.faults["create"] = 2, errno.ENOSPC
    gone = list[str]()

    async def evict(job: Job) -> bool:
        gone.append(job.name)
        return True

    world.saver.evict = evict
    world.run()
    assert (gone, world.told) == (["gpt", "gpt"], [SnapshotState.DURABLE])
