"""Checks and calls that all integrations share: the version of the framework, that nothing
is attached twice, and the calls of the agent.
"""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ckptd.agent import default
from ckptd.agent.agent import Agent
from ckptd.agent.pending import Pending
from ckptd.agent.recover.options import OnReshape
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.schedule import Schedule, check_same_agent
from ckptd.shared.errors import CkptdError, InvalidRequest, SnapshotFailed

log = logging.getLogger("ckptd.agent")

_DURABLE_SECONDS = 600.0
_MARK = "_ckptd_attached"


def check_version(package: str, lowest: str, below: str) -> None:
    """Raise InvalidRequest unless a version of `package` from `lowest` to below `below` is
    installed.

    An integration calls methods that its framework may change with any release: it names
    the versions with which it was tried.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        raise InvalidRequest(
            f"{package} is not installed; expected a version from {lowest} to below {below}"
        ) from None
    if not _numbers(lowest) <= _numbers(found) < _numbers(below):
        raise InvalidRequest(
            f"{package} {found} is installed, with which ckptd was not tried; install a version "
            f"from {lowest} to below {below}, or call ckptd.snapshot() and ckptd.recover() yourself"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release of a version: (2, 13, 0) for "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def attach_once(thing: Any, called: str) -> None:
    """Mark the object that an integration is attached to.

    `called` is its name in the error text. Raises InvalidRequest if it is marked already.
    """
    if getattr(thing, _MARK, False):
        raise InvalidRequest(f"ckptd is attached to this {called} already: call attach() once")
    setattr(thing, _MARK, True)


def schedule_of(
    schedule: Schedule | None,
    every_steps: int | None,
    agent: Agent | None = None,
    called: str = "every_steps",
) -> Schedule:
    """Return the schedule that the arguments of an `attach` choose. Its `agent` takes the
    snapshots.

    called: the name of `every_steps` in the error texts.

    Raises InvalidRequest unless exactly one of the first two is given, for an invalid
    number, and for a schedule of another agent.
    """
    if (schedule is None) == (every_steps is None):
        raise InvalidRequest(
            f"give either {called}=, a number of steps, or schedule=, a ckptd.Schedule"
        )
    if schedule is not None:
        check_same_agent(schedule, agent)
        return schedule
    try:
        return Schedule(every_steps=every_steps, agent=agent)
    except ValueError as error:
        raise InvalidRequest(str(error).replace("every_steps", called)) from None


def calls_of(agent: Agent | None) -> Any:
    """Return the object whose `snapshot`, `recover` and `close` are called: the agent, or
    the module with those of this process.
    """
    return default if agent is None else agent


def recover_with(
    agent: Agent | None, state: Any, call: str, on_reshape: OnReshape, **options: Any
) -> Recovered | None:
    """Return what `Agent.recover` returns. If another rank is missing, the error names the
    call that every rank must make.
    """
    try:
        found: Recovered | None = calls_of(agent).recover(state, on_reshape=on_reshape, **options)
    except SnapshotFailed as error:
        raise SnapshotFailed(f"{error}. Every rank must call {call}") from error
    return found


def wait_durable(pending: Pending) -> None:
    """Wait until the snapshot of the last step is durable, and log an error if it fails."""
    try:
        pending.wait("durable", _DURABLE_SECONDS)
    except (CkptdError, TimeoutError) as error:
        log.error("the last step, %d, is not durable: %s", pending.step, error)
