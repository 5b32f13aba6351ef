"""Follows whether a daemon answers, and says since when it has not answered, or since
when it has answered again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptd.shared.units import printable, span_text

BACK_SECONDS = 15.0
"""The seconds for which the screen shows that the daemon answers again."""
SLOW_SECONDS = 2.0
"""A daemon that has not answered after this time is said to be silent."""


@dataclass(frozen=True, slots=True)
class Contact:
    """The contact with a daemon. Times are Unix seconds.

    status: its last report, or None. taken: when that came. lost: when the first question
    without an answer was asked, or None while the daemon answers. problem: why it does
    not. back: when it answered again, or None. absence: for how many seconds it was silent
    before. replaced: True if another process answered then.
    """

    status: Mapping[str, Any] | None = None
    taken: float = 0.0
    lost: float | None = None
    problem: str = ""
    back: float | None = None
    absence: float = 0.0
    replaced: bool = False

    def answered(self, status: Mapping[str, Any], now: float) -> Contact:
        """Return the contact after a report."""
        new = self.status is not None and self.status["pid"] != status["pid"]
        after = replace(self, status=status, taken=now, lost=None, problem="")
        if self.lost is None and not new:
            return after
        silent = 0.0 if self.lost is None else now - self.lost
        return replace(after, back=now, absence=silent, replaced=new)

    def failed(self, problem: str, asked: float) -> Contact:
        """Return the contact after a question without an answer.

        problem: why there is none. asked: when the question was asked.
        """
        return replace(self, lost=asked if self.lost is None else self.lost, problem=problem)

    def silent(self, waited: float) -> bool:
        """Return True if the daemon does not answer, so that its last report is old.

        waited: the seconds for which the last question has no answer yet.
        """
        return self.lost is not None or waited >= SLOW_SECONDS

    def remark(self, now: float, waited: float) -> str:
        """Return a sentence if the daemon does not answer, or has been answering again
        for less than `BACK_SECONDS`, and otherwise "".

        waited: the seconds for which the last question has no answer yet.
        """
        if self.silent(waited):
            lost = now - waited if self.lost is None else self.lost
            why = "the daemon hangs, or is very busy" if self.lost is None else self.problem
            return printable(f"no answer since {_clock(lost)} ({span_text(now - lost)}): {why}")
        if self.back is None or now - self.back > BACK_SECONDS:
            return ""
        who = f"a new daemon (pid {self.status['pid']})" if self.replaced and self.status else "it"
        silent = f", after {span_text(self.absence)} without an answer" if self.absence else ""
        return f"{who} has answered since {_clock(self.back)}{silent}"


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
