"""Checks that all integrations make before a framework is changed: its version, and that
nothing is attached twice.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ckptd.agent.agent import Agent
from ckptd.agent.schedule import Schedule, check_same_agent
from ckptd.shared.errors import InvalidRequest

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
    schedule: Schedule | None, every_steps: int | None, agent: Agent | None = None
) -> Schedule:
    """Return the schedule that the arguments of an `attach` choose. Its `agent` takes the
    snapshots.

    Raises InvalidRequest unless exactly one of the first two is given, for an invalid
    number, and for a schedule of another agent.
    """
    if (schedule is None) == (every_steps is None):
        raise InvalidRequest(
            "give either every_steps=, a number of steps, or schedule=, a ckptd.Schedule"
        )
    if schedule is not None:
        check_same_agent(schedule, agent)
        return schedule
    try:
        return Schedule(every_steps=every_steps, agent=agent)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
