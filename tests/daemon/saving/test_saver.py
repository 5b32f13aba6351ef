"""Tests the order of a save's operations on storage, and what is never committed."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.snapshot import RankSeal
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.journal import records as r
from ckptd.daemon.recovery import scan_job
from ckptd.daemon.saving.joint import Abandoned, Undecided
from ckptd.shared import names
from ckptd.shared.errors import Fenced, StorageError
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.formats.segment import SlotState, read_check, write_check, write_header
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.shared.samples import seal, write_checkpoint
from tests.support.saving import PLAN, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_save_syncs_and_journals_in_order(world: World) -> None:
    world.run()
    assert [type(record) for record in world.journal.records] == [
        r.Staging,
        r.PartDurable,
        r.Committed,
    ]
    assert world.told == [SnapshotState.DURABLE]
    assert world.storage.read_newest("gpt") == world.snapshot.tag
    manifest = world.storage.read_manifest("gpt", world.snapshot.tag)
    assert [part.file for part in manifest.parts] == [world.journal.records[0].file]  # type: ignore[attr-defined]
    assert world.counters["persisted"] == 1


def test_a_save_is_logged_in_one_line(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        world.run()
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "INFO" and world.snapshot.tag in record.getMessage()
    ]
    words = (
        rf"saved gpt/{world.snapshot.tag}: 120\.1 kB as \d+\.\d kB \(\d+ %\), durable "
        rf"after "
        rf"\d+\.\d\d s, \d+\.\d [kM]B/s"
    )
    assert re.fullmatch(words, line), line


def test_the_log_says_how_long_the_slowest_rank_was_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, world_size=2)
    world.snapshot.seals[0].training_held, world.snapshot.seals[1].training_held = 0.25, 1.5
    with caplog.at_level("INFO"):
        world.run()
    assert " %), training held 1.500 s, durable after" in caplog.text
    world.close()


@pytest.mark.parametrize(
    ("later", "words"),
    [(0, "not known to be durable"), (1, "it is no longer needed: a later checkpoint is")],
)
@pytest.mark.parametrize("why", ["peer_replica", "drained"])
def test_delivered_parts_that_no_rank_waits_for_stay_if_their_outcome_is_not_known(
    world: World,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    later: int,
    words: str,
) -> None:
    """Another node may still commit them."""
    caplog.set_level("INFO")
    snapshot, dropped, job = world.snapshot, list[str](), world.catalog.job("gpt")
    setattr(snapshot, why, True)
    snapshot.delivered = True
    snapshot.node, snapshot.state = Membership(run_id="0" * 32, ranks=[0]), SnapshotState.WRITTEN
    attempt, step = snapshot.attempt, snapshot.step + later
    monkeypatch.setattr(world.saver, "_drop", lambda s, reason: dropped.append(reason))
    job.commit(StoredCheckpoint("gpt", "newest", attempt, step, 1, 1, (), user_tag=True))
    error = Undecided("step 5 is not known to be durable")
    asyncio.run(world.saver._fail(job, snapshot, error))
    assert (snapshot.state, snapshot.delivered, dropped) == (SnapshotState.FAILED, True, [])
    assert words in caplog.text


def test_the_abandoned_tries_of_a_copy_are_counted_and_reported(world: World) -> None:
    snapshot, job = world.snapshot, world.catalog.job("gpt")
    snapshot.peer_replica = snapshot.delivered = True
    snapshot.node, snapshot.state = Membership(run_id="0" * 32, ranks=[0]), SnapshotState.WRITTEN
    error = Abandoned(StorageError("ranks 2, 3 did not deliver"))
    asyncio.run(world.saver._fail(job, snapshot, error))
    assert (snapshot.state, snapshot.abandoned) == (SnapshotState.FAILED, 1)
    assert not snapshot.delivered
    assert world.told == [SnapshotState.FAILED]


@pytest.mark.parametrize("persist", [True, False])
def test_a_damaged_slot_is_not_saved(world: World, persist: bool) -> None:
    world.snapshot.persist = persist
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.seals[0].checks = None
    slot = world.held[0]
    crcs = read_check(slot.fd, slot.header)
    assert crcs is not None
    write_check(slot.fd, slot.header, [crcs[0] ^ 1, *crcs[1:]])
    world.run()
    world.check_failed("the copy in memory has changed since it was sealed")
    assert world.counters["verify_failures"] == 1


def filled_again(world: World) -> None:
    write_header(world.held[0].fd, world.held[0].header.next(SlotState.FILLING, step=6))


def test_a_slot_that_is_filled_again_while_it_is_checked_is_not_saved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.pipeline.checksum

    async def checksum(slot: Any, **options: Any) -> list[ChunkCheck]:
        found = await before(slot, **options)
        filled_again(world)
        return found

    monkeypatch.setattr(world.pipeline, "checksum", checksum)
    world.run()
    world.check_failed("the slot was filled again while it was being checked")


def test_a_slot_that_was_filled_again_before_its_save_is_not_saved(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.seals[0].generation -= 1
    world.run()
    world.check_failed("the slot was filled again while it was being saved")


def test_a_slot_that_changes_after_its_check_is_not_saved(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    os.pwrite(world.held[0].fd, b"?", world.held[0].header.data_offset + 3)
    world.run()
    world.check_failed("chunk 0 of gpt step 5 has changed in memory since it was sealed")


def test_a_snapshot_that_is_to_be_saved_after_all_is_saved_once_it_is_checked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make a snapshot wanted while it is checked, as the death of its trainer does, or
    a SIGTERM to the daemon.
    """
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


@pytest.mark.parametrize("turns", range(10))
def test_a_snapshot_is_saved_in_whatever_turn_of_the_event_loop_its_trainer_dies(
    world: World, turns: int
) -> None:
    """The check of a memory-only snapshot takes a few turns of the loop to end.

    A death in one of them must not be missed.
    """
    asyncio.run(world.saver.check(world.snapshot))  # the second check, below, then reads nothing
    world.snapshot.persist = False

    async def die() -> None:
        world.saver.start(world.snapshot)
        for _ in range(turns):
            await asyncio.sleep(0)
        world.snapshot.persist = True
        world.saver.start(world.snapshot)
        await world.saver.drain()

    asyncio.run(die())
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
        world.snapshot.seals[1] = RankSeal(
            1, slot.name, slot.header.generation, slot.header.signature
        )

    two(tmp_path, other_plan)


def test_two_ranks_are_committed_together(tmp_path: Path) -> None:
    world = World(tmp_path, world_size=2)
    world.run()
    assert [part.rank for part in world.storage.read_manifest("gpt", world.snapshot.tag).parts] == [
        0,
        1,
    ]
    assert world.told == [SnapshotState.DURABLE]
    world.close()


# -- what fails on storage


def test_a_failed_save_is_reported_although_its_files_cannot_be_swept(world: World) -> None:
    world.fs.faults |= {"create": (1, errno.ENOSPC), "remove_directory": (1, errno.EIO)}
    world.run()
    assert (world.told, world.storage.tags("gpt")) == ([SnapshotState.FAILED], [world.snapshot.tag])
    # The next start sweeps it.
    assert list(world.journal.state.staged) == [f"gpt/{world.snapshot.tag}"]


def test_a_bug_is_reported_as_an_internal_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write_part(*_: Any, **__: Any) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(world.pipeline, "write_part", write_part)
    world.run()
    world.check_failed("internal error while saving gpt/step-00000005.a0001: RuntimeError('odd')")
    assert world.snapshot.code == "internal"


def test_a_checkpoint_that_exists_is_left_alone(world: World) -> None:
    there = write_checkpoint(world.root, step=5, attempt=1)
    world.run()
    assert "is committed already; choose another tag" in world.snapshot.reason
    assert world.storage.files("gpt", world.snapshot.tag) == sorted(
        [names.MANIFEST, there.parts[0].file]
    )
    assert world.told == [SnapshotState.FAILED]


def test_beside_a_manifest_that_cannot_be_read_nothing_is_deleted(world: World) -> None:
    place = world.root / "gpt" / world.snapshot.tag
    place.mkdir(parents=True)
    (place / names.MANIFEST).write_bytes(b"{}")
    world.run()
    assert len(world.storage.files("gpt", world.snapshot.tag)) == 2  # the part stays as well
    assert world.told == [SnapshotState.FAILED]


@pytest.mark.parametrize("record", [r.Staging, r.PartDurable, r.Committed])
def test_a_journal_that_breaks_ends_a_save_without_a_report(
    world: World, record: type[r.Record]
) -> None:
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
    """Otherwise a newer seal could release it before the check runs, and the slot,
    filled again, would be taken for damage.
    """
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

    world.claims.claimed = lost
    world.snapshot.state = SnapshotState.SEALED
    world.job.checkpoints.clear()
    world.told.clear()
    records = len(world.journal.records)
    world.run()
    assert (world.told, world.snapshot.reason) == (
        [SnapshotState.FAILED],
        "claimed by another daemon",
    )
    assert len(world.journal.records) == records


# -- what is not to be saved


def test_a_memory_only_snapshot_is_checked_and_not_saved(world: World) -> None:
    world.snapshot.persist = False
    world.run()
    assert (world.snapshot.state, world.told, world.journal.records) == (
        SnapshotState.SEALED,
        [],
        [],
    )
    assert read_check(world.held[0].fd, world.held[0].header) is not None


def test_a_slot_that_was_sealed_with_checksums_is_not_read_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    await world.saver.wait_idle(world.snapshot)
    assert task.done()
    await world.saver.wait_idle(world.snapshot)


def test_settle_waits_until_no_save_is_under_way(world: World) -> None:
    asyncio.run(settled(world))
    assert world.told == [SnapshotState.DURABLE]


def test_a_job_keeps_its_governor(world: World) -> None:
    assert world.saver.governor("gpt") is world.saver.governor("gpt")
    assert world.saver.governor("gpt") is not world.saver.governor("bert")


def test_a_save_that_succeeds_in_a_later_try_counts_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`sealed` is the sum of what was saved, what has failed and what is only in
    memory.
    """
    world.snapshot.unasked = True
    parts = world.saver._parts[world.saver.front]
    save = parts.save

    async def full(*_: object) -> None:
        raise StorageError("full")

    monkeypatch.setattr(parts, "save", full)
    for _ in range(2):
        world.run()
        assert (
            world.counters["failed"],
            world.counters["persisted"],
            world.counters["saved_unasked"],
        ) == (1, 0, 0)
    assert "saved unasked" not in caplog.text
    monkeypatch.setattr(parts, "save", save)
    with caplog.at_level("INFO"):
        world.run()
    assert world.committed()
    assert (
        world.counters["failed"],
        world.counters["persisted"],
        world.counters["saved_unasked"],
    ) == (0, 1, 1)
    assert world.counters["recounted_failed"] == 1, "the sum of both counters never falls"
    assert sum(world.saver.saves.distribution().counts) == 1
    assert "saved unasked" in caplog.text
