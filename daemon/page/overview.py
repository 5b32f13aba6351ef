"""Decides what the page says about a daemon: the sentence at the top, and how fast a
save goes. Pure functions of what the daemon has answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ckptd.shared.units import count_text, span_text

SILENT_SECONDS = 5.0
"""A daemon that has not answered for longer is said not to answer."""
RATE_SECONDS = 5.0
"""The rate of a save is that of the last so many seconds."""
_SEVERE = frozenset({"not-ready", "loop", "root", "clients", "failed", "damaged"})

DaemonStatus = Mapping[str, Any]
"""The object that `ckptd status --json` prints."""


class FoundProblem(Protocol):
    """A reason why a daemon is not well, as `ckptd status --check` finds it."""

    @property
    def what(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def message(self) -> str: ...


class Level(StrEnum):
    """How bad the state of a daemon is."""

    WELL = "well"
    WARNING = "warning"
    BAD = "bad"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class TopSentence:
    """The sentence at the top of the page."""

    level: Level
    text: str


def verdict(
    problems: Sequence[FoundProblem], well: str, silent: float | None, why: str
) -> TopSentence:
    """Return what to say at the top.

    problems, well: what is wrong with the daemon by its last answer, and the sentence to
    say if nothing is. silent: the seconds since that answer, or None if there was none.
    why: the reason why the daemon does not answer, or "".
    """
    # What follows the first clause is about other daemons.
    reason = f": {why.partition('; ')[0]}" if why else ""
    if silent is None:
        return TopSentence(Level.SILENT, f"No daemon has answered yet{reason}")
    if silent > SILENT_SECONDS:
        return TopSentence(
            Level.SILENT,
            f"The daemon has not answered for {span_text(silent)}. What is shown about it is from "
            f"then{reason}",
        )
    if not problems:
        return TopSentence(Level.WELL, f"All is well: {well}")
    severe = any(problem.what in _SEVERE for problem in problems)
    level = Level.BAD if severe else Level.WARNING
    if len(problems) == 1:
        text = problems[0].message
        return TopSentence(level, text[:1].upper() + text[1:])
    return TopSentence(level, f"{count_text(len(problems), 'thing')} need attention")


class SaveRates:
    """How fast the saves of a daemon go, from its successive answers."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, dict[tuple[str, str], int]]]()

    def add(self, now: float, status: DaemonStatus) -> dict[str, Any]:
        """Return a status whose saves have the rate of the last seconds, and the seconds
        left at this rate. A save that was not seen before keeps what the daemon says.

        now: the time of the monotonic clock at which the daemon answered.
        """
        done = {
            (job["job"], saving["tag"]): saving["done_bytes"]
            for job in status["jobs"]
            for saving in job.get("saving", ())
        }
        while self._seen and self._seen[0][0] < now - RATE_SECONDS:
            self._seen.popleft()
        jobs = [
            {
                **job,
                "saving": [
                    self._rated(saving, (job["job"], saving["tag"]), now)
                    for saving in job.get("saving", ())
                ],
            }
            for job in status["jobs"]
        ]
        self._seen.append((now, done))
        return {**status, "jobs": jobs}

    def _rated(self, saving: Mapping[str, Any], key: tuple[str, str], now: float) -> dict[str, Any]:
        for then, done in self._seen:
            if key in done and now > then:
                rate = (saving["done_bytes"] - done[key]) / (now - then)
                left = saving["total_bytes"] - saving["done_bytes"]
                return {
                    **saving,
                    "bytes_per_second": max(0, round(rate)),
                    "seconds_left": round(left / rate, 1) if rate > 0 else None,
                }
        return dict(saving)


def overview(
    status: DaemonStatus | None,
    problems: Sequence[FoundProblem],
    well: str,
    silent: float | None,
    why: str,
) -> dict[str, Any]:
    """Return the document that the page gets once a second.

    status: the last answer of the daemon, or None. The others are as for `verdict`.
    """
    said = verdict(problems, well, silent, why)
    return {
        "level": said.level,
        "text": said.text,
        "problems": [
            {"what": problem.what, "job": problem.job, "message": problem.message}
            for problem in problems
        ],
        "silent_seconds": None if silent is None else round(silent, 1),
        "status": status,
    }
