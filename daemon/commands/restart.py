"""Says for `ckptd status` how the daemon of a root that has ended is started again."""

from __future__ import annotations

import shlex
from pathlib import Path

from ckptd.shared.errors import CkptdError
from ckptd.shared.location import Location
from ckptd.shared.system import machine


def restart_advice(root: Location) -> str:
    """Return what to add to an error about a root that no daemon serves.

    The advice names the socket of the last daemon on this node if it is not a usual
    one, because the trainers that still run wait there.
    """
    socket = _last_socket(root)
    private = set(machine.private_sockets(root))
    other = socket is not None and socket not in {*machine.default_sockets(), *private}
    command = ["ckptd", "run", "--root", str(root), *(["--socket", str(socket)] if other else [])]
    settings = ", with the settings that it had" if other else ""
    return (
        f". If its daemon has ended, start it: `{shlex.join(command)}`, or `systemctl start` "
        f"with its unit{settings}. What is in memory is saved then"
    )


def _last_socket(root: Location) -> Path | None:
    """Return the socket of the last daemon of a root, or None if the history does not
    tell.
    """
    from ckptd.daemon.telemetry.history import read_history  # SQLite, only for this advice

    try:
        file = machine.history_file(machine.configured_state_dir(), root)
        found = read_history(file, names=["daemon.ready"], limit=1)
    except (CkptdError, OSError):
        return None
    socket = found[0].facts.get("socket") if found else None
    return Path(socket) if isinstance(socket, str) else None
