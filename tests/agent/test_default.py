"""The agent of the process: made at the first call, once, and again after it is closed.

A fake replaces `Agent`.
"""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptd.agent import Agent, default
from ckptd.agent.handover.outcomes import Outcomes
from ckptd.agent.pending import Pending, PendingSnapshot
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared.errors import Busy, DaemonUnreachable, SnapshotFailed


class FakeAgent:
    made: list[FakeAgent] = []  # noqa: RUF012 (a new list for each test)
    going = threading.Event()
    error: Exception | None = None

    def __init__(self) -> None:
        FakeAgent.going.wait(60)
        if FakeAgent.error is not None:
            raise FakeAgent.error
        self.closed = False
        self.calls: list[tuple[str, Any]] = []
        self.close_error: BaseException | None = None
        FakeAgent.made.append(self)

    def snapshot(self, state: Any, **options: Any) -> Pending:
        self.calls.append(("snapshot", {"state": state, **options}))
        return Pending(PendingSnapshot(options["step"], 1))

    def recover(self, state: Any, **options: Any) -> None:
        self.calls.append(("recover", {"state": state, **options}))

    def prepare(self, state: Any) -> None:
        self.calls.append(("prepare", state))

    def close(self, timeout: float) -> None:
        self.calls.append(("close", timeout))
        if isinstance(self.close_error, KeyboardInterrupt):
            raise self.close_error
        self.closed = True
        if self.close_error is not None:
            raise self.close_error


@pytest.fixture(autouse=True)
def agents(monkeypatch: pytest.MonkeyPatch) -> list[FakeAgent]:
    monkeypatch.setattr(default, "Agent", FakeAgent)
    monkeypatch.setattr(default, "_default", None)
    monkeypatch.setattr(default, "_without_agent", Outcomes())
    monkeypatch.setattr(default, "_calls", CallLock())
    monkeypatch.setattr(FakeAgent, "made", [])
    monkeypatch.setattr(FakeAgent, "error", None)
    FakeAgent.going.set()
    return FakeAgent.made


def test_every_option_reaches_the_agent(agents: list[FakeAgent]) -> None:
    options: dict[str, Any] = {
        "step": 3, "tag": "best", "persist": False, "on_busy": "skip", "metrics": {"x": 1},
        "user_content": [1], "rng": False, "replicate": True, "on_error": "log", "on_failure": None,
        "unsavable": "skip", "hold": "now",
    }  # fmt: skip
    default.snapshot("state", **options)
    wanted: dict[str, Any] = {
        "step": 3,
        "strict": False,
        "keep": ["lr"],
        "on_reshape": print,
        "same_partition": True,
    }
    default.recover("state", **wanted)
    default.prepare("state")
    default.close(5.0)
    (agent,) = agents
    assert agent.calls == [
        ("snapshot", {"state": "state", **options}),
        ("recover", {"state": "state", **wanted}),
        ("prepare", "state"),
        ("close", 5.0),
    ]


def test_threads_share_one_agent(agents: list[FakeAgent]) -> None:
    FakeAgent.going.clear()
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(default.snapshot, {}, step=step) for step in range(4)]
        FakeAgent.going.set()
        assert sorted(call.result(60).step for call in calls) == [0, 1, 2, 3]
    assert len(agents) == 1


def test_a_snapshot_without_a_daemon_fails_and_does_not_raise() -> None:
    FakeAgent.error = DaemonUnreachable("no daemon")
    pending = default.snapshot({}, step=3)
    assert (pending.step, pending.state, str(pending.error)) == (3, "failed", "no daemon")
    with pytest.raises(DaemonUnreachable, match="^no daemon$"):
        default.recover({})


def test_close_without_an_agent_makes_none(agents: list[FakeAgent]) -> None:
    default.close()
    assert agents == []


@pytest.mark.parametrize("error", [None, SnapshotFailed("not durable")])
def test_after_close_the_next_call_makes_another_agent(
    agents: list[FakeAgent], error: Exception | None
) -> None:
    default.snapshot({}, step=1)
    agents[0].close_error = error
    if error is None:
        default.close()
    else:
        with pytest.raises(SnapshotFailed):
            default.close()
    default.close()
    default.snapshot({}, step=2)
    assert [len(agent.calls) for agent in agents] == [2, 1]


def test_after_ctrl_c_in_close_the_next_close_finds_the_agent(agents: list[FakeAgent]) -> None:
    default.snapshot({}, step=1)
    agents[0].close_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        default.close()
    agents[0].close_error = None
    default.close()
    assert ([call for call, _ in agents[0].calls], len(agents)) == (
        ["snapshot", "close", "close"],
        1,
    )


def test_a_call_from_inside_the_making_of_the_agent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from a signal handler."""
    found: list[Pending] = []

    class Interrupted(FakeAgent):
        def __init__(self) -> None:
            found.append(default.snapshot({}, step=2))
            super().__init__()

    monkeypatch.setattr(default, "Agent", Interrupted)
    assert default.snapshot({}, step=1).error is None
    assert isinstance(found[0].error, Busy)


def test_a_forked_child_is_not_held_up_by_a_call_of_its_parent() -> None:
    held = default._calls
    with held("snapshot"):
        default._after_fork()
        assert default._calls is not held
        assert default.default_agent() is default._default


@pytest.mark.parametrize("name", ["snapshot", "recover", "prepare", "close"])
def test_a_function_has_the_parameters_and_the_text_of_the_method(name: str) -> None:
    function, method = getattr(default, name), getattr(Agent, name)
    taken = inspect.signature(method).parameters
    assert list(inspect.signature(function).parameters.values()) == list(taken.values())[1:]
    text = inspect.getdoc(function)
    assert text is not None
    own = f"Call `Agent.{name}` of this process's agent"
    assert text.startswith(f"{inspect.getdoc(method)}\n\n{own}")
