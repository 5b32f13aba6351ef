"""The functions `snapshot`, `recover`, `prepare` and `close`, and the agent of this
process that they use.

The agent is made when it is first needed. The text of the parameters is that of the
methods of `Agent`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import cleandoc
from typing import Any, SupportsIndex, TypeVar

from ckptd.agent.agent import Agent
from ckptd.agent.handover.outcomes import MISTAKES, Outcomes
from ckptd.agent.handover.rank_link import CLOSE_SECONDS
from ckptd.agent.link.arguments import Hold, OnBusy, OnError, Unsavable, as_step
from ckptd.agent.pending import Pending, PendingSnapshot
from ckptd.agent.recover.options import OnReshape
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared.errors import CkptdError, SnapshotFailed

_default: Agent | None = None
_without_agent = Outcomes()  # of the snapshots for which no agent could be made
_calls = CallLock()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _documented_by(method: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Return a decorator that puts the docstring of the method before the function's."""

    def document(function: _Function) -> _Function:
        texts = (method.__doc__, function.__doc__)
        function.__doc__ = "\n\n".join(cleandoc(text) for text in texts if text)
        return function

    return document


def default_agent(name: str = "Agent") -> Agent:
    """Return the agent of this process. Make one if there is none, or if it is closed.

    `name` is the public call that needs the agent. Raises the errors of `Agent`, and
    Busy if this thread is already making the agent, since the public call then comes
    from a signal handler.
    """
    global _default, _without_agent
    with _calls(name):
        if _default is None or _default.closed:
            _default = Agent()
            _without_agent = Outcomes()
        return _default


@_documented_by(Agent.snapshot)
def snapshot(
    state: Any,
    *,
    step: SupportsIndex,
    tag: str | None = None,
    persist: bool = True,
    on_busy: OnBusy = "wait",
    metrics: Mapping[str, float] | None = None,
    user_content: Any = None,
    rng: bool = True,
    replicate: bool = True,
    on_error: OnError = "raise-until-sealed",
    on_failure: Callable[[Pending], object] | None = None,
    unsavable: Unsavable = "refuse",
    hold: Hold = "late",
) -> Pending:
    """Call `Agent.snapshot` of this process's agent, which is made if there is none.

    A missing daemon never raises either: the `Pending` has the reason. An invalid
    setting raises InvalidRequest or InvalidName, as `on_error` says.
    """
    try:
        agent = default_agent("snapshot")
    except CkptdError as error:
        if isinstance(error, MISTAKES) and on_error != "log":
            raise
        failed = PendingSnapshot(
            as_step(step), note=partial(_without_agent.note, on_failure=on_failure)
        )
        failed.fail(error)
        return Pending(failed)
    return agent.snapshot(
        state, step=step, tag=tag, persist=persist, on_busy=on_busy, metrics=metrics,
        user_content=user_content, rng=rng, replicate=replicate, on_error=on_error,
        on_failure=on_failure, unsavable=unsavable, hold=hold,
    )  # fmt: skip


@_documented_by(Agent.recover)
def recover(
    state: Any,
    *,
    step: int | None = None,
    strict: bool = True,
    keep: Sequence[str] = (),
    on_reshape: OnReshape | None = None,
    same_partition: bool = False,
) -> Recovered | None:
    """Call `Agent.recover` of this process's agent, which is made if there is none.

    Raises the errors of `Agent` too.
    """
    return default_agent("recover").recover(
        state,
        step=step,
        strict=strict,
        keep=keep,
        on_reshape=on_reshape,
        same_partition=same_partition,
    )


@_documented_by(Agent.prepare)
def prepare(state: Any) -> None:
    """Call `Agent.prepare` of this process's agent, which is made if there is none.

    Raises the errors of `Agent` too.
    """
    default_agent("prepare").prepare(state)


@_documented_by(Agent.close)
def close(timeout: float = CLOSE_SECONDS) -> None:
    """Call `Agent.close` of this process's agent. Does nothing if there is no agent.

    Raises SnapshotFailed if no agent could be made for any snapshot.
    """
    global _default, _without_agent
    with _calls("close"):
        agent = _default
    if agent is not None:
        try:
            agent.close(timeout)
        finally:
            # Only if it is closed: after Ctrl-C the next `close` must find the agent,
            # and finish.
            if agent.closed and _default is agent:
                _default = None
    elif complaint := _without_agent.complaint():
        _without_agent = Outcomes()
        raise SnapshotFailed(complaint)


def _after_fork() -> None:
    """Replace the lock in a forked child.

    Another thread of the parent may hold it, and no thread here will release it.
    """
    global _calls
    _calls = CallLock()


os.register_at_fork(after_in_child=_after_fork)
