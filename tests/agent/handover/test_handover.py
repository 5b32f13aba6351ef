"""Tests the life of a hand-over without a daemon: what is registered, sent, kept and
given back. test_nested_calls.py tests it with processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from ckptd.agent.copy.fences import Transfer
from ckptd.agent.copy.slots import MappedSlots
from ckptd.agent.handover.handover import Handover, Handovers
from ckptd.agent.link.client import Call, Client
from ckptd.agent.pending import PendingSnapshot
from ckptd.agent.threads.flag import Flag
from ckptd.shared.errors import CkptdError, DaemonUnreachable, SnapshotFailed
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.lifecycle import Event
from tests.support.daemons import until


class Daemon:
    """Replaces a Client.

    It answers each Acquire with the next of `answers`, and records every request.
    """

    def __init__(self, *answers: m.Reply) -> None:
        self.answers = list(answers)
        self.requests: list[m.Request] = []
        self.given_back: list[m.Reply] = []
        self.closed = False

    def begin(self, make: Callable[[int], m.Request], call: Call) -> Call:
        self.requests.append(make(len(self.requests)))
        call.reply = self.answers.pop(0)
        return call

    def finish(self, call: Call, kind: Any, timeout: float) -> tuple[m.Reply, list[int]]:
        assert call.reply is not None
        return call.reply, []

    def abandon(self, call: Call) -> m.Reply | None:
        return call.reply

    def give_back(self, reply: m.Reply) -> None:
        self.given_back.append(reply)

    def post(self, make: Callable[[int], m.Request], answered: Callable[[m.Reply], None]) -> None:
        self.requests.append(make(len(self.requests)))

    def said(self) -> list[tuple[str, Any]]:
        return [
            ("abandon", (r.segment, r.step, r.reason))
            if isinstance(r, m.Abandon)
            else (type(r).__name__.lower(), r.step)  # type: ignore[attr-defined]
            for r in self.requests
        ]


class FakeSlot:
    def __init__(self, name: str, capacity: int = 1000) -> None:
        self.name, self.capacity, self.header = name, capacity, self
        self.state, self.step, self.attempt = SlotState.FREE, cast(int | None, None), 1
        self.ready, self.unlocked = Flag(), 3

    def begin(self, step: int) -> None:
        self.state, self.step = SlotState.FILLING, step

    def seal(self, *_: Any) -> None:
        self.state = SlotState.SEALED

    def clear(self) -> None:
        self.state, self.step = SlotState.FREE, None

    def refresh(self) -> FakeSlot:
        return self


class World:
    """One rank with two slots."""

    def __init__(self, *answers: m.Reply) -> None:
        self.daemon = Daemon(*answers)
        self.all = Handovers(cast(Client, self.daemon))
        self.slots = {name: FakeSlot(name) for name in ("a", "b")}
        self.all.slots._slots.update(cast(Any, self.slots))

    def open(self, step: int) -> Handover:
        handover = self.all.open(PendingSnapshot(step, 1), None)
        handover.begin()
        return handover

    def filled(self, step: int) -> Handover:
        handover = self.open(step)
        handover.reserve(100, time.monotonic() + 60)
        handover.acquire()
        self.slots[handover.slot.name].begin(step)
        return handover


def granted(segment: str, step: int = 1) -> m.Granted:
    return m.Granted(re=0, segment=segment, step=step)


@pytest.mark.parametrize("copying", [True, False])
def test_a_slot_is_given_back_once_the_copies_into_it_are_over(
    monkeypatch: pytest.MonkeyPatch, copying: bool
) -> None:
    """The call does not wait for the copies, because a device may hang."""
    world, later = World(granted("a")), list[Callable[[], None]]()
    handover = world.filled(1)
    handover.copying = copying
    monkeypatch.setattr(world.all.sealer, "once_idle", later.append)
    world.all.end(handover)
    assert (("abandon", ("a", 1, "")) in world.daemon.said()) is not copying
    for give_back in later:
        give_back()
    assert ("abandon", ("a", 1, "")) in world.daemon.said()


@pytest.mark.parametrize(("seconds", "locked"), [(60, True), (0, False)])
def test_a_slot_for_an_accelerator_is_waited_for_until_it_is_locked_or_the_budget_is_over(
    monkeypatch: pytest.MonkeyPatch, seconds: float, locked: bool
) -> None:
    """A copy into memory that is not locked holds the training for seconds, too."""
    world, seen = World(granted("a")), list[bool]()
    monkeypatch.setattr(MappedSlots, "_will_do", lambda *_: True)
    ready = world.slots["a"].ready
    handover = world.open(1)
    handover.reserve(100, time.monotonic() + seconds, torch.device("cuda", 0))
    with ThreadPoolExecutor(1) as pool:
        acquired = pool.submit(handover.acquire)
        if locked:
            until(lambda: ready._waiters._asleep or acquired.done(), "wait")
            seen.append(acquired.done())
            ready.set()
        assert acquired.result(60).name == "a"
    assert (seen, ready.is_set()) == ([False] * locked, locked)
    assert handover.pending.unlocked == 3


def test_a_slot_for_the_cpu_is_used_while_it_is_faulted_in() -> None:
    world = World(granted("a"))
    handover = world.filled(1)
    assert (world.slots["a"].ready.is_set(), handover.pending.unlocked) == (False, 0)


def test_a_slot_is_acquired_and_sealed() -> None:
    world = World(granted("a"))
    handover = world.filled(1)
    assert (handover.pending.state, handover.pending.segment) == ("staged", "a")
    handover.seal_after(None, cast(Any, None), cast(Any, None))
    world.all.end(handover)
    assert world.daemon.said() == [("acquire", 1), ("seal", 1)]
    assert (handover.pending.state, world.all.last_step, world.slots["a"].state) == (
        "sealed",
        1,
        SlotState.SEALED,
    )


def test_a_refusal_skips_the_step() -> None:
    world = World(m.Refused(re=0, reason="every slot is still being saved"))
    handover = world.open(1)
    handover.reserve(100, time.monotonic() + 60)
    with pytest.raises(
        SnapshotFailed, match=r"step 1 was skipped: every slot is still being saved \(waited 0"
    ):
        handover.acquire()
    world.all.fail(handover.pending, SnapshotFailed("the caller reports every error"))
    world.all.end(handover)
    assert (handover.pending.state, world.all.pending, world.daemon.said()) == (
        "skipped",
        {},
        [("acquire", 1)],
    )


def test_an_early_refusal_is_found_before_the_ranks_plan() -> None:
    world = World(m.Refused(re=0, reason="no"))
    handover = world.open(1)
    handover.check_not_refused()  # no slot was requested
    handover.request(time.monotonic() + 60)
    with pytest.raises(SnapshotFailed, match="step 1 was skipped: no"):
        handover.check_not_refused()


def test_a_failure_after_the_grant_is_reported_and_the_slot_given_back() -> None:
    world = World(granted("a"))
    handover = world.filled(1)
    world.all.fail(handover.pending, SnapshotFailed("torn"))
    world.all.end(handover)
    assert world.daemon.said() == [
        ("acquire", 1),
        ("abandon", ("", 1, "torn")),
        ("abandon", ("a", 1, "torn")),
    ]
    assert world.slots["a"].state is SlotState.FREE


def test_a_held_slot_stays_until_it_is_sealed_or_abandoned() -> None:
    world = World(granted("a"))
    handover = world.filled(1)
    handover.hold()
    world.all.end(handover)
    assert world.daemon.said() == [("acquire", 1)]
    assert not world.all.wait_until_sealed(time.monotonic() + 0.01)
    handover.abandon(SnapshotFailed("another rank failed"))
    handover.abandon(SnapshotFailed("again"))
    assert world.daemon.said() == [("acquire", 1), ("abandon", ("a", 1, "another rank failed"))]
    assert world.all.wait_until_sealed(time.monotonic())
    assert str(handover.pending.error) == "another rank failed"


def test_a_sealed_slot_cannot_be_abandoned() -> None:
    world = World(granted("a"))
    handover = world.filled(1)
    handover.hold()
    handover.seal(cast(Any, None), cast(Any, None))
    handover.abandon(SnapshotFailed("too late"))
    assert (handover.pending.state, world.slots["a"].state) == ("sealed", SlotState.SEALED)


def test_larger_slots_wait_for_slots_that_are_being_filled() -> None:
    world = World(granted("a"), granted("b", 2))
    first = world.filled(1)
    first.hold()
    second = world.open(2)
    with pytest.raises(
        SnapshotFailed,
        match="larger slots are needed, and another save of this process has not sealed its slot "
        "in time",
    ):
        second.reserve(2000, time.monotonic() + 0.01)
    with ThreadPoolExecutor(1) as pool:
        sealed = pool.submit(world.all.wait_until_sealed, time.monotonic() + 60)
        first.seal(cast(Any, None), cast(Any, None))
        assert sealed.result()


@pytest.mark.parametrize("state", [SlotState.FILLING, SlotState.SEALED])
def test_an_interrupted_call_is_settled_by_the_header(state: SlotState) -> None:
    world = World(granted("a"))
    handover = world.filled(1)
    world.slots["a"].state = state
    world.all.end_interrupted()
    if state is SlotState.SEALED:
        assert world.daemon.said() == [("acquire", 1), ("seal", 1)]
        assert (handover.pending.state, world.all.last_step) == ("sealed", 1)
    else:
        assert [what for what, _ in world.daemon.said()] == ["acquire", "abandon", "abandon"]
        assert str(handover.pending.error) == "the snapshot of step 1 was interrupted"
        assert world.slots["a"].state is SlotState.FREE
    world.all.end_interrupted()
    assert len(world.daemon.requests) == 2 + (state is SlotState.FILLING)


def test_an_interrupted_call_leaves_its_slot_to_the_thread_that_seals_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device may hang, and neither the next call nor close() may hang with it."""
    world = World(granted("a"))
    handover = world.filled(1)
    monkeypatch.setattr(world.all.sealer, "_start", lambda: None)
    world.all.sealer.later("a", Transfer(), lambda: None, lambda error: None)
    world.all.end_interrupted()
    assert world.daemon.said() == [("acquire", 1)]
    assert (handover.pending.state, world.slots["a"].state) == ("staged", SlotState.FILLING)


def test_a_granted_slot_that_is_not_used_is_given_back() -> None:
    world = World(granted("a"))
    handover = world.open(1)
    handover.request(time.monotonic() + 60)
    world.all.end_interrupted()
    assert world.daemon.given_back == [granted("a")]
    assert handover.pending.state == "failed"


def test_after_a_lost_answer_any_slot_may_be_granted() -> None:
    world = World(granted("a"))
    handover = world.filled(1)
    handover.slot_request._calls.append(lost := Call())
    lost.error = DaemonUnreachable("gone")
    world.slots["b"].begin(1)
    world.all.fail(handover.pending, SnapshotFailed("gone"))
    world.all.end(handover)
    assert {said[1][0] for said in world.daemon.said() if said[0] == "abandon"} == {"", "a", "b"}


@pytest.mark.parametrize(
    ("step", "last_step", "told"),
    [(5, 4, 5), (-1, -1, None), (5, 5, None)],
    ids=["free", "negative", "taken"],
)
def test_the_daemon_hears_of_a_failure_but_only_a_step_that_is_free_can_fail(
    step: int, last_step: int, told: int | None
) -> None:
    world = World()
    world.all.last_step = last_step
    world.all.fail(PendingSnapshot(step, 1), SnapshotFailed("why"))
    assert world.daemon.said() == [("abandon", ("", told, "why"))]


def test_a_snapshot_that_fails_after_its_step_was_taken_is_not_reported_again() -> None:
    world = World()
    world.all.last_step = 5
    pending = PendingSnapshot(5, 1)
    pending.segment = "a"
    world.all.fail(pending, SnapshotFailed("why"))
    assert world.daemon.said() == []


def test_a_second_call_for_a_step_does_not_fail_the_first() -> None:
    world = World(granted("a"))
    first = world.filled(1)
    world.all.fail(PendingSnapshot(1, 1), SnapshotFailed("step 1 does not follow step 1"))
    assert world.all.pending[1, 1] is first.pending
    assert world.daemon.said() == [
        ("acquire", 1),
        ("abandon", ("", None, "step 1 does not follow step 1")),
    ]


def test_a_memory_only_snapshot_is_superseded_in_its_slot() -> None:
    world = World(granted("a"), granted("a", 2))
    old = world.all.open(PendingSnapshot(1, 1, persist=False), None)
    old.begin()
    old.reserve(100, time.monotonic() + 60)
    old.acquire()
    old.pending.move(Event.STAGE)
    old.pending.move(Event.SEAL)
    world.filled(2)
    assert list(world.all.pending) == [(1, 2)]
    with pytest.raises(CkptdError, match="a newer snapshot has replaced it there"):
        old.pending.wait("durable", timeout=1)


def test_closing_fails_snapshots_that_are_not_durable() -> None:
    world = World(granted("a"))
    memory_only = world.all.open(PendingSnapshot(0, 1, persist=False), None)
    memory_only.begin()
    handover = world.filled(1)
    world.all.slots._slots.clear()
    world.all.close()
    assert str(handover.pending.error) == "the agent was closed first"
    assert (
        str(memory_only.pending.error) == "step 0 was kept in memory only, and the agent was closed"
    )
    assert list(world.all.pending) == [(1, 0)]
