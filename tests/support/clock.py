"""A clock for tests in which a timeout decides: time passes only when the code sleeps,
or when the test says so.
"""

from __future__ import annotations


class Clock:
    """In the place of the module `time`. `slept` has the seconds of every `sleep`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
