"""Tests that a slot which was requested and is no longer wanted becomes free again,
whenever the answer comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.link import slot_requests
from ckptd.agent.link.client import Call, Client
from ckptd.agent.link.slot_requests import GRACE_SECONDS, SlotRequest
from ckptd.agent.threads.call_lock import Nested
from ckptd.shared.errors import AlreadyExists, Busy, CkptdError, DaemonUnreachable, InternalError
from ckptd.shared.wire import messages as m
from tests.support.clock import Clock
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
    assert (
        first.answer(),
        first.answer(),
        first.segment in agent._link.handovers.slots,
        first.why,
    ) == (True, True, True, "")
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


def test_a_failure_after_the_request_gives_the_slot_back(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with running(daemon.home, forked=True):
        assert (asking.answer(), asking.take() in agent._link.handovers.slots, asking.why) == (
            True,
            True,
            "",
        )
        agent.close()


def test_a_request_fails_at_the_deadline_if_the_daemon_stays_away(
    agent: Agent, daemon: Daemon
) -> None:
    daemon.kill()
    with pytest.raises(DaemonUnreachable):
        ask(agent, 1, wait=0.2).answer()
    with running(daemon.home, forked=True):
        agent.close()


def test_random_generators_that_need_more_room_cost_one_snapshot(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"torch": b"x" * 500_000}
    monkeypatch.setattr("ckptd.agent.state.capture.rng_state", lambda: large)
    assert agent.snapshot(STATE, step=1).state in ("failed", "sealed", "durable")
    agent.snapshot(STATE, step=2).wait("durable", timeout=60)


# -- against a client that answers as told, on a clock that the test moves


class FakeClient:
    """In the place of a Client.

    `script` has one entry for each request: its reply, its error, or None for no reply
    before the timeout.

    `refuses` has the errors of the next sends. `back` has the answers of
    `wait_connected`.
    """

    def __init__(self, clock: Clock, *script: m.Reply | CkptdError | None) -> None:
        self.clock, self.script = clock, list(script)
        self.refuses: list[CkptdError] = []
        self.back: list[bool] = []
        self.sent: list[m.Acquire] = []
        self.waited: list[float] = []
        self.given_back: list[m.Reply] = []

    def begin(self, make: Callable[[int], m.Acquire], call: Call) -> Call:
        if self.refuses:
            raise self.refuses.pop(0)
        self.sent.append(make(len(self.sent)))
        return call

    def finish(self, call: Call, kind: type[m.Reply], timeout: float) -> tuple[m.Reply, tuple[()]]:
        self.waited.append(timeout)
        answer = self.script.pop(0)
        if answer is None:
            self.clock.now += timeout
            raise DaemonUnreachable("the daemon has not answered")
        if isinstance(answer, CkptdError):
            call.error = answer
            raise answer
        call.reply = answer
        return answer, ()

    def wait_connected(self, budget: float) -> bool:
        return self.back.pop(0) if self.back else True

    def abandon(self, call: Call) -> m.Reply | None:
        call.abandoned = True
        return call.reply

    def give_back(self, reply: m.Reply) -> None:
        self.given_back.append(reply)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(slot_requests, "time", made)
    return made


def granted(segment: str) -> m.Granted:
    return m.Granted(re=0, segment=segment, step=1)


def requested(client: FakeClient, seconds: float = 10.0) -> SlotRequest:
    made = SlotRequest(cast(Client, client), 1, "best")
    made.ask(client.clock.now + seconds)
    return made


def test_the_request_says_how_long_the_daemon_may_wait(clock: Clock) -> None:
    client = FakeClient(clock, granted("a"))
    request = requested(client)
    clock.now += 4.0
    assert (request.asked, request.answer(), request.segment) == (True, True, "a")
    assert client.sent == [m.Acquire(id=0, step=1, name="best", wait=10.0)]
    assert client.waited == [6.0 + GRACE_SECONDS]


def test_a_request_under_way_is_not_sent_twice(clock: Clock) -> None:
    client = FakeClient(clock, granted("a"), granted("b"))
    request = requested(client)
    request.ask(clock.now + 1.0)
    assert (request.answer(), request.take(), len(client.sent)) == (True, "a", 1)
    request.ask(clock.now + 1.0)  # the segment does not exist any more
    assert (request.answer(), request.segment, len(client.sent)) == (True, "b", 2)


@pytest.mark.parametrize("error", [DaemonUnreachable("lost"), Busy("stopping")])
def test_a_lost_or_refused_request_is_sent_again_with_the_time_that_is_left(
    clock: Clock, error: CkptdError
) -> None:
    client = FakeClient(clock, error, error, granted("a"))
    request = requested(client)
    clock.now += 9.9
    assert request.answer()
    assert [round(sent.wait, 2) for sent in client.sent] == [10.0, 0.05, 0.0]
    assert clock.slept == [pytest.approx(0.05), pytest.approx(0.05)]


@pytest.mark.parametrize("error", [DaemonUnreachable("lost"), Busy("stopping")])
def test_a_request_that_could_not_be_sent_early_is_sent_when_the_answer_is_needed(
    clock: Clock, error: CkptdError
) -> None:
    client = FakeClient(clock, granted("a"))
    client.refuses = [error, error]
    request = requested(client)
    assert client.sent == []
    assert (request.answer(), request.segment, len(client.sent)) == (True, "a", 1)


def test_a_daemon_that_stays_away_is_an_error_at_once(clock: Clock) -> None:
    client = FakeClient(clock, DaemonUnreachable("lost"))
    client.back = [False]
    with pytest.raises(DaemonUnreachable, match="^lost$"):
        requested(client).answer()
    assert len(client.sent) == 1


def test_a_daemon_that_never_answers_is_an_error_after_the_deadline(clock: Clock) -> None:
    client = FakeClient(clock, None)
    request, begun = requested(client), clock.now
    with pytest.raises(DaemonUnreachable, match="^the daemon has not answered$"):
        request.answer()
    assert clock.now == begun + 10.0 + GRACE_SECONDS
    assert len(client.sent) == 1


def test_an_error_that_a_retry_cannot_help_is_raised(clock: Clock) -> None:
    client = FakeClient(clock, AlreadyExists("tag 'best' is taken"), granted("a"))
    with pytest.raises(AlreadyExists):
        requested(client).answer()
    assert len(client.sent) == 1


@pytest.mark.parametrize("early", [True, False], ids=["in ask", "in answer"])
def test_a_request_inside_another_send_is_refused(clock: Clock, early: bool) -> None:
    client = FakeClient(clock)
    nested = Nested("ckptd", "a request")
    client.refuses = [nested] if early else [DaemonUnreachable("lost"), nested]
    with pytest.raises(Nested):
        requested(client).answer()
    assert client.back == clock.slept == []


def test_a_refusal_says_how_long_the_step_has_waited(clock: Clock) -> None:
    client = FakeClient(clock, m.Refused(re=0, reason="every slot is still being saved"))
    request = requested(client)
    clock.now += 2.5
    assert (request.answer(), request.answer(), request.why) == (
        False,
        False,
        "every slot is still being saved (waited 2.5 s)",
    )


def test_what_was_taken_is_not_given_back(clock: Clock) -> None:
    client = FakeClient(clock, granted("a"), granted("b"))
    request = requested(client)
    request.answer()
    assert request.take() == "a"
    request.ask(clock.now + 1.0)
    request.answer()
    request.drop()
    request.drop()
    assert (client.given_back, request.segment, request.taken) == ([granted("b")], "", ["a"])


def test_a_drop_that_ctrl_c_interrupts_is_finished_by_the_next(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient(clock, granted("a"))
    request = requested(client)
    request.answer()

    def interrupted(reply: m.Reply) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            request.drop()
    request.drop()
    assert client.given_back == [granted("a")]


@pytest.mark.parametrize(
    ("answer", "raises", "lost"),
    [
        (None, DaemonUnreachable, True),
        (DaemonUnreachable("lost"), DaemonUnreachable, True),
        (AlreadyExists("taken"), AlreadyExists, False),
    ],
    ids=["no answer", "lost", "refused"],
)
def test_a_slot_may_have_been_granted_unless_there_is_an_answer(
    clock: Clock, answer: CkptdError | None, raises: type[CkptdError], lost: bool
) -> None:
    request = requested(FakeClient(clock, answer), 0.0)
    with pytest.raises(raises):
        request.answer()
    assert request.lost == lost


def test_a_slot_that_was_granted_is_not_lost(clock: Clock) -> None:
    request = requested(FakeClient(clock, granted("a")), 0.0)
    request.answer()
    assert not request.lost
