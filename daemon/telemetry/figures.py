"""Holds the figures that the event loop publishes, and the board that other threads
read them from.

The loop replaces whole values, and never changes one that it has published. A thread
that reads the board therefore needs no lock, and the loop never waits for it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ckptd.daemon.job.durations import Distribution


@dataclass(frozen=True, slots=True)
class JobFigures:
    """The figures of one job.

    `last_step` and `last_created`: those of the newest durable checkpoint, None if it
    has none or is not there; `last_created` is in Unix seconds. `room`: how many more
    checkpoints fit, or None if that is not known. `ranks`: the connected ranks of this
    node. `damaged`: the checkpoints whose manifest could not be read. `non_finite`: how
    many values of the newest durable checkpoint are NaN or infinite, or None if they
    were not counted. `chain`: the number of deltas in its longest chain. `replicated`:
    the newest step that all nodes have copied to their peers, or None. `replicas_off`:
    1 if the nodes make no more copies in this attempt although they were set to, else
    0, or None if the job is on one node. `unlocked`: bytes of slots that were not
    page-locked when the last snapshots were copied into them from accelerators.
    """

    name: str
    checkpoints: int = 0
    last_step: int | None = None
    last_created: float | None = None
    room: int | None = None
    ranks: int = 0
    damaged: int = 0
    non_finite: int | None = None
    chain: int | None = None
    replicated: int | None = None
    replicas_off: int | None = None
    unlocked: int = 0


@dataclass(frozen=True, slots=True)
class DaemonFigures:
    """The figures of a daemon at one moment. Sizes are bytes.

    `jobs_known`: the number of all jobs; `jobs` may have only some of them. `snapshots`:
    how many snapshots ended with each result. `pending`: bytes that are sealed in memory and
    will be saved. `persisted`: the bytes of saves, raw and stored. `chunks`: the chunks of
    saves, by how they are stored. `recoveries`: how many recoveries of jobs read from each source.
    `disk_free`: None while the storage does not answer. `refused`: living processes that
    have been refused for longer than a minute.
    """

    jobs: tuple[JobFigures, ...]
    jobs_known: int
    snapshots: dict[str, int]
    sealed: int
    verify_failures: int
    uncompared: int
    stalls: Distribution
    saves: Distribution
    persisted: dict[str, int]
    chunks: dict[str, int]
    recoveries: dict[str, int]
    recovery_times: Distribution
    pending: int
    shm_used: int
    replica_bytes: int
    disk_free: int | None
    refused: int = 0


class Phase(enum.Enum):
    """The part of its life in which a daemon is."""

    STARTING = "the daemon is starting: it recovers its root, and serves no client yet"
    READY = "the daemon is ready"
    ENDING = "the daemon is ending: it saves what it owes, and begins nothing"


@dataclass(frozen=True, slots=True)
class _Beat:
    """A sign that the event loop runs. `due`: when the next one should come at the
    latest, in seconds of the monotonic clock. `lag`: how late this one was.
    """

    due: float
    lag: float


class MetricsBoard:
    """The board on which the event loop publishes figures for other threads."""

    def __init__(self, now: float, period: float) -> None:
        """now: the time of the monotonic clock. period: seconds between two beats."""
        self.phase = Phase.STARTING
        self.figures: DaemonFigures | None = None
        self._period = period
        self._last = _Beat(now + period, 0.0)

    def beat(self, now: float) -> None:
        """Record that the event loop runs. Called on the loop, once in each period."""
        self._last = _Beat(now + self._period, max(0.0, now - self._last.due))

    def lag(self, now: float) -> float:
        """Return the seconds by which the event loop is late: by how much the last beat
        was, or the one that is due has been until now, if that is more.
        """
        last = self._last
        return max(last.lag, now - last.due)
