"""Tests which slot a snapshot gets, and what happens to slots whose owner ends while they are being made. No processes are started."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.daemon.admission import Admission, Owner
from ckptd.daemon.catalog import Job, Snapshot
from ckptd.daemon.slots import Slot, Slots
from ckptd.shared.errors import Fenced
from ckptd.shared.fs import PosixFileSystem
from ckptd.shared.plan import MIN_CHUNK


class Rank:
    """An admission with one owner. `between` runs on the event loop after the segment with this number has been made."""

    def __init__(self, path: Path) -> None:
        self.slots = Slots(PosixFileSystem(), path, "ckptd-test", 1 << 30)
        self.owner = Owner("gpt", 1, 0, 1)
        self.owners = {self.owner.identity: self.owner}
        self.between: Callable[[int], None] = lambda number: None
        self.made = 0
        self.admission = Admission(self.slots, self.owners, MIN_CHUNK, self._run)

    async def _run(self, create: Callable[[], Slot]) -> Slot:
        slot = create()
        self.between(self.made)
        self.made += 1
        return slot

    def end(self) -> None:
        """Do what the daemon does when a trainer has died."""
        del self.owners[self.owner.identity]
        for slot in self.slots.of(*self.owner.identity):
            self.admission.vacate(slot)
        self.admission.drop_idle(self.owner)

    def allocate(self, count: int) -> list[Slot]:
        return asyncio.run(self.admission.allocate(self.owner, 1000, count, -1, lambda: False))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_trainer_that_dies_while_its_slots_are_made_closes_no_descriptor_of_others(tmp_path: Path, number: int) -> None:
    """The dead trainer's slots are released when its death is noticed, and once more when the allocation fails.

    Other files are opened in between. They get the numbers of the descriptors that the first release has closed.
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
    assert (rank.slots.slots, rank.slots.used, list((tmp_path / "ckptd-test").iterdir())) == ({}, 0, [])
    for fd in others:
        os.close(fd)
    rank.slots.close()


def test_slots_that_are_replaced_are_released_once_they_are_free(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    first = rank.allocate(2)
    rank.admission.occupy(first[0], (1, 5))
    second = rank.allocate(2)
    assert {slot.name for slot in rank.slots.slots.values()} == {first[0].name, *(slot.name for slot in second)}
    rank.admission.vacate(first[0])
    assert set(rank.slots.slots) == {slot.name for slot in second}
    assert all(slot.released for slot in first)
    rank.slots.close()


def slot(rank: int, name: str) -> Any:
    return SimpleNamespace(name=f"{name}{rank}", owner=("job", 1, rank), header=SimpleNamespace(job="job", rank=rank))


async def test_a_rank_that_gets_its_slot_while_another_waits_does_not_block_the_other() -> None:
    """Slots become free. Before the waiting rank gets its decision, the other rank takes its own slot."""
    owners = [Owner("job", 1, rank, 2) for rank in (0, 1)]
    slots = [slot(rank, name) for rank in (0, 1) for name in "ab"]
    found = SimpleNamespace(slots={one.name: one for one in slots}, of=lambda *identity: [one for one in slots if one.owner == identity])
    admission = Admission(found, {owner.identity: owner for owner in owners}, 1 << 20, lambda _: asyncio.sleep(0))  # type: ignore[arg-type, return-value]
    job = Job("job", attempt=1, world_size=2)
    for name, step in (("a0", 2), ("b0", 3), ("a1", 2)):
        admission.occupy(found.slots[name], (1, step))
    first = asyncio.create_task(admission.acquire(owners[0], job, (1, 4), 0.5))
    while admission._decisions == {}:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    admission.vacate(found.slots["b0"])
    taken: Any = await admission.acquire(owners[1], job, (1, 4), 0.5)
    assert taken is found.slots["b1"]
    admission.occupy(taken, (1, 4))
    job.snapshots[1, 4] = Snapshot("job", 1, 4, "step-00000004.a0001", 2, persist=True)
    assert await first is found.slots["b0"]
