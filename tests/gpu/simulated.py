"""Lanes in place of a device's streams, for a machine without a GPU: copies run late,
on a thread, while the training goes on.

The training itself runs on the CPU, at once, so a wait of its stream blocks it. This
shows the order of copies and writes, and what happens to slots. It shows nothing about
a driver: page locks, rates, the time that a call is held, graphs, memory of a device.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from ckptd.agent.copy import lanes, sealer
from ckptd.agent.copy.fences import Fences
from ckptd.agent.copy.lanes import Mark
from ckptd.agent.plan.kept_plan import KeptPlan, PlanInUse
from ckptd.agent.plan.layout import Layout
from ckptd.agent.read import upload
from ckptd.agent.read.upload import Upload
from ckptd.shared.formats.plan import signature


class SimulatedMark:
    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        SimulatedLane.gate.set()
        self.reached.wait()


class SimulatedLane:
    """A lane on a thread. Each copy begins `late` seconds after its call, during which
    the training goes on.

    gate: not set if copies wait, too, until something waits for them.
    """

    late = 0.005
    gate = threading.Event()
    gate.set()

    def __init__(self, device: torch.device) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def begin(self) -> None:
        """Do nothing: what the caller has enqueued has run."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        def copy() -> None:
            self.gate.wait()
            time.sleep(self.late)
            with torch.no_grad():
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)

        self._work.put(copy)

    def run(self, work: Callable[[], None]) -> None:
        def run() -> None:
            time.sleep(self.late)
            work()

        self._work.put(run)

    def mark(self) -> Mark:
        mark = SimulatedMark()
        self._work.put(mark.reached.set)
        return mark

    def hold_back(self, mark: Mark) -> None:
        mark.synchronize()


def elsewhere(found: PlanInUse) -> PlanInUse:
    """Return the plan as if each of its tensors were on a device."""
    plan = found.layout.plan
    items = [msgspec.structs.replace(item, device="cuda") for item in plan.items]
    plan = msgspec.structs.replace(plan, items=items)
    layout = Layout(plan, plan.encode(), signature(plan.encode()))
    return replace(found, layout=layout, unlike=None)


def simulate() -> None:
    """Make this process copy every tensor through simulated lanes, in both directions."""
    original = KeptPlan.renew

    def renew(self: KeptPlan, *arguments: Any) -> PlanInUse:
        return elsewhere(original(self, *arguments))

    def made() -> Fences:
        return Fences(SimulatedLane, lambda: False)

    patch.object(KeptPlan, "renew", renew).start()
    patch.object(KeptPlan, "valid", False).start()  # so that the plan is made at each snapshot
    patch.object(sealer, "Fences", made).start()
    patch.object(upload, "BUFFER", 512 << 10).start()  # so that small states need both, again
    patch.object(upload, "StreamLane", SimulatedLane).start()
    patch.object(upload, "lock_pages", lambda *_: True).start()
    patch.object(lanes, "unlock_pages", lambda *_: None).start()
    patch.object(Upload, "goes_to", staticmethod(lambda device: True)).start()
