"""Decides what the keys of `ckptd top` choose: a job in the table, or its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PAGE = 10
"""The lines by which Page Up and Page Down move."""
_MOVES = {
    "up": -1,
    "k": -1,
    "down": 1,
    "j": 1,
    "page up": -PAGE,
    "page down": PAGE,
    "home": -(10**6),
    "end": 10**6,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of the user.

    job: the name of the job, or "" before there is one. ranks: True while its ranks are
    shown. scrolled: how many of them are above the window.
    """

    job: str = ""
    ranks: bool = False
    scrolled: int = 0

    def among(self, jobs: Sequence[str], ranks: int) -> Choice:
        """Return the choice that is possible.

        jobs: the names in the order of the table. ranks: how many ranks the job has. A
        job that is gone is replaced by the first one.
        """
        if self.job not in jobs:
            return Choice(jobs[0]) if jobs else Choice()
        return replace(self, scrolled=min(max(self.scrolled, 0), max(ranks - 1, 0)))

    def pressed(self, key: str, jobs: Sequence[str]) -> Choice:
        """Return the choice after a key. Call `among` afterwards."""
        if key in ("enter", "escape"):
            shown = key == "enter" and not self.ranks and bool(self.job)
            return replace(self, ranks=shown, scrolled=0)
        move = _MOVES.get(key)
        if move is None or self.job not in jobs:
            return self
        if self.ranks:
            return replace(self, scrolled=self.scrolled + move)
        at = min(max(jobs.index(self.job) + move, 0), len(jobs) - 1)
        return replace(self, job=jobs[at])
