"""Makes the digests by which a daemon compares this rank with other ranks that hold the
same tensors, for each snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ckptd.agent.copy.lanes import has_room
from ckptd.agent.plan.kept_plan import PlanInUse, Shared
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.replicas import ReplicaDigests

if TYPE_CHECKING:
    from ckptd.agent.copy.replica_samples import Queue, ReplicaSamples


log = logging.getLogger("ckptd.agent")

_ROOM = 64 << 20
"""The bytes that must be free on a device that had too few before, so that the next try
does not make torch give back all memory that it keeps for the training.
"""


class ReplicaCheck:
    """The samples of the tensors that the kept plan shares between ranks.

    `every` is the setting `compare_replicas`. Call `use` when a plan is known, then
    `begin` for each snapshot. `skipped` is the number of snapshots that were not
    compared, because a device was full.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._shared: Shared | None = None
        self._samples: ReplicaSamples | None = None
        self._before = -1  # the last step that was sampled by this plan
        self.skipped = 0

    @property
    def room(self) -> int:
        """The most bytes that the digests add to a request document."""
        return 0 if self._samples is None else self._samples.room

    def use(
        self,
        shared: Shared | None,
        tensors: dict[str, torch.Tensor],
        parts: Sequence[torch.Tensor],
        rank: int,
        node: Membership | None,
    ) -> None:
        """Sample the tensors of the replica groups in `shared` from now on.

        Does nothing if the plan is the same as before.
        """
        if shared is self._shared:
            return
        self._samples, self._before = None, -1
        if shared is not None and shared.groups and self._every:
            # Imported here, because this module needs NumPy, which a job of one rank
            # does not need.
            from ckptd.agent.copy.replica_samples import ReplicaSamples

            self._samples = ReplicaSamples(
                shared.groups, shared.local.rows, tensors, parts, rank, node, self._every
            )
        self._shared = shared

    def begin(
        self, found: PlanInUse, step: int, queue: Queue
    ) -> Callable[[], list[ReplicaDigests]] | None:
        """Sample the tensors of this snapshot, and return a function that returns their
        digests.

        Return None if no other rank holds any of the tensors, or if an accelerator has
        too little memory for the samples: this snapshot is then not compared. Call the
        function once the copies that `queue` has enqueued are done.
        """
        samples = self._samples
        if samples is None:
            return None
        before, self._before = self._before, step
        if self.skipped and not all(has_room(device, _ROOM) for device in samples.devices):
            self.skipped += 1
            return None
        try:
            sampled = samples.take(found.parts, found.addresses, step, before, queue)
        except torch.OutOfMemoryError:
            if not self.skipped:
                log.warning(
                    "step %d is not compared with the other ranks that hold the same tensors, "
                    "because the device has too little free memory; the same goes for later steps "
                    "while %d MiB are not free, and is not said again",
                    step, _ROOM >> 20,
                )  # fmt: skip
            self.skipped += 1
            return None
        return lambda: samples.digests(sampled)
