"""Knows the names of this host and user, and the places on this machine that belong to
them: sockets, the directories of segments, and the directory of a daemon's state.

None of these places is below a root. `shared/names.py` has the names that are.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pwd
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptd.shared.location import Location
from ckptd.shared.system.owners import (
    is_usable_for_sockets,
    make_own_directory,
    own_directories,
    own_directory,
)

TMPFS = 0x01021994  # linux/magic.h
_TEMPORARY = Path("/var/tmp")
_MOST_OF_A_SOCKET = 96
"""The longest path of a private socket in $XDG_RUNTIME_DIR, in bytes. A socket address
holds 107 bytes (unix(7)). The rest is for a suffix, such as the process number that
`ckptd forget` appends.
"""


def host() -> str:
    """Return the name of this host, made valid as a file name: each character that is
    not allowed in one becomes `_`.
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()).lstrip("._-")[:128] or "localhost"


def user() -> str:
    """Return the name of this process's user, or its uid if it has no name, as in some
    containers.
    """
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def root_digest(root: Location) -> str:
    """Return the digest of a root that names what belongs to it on this machine.

    All paths that lead to one directory through links have the same digest.
    """
    return _digest(root.resolve())


def _digest(place: Location) -> str:
    return hashlib.sha256(os.fsencode(str(place))).hexdigest()[:16]


def segment_directory(root: Location, uid: int | None = None) -> str:
    """Return the name of the directory in the tmpfs for the segments of a user, who is
    this one by default, and of a root.

    If another user has taken that name, the daemon appends `.` and 16 random
    hexadecimal digits to it.
    """
    return f"ckptd-{os.getuid() if uid is None else uid}-{root_digest(root)}"


def private_socket(root: Location) -> Path:
    """Return the path of the socket for a private daemon of `root`.

    It is short enough for a socket address, and not under the root.

    The path is in $XDG_RUNTIME_DIR, if that is a directory of this user and the path is
    not too long there. Otherwise it is in a directory of this user in /tmp, which may
    not exist yet.
    """
    return _private_socket(root_digest(root))


def _private_socket(digest: str) -> Path:
    name = f"ckptd-{digest}.sock"
    runtime = _runtime_directory()
    if runtime is not None and len(os.fsencode(runtime)) + len(name) < _MOST_OF_A_SOCKET:
        return runtime / name
    return own_directory(plain_directory()) / name


def private_sockets(root: Location) -> Iterator[Path]:
    """Yield the paths where a private daemon of `root` may listen, most likely first.

    The first is that of `private_socket`, unless a link leads to the root. Others are in
    /tmp, because the daemon may have been started in another environment, without this
    $XDG_RUNTIME_DIR. Links are followed last: that asks the file system of the root,
    which may hang, and the daemon must be found all the same.
    """
    tried = list[Path]()
    for digest in map(_digest, _with_links_followed(root)):
        first = _private_socket(digest)
        for path in (first, *(place / first.name for place in own_directories(plain_directory()))):
            if path not in tried:
                tried.append(path)
                yield path


def _with_links_followed(root: Location) -> Iterator[Location]:
    yield root
    yield root.resolve()


def private_socket_directories() -> list[Path]:
    """Return the directories where private daemons of this user may listen.

    Each exists and belongs to this user.
    """
    runtime = _runtime_directory()
    return [*([runtime] if runtime is not None else []), *own_directories(plain_directory())]


def default_sockets() -> list[Path]:
    """Return the paths of the sockets that an agent tries when none is named.

    The first is that of the system service for this user, in /run/ckptd. The second is
    in $XDG_RUNTIME_DIR, if that can be used.
    """
    places = [Path("/run/ckptd") / f"{user()}.sock"]
    if (runtime := _runtime_directory()) is not None:
        places.append(runtime / "ckptd.sock")
    return places


def plain_directory() -> Path:
    """Return the directory of this user in /tmp for sockets and locks.

    `owners.py` makes it, or finds another if its name is taken.
    """
    return Path(f"/tmp/ckptd-{os.getuid()}")


def _runtime_directory() -> Path | None:
    """Return $XDG_RUNTIME_DIR, or None if it cannot be used for sockets.

    It cannot be used if it is unset, relative, missing or another user's, as after
    `su`, or if other users can replace a socket in it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (
        Path(runtime)
        if runtime and os.path.isabs(runtime) and is_usable_for_sockets(Path(runtime))
        else None
    )


def default_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory for the state of all roots that is used where none is
    configured.

    This is $STATE_DIRECTORY, which systemd sets. Without it, it is /var/lib/ckptd for
    the user root, and `ckptd` in $XDG_STATE_HOME or ~/.local/state for other users. If
    that cannot be made, as in a container without a home, it is a directory of this
    user in /var/tmp, which is made, so that the next call finds it again.
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
    without_home = _TEMPORARY / f"ckptd-{os.geteuid()}"
    try:
        return make_own_directory(without_home)
    except OSError:  # the error of its first use names the setting
        return without_home


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


def file_system(path: Path) -> int:
    """Return the magic number of the file system at `path`, or 0 if statfs(2) fails."""
    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer) != 0:
        return 0
    return int(ctypes.c_long.from_buffer(buffer).value)


def history_file(state_dir: Path, root: Location) -> Path:
    """Return the path of the file with the history of a root."""
    return state_directory(state_dir, root) / "history.sqlite3"


def state_directory(state_dir: Path, root: Location) -> Path:
    """Return the directory for one root.

    The host is part of its path, because a home directory may be shared by nodes.
    """
    return state_dir / host() / root_digest(root)
