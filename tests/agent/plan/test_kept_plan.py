"""A plan is kept while the structure holds, and is made again by all ranks otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from ckptd.agent.link.client import Client
from ckptd.agent.link.rounds import Alone
from ckptd.agent.pending import PendingSnapshot
from ckptd.agent.plan.kept_plan import PLAN_SECONDS, KeptPlan
from ckptd.agent.plan.layout import Layout
from ckptd.agent.state.capture import Captured, capture
from ckptd.shared.errors import CkptdError, DaemonUnreachable, StructureChanged, UnsavableValue
from ckptd.shared.wire import messages as m
from tests.support.cases import each_case


class FakeClient:
    def __init__(self) -> None:
        self.replans: list[m.Replan] = []
        self.error: CkptdError | None = None

    def call(
        self, make: Callable[[int], m.Replan], kind: type[m.Done], timeout: float
    ) -> tuple[m.Done, tuple[()]]:
        self.replans.append(make(0))
        if self.error is not None:
            raise self.error
        return m.Done(re=0), ()


class TwoRanks:
    """In the place of an Exchange of rank 0.

    Rank 1 says the same as rank 0, changed by `other`.
    """

    rank, world_size = 0, 2

    def __init__(self, other: Callable[[bytes], bytes | CkptdError] = lambda said: said) -> None:
        self.other = other
        self.rounds: list[tuple[str, float]] = []

    def round(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        seconds: float,
        unwanted: Any,
    ) -> bytes:
        self.rounds.append((topic, seconds))
        if isinstance(mine, CkptdError):
            raise mine
        if (error := unwanted()) is not None:
            raise error
        other = self.other(mine)
        if isinstance(other, CkptdError):
            raise other
        return decide([mine, other])[0]


def made(ranks: Any = None) -> tuple[KeptPlan, FakeClient]:
    client = FakeClient()
    return KeptPlan(cast(Client, client), ranks or Alone()), client


def renewed(plan: KeptPlan, state: Any, step: int = 1, budget: float = 5.0) -> Captured:
    captured = capture(state)
    plan.renew(captured, state, PendingSnapshot(step, 3), budget)
    return captured


def test_a_kept_plan_gives_the_live_tensors_of_the_next_state() -> None:
    plan, client = made()
    state = {"w": torch.ones(4), "b": torch.zeros(2, dtype=torch.int64), "n": 1}
    assert (plan.valid, plan.reuse(capture(state))) == (False, None)
    first = plan.renew(capture(state), state, PendingSnapshot(1, 1), 5.0)
    layout, sources = first.layout, first.sources
    assert plan.valid
    later = {"w": torch.full((4,), 7.0), "b": torch.ones(2, dtype=torch.int64), "n": 2}
    found = plan.reuse(capture(later))
    assert found is not None
    assert found.layout is layout
    assert [
        source is later[item.fqn]
        for item, source in zip(layout.plan.items, found.sources, strict=True)
    ] == [True, True]
    assert client.replans == [], "one rank has nobody to tell"
    assert [
        source is state[item.fqn] for item, source in zip(layout.plan.items, sources, strict=True)
    ] == [True, True]


@each_case(
    "changed",
    [
        {"w": torch.ones(5)},
        {"w": torch.ones(4).double()},
        {"v": torch.ones(4)},
        {"w": torch.ones(4), "v": torch.ones(1)},
        {},
    ],
    ids=["shape", "dtype", "name", "one more", "one less"],
)
def test_a_plan_is_not_used_for_another_structure(changed: dict[str, Any]) -> None:
    plan, _ = made()
    renewed(plan, {"w": torch.ones(4)})
    assert plan.reuse(capture(changed)) is None
    assert plan.reuse(capture({"w": torch.zeros(4)})) is not None


def test_an_invalid_plan_is_not_used_until_it_is_made_again() -> None:
    """Another rank has planned again."""
    plan, _ = made()
    state = {"w": torch.ones(4)}
    renewed(plan, state)
    plan.invalidate()
    assert (plan.valid, plan.reuse(capture(state))) == (False, None)
    renewed(plan, state)
    assert plan.valid


def test_a_plan_that_is_invalidated_while_it_is_made_is_not_valid() -> None:
    class Meanwhile(TwoRanks):
        def round(self, *arguments: Any) -> bytes:
            found = super().round(*arguments)
            plan.invalidate()
            return found

    plan, _ = made(Meanwhile())
    renewed(plan, {"w": torch.ones(4)})
    assert not plan.valid


def test_a_rank_says_why_it_plans_again_before_it_meets_the_others() -> None:
    plan, client = made(ranks := TwoRanks())
    renewed(plan, {"w": torch.ones(4)}, step=1)
    renewed(plan, {"w": torch.ones(4), "head": torch.ones(1)}, step=2)
    assert [(replan.step, replan.why) for replan in client.replans] == [
        (1, "it has no plan yet"),
        (2, "head is new"),
    ]
    assert [topic for topic, _ in ranks.rounds] == [
        f"plan/3/{step}/{name}" for step in (1, 2) for name in ("classes", "structures")
    ]
    assert PLAN_SECONDS < ranks.rounds[0][1] <= 5.0
    client.error = DaemonUnreachable("gone")
    with pytest.raises(DaemonUnreachable):
        renewed(plan, {"w": torch.ones(5)}, step=3)
    assert (len(ranks.rounds), plan.valid) == (4, False)


def test_the_other_ranks_have_time_to_come_however_small_the_budget_is() -> None:
    plan, _ = made(ranks := TwoRanks())
    renewed(plan, {"w": torch.ones(4)}, budget=0.0)
    assert PLAN_SECONDS / 2 < ranks.rounds[0][1] <= PLAN_SECONDS


def test_a_planning_that_fails_leaves_no_valid_plan() -> None:
    plan, _ = made(ranks := TwoRanks())
    state = {"w": torch.ones(4)}
    renewed(plan, state)
    ranks.other = lambda said: StructureChanged("rank 1 has sealed the step")
    with pytest.raises(StructureChanged):
        renewed(plan, state)
    assert plan.reuse(capture(state)) is None
    ranks.other = lambda said: said
    with pytest.raises(UnsavableValue, match="^m: a tensor on the meta device"):
        renewed(plan, {"m": torch.ones(1, device="meta")})
    failed = PendingSnapshot(9, 3)
    failed.fail(StructureChanged("the step has failed"))
    with pytest.raises(StructureChanged, match="^the step has failed$"):
        plan.renew(capture(state), state, failed, 5.0)


def test_replicas_are_shared() -> None:
    plan, _ = made(TwoRanks())
    state = {"a": torch.ones(1000), "b": torch.ones(1000), "n": 1}
    layout = plan.renew(capture(state), state, PendingSnapshot(1, 3), 5.0).layout
    assert len(layout.plan.items) == 1


def test_the_estimate_has_room_for_a_share_of_the_replicas() -> None:
    tensors = {f"w{number}": torch.ones(1000) for number in range(4)}
    alone = made()[0].estimate(capture(tensors))
    several = made(TwoRanks())[0].estimate(capture(tensors))
    assert (alone, several) == (16_000 + 4 * 300, 8_000 + 4_000 + 4 * 300)
    view = torch.ones(1000)
    assert made()[0].estimate(capture({"w": view, "v": view[:10]})) == 4000 + 2 * 300


def planned_ahead(plan: KeptPlan, state: Any) -> Layout | None:
    return plan.plan_ahead(capture(state), state)


def test_planning_ahead_for_another_state_plans_for_that_state() -> None:
    plan, _ = made()
    small = planned_ahead(plan, {"a": torch.ones(3)})
    larger = planned_ahead(plan, {"a": torch.ones(3), "b": torch.ones(1000)})
    assert small is not None
    assert larger is not None
    assert (small.plan.data_length, larger.plan.data_length) == (12, 4012)
    assert planned_ahead(plan, {"a": torch.zeros(3), "b": torch.zeros(1000)}) is larger


def test_a_plan_made_ahead_is_the_one_that_a_snapshot_would_make() -> None:
    state = {"a": torch.ones(3), "b": torch.ones(2, 2).T, "n": 1}
    state["view"] = cast(torch.Tensor, state["a"])[1:]
    plan, _ = made()
    planned_ahead(plan, state)
    assert plan.valid
    ahead = plan.reuse(capture(state))
    assert ahead is not None
    fresh = made()[0].renew(capture(state), state, PendingSnapshot(1, 1), 5.0)
    layout, sources = fresh.layout, fresh.sources
    assert ahead.layout == layout
    assert [id(source) for source in ahead.sources] == [id(source) for source in sources]


def test_the_tensors_that_a_copy_converts_are_known_unless_they_may_have_changed() -> None:
    plan, _ = made()
    state = {
        "plain": torch.ones(4),
        "strided": torch.ones(8)[::2],
        "transposed": torch.ones(2, 3).T,
        "negative": torch._neg_view(torch.ones(4)),
    }
    first = plan.renew(capture(state), state, PendingSnapshot(1, 1), 5.0)
    layout, unlike = first.layout, first.unlike
    assert unlike is not None
    assert {layout.plan.items[n].fqn for n in unlike} == {"strided", "negative"}
    again = plan.reuse(capture(state))
    assert again is not None
    assert again.unlike in (unlike, None), "None if this torch has no guard"
    changed = plan.reuse(capture(state | {"plain": torch._neg_view(torch.ones(4))}))
    assert changed is not None
    assert changed.unlike is None


def test_a_plan_made_ahead_of_another_structure_is_made_again() -> None:
    plan, _ = made()
    planned_ahead(plan, {"a": torch.ones(3)})
    assert plan.reuse(capture({"a": torch.ones(3), "momentum": torch.ones(3)})) is None


def test_what_cannot_be_planned_ahead_is_raised() -> None:
    plan, _ = made()
    with pytest.raises(UnsavableValue, match="a: a tensor on the meta device"):
        plan.plan_ahead(Captured(b"", {"a": torch.ones(3, device="meta")}), {})
    assert not plan.valid


def test_several_ranks_do_not_plan_ahead() -> None:
    plan, _ = made(ranks := TwoRanks())
    planned_ahead(plan, {"a": torch.ones(3)})
    assert (plan.valid, ranks.rounds) == (False, [])


def test_an_expanded_tensor_counts_with_the_bytes_that_it_takes_in_the_slot() -> None:
    assert made()[0].estimate(capture({"w": torch.zeros(1).expand(1000, 10)})) == 40_000 + 300
