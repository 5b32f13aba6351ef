"""Decides what follows from an event in the life of a step: pure functions from a job
and its step to a list of actions.

Nothing here changes a value, waits, or does I/O. The caller first records the event in
the `Step`, then asks for the decision, and `Steps.perform` carries out its actions in
their order. A function named `check_...` raises the error for the rank that made the
request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptd.daemon.job.catalog import Job, Step
from ckptd.daemon.job.snapshot import Key, RankSeal, Snapshot
from ckptd.shared.errors import (
    AlreadyExists,
    CallerError,
    CkptdError,
    Fenced,
    MachineError,
    NotFound,
    SnapshotFailed,
    StructureChanged,
    check_step_follows,
    from_wire,
)
from ckptd.shared.formats import replicas
from ckptd.shared.formats.membership import MOST_RANKS
from ckptd.shared.units import rank_list
from ckptd.shared.wire.lifecycle import Event, SnapshotState
from ckptd.shared.wire.messages import Progress, Waiting

_MOST_TRIES = 2
_NAMES_A_RANK = re.compile(r"ranks? \d")

# -- actions


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Fail the step unless all ranks have sealed it within `rank_timeout` and `more`
    seconds.

    Before that, name the ranks that have not come to the step.
    """

    key: Key
    more: float = 0.0


@dataclass(frozen=True, slots=True)
class Settle:
    """End the waiting of the ranks for each other: cancel the timer, and forget which
    ranks plan the step.

    Ranks of several nodes may still wait for ranks of another node, so their watch goes
    on.
    """

    key: Key


@dataclass(frozen=True, slots=True)
class Move:
    """Move the snapshot of the step along its life cycle."""

    key: Key
    event: Event


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail the step, and its snapshot if it has one.

    In a job of several ranks the reason is kept for late ranks.
    """

    key: Key
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to every connected rank of the job."""

    message: Progress | Waiting


@dataclass(frozen=True, slots=True)
class Free:
    """Free one segment of the step. Does nothing if the step no longer has it."""

    key: Key
    segment: str


@dataclass(frozen=True, slots=True)
class Release:
    """End the snapshot of the step, if it has one, and free all segments of the step."""

    key: Key


@dataclass(frozen=True, slots=True)
class Save:
    """Start the check and the save of the snapshot of the step."""

    key: Key


@dataclass(frozen=True, slots=True)
class Raise:
    """Answer the request that caused the decision with an error. It comes last."""

    error: CkptdError


Action = StartTimer | Settle | Move | Fail | Tell | Free | Release | Save | Raise


# -- a step fails


def fail(step: Step, error: CkptdError) -> list[Action]:
    """Fail a step that not all ranks will seal.

    If all ranks have sealed it, or it has failed already, only the waiting ends.

    If some ranks planned the step again and others kept their plan, a plain
    SnapshotFailed becomes StructureChanged, and all ranks plan again at the next
    snapshot.
    """
    if type(error) is SnapshotFailed and step.planned and step.kept:
        error = StructureChanged(str(error))
    if step.failure is not None or not step.incomplete:
        return [Settle(step.key)]
    message = Progress(
        re=0,
        attempt=step.attempt,
        step=step.number,
        state="failed",
        reason=str(error),
        code=error.code,
    )
    return [
        Fail(step.key, error.code, str(error)),
        Tell(message),
        Release(step.key),
        Settle(step.key),
    ]


def _refuse(step: Step, error: CkptdError) -> list[Action]:
    return [*fail(step, error), Raise(error)]


def expired(job: Job, step: Step, rank_timeout: float) -> list[Action]:
    """Fail a step whose timer has ended, and name the ranks that are late."""
    came = step.snapshot.seals if step.snapshot is not None else step.planned
    everyone = list(job.ranks_here)
    # If all ranks plan, any of them may be late.
    late = [rank for rank in everyone if rank not in came] or everyone
    why = f"step {step.number} failed: {rank_list(late)} did not seal it within {rank_timeout:g} s"
    return fail(
        step,
        SnapshotFailed(
            f"{why}: every rank must call snapshot(step={step.number}), not only some of them"
        ),
    )


def waiting(job: Job, step: Step) -> list[Action]:
    """Tell the ranks which ranks of this node have not come to a step that others wait
    for.

    A rank that has come and still copies is not named.
    """
    if step.attempt != job.attempt or step.timer is None or step.failure is not None:
        return []
    here = list(job.ranks_here)
    missing = step.absent(here)
    if not missing or missing == here:  # without a rank that has come, there is none that waits
        return []
    return [Tell(Waiting(re=0, attempt=step.attempt, step=step.number, ranks=missing[:MOST_RANKS]))]


def passed_over(job: Job, step: Step, rank: int, reason: str, code: str) -> list[Action]:
    """Fail a step that a rank cannot save, unless this rank has sealed it.

    A reason that begins with a rank came from another rank.

    The rank of a job of one is not notified: it may already be trying the step again,
    and the new try must not fail.
    """
    if not step.incomplete or step.sealed_by(rank):
        return []
    why = reason if _NAMES_A_RANK.match(reason) else f"rank {rank}: {reason}"
    error = from_wire(code, why)
    actions = fail(
        step,
        error
        if isinstance(error, (CallerError, MachineError, SnapshotFailed))
        else SnapshotFailed(why),
    )
    return (
        actions
        if job.world_size > 1
        else [action for action in actions if not isinstance(action, Tell)]
    )


def left(job: Job, attempt: int, rank: int, how: str) -> list[Action]:
    """Fail the steps that a rank has not sealed when it leaves, then the steps that the
    ranks are still planning.

    Also free the slots that an earlier daemon granted to this rank: their steps have no
    snapshot that could fail.
    """
    steps = [step for step in job.steps.values() if step.attempt == attempt]
    unsealed = [step for step in steps if step.filling is not None and not step.sealed_by(rank)]
    planned = [step for step in steps if step.snapshot is None and step.timer is not None]
    granted = [step for step in steps if step.snapshot is None and step.timer is None]
    failed = [
        action
        for step in [*unsealed, *planned]
        for action in fail(
            step,
            SnapshotFailed(
                f"step {step.number} failed: rank {rank} {how} before it sealed the step"
            ),
        )
    ]
    return [
        *failed,
        *(
            Free(step.key, segment)
            for step in granted
            for segment, whose in step.slots.items()
            if whose == rank
        ),
    ]


def superseded(job: Job) -> list[Action]:
    """Fail the incomplete snapshots of earlier attempts, because a newer attempt has
    begun.
    """
    error = Fenced(
        f"a newer attempt of job {job.name!r} has begun: this run can no longer save; stop it, or "
        f"use another job name"
    )
    old = [
        step
        for step in job.steps.values()
        if step.attempt < job.attempt and step.snapshot is not None and not step.snapshot.complete
    ]
    return [action for step in old for action in fail(step, error)]


# -- a rank plans a step, and requests a slot


def check_turn(job: Job, rank: int, key: Key, last_sealed: int) -> None:
    """Check that a rank may take a step now.

    `last_sealed` is the last step of this attempt that all ranks are known to have
    sealed.

    Raises InvalidRequest if the step is not after that step, the step's own error if it
    has failed, SnapshotFailed if a rank is gone.
    """
    attempt, number = key
    step = job.steps.get(key, Step(key))
    if step.failure is not None:
        raise from_wire(*step.failure)
    for other, how in sorted(job.ranks.gone.items()):
        raise SnapshotFailed(
            f"rank {other} of attempt {attempt} of job {job.name!r} has {how}: no snapshot can be "
            f"complete without it; start the job again"
        )
    if step.filling is not None and not step.sealed_by(rank):
        return
    last = max([last_sealed, *(s.step for s in job.snapshots if s.attempt == attempt)])
    check_step_follows(number, last, f"attempt {attempt}")


def check_tag(job: Job, key: Key, tag: str, user_tag: str) -> None:
    """Raise AlreadyExists if the tag that the user chose for a step is the tag of
    another step.
    """
    if (
        tag in job.checkpoints
        or tag in job.in_root
        or any(s.tag == tag and s.key != key for s in job.snapshots)
    ):
        raise AlreadyExists(
            f"tag {user_tag!r} is taken in attempt {key[0]} of job {job.name!r}; choose another tag"
        )


def planned(step: Step, more: float) -> list[Action]:
    """Start the timer of a step that a rank plans again.

    Fail the step if another rank has sealed it with its old plan.

    more: the seconds that the ranks have for planning, beyond the time to seal the
    step.
    """
    actions = _expect(step, more)
    if step.snapshot is not None and not step.kept.isdisjoint(step.snapshot.seals):
        actions += _refuse(step, _structure_changed(step))
    return actions


def requested(step: Step, rank: int, tag: str) -> list[Action]:
    """Start the timer of a step for which a rank requests a slot.

    Fail the step if another rank gives it another tag.
    """
    actions = _expect(step)
    if error := _other_tag(step, rank, tag):
        actions += _refuse(step, error)
    return actions


def skipped(step: Step, reason: str) -> list[Action]:
    """End the waiting for a step that a rank skips because it gets no slot.

    Fail the step if ranks are planning it.

    If a rank has sealed the step already, the timer continues, because only the timer
    then ends the waiting of that rank.
    """
    if step.planned:
        return fail(step, SnapshotFailed(f"step {step.number} is skipped: {reason}"))
    return [] if step.snapshot is not None and step.snapshot.seals else [Settle(step.key)]


def _expect(step: Step, more: float = 0.0) -> list[Action]:
    return [StartTimer(step.key, more)] if step.timer is None else []


def _other_tag(step: Step, rank: int, tag: str) -> SnapshotFailed | None:
    """Return an error if another rank gives the step another tag than this rank does."""
    if step.snapshot is None or step.snapshot.tag == tag:
        return None
    known = step.snapshot.tag
    return SnapshotFailed(
        f"rank {rank} saves step {step.number} as {tag!r}, another rank as {known!r}: pass the "
        f"same tag on all ranks"
    )


def _structure_changed(step: Step) -> StructureChanged:
    changed = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(step.planned.items()))
    return StructureChanged(
        f"step {step.number} failed, because the structure of the state changed on some ranks only "
        f"({changed}; not on {rank_list(sorted(step.kept))}); every rank plans again at the next "
        f"snapshot"
    )


# -- a rank has sealed its slot


def rejected(step: Step, segment: str, error: CkptdError) -> list[Action]:
    """Fail the step of a seal that cannot be accepted, and free the slot."""
    return [*fail(step, error), Free(step.key, segment), Raise(error)]


def seal_read(job: Job, step: Step, rank: int, segment: str, tag: str) -> list[Action]:
    """Reject a seal that has been read if its step has failed, or if its tag is taken
    or differs from that of other ranks.
    """
    if step.failure is not None:
        return rejected(step, segment, from_wire(*step.failure))
    if segment not in step.slots:
        return [
            Raise(
                NotFound(
                    f"segment {segment[:8]} was taken back while its seal of step {step.number} "
                    f"was being read"
                )
            )
        ]
    if (tag in job.checkpoints or tag in job.in_root) and not job.is_durable(*step.key):
        return rejected(
            step,
            segment,
            AlreadyExists(f"tag {tag!r} of job {job.name!r} is taken; choose another tag"),
        )
    if error := _other_tag(step, rank, tag):
        return rejected(step, segment, error)
    return []


def seal_journaled(step: Step, seal: RankSeal) -> list[Action]:
    """Reject a seal, journaled but not yet added to its snapshot, if its plan or
    `persist` differs from that of other ranks.
    """
    others = [] if step.snapshot is None else list(step.snapshot.seals.values())
    if step.planned and seal.rank in step.kept:
        return rejected(step, seal.segment, _structure_changed(step))
    if differ := sorted(other.rank for other in others if other.global_plan != seal.global_plan):
        error: CkptdError = StructureChanged(
            f"step {step.number} failed: rank {seal.rank} sealed another plan than "
            f"{rank_list(differ)}; "
            "every rank plans again at the next snapshot"
        )
        return rejected(step, seal.segment, error)
    if step.snapshot is not None and step.snapshot.node != seal.node:
        error = SnapshotFailed(
            f"step {step.number} failed: rank {seal.rank} says that other ranks are on this node "
            f"than the daemon knows"
        )
        return rejected(step, seal.segment, error)
    if differ := sorted(other.rank for other in others if other.persist != seal.persist):
        error = SnapshotFailed(
            f"step {step.number} has persist={seal.persist} on rank {seal.rank}, but "
            f"persist={not seal.persist} on {rank_list(differ)}: "
            "pass the same on all ranks"
        )
        return rejected(step, seal.segment, error)
    return []


def sealed(job: Job, step: Step) -> list[Action]:
    """Start the timer of a step after its first seal, and save its snapshot after its
    last seal.

    The snapshot is not saved if ranks hold different copies of the tensors that they
    share. The digests that show this are in the slots. A daemon that adopts the slots
    makes the same decision, so that such a step never comes back.
    """
    assert step.snapshot is not None
    if not step.snapshot.complete:
        return _expect(step)
    if step.snapshot.state is not SnapshotState.FILLING:
        return []
    if differences := replicas.compare(
        {rank: seal.replicas for rank, seal in step.snapshot.seals.items()}
    ):
        return fail(step, SnapshotFailed(replicas.sentence(step.number, differences)))
    after = Move(step.key, Event.COMMIT) if job.is_durable(*step.key) else Save(step.key)
    return [Settle(step.key), Move(step.key, Event.SEAL), after]


def news(snapshot: Snapshot) -> Progress:
    """Return the message that a snapshot is durable, or that its save has failed."""
    state = "durable" if snapshot.state is SnapshotState.DURABLE else "failed"
    return Progress(
        re=0,
        attempt=snapshot.attempt,
        step=snapshot.step,
        state=state,
        reason=snapshot.reason,
        code=snapshot.code,
    )


# -- slots


def has_another(step: Step, segment: str) -> bool:
    """Return True if the rank of this segment has another segment for the step, because
    it requested a slot twice.
    """
    return any(
        rank == step.slots[segment] and other != segment for other, rank in step.slots.items()
    )


def replaced(job: Job) -> list[Action]:
    """Release every snapshot that a newer sealed one has replaced."""
    return [Release(snapshot.key) for snapshot in job.releasable()]


def closed(job: Job, attempt: int) -> list[Action]:
    """Release the settled snapshots of an attempt, because a rank has detached."""
    return [Release(s.key) for s in job.snapshots if s.attempt == attempt and job.is_settled(s)]


def durable(job: Job, before: int | None = None) -> list[Action]:
    """Release the durable snapshots that no reader holds.

    If `before` is given, release only those of earlier attempts.
    """
    found = [s for s in job.snapshots if s.state is SnapshotState.DURABLE and not s.holds]
    return [Release(s.key) for s in found if before is None or s.attempt < before]


def given_up(job: Job) -> list[Action]:
    """Release the snapshots of several nodes that this node cannot bring any further,
    once `memory_ttl` has ended.

    Its parts are delivered, another node will never seal the step, or its tries were
    abandoned twice.
    """
    failed = [
        s
        for s in job.snapshots
        if s.node is not None and s.state is SnapshotState.FAILED and not s.holds
    ]
    return [
        Release(s.key)
        for s in failed
        if s.delivered or job.is_dead(s) or s.abandoned >= _MOST_TRIES
    ]


def blocking(
    job: Job, attempt: int, usable: Mapping[int, Sequence[str]], granted: Key | None = None
) -> list[Key]:
    """Return the steps in the slots of the ranks that have no free slot. (attempt, -1)
    stands for a rank that has no slots yet.

    usable: the segments of each rank, without those that larger ones have replaced.
    granted: the step that is decided, or None. A rank that has a slot for it already is
    left out.
    """
    keys: set[Key] = set()
    for segments in usable.values():
        steps = [job.step_in(segment) for segment in segments]
        if None not in steps:
            held = {step.key for step in steps if step is not None} or {(attempt, -1)}
            keys |= held if granted not in held else set()
    return sorted(keys)


def why_no_slot(job: Job, blocked: Iterable[Key]) -> tuple[str, Key | None]:
    """Return the reason why a step gets no slots, and the key of the incomplete
    snapshot that blocks it, if that is the reason.
    """
    for key in blocked:
        step = job.steps.get(key)
        if step is not None and step.filling is not None and (late := _late(step, step.filling)):
            return (
                f"{rank_list(late)} {'has' if len(late) == 1 else 'have'} not sealed step "
                f"{step.number} yet",
                key,
            )
    if any(number < 0 for _, number in blocked):
        return "another rank has no slots yet", None
    return "every slot is still being saved", None


def _late(step: Step, snapshot: Snapshot) -> list[int]:
    """Return the ranks that have not sealed the snapshot and whose seal is not being
    read. Return [] if the job has one rank.
    """
    if len(snapshot.ranks) == 1:
        return []
    under_way = {step.slots.get(segment) for segment in step.reading}
    return [rank for rank in snapshot.missing if rank not in under_way]
