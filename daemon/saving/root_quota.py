"""Warns when the checkpoints of a root hold more bytes than its quota. It never deletes
anything, and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ckptd.daemon.job.catalog import Job
from ckptd.shared.units import size_text

log = logging.getLogger("ckptd.saver")


def used_bytes(jobs: Iterable[Job]) -> int:
    """Return about how many bytes the checkpoints of these jobs take on storage.

    Files that checkpoints of a job share count once: the oldest checkpoint counts with
    all its files, and each other one with those that it does not share with an older
    one.
    """
    used = 0
    for job in jobs:
        found = sorted(job.live_checkpoints(), key=lambda c: c.order)
        used += sum(c.nbytes for c in found[:1]) + sum(c.new_bytes or c.nbytes for c in found[1:])
    return used


class RootQuota:
    """The quota of one root in bytes, 0 for none, and whether it was exceeded at the
    last commit.
    """

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._exceeded = False

    def watch(self, jobs: Iterable[Job]) -> str:
        """Return a warning if the quota has been exceeded since the last call, or "".

        Log a line once it is kept again.
        """
        if not self.quota:
            return ""
        before, used = self._exceeded, used_bytes(jobs)
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
        return {"used_bytes": used_bytes(jobs), "quota_bytes": self.quota} if self.quota else None
