"""Tells how long a restore of a checkpoint would take, by the rate of the recoveries that
the history of its root knows. Without a measured rate, there is no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptd.daemon.commands.history_command import history_file
from ckptd.daemon.telemetry.restore_rate import RestoreRate, read_rate
from ckptd.shared.errors import CkptdError
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import is_root
from ckptd.shared.system import machine
from ckptd.shared.units import size_text, span_text


def rate_of_job(root: Location, job: str) -> RestoreRate | None:
    """Return the rate of the recoveries of a job that the history of its root on this
    node knows, or None if it knows none.
    """
    with suppress(CkptdError):
        return read_rate(_history(root), job)
    return None


def _history(root: Location) -> Path:
    """Return the history of a root. Raises CkptdError.

    A daemon that serves the root is asked for it only if the history is not at the usual
    place, since it may be slow to answer.
    """
    usual = machine.history_file(machine.configured_state_dir(), root)
    return usual if usual.exists() else history_file(root, None)


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


def restore_text(restored_bytes: int, rate: RestoreRate | None) -> str:
    """Return what a restore reads, and how long it would take, as text for people."""
    reads = f"reads {size_text(restored_bytes)}"
    if rate is None:
        return f"{reads}; no rate is known, because this node has seen no recovery from storage"
    basis = "recovery" if rate.recoveries == 1 else f"{rate.recoveries} recoveries"
    return (
        f"{reads}, about {seconds_text(rate.seconds(restored_bytes))} at the "
        f"{size_text(rate.bytes_per_second)}/s of the last {basis}"
    )


def seconds_text(seconds: float) -> str:
    """Return a time, with a tenth of a second if it is short."""
    return f"{seconds:.1f} s" if seconds < 10 else span_text(seconds)
