"""Tests the rounds of a planning: two if the ranks fit together by rule, a third one if
they may differ, and one error for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ckptd.agent.plan.layout import Layout, plan_locally
from ckptd.agent.plan.plan_rounds import Description, PlanRounds
from ckptd.shared.errors import CkptdError, SnapshotFailed, UnsavableValue


class Meeting:
    """The rounds of several ranks, each on a thread of its own."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.topics: list[str] = []
        self.sent: dict[str, list[int]] = {}
        self._said: list[bytes | CkptdError] = [b""] * world_size
        self._heard: list[bytes] | CkptdError = []
        self._barrier = threading.Barrier(world_size)

    def rank(self, rank: int) -> Any:
        return _Rank(self, rank)

    def round(
        self,
        rank: int,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
    ) -> bytes:
        self._said[rank] = mine
        self._barrier.wait(60)
        if rank == 0:
            self.topics.append(topic)
            said = [one for one in self._said if isinstance(one, bytes)]
            failed = [one for one in self._said if isinstance(one, CkptdError)]
            self.sent[topic] = [len(one) for one in said]
            try:
                self._heard = failed[0] if failed else decide(said)
            except CkptdError as error:
                self._heard = error
        self._barrier.wait(60)
        heard = self._heard
        self._barrier.wait(60)
        if isinstance(heard, CkptdError):
            raise heard
        return heard[rank]


class _Rank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, meeting.world_size

    def round(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        seconds: float,
        unwanted: Any,
    ) -> bytes:
        assert seconds > 0
        return self.meeting.round(self.rank, topic, mine, decide)


def describe(
    rank: int, tensors: dict[str, torch.Tensor], values: dict[str, bytes]
) -> Callable[[], Description]:
    return lambda: Description.of(plan_locally(tensors, world_size=2), tensors, values, rank, set())


def plan(meeting: Meeting, describers: list[Callable[[], Description]]) -> list[Layout]:
    """Plan on all ranks. Raises the error that all ranks raise."""

    def run(rank: int) -> Layout:
        rounds = PlanRounds(meeting.rank(rank), "plan/1/7", 1e12, lambda: None)
        return rounds.run(describers[rank]).layout

    with ThreadPoolExecutor(meeting.world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(meeting.world_size)]
        failed = [error for future in futures if (error := future.exception(60)) is not None]
        assert not failed or (
            len({str(error) for error in failed}) == 1 and len(failed) == meeting.world_size
        )
        return [future.result() for future in futures]


def test_ranks_of_the_same_structure_send_it_once() -> None:
    meeting = Meeting(3)
    tensors = {f"w{number}": torch.ones(4) for number in range(20)}
    layouts = plan(meeting, [describe(rank, tensors, {"n": b"1"}) for rank in range(3)])
    assert meeting.topics == ["plan/1/7/classes", "plan/1/7/structures"]
    assert [length > 0 for length in meeting.sent["plan/1/7/structures"]] == [True, False, False]
    assert max(meeting.sent["plan/1/7/classes"]) < 100
    assert sorted(item.fqn for layout in layouts for item in layout.plan.items) == sorted(tensors)
    assert [layout.plan.metadata is None for layout in layouts] == [False, True, True]


def test_ranks_that_differ_send_their_items_and_learn_the_key() -> None:
    meeting = Meeting(2)
    with pytest.raises(UnsavableValue, match="^n differs between ranks 0 and 1"):
        plan(
            meeting,
            [describe(rank, {"w": torch.ones(4)}, {"n": b"%d" % rank}) for rank in range(2)],
        )
    assert meeting.topics == ["plan/1/7/classes", "plan/1/7/structures", "plan/1/7/items"]
    meeting = Meeting(2)
    with pytest.raises(UnsavableValue, match="^w differs between ranks 0 and 1"):
        plan(
            meeting, [describe(rank, {"w": torch.full((4,), float(rank))}, {}) for rank in range(2)]
        )


def test_ranks_that_only_seem_to_differ_are_planned_item_by_item() -> None:
    """An alias that one rank has and the other has not. No rule says where it is."""
    base = torch.arange(4.0)
    described = [
        describe(0, {"w": base}, {}),
        describe(1, {"w": base, "tied": base.view(2, 2)}, {}),
    ]
    meeting = Meeting(2)
    layouts = plan(meeting, described)
    assert meeting.topics[-1] == "plan/1/7/items"
    assert sorted(item.fqn for layout in layouts for item in layout.plan.items) in (
        ["tied", "w"],
        ["w"],
    )


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def fails() -> Description:
        raise SnapshotFailed("no")

    meeting = Meeting(2)
    with pytest.raises(SnapshotFailed, match="^no$"):
        plan(meeting, [describe(0, {}, {}), fails])
    assert meeting.topics == ["plan/1/7/classes"]
