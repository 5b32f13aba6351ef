"""The `Agent` of one rank: it captures the state, plans its layout, and hands each
snapshot over to the daemon.

A process needs one agent for each job. A second agent of the same job begins the next
attempt, and the first one can no longer save.

`snapshot` never raises because a save failed: the `Pending` that it returns has the
error. Only an error that the caller must mend is raised, and by default only until the
attempt has its first sealed snapshot: a job that can never save stops in its first
minute. Each wait of `snapshot`, for another thread's call, for a slot or for other
ranks, is limited by the daemon's stall budget (10 s by default) plus a few seconds.
`recover` always raises, because a training that continued without its saved state would
lose history.

Calls from several threads run one at a time. A call inside another call of the same
thread, for example from a signal handler, is refused. Ctrl-C may interrupt a call at
any instruction: the next call settles what the interrupted call has left.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, SupportsIndex

import msgspec
import torch
import torch.distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckptd.agent.advice import Advice
from ckptd.agent.copy.lanes import CAPTURED, capturing, pinned, wait_for_streams
from ckptd.agent.copy.mapped_slot import Documents, document_offsets
from ckptd.agent.copy.replica_check import ReplicaCheck
from ckptd.agent.dcp.planner_rounds import plan_save
from ckptd.agent.handover.handover import Handover
from ckptd.agent.handover.outcomes import MISTAKES, Outcomes
from ckptd.agent.handover.rank_link import CLOSE_SECONDS, RankLink
from ckptd.agent.link.arguments import (
    Hold,
    OnBusy,
    OnError,
    Unsavable,
    as_step,
    check_choice,
    check_state,
    comparison_interval,
    make_request,
    ranks_of,
)
from ckptd.agent.link.attempt import begin
from ckptd.agent.link.interactive import InteractiveSession
from ckptd.agent.link.script import DEFAULT, check_not_default
from ckptd.agent.pending import NOT_COPIED, Pending, PendingSnapshot
from ckptd.agent.plan.kept_plan import PLAN_SECONDS, KeptPlan, PlanInUse
from ckptd.agent.plan.layout import Layout
from ckptd.agent.plan.save_plan import resolves_by_itself, values_of
from ckptd.agent.plan.structure import accelerator_of, current_accelerator
from ckptd.agent.recover.options import OnReshape, Options
from ckptd.agent.recover.recovery import Recovered, Recovery
from ckptd.agent.state.capture import (
    Habits,
    capture,
    optimizer_bytes_to_come,
    rng_state,
    values_document,
)
from ckptd.agent.state.settings import settings_of
from ckptd.agent.step_times import StepTimes
from ckptd.agent.threads.call_lock import Nested
from ckptd.agent.threads.interruptible import interruptible
from ckptd.shared.errors import (
    CkptdError,
    DaemonUnreachable,
    InternalError,
    InvalidRequest,
    SnapshotFailed,
    check_step_follows,
)
from ckptd.shared.formats.replicas import ReplicaDigests
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.retention import Policy, checked
from ckptd.shared.system.collector import paused_collector
from ckptd.shared.wire.session import REPLICAS

log = logging.getLogger("ckptd.agent")

_UNKNOWN = 1 << 62
"""The last step that a rank reports if Ctrl-C has interrupted it while it began its
next attempt. All ranks then begin another attempt.
"""
_NOT_TO_BE_COPIED = (
    NOT_COPIED + "it was taken with replicate=False, or a schedule copies only some snapshots"
)


class Agent:
    """One rank of a job, connected to the daemon that saves and recovers its state.

    The functions `snapshot()` and `recover()` of this package make an agent when they
    first need one. Make an agent yourself to choose the job, the socket or the root.
    Making one begins the next attempt of the job. Every rank makes its agent and calls
    `snapshot`, `recover` and `close`, in the same order on all ranks. A forked child
    cannot use its parent's agent.

    job: name of the training run. Default: CKPTD_JOB. With a private daemon an unnamed
        job is named after the main script: "train" for train.py, and "default" in an
        interactive session. A launcher, such as submitit, gives no name.
    socket: path of the daemon's Unix socket. Default: CKPTD_SOCKET, then
        /run/ckptd/USER.sock, then $XDG_RUNTIME_DIR/ckptd.sock. If no daemon is found
        there, a private daemon is started.
    root: directory of the checkpoints. Default: CKPTD_ROOT. A private daemon needs one.
        A daemon with another root is not used.
    planner: a DCP SavePlanner. The state must then be a dict, as for `dcp.save`: DCP
        saves the state_dict() of each value that has one. The ranks plan at every
        snapshot. Default: ckptd plans, and plans again only if the structure of the
        state changes.
    load_planner: a DCP LoadPlanner. `recover` then works like `dcp.load`: the planner
        decides what must match, and `strict` and `on_reshape` are ignored. Default:
        DCP's DefaultLoadPlanner if `planner` is given, otherwise ckptd plans.
    process_group: the ranks of this job. Default: the default process group, or a
        single rank if torch.distributed is not initialized.
    retention: one policy, such as `LatestN(5)`, or several; a checkpoint is kept if any
        of them keeps it. Default: the daemon's settings. The policies are saved with
        every snapshot, and hold until a newer snapshot brings others.
    takeover: True begins the attempt although another run of the job is alive. If that
        run is on this node, it can then no longer save. False waits up to 10 s for its
        end, and then raises JobRunning. Workers of one torchrun are one run. Default:
        CKPTD_TAKEOVER, which is 0 or 1.
    compare_replicas: the number of snapshots, at regular distances, within which all
        bytes that several ranks hold are compared between these ranks, a part at each
        snapshot. A sample of each tensor is compared at every snapshot. A snapshot in
        which ranks differ fails. 1 compares all bytes at every snapshot, and 0 compares
        nothing. Pass the same number on all ranks. Default: CKPTD_COMPARE_REPLICAS, or
        1000.

    Raises InvalidName for the name of the job. Raises InvalidRequest for any other
    argument, for WORLD_SIZE above 1 without a process group, and for ranks that differ
    in root or job. Raises DaemonUnreachable if no daemon is found or answers, Forbidden
    if it belongs to another user, VersionMismatch if it has no protocol version in
    common with this process, and Busy if it is stopping or has too many jobs or
    clients. Raises JobRunning if another run of the job is alive, and ForeignMemory if
    the snapshots of the job in memory were saved for another root than the one that is
    there now. Raises StorageError if the attempt cannot be claimed on storage, Fenced
    if another attempt of the job begins at the same time, and SnapshotFailed if another
    rank does not make its agent within 120 s. If one rank cannot find its daemon or the
    name of its job, or has an invalid `retention`, or if rank 0 cannot claim the
    attempt, that error is raised on all ranks.
    """

    @interruptible
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
        takeover: bool | None = None,
        compare_replicas: int | None = None,
    ) -> None:
        ranks = ranks_of(process_group)
        try:
            # `smp.save_checkpoint` sets this between snapshots
            self.retention = None if retention is None else checked(retention)
            every = comparison_interval(compare_replicas)
        except (ValueError, TypeError) as error:
            refusal = InvalidRequest(str(error))
            begin(ranks, refusal)  # raises it on all ranks: the others are waiting for this one
            raise refusal from None
        self._link = RankLink(
            ranks,
            job,
            socket=socket,
            root=root,
            takeover=takeover,
            structure_changed=lambda: self._kept_plan.invalidate(),
        )
        self._first_attempt = self._link.attempt
        self._planner = planner
        self._load_planner = load_planner or (DefaultLoadPlanner() if planner is not None else None)
        self._habits = Habits()
        self._session = InteractiveSession()
        self._outcomes = Outcomes()
        self._followers: list[Callable[[Pending], object]] = []
        self._advice = Advice()
        self._step_times = StepTimes()
        # Bytes to reserve for the states of the random generators: the most seen so
        # far.
        self._rng_room = 1 << 14
        self._kept_plan = KeptPlan(self._link.client, self._link.ranks)
        self._replica_check = ReplicaCheck(every)
        # The addresses of the last state, and whether a device may write to them.
        self._pinned: tuple[list[int] | None, bool] = None, False

    @property
    def job(self) -> str:
        return self._link.job

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1.

        A `recover` to a step behind the last captured one begins the next attempt, and
        so does a loop that an interactive session runs again.
        """
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

    # -- saving

    @interruptible
    def snapshot(
        self,
        state: Any,
        *,
        step: SupportsIndex,
        tag: str | None = None,
        persist: bool = True,
        on_busy: OnBusy = "wait",
        metrics: Mapping[str, float] | None = None,
        user_content: Any = None,
        rng: bool = True,
        replicate: bool = True,
        on_error: OnError = "raise-until-sealed",
        on_failure: Callable[[Pending], object] | None = None,
        unsavable: Unsavable = "refuse",
        hold: Hold = "late",
    ) -> Pending:
        """Copy `state` as it is now into a slot, and return.

        The daemon saves the copy in the background.

        Returns a `Pending`, which reports the progress of the snapshot and any error; a
        failed save never raises. The training may change the state as soon as this
        returns. Copies from accelerators may still run then: later writes are ordered
        behind them, or the snapshot fails. All ranks call this with the same `step`,
        `tag`, `persist`, `on_busy` and `replicate`. The `metrics` and `user_content` of
        rank 0 are kept.

        state: any nesting of dicts, lists and tuples with tensors, modules, optimizers,
            objects with a state_dict, and plain values.
        step: an integer from 0 to 10**18 - 1, higher than the last step of this
            attempt. If a notebook or another interactive session of one rank runs a
            loop again, from a step that is not higher, the next attempt begins.
        tag: a name for the checkpoint, unique within the attempt: 1 to 128 of the
            characters A-Z a-z 0-9 . _ -, the first a letter or digit, and not beginning
            with "step-". Retention never deletes a checkpoint with a tag. Default: the
            checkpoint is named by its step.
        persist: False keeps the snapshot in memory only. It is then saved to storage
            only if this process dies or closes, or the daemon stops, while it is the
            newest.
        on_busy: what to do if no slot is free. "wait" waits up to the daemon's stall
            budget (10 s by default), and then skips the step. "skip" skips the step at
            once.
        metrics: numbers by name, stored in the manifest.
        user_content: a value that JSON can express, at most 100 levels deep, stored in
            the manifest. Together with `metrics` it may take up to 512 KiB.
        rng: also capture the random generators of Python, NumPy (if it is imported),
            torch and the accelerators.
        replicate: False does not copy the snapshot to the memory of another node. It has
            no effect unless the daemons are set to make copies (`replicas = 1`).
        on_error: what to do with an error that the caller must mend, such as a value
            that cannot be saved, or an invalid step or tag. "raise" raises it. "log"
            logs it, and returns it in the Pending. "raise-until-sealed" raises it until
            a snapshot of the attempt is sealed, and logs it from then on.
        on_failure: called with the Pending if the snapshot fails or is skipped, now or
            later, on another thread, one call at a time.
        unsavable: what to do with a value that cannot be saved. "refuse" fails the
            snapshot with UnsavableValue. "skip" leaves the value out, logs its key, and
            adds it to `Pending.unsaved`; recover() then leaves this value of the state
            as it is.
        hold: what waits for the copies of an optimizer's tensors on an accelerator.
            "late": the next step of that optimizer. "now": everything that is enqueued
            after this call on the current stream, as for other tensors. Choose "now" if
            these tensors may be written to before that step in a way that torch does
            not count, such as `parameter.data.copy_(...)`.

        Raises UnsavableValue, also for an exception in a state_dict(), InvalidRequest,
        InvalidName, and AlreadyExists for a tag that is taken, all as `on_error` says.
        An error that one rank has while the ranks plan is raised on all ranks.
        """
        link = self._link
        pending = PendingSnapshot(
            as_step(step),
            self.attempt,
            persist=bool(persist),
            note=partial(self._outcomes.note, on_failure=on_failure),
        )
        pending.begun, pending.cost_before = time.perf_counter(), self._step_times.cost
        try:
            with link.calls("snapshot", link.stall_budget):
                handover = link.handovers.open(pending, tag)
                not_copied = link.handovers.seals.not_copied if replicate else _NOT_TO_BE_COPIED
                pending.expect_copy(SnapshotFailed(not_copied) if not_copied else None)
                try:
                    request = make_request(
                        step,
                        tag,
                        persist,
                        on_busy,
                        metrics,
                        user_content,
                        self.retention,
                        link.node,
                        replicate=not not_copied,
                    )
                    check_choice("on_error", on_error, OnError)
                    check_choice("unsavable", unsavable, Unsavable)
                    check_choice("hold", hold, Hold)
                    handover.at_once = hold == "now"
                    pending.unsaved = {} if unsavable == "skip" else None
                    if capturing():
                        raise InvalidRequest(CAPTURED)
                    self._snapshot(handover, state, request, on_busy, rng)
                except CkptdError as error:
                    link.handovers.fail(pending, error)
                except Exception as error:
                    log.exception("snapshot of step %s", step)
                    link.handovers.fail(
                        pending, InternalError(f"snapshot of step {step}: {error!r}")
                    )
                # After `fail`: the daemon must know the reason before it gets the slot
                # back.
                link.handovers.end(handover)
        except Nested as error:
            link.refuse(pending, error)
        except TimeoutError:
            link.handovers.fail(
                pending, SnapshotFailed("another save of this process is waiting for a slot")
            )
        pending.stall = pending.held
        self._step_times.begin(pending)
        for call in self._followers:
            call(Pending(pending))
        if isinstance(pending.error, MISTAKES) and (
            on_error == "raise" or (on_error != "log" and self._outcomes.sealed_in != link.attempt)
        ):
            raise pending.error
        return Pending(pending)

    def _snapshot(
        self, handover: Handover, state: Any, request: SnapshotRequest, on_busy: str, rng: bool
    ) -> None:
        link, pending = self._link, handover.pending
        link.ready()
        pending.attempt = link.attempt
        budget = link.stall_budget if on_busy == "wait" else 0.0
        deadline = time.monotonic() + budget
        if budget and not link.client.connected and link.client.refusal is None:
            log.warning(
                "the daemon is gone: the snapshot of step %d waits up to %g s for the next one",
                pending.step,
                budget,
            )
        if not link.client.wait_connected(budget):
            if link.client.refusal is not None:
                raise link.client.refusal
            raise DaemonUnreachable(
                "the daemon is gone; training continues, and snapshots resume when the daemon is "
                "back"
            )
        self._begin_again(pending)
        check_step_follows(pending.step, link.last_step, f"attempt {link.attempt}")
        self._session.took_step()
        check_state(state, self.world_size)
        if self.rank == 0:
            self._advice.before_snapshot(state, pending.step, link.attempt)
        handover.begin()
        if self._planner is not None:
            self._hand_over_planned(handover, self._planner, state, request, budget, rng)
        else:
            self._hand_over(handover, state, request, deadline, rng)

    def _begin_again(self, pending: PendingSnapshot) -> None:
        """Begin the next attempt if an interactive session runs its loop again, from a
        step that does not follow the last captured one.
        """
        link, last = self._link, self.last_step
        if pending.step <= last and self.world_size == 1 and self._session.runs_again():
            link.begin_next()
            pending.attempt = link.attempt
            self._advice.run_again(pending.step, last, link.job, link.attempt)

    def _hand_over(
        self, handover: Handover, state: Any, request: SnapshotRequest, deadline: float, rng: bool
    ) -> None:
        link, encoded = self._link, request.encode()
        handover.pending.meets = not self._kept_plan.valid
        if self._kept_plan.valid and link.handovers.slots.fit(0):
            # early: the structure rarely changes, and the daemon answers while it is
            # compared
            handover.request(deadline)
        captured = capture(
            state, rank=self.rank, habits=self._habits, unsaved=handover.pending.unsaved
        )
        self._outcomes.note_unsaved(handover.pending.unsaved or {})
        found = self._kept_plan.reuse(captured)

        def needed(layout: Layout) -> int:
            return document_offsets(
                layout,
                captured.encoded_bytes + self._rng_room,
                len(encoded) + self._replica_check.room,
            )[-1]

        if found is None or not link.handovers.slots.fit(needed(found.layout), found.device):
            # Before the ranks plan, since a step that is refused is refused on all
            # ranks.
            handover.check_not_refused()
        if found is None:
            handover.pending.meets = True
            found = self._kept_plan.renew(captured, state, handover.pending, link.stall_budget)
        layout, check = found.layout, self._replica_check
        if REPLICAS in link.client.welcome.features:
            check.use(self._kept_plan.shared, captured.tensors, found.parts, self.rank, link.node)
        handover.reserve(needed(layout), deadline, found.device)
        values = values_document(captured, rng=rng)
        self._rng_room = max(self._rng_room, len(values) - captured.encoded_bytes)
        handover.acquire()
        self._await_devices(found)
        skipped = check.skipped
        finish = check.begin(found, handover.pending.step, handover.beside)
        handover.pending.uncompared = check.skipped > skipped
        transfer = handover.copy(
            found.sources, layout, captured.modules, found.unlike, captured.tensors.values()
        )
        documents = Documents(
            values, encoded, None if finish is None else partial(_with_replicas, request, finish)
        )
        handover.seal_after(transfer, layout, documents)

    def _await_devices(self, found: PlanInUse) -> None:
        """Wait for writes of devices to tensors on the CPU.

        A copy by `non_blocking=True` into page-locked memory may be under way, and the CPU
        reads this memory at once.
        """
        if self._pinned[0] is not found.addresses:
            self._pinned = found.addresses, pinned(found.sources)
        if self._pinned[1]:
            wait_for_streams(found.sources)

    def _hand_over_planned(
        self,
        handover: Handover,
        planner: SavePlanner,
        state: Any,
        request: SnapshotRequest,
        budget: float,
        rng: bool,
    ) -> None:
        """Hand over a state whose items are planned by the caller's DCP planner."""
        pending, deadline = handover.pending, time.monotonic() + max(budget, PLAN_SECONDS)
        topic = f"plan/{pending.attempt}/{pending.step}"
        planned = plan_save(
            planner, state, self._link.ranks, topic, deadline, lambda: pending.error
        )
        layout, resolved = planned.layout, planned.resolved
        documents = Documents(
            values_of(planned.metadata, rng_state() if rng else None), request.encode()
        )
        device = current_accelerator(layout.plan)
        handover.reserve(documents.offsets(layout)[-1], time.monotonic() + budget, device)
        handover.acquire()
        handover.fill(layout, resolved.sources_of(layout), singly=resolves_by_itself(planner))
        handover.seal_after(None, layout, documents)

    # -- slots

    @interruptible
    def prepare(self, state: Any) -> None:
        """Plan for `state`, then make slots and map their pages in the background, so
        that the first snapshot is as fast as later ones.

        `recover` does this by itself. For an optimizer without state, the slots have
        room for the state that its kind will have.

        Raises UnsavableValue if `state` holds a value that cannot be saved,
        InvalidRequest if the agent is closed, and Busy inside another call of this
        thread.
        """
        with self._link.calls("prepare"):
            self._link.ready()
            self._prepare(state)

    def _prepare(self, state: Any) -> None:
        with paused_collector():
            captured = capture(state, rank=self.rank)
            layout = self._kept_plan.plan_ahead(captured, state) if self._planner is None else None
            planned = (
                self._kept_plan.estimate(captured)
                if layout is None
                else layout.plan.data_length + len(layout.document)
            )
            # This also has NumPy load its generators, so that the first snapshot need not wait.
            values = len(values_document(captured, rng=True))
            self._rng_room = max(self._rng_room, values - captured.encoded_bytes)
            room = (
                planned
                + captured.encoded_bytes
                + self._rng_room
                + optimizer_bytes_to_come(state, self.world_size)
            )
        handovers, device = self._link.handovers, accelerator_of(captured.tensors.values())
        handovers.slots.prepare(room, layout, device)
        if device is not None:
            handovers.sealer.prepare(device)

    # -- recovering

    @interruptible
    def recover(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = True,
        keep: Sequence[str] = (),
        on_reshape: OnReshape | None = None,
        same_partition: bool = False,
    ) -> Recovered | None:
        """Load the newest snapshot that every rank can get into `state`, from memory or
        storage.

        Returns a `Recovered`, or None if the job has no checkpoint. The structure is
        compared before the first byte of `state` is written. A damaged checkpoint is
        passed over, and the next older one is loaded instead. If the recovered step is
        behind the last captured one, the next attempt begins. All ranks call this, and
        all get the same step.

        step: recover this step only, from the highest attempt that has it. Default: the
            newest.
        strict: False allows keys to be missing in the state or in the checkpoint, and
            an optimizer or a scheduler to be of another class or to have other
            parameter groups. Shapes must agree all the same.
        keep: patterns of keys, as for `fnmatch`, whose values stay as they are in
            `state`, like "optim.param_groups.*.lr".
        on_reshape: called as `on_reshape(key, values)` for each `per_rank` value that
            was saved on another number of ranks. `values` lists the value of each of
            those ranks, in their order. It returns this rank's value. Without it,
            recovery raises StructureMismatch.
        same_partition: True promises that as many ranks as saved the state recover it,
            each with the same shards. This is faster with many tensors. Recovery raises
            StructureMismatch if this rank's part of a tensor was not saved as one
            shard.

        Raises StructureMismatch if state and checkpoint differ. Raises NotFound if no
        checkpoint has the given `step`. Raises NotFound as well if an unnamed job has
        no checkpoint while job "default", as earlier versions named it, has some.
        Raises RecoveryFailed if checkpoints exist and none could be loaded. Raises
        NewerFormat if a newer ckptd wrote the checkpoint, StorageError if storage could
        not be read, ForeignMemory if the root has been replaced by another one, and
        DaemonUnreachable. Raises SnapshotFailed if another rank does not reach the same
        point within 600 s. An error on one rank is raised on all ranks. Raises
        InvalidRequest for an invalid `step`, for a `step` that differs between ranks,
        and after `close`. Raises Busy inside another call of this thread, for example
        in a signal handler that interrupts `snapshot`.
        """
        return self._recover(
            state,
            Options(
                strict,
                (keep,) if isinstance(keep, str) else tuple(keep),
                on_reshape,
                same_partition,
                step,
            ),
        )

    @interruptible
    def _recover(self, state: Any, options: Options, *, is_part: bool = False) -> Recovered | None:
        """Recover a state. `is_part` is True if the recovery of the whole state follows."""
        step = options.step
        link = self._link
        # Tensors that are made in inference mode cannot be trained.
        with link.calls("recover"), torch.inference_mode(False):
            link.check_open()
            if (options.keep or options.same_partition) and self._load_planner is not None:
                raise InvalidRequest(
                    "keep and same_partition cannot be combined with a load_planner: the planner "
                    "decides what is loaded"
                )
            if self.world_size == 1:
                link.ready()
            link.client.wait_connected(link.stall_budget)
            # The newest step is the last one that was captured, as on the CPU, and nothing
            # is written to tensors that are still copied.
            link.handovers.sealer.wait(timeout=link.stall_budget)
            settings = None
            if self._kept_plan.settings is None and link.last_step < 0:
                # Later calls see settings that the training or a checkpoint has changed.
                settings = settings_of(state) if options.settings is None else options.settings
            options = replace(options, settings=settings)
            recovery = Recovery(
                link.client,
                link.ranks,
                link.job,
                f"recover/{link.attempt}",
                options,
                self._load_planner,
                nodes=link.node is not None,
            )
            recovered = recovery.run(
                state, step=step, last_step=_UNKNOWN if link.interrupted else link.last_step
            )
            if is_part:
                return recovered
            if options.settings is not None:
                self._kept_plan.settings = options.settings
            if recovered is None and link.unnamed and link.job != DEFAULT:
                check_not_default(link.root, link.job)
            if self.rank == 0 and recovery.restart is not None:
                self._advice.warn_of_repeated_recovery(recovery.restart, self._first_attempt)
            self._advice.recovered(None if recovered is None else recovered.step)
            if recovered is not None and recovered.step < recovery.last_step:
                link.begin_next()
            if recovered is not None:
                recovery.report(recovered)
            try:
                self._prepare(state)
            except CkptdError as error:
                log.warning(
                    "no slots are made before the first snapshot, because this state cannot be "
                    "saved as it is: %s",
                    error,
                )
        return recovered

    # -- closing

    @interruptible
    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Make the newest snapshot durable, even one with `persist=False`, then free
        the slots. Does nothing if the agent is closed.

        timeout: seconds to wait for copies from accelerators, and then again for the
        save, 600 by default. On several ranks the save begins once every step that this
        rank has sealed is sealed by the other ranks too, or has failed. If copies take
        longer, for example because the device hangs, their snapshot is lost, and the
        one that was sealed before is saved once this process has ended.

        Raises SnapshotFailed if the snapshot could not be saved, or if snapshots were
        asked for and none of them was sealed. Raises Fenced if a newer attempt of the
        job has begun, DaemonUnreachable if the daemon does not answer in time, and Busy
        inside another call of this thread. The agent is then closed all the same,
        except after Busy. After an error the daemon treats this process as dead: it
        saves the newest snapshot on its own, and keeps it in memory for a while. A
        process that ends without `close` is treated in the same way.
        """
        again = self.closed
        self._step_times.close()
        self._link.close(timeout)
        if not again and (complaint := self._outcomes.complaint()):
            raise SnapshotFailed(complaint)


def link_of(agent: Agent) -> RankLink:
    """Return the link of an agent to its daemon, for other modules of ckptd."""
    return agent._link


def follow(agent: Agent, call: Callable[[Pending], object]) -> None:
    """Have `call` called with each snapshot that the agent takes from now on, at the end
    of the call of `snapshot`. It must return at once, and raise nothing.
    """
    agent._followers.append(call)


def silence_advice(agent: Agent) -> None:
    """Log no advice about how the agent is called, because a framework calls it."""
    agent._advice.silent = True


def recover_tag(agent: Agent, state: Any, tag: str) -> Recovered | None:
    """Recover the newest checkpoint with this tag, such as "best" or "step-00000100",
    as `Agent.recover` does with `strict=False`. Return None if there is none.

    For other modules of ckptd. Raises the errors of `Agent.recover`.
    """
    return agent._recover(state, Options(strict=False, tag=tag))


def recover_after_part(
    agent: Agent,
    state: Any,
    part: Any,
    whole: Callable[[], Any],
    *,
    step: int | None,
    on_reshape: OnReshape | None,
) -> Recovered | None:
    """Recover `part`, which has some keys of `state`, and then the whole state of the
    same step, which `whole` makes from the recovered part.

    For integrations, as a state may need the form of the snapshot. Raises the errors of
    `Agent.recover` and of `whole`.
    """
    options = Options(strict=False, on_reshape=on_reshape, step=step, settings=settings_of(state))
    found = agent._recover(part, options, is_part=True)
    if found is None:
        return None
    return agent._recover(whole(), replace(options, strict=True, step=found.step))


def _with_replicas(request: SnapshotRequest, digests: Callable[[], list[ReplicaDigests]]) -> bytes:
    return msgspec.structs.replace(request, replicas=digests()).encode()
