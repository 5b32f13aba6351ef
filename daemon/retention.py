"""Which checkpoints to delete. Pure.

Never the newest, never a user's own tag, and of an older attempt nothing whose step the newest attempt has not passed: whoever started over
may yet want to go back. Of the others, what no policy keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptd.daemon.catalog import Checkpoint
from ckptd.shared.retention import Policy, keeps


def to_retire(
    checkpoints: list[Checkpoint], policies: Sequence[Policy], pinned: Collection[str] = (), *, insisted: bool = False
) -> list[Checkpoint]:
    """Oldest first. `policies`: the daemon's; the job's own, in the newest checkpoint that has any, come before them, unless `insisted`."""
    ordered = sorted((c for c in checkpoints if not c.user_tag), key=lambda c: c.order)
    if not ordered:
        return []
    newest = ordered[-1]
    own = None if insisted else next((c.retention for c in reversed(ordered) if c.retention is not None), None)
    kept = keeps(policies if own is None else own, ordered)

    def passed(checkpoint: Checkpoint) -> bool:
        return checkpoint.attempt == newest.attempt or (checkpoint.step or 0) <= (newest.step or 0)

    return [c for place, c in enumerate(ordered[:-1]) if place not in kept and c.tag not in pinned and passed(c)]
