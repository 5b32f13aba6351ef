"""Collects what the snapshots of each job have cost lately, from the history of the root
and from successive status reports.

All values are replaced and never changed, so that one thread may collect while another
one draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptd.daemon.telemetry.background import LoggedEvent

MAX_POINTS = 200
"""The most snapshots of a job that are kept: more than a wide window can show."""


@dataclass(frozen=True, slots=True)
class Trend:
    """The costs of the last snapshots of a job, oldest first.

    held: the seconds for which each saved snapshot held the training. lost: the seconds
    by which the training was behind after a snapshot, as far as reports have told.
    nbytes, durable_seconds: the bytes of the newest save, and the seconds until it was
    durable, or None.
    """

    held: tuple[float, ...] = ()
    lost: tuple[float, ...] = ()
    nbytes: float | None = None
    durable_seconds: float | None = None


NO_TREND = Trend()


@dataclass(frozen=True, slots=True)
class _Usage:
    """The process and the times of a report, in seconds: since the daemon started, and
    of the processor.
    """

    pid: int
    uptime: float
    cpu: float


class Trends:
    """The trends of all jobs. `cpu`: the share of one core that the daemon used between
    the last two reports, or None if that is not known.
    """

    def __init__(self) -> None:
        self.cpu: float | None = None
        self._jobs: dict[str, Trend] = {}
        self._told = dict[str, tuple[int, int]]()
        self._usage: _Usage | None = None
        self._last = 0.0

    @property
    def last(self) -> float:
        """The time of the last save that was added, in Unix seconds, or 0.0."""
        return self._last

    def jobs(self) -> Mapping[str, Trend]:
        """Return the trends by job, as they are now."""
        return dict(self._jobs)

    def add_saves(self, events: Iterable[LoggedEvent]) -> None:
        """Add saves of the history, oldest first. Those that are known are left out."""
        before = self._last
        for event in events:
            held = _number(event, "held_seconds")
            if event.time <= before or held is None:
                continue
            self._last = max(self._last, event.time)
            trend = self._jobs.get(event.job, NO_TREND)
            self._jobs[event.job] = replace(
                trend,
                held=_added(trend.held, held),
                nbytes=_number(event, "bytes"),
                durable_seconds=_number(event, "durable_seconds"),
            )

    def add_report(self, status: Mapping[str, Any]) -> None:
        """Add what a status report tells of costs, and of the daemon's processor time."""
        for job in status["jobs"]:
            cost, name = job.get("training_cost"), job["job"]
            if not cost or self._told.get(name) == (job["attempt"], cost["step"]):
                continue
            self._told[name] = (job["attempt"], cost["step"])
            trend = self._jobs.get(name, NO_TREND)
            # Steps of a tiny model vary by more than a snapshot costs.
            self._jobs[name] = replace(trend, lost=_added(trend.lost, max(0.0, cost["seconds"])))
        if "cpu_seconds" not in status:  # an older daemon
            return
        usage, before = (
            _Usage(status["pid"], status["uptime_seconds"], status["cpu_seconds"]),
            self._usage,
        )
        self._usage, self.cpu = usage, None
        if before is not None and before.pid == usage.pid and usage.uptime > before.uptime:
            self.cpu = max(0.0, usage.cpu - before.cpu) / (usage.uptime - before.uptime)


def _added(values: tuple[float, ...], value: float) -> tuple[float, ...]:
    return (*values, value)[-MAX_POINTS:]


def _number(event: LoggedEvent, fact: str) -> float | None:
    value = event.facts.get(fact)
    return float(value) if isinstance(value, int | float) else None
