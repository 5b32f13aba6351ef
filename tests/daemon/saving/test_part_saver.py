"""Tests how parts are written: at the same time, again after an error that may pass,
and within the room that there is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.snapshot import SaveProgress
from ckptd.daemon.journal import records as r
from ckptd.daemon.saving.part_saver import PartSaver
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.support.saving import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_the_progress_of_a_save_counts_every_byte_and_starts_again_with_the_part(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert seen == [(1.0, 7, total, 7, round((total - 7) / 7, 1))] * 2
    assert world.snapshot.progress is not None
    chunks = SealedSlot.read(world.held[0].fd, world.held[0].header).ranges
    assert world.snapshot.progress.report(0.0)["done_bytes"] == 7 + sum(
        chunk.length for chunk in chunks
    )


def test_the_parts_are_written_while_the_slots_are_checked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, checksum, write_part = (
        asyncio.Event(),
        world.pipeline.checksum,
        world.pipeline.write_part,
    )

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


def test_files_are_linked_from_the_same_attempt_on_as_many_ranks_only(world: World) -> None:
    """Readers refuse a file in a checkpoint of an attempt that has not written it."""
    world.run()
    parts, (seal,) = world.saver._parts[world.saver.front], world.snapshot.seals.values()
    before = parts._before(world.snapshot, seal)
    assert before is not None
    assert before.part.attempt == 1
    assert parts._before(dataclasses.replace(world.snapshot, attempt=2), seal) is None
    assert parts._before(dataclasses.replace(world.snapshot, world_size=2), seal) is None


def test_the_parts_of_all_ranks_are_written_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, meeting = World(tmp_path, world_size=2), asyncio.Barrier(2)
    write_part = world.pipeline.write_part

    async def met(*arguments: Any, **options: Any) -> Any:
        await meeting.wait()
        return await write_part(*arguments, **options)

    monkeypatch.setattr(world.pipeline, "write_part", met)
    world.run()
    world.close()
    assert world.told == [SnapshotState.DURABLE]


def test_a_part_that_finds_no_room_beside_the_others_is_written_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part reserves the room that it would take raw.

    Together they may not fit, although what they store does.
    """
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


def test_after_an_io_error_a_part_is_written_again_under_another_name(world: World) -> None:
    world.fs.faults["create"] = 1, errno.EIO
    world.run()
    first, second = (
        record.file for record in world.journal.records if isinstance(record, r.Staging)
    )
    assert first != second
    assert [part.file for part in world.storage.read_manifest("gpt", world.snapshot.tag).parts] == [
        second
    ]
    assert (world.told, world.counters["rewrites"]) == ([SnapshotState.DURABLE], 1)


@pytest.mark.parametrize(
    ("count", "number", "words"),
    [(2, errno.EIO, "Input/output error"), (1, errno.ENOSPC, "No space left")],
)
def test_a_part_that_cannot_be_written_fails_the_snapshot(
    world: World, count: int, number: int, words: str
) -> None:
    world.fs.faults["create"] = count, number
    world.run()
    world.check_failed(words)
    assert isinstance(world.journal.records[-1], r.Dropped)


def test_an_io_error_after_room_was_made_is_tried_once_more_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [errno.ENOSPC, errno.ENOSPC, errno.EIO, errno.EIO, errno.EIO]
    made: list[Job] = []

    async def write_part(*_: Any, **__: Any) -> None:
        number = faults.pop(0)
        raise OSError(number, os.strerror(number))

    async def make_room(job: Job, needed: int) -> bool:
        made.append(job)
        return True

    parts: PartSaver = world.saver._parts[world.saver.root]
    monkeypatch.setattr(parts, "_config", dataclasses.replace(parts._config, make_room=True))
    monkeypatch.setattr(world.pipeline, "write_part", write_part)
    monkeypatch.setattr(world.saver.root.deleter, "make_room", make_room)
    world.run()
    world.check_failed("Input/output error")
    assert (made, faults) == ([world.job, world.job], [errno.EIO])


def test_a_node_without_rank_0_deletes_nothing_on_a_full_disk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon of rank 0 alone decides about the checkpoints of several nodes."""
    parts = world.saver._parts[world.saver.root]
    made = list[Job]()

    async def make_room(job: Job, needed: int) -> bool:
        made.append(job)
        return False

    monkeypatch.setattr(parts, "_config", dataclasses.replace(parts._config, make_room=True))
    monkeypatch.setattr(world.saver.root.deleter, "make_room", make_room)
    for ranks in ([0], [1]):
        world.fs.faults["create"] = 1, errno.ENOSPC
        world.snapshot.node = Membership(run_id="0" * 32, ranks=ranks)
        world.snapshot.progress = SaveProgress(1, 0.0)

        async def save() -> None:
            with pytest.raises(OSError, match="No space left"):
                await parts.save(world.snapshot, asyncio.ensure_future(asyncio.sleep(0)))

        asyncio.run(save())
        assert len(made) == 1  # of rank 0's node only


def test_a_full_stage_is_tried_again_after_each_local_copy_that_could_go(world: World) -> None:
    world.fs.faults["create"] = 2, errno.ENOSPC
    gone = list[str]()

    async def evict(job: Job) -> bool:
        gone.append(job.name)
        return True

    world.saver.front.evict = evict
    world.run()
    assert (gone, world.told) == (["gpt", "gpt"], [SnapshotState.DURABLE])
