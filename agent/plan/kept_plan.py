"""Keeps the plan of this rank from one snapshot to the next, as long as the structure of
the state stays the same.

With kept plans, the ranks exchange nothing. If the structure changes on a rank, it tells
the daemon, and then plans again with the other ranks. If another rank seals the same
step with its kept plan, the step fails on all ranks, and all ranks plan again at the
next snapshot.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckptd.agent.link.client import Client
from ckptd.agent.link.rounds import RankGroup
from ckptd.agent.pending import PendingSnapshot
from ckptd.agent.plan.layout import Layout, Local, plan_locally, savable
from ckptd.agent.plan.plan_rounds import Description, PlanResult, PlanRounds
from ckptd.agent.plan.replica_groups import ReplicaGroup
from ckptd.agent.plan.shares import Offer, share_out
from ckptd.agent.plan.structure import PLAIN, Sources, Structure, difference, local_part
from ckptd.agent.state import values
from ckptd.agent.state.capture import Captured
from ckptd.agent.state.merge import value_digests
from ckptd.agent.state.naming import buffer_names, learned_names
from ckptd.shared.system.collector import paused_collector
from ckptd.shared.wire import messages as m

PLAN_SECONDS = 2.0
"""The least time, in seconds, for which a rank waits for the other ranks to plan, even
if the stall budget is smaller.
"""
TELL_SECONDS = 5.0
"""The time, in seconds, within which the daemon must acknowledge a Replan."""
_MAX_WHY = 4096
_ITEM_BYTES = 300
"""An estimate of the bytes that one item takes in plan and metadata."""


@dataclass(frozen=True, slots=True)
class PlanInUse:
    """The layout and the live tensors of one snapshot.

    sources: the tensor from which each item is copied. unlike: `Sources.unlike`, or None
    if it must be computed from the sources. parts: the part of each tensor of the state
    that this rank has. addresses: the address of each part. device: the accelerator
    that the sources are on, or None.
    """

    layout: Layout
    sources: list[torch.Tensor]
    unlike: list[int] | None
    parts: list[torch.Tensor]
    addresses: list[int]
    device: torch.device | None


@dataclass(frozen=True, slots=True)
class Shared:
    """The tensors of the kept plan that this rank shares with other ranks.

    groups: the replica groups. local: the rows of the groups, with their tensors.
    """

    groups: list[ReplicaGroup]
    local: Local


class KeptPlan:
    """The layout of the last plan. The next snapshot uses it if its state has the same
    structure.
    """

    def __init__(self, client: Client, ranks: RankGroup) -> None:
        self._client, self._ranks = client, ranks
        self._kept: tuple[Structure, Layout, Sources] | None = None
        # The version of the plan that the next snapshot needs. It is higher than _has
        # while the kept layout must not be used.
        self._wanted = 1
        self._has = 0  # the version of the kept plan; 0 before the first
        self.settings: str | None = None
        """The settings with which the script has made its optimizers and schedules, as
        `settings_of` gives them. None until a recovery has noted them.
        """
        self.shared: Shared | None = None
        """The tensors that this rank shares with others, or None if the job has one rank.
        Each new plan replaces this object.
        """

    def invalidate(self) -> None:
        """Make the next snapshot plan again, even if the structure on this rank has not
        changed. May be called from any thread.
        """
        self._wanted += 1

    @property
    def valid(self) -> bool:
        """True if a state of the same structure can use the kept layout."""
        return self._kept is not None and self._has == self._wanted

    def plan_ahead(self, captured: Captured, state: Any) -> Layout | None:
        """Return the layout of this state, or None if the next snapshot must plan it with
        other ranks.

        If the kept layout cannot be used and the job has one rank, plan now. Runs on
        the calling thread, because the state must not change meanwhile. Raises
        UnsavableValue.
        """
        if (same := self.reuse(captured)) is not None:
            return same.layout
        if self._ranks.world_size > 1:
            return None
        wanted = self._wanted
        with paused_collector():
            found, _ = Structure.of(captured.tensors)
            layout = self._lay_out_alone(captured, state)
            self._kept, self._has = (
                (found, layout, Sources(found, captured.tensors, layout.plan)),
                wanted,
            )
        return layout

    def _lay_out_alone(self, captured: Captured, state: Any) -> Layout:
        learned = learned_names(state, captured.tensors)
        local = plan_locally(captured.tensors, learned=learned, settings=self.settings or "")
        return share_out([Offer(local.rows)])[0].lay_out(local)

    def reuse(self, captured: Captured) -> PlanInUse | None:
        """Return the kept layout with the live tensors of this state, or None if the layout
        is not valid or the structure has changed.
        """
        if (
            self._kept is None
            or not self.valid
            or (same := self._kept[0].again(captured.tensors)) is None
        ):
            return None
        _, layout, sources = self._kept
        self._kept = same[0], layout, sources
        # The columns do not tell a negative view from another tensor.
        unlike = sources.unlike if same[0].guard is not None else None
        return PlanInUse(
            layout,
            sources.of(same[1], captured.tensors),
            unlike,
            same[1],
            same[0].addresses,
            sources.device,
        )

    def renew(
        self, captured: Captured, state: Any, pending: PendingSnapshot, budget: float
    ) -> PlanInUse:
        """Plan with the other ranks, keep the layout, and return it with its live
        tensors.

        Raises UnsavableValue if a value cannot be saved or differs between ranks;
        StructureChanged if another rank has sealed this step with its kept plan;
        SnapshotFailed if another rank has not come to the planning within `budget`
        seconds or `PLAN_SECONDS`, whichever is longer; DaemonUnreachable if the daemon
        does not acknowledge the Replan.
        """
        with paused_collector():
            return self._renew(
                captured, state, pending, time.monotonic() + max(budget, PLAN_SECONDS)
            )

    def _renew(
        self, captured: Captured, state: Any, pending: PendingSnapshot, deadline: float
    ) -> PlanInUse:
        found, parts = Structure.of(captured.tensors)
        # The kept layout is not valid until this planning has succeeded.
        wanted = self._wanted = self._wanted + 1
        if self._ranks.world_size > 1:
            why = (
                difference(self._kept[0] if self._kept is not None else None, found)
                if self._has
                else "it has no plan yet"
            )
            self._client.call(
                lambda n: m.Replan(id=n, step=pending.step, why=why[:_MAX_WHY]),
                m.Done,
                TELL_SECONDS,
            )
        if self._ranks.world_size == 1:
            layout = self._lay_out_alone(captured, state)
        else:
            planned = self._plan(captured, state, pending, deadline)
            layout, self.shared = planned.layout, Shared(planned.groups, planned.local)
        sources = Sources(found, captured.tensors, layout.plan)
        self._kept, self._has = (found, layout, sources), wanted
        return PlanInUse(
            layout,
            sources.of(parts, captured.tensors),
            sources.unlike,
            parts,
            found.addresses,
            sources.device,
        )

    def _plan(
        self, captured: Captured, state: Any, pending: PendingSnapshot, deadline: float
    ) -> PlanResult:
        rounds = PlanRounds(
            self._ranks, f"plan/{pending.attempt}/{pending.step}", deadline, lambda: pending.error
        )
        return rounds.run(lambda: self._describe(captured, state))

    def _describe(self, captured: Captured, state: Any) -> Description:
        digests, buffers = value_digests(values.decode(captured.state)), set(buffer_names(state))
        local = plan_locally(
            captured.tensors,
            buffers=buffers,
            learned=learned_names(state, captured.tensors),
            settings=self.settings or "",
            world_size=self._ranks.world_size,
        )
        return Description.of(local, savable(captured.tensors), digests, self._ranks.rank, buffers)

    def estimate(self, captured: Captured) -> int:
        """Return an estimate of the bytes that this rank will write: its tensors, its
        share of the replicated tensors, and the plan.

        Raises UnsavableValue for a tensor that cannot be saved.
        """
        own = shared = largest = 0
        storages: dict[tuple[torch.device, int], tuple[int, int, int]] = {}
        for tensor in savable(captured.tensors).values():
            # Where tensors overlap in one storage, the bytes are stored once.
            if type(tensor) in PLAIN:
                storage = tensor.untyped_storage()
                place = tensor.device, storage.data_ptr()
                _, used, users = storages.get(place, (0, 0, 0))
                storages[place] = storage.nbytes(), used + tensor.nbytes, users + 1
            else:
                parts = (
                    [s.tensor for s in tensor.local_shards()]
                    if isinstance(tensor, ShardedTensor)
                    else [local_part(tensor)]
                )
                nbytes = sum(part.nbytes for part in parts)
                if isinstance(tensor, DTensor) and any(
                    placement.is_replicate() for placement in tensor.placements
                ):
                    shared, largest = shared + nbytes, max(largest, nbytes)
                else:
                    own += nbytes
        for length, used, users in storages.values():
            nbytes = used if users == 1 else min(length, used)
            shared, largest = shared + nbytes, max(largest, nbytes)
        world_size = self._ranks.world_size
        return (
            own
            + (shared if world_size == 1 else shared // world_size + largest)
            + _ITEM_BYTES * len(captured.tensors)
        )
