"""Finds jobs that train on and are no longer saved, because a rank hangs or the training
takes no snapshots.

The limit follows from how often a job was saved. A run that has a rhythm is known to be
late within about a minute. Before that, a run may load its data and compile.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptd.daemon import log_events
from ckptd.daemon.job.catalog import Job
from ckptd.shared.units import some_text, span_text

log = logging.getLogger("ckptd.telemetry")

LOOK_SECONDS = 10.0
"""Seconds between two looks."""
LEAST_SECONDS = 60.0
LEAST_SECONDS_AT_FIRST = 600.0
"""The least limit of a run that has saved fewer than `_KNOWN` checkpoints."""
_INTERVALS = 5.0
"""A job is overdue after so many of its usual intervals, and at least after the least
limit.
"""
_OF_THE_LONGEST = 1.5
"""An evaluation may take longer than that. A job that has been so late once, and was
saved again, is given this multiple of it, but not more than `LEAST_SECONDS_AT_FIRST`: it
may have been an outage.
"""
_CHECKPOINTS = 12
_KNOWN = 3


@dataclass(frozen=True, slots=True)
class Late:
    """A job that is overdue.

    seconds: since its newest checkpoint was made, or since its processes were started
    if that was later. usual: the usual seconds between two checkpoints. stopped: the
    ranks whose process is stopped by a signal, as "rank 1 (pid 4711)".
    """

    seconds: float
    usual: float
    stopped: Sequence[str] = ()

    def __str__(self) -> str:
        why = (
            "a rank hangs, or the training takes no snapshots: look at the log of each rank, and "
            "at its stack with `py-spy dump --pid PID`"
        )
        if self.stopped:
            why = (
                f"{some_text(self.stopped, 4)} {'is' if len(self.stopped) == 1 else 'are'} stopped "
                f"by a signal, such as SIGSTOP: continue it with `kill -CONT PID`, or end the run "
                f"and start it again"
            )
        return (
            f"last saved {span_text(self.seconds)} ago, and usually every "
            f"{span_text(self.usual)}: {why}"
        )


def limit(earlier: Sequence[float], of_this_run: Sequence[float] = (), longest: float = 0) -> float:
    """Return the seconds after which the next checkpoint of a job is overdue; infinite
    while fewer than 3 checkpoints are known.

    earlier: when all checkpoints of the job were made, in Unix seconds. of_this_run:
    those of them that the present run has made. longest: the longest time between two
    checkpoints of a run that is known.
    """
    if len(_known(of_this_run)) >= _KNOWN:
        allowed = min(_OF_THE_LONGEST * longest, LEAST_SECONDS_AT_FIRST)
        return max(LEAST_SECONDS, _INTERVALS * usual(of_this_run), allowed)
    if len(_known(earlier)) < _KNOWN:
        return math.inf
    return max(LEAST_SECONDS_AT_FIRST, _INTERVALS * usual(earlier))


def usual(created: Sequence[float]) -> float:
    """Return the usual seconds between two of at least two checkpoints."""
    return statistics.median(_intervals(created))


def _intervals(created: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(_known(created))]


def _known(created: Sequence[float]) -> list[float]:
    return sorted(time for time in created if math.isfinite(time))[-_CHECKPOINTS:]


class Overdue:
    """The jobs that are overdue.

    `late` has those of the last look, by the name of the job. Each is logged once for
    each checkpoint that is its newest.
    """

    def __init__(self, is_stopped: Callable[[int], bool] = lambda pid: False) -> None:
        """is_stopped: returns True if the process with this number is stopped by a
        signal.
        """
        self._is_stopped = is_stopped
        self._told: dict[str, str] = {}
        self._longest: dict[str, tuple[int, float]] = {}
        self.late: dict[str, Late] = {}

    def look(self, jobs: Iterable[Job], now: float) -> None:
        """Find the jobs that are overdue, and log an event for each new one.

        A job counts from its newest checkpoint on, or from the start of its processes if
        that is later. now: in Unix seconds.
        """
        self.late = {job.name: late for job in jobs if (late := self._look(job, now)) is not None}

    def _look(self, job: Job, now: float) -> Late | None:
        if not job.ranks.owners or (newest := job.newest_durable()) is None:
            return None
        started = max(owner.process.started for owner in job.ranks.owners.values())
        known = job.durable_checkpoints()
        earlier = [one.created for one in known]
        of_this_run = [
            one.created for one in known if one.attempt == job.attempt and one.created > started
        ]
        longest = max([self._longest_of(job), *_intervals(of_this_run)])
        self._longest[job.name] = (job.attempt, longest)
        seconds = now - max(newest.created, started)
        if not started or not seconds > limit(earlier, of_this_run, longest):
            return None
        late = Late(seconds, usual(earlier), self._stopped(job))
        if self._told.get(job.name) != newest.tag:
            self._told[job.name] = newest.tag
            log_events.SAVES_OVERDUE.log(
                log, "job %s: %s", job.name, late,
                job=job.name, tag=newest.tag, seconds=seconds,
            )  # fmt: skip
        return late

    def _longest_of(self, job: Job) -> float:
        attempt, longest = self._longest.get(job.name, (0, 0.0))
        return longest if attempt == job.attempt else 0.0

    def _stopped(self, job: Job) -> list[str]:
        return [
            f"rank {rank} (pid {owner.process.pid})"
            for rank, owner in sorted(job.ranks.owners.items())
            if owner.process.pid and self._is_stopped(owner.process.pid)
        ]
