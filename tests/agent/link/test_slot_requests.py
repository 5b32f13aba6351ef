"""Tests that a slot which was requested and is no longer wanted becomes free again, whenever the answer comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.link.slot_requests import SlotRequest
from ckptd.shared.errors import AlreadyExists, DaemonUnreachable, InternalError
from tests.support.daemons import Daemon, running

STATE = {"w": torch.arange(10.0)}


@pytest.fixture
def agent(daemon: Daemon) -> Iterator[Agent]:
    made = Agent("job", socket=daemon.home.socket)
    made.snapshot(STATE, step=0).wait("durable", timeout=60)  # one slot is left
    yield made
    if not made.closed:
        made.close()


def ask(agent: Agent, step: int, wait: float = 0.0, tag: str | None = None) -> SlotRequest:
    asking = SlotRequest(agent._link.client, step, tag)
    asking.ask(time.monotonic() + wait)
    return asking


def test_a_request_returns_a_slot_or_the_reason_of_the_refusal(agent: Agent) -> None:
    first = ask(agent, 1)
    assert (first.answer(), first.answer(), first.segment in agent._link.handovers.slots, first.why) == (True, True, True, "")
    second = ask(agent, 2)
    assert (second.answer(), second.segment) == (False, "")
    assert second.why.startswith("every slot is still being saved (waited 0.")


def test_a_granted_slot_that_is_not_taken_is_given_back(agent: Agent) -> None:
    for step in range(1, 4):
        asking = ask(agent, step)
        assert asking.answer()
        asking.drop()
    agent.snapshot(STATE, step=9).wait("durable", timeout=60)


@pytest.mark.parametrize("pause", [0.0, 0.2], ids=["before the answer", "after it"])
def test_a_dropped_request_gives_its_slot_back(agent: Agent, pause: float) -> None:
    for step in range(1, 6):
        asking = ask(agent, step)
        time.sleep(pause)
        asking.drop()
        asking.drop()
    agent.snapshot(STATE, step=9).wait("durable", timeout=60)


def test_a_failure_after_the_request_gives_the_slot_back(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> bytes:
        time.sleep(0.2)
        raise RuntimeError("no generators")

    with monkeypatch.context() as patch:
        patch.setattr("ckptd.agent.agent.values_document", fail)
        for step in (1, 2, 3):
            with pytest.raises(InternalError, match="no generators"):
                agent.snapshot(STATE, step=step).wait("sealed", timeout=60)
    agent.snapshot(STATE, step=4).wait("durable", timeout=60)


def test_an_error_of_the_daemon_is_raised(agent: Agent) -> None:
    agent.snapshot(STATE, step=1, tag="mine").wait("durable", timeout=60)
    with pytest.raises(AlreadyExists, match="'mine' is taken"):
        ask(agent, 2, tag="mine").answer()


def test_a_request_is_repeated_when_the_daemon_comes_back(agent: Agent, daemon: Daemon) -> None:
    daemon.kill()
    asking = ask(agent, 1, wait=60.0)
    with running(daemon.home):
        assert (asking.answer(), asking.take() in agent._link.handovers.slots, asking.why) == (True, True, "")
        agent.close()


def test_a_request_fails_at_the_deadline_if_the_daemon_stays_away(agent: Agent, daemon: Daemon) -> None:
    daemon.kill()
    with pytest.raises(DaemonUnreachable):
        ask(agent, 1, wait=0.2).answer()
    with running(daemon.home):
        agent.close()


def test_random_generators_that_need_more_room_cost_one_snapshot(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"torch": b"x" * 500_000}
    monkeypatch.setattr("ckptd.agent.state.capture.rng_state", lambda: large)
    assert agent.snapshot(STATE, step=1).state in ("failed", "sealed", "durable")
    agent.snapshot(STATE, step=2).wait("durable", timeout=60)
