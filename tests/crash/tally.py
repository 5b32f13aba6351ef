"""Counts what kills at random moments have hit, and their outcome, for `kills.py` and
`rank_kills.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    phases: Sequence[str]
    victims: Sequence[str]
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    recovered: int = 0
    checked: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.hits.values())

    def empty(self) -> list[str]:
        """Return the phases that no kill has hit."""
        return [
            name
            for name in self.phases
            if not any(self.hits[name, victim] for victim in self.victims)
        ]

    def wanted(self, kills: int) -> str:
        """Return the phase to hit next: each in turn for `kills` kills, then those that
        no kill has hit.
        """
        return (
            self.phases[self.kills % len(self.phases)]
            if self.kills < kills
            else (self.empty() or self.phases)[0]
        )

    def table(self) -> str:
        first, width = max(map(len, self.phases)) + 2, max(map(len, [*self.victims, "total"])) + 2
        rows = [
            f"{'phase':<{first}}" + "".join(f"{name:>{width}}" for name in (*self.victims, "total"))
        ]
        for name in self.phases:
            counts = [self.hits[name, victim] for victim in self.victims]
            rows.append(
                f"{name:<{first}}"
                + "".join(f"{count:>{width}}" for count in (*counts, sum(counts)))
            )
        return "\n".join(
            [
                *rows,
                *self.checked,
                f"{self.kills} kills, {self.recovered} recoveries, {len(self.lost)} lost",
            ]
        )

    def report(self) -> int:
        """Print the table. Return the exit code."""
        for lost in self.lost:
            print(f"LOST: {lost}")
        for name in self.empty():
            print(f"EMPTY PHASE: {name}")
        print(self.table())
        return 1 if self.lost or self.empty() else 0


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {seconds:.0f} s")
        time.sleep(0.0005)
