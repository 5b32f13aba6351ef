"""Decides with how many threads the saves of a job write, so that they disturb its
training little.

The agents report with each seal what the snapshot before has cost their training. This
module knows no threads and no clock.
"""

from __future__ import annotations

from ckptd.shared.wire.messages import TrainingCost

_MUCH, _LITTLE = 0.10, 0.05
"""The shares of its speed that a training may lose beside a save: with more, the next
save has fewer threads, and with less, more.
"""


class Governor:
    """The number of threads for the saves of one job.

    threads: how many chunks the next save may encode and write at the same time. most:
    the most that it may be, which it is at first. cost: what the last snapshot has cost
    the training, as far as it is known, or None.
    """

    def __init__(self, most: int) -> None:
        self.most = self.threads = most
        self.cost: TrainingCost | None = None
        self._step: int | None = None  # that of the last save, unless its cost is known
        self._sealed_at: float | None = None
        self._seconds = self._held = 0.0
        self._late = False

    def hear(self, costs: list[TrainingCost]) -> None:
        """Change `threads` by the costs that the ranks report.

        The highest cost counts. The cost of an earlier save is only kept.
        """
        if not costs:
            return
        self.cost = max(costs, key=lambda cost: cost.seconds)
        if self.cost.step != self._step or self._late:
            return
        slower = (self.cost.seconds - self._held) / max(self._seconds, self.cost.usual, 1e-6)
        if slower > _MUCH:
            self.threads = max(1, self.threads // 2)
        elif slower < _LITTLE:
            self.threads = min(self.most, self.threads + 1)
        self._step = None

    def saved(self, step: int, sealed_at: float, seconds: float, held: float) -> None:
        """Record a save that has ended.

        If it took more than half of the time between two seals, the next one has more
        threads.

        sealed_at: when its last rank sealed it, in seconds of a monotonic clock. held:
        seconds for which the snapshot held the training.
        """
        self._late = self._sealed_at is not None and 2 * seconds > sealed_at - self._sealed_at
        if self._late:
            self.threads = min(self.most, 2 * self.threads)
        self._step = step
        self._sealed_at = sealed_at
        self._seconds = seconds
        self._held = held
