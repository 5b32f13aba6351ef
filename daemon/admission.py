"""Gives slots to ranks: makes their segments, and decides once per step, for all ranks, whether the step gets slots or is skipped.

Keeps the record of which slots are busy and which are outgrown. Knows slots and owners, and nothing of saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ckptd.daemon.catalog import Job, Key, Snapshot
from ckptd.daemon.slots import Slot, Slots
from ckptd.shared.errors import Fenced, NotFound, QuotaExceeded, SharedMemoryFull
from ckptd.shared.lifecycle import SnapshotState
from ckptd.shared.messages import Progress
from ckptd.shared.segment import SegmentHeader


@dataclass(slots=True, eq=False)
class Owner:
    """One rank of one attempt of a job. `notify` is None while its connection is lost."""

    job: str
    attempt: int
    rank: int
    world_size: int
    notify: Callable[[Progress], None] | None = None

    @property
    def identity(self) -> tuple[str, int, int]:
        return (self.job, self.attempt, self.rank)


@dataclass(slots=True, eq=False)
class Decision:
    """One decision for a step. The task returns the reason for skipping the step, or "". A rank that asks again starts a new decision."""

    task: asyncio.Task[str]
    asked: set[int]


_REMEMBERED = 64


def ranks(numbers: list[int]) -> str:
    """Return "rank 2", "ranks 1, 2", or the first eight and the number of the others."""
    shown = ", ".join(str(number) for number in numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) != 1 else ''} {shown}"


class Admission:
    """The slots of all ranks, and the decisions about them.

    `run` runs a blocking call on a worker thread, because the kernel zeroes every page of a new segment. `busy` has the snapshot in each
    busy segment. `noting` has the segments whose seal is being read.
    """

    def __init__(
        self, slots: Slots, owners: dict[tuple[str, int, int], Owner], chunk_size: int, run: Callable[[Callable[[], Slot]], Awaitable[Slot]]
    ) -> None:
        self._slots, self._owners, self._chunk_size, self._run = slots, owners, chunk_size, run
        self._allocating = asyncio.Lock()
        self.busy: dict[str, Key] = {}
        self._outgrown: set[str] = set()  # segments that larger ones have replaced: unlinked once they are free
        self._changed = asyncio.Event()
        self._decisions: dict[tuple[str, Key], Decision] = {}
        self._refused: dict[tuple[str, Key], str] = {}  # the last steps that were skipped, so that a late rank skips them too
        self.noting: set[str] = set()
        self._stuck: dict[str, Key] = {}  # by job, the incomplete snapshot that a decision has waited for in vain

    async def allocate(self, owner: Owner, capacity: int, count: int, node: int, make_room: Callable[[], bool]) -> list[Slot]:
        """Make new segments for a rank and unlink its present ones; busy segments are unlinked once they are free.

        `make_room` is called once for each segment that does not fit. Raises QuotaExceeded, SharedMemoryFull.
        """
        async with self._allocating:
            return await self._allocate(owner, capacity, count, node, make_room)

    async def _allocate(self, owner: Owner, capacity: int, count: int, node: int, make_room: Callable[[], bool]) -> list[Slot]:
        before = self._slots.of(*owner.identity)
        made: list[Slot] = []
        try:
            for number in range(count):
                header = SegmentHeader(
                    job=owner.job, attempt=owner.attempt, rank=owner.rank, world_size=owner.world_size, slot=number,
                    capacity=capacity, chunk_size=self._chunk_size,
                )  # fmt: skip
                made.append(await self._create(header, node, before, make_room))
                if self._owners.get(owner.identity) is not owner:
                    raise Fenced(f"attempt {owner.attempt} of job {owner.job!r} ended while its slots were being made")
        except BaseException:
            for slot in made:
                self._slots.release(slot)
            raise
        for slot in before:
            self._outgrow(slot)
        self.wake()
        return made

    async def _create(self, header: SegmentHeader, node: int, before: list[Slot], make_room: Callable[[], bool]) -> Slot:
        """Make one segment. If it does not fit, first release the rank's idle segments and call `make_room`."""
        try:
            return self._slots.add(await self._run(lambda: self._slots.create(header, node)))
        except (QuotaExceeded, SharedMemoryFull):
            idle = [slot for slot in before if slot.name in self._slots.slots and slot.name not in self.busy]
            for slot in idle:
                self._slots.release(slot)
            if not make_room() and not idle:
                raise
        return self._slots.add(await self._run(lambda: self._slots.create(header, node)))

    def _outgrow(self, slot: Slot) -> None:
        if slot.name in self.busy:
            self._outgrown.add(slot.name)
        elif slot.name in self._slots.slots:
            self._slots.release(slot)

    async def acquire(self, owner: Owner, job: Job, key: Key, wait: float) -> Slot | str:
        """Return a free slot within `wait` seconds, or the reason for skipping the step. The caller then calls `occupy`."""
        if not self._usable(owner):
            raise NotFound("this rank has no slots: allocate some first")
        if owner.world_size > 1 and (job.name, key) in self._refused:
            return self._refused[job.name, key]
        deadline = asyncio.get_running_loop().time() + wait
        while True:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            refusal = await self._may_take(owner, job, key, left)
            if refusal or (slot := self._free_slot(owner)) is not None or left <= 0 or self._owners.get(owner.identity) is not owner:
                return refusal or slot or "every slot is still being saved"
            # The free slot went to an earlier request of this rank, which the rank has given up: wait for the next one.

    async def _may_take(self, owner: Owner, job: Job, key: Key, wait: float) -> str:
        """Wait until the step may have slots. Return "" then, or the reason for skipping the step."""
        if key in job.snapshots:  # another rank has a slot for this step already: only this rank's own slots count
            return await self._decide(job, [owner], wait)
        if not self._blocked(self._local(job, key)):
            self._stuck.pop(job.name, None)
            return ""
        decision = self._decisions.get((job.name, key))
        if decision is None or owner.rank in decision.asked:
            task = asyncio.create_task(self._decide_for_all(job, key, wait))
            decision = self._decisions[job.name, key] = Decision(task, set())
        decision.asked.add(owner.rank)
        refusal = await asyncio.shield(decision.task)
        self._decisions = {k: d for k, d in self._decisions.items() if k[0] != job.name or k[1] >= key}
        return refusal

    def _local(self, job: Job, key: Key) -> list[Owner]:
        return [owner for owner in self._owners.values() if (owner.job, owner.attempt) == (job.name, key[0])]

    async def _decide_for_all(self, job: Job, key: Key, wait: float) -> str:
        """Decide once for all ranks. Return the reason for skipping the step, or ""."""
        refusal = await self._decide(job, self._local(job, key), wait, granted=key)
        if refusal:
            self._refused[job.name, key] = refusal
            while len(self._refused) > _REMEMBERED:
                self._refused.pop(next(iter(self._refused)))
        return refusal

    async def _decide(self, job: Job, owners: list[Owner], wait: float, granted: Key | None = None) -> str:
        """Return the reason if a rank has no free slot after `wait` seconds, else "". A late rank is waited for once, not at every step.

        granted: a rank that has been granted a slot for this step meanwhile is not waited for.
        """
        try:
            async with asyncio.timeout(wait):
                while blocked := self._blocked(owners, granted):
                    if self._stuck.get(job.name) in blocked:
                        return self._why(job, blocked)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return self._why(job, self._blocked(owners, granted))
        self._stuck.pop(job.name, None)
        return ""

    def _blocked(self, owners: list[Owner], granted: Key | None = None) -> list[Key]:
        """Return the snapshots in the slots of owners without a free slot; (attempt, -1) stands for an owner that has no slots yet."""
        keys: set[Key] = set()
        for owner in owners:
            if self._owners.get(owner.identity) is owner and self._free_slot(owner) is None:
                held = {self.busy[slot.name] for slot in self._usable(owner)} or {(owner.attempt, -1)}
                keys |= held if granted not in held else set()
        return sorted(keys)

    def _why(self, job: Job, blocked: list[Key]) -> str:
        for key in blocked:
            snapshot = job.snapshots.get(key)
            if snapshot is not None and snapshot.state is SnapshotState.FILLING and (late := self._late(snapshot)):
                self._stuck[job.name] = key
                return f"{ranks(late)} {'has' if len(late) == 1 else 'have'} not sealed step {key[1]} yet"
        if any(step < 0 for _, step in blocked):
            return "another rank has no slots yet"
        return "every slot is still being saved"

    def _late(self, snapshot: Snapshot) -> list[int]:
        """Return the ranks that have not sealed the snapshot and whose seal is not being read. None if the job has one rank."""
        if snapshot.world_size == 1:
            return []
        under_way = {self._slots.get(name).header.rank for name in self.noting if self.busy.get(name) == snapshot.key}
        return [rank for rank in snapshot.missing if rank not in under_way]

    def _usable(self, owner: Owner) -> list[Slot]:
        return [s for s in self._slots.of(*owner.identity) if s.name not in self._outgrown]

    def _free_slot(self, owner: Owner) -> Slot | None:
        return next((s for s in self._usable(owner) if s.name not in self.busy), None)

    def occupy(self, slot: Slot, key: Key) -> None:
        self.busy[slot.name] = key

    def vacate(self, slot: Slot) -> None:
        """Free a slot for its owner, or unlink it if its owner is gone or has a larger one."""
        self.busy.pop(slot.name, None)
        if slot.name in self._slots.slots and (slot.name in self._outgrown or slot.owner not in self._owners):
            self._outgrown.discard(slot.name)
            self._slots.release(slot)
        self.wake()

    def vacate_snapshot(self, job: str, key: Key) -> None:
        for slot in list(self._slots.slots.values()):
            if slot.header.job == job and self.busy.get(slot.name) == key:
                self.vacate(slot)

    def drop_idle(self, owner: Owner) -> None:
        """Unlink the slots of an owner that is gone, except those that hold a snapshot."""
        for slot in self._slots.of(*owner.identity):
            if slot.name not in self.busy:
                self._slots.release(slot)

    def wake(self) -> None:
        self._changed.set()
