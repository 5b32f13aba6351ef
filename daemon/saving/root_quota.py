"""Warns when the checkpoints of a root hold more bytes than its quota. It never deletes
anything, and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.units import size_text

log = logging.getLogger("ckptd.saver")


def used_bytes(jobs: Iterable[Job], *, shared: bool = True) -> int:
    """Return about how many bytes the checkpoints of these jobs take on storage.

    shared: True if a linked file takes room once. Otherwise links are copies.

    Files that checkpoints of a job share count once: the oldest checkpoint counts with
    all its files, and each other one with those that it does not share with an older
    one.
    """
    used = 0
    for job in jobs:
        found = sorted(job.live_checkpoints(), key=lambda c: c.order)
        for older, checkpoint in zip([None, *found], found, strict=False):
            alone = not shared or older is None or not _shares(checkpoint, older)
            used += checkpoint.nbytes if alone else checkpoint.new_bytes or checkpoint.nbytes
    return used


def _shares(checkpoint: StoredCheckpoint, older: StoredCheckpoint) -> bool:
    """Return True if the files that a checkpoint has linked are likely to be those of an
    older one.

    Each save makes a chain one delta longer at most. So if there were fewer saves since
    the older checkpoint than the chain has deltas, the older one has the whole base, too.
    """
    if checkpoint.attempt != older.attempt:
        return False
    return not checkpoint.chain or checkpoint.seq - older.seq <= checkpoint.chain


class RootQuota:
    """The quota of one root in bytes, 0 for none, and whether it was exceeded at the
    last commit.
    """

    def __init__(self, quota: int, *, shared: bool = True) -> None:
        """shared: as for `used_bytes`."""
        self.quota, self._shared = quota, shared
        self._exceeded = False

    def watch(self, jobs: Iterable[Job]) -> str:
        """Return a warning if the quota has been exceeded since the last call, or "".

        Log a line once it is kept again.
        """
        if not self.quota:
            return ""
        before, used = self._exceeded, used_bytes(jobs, shared=self._shared)
        self._exceeded = used > self.quota
        if self._exceeded and not before:
            return (
                f"the checkpoints under the root hold {size_text(used)}, more than its root_quota "
                f"of {size_text(self.quota)}; nothing is deleted for that: delete some (`ckptd "
                f"forget`), limit the jobs (MaxBytes in keep), or raise root_quota"
            )
        if before and not self._exceeded:
            log.info(
                "the checkpoints under the root hold %s, within its root_quota of %s again",
                size_text(used),
                size_text(self.quota),
            )
        return ""

    def report(self, jobs: Iterable[Job]) -> dict[str, int] | None:
        """Return the part of `ckptd status --json` about the quota, or None without a
        quota.
        """
        if not self.quota:
            return None
        return {"used_bytes": used_bytes(jobs, shared=self._shared), "quota_bytes": self.quota}
