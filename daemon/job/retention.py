"""Decides which checkpoints of a job retention deletes. Does no I/O.

Retention deletes the checkpoints that no policy keeps, with three exceptions: the
newest checkpoint, checkpoints with a user's own tag, and checkpoints of an older
attempt whose step the newest attempt has not reached yet. A user who has started over
may still want to go back to a checkpoint of the last kind.

Retention deletes nothing while a policy cannot choose, because no checkpoint of the job
has its metric.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.retention import Policy, keeps, unrankable


def to_retire(
    checkpoints: list[StoredCheckpoint],
    policies: Sequence[Policy],
    pinned: Collection[str] = (),
    *,
    insisted: bool = False,
) -> list[StoredCheckpoint]:
    """Return the checkpoints to delete, oldest first. Tags in `pinned` are left out.

    policies: those of the daemon, which apply only if the job has none of its own; with
    `insisted` they apply in any case.
    """
    ordered = _without_user_tags(checkpoints)
    if not ordered:
        return []
    newest = ordered[-1]
    kept = keeps(policies if insisted else policies_of(checkpoints, policies), ordered)

    def passed(checkpoint: StoredCheckpoint) -> bool:
        return checkpoint.attempt == newest.attempt or (checkpoint.step or 0) <= (newest.step or 0)

    return [
        c
        for place, c in enumerate(ordered[:-1])
        if place not in kept and c.tag not in pinned and passed(c)
    ]


def obstacle(
    checkpoints: list[StoredCheckpoint],
    policies: Sequence[Policy],
    pinned: Collection[str] = (),
    *,
    insisted: bool = False,
) -> str:
    """Return the reason why no checkpoint may be deleted now, or "" if there is none.

    The reason is a policy BestN that cannot choose, because no checkpoint has its
    metric. It does not count while the other policies alone would delete nothing
    either. With `insisted`, it always counts, because a person has just written the
    policy. The arguments are those of `to_retire`.
    """
    in_force = policies if insisted else policies_of(checkpoints, policies)
    found = unrankable(in_force, _without_user_tags(checkpoints))
    others = [policy for policy in in_force if policy not in found]
    if not found or not (insisted or to_retire(checkpoints, others, pinned, insisted=True)):
        return ""
    return "; ".join(
        f"BestN({policy.metric!r}, {policy.n}) cannot choose: {why}"
        for policy, why in found.items()
    )


def policies_of(
    checkpoints: list[StoredCheckpoint], policies: Sequence[Policy]
) -> tuple[Policy, ...]:
    """Return the policies in force: those of the job, from its newest checkpoint that
    has any, otherwise the daemon's `policies`.
    """
    own = next(
        (c.retention for c in reversed(_without_user_tags(checkpoints)) if c.retention is not None),
        None,
    )
    return tuple(policies) if own is None else own


def _without_user_tags(checkpoints: list[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Return the checkpoints without a user's own tag, oldest first.

    Retention may delete no others.
    """
    return sorted((c for c in checkpoints if not c.user_tag), key=lambda c: c.order)
