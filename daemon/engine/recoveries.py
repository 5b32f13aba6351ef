"""Counts and logs the recoveries that agents report. Nothing else depends on them."""

from __future__ import annotations

import logging
from collections import Counter

from ckptd.daemon import log_events
from ckptd.daemon.job.durations import RECOVERY_SECONDS, Durations
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.units import size_text
from ckptd.shared.wire import messages as m

log = logging.getLogger("ckptd.engine")

STORAGE = "storage"
SOURCES = ("memory", "stage", STORAGE)
"""The places that a recovery may read from."""


_MOST_DAMAGED, _MOST_TEXT = 16, 1000
"""The checkpoints and the characters that a report may bring into the log."""


class Recoveries:
    """The recoveries of all jobs since the start of the daemon.

    `counts`: how many there were, by source. `times`: how long they took.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.times = Durations(RECOVERY_SECONDS)

    def add(
        self, job: str, rank: int, report: m.ReportRecovery, restored_bytes: int | None = None
    ) -> None:
        """Count and log a recovery of a job that `rank` reports, and log the damage that
        it has met.

        restored_bytes: the stored bytes that a restore of the checkpoint reads, or None
        if they are not known. They are logged only if the source was storage.
        Raises InvalidRequest for another rank than 0, and for a source that is not known.
        """
        if rank != 0:
            raise InvalidRequest(
                f"rank {rank} reports a recovery; expected that only rank 0 does, for all ranks"
            )
        if report.source not in SOURCES:
            raise InvalidRequest(
                f"the source of a recovery is {report.source!r}; expected one of "
                f"{', '.join(SOURCES)}"
            )
        for damage in report.passed_over[:_MOST_DAMAGED]:
            where, _, reason = damage[:_MOST_TEXT].partition(" ")
            log_events.CHECKPOINT_DAMAGED.log(
                log, "a recovery of job %s has passed over a damaged checkpoint: %s. Look at the "
                "disk, and run `ckptd verify`", job, damage[:_MOST_TEXT],
                job=job, tag=where.removeprefix(f"{job}/").removesuffix(":"), reason=reason,
            )  # fmt: skip
        self.counts[report.source] += 1
        self.times.add(report.seconds)
        log_events.JOB_RECOVERED.log(
            log, "job %s has recovered %s (%s) from %s in %.2f s",
            job, report.tag, size_text(report.bytes), report.source, report.seconds,
            job=job, tag=report.tag, step=report.step, attempt=report.attempt,
            source=report.source, seconds=report.seconds, bytes=report.bytes,
            restored_bytes=restored_bytes if report.source == STORAGE else None,
        )  # fmt: skip
