"""Carries out what `decisions.py` has decided about steps: starts timers, fails steps,
tells the ranks, frees slots and starts saves.

No other module does so. All calls run on the event loop. The end of a timer and the end
of a save are reported here as well, and are decided like any other event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from ckptd.daemon import log_events
from ckptd.daemon.job import decisions as d
from ckptd.daemon.job import holdings
from ckptd.daemon.job.catalog import Catalog, Failure, Job, Step
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import Key, Snapshot
from ckptd.daemon.memory.slots import Slots
from ckptd.daemon.saving.saver import Saver
from ckptd.shared.system import machine
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import Event, SnapshotState
from ckptd.shared.wire.messages import Holds, Remark

log = logging.getLogger("ckptd.steps")

WAIT_SECONDS = 5.0
"""Seconds that a rank waits for others before all ranks are told which ranks have not
come.
"""
BEGUN_SECONDS = 1.0
"""Seconds after which a node shows the other nodes that it has begun a step.

A step that takes less time costs no message. A node shows `WAIT_SECONDS` later that it
waits. All nodes that began the step while it waited for less than `WAIT_SECONDS` have
shown this by then.
"""

_UNSEALED = 3
"""The number of snapshots in a row without a seal that makes an event."""


class Steps:
    """Carries out decisions for all jobs.

    `counters` are those of `ckptd status`.
    """

    def __init__(self, catalog: Catalog, slots: Slots, saver: Saver, rank_timeout: float) -> None:
        """rank_timeout: seconds that the ranks have to seal a step once one of them has
        requested a slot for it.
        """
        self._catalog, self._slots = catalog, slots
        self._saver, self._timeout = saver, rank_timeout
        self.counters = saver.counters

    def perform(self, job: Job, actions: Iterable[d.Action]) -> None:
        """Carry out the actions in their order, and drop the records that nothing needs
        afterwards. Raises the error of a `Raise`.
        """
        try:
            for action in actions:
                match action:
                    case d.StartTimer(key, more):
                        step = job.step(key)
                        step.timer = asyncio.get_running_loop().call_later(
                            self._timeout + more, self._expire, job, step
                        )
                        if step.watch is None:
                            self._watch(
                                job, step, WAIT_SECONDS if job.node is None else BEGUN_SECONDS
                            )
                    case d.EndWait(key):
                        job.step(key).end_wait()
                        if job.node is None:
                            job.step(key).unwatch()
                        job.changed.notify()
                    case d.Move(key, event):
                        self._move(job, self._snapshot(job, key), event)
                    case d.Fail(key, code, reason):
                        self._fail(job, job.step(key), code, reason)
                    case d.Tell(message):
                        job.ranks.tell(message)
                    case d.Free(key, segment):
                        self._free(job, job.step(key), segment)
                    case d.Release(key):
                        self._release(job, job.step(key))
                    case d.Save(key):
                        self._saver.start(self._snapshot(job, key))
                    case d.Raise(error):
                        raise error
        finally:
            job.tidy()
            self.show(job)

    def show(self, job: Job) -> None:
        """Send what this node holds to its lowest rank, which puts it on the board,
        unless it has been sent. Only for several nodes.
        """
        leader = job.ranks.owners.get(job.node.ranks[0]) if job.node is not None else None
        if leader is None or leader.notify is None or leader.attempt != job.attempt:
            return
        holding = holdings.holding(job, machine.host())
        if holding != leader.shown:
            leader.shown = holding
            leader.notify(Holds(re=0, attempt=job.attempt, holding=holding))

    def save_unasked(self, snapshot: Snapshot, why: str) -> None:
        """Save a snapshot whether or not a rank has requested that. Does nothing if it is
        being saved.
        """
        if not snapshot.persist:
            log.info(
                "snapshot %s/%s: is to be saved unasked, because %s",
                snapshot.job, snapshot.tag, why,
            )  # fmt: skip
            snapshot.persist = snapshot.unasked = True
        self._saver.start(snapshot)

    def take_answer(self, job: Job, answer: Answer) -> None:
        """Take an answer from the board."""
        before, job.answer = job.answer, answer
        for snapshot in holdings.drained(job):
            self.save_unasked(snapshot, "another node is being drained")
        self.perform(job, holdings.missing(job, before))
        self.release_replaced(job)
        job.changed.notify()

    @staticmethod
    def _snapshot(job: Job, key: Key) -> Snapshot:
        snapshot = job.snapshot(key)
        assert snapshot is not None, f"{job.name}: step {key} has no snapshot"
        return snapshot

    def _move(self, job: Job, snapshot: Snapshot, event: Event) -> None:
        snapshot.move(event)
        if event is Event.SEAL:
            job.sealed, job.unsealed = max(job.sealed, snapshot.key), 0
            self.counters["sealed"] += 1
            job.changed.notify()

    def _fail(self, job: Job, step: Step, code: str, reason: str) -> None:
        self.count_failure(job, step.number, reason)
        if job.world_size > 1:  # a job of one rank may try the step again
            step.failure = (code, reason)
        if step.snapshot is not None:
            step.snapshot.reason, step.snapshot.code = reason, code
            step.snapshot.move(Event.FAIL)

    def _free(self, job: Job, step: Step, segment: str) -> None:
        """Free a segment for its owner, or unlink it if its owner is gone or has a
        larger one.
        """
        if step.slots.pop(segment, None) is None:
            return
        slot = self._slots.slots.get(segment)
        if slot is not None and (
            slot.outgrown or not job.ranks.has(slot.header.attempt, slot.header.rank)
        ):
            self._slots.release(slot)
        job.changed.notify()

    def _release(self, job: Job, step: Step) -> None:
        snapshot, step.snapshot = step.snapshot, None
        if snapshot is not None:
            snapshot.move(Event.RELEASE)
        for segment in list(step.slots):
            self._free(job, step, segment)

    def _expire(self, job: Job, step: Step) -> None:
        self.perform(job, d.expired(job, step, self._timeout))

    # -- ranks that have not come

    def _watch(self, job: Job, step: Step, seconds: float) -> None:
        step.watch = asyncio.get_running_loop().call_later(seconds, self._look, job, step)

    def _look(self, job: Job, step: Step) -> None:
        """Tell the ranks which of them have not come to the step.

        Of several nodes, show the others that this node has begun the step, and
        `WAIT_SECONDS` later that it waits. The answer from the board then says which
        ranks have not come (`take_answer`).
        """
        step.watch = None
        if job.node is None:
            self.perform(job, d.waiting(job, step))
        elif holdings.is_open(job, step):
            if step.begun:
                step.overdue = True
            else:
                step.begun = True
                self._watch(job, step, WAIT_SECONDS)
            self.show(job)

    # -- ranks

    def end(self, job: Job, owner: Owner, how: str) -> None:
        """End an owner: fail the steps that it had not sealed, and unlink its free
        slots. `how` is "ended" or "closed".
        """
        if owner.attempt == job.attempt:
            job.ranks.leave(owner, how)
        self.perform(job, d.left(job, owner.attempt, owner.rank, how))
        for slot in self._slots.of(*owner.identity):
            if job.step_in(slot.name) is None:
                self._slots.release(slot)
        job.changed.notify()

    def count_failure(self, job: Job, step: int | None, reason: str) -> None:
        """Log and count a snapshot that failed before all ranks had sealed it.

        `step` is None if the step itself was wrong.
        """
        log_events.STEP_FAILED.log(
            log, "job %s: %s", job.name, reason, job=job.name, step=step, reason=reason
        )
        job.last_failure = Failure(step, reason, time.time())
        self.counters["failed"] += 1
        self._did_not_seal(job, step, reason)

    def count_skip(self, job: Job, step: int, reason: str) -> None:
        """Count a snapshot that was skipped, because it got no slot."""
        self.counters["skipped"] += 1
        self._did_not_seal(job, step, reason)

    @staticmethod
    def _did_not_seal(job: Job, step: int | None, reason: str) -> None:
        """Log an event once several snapshots in a row were not sealed: one alone is
        no reason to wake somebody.
        """
        job.unsealed += 1
        if job.unsealed == _UNSEALED:
            log_events.STEPS_FAILING.log(
                log, "job %s: the last %d snapshots have failed or were skipped before they were "
                "in memory: %s", job.name, _UNSEALED, reason,
                job=job.name, step=step, reason=reason,
            )  # fmt: skip

    # -- what the saver reports

    def tell(self, snapshot: Snapshot) -> None:
        """Notify the ranks that a snapshot is durable, or that its save has failed.

        A peer replica whose save has failed is left out: its own node may deliver it.
        """
        job = self._catalog.job(snapshot.job)
        if snapshot.state is SnapshotState.FAILED:
            if snapshot.peer_replica:
                return
            job.last_failure = Failure(snapshot.step, snapshot.reason, time.time())
        self.perform(job, [d.Tell(d.news(snapshot))])

    def remark(self, name: str, text: str) -> None:
        """Send a warning about the storage to rank 0 of a job, which logs it."""
        self._catalog.job(name).ranks.tell_first(Remark(re=0, text=text))

    def release_replaced(self, job: Job) -> None:
        """Release every snapshot that a newer sealed one has replaced.

        Called at the end of each save, too.

        Of several nodes, the steps that another node will never seal are failed first.
        A rank may have sealed one after that answer was taken.
        """
        if job.node is not None:
            self.perform(job, holdings.answered(job))
        self.perform(job, d.replaced(job))

    def close(self) -> None:
        """Cancel all timers, because the daemon ends."""
        for job in self._catalog.jobs.values():
            for step in job.steps.values():
                step.end_wait()
                step.unwatch()
