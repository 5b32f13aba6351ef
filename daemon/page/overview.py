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
    """The state of a daemon, from well to silent."""

    WELL = "well"
    WARNING = "warning"
    BAD = "bad"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class TopSentence:
    """The sentence at the top of the page."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a daemon to the questions of the page.

    age: the seconds since the last answer, or None if there was none. silent: the seconds
    since the first question after it that has no answer, or 0. A page without readers
    asks nothing, so this can be much less. why: the reason why the last question failed,
    or "".
    """

    age: float | None
    silent: float
    why: str

    @property
    def are_old(self) -> bool:
        """True if the last answer does not say how the daemon is now."""
        return self.age is None or self.age > SILENT_SECONDS or self.why != ""


def verdict(problems: Sequence[FoundProblem], well: str, answers: Answers) -> TopSentence:
    """Return what to say at the top.

    problems, well: what is wrong with the daemon by its last answer, and the sentence to
    say if nothing is.
    """
    # What follows the first clause is about other daemons.
    reason = f": {answers.why.partition('; ')[0]}" if answers.why else ""
    if answers.age is None:
        return TopSentence(Level.SILENT, f"No daemon has answered yet{reason}")
    if answers.are_old:
        since = f"has not answered for {span_text(answers.silent)}"
        return TopSentence(
            Level.SILENT,
            f"The daemon {since if answers.silent >= 1 else 'does not answer'}. What is shown "
            f"about it is {span_text(answers.age)} old{reason}",
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
    """The rates of a daemon's saves, from its successive answers."""

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
    answers: Answers,
) -> dict[str, Any]:
    """Return the document that the page gets once a second.

    status: the last answer of the daemon, or None; its ages are shown as they are now. The
    others are as for `verdict`. The problems of an old answer are left out: they may be
    gone.
    """
    said = verdict(problems, well, answers)
    return {
        "level": said.level,
        "text": said.text,
        "problems": [
            {"what": problem.what, "job": problem.job, "message": problem.message}
            for problem in (() if answers.are_old else problems)
        ],
        "age_seconds": None if answers.age is None else round(answers.age, 1),
        "status": _aged(status, answers.age or 0.0),
    }


def _aged(found: Any, seconds: float) -> Any:
    """Return a part of a status in which each age is greater by some seconds."""
    if isinstance(found, Mapping):
        return {
            key: round(value + seconds, 3)
            if key.endswith("age_seconds") and isinstance(value, int | float)
            else _aged(value, seconds)
            for key, value in found.items()
        }
    return [_aged(each, seconds) for each in found] if isinstance(found, list) else found
