"""Named points where a test can make this process die, fail or stall.

`CKPTD_FAILPOINTS="name=action[,name=action...]"`, read once at import; an action is `kill`, `error(EIO)`, `sleep(seconds)`,
`hang` or `short_write`, and `@n` behind it means the n-th time the point is reached (`commit.renamed=kill@2`); without it every time.
With nothing set a point costs one dictionary look-up. Names are registered here, so that a test can walk through all of them
and a typo is an error.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

AGENT = (
    "agent.begun",
    "agent.allocated",
    "agent.planning",
    "agent.granted",
    "agent.filling",
    "agent.copying",
    "agent.copied",
    "agent.documents",
    "agent.sealed",
    "agent.handed_over",
    "agent.recover.found",
    "agent.recover.opened",
    "agent.recover.loading",
    "agent.recover.loaded",
)
DAEMON = (
    "start.locked",
    "start.replayed",
    "start.adopted",
    "start.swept",
    "start.rotated",
    "attempt.claiming",
    "attempt.claimed",
    "attempt.journaled",
    "slot.creating",
    "slot.created",
    "slot.passing",
    "seal.received",
    "seal.checked",
    "seal.journaled",
    "journal.writing",
    "journal.syncing",
    "journal.synced",
    "journal.rotating",
    "journal.renamed",
    "journal.rotated",
    "persist.intended",
    "persist.created",
    "persist.writing",
    "persist.index",
    "persist.syncing",
    "persist.synced",
    "persist.journaled",
    "commit.starting",
    "commit.written",
    "commit.synced",
    "commit.renamed",
    "commit.durable",
    "commit.journaled",
    "newest.publishing",
    "newest.published",
    "retire.intended",
    "retire.uncommitted",
    "retire.swept",
    "slot.releasing",
    "slot.released",
    "orphan.found",
)
NAMES = frozenset(AGENT + DAEMON)

_SPEC = re.compile(r"(?P<action>kill|hang|short_write|error\((?P<errno>E\w+)\)|sleep\((?P<s>\d+(?:\.\d+)?)\))(?:@(?P<n>\d+))?")


@dataclass(slots=True)
class _Point:
    act: Callable[[], bool]
    nth: int
    reached: int = 0


_armed: dict[str, _Point] = {}
_lock = threading.Lock()


def _kill() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)  # SIGKILL of oneself is not delivered at once to a multi-threaded process
    return False


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _action(match: re.Match[str]) -> Callable[[], bool]:
    word = match["action"]
    if word == "kill":
        return _kill
    if word == "short_write":
        return lambda: True
    if word == "hang" or match["s"]:
        return lambda: _sleep(float(match["s"] or 1e9))
    number = getattr(errno, match["errno"])

    def fail() -> bool:
        raise OSError(number, os.strerror(number))

    return fail


def arm(specification: str) -> None:
    """Replace what is armed. Raises ValueError naming the entry that is no failpoint or no action."""
    armed: dict[str, _Point] = {}
    for entry in filter(None, (e.strip() for e in specification.split(","))):
        name, _, action = entry.partition("=")
        match = _SPEC.fullmatch(action)
        if name not in NAMES or match is None or (match["errno"] and not hasattr(errno, match["errno"])):
            raise ValueError(f"CKPTD_FAILPOINTS: {entry!r} is not of the form name=kill|error(EIO)|sleep(s)|hang|short_write")
        armed[name] = _Point(_action(match), int(match["n"] or 0))
    _armed.clear()
    _armed.update(armed)


def failpoint(name: str) -> bool:
    """Pass the point `name`. True only if a short write was asked for; the caller then writes half and fails."""
    point = _armed.get(name)
    if point is None:
        return False
    with _lock:
        point.reached += 1
        if point.nth not in (0, point.reached):
            return False
    return point.act()


arm(os.environ.get("CKPTD_FAILPOINTS", ""))
