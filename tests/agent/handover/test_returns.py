"""Tests that slots are given back again until the daemon has confirmed each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ckptd.agent.handover.returns import MAX_REASON, Returns
from ckptd.agent.link.client import Client
from ckptd.shared.errors import QuotaExceeded
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.wire import messages as m


class Wire:
    """Replaces a Client. It records what is posted, and the test answers."""

    def __init__(self) -> None:
        self.posted: list[tuple[m.Request, Callable[[m.Reply], None]]] = []

    def post(self, make: Callable[[int], m.Request], answered: Callable[[m.Reply], None]) -> None:
        self.posted.append((make(len(self.posted)), answered))

    def sent(self) -> list[tuple[str, int | None, str, str]]:
        return [
            (r.segment, r.step, r.reason, r.code)
            for r, _ in self.posted
            if isinstance(r, m.Abandon)
        ]


class FakeSlot:
    def __init__(self, step: int | None, state: SlotState, error: Exception | None = None) -> None:
        self.name = "segment"
        self.header = self
        self.step, self.state, self._error, self.cleared = step, state, error, 0

    def clear(self) -> None:
        self.cleared += 1
        if self._error is not None:
            raise self._error


def make() -> tuple[Wire, Returns]:
    wire = Wire()
    return wire, Returns(cast(Client, wire))


def test_an_unconfirmed_return_is_sent_again() -> None:
    wire, returns = make()
    returns.send("a", 1, QuotaExceeded("too small"))
    returns.send("b", 2)
    wire.posted[0][1](m.Done(re=0))
    returns.send_again()
    assert wire.sent() == [("a", 1, "too small", "quota"), ("b", 2, "", ""), ("b", 2, "", "")]
    wire.posted[2][1](m.Done(re=2))
    wire.posted[1][1](m.Done(re=1))  # the answer to the first one comes late
    returns.send_again()
    assert len(wire.posted) == 3


def test_nothing_is_sent_again_for_an_attempt_that_is_over() -> None:
    wire, returns = make()
    returns.send("a", 1)
    returns.clear()
    returns.send_again()
    assert len(wire.posted) == 1


def test_a_long_reason_is_cut() -> None:
    wire, returns = make()
    returns.send("a", 1, ValueError("x" * 10_000))
    assert wire.sent() == [("a", 1, "x" * MAX_REASON, "")]


def test_a_slot_is_cleared_only_if_it_still_belongs_to_the_step() -> None:
    for slot, times in (
        (FakeSlot(1, SlotState.FILLING), 1),
        (FakeSlot(1, SlotState.FREE), 0),
        (FakeSlot(2, SlotState.FILLING), 0),
        (FakeSlot(1, SlotState.FILLING, ValueError("descriptors are closed")), 1),
    ):
        wire, returns = make()
        returns.give_back(cast(Any, slot), 1, None)
        assert slot.cleared == times
        assert wire.sent() == [("segment", 1, "", "")]
