"""Tests which slot a snapshot gets, and what happens to slots whose owner ends while
they are being made. No processes are started.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.decisions import Free, fail
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.memory.admission import Admission
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.shared.errors import Fenced, NotFound, QuotaExceeded, SnapshotFailed
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.system.fs import PosixFileSystem


class Rank:
    """An admission with one owner.

    `between` runs on the event loop after the segment with this number has been made.
    """

    def __init__(self, path: Path) -> None:
        self.slots = Slots(PosixFileSystem(), path, "ckptd-test", 1 << 30)
        self.catalog = Catalog()
        self.job = self.catalog.job("gpt")
        self.job.attempt = 1
        self.owner = Owner("gpt", 1, 0, 1)
        self.job.ranks.join(self.owner)
        self.between: Callable[[int], None] = lambda number: None
        self.made = 0
        self.admission = Admission(self.slots, MIN_CHUNK, self._run)
        self.steps = Steps(self.catalog, self.slots, mock.Mock(counters=Counter()), 60.0)

    async def _run(self, create: Callable[[], Slot]) -> Slot:
        slot = create()
        self.between(self.made)
        self.made += 1
        return slot

    def end(self) -> None:
        """Do what the daemon does for a trainer that has died."""
        self.steps.end(self.job, self.owner, "ended")

    def allocate(self, count: int) -> list[Slot]:
        return asyncio.run(
            self.admission.allocate(self.owner, self.job, 1000, count, -1, lambda: False)
        )


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_trainer_that_dies_while_its_slots_are_made_closes_no_descriptor_of_others(
    tmp_path: Path, number: int
) -> None:
    """The dead trainer's slots are released when its death is noticed, and once more
    when the allocation fails.

    Other files are opened in between. They get the numbers of the descriptors that the
    first release has closed.
    """
    rank = Rank(tmp_path)
    others: list[int] = []

    def die(now: int) -> None:
        if now == number:
            rank.end()
            others.extend(os.open("/dev/zero", os.O_RDONLY) for _ in range(8))

    rank.between = die
    with pytest.raises(Fenced):
        rank.allocate(3)
    assert [os.read(fd, 2) for fd in others] == [b"\0\0"] * len(others)
    assert (rank.slots.slots, rank.slots.used, list((tmp_path / "ckptd-test").iterdir())) == (
        {},
        0,
        [],
    )
    for fd in others:
        os.close(fd)
    rank.slots.close()


def test_slots_that_are_replaced_are_released_once_they_are_free(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    first = rank.allocate(2)
    rank.job.occupy(first[0].name, 0, (1, 5))
    second = rank.allocate(2)
    assert {slot.name for slot in rank.slots.slots.values()} == {
        first[0].name,
        *(slot.name for slot in second),
    }
    rank.steps.perform(rank.job, [Free((1, 5), first[0].name)])
    assert set(rank.slots.slots) == {slot.name for slot in second}
    assert all(slot.released for slot in first)
    assert rank.job.steps == {}
    rank.slots.close()


def test_free_segments_of_the_rank_itself_make_room(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.allocate(2)
    rank.slots.quota = rank.slots.used
    second = rank.allocate(2)
    assert set(rank.slots.slots) == {slot.name for slot in second}
    rank.slots.close()


def test_a_segment_goes_to_the_disk_only_after_room_was_made_in_vain(tmp_path: Path) -> None:
    rank, room = Rank(tmp_path), []
    rank.slots.close()
    rank.slots = rank.admission._slots = Slots(
        PosixFileSystem(), tmp_path, "ckptd-test", 0, tmp_path / "disk"
    )

    def allocate(frees: bool) -> list[bool]:
        def make_room() -> bool:
            room.append(len(rank.slots.slots))
            if frees:
                rank.slots.quota = 1 << 30
            return frees

        made = asyncio.run(rank.admission.allocate(rank.owner, rank.job, 1000, 2, -1, make_room))
        return [slot.directory.on_disk for slot in made]

    rank.slots.quota = 0
    assert allocate(frees=False) == [True, True]
    assert room == [0, 1]
    assert allocate(frees=True) == [False, False]
    rank.slots._overflow, rank.slots.quota = None, 0
    with pytest.raises(QuotaExceeded):
        allocate(frees=False)
    rank.slots.close()


# -- grants


class Grants:
    """Two ranks with the slots a and b each, in a job of two. The slots are no files."""

    def __init__(self) -> None:
        made = [self._slot(rank, name) for rank in (0, 1) for name in "ab"]
        found: Any = SimpleNamespace(
            slots={one.name: one for one in made},
            of=lambda *identity: [one for one in made if one.owner == identity],
        )
        self.slots = found
        catalog = Catalog()
        self.job = catalog.job("job")
        self.job.attempt, self.job.world_size = 1, 2
        self.owners = [Owner("job", 1, rank, 2) for rank in (0, 1)]
        for owner in self.owners:
            self.job.ranks.join(owner)
        self.admission = Admission(self.slots, 1 << 20, lambda _: asyncio.sleep(0))  # type: ignore[arg-type, return-value]
        self.steps = Steps(catalog, self.slots, mock.Mock(counters=Counter()), 60.0)

    @staticmethod
    def _slot(rank: int, name: str) -> Any:
        return SimpleNamespace(
            name=f"{name}{rank}",
            owner=("job", 1, rank),
            outgrown=False,
            header=SimpleNamespace(job="job", attempt=1, rank=rank),
        )

    def occupy(self, **steps: int) -> None:
        for name, step in steps.items():
            self.job.occupy(name, int(name[1]), (1, step))

    def free(self, name: str, step: int) -> None:
        self.steps.perform(self.job, [Free((1, step), name)])

    def acquire(self, rank: int, step: int, wait: float = 0.5) -> asyncio.Task[Any]:
        return asyncio.create_task(
            self.admission.acquire(self.owners[rank], self.job, (1, step), wait)
        )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_rank_that_gets_its_slot_while_another_waits_does_not_block_the_other() -> None:
    """Slots become free.

    Before the waiting rank gets its decision, the other rank takes its own slot.
    """
    made = Grants()
    made.occupy(a0=2, b0=3, a1=2)
    first = made.acquire(0, 4)
    await settle()
    assert not first.done()
    made.free("b0", 3)
    taken = await made.admission.acquire(made.owners[1], made.job, (1, 4), 0.5)
    assert taken is made.slots.slots["b1"]
    made.occupy(b1=4)
    made.job.step((1, 4)).snapshot = Snapshot("job", 1, 4, "step-00000004.a0001", 2, persist=True)
    assert await first is made.slots.slots["b0"]


async def test_the_slot_of_the_last_checkpoint_is_granted_last() -> None:
    """The next deltas need it."""
    made = Grants()
    last: Any = SimpleNamespace(segment="a0")
    made.job.stored[0] = last
    assert await made.acquire(0, 4) is made.slots.slots["b0"]
    made.occupy(b0=4)
    assert await made.acquire(0, 5) is made.slots.slots["a0"]


async def test_one_decision_counts_for_all_ranks_and_for_those_that_come_late() -> None:
    """Rank 0 has no free slot in time.

    Rank 1 has one, and skips the step for the same reason, as it does when it asks
    again later.
    """
    made = Grants()
    made.occupy(a0=2, b0=3)
    both = made.acquire(0, 4, 0.01), made.acquire(1, 4, 0.01)
    assert [await each for each in both] == ["every slot is still being saved"] * 2
    made.free("a0", 2)
    assert await made.acquire(1, 4) == "every slot is still being saved"
    assert await made.acquire(1, 5) is made.slots.slots["a1"]


async def test_a_rank_that_is_late_is_waited_for_once() -> None:
    made = Grants()
    made.occupy(a0=2, b0=3, a1=2, b1=3)
    made.job.step((1, 2)).snapshot = Snapshot("job", 1, 2, "step-00000002.a0001", 2, persist=True)
    late = "ranks 0, 1 have not sealed step 2 yet"
    assert await made.acquire(0, 4, 0.01) == late
    assert made.job.stuck == (1, 2)
    assert await asyncio.wait_for(made.acquire(0, 5, 3600), 60) == late
    made.free("a0", 2)
    made.free("a1", 2)
    assert await made.acquire(0, 6) is made.slots.slots["a0"]
    assert made.job.stuck is None


async def test_a_rank_without_slots_is_told_so_and_one_beside_it_waits() -> None:
    made = Grants()
    made.slots.of = lambda *identity: [] if identity[2] == 1 else [made.slots.slots["a0"]]
    with pytest.raises(NotFound, match="this rank has no slots"):
        await made.acquire(1, 4)
    assert await made.acquire(0, 4, 0.01) == "another rank has no slots yet"


async def test_a_rank_that_waits_for_the_first_slots_of_another_is_woken_by_them() -> None:
    made, allocated = Grants(), {0}
    of = made.slots.of
    made.slots.of = lambda *identity: of(*identity) if identity[2] in allocated else []
    made.slots.add = lambda _: allocated.add(1)
    waiting = made.acquire(0, 4, 3600)
    await settle()
    assert not waiting.done()
    await made.admission.allocate(made.owners[1], made.job, 1000, 1, -1, lambda: False)
    assert await asyncio.wait_for(waiting, 60) is made.slots.slots["a0"]


async def test_a_rank_does_not_wait_for_the_slots_of_a_rank_that_has_failed_the_step() -> None:
    """A rank that fails a save before it has made slots will not make them for this
    step. The other rank waited for them for 600 s.
    """
    made = Grants()
    made.slots.of = lambda *identity: [] if identity[2] == 1 else [made.slots.slots["a0"]]
    waiting = made.acquire(0, 4, 3600)
    await settle()
    assert not waiting.done()
    made.steps.perform(
        made.job, fail(made.job.step((1, 4)), SnapshotFailed("rank 1: the planner's own"))
    )
    with pytest.raises(SnapshotFailed, match="rank 1: the planner's own"):
        await asyncio.wait_for(waiting, 60)
