"""Finds living processes that this daemon refuses for longer than a minute: their trainings
continue, and nothing of them is saved.

A trainer whose attempt has begun is not told to stop: its snapshots fail, and it trains
on. So an operator must hear of it.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptd.daemon import log_events
from ckptd.shared.errors import Fenced
from ckptd.shared.units import some_text, span_text

log = logging.getLogger("ckptd.telemetry")

LASTING_SECONDS = 60.0
"""A refusal that has lasted so long is reported."""
AGAIN_SECONDS = 30.0
"""A process that has not asked again for so long is no longer refused. An agent asks every
few seconds, unless its refusal is final.
"""
MOST_WATCHED = 32
"""The most processes that are watched, each with a descriptor. Further ones change nothing:
these are reported already.
"""


@dataclass(frozen=True, slots=True)
class RefusedProcesses:
    """The living processes that are refused for the same job and the same reason.

    job: the name of the job, or "" if the processes could not even connect. pids: their
    numbers; 0 stands for a process that cannot be seen from here. seconds: since the
    first refusal.
    """

    job: str
    reason: str
    pids: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        known = [pid for pid in self.pids if pid]
        who = f"{'process' if len(known) == 1 else 'processes'} {some_text(known, 4)}"
        return (
            f"{who if known else 'a process that this daemon cannot see'} "
            f"{'have' if len(known) > 1 else 'has'} been refused for {span_text(self.seconds)}, "
            f"and nothing is saved there: {self.reason}"
        )

    def report(self) -> dict[str, object]:
        """Return the entry in `ckptd status --json`."""
        return {
            "job": self.job, "pids": list(self.pids), "seconds": round(self.seconds, 1),
            "reason": self.reason, "message": str(self),
        }  # fmt: skip


@dataclass(slots=True)
class _Entry:
    """A rank that is refused. pidfd: the pidfd of its process, or -1 if there is none."""

    pidfd: int
    first: float
    last: float
    reason: str
    final: bool


class Refusals:
    """The refusals of one daemon. Times are seconds of one monotonic clock."""

    def __init__(self, is_alive: Callable[[int], bool] | None = None) -> None:
        """is_alive: returns True if the process of a pidfd is alive."""
        self._is_alive = is_alive or _lives
        self._entries: dict[tuple[int, str, int], _Entry] = {}
        self._told: set[str] = set()
        self.count = 0
        """The number of processes that were refused for long at the last look."""

    def note(
        self, pid: int, job: str, rank: int, reason: str, code: str, now: float,
        watch: Callable[[], int],
    ) -> None:  # fmt: skip
        """Record that a rank was refused, or a process that could not connect: then `job`
        is "" and `rank` -1.

        code: the code of the error. watch: returns a new pidfd of the process, or -1.
        """
        key, final = (pid, job, rank), code == Fenced.code
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) < MOST_WATCHED:
                self._entries[key] = _Entry(watch(), now, now, reason, final)
            return
        entry.last = now
        entry.reason, entry.final = reason, final

    def admit(self, pid: int, job: str = "", rank: int = -1) -> None:
        """Record that this rank has begun, or that this process has connected."""
        self._drop((pid, job, rank))

    def look(self, now: float) -> None:
        """Log an event for each job whose processes have been refused for long by now."""
        lasting = list(self.lasting(now))
        for one in lasting:
            if one.job not in self._told:
                log_events.TRAINER_REFUSED.log(
                    log, "%s%s", f"job {one.job}: " if one.job else "", one,
                    job=one.job, pid=one.pids[0], seconds=one.seconds, reason=one.reason,
                )  # fmt: skip
        self._told = {one.job for one in lasting}
        self.count = len({pid for one in lasting for pid in one.pids})

    def lasting(self, now: float) -> Iterator[RefusedProcesses]:
        """Yield the refusals of living processes that have lasted `LASTING_SECONDS`."""
        for key, entry in list(self._entries.items()):
            repeated = now - entry.last <= AGAIN_SECONDS
            if entry.pidfd < 0 or not entry.final:
                alive = repeated and (entry.pidfd < 0 or self._is_alive(entry.pidfd))
            else:
                alive = self._is_alive(entry.pidfd)
            if not alive:
                self._drop(key)
        found: dict[tuple[str, str], tuple[set[int], float]] = {}
        for (pid, job, _), entry in sorted(self._entries.items()):
            if now - entry.first >= LASTING_SECONDS:
                pids, first = found.setdefault((job, entry.reason), (set(), entry.first))
                pids.add(pid)
                found[job, entry.reason] = (pids, min(first, entry.first))
        for (job, reason), (pids, first) in found.items():
            yield RefusedProcesses(job, reason, tuple(sorted(pids)), now - first)

    def _drop(self, key: tuple[int, str, int]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.pidfd >= 0:
            os.close(entry.pidfd)

    def close(self) -> None:
        """Forget all refusals, and close the descriptors."""
        for key in list(self._entries):
            self._drop(key)


def _lives(pidfd: int) -> bool:
    """Return True if the process of a pidfd is alive."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)
