"""Tests calls from a signal handler or from the state that is being saved, Ctrl-C, and
handlers that raise: none hangs or loses a slot.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.agent import Agent, Schedule, StorageWriter, default
from ckptd.agent.agent import link_of
from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.dcp import targets
from ckptd.agent.link.client import Client
from ckptd.agent.link.slot_requests import SlotRequest
from ckptd.shared import errors
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.system import failpoints
from ckptd.shared.wire import messages as m
from tests.support.daemons import until
from tests.support.raising_handlers import RAISED, at_failpoint
from tests.support.shared_daemon import LentDaemon

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore::FutureWarning"
)
WORDS = (
    r"was called while .* of the same thread is still running.*: set a flag in the handler, "
    r"and "
    r"call .* once the running call has returned"
)


@pytest.fixture
def daemon(shared_daemon: LentDaemon) -> LentDaemon:
    return shared_daemon


@pytest.fixture
def agent(daemon: LentDaemon) -> Iterator[Agent]:
    made = Agent(daemon.job, socket=daemon.home.socket)
    made.snapshot({"w": torch.arange(10.0)}, step=0).wait("durable", timeout=60)
    yield made
    if not made.closed:
        made.close()


class Calls:
    """A part of a state whose state_dict() does something, as a signal handler would at
    that point.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.outcome = work, "not called"

    def state_dict(self) -> dict[str, Any]:
        try:
            self.outcome = repr(self.work())
        except errors.Busy as error:
            self.outcome = f"Busy: {error}"
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def all_slots_work(agent: Agent, first: int) -> None:
    for step in range(first, first + 4):
        agent.snapshot({"w": torch.full((10,), float(step))}, step=step).wait("durable", timeout=60)
    state = {"w": torch.zeros(10)}
    recovered = agent.recover(state)
    assert recovered is not None
    assert (recovered.step, state["w"][0].item()) == (first + 3, float(first + 3))


@contextmanager
def alarm(work: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Install a handler of SIGALRM.

    Return a function that makes it run in the main thread at once.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: work())
    try:
        yield lambda: signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["recover", "prepare", "close", "due", "wait"])
def test_a_nested_call_is_refused(agent: Agent, name: str) -> None:
    pending = agent.snapshot({"w": torch.ones(10)}, step=1, persist=False)
    work: dict[str, Callable[[], Any]] = {
        "recover": lambda: agent.recover({"w": torch.zeros(10)}),
        "prepare": lambda: agent.prepare({"w": torch.zeros(10)}),
        "close": agent.close,
        "due": lambda: link_of(agent).broadcast("topic", lambda: b"said"),
        "wait": lambda: pending.wait("durable"),
    }
    evil = Calls(work[name])
    outer = agent.snapshot({"w": torch.full((10,), 5.0), "evil": evil}, step=2)
    assert evil.outcome.startswith(
        f"Busy: {name}() was called while snapshot() of the same thread is still running"
    )
    outer.wait("durable", timeout=60)
    all_slots_work(agent, 10)


def test_a_nested_snapshot_fails_and_the_outer_one_does_not(agent: Agent) -> None:
    nested: list[Any] = []
    evil = Calls(lambda: nested.append(agent.snapshot({"w": torch.zeros(10)}, step=2)))
    outer = agent.snapshot({"w": torch.full((10,), 5.0), "evil": evil}, step=1)
    outer.wait("durable", timeout=60)
    with pytest.raises(errors.Busy, match=WORDS):
        nested[0].wait()
    all_slots_work(agent, 2)


def test_a_snapshot_from_a_handler_while_a_request_is_sent_is_refused(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler interrupts where the lock of the client is held."""
    nested: list[Any] = []
    make = m.Acquire

    with alarm(lambda: nested.append(agent.snapshot({"w": torch.zeros(10)}, step=2))) as ring:

        def acquire(**fields: Any) -> m.Acquire:
            if not nested:
                ring()
            return make(**fields)

        monkeypatch.setattr(m, "Acquire", acquire)
        outer = agent.snapshot({"w": torch.full((10,), 5.0)}, step=1)
    assert [pending.state for pending in nested] == ["failed"]
    outer.wait("durable", timeout=60)
    all_slots_work(agent, 2)


def test_a_snapshot_from_a_handler_while_the_agent_is_made_is_refused(
    daemon: LentDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SOCKET", str(daemon.home.socket))
    monkeypatch.setenv("CKPTD_JOB", daemon.job)
    nested: list[Any] = []
    original = Client.__init__
    with alarm(lambda: nested.append(default.snapshot({"w": torch.zeros(1)}, step=1))) as ring:

        def connect(*arguments: Any, **options: Any) -> None:
            ring()
            original(*arguments, **options)

        monkeypatch.setattr(Client, "__init__", connect)
        default.snapshot({"w": torch.ones(1)}, step=1).wait("durable", timeout=60)
    with pytest.raises(errors.Busy, match=WORDS):
        nested[0].wait()
    default.close()
    assert default._default is None


def test_a_schedule_called_inside_a_call_loses_no_due_step(agent: Agent) -> None:
    schedule = Schedule(every_seconds=1e-9, agent=agent)
    assert schedule.due(1) is False
    evil = Calls(lambda: schedule.due(2))
    agent.snapshot({"w": torch.ones(1), "evil": evil}, step=2)
    assert evil.outcome.startswith("Busy: due() was called while snapshot()")
    assert schedule.due(3) is True


@pytest.mark.parametrize("tag", ["inner", "step-5"])
def test_a_save_through_dcp_inside_a_snapshot_is_refused(
    agent: Agent, daemon: LentDaemon, tag: str
) -> None:
    def save() -> None:
        try:
            dcp.save(
                {"x": torch.ones(1)},
                storage_writer=StorageWriter(daemon.directory / tag, socket=daemon.home.socket),
            )
        except CheckpointException as error:
            refusals.append(str(error))

    refusals: list[str] = []
    outer = agent.snapshot({"w": torch.ones(10), "evil": Calls(save)}, step=1)
    outer.wait("durable", timeout=60)
    assert len(refusals) == 1
    assert "save() was called while snapshot() of the same thread is still running" in refusals[0]
    all_slots_work(agent, 10)


def test_a_save_through_dcp_inside_another_one_is_refused(
    daemon: LentDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(tag: str) -> None:
        dcp.save(
            {"x": torch.ones(1)},
            storage_writer=StorageWriter(daemon.directory / tag, socket=daemon.home.socket),
        )

    def handler() -> None:
        try:
            save("inner")
        except CheckpointException as error:
            refusals.append(str(error))

    refusals: list[str] = []
    original = targets._current
    with alarm(handler) as ring:

        def current(*arguments: Any) -> Any:
            if not refusals:
                ring()
            return original(*arguments)

        monkeypatch.setattr(targets, "_current", current)
        save("outer")
    assert len(refusals) == 1
    assert "save() was called while save() of the same thread is still running" in refusals[0]
    save("after")
    targets.leave_all()


def test_a_call_of_another_thread_waits(agent: Agent) -> None:
    outcome: list[Any] = []
    thread = threading.Thread(
        target=lambda: outcome.append(agent.snapshot({"w": torch.ones(10)}, step=2))
    )
    agent.snapshot({"w": torch.zeros(10), "starts": Calls(thread.start)}, step=1).wait(
        "durable", timeout=60
    )
    thread.join(60)
    outcome[0].wait("durable", timeout=60)


# -- Ctrl-C


@pytest.mark.parametrize("where", ["begin", "copy", "seal"])
def test_ctrl_c_in_a_snapshot_gives_the_slot_back(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for step in (1, 2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(MappedSlot, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                agent.snapshot({"w": torch.zeros(10)}, step=step)
    all_slots_work(agent, 4)


@pytest.mark.parametrize("where", ["take", "answer", "drop"])
def test_ctrl_c_during_a_slot_request_gives_the_slot_back(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    original = getattr(SlotRequest, where)
    for step in (1, 2, 3):
        seen: list[int] = []

        def interrupt(asking: SlotRequest, seen: list[int] = seen) -> Any:
            found = original(asking)
            if not seen:
                seen.append(1)
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patch:
            patch.setattr(SlotRequest, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                agent.snapshot({"w": torch.zeros(10)}, step=step)
    all_slots_work(agent, 4)


def test_ctrl_c_after_the_seal_hands_it_over(
    agent: Agent, daemon: LentDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MappedSlot.seal

    def seal(slot: MappedSlot, *arguments: Any) -> None:
        original(slot, *arguments)
        assert slot.header.state is SlotState.SEALED
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MappedSlot, "seal", seal)
        with pytest.raises(KeyboardInterrupt):
            agent.snapshot({"w": torch.full((10,), 7.0)}, step=7)
    until(
        lambda: (daemon.directory / "step-00000007.a0001" / "manifest.json").exists(),
        "save of what was sealed",
    )
    assert agent.last_step == 7
    all_slots_work(agent, 8)


def test_ctrl_c_while_a_reply_is_received_loses_no_slot(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost with the connection, and the daemon has granted a slot."""
    original = Client._got
    for step in (1, 2, 3):
        with monkeypatch.context() as patch:

            def got(client: Client, message: m.Message) -> None:
                if isinstance(message, m.Granted):
                    if threading.current_thread() is threading.main_thread():
                        raise KeyboardInterrupt
                    raise errors.ProtocolError("the connection is lost")
                original(client, message)

            patch.setattr(Client, "_got", got)
            patch.setattr("ckptd.agent.link.slot_requests.GRACE_SECONDS", 0.1)
            try:
                agent.snapshot({"w": torch.zeros(10)}, step=step, on_busy="skip")
            except KeyboardInterrupt:
                pass
        until(lambda: agent._link.client.connected, "connection")
    all_slots_work(agent, 4)


def test_ctrl_c_in_recover_begins_the_attempt_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.snapshot({"w": torch.ones(10)}, step=1).wait("durable", timeout=60)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ckptd.agent.copy.slots.MappedSlots.drop", interrupt)
        with pytest.raises(KeyboardInterrupt):
            agent.recover({"w": torch.zeros(10)}, step=0)
    all_slots_work(agent, 1)


def test_close_can_be_called_again_after_ctrl_c(
    agent: Agent, daemon: LentDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ckptd.agent.copy.slots.MappedSlots.drop", interrupt)
        with pytest.raises(KeyboardInterrupt):
            agent.close()
    assert agent._link.handovers.slots.names
    agent.close()
    assert (agent.closed, agent._link.handovers.slots.names) == (True, [])


# -- handlers that raise


@contextmanager
def raising(error: BaseException) -> Iterator[Callable[[], None]]:
    """Install a handler that raises `error`. Return a function that makes it run."""

    def work() -> None:
        raise error

    with alarm(work) as ring:
        yield ring


# Of types that ckptd itself handles; tests/crash/interrupts.py raises all kinds.
@pytest.mark.parametrize("name", ["TimeoutError", "a dead worker"])
def test_an_exception_of_a_handler_leaves_each_call_at_each_failpoint(
    agent: Agent, name: str
) -> None:
    reached, step = set[str](), 0
    for number, point in enumerate(failpoints.AGENT):
        state = {"w": torch.zeros(10 + (number << 18))}  # of another size, so that slots are made
        agent.recover({"w": torch.zeros(10)}, step=0)
        for call in ("snapshot", "prepare", "recover"):
            step += 1
            error, found = RAISED[name](), None
            with raising(error) as ring, at_failpoint(point, ring) as passed:
                try:
                    if call == "snapshot":
                        agent.snapshot(state, step=step)
                    elif call == "prepare":
                        agent.prepare(state)
                    else:
                        agent.recover({"w": torch.zeros(10)}, step=0)
                except BaseException as raised:
                    found = raised
            assert found is (error if passed else None), f"{point} of {call}: {found!r}"
            reached.update(passed)
    assert reached == set(failpoints.AGENT) - {"agent.allocated"}  # on a thread of its own
    agent.recover({"w": torch.zeros(10)}, step=0)
    all_slots_work(agent, step + 1)
