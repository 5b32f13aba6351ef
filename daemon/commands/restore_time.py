"""Tells how long a restore of a checkpoint would take, by the rate of the recoveries that
the history of its root knows. Without a measured rate, there is no time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.daemon.commands.history_command import history_file
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.shared.errors import CkptdError
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import is_root
from ckptd.shared.system import machine
from ckptd.shared.units import size_text, span_text

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
    """Return the rate of these recoveries, the oldest first, or None if no one of them
    has read a known number of bytes from storage.
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


def rate_of_job(root: Location, job: str) -> RestoreRate | None:
    """Return the rate of the recoveries of a job that the history of its root on this
    node knows, or None if it knows none.
    """
    from ckptd.daemon.telemetry.history import read_history  # SQLite

    with suppress(CkptdError):
        return rate_of(
            read_history(_history(root), job=job, names=["job.recovered"], limit=_EVENTS)
        )
    return None


def add_restore_times(place: Location, rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row of a listing how long a restore would take, in seconds, or None if
    that is not known.

    place: the root, the job or the checkpoint that is listed.
    """
    above: list[Location] = [place, place.parent, place.parent.parent]
    root = next(filter(is_root, above), None)
    rates = dict[str, RestoreRate | None]()
    for row in rows:
        job, nbytes = row["job"], row.get("restored_bytes")
        if job not in rates:
            rates[job] = None if root is None else rate_of_job(root, job)
        rate = rates[job]
        row["restore_seconds"] = None if rate is None or not nbytes else rate.seconds(nbytes)


def _history(root: Location) -> Path:
    """Return the history of a root. A daemon that serves the root is asked for it only if
    the history is not at the usual place, since it may be slow to answer.
    """
    usual = machine.history_file(machine.configured_state_dir(), root)
    return usual if usual.exists() else history_file(root, None)


def restore_text(restored_bytes: int, rate: RestoreRate | None) -> str:
    """Return what a restore reads, and how long it would take, as text for people."""
    reads = f"reads {size_text(restored_bytes)}"
    if rate is None:
        return (
            f"{reads}; how fast is not known, because this node has seen no recovery from storage"
        )
    basis = "recovery" if rate.recoveries == 1 else f"{rate.recoveries} recoveries"
    return (
        f"{reads}, about {seconds_text(rate.seconds(restored_bytes))} at the "
        f"{size_text(rate.bytes_per_second)}/s of the last {basis}"
    )


def seconds_text(seconds: float) -> str:
    """Return a time with a tenth of a second if it is short."""
    return f"{seconds:.1f} s" if seconds < 10 else span_text(seconds)
