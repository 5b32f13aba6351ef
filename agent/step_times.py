"""Measures how much training time each snapshot costs, by the times between the steps
of an optimizer.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptd.agent.pending import PendingSnapshot
from ckptd.shared.wire.messages import TrainingCost

_REMEMBERED, _FEWEST = 64, 3
"""The quiet steps that are remembered, and the fewest that say how long a step usually
takes.
"""
_MOST_ON_THEIR_WAY = 8
"""The most snapshots that are followed at the same time. Without an optimizer that
steps, none of them would ever end.
"""
_MOST = 2
"""The most usual steps that one step can lose beside the call of `snapshot`. A longer
one has done something else, such as validation.
"""


class StepTimes:
    """The step times of one training.

    A step is quiet if no snapshot was on its way while it ran.

    Only the steps of one optimizer are counted: the first that takes one, and another
    once that one no longer steps. `usual`: the median time of the last quiet steps in
    seconds, or None if there were too few. `last`: the last snapshot that goes to
    storage and whose cost is known, or None.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.last: PendingSnapshot | None = None
        self._clock = clock
        self._counted: weakref.ref[Optimizer] = lambda: None  # type: ignore[assignment]
        self._ended = self._held = 0.0
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED)
        self._others = 0  # steps of other optimizers since the counted one has stepped
        # A lock would deadlock: a signal handler may call `snapshot` while `_stepped`
        # runs on the same thread.
        self._on_their_way: deque[PendingSnapshot] = deque(maxlen=_MOST_ON_THEIR_WAY)
        me = weakref.WeakMethod(self._stepped)
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: (found := me()) and found(optimizer)
        )
        self.close = weakref.finalize(self, hook.remove)

    @property
    def usual(self) -> float | None:
        return median(self._quiet) if len(self._quiet) >= _FEWEST else None

    @property
    def cost(self) -> TrainingCost | None:
        """The cost of `last`."""
        usual, last = self.usual, self.last
        if last is None or last.lost_seconds is None or usual is None:
            return None
        return TrainingCost(step=last.step, seconds=last.lost_seconds, usual=usual)

    def begin(self, pending: PendingSnapshot) -> None:
        """Count the steps from now on until the snapshot is durable, or has ended
        otherwise, as steps that it may have slowed down.

        Called when `snapshot` returns. A snapshot that has failed or was skipped by
        then is not counted.
        """
        if pending.state not in ("failed", "skipped"):
            self._on_their_way.append(pending)
            self._held += pending.stall

    def _stepped(self, optimizer: Any) -> None:
        counted, now = self._counted(), self._clock()
        if counted is not None and counted is not optimizer:
            self._others += 1
            if self._others <= _REMEMBERED:
                return
            counted = None  # the counted one is no longer used
            self._quiet.clear()
        took, self._ended, self._others = now - self._ended, now, 0
        found, held, self._held = list(self._on_their_way), self._held, 0.0
        for pending in found:
            if _is_over(pending):
                with suppress(ValueError):
                    self._on_their_way.remove(pending)
        if counted is None:  # what was done before its first step is not known
            self._counted = weakref.ref(optimizer)
        elif not found:
            self._quiet.append(took)
        elif (usual := self.usual) is not None:
            for pending in found:
                if pending.lost_seconds is None:
                    pending.lost_seconds = pending.stall
            # A save slows the steps more than a copy into memory that is made meanwhile.
            slowed = next((pending for pending in reversed(found) if pending.persist), found[-1])
            assert slowed.lost_seconds is not None
            slowed.lost_seconds += min(took - held - usual, _MOST * usual)
            if slowed.persist:
                self.last = slowed


def _is_over(pending: PendingSnapshot) -> bool:
    return pending.done or (not pending.persist and pending.state == "sealed")
