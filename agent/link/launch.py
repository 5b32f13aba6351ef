"""Finds the daemon by a named socket or at the default paths, or starts a private
daemon for this user and root.

A private daemon runs in a session of its own, outlives the trainer to finish its work,
and exits when no work is left. It dies with the job's cgroup or container, like every
process in it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ckptd.shared.errors import Busy, CkptdError, DaemonUnreachable, Forbidden, InvalidRequest
from ckptd.shared.location import Location, is_same, located
from ckptd.shared.storage.locate import check_new_root
from ckptd.shared.system import machine, owners, settings
from ckptd.shared.wire import root_daemon
from ckptd.shared.wire.channel import Channel, NoDaemon, no_daemon

log = logging.getLogger("ckptd.agent")

CONNECT_SECONDS = 10.0
START_SECONDS = 30.0
_AGAIN_SECONDS = 1.0  # between two starts while another daemon holds the root
_warned: set[str] = set()
# Private daemons, kept to reap those that exit before this process does.
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a daemon: the path of its `socket`, and its `root`, or None for any
    root.

    If `private` is True, the daemon is the private one of `root`, and `connect` starts
    it if it does not answer.
    """

    socket: Path
    root: Location | None
    private: bool

    def connect(self) -> Channel:
        """Return a new connection to the daemon.

        Raises DaemonUnreachable, Forbidden if the daemon belongs to another user, and
        InvalidRequest if it serves another root.
        """
        if self.private:
            assert self.root is not None
            channel = _connect_private(self.root)
            _warn_of_other_settings(self.root, channel.welcome.settings)
        else:
            channel = self._connect()
        if self.root is not None and not is_same(located(channel.welcome.root), self.root):
            channel.close()
            raise InvalidRequest(
                f"the daemon at {self.socket} uses root {channel.welcome.root}, not {self.root}: "
                f"name that root, or another daemon's socket"
            )
        return channel

    def _connect(self) -> Channel:
        """Connect at the socket, or to the daemon of the root wherever it listens now."""
        try:
            return Channel(self.socket, CONNECT_SECONDS)
        except NoDaemon:
            if self.root is None:
                raise
            try:
                return _connect_to_any(self.root)
            except CkptdError:
                pass
            raise


def connect_to_running(place: Place) -> Channel:
    """Return a new connection to a daemon that runs already; none is started.

    Raises the same as `Place.connect`.
    """
    if place.private:
        assert place.root is not None
        return _connect_to_any(place.root)
    return place.connect()


def find_place(socket: str | os.PathLike[str] | None, root: str | os.PathLike[str] | None) -> Place:
    """Return the place of the daemon to use.

    The socket and the root are the arguments, or else CKPTD_SOCKET and CKPTD_ROOT.
    Without a socket, this is a daemon at a default path that serves the root, or else
    the private daemon of the root.

    Raises DaemonUnreachable if a named socket does not exist, or if no daemon runs and
    no root is known; Forbidden if a named socket is another user's. Raises InvalidConfig
    if the root is a URL that ckptd cannot use.
    """
    _warn_of_unknown_variables()
    named = socket or os.environ.get("CKPTD_SOCKET")
    where = root or os.environ.get("CKPTD_ROOT")
    absolute = located(os.path.expanduser(where)) if where else None
    if named:
        path = Path(named)
        owners.check_socket(path)
        if not os.path.exists(path):  # unlike Path.exists, it raises no PermissionError
            raise no_daemon(path)
        return Place(path, absolute, private=False)
    for path in machine.default_sockets():
        if os.path.exists(path) and _serves(path, absolute):
            return Place(path, None, private=False)
    if absolute is None:
        raise DaemonUnreachable(
            "no daemon runs on this node and no root is known: start one with `ckptd run --root "
            "DIR`, or set CKPTD_ROOT (or root=) "
            "to a directory or a URL, for which a private daemon is then started"
        )
    return _place_of(absolute)


def _place_of(root: Location) -> Place:
    """Return the place of the daemon that holds the lock of a root and is not private, or
    else that of the private daemon of the root.

    The file system of the root is asked only if no private daemon may listen.
    """
    private = Place(machine.private_socket(root), root, private=True)
    if any(os.path.exists(path) for path in machine.private_sockets(root)):
        return private
    try:
        channel = root_daemon.connect(root, CONNECT_SECONDS, usual=())
    except CkptdError:  # no daemon, or none that can be used: connecting to it says why
        return private
    channel.close()
    if channel.welcome.private:
        return private
    return Place(channel.path, root, private=False)


def _warn_of_unknown_variables() -> None:
    """Log the `CKPTD_*` variables that mean nothing, each once.

    They may be misspelled, or meant for another version of ckptd.
    """
    for variable, near in settings.unknown(os.environ).items():
        if variable not in _warned:
            _warned.add(variable)
            log.warning(
                "%s is not a setting of ckptd, and is ignored%s",
                variable,
                f": did you mean {near}?" if near else "",
            )


def _warn_of_other_settings(root: Location, theirs: dict[str, str] | None) -> None:
    """Log the settings of this process that a running private daemon does not have.

    `theirs`: None if unknown.
    """
    ours = settings.given(os.environ)
    other = (
        []
        if theirs is None
        else sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    )
    if other and str(root) not in _warned:
        _warned.add(str(root))
        log.warning(
            "the private daemon of %s was started with another value of %s, and keeps it: `ckptd "
            "stop %s` ends that daemon, and the next "
            "one has the value of this process", root, ", ".join(other), root,
        )  # fmt: skip


def _serves(socket: Path, root: Location | None) -> bool:
    """Return True if the daemon at a default path may be used for `root`.

    Without a root, any daemon of this user may be used.

    A daemon of another user is passed over with a warning, because the caller has not
    named it.
    """
    try:
        channel = Channel(socket, CONNECT_SECONDS)
    except Forbidden as error:
        log.warning("a default path of the daemon's socket is not used: %s", error)
        return False
    except CkptdError:
        # The daemon may be restarting; if not, the connection made next reports the
        # error.
        return root is None
    channel.close()
    if root is None or is_same(located(channel.welcome.root), root):
        return True
    log.warning(
        "the daemon at %s is not used, because it serves %s and not %s",
        socket,
        channel.welcome.root,
        root,
    )
    return False


def _connect_private(root: Location) -> Channel:
    """Connect to the private daemon of `root`, and start it first if it does not
    answer.

    Raises DaemonUnreachable, Forbidden, and InvalidRequest if a root would be made in
    another one.
    """
    try:
        return _connect_to_any(root)
    except DaemonUnreachable:
        if (inside := check_new_root(root)) and inside not in _warned:
            _warned.add(inside)
            log.warning("%s", inside)
        refused = start_private(root)
    deadline = time.monotonic() + CONNECT_SECONDS
    again = time.monotonic() + _AGAIN_SECONDS
    while True:
        try:
            return _connect_to_any(root)
        except DaemonUnreachable:
            if time.monotonic() > deadline:
                if not refused:
                    raise
                raise DaemonUnreachable(
                    f"no private daemon can be started: {refused}. If that daemon runs on this "
                    f"node, set CKPTD_SOCKET to its socket, which "
                    "`ckptd ps` shows"
                ) from None
        if time.monotonic() > again:  # the daemon that has refused the start may have ended
            refused = start_private(root)
            again = time.monotonic() + _AGAIN_SECONDS
        else:
            time.sleep(0.02)  # a daemon that another rank has started is about to listen


def _connect_to_any(root: Location) -> Channel:
    """Connect to the daemon that serves `root`: a private one, or one that was started
    with another socket.

    Raises DaemonUnreachable if none answers, and Forbidden if it belongs to another user.
    """
    return root_daemon.connect(root, CONNECT_SECONDS, usual=machine.private_sockets(root))


def start_private(root: Location) -> str:
    """Start a private daemon, and wait until it is ready.

    Returns "", or the sentence with which the daemon has ended because another one
    serves the root. The caller may connect to that one. Raises DaemonUnreachable if the
    daemon cannot be started, fails, or is not ready within `START_SECONDS`.
    """
    socket = _private_socket(root)
    log_file = machine.state_directory(machine.configured_state_dir(), root) / "daemon.log"
    try:
        _make_own(log_file.parent)
        log_fd = owners.open_log(log_file)
    except OSError as error:
        reason = f"{log_file}: {error.strerror}" if error.strerror else error
        raise DaemonUnreachable(
            f"cannot start a private daemon: its log cannot be written: {reason}; set "
            f"CKPTD_STATE_DIR to a directory of your own"
        ) from None
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
        "--log-file",
        str(log_file),
        "--ready-fd",
        str(told),
    ]
    # The daemon outlives this process and serves other jobs. Foreign memory is
    # therefore treated as the Begin of each job says.
    not_its_own = {
        *settings.unknown(os.environ),
        f"{settings.PREFIX}{settings.FOREIGN_MEMORY.upper()}",
    }
    try:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log_fd, stderr=log_fd, pass_fds=[told],
            start_new_session=True, cwd="/", env={name: value for name,
            value in os.environ.items() if name not in not_its_own},
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
        return ""
    if not answered:
        raise DaemonUnreachable(
            f"the private daemon is not ready after {START_SECONDS:.0f} s; see {log_file}"
        )
    code = daemon.wait()
    last = (log_file.read_text(errors="replace").strip().splitlines()[-1:] or ["its log is empty"])[
        0
    ].removeprefix("ckptd: ")
    if code < 0:
        last = f"{signal.Signals(-code).name} has ended it"
    if code == Busy.exit_code:  # another daemon serves the root already
        return last
    raise DaemonUnreachable(
        f"the private daemon did not start: {last} (the whole log is {log_file})"
    )


def _private_socket(root: Location) -> Path:
    """Make the directory of the private daemon's socket, and return the path of the
    socket. Raises DaemonUnreachable.
    """
    for _ in range(8):  # another user may take the free name in /tmp at the same moment
        socket = machine.private_socket(root)
        try:
            socket.parent.mkdir(mode=0o700, exist_ok=True)
            if owners.is_usable_for_sockets(socket.parent):
                return socket
        except FileExistsError:  # the name is taken by a file or a link
            continue
        except OSError as error:
            raise DaemonUnreachable(
                f"cannot make {socket.parent} for the private daemon's socket: {error.strerror}"
            ) from None
    raise DaemonUnreachable(
        f"other users have taken all names tried, such as {socket.parent}: set XDG_RUNTIME_DIR to "
        f"a directory of your own"
    )


def _make_own(directory: Path) -> None:
    """Make a directory and its missing parents.

    Raises OSError if that fails, or if the directory belongs to another user.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (reason := owners.stranger(directory)) and os.geteuid() != 0:
        raise PermissionError(reason)
