"""The agent: one per process and job. Copies state into slots, hands over, takes up again after a lost daemon.

`snapshot` never raises for what goes wrong with saving and never holds the training longer than its budget: the `Pending` tells. `recover`
is the opposite: it raises rather than let history be lost. Calls of several threads wait for each other; a call inside another one of the
same thread, as from a signal handler, is refused. Ctrl-C may come at any time: what it leaves is settled at once or by the next call.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch.distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckptd.agent.copy.mapped_slot import Documents, document_offsets
from ckptd.agent.dcp.planner_rounds import plan_save
from ckptd.agent.handover.attachment import Attachment
from ckptd.agent.handover.grants import Question
from ckptd.agent.link.arguments import make_request, ranks_of
from ckptd.agent.pending import Pending
from ckptd.agent.plan.kept_plan import PLAN_SECONDS, Layouts
from ckptd.agent.plan.layout import Layout, dtype_of
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

_UNKNOWN = 1 << 62  # in the place of the last step, of a rank that Ctrl-C kept from beginning the next attempt: all ranks begin another


class Agent(Attachment):
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
        super().__init__(ranks_of(process_group), job, socket=socket, root=root)
        self._planner = planner
        self._load_planner = load_planner or (DefaultLoadPlanner() if planner is not None else None)
        self._habits = Habits()
        self.schedules = 0
        self._rng_room = 1 << 14  # bytes that random generators take, as far as known
        self._layouts = Layouts(self._client, self._ranks)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self._client.connected else "without a daemon"
        return f"<Agent {self.job} attempt {self.attempt} rank {self.rank} of {self.world_size}, {state}>"

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
        pending = Pending(step if isinstance(step, int) else -1, self.attempt, persist=bool(persist))
        try:
            with self.calls("snapshot", self._client.welcome.stall_budget):
                question = self._grants.ask(pending, tag)
                try:
                    request = make_request(step, tag, persist, on_busy, metrics, user_content, self._retention)
                    self._snapshot(pending, question, state, request, on_busy, rng)
                except CkptdError as error:
                    self._fail(pending, error)
                except Exception as error:
                    log.exception("snapshot of step %s", step)
                    self._fail(pending, InternalError(f"snapshot of step {step}: {error!r}"))
                self._grants.settle(question)  # after the reason was told
        except Nested as error:  # the call that it interrupts is not to be touched: it tells the other ranks at its end
            pending.fail(error)
            self._refused.append(pending)
        except TimeoutError:
            self._fail(pending, SnapshotFailed("another save of this process is waiting for a slot"))
        pending.stall = time.perf_counter() - begun
        return pending

    def _snapshot(self, pending: Pending, question: Question, state: Any, request: SnapshotRequest, on_busy: str, rng: bool) -> None:
        self.ready()
        pending.attempt, asking = self.attempt, question.asking
        budget = self._client.welcome.stall_budget if on_busy == "wait" else 0.0
        deadline = time.monotonic() + budget
        if not self._client.wait_connected(budget):
            raise DaemonUnreachable("the daemon is gone; training goes on, and snapshots resume when it is back")
        if pending.step <= self.last_step:
            raise InvalidRequest(
                f"step {pending.step} does not follow step {self.last_step}, the last of attempt {self.attempt}: "
                "steps only rise within an attempt; recover() to go back"
            )
        self._pending[pending.attempt, pending.step] = pending
        if self._planner is not None:
            self._snapshot_planned(question, self._planner, state, request, budget, rng)
            return
        if self._layouts.settled and self._slots.fit(0):
            asking.ask(deadline)  # most likely all is as it was: the answer comes while that is looked at
        captured, encoded = capture(state, rank=self.rank, habits=self._habits), request.encode()
        found = self._layouts.kept(captured)

        def needed(layout: Layout) -> int:
            return document_offsets(layout, len(captured.state) + self._rng_room, len(encoded))[-1]

        if asking.asked and (found is None or not self._slots.fit(needed(found[0]))) and not asking.answer():
            self._skip(pending, asking.why)  # as the other ranks do
            return
        layout, sources = found or self._layouts.anew(captured, state, pending, self._client.welcome.stall_budget)
        if not self._slots.ensure(needed(layout), deadline):
            pending.skip("the slots in shared memory are still being made; a later snapshot will find them")
            self._pass_over(pending, pending.why)
            return
        if asking.segment not in self._slots:
            asking.ask(deadline)
        documents = Documents(values_document(captured, rng=rng), encoded)
        self._rng_room = max(self._rng_room, len(documents.values) - len(captured.state))
        if not asking.answer():
            self._skip(pending, asking.why)
            return
        slot = self._slots.get(asking.take())
        self._take(pending, slot)
        transfer = slot.fill(sources, layout, pending.step, lambda to, of: self._sealer.carry(to, of, modules_of(state)))
        if transfer is None:
            self._seal(pending, slot, layout, documents)
        self.last_step = pending.step
        if transfer is not None:
            seal = partial(self._seal, pending, slot, layout, documents)
            self._sealer.later(slot.name, transfer, seal, partial(self._not_sealed, pending, slot))
        question.kept = slot.name

    def _snapshot_planned(
        self, question: Question, planner: SavePlanner, state: Any, request: SnapshotRequest, budget: float, rng: bool
    ) -> None:
        pending, deadline = question.pending, time.monotonic() + max(budget, PLAN_SECONDS)
        topic = f"plan/{pending.attempt}/{pending.step}"
        planned = plan_save(planner, state, self._ranks, topic, deadline, lambda: pending.error)
        layout, resolved, items = planned.layout, planned.resolved, planned.layout.plan.items
        documents = Documents(values_of(planned.metadata, rng_state() if rng else None), request.encode())

        def source(number: int) -> torch.Tensor:
            return resolved.source((items[number].fqn, items[number].offsets), dtype_of(items[number].dtype))

        singly = resolves_by_itself(planner)
        _, slot = self.fill(
            pending, request.tag, layout, documents.offsets(layout)[-1], source, wait=budget, singly=singly,
            taken=lambda _, slot: question.asking.taken.append(slot.name),
        )  # fmt: skip
        self.seal(pending, slot, layout, documents)
        question.kept = slot.name

    def hear(self, topic: str, say: Callable[[], bytes], *, late: bool = False) -> bytes | None:
        """What `say` gives on rank 0, to all ranks; None if that is not known yet. `late`: whether it was so before; nobody waits then.

        Raises SnapshotFailed if the job's store does not answer, Busy inside another call of this thread.
        """
        with self.calls("hear"):
            self.ready()
            return self._ranks.hear(topic, say, 0.0 if late else self._client.welcome.stall_budget)

    def _plan_anew(self) -> None:
        self._layouts.plan_anew()

    # -- slots

    def prepare(self, state: Any) -> None:
        """Get slots for `state` and map their pages in the background, so that the first snapshot is as fast as later ones.

        Called by itself after `recover`. An optimizer that has no state yet is counted with what its kind will have. Raises Busy inside
        another call of this thread.
        """
        with self.calls("prepare"):
            self.ready()
            self._prepare(state)

    def _prepare(self, state: Any) -> None:
        captured = capture(state, rank=self.rank)
        capacity = self._layouts.estimate(captured) + len(captured.state) + self._rng_room + optimizer_bytes_to_come(state, self.world_size)
        self._slots.prepare(capacity)

    # -- going back

    def recover(self, state: Any, *, step: int | None = None, strict: bool = True, on_reshape: OnReshape | None = None) -> Recovered | None:
        """Bring the newest complete state back into `state`, from memory or storage; None if nothing was ever saved.

        step: that step only. strict: False lets keys be missing on either side. on_reshape: on another number of ranks than it was saved
        on, called with the key of each `per_rank` value and the list of what all ranks had; returns this rank's.
        Everything is compared before the first byte is written. Raises StructureMismatch, NotFound (for a `step` that is not there),
        RecoveryFailed, StorageError, DaemonUnreachable; SnapshotFailed if a rank does not come. One rank's error is an error on all.
        Raises Busy inside another call of this thread, as in a signal handler that interrupts one.
        """
        with self.calls("recover"):
            self._check_open()
            if self.world_size == 1:
                self.ready()
            self._client.wait_connected(self._client.welcome.stall_budget)
            topic = f"recover/{self.attempt}"
            recovery = Recovery(
                self._client, self._ranks, self.job, topic, strict=strict, on_reshape=on_reshape, planner=self._load_planner
            )
            recovered = recovery.run(state, step=step, last_step=_UNKNOWN if self._beginning else self.last_step)
            if recovered is not None and recovered.step < recovery.last_step:
                self._begin_next()
            try:
                self._prepare(state)
            except CkptdError as error:
                log.warning("slots are made at the first snapshot, since this state cannot be saved as it is: %s", error)
        return recovered
