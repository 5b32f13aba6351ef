"""The agent: one per process and job. It captures the state, plans, and hands the snapshot over to the daemon.

`snapshot` never raises for a failure to save, and never holds the training longer than its budget: the `Pending` has the error. `recover`
is the opposite: it raises rather than lose history. Calls from several threads wait for each other. A call inside another call of the same
thread, as from a signal handler, is refused. Ctrl-C may come at any time: the next call settles what it has interrupted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckptd.agent.copy.mapped_slot import Documents, document_offsets
from ckptd.agent.dcp.planner_rounds import plan_save
from ckptd.agent.handover.handover import Handover
from ckptd.agent.handover.rank_link import CLOSE_SECONDS, RankLink
from ckptd.agent.link.arguments import make_request, ranks_of
from ckptd.agent.pending import Pending
from ckptd.agent.plan.kept_plan import PLAN_SECONDS, KeptPlan
from ckptd.agent.plan.layout import Layout
from ckptd.agent.plan.save_plan import resolves_by_itself, values_of
from ckptd.agent.recover.binding import OnReshape
from ckptd.agent.recover.recovery import Recovered, Recovery
from ckptd.agent.state.capture import Habits, capture, optimizer_bytes_to_come, rng_state, values_document
from ckptd.agent.state.naming import modules_of
from ckptd.agent.threads.call_lock import Nested
from ckptd.shared.errors import CkptdError, DaemonUnreachable, InternalError, InvalidRequest, SnapshotFailed
from ckptd.shared.retention import Policy, checked
from ckptd.shared.snapshot_request import SnapshotRequest

log = logging.getLogger("ckptd.agent")

_UNKNOWN = 1 << 62
"""Sent as the last step by a rank that Ctrl-C kept from beginning the next attempt, so that all ranks begin another one."""


class Agent:
    """Made lazily by `snapshot()` and `recover()` of this package; make one yourself to name job, socket or root.

    job: name of the training run; else CKPTD_JOB, else "default" with a private daemon only.
    socket: the daemon's; else CKPTD_SOCKET, else the default places, else a private daemon is started.
    root: directory of the checkpoints, for a private daemon; else CKPTD_ROOT.
    planner, load_planner: DCP's, of your own. The state is then what `dcp.save` and `dcp.load` take: a dict, of which what has a state_dict
    is asked for it. Ranks plan at every snapshot. `recover` does what `dcp.load` does: `strict` and `on_reshape` are the planner's affair.
    process_group: the ranks of this job, all on one node; else the default group, or one rank if there is none. Every rank makes its agent,
    and calls `snapshot`, `recover` and `close`, like the others.
    retention: what to keep of this job, one policy (`LatestN(5)`) or several, of which any keeps; else what the daemon's settings say. It
    is saved with every snapshot, and counts until a newer one says otherwise.
    Raises DaemonUnreachable, InvalidName, InvalidRequest, StorageError; SnapshotFailed if a rank does not come.
    """

    def __init__(
        self,
        job: str | None = None,
        *,
        socket: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
        planner: SavePlanner | None = None,
        load_planner: LoadPlanner | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        retention: Policy | Iterable[Policy] | None = None,
    ) -> None:
        try:
            self._retention = None if retention is None else checked(retention)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(str(error)) from None
        self._link = RankLink(ranks_of(process_group), job, socket=socket, root=root, structure_changed=self._structure_changed)
        self._planner = planner
        self._load_planner = load_planner or (DefaultLoadPlanner() if planner is not None else None)
        self._habits = Habits()
        self.schedules = 0
        self._rng_room = 1 << 14  # bytes that random generators take, as far as known
        self._kept_plan = KeptPlan(self._link.client, self._link.ranks)

    @property
    def job(self) -> str:
        return self._link.job

    @property
    def attempt(self) -> int:
        """The number of this run of the job. A recovery to an older step begins the next attempt."""
        return self._link.attempt

    @property
    def rank(self) -> int:
        return self._link.rank

    @property
    def world_size(self) -> int:
        return self._link.world_size

    @property
    def last_step(self) -> int:
        """The last step that this rank has captured in this attempt, or -1."""
        return self._link.last_step

    @property
    def root(self) -> str:
        """The directory of the daemon's checkpoints."""
        return self._link.root

    @property
    def closed(self) -> bool:
        """True after `close`, and in a forked child, which needs an agent of its own."""
        return self._link.closed

    def __repr__(self) -> str:
        return f"<Agent {self._link!r}>"

    def _structure_changed(self) -> None:
        self._kept_plan.invalidate()

    # -- saving

    def snapshot(
        self,
        state: Any,
        *,
        step: int,
        tag: str | None = None,
        persist: bool = True,
        on_busy: str = "wait",
        metrics: Mapping[str, float] | None = None,
        user_content: Any = None,
        rng: bool = True,
    ) -> Pending:
        """Copy `state` as it is now, and return; everything else happens in the daemon.

        state: any nesting of tensors, modules, optimizers, objects with a state_dict, and plain values.
        step: 0 or more, higher than the last; tag: a name of its own, kept until deleted by hand.
        persist: False keeps it in memory only, unless this process dies or closes while it is the newest.
        on_busy: "wait" up to the daemon's stall budget (10 s) for a free slot, or "skip" without waiting.
        metrics: numbers for the manifest; user_content: anything JSON can say; rng: capture random generators too.
        """
        begun = time.perf_counter()
        link = self._link
        pending = Pending(step if isinstance(step, int) else -1, self.attempt, persist=bool(persist))
        try:
            with link.calls("snapshot", link.stall_budget):
                handover = link.handovers.open(pending, tag)
                try:
                    request = make_request(step, tag, persist, on_busy, metrics, user_content, self._retention)
                    self._snapshot(handover, state, request, on_busy, rng)
                except CkptdError as error:
                    link.handovers.fail(pending, error)
                except Exception as error:
                    log.exception("snapshot of step %s", step)
                    link.handovers.fail(pending, InternalError(f"snapshot of step {step}: {error!r}"))
                link.handovers.settle(handover)  # after `fail`, so that the daemon hears the reason first
        except Nested as error:
            link.refuse(pending, error)
        except TimeoutError:
            link.handovers.fail(pending, SnapshotFailed("another save of this process is waiting for a slot"))
        pending.stall = time.perf_counter() - begun
        return pending

    def _snapshot(self, handover: Handover, state: Any, request: SnapshotRequest, on_busy: str, rng: bool) -> None:
        link, pending = self._link, handover.pending
        link.ready()
        pending.attempt = link.attempt
        budget = link.stall_budget if on_busy == "wait" else 0.0
        deadline = time.monotonic() + budget
        if not link.client.wait_connected(budget):
            raise DaemonUnreachable("the daemon is gone; training goes on, and snapshots resume when it is back")
        if pending.step <= link.last_step:
            raise InvalidRequest(
                f"step {pending.step} does not follow step {link.last_step}, the last of attempt {link.attempt}: "
                "steps only rise within an attempt; recover() to go back"
            )
        handover.begin()
        if self._planner is not None:
            self._hand_over_planned(handover, self._planner, state, request, budget, rng)
        else:
            self._hand_over(handover, state, request, deadline, rng)

    def _hand_over(self, handover: Handover, state: Any, request: SnapshotRequest, deadline: float, rng: bool) -> None:
        link, encoded = self._link, request.encode()
        if self._kept_plan.valid and link.handovers.slots.fit(0):
            handover.request(deadline)  # the structure has most likely not changed: the daemon answers while it is compared
        captured = capture(state, rank=self.rank, habits=self._habits)
        found = self._kept_plan.reuse(captured)

        def needed(layout: Layout) -> int:
            return document_offsets(layout, len(captured.state) + self._rng_room, len(encoded))[-1]

        if found is None or not link.handovers.slots.fit(needed(found[0])):
            handover.check_not_refused()  # before the ranks plan: a step that is refused is refused on all of them
        layout, sources = found or self._kept_plan.renew(captured, state, handover.pending, link.stall_budget)
        handover.reserve(needed(layout), deadline)
        documents = Documents(values_document(captured, rng=rng), encoded)
        self._rng_room = max(self._rng_room, len(documents.values) - len(captured.state))
        handover.acquire()
        transfer = handover.copy(sources, layout, modules_of(state))
        handover.seal_after(transfer, layout, documents)

    def _hand_over_planned(
        self, handover: Handover, planner: SavePlanner, state: Any, request: SnapshotRequest, budget: float, rng: bool
    ) -> None:
        """Hand over what the caller's DCP planner plans."""
        pending, deadline = handover.pending, time.monotonic() + max(budget, PLAN_SECONDS)
        topic = f"plan/{pending.attempt}/{pending.step}"
        planned = plan_save(planner, state, self._link.ranks, topic, deadline, lambda: pending.error)
        layout, resolved = planned.layout, planned.resolved
        documents = Documents(values_of(planned.metadata, rng_state() if rng else None), request.encode())
        handover.reserve(documents.offsets(layout)[-1], time.monotonic() + budget)
        handover.acquire()
        handover.fill(layout, resolved.sources_of(layout), singly=resolves_by_itself(planner))
        handover.seal_after(None, layout, documents)

    def hear(self, topic: str, say: Callable[[], bytes], *, late: bool = False) -> bytes | None:
        """What `say` gives on rank 0, to all ranks; None if that is not known yet. `late`: whether it was so before; nobody waits then.

        Raises SnapshotFailed if the job's store does not answer, Busy inside another call of this thread.
        """
        with self._link.calls("hear"):
            self._link.ready()
            return self._link.ranks.hear(topic, say, 0.0 if late else self._link.stall_budget)

    # -- slots

    def prepare(self, state: Any) -> None:
        """Get slots for `state` and map their pages in the background, so that the first snapshot is as fast as later ones.

        Called by itself after `recover`. An optimizer that has no state yet is counted with what its kind will have. Raises Busy inside
        another call of this thread.
        """
        with self._link.calls("prepare"):
            self._link.ready()
            self._prepare(state)

    def _prepare(self, state: Any) -> None:
        captured = capture(state, rank=self.rank)
        documents = len(captured.state) + self._rng_room
        capacity = self._kept_plan.estimate(captured) + documents + optimizer_bytes_to_come(state, self.world_size)
        self._link.handovers.slots.prepare(capacity)

    # -- going back

    def recover(self, state: Any, *, step: int | None = None, strict: bool = True, on_reshape: OnReshape | None = None) -> Recovered | None:
        """Bring the newest complete state back into `state`, from memory or storage; None if nothing was ever saved.

        step: that step only. strict: False lets keys be missing on either side. on_reshape: on another number of ranks than it was saved
        on, called with the key of each `per_rank` value and the list of what all ranks had; returns this rank's.
        Everything is compared before the first byte is written. Raises StructureMismatch, NotFound (for a `step` that is not there),
        RecoveryFailed, StorageError, DaemonUnreachable; SnapshotFailed if a rank does not come. One rank's error is an error on all.
        Raises Busy inside another call of this thread, as in a signal handler that interrupts one.
        """
        link = self._link
        with link.calls("recover"):
            link.check_open()
            if self.world_size == 1:
                link.ready()
            link.client.wait_connected(link.stall_budget)
            topic = f"recover/{link.attempt}"
            recovery = Recovery(link.client, link.ranks, link.job, topic, strict=strict, on_reshape=on_reshape, planner=self._load_planner)
            recovered = recovery.run(state, step=step, last_step=_UNKNOWN if link.interrupted else link.last_step)
            if recovered is not None and recovered.step < recovery.last_step:
                link.begin_next()
            try:
                self._prepare(state)
            except CkptdError as error:
                log.warning("slots are made at the first snapshot, since this state cannot be saved as it is: %s", error)
        return recovered

    # -- the end

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Make the newest snapshot durable, then free the slots.

        timeout: seconds to wait for the save. Raises SnapshotFailed if the snapshot could not be saved, DaemonUnreachable if that is not
        known in time. The agent is closed in any case. After an error the daemon treats this process as dead: it saves the newest snapshot
        unasked and keeps it in memory for a while. The same happens to a process that ends without `close`.
        """
        self._link.close(timeout)
