"""Tests the order of a save's operations on storage, and what is never committed."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon import records as r
from ckptd.daemon.catalog import Catalog, Job, RankSeal, Snapshot
from ckptd.daemon.config import Config
from ckptd.daemon.journal import JournalBroken
from ckptd.daemon.pipeline import Pipeline
from ckptd.daemon.recovery import scan_job
from ckptd.daemon.saver import Saver
from ckptd.daemon.slots import Slot, Slots
from ckptd.daemon.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import Fenced, NotFound, StorageError
from ckptd.shared.fs import PosixFileSystem
from ckptd.shared.lifecycle import SnapshotState
from ckptd.shared.plan import MIN_CHUNK
from ckptd.shared.retention import LatestN
from ckptd.shared.segment import SegmentHeader, SlotState, read_check, write_check, write_header
from ckptd.shared.storage.locate import open_root
from tests.shared.samples import sample_plan, seal, write_checkpoint

PLAN = sample_plan(30_000)


class Faulty(PosixFileSystem):
    """A file system on which the first calls of a kind fail. `faults` says how many, and with which error."""

    def __init__(self) -> None:
        self.faults: dict[str, tuple[int, int]] = {}

    def _pass(self, call: str) -> None:
        count, number = self.faults.get(call, (0, 0))
        if count:
            self.faults[call] = count - 1, number
            raise OSError(number, os.strerror(number))

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        self._pass("create")
        return super().create(name, directory, direct=direct, mode=mode)

    def rename(self, old: str, new: str, directory: int, *, replace: bool) -> None:
        self._pass("replace" if replace else "rename")
        super().rename(old, new, directory, replace=replace)

    def remove_directory(self, name: str, directory: int) -> None:
        self._pass("remove_directory")
        super().remove_directory(name, directory)


@dataclass
class Journal:
    """Records what was appended, in order. It breaks at the first record of a kind in `breaks`."""

    records: list[r.Record] = field(default_factory=list)
    state: r.JournalState = field(default_factory=r.JournalState)
    breaks: tuple[type[r.Record], ...] = ()

    async def append(self, *records: r.Record) -> None:
        for record in records:
            if isinstance(record, self.breaks):
                raise JournalBroken("cannot write the journal: Input/output error")
            self.records.append(record)
            self.state.apply(record)


class World:
    """A saver on a real disk, with real slots: one for each rank of a snapshot. `told` has the state of the snapshot at each report to the
    ranks.
    """

    def __init__(self, place: Path, world_size: int = 1) -> None:
        (place / "root").mkdir()
        (place / "shm").mkdir()
        self.fs, self.root = Faulty(), place / "root"
        fs = self.fs
        self.storage, self.journal = open_root(place / "root", fs), Journal()
        self.pipeline = Pipeline(1, 1 << 20, MIN_CHUNK)
        self.calls = StorageCalls(60.0)
        self.claimed = list[tuple[str, int]]()
        self.slots = Slots(fs, place / "shm", "segments", 1 << 30)
        self.catalog, self.told, self.counters = Catalog(), list[SnapshotState](), Counter[str]()
        config = Config(root=place / "root", socket=place / "s", codec="raw", keep_last=1)
        self.saver = Saver(
            config, self.catalog, self.slots, self.journal, self.storage, self.pipeline, self.calls,  # type: ignore[arg-type]
            counters=self.counters, claimed=self._claimed, tell=lambda snapshot: self.told.append(snapshot.state), settled=lambda job: None,
        )  # fmt: skip
        self.snapshot = Snapshot("gpt", 1, 5, "step-00000005.a0001", world_size, persist=True, state=SnapshotState.SEALED)
        self.held: list[Slot] = []
        for rank in range(world_size):
            header = SegmentHeader(job="gpt", attempt=1, rank=rank, world_size=world_size, slot=0, capacity=200_000, chunk_size=MIN_CHUNK)
            slot = self.slots.add(self.slots.create(header, -1))
            seal(slot.fd, header, PLAN)
            slot.refresh()
            self.held.append(slot)
            self.snapshot.seals[rank] = RankSeal(rank, slot.name, slot.header.generation, slot.header.signature)

    @property
    def job(self) -> Job:
        return self.catalog.job("gpt")

    async def _claimed(self, job: Job, attempt: int) -> None:
        self.claimed.append((job.name, attempt))

    def run(self) -> None:
        async def save() -> None:
            task = self.saver.start(self.snapshot)
            assert self.saver.start(self.snapshot) is task
            assert self.saver.busy
            await self.saver.drain()
            await asyncio.sleep(0)
            assert not self.saver.busy

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
        self.calls.close()


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


def test_a_damaged_slot_is_not_saved(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.seals[0].checked = False
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


def test_a_slot_that_was_filled_again_before_its_save_is_not_saved(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.seals[0].generation -= 1
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
        assert world.told == [SnapshotState.FAILED]
    finally:
        world.close()


def test_a_snapshot_that_lacks_a_rank_is_not_committed(tmp_path: Path) -> None:
    two(tmp_path, lambda world: world.snapshot.seals.pop(1))  # type: ignore[arg-type]


def test_ranks_that_sealed_different_plans_are_not_committed(tmp_path: Path) -> None:
    def other_plan(world: World) -> None:
        slot = world.held[1]
        plan = sample_plan(30_000)
        plan = type(plan)(**{name: getattr(plan, name) for name in plan.__struct_fields__} | {"global_plan": bytes(32)})
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


def test_a_failed_save_is_reported_although_its_files_cannot_be_swept(world: World) -> None:
    world.fs.faults |= {"create": (1, errno.ENOSPC), "remove_directory": (1, errno.EIO)}
    world.run()
    assert (world.told, world.storage.tags("gpt")) == ([SnapshotState.FAILED], [world.snapshot.tag])
    assert list(world.journal.state.staged) == [f"gpt/{world.snapshot.tag}"]  # the next start sweeps it


def test_a_bug_is_reported_as_an_internal_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write_part(*_: Any) -> None:
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


# -- after a commit


def test_a_changed_policy_deletes_several_only_at_the_second_commit(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoints may have been trained under another policy. A person who changed it by mistake has until the second commit to undo
    that.
    """
    tags = [write_checkpoint(world.root, step=step, attempt=1).tag for step in (1, 2, 3, 4)]
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.run()
    assert world.storage.tags("gpt") == [*tags, world.snapshot.tag]
    assert world.job.announced in caplog.text
    assert world.job.announced.startswith(
        f"4 checkpoints ({tags[0]} to {tags[3]}) are beyond LatestN(n=1): they are deleted at the next commit"
    )
    asyncio.run(world.saver.deleter.retain(world.job))
    assert world.storage.tags("gpt") == [world.snapshot.tag]
    assert (world.job.announced, world.counters["retired"]) == ("", 4)


def test_a_changed_policy_deletes_a_single_checkpoint_at_the_first_commit(world: World) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.run()
    assert (world.storage.tags("gpt"), world.job.announced) == ([world.snapshot.tag], "")


def test_retention_deletes_nothing_where_a_newer_ckptd_has_saved(world: World) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.job.newer["best.a0001"] = "manifest was written by a newer ckptd"
    world.run()
    assert len(world.storage.tags("gpt")) == 2


def test_the_oldest_is_deleted_once_there_is_a_newer_one(world: World) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.run()
    assert world.storage.tags("gpt") == [world.snapshot.tag]
    assert [type(record) for record in world.journal.records[-2:]] == [r.Retiring, r.Retired]
    assert (world.counters["retired"], world.job.retiring) == (1, set())


@pytest.mark.parametrize("call", ["replace", "remove_directory"])
def test_a_deletion_that_fails_is_retried_after_the_next_commit(world: World, call: str) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.fs.faults[call] = 1, errno.EIO
    world.run()
    assert (world.told, world.counters["tidy_failures"], world.job.retiring) == ([SnapshotState.DURABLE], 1, set())
    asyncio.run(world.saver.deleter.retain(world.job))
    assert (world.storage.tags("gpt"), world.storage.read_newest("gpt")) == ([world.snapshot.tag], world.snapshot.tag)


def test_a_storage_error_during_retention_is_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def retire(*_: Any) -> None:
        raise StorageError("no room for the journal")

    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    monkeypatch.setattr(world.saver.deleter, "retire", retire)
    world.run()
    assert (world.told, world.counters["tidy_failures"]) == ([SnapshotState.DURABLE], 1)


def test_retention_of_a_job_without_checkpoints_does_nothing(world: World) -> None:
    asyncio.run(world.saver.deleter.retain(world.job))
    assert world.storage.read_newest("gpt") is None


# -- snapshots that are not saved


def test_a_memory_only_snapshot_is_checked_and_not_saved(world: World) -> None:
    world.snapshot.persist = False
    world.run()
    assert (world.snapshot.state, world.told, world.journal.records) == (SnapshotState.SEALED, [], [])
    assert read_check(world.held[0].fd, world.held[0].header) is not None


def test_existing_checksums_are_compared_and_kept(world: World) -> None:
    asyncio.run(world.saver.check(world.snapshot))
    world.snapshot.seals[0].checked = False
    asyncio.run(world.saver.check(world.snapshot))
    assert world.snapshot.seals[0].checked


def test_a_snapshot_released_meanwhile_is_not_reported(world: World) -> None:
    world.snapshot.state = SnapshotState.RELEASED
    asyncio.run(world.saver._fail(world.snapshot, StorageError("gone")))
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


# -- deletion on request


def saved_twice(world: World) -> tuple[str, str]:
    """Save two committed checkpoints of the job, and `newest`."""
    for step in (3, 4):
        write_checkpoint(world.root, step=step, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.storage.publish_newest("gpt", "step-00000004.a0001")
    return "step-00000003.a0001", "step-00000004.a0001"


def forget(world: World, tag: str) -> str:
    return asyncio.run(world.saver.deleter.forget(world.job, tag))


def test_newest_moves_before_the_newest_checkpoint_is_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = saved_twice(world)
    seen = []
    delete = world.storage.delete_files

    def watched(job: str, tag: str, files: list[str]) -> None:
        seen.append((tag, files[0] == names.MANIFEST, world.storage.read_newest("gpt")))
        delete(job, tag, files)

    monkeypatch.setattr(world.storage, "delete_files", watched)
    assert forget(world, new) == ""
    assert seen == [(new, True, old), (new, False, old)]
    assert forget(world, old) == ""
    assert seen[2:] == [(old, True, None), (old, False, None)]
    assert (world.storage.tags("gpt"), world.job.checkpoints, world.job.retiring) == ([], {}, set())
    assert [type(record) for record in world.journal.records] == [r.Retiring, r.Retired] * 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_newest_is_deleted_on_a_disk_without_room_for_another_hint(world: World, number: int) -> None:
    old, new = saved_twice(world)
    world.fs.faults["create"] = 1, number
    assert forget(world, new) == ""
    assert (world.storage.tags("gpt"), world.storage.read_newest("gpt")) == ([old], None)
    asyncio.run(world.saver.deleter.retain(world.job))
    assert world.storage.read_newest("gpt") == old


def test_the_newest_is_not_deleted_if_another_hint_cannot_be_written(world: World) -> None:
    _, new = saved_twice(world)
    world.fs.faults["create"] = 1, errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        forget(world, new)
    assert world.storage.read_newest("gpt") == new
    assert world.storage.has_manifest("gpt", new)


def test_a_missing_checkpoint_cannot_be_forgotten(world: World) -> None:
    assert forget(world, "step-00000009.a0001") == "there is no checkpoint gpt/step-00000009.a0001"
    assert world.journal.records == []


def test_a_pinned_or_read_checkpoint_cannot_be_forgotten(world: World) -> None:
    old, new = saved_twice(world)
    world.storage.pin("gpt", old)
    assert forget(world, old) == f"checkpoint gpt/{old} is pinned"
    world.storage.unpin("gpt", old)
    held = world.storage.lease("gpt", old)
    assert forget(world, old).startswith(f"checkpoint gpt/{old} is being read, or deleted, by pid {os.getpid()} (")
    asyncio.run(world.saver.deleter.retain(world.job))
    assert world.storage.tags("gpt") == [old, new]
    held.close()
    asyncio.run(world.saver.deleter.retain(world.job))
    assert world.storage.tags("gpt") == [new]
    assert (world.job.retiring, world.counters["retired"]) == (set(), 1)


def test_a_damaged_checkpoint_is_deleted_with_its_parts_and_no_other_file(world: World) -> None:
    old, _ = saved_twice(world)
    place = world.root / "gpt" / old
    (place / names.MANIFEST).write_bytes(b"{}")
    (place / "notes.txt").write_text("mine")
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    assert list(world.job.damaged) == [old]
    assert forget(world, old) == ""
    assert (os.listdir(place), world.job.damaged) == (["notes.txt"], {})


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_that_cannot_be_deleted_is_unchanged(world: World, damaged: bool) -> None:
    old, _ = saved_twice(world)
    if damaged:
        (world.root / "gpt" / old / names.MANIFEST).write_bytes(b"{}")
        asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.fs.faults["remove_directory"] = 1, errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        forget(world, old)
    assert world.job.retiring == set()


@pytest.mark.parametrize("error", [StorageError("no room for the journal"), JournalBroken("cannot write the journal")])
def test_a_deletion_that_the_journal_cannot_record_leaves_the_checkpoint_visible(
    world: World, monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    """Nothing was deleted, so recovery must find the checkpoint."""
    old, new = saved_twice(world)

    async def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(world.journal, "append", full)
    with pytest.raises(type(error)):
        forget(world, new)
    assert sorted(c.tag for c in world.job.live_checkpoints()) == [old, new]
    assert world.job.is_durable(1, 4)


def test_a_checkpoint_that_cannot_be_deleted_does_not_stop_the_others(world: World) -> None:
    write_checkpoint(world.root, step=2, attempt=1)
    _, new = saved_twice(world)
    world.fs.faults["remove_directory"] = 1, errno.EACCES
    world.job.policies = (LatestN(1),)
    asyncio.run(world.saver.deleter.retain(world.job))
    assert world.storage.tags("gpt") == ["step-00000002.a0001", new]
    assert (world.counters["tidy_failures"], world.counters["retired"], world.job.retiring) == (1, 1, set())


def test_a_directory_in_the_place_of_newest_is_left_alone(world: World) -> None:
    saved_twice(world)
    newest = world.root / "gpt" / names.NEWEST
    newest.unlink()
    newest.mkdir()
    asyncio.run(world.saver.deleter.retain(world.job))
    assert world.counters["tidy_failures"] == 1


async def settled(world: World) -> None:
    task = world.saver.start(world.snapshot)
    await world.saver.settle(world.snapshot)
    assert task.done()
    await world.saver.settle(world.snapshot)


def test_settle_waits_until_no_save_is_under_way(world: World) -> None:
    asyncio.run(settled(world))
    assert world.told == [SnapshotState.DURABLE]


def test_a_damaged_checkpoint_of_many_files_is_forgotten_by_its_parts(tmp_path: Path) -> None:
    """A record of the journal has room for a limited number of names."""
    world = World(tmp_path)
    (part,) = write_checkpoint(tmp_path / "root", files=3).parts
    tag = "step-00001000.a0002"
    world.job.damaged[tag] = "its manifest cannot be read"
    assert asyncio.run(world.saver.deleter.forget(world.job, tag)) == ""
    (intent,) = [record for record in world.journal.records if isinstance(record, r.Retiring)]
    assert intent.files == [part.file]
    assert (world.storage.tags("gpt"), world.job.damaged) == ([], {})
    world.close()
