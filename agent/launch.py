"""Where the daemon is: a named socket, the system's, the user's own, or a private one that is started here.

A private daemon runs in its own session, outlives the trainer to finish its work, and leaves when nothing is left. It dies with the job's
cgroup or container, as everything in it does.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ckptd.shared import names
from ckptd.shared.channel import Channel
from ckptd.shared.errors import CkptdError, DaemonUnreachable, InvalidRequest

CONNECT_SECONDS = 10.0
START_SECONDS = 30.0
_started: list[subprocess.Popen[bytes]] = []  # kept, so that they can be reaped when they leave before this process does


@dataclass(frozen=True, slots=True)
class Place:
    """`socket` where to connect; with `private`, a daemon for `root` is started there when none answers."""

    socket: Path
    root: Path | None
    private: bool

    def connect(self) -> Channel:
        """Raises DaemonUnreachable, or InvalidRequest if that daemon serves another root."""
        try:
            channel = Channel(self.socket, CONNECT_SECONDS)
        except DaemonUnreachable:
            if not self.private:
                raise
            assert self.root is not None
            start_private(self.root, self.socket)
            channel = _connect_until(self.socket, time.monotonic() + CONNECT_SECONDS)
        if self.root is not None and Path(channel.welcome.root) != self.root:
            channel.close()
            raise InvalidRequest(f"the daemon at {self.socket} keeps its checkpoints in {channel.welcome.root}, not in {self.root}")
        return channel


def find_place(socket: str | os.PathLike[str] | None, root: str | os.PathLike[str] | None) -> Place:
    """From the arguments, then CKPTD_SOCKET and CKPTD_ROOT. Raises DaemonUnreachable if a named socket is not there, or none is known."""
    named = socket or os.environ.get("CKPTD_SOCKET")
    where = root or os.environ.get("CKPTD_ROOT")
    absolute = Path(os.path.abspath(where)) if where else None
    if named:
        path = Path(named)
        if not path.exists():
            raise DaemonUnreachable(f"no daemon listens at {path}: start one with `ckptd run --root DIR --socket {path}`")
        return Place(path, absolute, private=False)
    for path in names.default_sockets():
        if path.exists() and (absolute is None or _serves(path, absolute)):
            return Place(path, None, private=False)
    if absolute is None:
        raise DaemonUnreachable(
            "no daemon runs on this node and no root is known: start one with `ckptd run --root DIR`, or set CKPTD_ROOT (or root=) "
            "to a directory and a private one is started"
        )
    return Place(names.private_socket(absolute), absolute, private=True)


def _serves(socket: Path, root: Path) -> bool:
    try:
        channel = Channel(socket, CONNECT_SECONDS)
    except CkptdError:
        return False
    channel.close()
    return Path(channel.welcome.root) == root


def _connect_until(socket: Path, deadline: float) -> Channel:
    while True:
        try:
            return Channel(socket, CONNECT_SECONDS)
        except DaemonUnreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # another rank's daemon is about to listen


def start_private(root: Path, socket: Path) -> None:
    """Start a private daemon and wait until it is ready, or until another one turns out to serve the root. Raises DaemonUnreachable."""
    _own_directory(socket.parent)
    log_file = root / names.CONTROL / names.host() / "daemon.log"
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise DaemonUnreachable(f"cannot start a private daemon: {root} cannot be used as the root: {error.strerror}") from None
    ready, told = os.pipe()
    command = [
        sys.executable,
        "-P",
        "-m",
        "ckptd.daemon",
        "run",
        "--private",
        "--root",
        str(root),
        "--socket",
        str(socket),
        "--ready-fd",
        str(told),
    ]
    try:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log_fd, stderr=log_fd, pass_fds=[told], start_new_session=True, cwd="/"
        )  # fmt: skip
    except OSError as error:
        os.close(ready)
        raise DaemonUnreachable(f"cannot start a private daemon: {error}") from None
    finally:
        os.close(told)
        os.close(log_fd)
    _started[:] = [*(process for process in _started if process.poll() is None), daemon]
    try:
        answered, _, _ = select.select([ready], [], [], START_SECONDS)
        word = os.read(ready, 16) if answered else b""
    finally:
        os.close(ready)
    if word:
        return
    if not answered:
        raise DaemonUnreachable(f"the private daemon is not ready after {START_SECONDS:.0f} s; {log_file} says what it does")
    if daemon.wait() != 11:  # 11: another one serves this root already; we go to that one
        last = log_file.read_text(errors="replace").strip().splitlines()[-1:] or ["it left no word"]
        raise DaemonUnreachable(f"the private daemon did not start: {last[0].removeprefix('ckptd: ')} (all of it in {log_file})")


def _own_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.stat(follow_symlinks=False)
    except OSError as error:
        raise DaemonUnreachable(f"cannot make {path} for the private daemon's socket: {error.strerror}") from None
    if status.st_uid != os.getuid():
        raise DaemonUnreachable(f"{path} belongs to uid {status.st_uid}: set XDG_RUNTIME_DIR to a directory of your own")
