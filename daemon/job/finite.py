"""Notices that the state of a training has turned non-finite, from the counts of its
checkpoints. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.units import count_text


def turned_non_finite(
    before: Iterable[StoredCheckpoint], committed: StoredCheckpoint, where: str
) -> str:
    """Return a warning if a checkpoint that was just committed has values that are NaN
    or infinite, and the one before it in its attempt has none that are known, or "".

    before: the other checkpoints of the job. where: the location of the committed one.
    """
    if not committed.non_finite:
        return ""
    others = list(before)
    last = max(
        (c for c in others if c.attempt == committed.attempt and c.order < committed.order),
        key=lambda c: c.order,
        default=None,
    )
    if last is not None and last.non_finite:
        return ""
    finite = max((c for c in others if c.non_finite == 0), key=lambda c: c.order, default=None)
    newest = (
        "no checkpoint of the job is known to be finite"
        if finite is None
        else f"the newest checkpoint without such values is {finite.tag}"
    )
    return (
        f"the state has turned non-finite: {count_text(committed.non_finite, 'value')} of the "
        f"parameters and the optimizer state in {committed.job}/{committed.tag} "
        f"{'is' if committed.non_finite == 1 else 'are'} NaN or infinite; {newest}; `ckptd show "
        f"{where}` names the tensors, and retention=[..., ckptd.Finite()] keeps the newest finite "
        f"checkpoint"
    )
