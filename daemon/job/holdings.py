"""Decides, by pure functions, what this node shows on the board of several nodes, and
what follows from the answer that it finds there.
"""

from __future__ import annotations

from ckptd.daemon.job import decisions as d
from ckptd.daemon.job import peer_replicas
from ckptd.daemon.job.catalog import Job, Step
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.shared.errors import SnapshotFailed, from_wire
from ckptd.shared.formats.replicas import Brief, briefs, of_node
from ckptd.shared.wire.board import MOST_STEPS, MOST_TEXT, Answer, Holding
from ckptd.shared.wire.lifecycle import SnapshotState
from ckptd.shared.wire.messages import Progress, Waiting

_MOST_REASONS = 8


def holding(job: Job, host: str) -> Holding:
    """Return what this node holds of the newest attempt, for the board.

    `host` is the name of the node, for messages.
    """
    mine = sorted(
        (step for step in job.steps.values() if step.attempt == job.attempt),
        key=lambda step: step.number,
    )
    held = [
        s.number
        for s in mine
        if s.snapshot is not None and s.snapshot.in_memory and s.snapshot.checked
    ]
    told = [s for s in mine if s.failure is not None or s.refusal]
    rest = [s for s in mine if s.number not in held and s not in told]
    open_ = [s for s in rest if not s.idle and not _has_failed(s)]
    seen = max(
        [s.number for s in mine] + [job.sealed[1] if job.sealed[0] == job.attempt else -1],
        default=-1,
    )
    return Holding(
        held=held[-MOST_STEPS:],
        done=open_[0].number - 1 if open_ else seen,
        durable=max(
            (
                c.step
                for c in job.durable_checkpoints()
                if c.attempt == job.attempt and c.step is not None
            ),
            default=-1,
        ),
        failed={s.number: _failure(s, host) for s in told[-_MOST_REASONS:]},
        ranks=list(job.ranks_here),
        begun={s.number: s.absent(job.ranks_here) for s in open_[-MOST_STEPS:] if s.begun},
        overdue=[s.number for s in mine if s.overdue and is_open(job, s)][-MOST_STEPS:],
        replicas={
            number: found
            for number in held[-MOST_STEPS:]
            if (found := _briefs(job.step((job.attempt, number)).snapshot))
        },
        wanted=[number for number in held[-MOST_STEPS:] if _is_wanted(job, number)],
        hosted=peer_replicas.hosted(job),
        alone=job.alone[:MOST_TEXT],
        drained=[number for number in held[-MOST_STEPS:] if _is_drained(job, number)],
    )


def _is_wanted(job: Job, number: int) -> bool:
    """Return True if a step that this node holds is to be copied to the peers."""
    snapshot = job.snapshot((job.attempt, number))
    return snapshot is not None and snapshot.replicate and not job.alone


def _is_drained(job: Job, number: int) -> bool:
    """Return True if a drain has asked for a step that this node holds."""
    snapshot = job.snapshot((job.attempt, number))
    return snapshot is not None and snapshot.drained


def drained(job: Job) -> list[Snapshot]:
    """Return the snapshots to save because a drain of another node has asked for their
    steps, which all nodes hold.
    """
    found = [job.snapshot((job.attempt, step)) for step in job.answer.drained]
    return [
        s
        for s in found
        if s is not None
        and s.state is SnapshotState.SEALED
        and not (s.persist or s.drained or job.is_durable_after(s.key))
    ]


def _briefs(snapshot: Snapshot | None) -> list[Brief]:
    """Return the briefs by which other nodes compare a snapshot with theirs.

    All ranks of this node have sealed the snapshot, so that its briefs never change.
    """
    if snapshot is None:
        return []
    if snapshot.briefs is None:
        snapshot.briefs = briefs(
            of_node({rank: seal.replicas for rank, seal in snapshot.seals.items()})
        )
    return snapshot.briefs


def _has_failed(step: Step) -> bool:
    return step.snapshot is not None and step.snapshot.state is SnapshotState.FAILED


def _failure(step: Step, host: str) -> tuple[str, str]:
    code, reason = step.failure or (
        SnapshotFailed.code,
        f"step {step.number} is skipped: {step.refusal}",
    )
    return code[:64], f"{reason} (on {host})"[:MOST_TEXT]


def is_open(job: Job, step: Step) -> bool:
    """Return True if ranks may still be waited for in a step that ranks of this node
    have come to.
    """
    if step.failure is not None or step.refusal or step.idle or _has_failed(step):
        return False
    answered = step.number in job.answer.common or step.number in job.answer.dead
    return not answered and not job.is_durable(*step.key)


def missing(job: Job, before: Answer) -> list[d.Action]:
    """Tell the ranks which ranks of all nodes have not come to a step, by the answer
    from the board.

    before: the answer before that one. The ranks have been told of its steps.
    """
    return [
        d.Tell(Waiting(re=0, attempt=job.attempt, step=step, ranks=ranks))
        for step, ranks in job.answer.missing.items()
        if step not in before.missing
    ]


def answered(job: Job) -> list[d.Action]:
    """Fail the steps that are dead by the last answer from the board, and release the
    snapshots that it makes needless.

    A snapshot whose save waits for the board is left to the saver, which reads the same
    answer.
    """
    actions: list[d.Action] = []
    for step in [
        s for s in job.steps.values() if s.attempt == job.attempt and s.number in job.answer.dead
    ]:
        error = from_wire(*job.answer.dead[step.number])
        snapshot = step.snapshot
        if step.incomplete:
            actions += d.fail(step, error)
        elif (
            snapshot is not None and snapshot.state is SnapshotState.SEALED and not snapshot.persist
        ):
            message = Progress(
                re=0,
                attempt=step.attempt,
                step=step.number,
                state="failed",
                reason=str(error),
                code=error.code,
            )
            actions += [d.Fail(step.key, error.code, str(error)), d.Tell(message)]
    return actions
