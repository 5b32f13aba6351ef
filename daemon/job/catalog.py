"""Holds the daemon's knowledge of each job: its ranks, its steps, its snapshots in
memory and its checkpoints on storage.

All that is known of one step is in one `Step`. This module does no I/O. `decisions.py`
decides on these values, and `steps.py` carries the decisions out. Snapshots and
checkpoints are ordered by (attempt, step), never by a clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ckptd.daemon.job.changed import Changed
from ckptd.daemon.job.ranks import Ranks
from ckptd.daemon.job.snapshot import Key, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, NewerFormat, StorageError, from_wire
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.receipt import Abandonment
from ckptd.shared.formats.reuse import MOST_IN_CHAIN, StoredPart
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.retention import Policy
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import SnapshotState

# The last steps of a job that failed or were skipped, so that a late rank learns the
# reason.
_REMEMBERED = 64


@dataclass(slots=True, eq=False)
class SlotDecision:
    """One decision whether a step gets slots.

    The task returns the reason for skipping the step, or "".

    `asked` has the ranks that wait for the decision. A rank that asks again starts a
    new one.
    """

    task: asyncio.Task[str]
    asked: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Step:
    """All that the daemon knows of one step of one attempt, from the first request that
    names it until nothing more is needed of it.

    `slots`: the rank of each segment that is granted for the step or holds it, by
    segment. `reading`: the segments whose seal is being read, once for each reader.
    `snapshot`: None before a slot is granted, and again after the slots have been
    freed.

    `planned`: the ranks that plan the step again, with the reason. `kept`: the ranks
    that have requested a slot without planning again; as far as the daemon knows, they
    use the plan that they had. `timer`: fails the step when it ends; None while no rank
    waits for another.

    `came`: the ranks that have planned the step again or requested a slot, also if they
    have skipped it since. `watch`: the timer at whose end the ranks that have not come
    are named; None after that. Of several nodes, `begun` is True once other nodes are
    shown that ranks of this node have come, and `overdue` once they are shown that
    these ranks wait.

    `decision`: the last decision whether the step gets slots. `refusal`: the reason why
    the step was skipped, or "". `failure`: code and reason, if the step failed before
    all ranks had sealed it. A job of one rank may try a step again, so its steps have
    neither.
    """

    key: Key
    slots: dict[str, int] = field(default_factory=dict)
    reading: list[str] = field(default_factory=list)
    planned: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    came: set[int] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    watch: asyncio.TimerHandle | None = None
    begun: bool = False
    overdue: bool = False
    decision: SlotDecision | None = None
    refusal: str = ""
    failure: tuple[str, str] | None = None
    snapshot: Snapshot | None = None

    @property
    def attempt(self) -> int:
        return self.key[0]

    @property
    def number(self) -> int:
        return self.key[1]

    @property
    def filling(self) -> Snapshot | None:
        """The snapshot, if not all ranks have sealed it yet."""
        return (
            self.snapshot
            if self.snapshot is not None and self.snapshot.state is SnapshotState.FILLING
            else None
        )

    @property
    def incomplete(self) -> bool:
        """True if not all ranks have sealed the step, whether or not a slot is granted
        for it.
        """
        return self.snapshot is None or self.filling is not None

    def absent(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the `ranks` that have neither planned the step again nor
        requested a slot.
        """
        came = {*self.came, *self.slots.values()}  # an earlier daemon may have granted a slot
        return [rank for rank in ranks if rank not in came]

    def sealed_by(self, rank: int) -> Snapshot | None:
        """The snapshot, if this rank has sealed it."""
        return self.snapshot if self.snapshot is not None and rank in self.snapshot.seals else None

    @property
    def idle(self) -> bool:
        """True if the record has nothing but, at most, the reason why the step failed
        or was skipped.
        """
        deciding = self.decision is not None and not self.decision.task.done()
        return not (self.slots or self.reading or self.timer or deciding or self.snapshot)

    def plan_again(self, rank: int, why: str) -> None:
        self.came.add(rank)
        self.planned[rank] = why
        self.kept.discard(rank)

    def keep_plan(self, rank: int) -> None:
        """Record that a rank has requested a slot.

        It keeps its plan, unless it has said that it plans again.
        """
        self.came.add(rank)
        if rank not in self.planned:
            self.kept.add(rank)

    def end_wait(self) -> None:
        """Cancel the timer, and forget which ranks plan: they no longer wait for each
        other.
        """
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.planned.clear()
        self.kept.clear()

    def unwatch(self) -> None:
        """Cancel the watch, because no rank waits for another one."""
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None

    def __repr__(self) -> str:
        what = self.snapshot or self.failure or self.refusal or "new"
        return f"<Step {self.number} of attempt {self.attempt}: {len(self.slots)} slots, {what}>"


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that could not be saved, with the reason.

    `step`: None if the step itself was wrong. `when`: Unix seconds.
    """

    step: int | None
    reason: str
    when: float


@dataclass(frozen=True, slots=True)
class EarlierAttempt:
    """An earlier attempt of a job: its number, the number of its ranks, and those of
    them that were on this node.
    """

    attempt: int = 0
    world_size: int = 0
    ranks: tuple[int, ...] = ()


def _fitting(free: int, delta: int, whole: int, left: int) -> int:
    """Return how many checkpoints fit into `free` bytes if a chain takes `left` more
    deltas of `delta` bytes, and each chain after it begins with `whole` bytes.
    """
    if free < left * delta:
        return free // delta
    chains, rest = divmod(free - left * delta, whole + MOST_IN_CHAIN * delta)
    more = 0 if rest < whole else 1 + (rest - whole) // delta
    return left + chains * (1 + MOST_IN_CHAIN) + more


@dataclass(frozen=True, slots=True)
class LastPart:
    """The part of a rank that was saved last, and the slot that it was written from.

    segment, header: the name of the slot's segment, and the header that it had then.
    The trainer may have filled the slot again since.
    """

    part: StoredPart
    segment: str
    header: SegmentHeader


@dataclass(slots=True)
class Job:
    """One job: its newest attempt, its ranks, its steps, and its checkpoints on
    storage.

    `attempt`: the newest attempt that has begun; no other attempt may seal.
    `world_size`: the number of ranks in this attempt, or 0 if only checkpoints tell of
    the attempt. `node`: the membership of this
    node in the attempt, or None if all ranks are on this node. `answer`: the last
    answer from the board in this attempt (`shared/wire/board.py`). `earlier`: the
    attempt before this one that began on this node. `abandoned`: by tag, the tries of
    older attempts that are abandoned.

    `unsealed`: how many snapshots in a row were not sealed by all ranks. `barren`: how
    many attempts before this one in a row have sealed nothing, since this daemon
    started.

    `steps`: one record for each step; use `step` to make one. `sealed`: the newest
    snapshot that all ranks have sealed, whether or not it still exists. `stuck`: the
    incomplete snapshot that a rank has waited for in vain; the next ranks do not wait
    for it again. `changed` has news when a slot becomes free, when the ranks stop waiting
    for a step or have sealed one, when a rank leaves, when an attempt begins, and when a
    checkpoint is durable. `begin_lock`: held while an attempt begins.

    `uncommitted`: tags without a manifest at the last scan. `damaged`: tags whose
    manifest could not be read, with the reason. `newer`: tags whose manifest a newer
    ckptd has written, with the error. `denied`: tags whose manifest this user has no
    permission to read, with the error. `guards`: tags that have a feature for deleters
    that this version does not know, with that feature. `retiring`: tags that are being
    deleted. `seq`: the highest `seq` of a checkpoint. `policies`: the policies of the
    last retention. None before this daemon's first commit in the job, and while one of
    the policies cannot choose. `announced`: a sentence about the deletion that the next
    commit will bring, or about the reason why retention deletes nothing, or "".
    `foreseen`: the tags that `announced`, or an earlier announcement, has named.
    `last_failure`: the last step that failed since this daemon started, or None.
    `stored`: the parts of the last save, by rank, if this daemon has written them.
    `peer_replicas`: copies of snapshots of other nodes, by (attempt, step) and the lowest
    rank of the node. `receiving`: the step and the rank of each segment into which such a
    copy is received. `alone`: the reason why this node makes no peer replicas any more in
    this attempt, or "".
    `in_root`: with a stage, the checkpoints in the root, as far as they are known;
    `checkpoints` are then those of the stage.
    """

    name: str
    attempt: int = 0
    world_size: int = 1
    node: Membership | None = None
    answer: Answer = field(default_factory=Answer)
    earlier: EarlierAttempt = EarlierAttempt()
    abandoned: dict[str, Abandonment] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    steps: dict[Key, Step] = field(default_factory=dict)
    sealed: Key = (0, -1)
    stuck: Key | None = None
    barren: int = 0
    unsealed: int = 0
    changed: Changed = field(default_factory=Changed)
    begin_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    checkpoints: dict[str, StoredCheckpoint] = field(default_factory=dict)
    uncommitted: set[str] = field(default_factory=set)
    damaged: dict[str, str] = field(default_factory=dict)
    newer: dict[str, str] = field(default_factory=dict)
    denied: dict[str, str] = field(default_factory=dict)
    guards: dict[str, str] = field(default_factory=dict)
    retiring: set[str] = field(default_factory=set)
    policies: tuple[Policy, ...] | None = None
    announced: str = ""
    foreseen: set[str] = field(default_factory=set)
    last_failure: Failure | None = None
    stored: dict[int, LastPart] = field(default_factory=dict)
    peer_replicas: dict[tuple[Key, int], Snapshot] = field(default_factory=dict)
    receiving: dict[str, tuple[Key, int]] = field(default_factory=dict)
    alone: str = ""
    in_root: dict[str, StoredCheckpoint] = field(default_factory=dict)
    seq: int = 0

    @property
    def ranks_here(self) -> Sequence[int]:
        """The ranks of the newest attempt that are on this node."""
        return self.node.ranks if self.node is not None else range(self.world_size)

    # -- steps

    def step(self, key: Key) -> Step:
        """Return the record of a step, which is made if there is none.

        After an `await` it must be looked up again.
        """
        return self.steps.setdefault(key, Step(key))

    def step_in(self, segment: str) -> Step | None:
        """Return the step for which a segment was granted, whether it is sealed or not.

        Return None if the segment is free.
        """
        return next((step for step in self.steps.values() if segment in step.slots), None)

    def occupy(self, segment: str, rank: int, key: Key) -> Step:
        """Give a segment to a step, and return the step.

        If another step had the segment, it has it no longer.
        """
        before = self.step_in(segment)
        if before is not None:
            del before.slots[segment]
        step = self.step(key)
        step.slots[segment] = rank
        return step

    def tidy(self) -> None:
        """Drop the records that nothing needs.

        Of the steps that failed or were skipped, the last ones are kept for late ranks.
        """
        idle = [step for step in self.steps.values() if step.idle]
        told = [step for step in idle if step.failure or step.refusal]
        for step in [
            *(step for step in idle if not (step.failure or step.refusal)),
            *told[:-_REMEMBERED],
        ]:
            del self.steps[step.key]

    @property
    def snapshots(self) -> list[Snapshot]:
        """The snapshots in memory, complete or not."""
        return [step.snapshot for step in self.steps.values() if step.snapshot is not None]

    def snapshot(self, key: Key) -> Snapshot | None:
        step = self.steps.get(key)
        return None if step is None else step.snapshot

    # -- checkpoints

    def newest_checkpoint(self) -> StoredCheckpoint | None:
        return max(self.live_checkpoints(), key=lambda c: c.order, default=None)

    def durable_checkpoints(self) -> list[StoredCheckpoint]:
        """Return the checkpoints on storage.

        With a stage, these are those of the stage and those in the root.
        """
        return [
            *self.live_checkpoints(),
            *(c for c in self.in_root.values() if c.tag not in self.checkpoints),
        ]

    def durable(self, tag: str) -> StoredCheckpoint | None:
        """Return the durable checkpoint with this tag, or None if it is not known."""
        return self.checkpoints.get(tag) or self.in_root.get(tag)

    def newest_durable(self, but: Collection[str] = ()) -> StoredCheckpoint | None:
        """Return the newest of the durable checkpoints whose tags are not in `but`."""
        return max(
            (c for c in self.durable_checkpoints() if c.tag not in but),
            key=lambda c: c.order,
            default=None,
        )

    def room_for(self, free: int | None, newest: StoredCheckpoint | None = None) -> int | None:
        """Return how many more checkpoints fit into `free` bytes if each needs as much
        as the newest, or None if either is unknown.

        newest: the newest checkpoint, if the caller knows it.
        """
        newest = newest or self.newest_checkpoint()
        if free is None or newest is None:
            return None
        # Otherwise the next checkpoint stores every chunk.
        links = any(last.part.attempt == newest.attempt for last in self.stored.values())
        if not links or not newest.new_bytes:
            return free // max(newest.nbytes, 1)
        if not newest.chain:
            return free // newest.new_bytes
        left = max(0, MOST_IN_CHAIN - newest.chain)
        return _fitting(free, newest.new_bytes, newest.nbytes, left)

    def live_checkpoints(self) -> list[StoredCheckpoint]:
        return [c for c in self.checkpoints.values() if c.tag not in self.retiring]

    def has_sealed_nothing(self) -> bool:
        """Return True if no step of the newest attempt is known to be sealed."""
        durable = self.newest_durable()
        return max(self.sealed[0], durable.attempt if durable else 0) < self.attempt

    def newest_in_memory(self) -> Snapshot | None:
        return max(
            (s for s in self.snapshots if s.in_memory and not self.is_dead(s)),
            key=lambda s: s.key,
            default=None,
        )

    def unreadable_beyond(self, best: Key, step: int | None) -> CkptdError | None:
        """Return the error of a recovery of `best`, or None if it may be recovered.

        The reason is a later checkpoint that a newer ckptd has written, or that this
        user has no permission to read.

        best: (attempt, step) of the best candidate, with step -1 if it has none, or (0,
        -1) if there is no candidate. step: the step that the caller wants, or None for
        the newest. A user's own tag does not tell its step, so its checkpoint counts as
        the latest of its attempt.
        """
        for tag, why in sorted((self.newer | self.denied).items(), reverse=True):
            parsed = names.parse_tag_directory(tag)
            assert parsed is not None
            its = (parsed.attempt, math.inf if parsed.step is None else parsed.step)
            if (step is None or parsed.step in (None, step)) and its > best:
                return (StorageError if tag in self.denied else NewerFormat)(
                    f"checkpoint {self.name}/{tag} is newer than every checkpoint that this ckptd "
                    f"can read: {why}; "
                    "or recover an older one with step="
                )
        return None

    def abandoned_beyond(self, best: Key) -> list[Abandonment]:
        """Return an abandoned try of each later step than `best`: the first one, if a
        step has several.
        """
        found: dict[Key, Abandonment] = {}
        for _, one in sorted(self.abandoned.items()):
            if (one.attempt, one.step) > best:
                found.setdefault((one.attempt, one.step), one)
        return list(found.values())

    @property
    def guard(self) -> str:
        """The reason why nothing may be deleted in this job, or "".

        A newer ckptd may have made checkpoints that need others.
        """
        if not self.guards:
            return ""
        tag, feature = min(self.guards.items())
        return (
            f"nothing is deleted in job {self.name!r}, because {tag} has the feature {feature!r} "
            f"for deleters, which this ckptd does "
            "not know: upgrade it"
        )

    def is_durable(self, attempt: int, step: int) -> bool:
        return any((c.attempt, c.step) == (attempt, step) for c in self.durable_checkpoints())

    def commit(self, checkpoint: StoredCheckpoint) -> None:
        self.checkpoints[checkpoint.tag] = checkpoint
        self.seq = max(self.seq, checkpoint.seq)
        self.changed.notify()

    def forget_older(self, most: int) -> None:
        """Forget all but the newest `most` checkpoints. They stay on storage."""
        if len(self.checkpoints) > most:
            for old in sorted(self.checkpoints.values(), key=lambda c: c.order)[:-most]:
                del self.checkpoints[old.tag]

    def releasable(self) -> list[Snapshot]:
        """Return the settled snapshots whose slots may be reused.

        These are the snapshots before the newest one in memory, and durable snapshots
        that a rank has detached from. Return none while no complete snapshot is in
        memory.
        """
        newest = self.newest_in_memory()
        return [
            s
            for s in self.snapshots
            if self.is_settled(s) and (self.is_dead(s) or self._is_done(s, newest))
        ]

    def _is_done(self, snapshot: Snapshot, newest: Snapshot | None) -> bool:
        return newest is not None and (
            self.is_replaced(snapshot, newest)
            or (snapshot.unwanted and snapshot.state is SnapshotState.DURABLE)
        )

    def is_replaced(self, snapshot: Snapshot, newest: Snapshot) -> bool:
        """Return True if a newer snapshot makes this one needless.

        `newest`: the newest one in memory.

        On several nodes, a snapshot that is not delivered is needed until all nodes
        hold a newer one, or a newer one is durable. Otherwise a node could die before
        it seals the newer one, and no step would be left that all nodes hold.

        A snapshot that all nodes have copied to their peers, or copy now, is needed until
        all have copied a newer one. Otherwise a node could be lost with the newer one.
        While it is copied, this holds although it is durable: a node that freed it would
        end the copies of the others, which may be slower.
        """
        if snapshot.attempt == self.attempt and snapshot.step == self.answer.replicating:
            return False
        if snapshot.node is None or snapshot.state is SnapshotState.DURABLE or snapshot.delivered:
            return snapshot.key < newest.key
        return self.is_durable_after(snapshot.key) or (
            snapshot.attempt == self.attempt
            and any(
                snapshot.step < step
                for step in (
                    self.answer.replicated
                    if snapshot.step in self.answer.replicated
                    else self.answer.common
                )
            )
        )

    def is_durable_after(self, key: Key) -> bool:
        """Return True if a checkpoint of a later step is durable."""
        return any(checkpoint.order[:2] > key for checkpoint in self.durable_checkpoints())

    def is_settled(self, snapshot: Snapshot) -> bool:
        """Return True if nothing reads the snapshot's slots, and no save of it is
        running or still to come.
        """
        return not snapshot.holds and (
            snapshot.state in (SnapshotState.DURABLE, SnapshotState.FAILED)
            or (snapshot.state is SnapshotState.SEALED and not snapshot.persist)
        )

    def owed(self) -> list[Snapshot]:
        """Return the snapshots to save when the trainer is gone: those of `unsaved`
        that are not being saved.
        """
        return [
            s for s in self.unsaved() if s.state in (SnapshotState.SEALED, SnapshotState.FAILED)
        ]

    def unsaved(self) -> list[Snapshot]:
        """Return the snapshots that are needed and are in memory only.

        This is the newest snapshot in memory, unless it is durable. If the job is on
        several nodes, another node may not have sealed the newest step. Each node
        therefore saves all steps that it holds and that are newer than the newest
        durable step, except the steps that it has delivered and those that are known to
        be dead.
        """
        newest, saved = self.newest_in_memory(), self.newest_durable()
        if newest is None:
            return []
        if newest.node is None:
            found = [newest]
        else:
            floor = saved.order[:2] if saved is not None else (0, -1)
            found = [
                s
                for s in sorted(self.snapshots, key=lambda s: s.key)
                if s.in_memory and s.key > floor and not (s.delivered or self.is_dead(s))
            ]
        return [
            s for s in found if s.state is not SnapshotState.DURABLE and not self.is_durable(*s.key)
        ]

    def may_save(self, snapshot: Snapshot) -> bool:
        """Return True if a sealed snapshot of several nodes may be written: all nodes
        hold it, or its trainers are not all here any more.

        The trainers carry the board. Without them, each node saves all it holds. Raises
        the reason if another node will never seal the step.
        """
        if snapshot.attempt < self.attempt:
            return True
        if (dead := self.answer.dead.get(snapshot.step)) is not None:
            raise from_wire(*dead)
        return snapshot.step in self.answer.common or any(
            not self.ranks.has(snapshot.attempt, rank) for rank in snapshot.ranks
        )

    def is_dead(self, snapshot: Snapshot) -> bool:
        """Return True if another node will never seal this step."""
        return snapshot.attempt == self.attempt and snapshot.step in self.answer.dead


class Catalog:
    """The jobs of one daemon by name. `job` adds a job that is not known yet."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}

    def job(self, name: str) -> Job:
        return self.jobs.setdefault(name, Job(name))

    def newest_known(self, name: str) -> Key:
        """Return attempt and step of the newest snapshot of a job, in memory or on
        storage, or (0, -1) if there is none.
        """
        job = self.jobs.get(name)
        if job is None:
            return 0, -1
        held = job.newest_in_memory()
        return max(
            (0, -1) if held is None else held.key,
            *((c.attempt, -1 if c.step is None else c.step) for c in job.durable_checkpoints()),
            (0, -1),
        )
