"""Which checkpoints to keep. Pure.

Never the newest, never a user's own tag, and of an older attempt nothing whose step the newest attempt has not passed: whoever started over
may yet want to go back. Ages play no part, since nothing is ordered by a clock.
"""

from __future__ import annotations

from ckptd.daemon.catalog import Checkpoint


def to_retire(checkpoints: list[Checkpoint], keep_last: int) -> list[Checkpoint]:
    """Those beyond the `keep_last` newest (0 keeps all), oldest first."""
    ordered = sorted((c for c in checkpoints if not c.user_tag), key=lambda c: c.order)
    if keep_last == 0 or len(ordered) <= keep_last:
        return []
    newest = ordered[-1]

    def passed(checkpoint: Checkpoint) -> bool:
        return checkpoint.attempt == newest.attempt or (checkpoint.step or 0) <= (newest.step or 0)

    return [c for c in ordered[:-keep_last] if passed(c)]
