"""The layout in force: kept while this rank's structure stays the same, made together with the other ranks when it changes.

While it is kept nothing is exchanged. A rank that plans anew first tells the daemon: if others have gone on with the plan they had, the
step fails on all, and every rank plans anew at the next.
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
from ckptd.shared.plan import ITEM_SIZES

PLAN_SECONDS = 2.0  # for other ranks to come, however small the budget
TELL_SECONDS = 5.0  # for the daemon to take note
_MOST_WHY = 4096
_ITEM_BYTES = 300  # in plan and metadata, of one item; an estimate


Found = tuple[Layout, list[torch.Tensor]]
"""A layout, and the live tensor behind each of its items."""


class Layouts:
    """`made`: how often ranks have planned."""

    def __init__(self, client: Client, ranks: Ranks) -> None:
        self.made = 0
        self._client, self._ranks = client, ranks
        self._kept: tuple[Structure, Layout, Sources] | None = None
        self._wanted = 1
        self._has = 0

    def plan_anew(self) -> None:
        """At the next snapshot, whatever the structure. From any thread."""
        self._wanted += 1

    @property
    def settled(self) -> bool:
        """Whether the layout stays, should the structure be the same."""
        return self._kept is not None and self._has == self._wanted

    def kept(self, captured: Captured) -> Found | None:
        """The layout in force, if the structure is still the same."""
        if self._kept is None or not self.settled or (same := self._kept[0].again(captured.tensors)) is None:
            return None
        _, layout, sources = self._kept
        self._kept = same[0], layout, sources
        return layout, sources.of(same[1], captured.tensors)

    def anew(self, captured: Captured, state: Any, pending: Pending, budget: float) -> Found:
        """Made with the other ranks.

        Raises UnsavableValue, StructureChanged, or SnapshotFailed if other ranks do not come within `budget` seconds, but two at least.
        """
        deadline = time.monotonic() + max(budget, PLAN_SECONDS)
        found, parts = Structure.of(captured.tensors)
        wanted = self._wanted = self._wanted + 1  # until this has succeeded
        if self._ranks.world_size > 1:
            why = difference(self._kept[0] if self._kept is not None else None, found) if self._has else "it has no plan yet"
            self._client.call(lambda n: m.Replan(id=n, step=pending.step, why=why[:_MOST_WHY]), m.Done, TELL_SECONDS)
        layout = self._plan(captured, state, pending, deadline)
        sources = Sources(found, captured.tensors, layout.plan)
        self._kept, self._has = (found, layout, sources), wanted
        self.made += 1
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
        return msgspec.msgpack.decode(answer, type=Share).lay_out(local)

    def _offer(self, captured: Captured, state: Any) -> tuple[Local, Offer]:
        if self._ranks.world_size == 1:
            local = plan_locally(captured.tensors)
            return local, Offer(local.rows)
        digests = value_digests(values.decode(captured.state))
        local = plan_locally(captured.tensors, buffers=buffer_names(state), world_size=self._ranks.world_size)
        return local, Offer(local.rows, digests)

    def estimate(self, captured: Captured) -> int:
        """Bytes of tensors and plan that this rank will write, more or less: what others may have too is shared out."""
        local = plan_locally(captured.tensors)
        own = shared = largest = 0
        for row in [row for row in local.rows if not row.base]:
            length = ITEM_SIZES[row.dtype] * math.prod(row.sizes)
            if row.replicated:
                shared, largest = shared + length, max(largest, length)
            else:
                own += length
        world_size = self._ranks.world_size
        return own + (shared if world_size == 1 else shared // world_size + largest) + _ITEM_BYTES * len(local.rows)


def _decide(said: list[bytes]) -> list[bytes]:
    return [msgspec.msgpack.encode(share) for share in share_out([msgspec.msgpack.decode(one, type=Offer) for one in said])]
