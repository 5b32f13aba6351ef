"""Saves sealed snapshots as committed checkpoints, and owns the order of operations on
storage.

The order of a save must not change: journal the intent, write the parts, compare them
with the checksums of the slots, make the parts durable, journal them, publish the
manifest, journal the commit, tell the ranks, update `newest`, apply retention. The
checksums of slots that were sealed without them are computed at once, while the parts
are being written. A job has one save at a time, and saves wait for their turn in the
order of the seals. On several nodes, a save begins once all nodes hold the step, and
`joint.py` commits it. Each failure is recorded in `Snapshot.reason`, sent to the ranks
as a Progress message, and counted. The copy in memory stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace

from ckptd.daemon import log_events
from ckptd.daemon.chunks.governor import Governor
from ckptd.daemon.chunks.seal_check import SlotChecksums
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.durations import SAVES, STALLS, Durations
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.snapshot import SaveProgress, Snapshot
from ckptd.daemon.journal.journal import JournalBroken
from ckptd.daemon.memory.slots import Slots
from ckptd.daemon.root.claims import Claims
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.saving.joint import Abandoned, Joint, Undecided
from ckptd.daemon.saving.part_saver import PartSaver
from ckptd.daemon.tasks import watched
from ckptd.shared.errors import CkptdError, IntegrityError, InternalError, StorageError
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Url
from ckptd.shared.units import count_text, size_text
from ckptd.shared.wire.lifecycle import Event, SnapshotState

log = logging.getLogger("ckptd.saver")


class Saver:
    """The saver of one daemon.

    `start` begins a save. A save that fails does not raise: it is reported to `events`.

    A JournalBroken is not reported, because the journal itself ends the daemon.
    `saves`: how long successful saves have taken. `stalls`: for how long snapshots have
    held the training of each rank. `front`: the stage if the daemon has one, and
    otherwise the root. `root`: the root, in which jobs of several nodes are saved.
    """

    def __init__(
        self,
        config: Config,
        slots: Slots,
        front: Destination,
        root: Destination,
        claims: Claims,
        events: Events,
    ) -> None:
        self._config = config
        self._catalog = front.catalog
        self._slots = slots
        self._claims, self._events = claims, events
        self.front, self.root = front, root
        self.joint = Joint(
            root,
            config.node_timeout,
            remote=isinstance(config.root, Url),
            stopping=lambda: self.stopping,
        )
        self._checksums = SlotChecksums(slots, front.pipeline)
        # Once this is True, saves no longer wait for other nodes to seal a step.
        self.stopping = False
        self._tasks: dict[Snapshot, asyncio.Task[None]] = {}
        self._refusals: dict[Snapshot, asyncio.Task[None]] = {}
        # The attempts of several nodes whose lost steps are reported.
        self._reported: set[tuple[str, int]] = set()
        self.counters = front.counters
        self.saves, self.stalls = Durations(SAVES), Durations(STALLS)
        self._governors: dict[str, Governor] = {}
        self._parts = {
            place: PartSaver(config, slots, place, self.governor) for place in (front, root)
        }

    @property
    def busy(self) -> bool:
        return bool(self._tasks or self._refusals)

    def governor(self, job: str) -> Governor:
        """Return the governor of the saves of a job."""
        return self._governors.setdefault(job, Governor(self.front.pipeline.writers))

    def _destination(self, snapshot: Snapshot) -> Destination:
        return self.front if snapshot.node is None else self.root

    async def check(self, snapshot: Snapshot) -> None:
        """Check the slots of a sealed snapshot, as `SlotChecksums.check` does."""
        stored = self._destination(snapshot).catalog.job(snapshot.job).stored
        await self._checksums.check(snapshot, stored if self._config.link_unchanged else {})

    def start(self, snapshot: Snapshot) -> asyncio.Task[None]:
        """Return the task that checks a sealed snapshot and, if it is to persist, saves
        it. Start the task unless it is running.
        """
        task = self._tasks.get(snapshot)
        if task is None or task.done():
            if (refusal := self._refusals.pop(snapshot, None)) is not None:
                refusal.cancel()
            hold = ExitStack()
            # Now, and not when the task first runs: a newer seal could release the
            # slots in between.
            hold.enter_context(snapshot.held())
            task = self._tasks[snapshot] = watched(
                self._run(snapshot, hold, time.monotonic()), f"saving {snapshot.job}/{snapshot.tag}"
            )
            task.add_done_callback(lambda done: self._done(snapshot, hold, done))
        return task

    def _done(self, snapshot: Snapshot, hold: ExitStack, task: asyncio.Task[None]) -> None:
        hold.close()
        if self._tasks.get(snapshot) is task:
            del self._tasks[snapshot]
        self._events.settled(self._catalog.job(snapshot.job))

    async def wait_idle(self, snapshot: Snapshot) -> None:
        """Wait until no save of this snapshot is running."""
        while snapshot in self._tasks:
            await asyncio.wait([self._tasks[snapshot]])

    def stop_waiting(self) -> None:
        """Save the steps of several nodes that wait for other nodes at once, because
        the daemon ends.
        """
        self.stopping = True
        for job in self._catalog.jobs.values():
            job.changed.notify()

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _run(self, snapshot: Snapshot, hold: ExitStack, sealed: float) -> None:
        """Check and save a snapshot whose last rank sealed it at the time `sealed` of
        the monotonic clock.
        """
        job = self._catalog.job(snapshot.job)
        try:
            with hold:
                checking = asyncio.ensure_future(self.check(snapshot))
                if not snapshot.persist:
                    # Meanwhile the trainer may die, and then the snapshot is to be
                    # saved after all.
                    await asyncio.wait([checking])
                # If not, no await follows, unless the check has failed: no later death
                # goes unnoticed.
                if snapshot.persist:
                    try:
                        await self._persist(job, snapshot, sealed, checking)
                    finally:
                        await asyncio.gather(checking, return_exceptions=True)  # it reads the slots
                checking.result()
            if snapshot.state is SnapshotState.DURABLE:
                self._events.settled(job)
            if snapshot.state is SnapshotState.DURABLE and (
                snapshot.node is None or (snapshot.node.leads and not snapshot.peer_replica)
            ):
                await self._destination(snapshot).retain(snapshot.job)
        except JournalBroken:
            pass
        except Exception as error:
            await self._fail(job, snapshot, error)

    async def _persist(
        self, job: Job, snapshot: Snapshot, sealed: float, checking: asyncio.Future[None]
    ) -> None:
        """Save a snapshot unless it is durable, and wait for the outcome on all nodes.

        `checking` checks its slots meanwhile.
        """
        if job.is_durable(*snapshot.key):
            return
        if snapshot.node is not None:
            await asyncio.shield(checking)
            await self._until_all_hold(job, snapshot)
        destination = self._destination(snapshot)
        await destination.ready(job)
        async with destination.locks[snapshot.job]:
            await self._save(job, snapshot, sealed, checking)
        if snapshot.node is not None and snapshot.state is SnapshotState.WRITTEN:
            await self.joint.finish(job, snapshot)
        if snapshot.state is SnapshotState.DURABLE:
            self._count(snapshot, "persisted")
            self._report_lost(job, snapshot)

    def _count(self, snapshot: Snapshot, outcome: str) -> None:
        """Count the outcome of a save, "persisted" or "failed".

        A snapshot that is saved in a later try moves to the other counter. The counter
        `recounted_...` has those that have moved away: the sum of both never falls.
        """
        if outcome == snapshot.counted or snapshot.peer_replica:
            return
        if snapshot.counted:
            self.counters[snapshot.counted] -= 1
            self.counters[f"recounted_{snapshot.counted}"] += 1
        snapshot.counted = outcome
        self.counters[outcome] += 1
        if outcome == "persisted" and snapshot.unasked:
            self.counters["saved_unasked"] += 1
            log.info("snapshot %s/%s: saved unasked", snapshot.job, snapshot.directory)

    async def _until_all_hold(self, job: Job, snapshot: Snapshot) -> None:
        """Wait until all nodes hold a step, or until that can no longer be learned:
        then the save itself finds out, on storage.

        Raises the reason if another node will never seal the step.
        """
        self._events.settled(job)  # the checksums are known now, so the step may go on the board
        if not await job.changed.wait_until(
            lambda: self.stopping or job.may_save(snapshot), self._config.rank_timeout
        ):
            log.warning(
                "%s/%s: not all nodes are known to hold it after %g s: it is saved nevertheless",
                snapshot.job, snapshot.tag, self._config.rank_timeout,
            )  # fmt: skip

    async def _save(
        self, job: Job, snapshot: Snapshot, sealed_at: float, checking: asyncio.Future[None]
    ) -> None:
        """Save a snapshot whose slots `checking` checks meanwhile.

        Raises what `checking` raises, and the errors of its parts.
        """
        begun = time.monotonic()
        if checking.done():
            checking.result()
        destination = self._destination(snapshot)
        if destination.served is not None:
            await destination.served.check_before_save()
        await self._claims.claimed(job, snapshot.attempt)
        if snapshot.node is not None and not await self._needs_parts(job, snapshot):
            return
        snapshot.move(Event.WRITE)
        # The last document of each slot.
        used = [self._slots.get(seal.segment).header.values for seal in snapshot.seals.values()]
        snapshot.progress = SaveProgress(
            sum(values.offset + values.length for values in used), begun
        )
        governor = self.governor(job.name)
        costs = [seal.cost for seal in snapshot.seals.values() if seal.cost is not None]
        governor.observe(costs)
        cost = governor.cost if costs else None
        saved = await self._parts[destination].save(snapshot, checking)
        documents = [document for document, _ in saved]
        snapshot.move(Event.WROTE)
        if snapshot.node is None:
            await destination.committer.commit(snapshot, documents)
        else:
            await self.joint.deliver(job, snapshot, documents)
        if not snapshot.peer_replica:
            destination.catalog.job(job.name).stored = {
                entry.rank: stored for (entry, _, _), stored in saved
            }
        seconds = time.monotonic() - begun
        self.saves.add(seconds)
        entries = [entry for entry, _, _ in documents]
        raw, written, linked = (
            sum(sizes)
            for sizes in zip(
                *((e.raw_bytes, e.new_bytes, e.linked_bytes) for e in entries), strict=True
            )
        )
        parts, chain = [last.part for _, last in saved], max(e.chain for e in entries)
        chunks, deltas = sum(len(p.chunks) for p in parts), sum(p.deltas for p in parts)
        held = max(seal.training_held for seal in snapshot.seals.values())
        governor.saved(snapshot.step, sealed_at, seconds, held)
        log_events.SAVE_DONE.log(
            log,
            "saved %s/%s: %s as %s (%.0f %%)%s%s%s, %s after %.2f s, %s/s",
            snapshot.job, snapshot.directory, size_text(raw), size_text(written),
            100 * written / max(raw, 1),
            f" and {size_text(linked)} in files of older checkpoints" if linked else "",
            f", {deltas} of {count_text(chunks, 'chunk')} as deltas, chain {chain}"
            if deltas else "",
            f", training held {held:.3f} "
            f"s" if held else "", "durable" if snapshot.node is None else "delivered",
            time.monotonic() - sealed_at, size_text(raw / max(seconds, 1e-6)),
            job=snapshot.job, tag=snapshot.directory, step=snapshot.step,
            attempt=snapshot.attempt, bytes=raw, written_bytes=written, linked_bytes=linked,
            chunks=chunks, delta_chunks=deltas, chain=chain,
            restored_bytes=sum(e.restored_bytes for e in entries),
            held_seconds=held, durable_seconds=time.monotonic() - sealed_at, save_seconds=seconds,
            lost_seconds=None if cost is None else cost.seconds,
            step_seconds=None if cost is None else cost.usual,
        )  # fmt: skip

    async def _needs_parts(self, job: Job, snapshot: Snapshot) -> bool:
        """Open the next try of a step of several nodes.

        Return False if this node has delivered its parts, or the step is committed.
        """
        found = await self.joint.open_try(job, snapshot)
        if found is None:
            return True
        snapshot.move(Event.WRITE)
        snapshot.move(Event.WROTE)
        if isinstance(found, Manifest):
            await self.root.committer.record(snapshot, found)
        return False

    async def _fail(self, job: Job, snapshot: Snapshot, error: Exception) -> None:
        dead, abandoned = job.is_dead(snapshot), isinstance(error, Abandoned)
        if isinstance(error, Abandoned):
            error = error.error
        if isinstance(error, OSError):
            error = StorageError.of(f"save {snapshot.job}/{snapshot.tag}", error, served=True)
        elif not isinstance(error, CkptdError):
            log.exception("snapshot %s/%s: internal error", snapshot.job, snapshot.tag)
            error = InternalError(
                f"internal error while saving {snapshot.job}/{snapshot.tag}: {error!r}; the "
                f"daemon's log has more"
            )
        assert isinstance(error, CkptdError)
        if isinstance(error, Undecided) and self.stopping:
            log.info(
                "snapshot %s/%s: %s; the next daemon goes on with it",
                snapshot.job,
                snapshot.directory,
                error,
            )
            return
        if (
            isinstance(error, Undecided)
            and not snapshot.is_awaited
            and job.is_durable_after(snapshot.key)
        ):
            log.info(
                "snapshot %s/%s: it is no longer needed: a later checkpoint is durable",
                snapshot.job, snapshot.directory,
            )  # fmt: skip
            snapshot.move(Event.FAIL)
            return
        log_events.SAVE_FAILED.log(
            log, "snapshot %s/%s: %s", snapshot.job, snapshot.tag, error,
            job=snapshot.job, tag=snapshot.directory, step=snapshot.step,
            attempt=snapshot.attempt, reason=str(error), code=error.code,
        )  # fmt: skip
        snapshot.reason, snapshot.code = str(error), error.code
        if snapshot.state is not SnapshotState.DURABLE:
            self._count(snapshot, "failed")
        if isinstance(error, IntegrityError):
            self.counters["verify_failures"] += 1
        snapshot.delivered &= not abandoned
        snapshot.abandoned += abandoned
        reported = (
            snapshot.node is None
            or abandoned
            or (snapshot.peer_replica and not snapshot.delivered)  # its own node may deliver
            or (dead and not snapshot.delivered)
        )
        if reported and not await self._drop(snapshot, str(error)):
            return
        if snapshot.state in (SnapshotState.SEALED, SnapshotState.WRITING, SnapshotState.WRITTEN):
            snapshot.move(Event.FAIL)
        if snapshot.state is SnapshotState.FAILED:
            self._events.saved(snapshot)
        if not reported and not isinstance(error, Undecided):
            self._report(
                snapshot,
                self._refuse(job, replace(snapshot), error),
                f"reporting that {snapshot.directory} cannot be saved",
            )

    def _report(self, snapshot: Snapshot, report: Coroutine[None, None, None], called: str) -> None:
        """Start a report about a snapshot to the other nodes."""
        refusal = self._refusals[snapshot] = watched(report, called)
        refusal.add_done_callback(
            lambda _: (
                self._refusals.pop(snapshot) if self._refusals.get(snapshot) is refusal else None
            )
        )

    def _report_lost(self, job: Job, durable: Snapshot) -> None:
        """Report the steps that an earlier daemon of this node held, and that are lost, once
        for each attempt of several nodes: when its first step in this daemon is durable.
        """
        key = (job.name, durable.attempt)
        if durable.node is None or durable.peer_replica or key in self._reported:
            return
        self._reported.add(key)
        self._report(
            durable, self._refuse_lost(job, durable), f"reporting lost steps of job {job.name}"
        )

    async def _refuse_lost(self, job: Job, durable: Snapshot) -> None:
        try:
            await self.joint.refuse_lost(job, durable)
        except Exception:  # the other nodes then wait until `node_timeout`
            log.exception("steps of job %s that are lost cannot be reported", job.name)

    async def _refuse(self, job: Job, tried: Snapshot, error: CkptdError) -> None:
        try:
            if await self.joint.refuse(job, tried, error):
                await self._drop(tried, str(error))
        except Exception:  # the other nodes then wait until `node_timeout`
            log.exception(
                "it cannot be reported that %s/%s cannot be saved", tried.job, tried.directory
            )

    async def _drop(self, snapshot: Snapshot, reason: str) -> bool:
        """Delete the files of a save that has failed.

        Return False if the journal is broken.
        """
        try:
            await self._destination(snapshot).committer.drop(
                snapshot.job, snapshot.directory, snapshot.attempt, snapshot.step, reason,
                snapshot.ranks,
            )  # fmt: skip
        except JournalBroken:
            return False
        except (StorageError, OSError) as error:
            log.warning(
                "snapshot %s/%s: its files cannot be deleted now, and are deleted at the next "
                "start (%s)",
                snapshot.job, snapshot.directory, error,
            )  # fmt: skip
        return True

    def follow(self, job: Job, snapshot: Snapshot) -> None:
        """Wait in the background for the outcome of a try that an earlier daemon of
        this node has delivered.
        """
        task = self._tasks[snapshot] = watched(
            self._follow(job, snapshot), f"the outcome of {snapshot.job}/{snapshot.directory}"
        )
        task.add_done_callback(lambda done: self._done(snapshot, ExitStack(), done))

    async def _follow(self, job: Job, snapshot: Snapshot) -> None:
        try:
            await self.joint.finish(job, snapshot)
        except JournalBroken:
            pass
        except Abandoned as error:
            await self._drop(snapshot, str(error.error))
        except (OSError, CkptdError) as error:
            log.warning("%s/%s: %s", snapshot.job, snapshot.directory, error)
