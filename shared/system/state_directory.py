"""Names the directory on the local disk that a daemon keeps for one root: its journal,
and the log of a private daemon.

It is local to the node, because a journal is written for each step of a save, and
because a root may lie on storage that has no files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ckptd.shared import names
from ckptd.shared.location import Location
from ckptd.shared.owners import own_directory


def default_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory for the state of all roots that is used where none is
    configured.

    This is $STATE_DIRECTORY, which systemd sets. Without it, it is /var/lib/ckptd for
    the user root, and `ckptd` in $XDG_STATE_HOME or ~/.local/state for other users. If
    that cannot be made, as in a container without a home, it is a directory of this
    user in /var/tmp.
    """
    environ = os.environ if environ is None else environ
    if systemd := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(systemd)
    if os.geteuid() == 0:
        usual = Path("/var/lib/ckptd")
    else:
        state, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
        usual = Path(state if os.path.isabs(state) else os.path.join(home, ".local/state"), "ckptd")
    if usual.is_absolute() and _can_be_made(usual):
        return usual
    return own_directory(Path(f"/var/tmp/ckptd-{os.geteuid()}"))


def configured_state_dir() -> Path:
    """Return CKPTD_STATE_DIR, or the default if it is not set."""
    return (
        Path(os.path.abspath(os.environ["CKPTD_STATE_DIR"]))
        if os.environ.get("CKPTD_STATE_DIR")
        else default_state_dir()
    )


def _can_be_made(path: Path) -> bool:
    there = nearest_existing(path)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK, effective_ids=True)


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or the nearest of its parents that exists and that this
    user can see.
    """
    return next(found for found in (path, *path.parents) if os.path.exists(found))


def state_directory(state_dir: Path, root: Location) -> Path:
    """Return the directory for one root.

    The host is part of its path, because a home directory may be shared by nodes.
    """
    return (
        state_dir
        / names.host()
        / names.root_digest(Path(os.path.realpath(root)) if isinstance(root, Path) else root)
    )
