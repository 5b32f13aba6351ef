"""Keeps copies of the slots of other nodes in the memory of this one, and has the ranks
of this node copy their slots to their peers.

The agents carry the bytes, and verify each chunk as it arrives. The daemon makes the
segments for them within its quota, and decides which copy may be overwritten.
`peer_replicas.py` has the decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from ckptd.daemon import log_events
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.config import REPLICA_SLOTS
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job import peer_replicas
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import Key, RankSeal, SlotContents, Snapshot
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.shared import names
from ckptd.shared.errors import (
    CkptdError,
    IntegrityError,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    SharedMemoryFull,
    StorageError,
)
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.formats.segment import SegmentHeader, SlotState
from ckptd.shared.system import machine
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.units import rank_list
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import Event

log = logging.getLogger("ckptd.peers")

WAIT_SECONDS = 60.0
"""Seconds for which a rank that wants to receive a copy waits for a segment. The node
that sends may have heard an answer from the board before this one.
"""


class PeerCopies:
    """The peer replicas of all jobs of one daemon.

    `run` runs a blocking call on a worker thread, because the kernel zeroes every page
    of a new segment. `read` reads and checks the documents of a sealed slot.
    """

    def __init__(
        self,
        catalog: Catalog,
        slots: Slots,
        steps: Steps,
        run: Callable[[Callable[[], Slot]], Awaitable[Slot]],
        read: Callable[[int, SegmentHeader], Awaitable[tuple[SealedSlot, SlotContents]]],
    ) -> None:
        self._catalog, self._slots = catalog, slots
        self._steps = steps
        self._run, self._read = run, read
        self._making = asyncio.Lock()

    # -- this node copies its slots to its peers

    def follow(self, job: Job, before: Answer) -> None:
        """Tell the ranks what an answer from the board says of the copies.

        before: the answer before that one.
        """
        answer = job.answer
        if answer.alone and not before.alone:
            log_events.REPLICAS_OFF.log(
                log, "job %s: no further copies are made in the memory of other nodes: %s",
                job.name, answer.alone, job=job.name, attempt=job.attempt, reason=answer.alone,
            )  # fmt: skip
        news = _news(job, answer)
        if news != _news(job, before):
            job.ranks.tell(news)

    def tell(self, owner: Owner) -> None:
        """Tell a rank that has just begun or resumed its attempt how far the copies are."""
        job = self._catalog.job(owner.job)
        news = _news(job, job.answer)
        if owner.notify is not None and news != _news(job, Answer()):
            owner.notify(news)

    def failed(self, owner: Owner, attempt: int, reason: str) -> None:
        """Record why a rank could not copy its slot, or receive a copy. The nodes make no
        more copies in this attempt.
        """
        job = self._catalog.job(owner.job)
        if attempt == job.attempt and not job.alone:
            job.alone = f"rank {owner.rank} on {machine.host()}: {reason}"
            self._steps.show(job)

    # -- this node receives copies

    async def host(self, owner: Owner, request: m.Host) -> Slot | str:
        """Return a segment for a copy of the slot of a rank of another node, or the
        reason why there is none.

        Waits up to `WAIT_SECONDS` for a segment. Raises InvalidRequest if the rank is on
        this node or does not exist.
        """
        job, rank, key = self._catalog.job(owner.job), request.rank, (request.attempt, request.step)
        if job.node is None or rank in job.ranks_here or rank >= job.world_size:
            raise InvalidRequest(
                f"rank {rank} cannot have a copy on this node: expected one of the "
                f"{job.world_size} ranks of a job of several nodes that is on another node"
            )
        if request.attempt != job.attempt:
            return f"attempt {request.attempt} is not the newest one here, {job.attempt}"
        for segment, (_, of) in list(job.receiving.items()):
            if of == rank:  # a rank sends one copy at a time, so it has given this one up
                del job.receiving[segment]
        until = asyncio.get_running_loop().time() + WAIT_SECONDS
        try:
            while True:
                seen = job.changed.count
                if (slot := await self._segment(job, request)) is not None:
                    break
                async with asyncio.timeout_at(until):
                    await job.changed.news_after(seen)
        except TimeoutError:
            held = sorted(key[1] for key, _ in self._used(job, rank).values())
            return (
                f"both segments for copies of rank {rank} are needed: they hold "
                f"{' and '.join(f'step {step}' for step in held)}"
            )
        except (QuotaExceeded, SharedMemoryFull, StorageError) as error:
            return str(error)
        if request.attempt != job.attempt or not job.ranks.is_here(owner):
            self._slots.release(slot)
            return f"attempt {request.attempt} has ended"
        job.receiving[slot.name] = (key, rank)
        failpoint("replica.hosted")
        return slot

    def _used(self, job: Job, rank: int) -> dict[str, tuple[Key, int]]:
        return peer_replicas.segments(job, job.attempt, rank)

    async def _segment(self, job: Job, request: m.Host) -> Slot | None:
        """Return a segment for a copy, or None if all hold copies that are needed."""
        async with self._making:
            mine = [
                slot
                for slot in self._slots.of(job.name, job.attempt, request.rank)
                if slot.header.peer_replica
            ]
            used = self._used(job, request.rank)
            for _, place in sorted((used[s.name][0], used[s.name]) for s in mine if s.name in used):
                replica = job.peer_replicas.get(place)
                if replica is not None and peer_replicas.is_needless(job, replica):
                    self._forget(job, replica)
                    break
            used = self._used(job, request.rank)
            free = [slot for slot in mine if slot.name not in used]
            for slot in free:
                if (
                    slot.header.capacity >= request.capacity
                    and slot.header.chunk_size == request.chunk_size
                ):
                    return slot
                self._slots.release(slot)
                mine.remove(slot)
            if len(mine) >= REPLICA_SLOTS:
                return None
            header = SegmentHeader(
                job=job.name, attempt=job.attempt, rank=request.rank, world_size=job.world_size,
                slot=min(set(range(REPLICA_SLOTS)).difference(s.header.slot for s in mine)),
                capacity=request.capacity, chunk_size=request.chunk_size, peer_replica=True,
            )  # fmt: skip
            try:
                header = SegmentHeader.decode(header.encode())
            except IntegrityError as error:
                raise InvalidRequest(f"no segment can be made for this copy: {error}") from None
            return self._slots.add(await self._run(lambda: self._slots.create(header)))

    async def hosted(self, owner: Owner, segment: str) -> None:
        """Record that a copy is whole. Idempotent.

        Raises NotFound if no copy is received into the segment, IntegrityError if it is
        not sealed or its documents are not sound. It is then free.
        """
        job = self._catalog.job(owner.job)
        slot = self._slots.get(segment)
        received = job.receiving.get(segment)
        if received is None:
            return self._check_recorded(job, slot)
        key, rank = received
        try:
            header = slot.refresh()
            if (header.state, header.attempt, header.step) != (SlotState.SEALED, *key):
                raise IntegrityError(
                    f"segment {segment[:8]} does not hold a sealed copy of step {key[1]} of rank "
                    f"{rank}"
                )
            sealed = await self._read_copy(slot)
            # Meanwhile the same report may have come again, or another copy may be received.
            if job.receiving.get(segment) is not received:
                return self._check_recorded(job, slot)
            self._record(job, slot, sealed)
        finally:
            if job.receiving.get(segment) is received:
                del job.receiving[segment]

    def _check_recorded(self, job: Job, slot: Slot) -> None:
        """Raise NotFound unless the copy in a segment has been recorded."""
        _, leader = self._used(job, slot.header.rank).get(slot.name, (None, -1))
        if leader < 0:
            raise NotFound(f"no copy is received into segment {slot.name[:8]}")

    async def _read_copy(self, slot: Slot) -> SealedSlot:
        with slot.reading() as fd:
            return (await self._read(fd, slot.header))[0]

    def _record(self, job: Job, slot: Slot, sealed: SealedSlot) -> None:
        """Add a sealed copy to the peer replica that it is part of.

        Raises IntegrityError if it is not one.
        """
        header = sealed.header
        assert header.step is not None
        node, request = sealed.request.node, sealed.request
        problem = "" if node is None else node.problem(header.rank, header.world_size)
        if node is None or problem or sealed.crcs is None:
            raise IntegrityError(
                f"the copy of rank {header.rank} in segment {slot.name[:8]} is not sound: "
                f"{problem or 'it has no checksums, or no node'}"
            )
        user_tag = names.check_user_tag(request.tag) if request.tag else None
        tag = names.tag_directory(header.step, user_tag, header.attempt)
        replica = job.peer_replicas.setdefault(
            ((header.attempt, header.step), node.ranks[0]),
            Snapshot(
                job.name, header.attempt, header.step, tag, header.world_size, persist=False,
                node=node, peer_replica=True,
            ),
        )  # fmt: skip
        if replica.node != node or replica.tag != tag:
            raise IntegrityError(
                f"the copy of rank {header.rank} in segment {slot.name[:8]} is of another node or "
                f"tag than those of {rank_list(sorted(replica.seals))}"
            )
        replica.seals[header.rank] = RankSeal(
            header.rank, slot.name, header.generation, header.signature, sealed.plan.global_plan,
            persist=False, node=node, checks=list(map(ChunkCheck, sealed.crcs)),
        )  # fmt: skip
        if replica.complete and not replica.in_memory:
            replica.move(Event.SEAL)
            failpoint("replica.whole")
        self._steps.show(job)

    def give_back(self, owner: Owner, segment: str) -> None:
        """Take back a segment into which no copy will be received."""
        job = self._catalog.job(owner.job)
        job.receiving.pop(segment, None)
        job.changed.notify()

    # -- memory is freed

    def adopt(self, slot: Slot) -> None:
        """Adopt a segment for copies that an earlier daemon has made. A trainer of the
        newest attempt may still be receiving into it.
        """
        header, job = slot.header, self._catalog.job(slot.header.job)
        if header.state is SlotState.FILLING and header.step is not None:
            job.receiving[slot.name] = ((header.attempt, header.step), header.rank)

    async def record_adopted(self, slots: list[Slot]) -> None:
        """Record the copies in adopted segments, and release the others."""
        for slot in slots:
            header, job = slot.header, self._catalog.job(slot.header.job)
            if header.state is SlotState.SEALED:
                try:
                    self._record(job, slot, await self._read_copy(slot))
                except StorageError as error:
                    log.error("%r is left alone: %s", slot, error)
                except CkptdError as error:
                    log.warning("%r removed: %s", slot, error)
                    self._slots.release(slot)
            elif slot.name not in job.receiving or header.attempt < job.attempt:
                job.receiving.pop(slot.name, None)
                self._slots.release(slot)

    def end_attempt(self, job: Job) -> None:
        """Forget the copies that the ranks of the last attempt were receiving, the peer
        replicas that are not whole, and the reason why copies were off.
        """
        job.alone = ""
        job.receiving.clear()
        self.free(job, peer_replicas.unfinished(job))

    def settle(self, job: Job) -> None:
        """Free the peer replicas that nothing needs any more: those of earlier attempts,
        and all once the ranks of this node have closed their agents. Once no rank is left
        on this node, free those that are not whole and the segments without a copy, too.
        """
        self.free(job, peer_replicas.unfinished(job))
        self.free(job, peer_replicas.outlived(job))
        if job.ranks.are_closed:
            self.free(job, peer_replicas.needless(job))

    def free(self, job: Job, replicas: Iterable[Snapshot]) -> bool:
        """Free peer replicas that nothing reads, and release the segments that are not
        used any more. Return True if there were any replicas.
        """
        freed = [self._forget(job, replica) for replica in replicas]
        self._release_unused(job)
        return bool(freed)

    @staticmethod
    def _forget(job: Job, replica: Snapshot) -> None:
        assert replica.node is not None
        del job.peer_replicas[replica.key, replica.node.ranks[0]]
        if replica.in_memory:
            replica.move(Event.RELEASE)

    def _release_unused(self, job: Job) -> None:
        """Release the segments that hold and receive no copy, if their attempt or the
        work of the ranks of this node is over.
        """
        if not job.ranks.owners:
            job.receiving.clear()  # a rank that ends in the middle of a copy gives nothing back
        used = {*job.receiving}
        for replica in job.peer_replicas.values():
            used.update(seal.segment for seal in replica.seals.values())
        for slot in list(self._slots.slots.values()):
            header = slot.header
            over = header.attempt < job.attempt or not job.ranks.owners
            if header.peer_replica and header.job == job.name and over and slot.name not in used:
                self._slots.release(slot)


def _news(job: Job, answer: Answer) -> m.PeerReplicas:
    return m.PeerReplicas(
        re=0,
        attempt=job.attempt,
        replicating=answer.replicating,
        replicated=answer.replicated,
        alone=answer.alone,
    )
