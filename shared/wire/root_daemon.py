"""Finds the daemon that serves a root, for the agent and for every command: at a usual
socket, or else by the lock of the root.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ckptd.shared.errors import CkptdError, DaemonUnreachable
from ckptd.shared.location import Location, is_same, located
from ckptd.shared.system import machine
from ckptd.shared.system.root_lock import LockHolder, holder_of
from ckptd.shared.wire.channel import Channel, NoDaemon


def connect(
    root: Location,
    timeout: float,
    *,
    later: float | None = None,
    usual: Iterable[Path],
    any_user: bool = False,
    check: Callable[[LockHolder], None] = lambda holder: None,
) -> Channel:
    """Return a connection to the daemon that serves a root on this host.

    The usual sockets are tried first, because the file system of the root may hang, and
    a daemon in a container has a lock under another host name. timeout, later: as for
    `Channel`. any_user: True lets the superuser speak to the daemon of another user, who
    owns the lock. check: called with the holder of the lock before it is asked.

    Raises NoDaemon if no daemon holds the lock; DaemonUnreachable if one does and does
    not answer; Forbidden if the daemon may be another user's; StorageError.
    """
    for socket in usual:
        if (channel := _of_root(socket, root, timeout, later)) is not None:
            return channel
    holder = holder_of(root)
    if holder is None:
        first = machine.private_socket(root)
        raise NoDaemon(
            f"no daemon listens at {first} on {machine.host()}, and none holds the lock of {root}: "
            f"start one with `ckptd run --root {root}`"
        )
    check(holder)
    named = f"pid {holder.pid}" if holder.pid else "a daemon that has not told its socket"
    starting = DaemonUnreachable(
        f"{named} of uid {holder.uid} holds the lock of {root}, and cannot be reached: it is "
        f"starting or ending, or runs in another container"
    )
    if holder.socket is None:
        raise starting
    try:
        owner = holder.uid if any_user and os.geteuid() == 0 else None
        channel = Channel(holder.socket, timeout, later=later, owner=owner)
    except NoDaemon:
        raise starting from None
    if not is_same(located(channel.welcome.root), root):
        channel.close()
        raise DaemonUnreachable(
            f"{named} holds the lock of {root}, and serves it as {channel.welcome.root}: the root "
            f"was moved, or that daemon runs in another container"
        )
    return channel


def _of_root(socket: Path, root: Location, timeout: float, later: float | None) -> Channel | None:
    """Return a connection to the daemon at a usual socket, or None if it is none of this
    root.
    """
    if not os.path.lexists(socket):
        return None
    try:
        channel = Channel(socket, timeout, later=later)
    except CkptdError:  # another user's daemon, a dead one, or one that does not answer
        return None
    if is_same(located(channel.welcome.root), root):
        return channel
    channel.close()
    return None
