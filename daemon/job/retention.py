"""Decides which checkpoints of a job retention deletes. Does no I/O.

Retention deletes the checkpoints that no policy keeps or that a limit takes away, with
four exceptions: the newest checkpoint, pinned checkpoints, checkpoints with a user's
own tag, and checkpoints of an older attempt whose step the newest attempt has not
reached yet. A user who has started over may still want to go back to a checkpoint of
the last kind.

Retention deletes nothing while a policy cannot choose, because no checkpoint of the job
has its metric.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.retention import (
    LatestN,
    Limit,
    MaxAge,
    Policy,
    PreserveAll,
    brief,
    excess,
    keepers,
    keeps,
    unrankable,
)
from ckptd.shared.units import span_text

_DAY = 24 * 60 * 60


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision about one checkpoint.

    `kept`: False if retention deletes it. `reason`: one clause for people. `limit`: the
    limit that takes it away, or None.
    """

    checkpoint: StoredCheckpoint
    kept: bool
    reason: str
    limit: Limit | None = None


def judged(
    checkpoints: list[StoredCheckpoint],
    policies: Sequence[Policy],
    pinned: Collection[str] = (),
    *,
    insisted: bool = False,
) -> list[Ruling]:
    """Return the ruling on each checkpoint, oldest first. The arguments are those of
    `to_retire`.
    """
    in_force = policies if insisted else policies_of(checkpoints, policies)
    ordered = _without_user_tags(checkpoints)
    by_policy = {policy: policy.keeps(ordered) for policy in keepers(in_force)}
    kept = keeps(in_force, ordered)
    safe = _safe(ordered, pinned)
    taken = excess(in_force, ordered, kept, safe)
    found = [
        Ruling(c, True, "it has a tag of your own" + (" and is pinned" * (c.tag in pinned)))
        for c in checkpoints
        if c.user_tag
    ]
    for place, c in enumerate(ordered):
        if place in safe:
            found.append(Ruling(c, True, safe[place]))
        elif place in taken:
            found.append(Ruling(c, False, _beyond(taken[place], c, ordered), taken[place]))
        elif place in kept:
            by = [brief(policy) for policy, places in by_policy.items() if place in places]
            found.append(Ruling(c, True, f"kept by {', '.join(by)}"))
        else:
            found.append(Ruling(c, False, "no policy keeps it"))
    return sorted(found, key=lambda ruling: ruling.checkpoint.order)


def _safe(ordered: list[StoredCheckpoint], pinned: Collection[str]) -> dict[int, str]:
    """Return the indices of the checkpoints that no policy deletes, each with the
    reason.
    """
    safe: dict[int, str] = {}
    for place, c in enumerate(ordered):
        newest = ordered[-1]
        if c is newest:
            safe[place] = "it is the newest"
        elif c.tag in pinned:
            safe[place] = "it is pinned"
        elif c.attempt != newest.attempt and (c.step or 0) > (newest.step or 0):
            safe[place] = f"attempt {newest.attempt} has not reached its step"
    return safe


def _beyond(limit: Limit, c: StoredCheckpoint, ordered: list[StoredCheckpoint]) -> str:
    """Return the reason why a limit takes a checkpoint away."""
    if isinstance(limit, MaxAge):
        seconds = ordered[-1].created - c.created
        older = f"{seconds / _DAY:.1f} days" if seconds > 2 * _DAY else span_text(seconds)
        return f"it is {older} older than the newest, more than {brief(limit)} allows"
    return f"the job would hold more than {brief(limit)} allows"


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
    rulings = judged(checkpoints, policies, pinned, insisted=insisted)
    return [ruling.checkpoint for ruling in rulings if not ruling.kept]


def unforeseen(rulings: list[Ruling], foreseen: Collection[str], *, changed: bool) -> list[Ruling]:
    """Return those of the deletions in `rulings` that are only to be announced now, and
    made after the next commit; none if that would be a single one.

    They are all of them after a change of the policies, otherwise those by a limit of
    age that have not been announced: if the clock of one trainer is wrong, its first
    checkpoint deletes nothing. foreseen: the tags that were announced.
    """
    sudden = [
        ruling
        for ruling in rulings
        if changed or (isinstance(ruling.limit, MaxAge) and ruling.checkpoint.tag not in foreseen)
    ]
    return sudden if len(sudden) > 1 else []


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
    if not any(not isinstance(policy, Limit) for policy in others):
        others.append(LatestN(1))  # limits alone keep everything, and the newest stays anyway
    if not found or not (insisted or to_retire(checkpoints, others, pinned, insisted=True)):
        return ""
    return "; ".join(
        f"BestN({policy.metric!r}, {policy.n}) cannot choose: {why}"
        for policy, why in found.items()
    )


def keeps_all(count: int, policies: Sequence[Policy]) -> bool:
    """Return True if policies surely delete none of so many checkpoints.

    They may delete none although the result is False.
    """
    return not any(isinstance(policy, Limit) for policy in policies) and any(
        isinstance(policy, PreserveAll) or (isinstance(policy, LatestN) and policy.n >= count)
        for policy in policies
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
