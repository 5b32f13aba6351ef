"""The agent of this process, made when it is first needed, and the functions that use it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptd.agent.agent import Agent
from ckptd.agent.handover.rank_link import CLOSE_SECONDS
from ckptd.agent.pending import Pending
from ckptd.agent.recover.binding import OnReshape
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared.errors import CkptdError

_default: Agent | None = None
_calls = CallLock()


def default_agent(name: str = "Agent") -> Agent:
    """Return the agent of this process. Raises as `Agent`; Busy where `name`, a public call, interrupts the making of one."""
    global _default
    with _calls(name):
        if _default is None or _default.closed:
            _default = Agent()
        return _default


def snapshot(
    state: Any,
    *,
    step: int,
    tag: str | None = None,
    persist: bool = True,
    on_busy: str = "wait",
    metrics: Mapping[str, float] | None = None,
    user_content: Any = None,
    rng: bool = True,
) -> Pending:
    """`Agent.snapshot` of this process's agent. Never raises for what goes wrong with saving: the `Pending` tells."""
    try:
        agent = default_agent("snapshot")
    except CkptdError as error:
        failed = Pending(step)
        failed.fail(error)
        return failed
    return agent.snapshot(state, step=step, tag=tag, persist=persist, on_busy=on_busy, metrics=metrics, user_content=user_content, rng=rng)


def recover(state: Any, *, step: int | None = None, strict: bool = True, on_reshape: OnReshape | None = None) -> Recovered | None:
    """`Agent.recover` of this process's agent."""
    return default_agent("recover").recover(state, step=step, strict=strict, on_reshape=on_reshape)


def close(timeout: float = CLOSE_SECONDS) -> None:
    """`Agent.close` of this process's agent, if it has one: the newest snapshot becomes durable, the slots are freed."""
    global _default
    with _calls("close"):
        agent = _default
    if agent is not None:
        try:
            agent.close(timeout)
        finally:
            if agent.closed and _default is agent:  # not before: after Ctrl-C the next `close` goes on
                _default = None


def _after_fork() -> None:
    """Forget, in a forked child, the call that another thread of the parent was in: it will never leave."""
    global _calls
    _calls = CallLock()


os.register_at_fork(after_in_child=_after_fork)
