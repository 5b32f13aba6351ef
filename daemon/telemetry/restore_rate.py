"""Measures how fast a job is restored from storage, by the recoveries in the history. A
rate is never assumed: without such a recovery there is none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.shared.errors import CkptdError

_RECOVERIES = 5
"""The number of a job's last recoveries from storage whose median counts."""
_EVENTS = 100
"""The most recoveries that are looked at. Those from memory do not count."""


@dataclass(frozen=True, slots=True)
class RestoreRate:
    """The rate at which a job was restored from storage: the median of its last
    recoveries, in stored bytes per second.
    """

    bytes_per_second: float
    recoveries: int

    def seconds(self, restored_bytes: int) -> float:
        return restored_bytes / self.bytes_per_second


def rate_of(recoveries: Sequence[LoggedEvent]) -> RestoreRate | None:
    """Return the rate of these recoveries, the oldest first, or None if none of them has
    read a known number of bytes from storage.
    """
    known = [
        (event.facts.get("restored_bytes"), event.facts.get("seconds")) for event in recoveries
    ]
    rates = [
        nbytes / seconds
        for nbytes, seconds in known
        if isinstance(nbytes, int) and isinstance(seconds, int | float) and nbytes * seconds > 0
    ][-_RECOVERIES:]
    return RestoreRate(statistics.median(rates), len(rates)) if rates else None


def read_rate(file: Path, job: str) -> RestoreRate | None:
    """Return the rate of the recoveries of a job that a history knows, or None if it
    knows none, or cannot be read.
    """
    from ckptd.daemon.telemetry.history import read_history  # SQLite

    with suppress(CkptdError):
        return rate_of(read_history(file, job=job, names=["job.recovered"], limit=_EVENTS))
    return None
