"""Keeps the plan of this rank from snapshot to snapshot, while the structure of the state stays the same.

While the plan is kept, the ranks exchange nothing. A rank whose structure has changed tells the daemon before it plans again with the other
ranks. If another rank seals the step with its kept plan, the step fails on all ranks, and all of them plan again at the next step.
"""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import torch

from ckptd.agent.link.client import Client
from ckptd.agent.link.rounds import Ranks
from ckptd.agent.pending import Pending
from ckptd.agent.plan.layout import Layout, Local, plan_locally
from ckptd.agent.plan.shares import Offer, Share, share_out
from ckptd.agent.plan.structure import Sources, Structure, difference
from ckptd.agent.state import values
from ckptd.agent.state.capture import Captured
from ckptd.agent.state.merge import value_digests
from ckptd.agent.state.naming import buffer_names
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.plan import element_size

PLAN_SECONDS = 2.0
"""The least time, in seconds, that the other ranks have to join the planning, however small the stall budget is."""
TELL_SECONDS = 5.0
"""The time, in seconds, that the daemon has to acknowledge a Replan."""
_MAX_WHY = 4096
_ITEM_BYTES = 300
"""An estimate of the bytes that one item takes in plan and metadata."""


Found = tuple[Layout, list[torch.Tensor]]
"""A layout, and the live tensor behind each of its items."""


class KeptPlan:
    """The layout of the last plan, which the next snapshot uses if the structure of its state is still the same."""

    def __init__(self, client: Client, ranks: Ranks) -> None:
        self._client, self._ranks = client, ranks
        self._kept: tuple[Structure, Layout, Sources] | None = None
        self._wanted = 1  # the version of the plan that the next snapshot needs; higher than _has while the kept layout must not be used
        self._has = 0  # the version of the kept plan; 0 before the first

    def invalidate(self) -> None:
        """Make the next snapshot plan again, even if the structure on this rank is the same. May be called from any thread."""
        self._wanted += 1

    @property
    def valid(self) -> bool:
        """True if a state of the same structure can use the kept layout."""
        return self._kept is not None and self._has == self._wanted

    def reuse(self, captured: Captured) -> Found | None:
        """Return the kept layout and its live tensors, or None if the layout is not valid or the structure has changed."""
        if self._kept is None or not self.valid or (same := self._kept[0].again(captured.tensors)) is None:
            return None
        _, layout, sources = self._kept
        self._kept = same[0], layout, sources
        return layout, sources.of(same[1], captured.tensors)

    def renew(self, captured: Captured, state: Any, pending: Pending, budget: float) -> Found:
        """Plan with the other ranks, keep the layout, and return it with its live tensors.

        Raises UnsavableValue if a value cannot be saved or differs between ranks, and StructureChanged if another rank has sealed this step
        with its kept plan. Raises SnapshotFailed if the other ranks do not join within `budget` seconds or `PLAN_SECONDS`, whichever is
        longer, and DaemonUnreachable if the daemon does not acknowledge the Replan.
        """
        deadline = time.monotonic() + max(budget, PLAN_SECONDS)
        found, parts = Structure.of(captured.tensors)
        wanted = self._wanted = self._wanted + 1  # the kept layout is not valid until this planning has succeeded
        if self._ranks.world_size > 1:
            why = difference(self._kept[0] if self._kept is not None else None, found) if self._has else "it has no plan yet"
            self._client.call(lambda n: m.Replan(id=n, step=pending.step, why=why[:_MAX_WHY]), m.Done, TELL_SECONDS)
        layout = self._plan(captured, state, pending, deadline)
        sources = Sources(found, captured.tensors, layout.plan)
        self._kept, self._has = (found, layout, sources), wanted
        return layout, sources.of(parts, captured.tensors)

    def _plan(self, captured: Captured, state: Any, pending: Pending, deadline: float) -> Layout:
        local = Local([])
        mine: bytes | CkptdError
        try:
            local, offer = self._offer(captured, state)
            mine = msgspec.msgpack.encode(offer)
        except CkptdError as error:
            mine = error
        failpoint("agent.planning")
        answer = self._ranks.round(
            f"plan/{pending.attempt}/{pending.step}", mine, _decide, max(0.0, deadline - time.monotonic()), lambda: pending.error
        )
        return _SHARE_DECODER.decode(answer).lay_out(local)

    def _offer(self, captured: Captured, state: Any) -> tuple[Local, Offer]:
        if self._ranks.world_size == 1:
            local = plan_locally(captured.tensors)
            return local, Offer(local.rows)
        digests = value_digests(values.decode(captured.state))
        local = plan_locally(captured.tensors, buffers=buffer_names(state), world_size=self._ranks.world_size)
        return local, Offer(local.rows, digests)

    def estimate(self, captured: Captured) -> int:
        """Return an estimate of the bytes of tensors and plan that this rank will write, with its share of the replicated tensors."""
        local = plan_locally(captured.tensors)
        own = shared = largest = 0
        for row in [row for row in local.rows if not row.base]:
            length = element_size(row.dtype) * math.prod(row.sizes)
            if row.replicated:
                shared, largest = shared + length, max(largest, length)
            else:
                own += length
        world_size = self._ranks.world_size
        return own + (shared if world_size == 1 else shared // world_size + largest) + _ITEM_BYTES * len(local.rows)


def _decide(said: list[bytes]) -> list[bytes]:
    return [msgspec.msgpack.encode(share) for share in share_out([_OFFER_DECODER.decode(one) for one in said])]


_OFFER_DECODER = msgspec.msgpack.Decoder(Offer)
_SHARE_DECODER = msgspec.msgpack.Decoder(Share)
