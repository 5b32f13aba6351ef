"""Tells that a job trains on and is no longer saved."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ckptd.daemon import log_events
from ckptd.daemon.job.catalog import Job
from ckptd.shared.units import span_text

log = logging.getLogger("ckptd.telemetry")

LOOK_SECONDS = 30.0
"""Seconds between two looks."""
LEAST_SECONDS = 600.0
_INTERVALS = 5.0
"""A job is overdue after so many of its usual intervals, and at least `LEAST_SECONDS`."""
_CHECKPOINTS = 12
_KNOWN = 3


def limit(created: Sequence[float]) -> float:
    """Return the seconds after which the next checkpoint of a job is overdue, from the
    times of its checkpoints in Unix seconds; infinite while fewer than 3 are known.
    """
    known = sorted(time for time in created if math.isfinite(time))[-_CHECKPOINTS:]
    if len(known) < _KNOWN:
        return math.inf
    usual = statistics.median(later - earlier for earlier, later in pairwise(known))
    return max(LEAST_SECONDS, _INTERVALS * usual)


class Overdue:
    """The jobs that were told to be overdue, each with its newest checkpoint then."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def look(self, jobs: Iterable[Job], now: float) -> None:
        """Log an event for each job that is overdue, once for each checkpoint that is
        its newest.

        A job counts from its newest checkpoint on, or from the start of its processes if
        that is later. now: in Unix seconds.
        """
        for job in jobs:
            newest = job.newest_durable()
            if newest is None or not job.ranks.owners or self._told.get(job.name) == newest.tag:
                continue
            started = max(owner.process.started for owner in job.ranks.owners.values())
            late = now - max(newest.created, started)
            if started and late > limit([one.created for one in job.durable_checkpoints()]):
                self._told[job.name] = newest.tag
                log_events.SAVES_OVERDUE.log(
                    log, "job %s trains on and was last saved %s ago (%s), much longer than usual: "
                    "see `ckptd status` and the log of the training",
                    job.name, span_text(late), newest.tag, job=job.name, tag=newest.tag,
                    seconds=late,
                )  # fmt: skip
