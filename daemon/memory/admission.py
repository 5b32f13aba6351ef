"""Gives slots to ranks: makes their segments, and decides once per step, for all ranks,
whether the step gets slots or is skipped.

This is the waiting part of a grant: which steps block which ranks is decided in
`decisions.py`, and `Job.steps` says which segment is in which step. Nothing here knows
of saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ckptd.daemon.job import decisions as d
from ckptd.daemon.job.catalog import Job, SlotDecision
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import Key
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.shared.errors import Fenced, NotFound, QuotaExceeded, SharedMemoryFull, from_wire
from ckptd.shared.formats.segment import SegmentHeader


class Admission:
    """The slots of all ranks.

    `run` runs a blocking call on a worker thread, because the kernel zeroes every page
    of a new segment.
    """

    def __init__(
        self, slots: Slots, chunk_size: int, run: Callable[[Callable[[], Slot]], Awaitable[Slot]]
    ) -> None:
        self._slots = slots
        self._chunk_size = chunk_size
        self._run = run
        self._allocating = asyncio.Lock()

    # -- segments

    async def allocate(
        self,
        owner: Owner,
        job: Job,
        capacity: int,
        count: int,
        node: int,
        free_older: Callable[[], bool],
    ) -> list[Slot]:
        """Make new segments for a rank and unlink its present ones; those that are in a
        step are unlinked once they are free.

        `free_older` is called once for each segment that does not fit. Raises
        QuotaExceeded, SharedMemoryFull, Fenced.
        """
        async with self._allocating:
            before = self._slots.of(*owner.identity)
            made: list[Slot] = []
            try:
                for number in range(count):
                    header = SegmentHeader(
                        job=owner.job, attempt=owner.attempt, rank=owner.rank,
                        world_size=owner.world_size, slot=number, capacity=capacity,
                        chunk_size=self._chunk_size,
                    )  # fmt: skip
                    made.append(await self._create(header, node, job, before, free_older))
                    if not job.ranks.is_here(owner):
                        raise Fenced(
                            f"attempt {owner.attempt} of job {owner.job!r} ended while its slots "
                            f"were being made"
                        )
            except BaseException:
                for slot in made:
                    self._slots.release(slot)
                raise
            for slot in before:
                slot.outgrown = True
                if job.step_in(slot.name) is None:
                    self._slots.release(slot)
            job.changed.notify()
            return made

    async def _create(
        self,
        header: SegmentHeader,
        node: int,
        job: Job,
        before: list[Slot],
        free_older: Callable[[], bool],
    ) -> Slot:
        """Make one segment.

        If it does not fit, release the rank's free segments, call `free_older`, and as
        a last resort use the disk.
        """
        try:
            return self._slots.add(await self._run(lambda: self._slots.create(header, node)))
        except (QuotaExceeded, SharedMemoryFull) as error:
            reason = error
        free = [slot for slot in before if not slot.released and job.step_in(slot.name) is None]
        for slot in free:
            self._slots.release(slot)
        if free_older() or free:
            try:
                return self._slots.add(await self._run(lambda: self._slots.create(header, node)))
            except (QuotaExceeded, SharedMemoryFull) as error:
                reason = error
        if not self._slots.may_overflow(reason):
            raise reason
        return self._slots.add(await self._run(lambda: self._slots.create_on_disk(header)))

    # -- grants

    async def acquire(self, owner: Owner, job: Job, key: Key, wait: float) -> Slot | str:
        """Return a free slot within `wait` seconds, or the reason for skipping the
        step. The caller must give the slot to the step at once.

        Raises NotFound if the rank has no slots, and the error of the step if the step
        fails in the meantime.
        """
        if not self._usable(owner):
            raise NotFound("this rank has no slots: send Allocate before Acquire")
        if owner.world_size > 1 and (refusal := job.step(key).refusal):
            return refusal
        deadline = asyncio.get_running_loop().time() + wait
        while True:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            refusal = await self._may_take(owner, job, key, left)
            if (failure := job.step(key).failure) is not None:
                raise from_wire(*failure)
            last = job.stored.get(owner.rank)
            # The slot of the last checkpoint comes last, because the next deltas need it.
            free = min(
                (slot for slot in self._usable(owner) if job.step_in(slot.name) is None),
                key=lambda slot: last is not None and slot.name == last.segment,
                default=None,
            )
            if refusal or free is not None or left <= 0 or not job.ranks.is_here(owner):
                return refusal or free or "every slot is still being saved"
            # The free slot went to an earlier request of this rank, which the rank no
            # longer waits for: wait for the next one.

    async def _may_take(self, owner: Owner, job: Job, key: Key, wait: float) -> str:
        """Wait until the step may have slots.

        Return "" then, or the reason for skipping the step.
        """
        # Another rank has a slot for this step already: only this rank's own slots
        # count.
        if job.snapshot(key) is not None:
            return await self._decide(job, key, [owner], wait)
        if not self._blocking(job, key[0], self._local(job, key)):
            job.stuck = None
            return ""
        step = job.step(key)
        if step.decision is None or owner.rank in step.decision.asked:
            step.decision = SlotDecision(asyncio.create_task(self._decide_for_all(job, key, wait)))
        step.decision.asked.add(owner.rank)
        return await asyncio.shield(step.decision.task)

    @staticmethod
    def _local(job: Job, key: Key) -> list[Owner]:
        return [owner for owner in job.ranks.owners.values() if owner.attempt == key[0]]

    async def _decide_for_all(self, job: Job, key: Key, wait: float) -> str:
        """Decide once for all ranks.

        Return the reason for skipping the step, or "". Late ranks skip the step for the
        same reason.
        """
        refusal = await self._decide(job, key, self._local(job, key), wait, granted=key)
        if refusal and job.world_size > 1:
            job.step(key).refusal = refusal
        return refusal

    async def _decide(
        self, job: Job, key: Key, owners: list[Owner], wait: float, granted: Key | None = None
    ) -> str:
        """Return why the step is skipped, if a rank has no free slot after `wait`
        seconds, else "". A late rank is waited for once.

        Returns "" at once when the step fails, because a rank that cannot take the step
        may never have a slot.

        granted: the step that is decided. A rank that has been granted a slot for it
        meanwhile is not waited for.
        """

        def blocking() -> list[Key]:
            failed = job.step(key).failure is not None
            return [] if failed else self._blocking(job, key[0], owners, granted)

        await job.changed.wait_until(
            lambda: not (steps := blocking()) or job.stuck in steps, timeout=wait
        )
        if steps := blocking():
            return self._why(job, steps)
        job.stuck = None
        return ""

    def _blocking(
        self, job: Job, attempt: int, owners: list[Owner], granted: Key | None = None
    ) -> list[Key]:
        """Return the steps that keep a slot from one of these owners.

        Owners that have left do not count.
        """
        usable = {
            owner.rank: [slot.name for slot in self._usable(owner)]
            for owner in owners
            if job.ranks.is_here(owner)
        }
        return d.blocking(job, attempt, usable, granted)

    @staticmethod
    def _why(job: Job, blocking: list[Key]) -> str:
        reason, stuck = d.why_no_slot(job, blocking)
        job.stuck = stuck or job.stuck
        return reason

    def _usable(self, owner: Owner) -> list[Slot]:
        return [slot for slot in self._slots.of(*owner.identity) if not slot.outgrown]
