"""Which checkpoints to delete. Pure.

Never the newest, never a user's own tag, and of an older attempt nothing whose step the newest attempt has not passed: whoever started over
may yet want to go back. Of the others, what no policy keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptd.daemon.catalog import StoredCheckpoint
from ckptd.shared.retention import Policy, keeps


def to_retire(
    checkpoints: list[StoredCheckpoint], policies: Sequence[Policy], pinned: Collection[str] = (), *, insisted: bool = False
) -> list[StoredCheckpoint]:
    """Return the checkpoints to delete, oldest first. `policies`: the daemon's; see `policies_of`, unless `insisted`."""
    ordered = _without_user_tags(checkpoints)
    if not ordered:
        return []
    newest = ordered[-1]
    kept = keeps(policies if insisted else policies_of(checkpoints, policies), ordered)

    def passed(checkpoint: StoredCheckpoint) -> bool:
        return checkpoint.attempt == newest.attempt or (checkpoint.step or 0) <= (newest.step or 0)

    return [c for place, c in enumerate(ordered[:-1]) if place not in kept and c.tag not in pinned and passed(c)]


def policies_of(checkpoints: list[StoredCheckpoint], policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Return the policies in force: the job's own, in the newest checkpoint that has any, otherwise the daemon's."""
    own = next((c.retention for c in reversed(_without_user_tags(checkpoints)) if c.retention is not None), None)
    return tuple(policies) if own is None else own


def _without_user_tags(checkpoints: list[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Return the checkpoints that retention may delete at all, oldest first."""
    return sorted((c for c in checkpoints if not c.user_tag), key=lambda c: c.order)
