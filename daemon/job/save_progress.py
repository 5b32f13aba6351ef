"""Measures how far the save of one snapshot has come, for `ckptd status`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SaveProgress:
    """The progress of one save.

    `total`: bytes of the slots of all ranks. `begun`: when the save began, in seconds
    of a monotonic clock.
    """

    total: int
    begun: float
    _done: dict[int, int] = field(default_factory=dict)

    def begin_part(self, rank: int) -> None:
        """Count the part of `rank` from 0. Called again when the part is written again."""
        self._done[rank] = 0

    def add(self, rank: int, nbytes: int) -> None:
        self._done[rank] += nbytes

    def report(self, now: float) -> dict[str, float | int | None]:
        """Return the bytes that are done and in all, the bytes per second, and the
        seconds left. The last two are None at the start.
        """
        done = min(sum(self._done.values()), self.total)
        rate = done / max(now - self.begun, 1e-6)
        return {
            "done_bytes": done,
            "total_bytes": self.total,
            "bytes_per_second": round(rate) if done else None,
            "seconds_left": round((self.total - done) / rate, 1) if done else None,
        }
