"""Decides which actions follow from an event in the life of a step.

Each decision is a pure function from a job and its step to a list of actions. It changes
no value, does not wait, and does no I/O. The caller records the event in the `Step`
first, then calls the function. `Steps.perform` carries out the actions in their order. A
function named `check_...` raises the error for the rank that made the request.
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
from ckptd.shared.formats.membership import MOST_RANKS, Membership
from ckptd.shared.units import rank_list
from ckptd.shared.wire.lifecycle import Event, SnapshotState
from ckptd.shared.wire.messages import Progress, Waiting

MOST_TRIES = 2
"""The number of abandoned tries after which the memory of a snapshot is freed."""
_NAMES_A_RANK = re.compile(r"ranks? \d")

# -- actions


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Start the timer of the step, which fails the step unless all ranks have sealed it
    within `rank_timeout` plus `more` seconds.

    Earlier, tell the ranks which ranks have not come to the step.
    """

    key: Key
    more: float = 0.0


@dataclass(frozen=True, slots=True)
class EndWait:
    """End the waiting of the ranks of this node for each other: cancel the timer, and
    forget which ranks plan the step.

    In a job of several nodes, the watch on ranks of other nodes continues.
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


Action = StartTimer | EndWait | Move | Fail | Tell | Free | Release | Save | Raise


# -- a step fails


def fail(step: Step, error: CkptdError) -> list[Action]:
    """Fail a step that some rank will not seal.

    If all ranks have sealed the step, or it has failed already, only end the wait.

    If some ranks have planned the step again and others have kept their plan, a plain
    SnapshotFailed becomes StructureChanged. All ranks then plan again at the next
    snapshot.
    """
    if type(error) is SnapshotFailed and step.planned and step.kept:
        error = StructureChanged(str(error))
    if step.failure is not None or not step.incomplete:
        return [EndWait(step.key)]
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
        EndWait(step.key),
    ]


def _refuse(step: Step, error: CkptdError) -> list[Action]:
    return [*fail(step, error), Raise(error)]


def expired(job: Job, step: Step, rank_timeout: float) -> list[Action]:
    """Fail a step whose time is over, and name the ranks that are late."""
    came = step.snapshot.seals if step.snapshot is not None else step.planned
    everyone = list(job.ranks_here)
    # If all ranks have come to the step, it is not known which of them is late.
    late = [rank for rank in everyone if rank not in came] or everyone
    why = f"step {step.number} failed: {rank_list(late)} did not seal it within {rank_timeout:g} s"
    return fail(
        step,
        SnapshotFailed(
            f"{why}: every rank must call snapshot(step={step.number}), not only some of them"
        ),
    )


def waiting(job: Job, step: Step) -> list[Action]:
    """Tell the ranks of a job for which ranks of this node a step waits.

    A rank that has come to the step, and still copies its state, is not named.
    """
    if step.attempt != job.attempt or step.timer is None or step.failure is not None:
        return []
    here = list(job.ranks_here)
    missing = step.absent(here)
    if not missing or missing == here:  # if no rank has come, no rank waits
        return []
    return [Tell(Waiting(re=0, attempt=step.attempt, step=step.number, ranks=missing[:MOST_RANKS]))]


def passed_over(job: Job, step: Step, rank: int, reason: str, code: str) -> list[Action]:
    """Fail a step that a rank cannot save, unless this rank has sealed it.

    reason: the error. If it begins with a rank, that rank has caused it, and the rank
    of the request has only passed it on.

    In a job of one rank, the rank is not notified: it knows the error, and may already
    be trying the step again.
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
    """Fail the steps that a leaving rank has not sealed, and those that the ranks are
    still planning.

    Also free the slots that an earlier daemon granted to this rank. Their steps have no
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

    last_sealed: the last step of this attempt that all ranks are known to have sealed.

    Raises InvalidRequest if the step is not after the last step of the attempt, the
    error of the step if it has failed, SnapshotFailed if a rank is gone.
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
    """Raise AlreadyExists if another step has this tag.

    tag: the name of the checkpoint's directory. user_tag: the tag as the user has written it.
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
    """Start the timer of a step that a rank plans again. Fail the step if another rank has
    sealed it with the plan that it had.

    more: seconds for planning, in addition to the time to seal the step.
    """
    actions = _expect(step, more)
    if step.snapshot is not None and not step.kept.isdisjoint(step.snapshot.seals):
        actions += _refuse(step, _structure_changed(step))
    return actions


def requested(step: Step, rank: int, tag: str) -> list[Action]:
    """Start the timer of a step for which a rank requests a slot. Fail the step if
    another rank saves it under another tag.
    """
    actions = _expect(step)
    if error := _other_tag(step, rank, tag):
        actions += _refuse(step, error)
    return actions


def skipped(step: Step, reason: str) -> list[Action]:
    """End the wait for a step that a rank skips because it gets no slot. Fail the step if
    ranks are planning it.

    If another rank has sealed the step, do nothing: that rank waits until the timer
    fails the step.
    """
    if step.planned:
        return fail(step, SnapshotFailed(f"step {step.number} is skipped: {reason}"))
    return [] if step.snapshot is not None and step.snapshot.seals else [EndWait(step.key)]


def _expect(step: Step, more: float = 0.0) -> list[Action]:
    return [StartTimer(step.key, more)] if step.timer is None else []


def _other_tag(step: Step, rank: int, tag: str) -> SnapshotFailed | None:
    """Return an error if another rank has begun to save the step under another tag."""
    if step.snapshot is None or step.snapshot.tag == tag:
        return None
    known = step.snapshot.tag
    return SnapshotFailed(
        f"rank {rank} saves step {step.number} as {tag!r}, and another rank saves it as "
        f"{known!r}: pass the same tag on all ranks"
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
    """Reject a seal: fail its step, free its slot, and raise the error."""
    return [*fail(step, error), Free(step.key, segment), Raise(error)]


def seal_read(job: Job, step: Step, rank: int, segment: str, tag: str) -> list[Action]:
    """Reject a seal, read from its slot, if the step has failed, or if the tag is taken
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
    """Reject a seal, journaled but not yet added to its snapshot, if its plan, the
    membership of its node or its `persist` differs from that of other ranks.
    """
    others = [] if step.snapshot is None else list(step.snapshot.seals.values())
    if step.planned and seal.rank in step.kept:
        return rejected(step, seal.segment, _structure_changed(step))
    if differ := sorted(other.rank for other in others if other.global_plan != seal.global_plan):
        return rejected(
            step,
            seal.segment,
            StructureChanged(
                f"step {step.number} failed, because the plan of rank {seal.rank} differs from "
                f"that of {rank_list(differ)}; every rank plans again at the next snapshot"
            ),
        )
    if step.snapshot is not None and step.snapshot.node != seal.node:
        return rejected(
            step,
            seal.segment,
            SnapshotFailed(
                f"step {step.number} failed: rank {seal.rank} says that {_members(seal.node)} are "
                f"on this node, and the ranks that sealed before it say "
                f"{_members(step.snapshot.node)}: "
                "start the job again"
            ),
        )
    if differ := sorted(other.rank for other in others if other.persist != seal.persist):
        return rejected(
            step,
            seal.segment,
            SnapshotFailed(
                f"step {step.number} has persist={seal.persist} on rank {seal.rank}, but "
                f"persist={not seal.persist} on {rank_list(differ)}: "
                "pass the same on all ranks"
            ),
        )
    return []


def _members(node: Membership | None) -> str:
    return f"{rank_list(node.ranks)} of run {node.run_id[:8]}" if node else "all ranks of the job"


def sealed(job: Job, step: Step) -> list[Action]:
    """Start the timer of a step after its first seal. After its last seal, save its
    snapshot.

    Fail the step if ranks hold different copies of a tensor that they share. The slots
    contain the digests that show this, so a later daemon that adopts the slots decides
    the same.
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
    return [EndWait(step.key), Move(step.key, Event.SEAL), after]


def news(snapshot: Snapshot) -> Progress:
    """Return the message that tells the ranks that a snapshot is durable, or that its
    save has failed.
    """
    return Progress(
        re=0,
        attempt=snapshot.attempt,
        step=snapshot.step,
        state="durable" if snapshot.state is SnapshotState.DURABLE else "failed",
        reason=snapshot.reason,
        code=snapshot.code,
    )


# -- slots


def has_another(step: Step, segment: str) -> bool:
    """Return True if the rank with this segment holds another segment for the same step,
    because it has requested a slot twice.
    """
    return any(
        rank == step.slots[segment] and other != segment for other, rank in step.slots.items()
    )


def replaced(job: Job) -> list[Action]:
    """Release every snapshot that a newer sealed one has replaced."""
    return [Release(snapshot.key) for snapshot in job.releasable()]


def closed(job: Job, attempt: int) -> list[Action]:
    """Release the settled snapshots of an attempt after a rank has detached."""
    return [Release(s.key) for s in job.snapshots if s.attempt == attempt and job.is_settled(s)]


def durable(job: Job, before: int | None = None) -> list[Action]:
    """Release the durable snapshots that no reader holds.

    If `before` is given, release only those of earlier attempts.
    """
    found = [s for s in job.snapshots if s.state is SnapshotState.DURABLE and not s.holds]
    return [Release(s.key) for s in found if before is None or s.attempt < before]


def given_up(job: Job) -> list[Action]:
    """Release the failed snapshots of several nodes for which this node can do nothing
    more. Called when `memory_ttl` is over.

    This node has delivered its parts, another node will never seal the step, or two
    tries were abandoned.
    """
    failed = [
        s
        for s in job.snapshots
        if s.node is not None and s.state is SnapshotState.FAILED and not s.holds
    ]
    return [
        Release(s.key) for s in failed if s.delivered or job.is_dead(s) or s.abandoned >= MOST_TRIES
    ]


def blocking(
    job: Job, attempt: int, usable: Mapping[int, Sequence[str]], granted: Key | None = None
) -> list[Key]:
    """Return the steps that fill the slots of the ranks without a free slot.

    (attempt, -1) stands for a rank that has no slots yet.

    usable: the segments of each rank, without those that larger segments have replaced.
    granted: the step that requests slots, or None. A rank that has a slot for this step
    is left out.
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
    """Return the ranks from which the seal of the snapshot has not arrived, or [] if the
    job has one rank.
    """
    if len(snapshot.ranks) == 1:
        return []
    under_way = {step.slots.get(segment) for segment in step.reading}
    return [rank for rank in snapshot.missing if rank not in under_way]
