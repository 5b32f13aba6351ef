"""The samples are made once for each plan, and not at all if nothing is shared or the
setting is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ckptd.agent.copy import replica_check
from ckptd.agent.copy.replica_check import ReplicaCheck
from ckptd.agent.plan.kept_plan import PlanInUse, Shared
from ckptd.agent.plan.layout import layout_of, plan_locally
from ckptd.agent.plan.replica_groups import ReplicaGroup

STATE = {"w": torch.arange(64.0)}


def used(every: int, shared: Shared | None) -> ReplicaCheck:
    check = ReplicaCheck(every)
    check.use(shared, STATE, list(STATE.values()), 0, None)
    return check


def found() -> PlanInUse:
    layout = layout_of(plan_locally(STATE).rows, [], metadata=None, global_plan=b"")
    parts = list(STATE.values())
    return PlanInUse(layout, parts, [], parts, [part.data_ptr() for part in parts], None)


def never(device: torch.device, work: Callable[[], None]) -> None:
    pytest.fail("nothing is on an accelerator")


SHARED = Shared([ReplicaGroup((0, 1), [0])], plan_locally(STATE, world_size=2))


@pytest.mark.parametrize(
    ("every", "shared"), [(0, SHARED), (10, None), (10, Shared([], SHARED.local))]
)
def test_nothing_is_read_if_there_is_nothing_to_compare(every: int, shared: Shared | None) -> None:
    check = used(every, shared)
    assert (check.room, check.begin(found(), 1, never)) == (0, None)


def test_a_plan_that_is_kept_keeps_its_samples() -> None:
    check = used(10, SHARED)
    samples = check._samples
    check.use(SHARED, STATE, list(STATE.values()), 0, None)
    assert check._samples is samples
    finish = check.begin(found(), 1, never)
    assert finish is not None
    assert len(finish()) == 1
    check.use(Shared(SHARED.groups, SHARED.local), STATE, list(STATE.values()), 0, None)
    assert check._samples is not samples
    check.use(None, STATE, list(STATE.values()), 0, None)
    assert check.room == 0


def test_the_turn_of_a_range_follows_from_the_last_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = used(10, SHARED)
    assert check._samples is not None
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(
        check._samples,
        "take",
        lambda parts, addresses, step, before, queue: taken.append((step, before)),
    )
    for step in (5, 10, 21):
        check.begin(found(), step, never)
    assert taken == [(5, -1), (10, 5), (21, 10)]


def test_a_full_device_is_not_compared_and_this_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check, room, taken = used(10, SHARED), [False], [0]
    samples = check._samples
    assert samples is not None

    def take(*_: object) -> None:
        taken[0] += 1
        if not room[0]:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(samples, "take", take)
    monkeypatch.setattr(replica_check, "has_room", lambda device, length: room[0])
    monkeypatch.setattr(type(samples), "devices", [torch.device("cuda", 0)])
    assert [check.begin(found(), step, never) for step in range(3)] == [None] * 3
    # torch gives back all memory that it keeps for the training before it raises.
    assert (check.skipped, taken) == (3, [1])
    assert caplog.text.count("is not compared with the other ranks") == 1
    room[0] = True
    assert check.begin(found(), 3, never) is not None
    assert (check.skipped, taken) == (3, [2])
