"""Reads the seals of slots, journals them, and adds them to their snapshots.

A seal counts once the header of the slot says so, whether or not the trainer has
reported it. The daemon therefore also reads seals that nobody has reported, such as
those of a dead trainer. A seal is accepted only if its documents are sound, and the
last seal of a step only if the documents of all ranks of this node fit together.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job import decisions as d
from ckptd.daemon.job.catalog import Catalog, Step
from ckptd.daemon.job.snapshot import RankSeal, SlotContents, Snapshot
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import Journal, JournalBroken
from ckptd.daemon.memory.slots import Slot
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError, StorageError
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.formats.segment import SegmentHeader, SlotState
from ckptd.shared.system.failpoints import failpoint

log = logging.getLogger("ckptd.seals")


class SealIntake:
    """The intake of one daemon.

    A seal may be read by several tasks at once; the first that has read it records it.
    """

    def __init__(
        self,
        catalog: Catalog,
        steps: Steps,
        journal: Journal,
        read: Callable[[int, SegmentHeader], Awaitable[tuple[SealedSlot, SlotContents]]],
        compare: Callable[[Mapping[int, SlotContents], int], Awaitable[None]],
    ) -> None:
        """Make the intake.

        read: reads and checks the documents of a sealed slot, given its descriptor.
        compare: compares the slots of all ranks of this node, given the number of ranks
        of the job. Both work on a worker thread.
        """
        self._catalog = catalog
        self._steps = steps
        self._journal = journal
        self._read_documents, self._compare = read, compare

    async def record(self, slot: Slot, *, adopted: bool = False) -> Snapshot:
        """Record the seal of a slot whose header has just been read and says sealed.

        Return the snapshot.

        If the trainer has sealed the slot with checksums, they count. If the slot is
        `adopted` from an earlier daemon, its memory may have changed long since, so
        `Saver.check` compares it with the checksums.

        If the seal cannot be accepted, the step fails on all ranks, the slot is freed,
        and the reason is raised. If the slot cannot be read now, StorageError is
        raised, and it stays as it is: the error of a disk may pass.
        """
        header = slot.header
        assert header.step is not None
        job = self._catalog.job(header.job)
        step = job.occupy(slot.name, header.rank, (header.attempt, header.step))
        try:
            sealed, contents, tag = await self._read(slot, step, header)
            await self._compare_ranks(step, header, sealed, contents)
        except StorageError:
            raise
        except CkptdError as error:
            if recorded := step.sealed_by(header.rank):
                return recorded
            self._steps.perform(job, d.rejected(step, slot.name, error))
            raise
        if recorded := step.sealed_by(header.rank):  # another task has read the same seal first
            return recorded
        self._steps.perform(job, d.seal_read(job, step, header.rank, slot.name, tag))
        persist = sealed.request.persist
        node = sealed.request.node
        if node is not None and (problem := node.problem(header.rank, header.world_size)):
            self._steps.perform(
                job,
                d.rejected(
                    step,
                    slot.name,
                    IntegrityError(
                        f"the seal has a wrong list of the ranks of its node: {problem}"
                    ),
                ),
            )
        # An earlier daemon began the attempt.
        if job.node is None and node is not None and header.attempt == job.attempt:
            job.node = node
        snapshot = step.snapshot = step.snapshot or Snapshot(
            job.name, *step.key, tag, header.world_size, persist, node=node
        )
        snapshot.persist = snapshot.persist and persist
        snapshot.replicate |= sealed.request.replicate
        self._journal_seal(header, tag, slot.name, persist=persist)
        seal = RankSeal(
            header.rank, slot.name, header.generation, header.signature, sealed.plan.global_plan,
            persist, node=node, replicas=sealed.request.replicas, contents=contents,
        )  # fmt: skip
        if sealed.crcs is not None and not adopted:
            seal.checks = list(map(ChunkCheck, sealed.crcs))
        self._steps.perform(job, d.seal_journaled(step, seal))
        snapshot.seals[header.rank] = seal
        if snapshot.complete:
            for each in snapshot.seals.values():
                each.contents = None  # a large plan is kept only while it is needed
        self._steps.perform(job, d.sealed(job, step))
        self._steps.release_replaced(job)
        return snapshot

    async def record_unreported(self, slot: Slot) -> bool:
        """Record the seal of a slot if its header says sealed and the seal is not
        recorded yet.

        Return False if the slot is in no step, is not sealed, or its seal is damaged.
        Raises StorageError if it cannot be read now.
        """
        if slot.released:  # by a seal that was recorded meanwhile
            return False
        try:
            header = slot.refresh()
            job = self._catalog.job(header.job)
            if (
                header.state is not SlotState.SEALED
                or header.step is None
                or job.step_in(slot.name) is None
            ):
                return False
            snapshot = job.snapshot((header.attempt, header.step))
            if snapshot is None or header.rank not in snapshot.seals:
                await self.record(slot)
        except (JournalBroken, StorageError):
            raise
        except CkptdError as error:
            log.warning("%r: %s", slot, error)
            return False
        return True

    async def _compare_ranks(
        self, step: Step, header: SegmentHeader, sealed: SealedSlot, contents: SlotContents
    ) -> None:
        """Compare the slots of all ranks of this node if this seal is the last one.

        Raises IntegrityError if they do not fit together.
        """
        others = (
            {}
            if step.snapshot is None
            else {rank: seal.contents for rank, seal in step.snapshot.seals.items()}
        )
        ranks = (
            range(header.world_size) if sealed.request.node is None else sealed.request.node.ranks
        )
        known = {
            rank: found
            for rank, found in {**others, header.rank: contents}.items()
            if found is not None
        }
        if step.failure is None and len(known) == len(ranks):
            await self._compare(known, header.world_size)

    async def _read(
        self, slot: Slot, step: Step, header: SegmentHeader
    ) -> tuple[SealedSlot, SlotContents, str]:
        """Return the sealed slot, its contents, and the tag that it gives the step.

        Raises NotFound, IntegrityError, InvalidName, StorageError.
        """
        step.reading.append(slot.name)
        try:
            with slot.reading() as fd:
                sealed, contents = await self._read_documents(fd, header)
            user_tag = names.check_user_tag(sealed.request.tag) if sealed.request.tag else None
            return sealed, contents, names.tag_directory(step.number, user_tag, step.attempt)
        finally:
            step.reading.remove(slot.name)

    def _journal_seal(
        self, header: SegmentHeader, tag: str, segment: str, *, persist: bool
    ) -> None:
        """Journal a seal, without waiting for the record: the header of the slot is the
        truth, and memory does not wait for the disk.
        """
        assert header.step is not None
        record = r.RankSealed(
            job=header.job, attempt=header.attempt, step=header.step, rank=header.rank,
            world_size=header.world_size, tag=tag, segment=segment, generation=header.generation,
            persist=persist,
        )  # fmt: skip
        self._journal.post(record, lambda: failpoint("seal.journaled"))
