"""Says for `ckptd status` how the daemon of a root that has ended is started again."""

from __future__ import annotations

import shlex
import threading
from contextlib import suppress
from pathlib import Path

from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.shared.errors import CkptdError
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import is_root
from ckptd.shared.system import machine

_LOOK_SECONDS = 5.0
"""The seconds that the file system of a root has to tell whether the root is there."""


def restart_advice(root: Location) -> str:
    """Return what to add to an error about a root that no daemon serves.

    The advice names the socket of the last daemon on this node if it is not a usual
    one, because the trainers that still run wait there. If the root is a directory that
    is gone, the advice is to mount it.
    """
    if gone := gone_root(root):
        return gone
    ready = _last_start(root)
    socket = ready and ready.facts.get("socket")
    usual = {*machine.default_sockets(), *machine.private_sockets(root)}
    other = isinstance(socket, str) and Path(socket) not in usual
    command = ["ckptd", "run", "--root", str(root), *(["--socket", str(socket)] if other else [])]
    settings = ", with the settings that it had" if other else ""
    return (
        f". If its daemon has ended, start it: `{shlex.join(command)}`, or `systemctl start` "
        f"with its unit{settings}. What is in memory is saved then"
    )


def gone_root(root: Location) -> str:
    """Return what to add to an error if a root that may be on a mount is not there, or
    else "".

    A directory that holds no root counts if a daemon has served one there before. A file
    system that does not answer in time, or with an error, does not count.
    """
    if not isinstance(root, Path):
        return ""
    known, found = _last_start(root) is not None, list[str]()

    def look() -> None:
        with suppress(OSError):  # a broken mount, or another user's directory
            if not root.exists():
                found.append(f"{root} does not exist")
            elif known and not is_root(root):
                found.append(f"{root} holds no root, though a daemon has served one there")

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(_LOOK_SECONDS)
    return f"; {found[0]}: mount it first, and start its daemon then" if found else ""


def _last_start(root: Location) -> LoggedEvent | None:
    """Return the event of the last start of a daemon of a root, or None if the history
    does not tell.
    """
    from ckptd.daemon.telemetry.history import read_history  # SQLite, only for this advice

    try:
        file = machine.history_file(machine.configured_state_dir(), root)
        found = read_history(file, names=["daemon.ready"], limit=1)
    except (CkptdError, OSError):
        return None
    return found[0] if found else None
