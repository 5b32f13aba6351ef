"""Failpoints: named points in the code where a test can make this process die, fail or
stall.

The environment variable `CKPTD_FAILPOINTS="name=action[,name=action...]"` is read once,
at import. An action is `kill`, `error(EIO)` with any name from errno, `sleep(seconds)`,
`hang` or `short_write`. With `@n` behind it, the action runs only the n-th time that
the point is reached, as in `commit.renamed=kill@2`. Without `@n` it runs every time.

A point that is not armed costs one dictionary look-up. All names are registered here,
so that a test can go through all of them, and so that `arm` refuses a misspelt name.
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
    "persist.linked",
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
NODES = (
    "receipt.starting",
    "receipt.written",
    "receipt.synced",
    "receipt.renamed",
    "receipt.durable",
    "outcome.starting",
    "outcome.durable",
    "outcome.known",
)
"""Points that a daemon passes only in a job of several nodes."""
PEERS = (
    "replica.hosted",
    "replica.whole",
    "agent.copy.offered",
    "agent.copy.sealed",
    "agent.copy.confirmed",
    "agent.recover.serving",
)
"""Points that a daemon and an agent pass only if slots are copied to other nodes, or a
recovery reads them there.
"""
STAGE = (
    "upload.intended",
    "upload.copied",
    "upload.published",
    "upload.journaled",
)
"""Points that only a daemon with a stage passes."""
MARKER = (
    "marker.starting",
    "marker.written",
    "marker.synced",
    "marker.renamed",
    "marker.durable",
)
"""Points that a process passes only when it saves a checkpoint outside every root,
after its manifest is durable.
"""
NAMES = frozenset(AGENT + DAEMON + NODES + PEERS + STAGE + MARKER)

_SPEC = re.compile(
    r"(?P<action>kill|hang|short_write|error\((?P<errno>E\w+)\)|sleep\((?P<s>\d+(?:\.\d+)?)\))(?:@(?P<n>\d+))?"
)


@dataclass(slots=True)
class _Point:
    """An armed failpoint.

    `nth` is the pass at which it acts, counted from 1; 0 means every pass. `reached`
    counts the passes so far.
    """

    act: Callable[[], bool]
    nth: int
    reached: int = 0


_armed: dict[str, _Point] = {}
_lock = threading.Lock()


def _kill() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    # A multi-threaded process may run on for a moment after it has sent SIGKILL to
    # itself.
    time.sleep(3600)
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
    """Replace all armed failpoints by those of `specification`.

    Raises ValueError, with the entry, for an unknown name or action.
    """
    armed: dict[str, _Point] = {}
    for entry in filter(None, (e.strip() for e in specification.split(","))):
        name, _, action = entry.partition("=")
        match = _SPEC.fullmatch(action)
        if (
            name not in NAMES
            or match is None
            or (match["errno"] and not hasattr(errno, match["errno"]))
        ):
            raise ValueError(
                f"CKPTD_FAILPOINTS: {entry!r} is not of the form "
                f"name=kill|error(EIO)|sleep(s)|hang|short_write"
            )
        armed[name] = _Point(_action(match), int(match["n"] or 0))
    _armed.clear()
    _armed.update(armed)


def failpoint(name: str) -> bool:
    """Run the action that is armed for the point `name`, if any.

    Raises OSError for the action `error`.

    Return True only for the action `short_write`: the caller must then write half of
    its data and fail.
    """
    point = _armed.get(name)
    if point is None:
        return False
    with _lock:
        point.reached += 1
        if point.nth not in (0, point.reached):
            return False
    return point.act()


arm(os.environ.get("CKPTD_FAILPOINTS", ""))
