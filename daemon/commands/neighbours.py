"""Finds the daemons of this user on this node for the `ckptd` commands, asks them for
their status, and stops them.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ckptd.daemon.memory import unsaved
from ckptd.daemon.process.peers import is_stopped
from ckptd.shared import names
from ckptd.shared.command import configured_root
from ckptd.shared.errors import (
    Busy,
    CkptdError,
    DaemonUnreachable,
    Forbidden,
    InvalidConfig,
    from_wire,
)
from ckptd.shared.location import Location, is_same, located, url_scheme
from ckptd.shared.storage.locate import is_root
from ckptd.shared.system import machine, root_lock
from ckptd.shared.system.root_lock import LockHolder
from ckptd.shared.units import some_text
from ckptd.shared.wire import messages as m
from ckptd.shared.wire import root_daemon
from ckptd.shared.wire.channel import Channel, NoDaemon

TIMEOUT = 10.0
_ROOTS = 3
"""The most roots that an error lists. `ckptd ps` lists all."""


class DaemonStopped(DaemonUnreachable):
    """Raised if a daemon does not answer because a signal has stopped it."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A daemon of this user: its process, its socket, and its status, or the reason why
    it has not told its status.
    """

    pid: int
    socket: str
    status: dict[str, Any] | None
    problem: str = ""
    stopped: bool = False
    """True if it was not asked, because a signal has stopped it."""
    named_root: str = ""
    """The root that its command names, or "" if it names none."""
    owner: int | None = None
    """The user that it belongs to, if the superuser has found it by a lock."""

    def may_serve(self, root: Location) -> bool:
        """Return True if it may be the daemon of a root, as far as its command tells.

        root: as `resolve` returns it.
        """
        named = self.named_root
        if not os.path.isabs(named) and not url_scheme(named):
            return True
        return located(named).resolve() == root

    def row(self) -> dict[str, Any]:
        """Return what `ckptd ps --json` prints of it."""
        status = self.status or {}
        return {
            "pid": self.pid,
            "root": status.get("root"),
            "socket": self.socket,
            "private": status.get("private"),
            "uptime_seconds": status.get("uptime_seconds"),
            "jobs": [job["job"] for job in status.get("jobs", [])],
            "clients": status.get("descriptors", {}).get("clients"),
            "problem": self.problem or None,
        }


def find_all() -> list[Neighbour]:
    """Return the daemons of this user on this node, by process number.

    A daemon in another container is not seen, nor one that has not locked its root yet. A
    command that starts a daemon and waits for its end, such as `flock`, has a command line
    like that of the daemon, and is told apart by the lock.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.uids().effective != os.geteuid()
                or not _names_daemon(command := process.cmdline())
                or not root_lock.may_hold(process.pid)
            ):
                continue
        except (psutil.Error, OSError):
            continue
        sockets = _sockets(process) or _named(command, "--socket")
        root = "".join(_named(command, "--root"))
        found += [_ask(process.pid, socket, root) for socket in sorted(sockets)[:1]]
    there = [neighbour for neighbour in found if neighbour is not None]
    return sorted(there, key=lambda neighbour: neighbour.pid)


def _sockets(process: psutil.Process) -> set[str]:
    """Return the addresses of a process's sockets, or an empty set if this system does
    not show them.
    """
    try:
        return {str(each.laddr) for each in process.net_connections("unix") if each.laddr}
    except (
        psutil.Error,
        OSError,
        ValueError,
        LookupError,
    ):  # psutil raises the last two where /proc has another form
        return set()


def _named(command: list[str], option: str) -> set[str]:
    """Return the value of an option in a daemon's command, or an empty set if it has
    none.
    """
    return {command[number] for number in range(1, len(command)) if command[number - 1] == option}


def _names_daemon(command: list[str]) -> bool:
    """Return True if a command line may be that of a daemon."""
    return "run" in command and any(
        word == "ckptd.daemon" or os.path.basename(word) == "ckptd" for word in command[:5]
    )


def _ask(pid: int, socket: str, root: str) -> Neighbour | None:
    """Return what a daemon says of itself, or None if it has ended meanwhile."""
    if is_stopped(pid):
        return Neighbour(pid, socket, None, _stopped(pid), stopped=True, named_root=root)
    try:
        return Neighbour(pid, socket, daemon_status(Path(socket)), named_root=root)
    except CkptdError as error:
        if not psutil.pid_exists(pid):
            return None
        problem = str(error)
        if isinstance(error, NoDaemon):  # whose advice is to start one
            problem = f"it does not listen at {socket}: it is starting or ending"
        return Neighbour(pid, socket, None, problem, named_root=root)


def root_and_job(root: Location | None, job: str | None) -> tuple[Location | None, str | None]:
    """Return the root and the job that a user means.

    job: the name of a job; without `root`, also a place: a root DIR, DIR/JOB, or a URL
    of either. Raises InvalidRequest for a job that no root can have.
    """
    if job is not None and root is None and ("/" in job or job in (".", "..")):
        place = located(job)
        if is_root(place) or not is_root(place.parent):
            return place, None
        root, job = place.parent, place.name
    if job is not None:
        names.check_name("job", job)
    return root, job


def of_root(root: Location) -> Neighbour:
    """Return the daemon that serves a root: at a usual socket, or by the lock of the root,
    or, if it has told no socket there, one of this user that `find_all` lists.

    A daemon in another container is found only at a usual socket. Raises DaemonStopped if
    a daemon that may serve it is stopped by a signal, or else DaemonUnreachable, which
    names the roots that are served, and the daemons that do not answer. It is NoDaemon
    if none of those may serve the root.
    """
    try:
        with closing(_connected(root, TIMEOUT)) as channel:
            status = _status(channel)
            return Neighbour(status["pid"], str(channel.path), status, owner=channel.owner)
    except DaemonStopped:
        raise
    except DaemonUnreachable as error:
        held = None if isinstance(error, NoDaemon) else error
    wanted, found = root.resolve(), find_all()
    for neighbour in found:
        if neighbour.status is not None and is_same(located(neighbour.status["root"]), wanted):
            return neighbour
    for neighbour in found:
        if neighbour.stopped and neighbour.may_serve(wanted):
            raise DaemonStopped(
                f"no daemon of {root} answers; pid {neighbour.pid} does not answer: "
                f"{neighbour.problem}"
            )
    roots = [
        located(neighbour.status["root"]) for neighbour in found if neighbour.status is not None
    ]
    near = [served for served in roots if wanted in served.parents or served in wanted.parents]
    hint = (
        f": did you mean {near[0]}?"
        if near
        else f"; the roots that are served here: {some_text(roots, _ROOTS)}"
        if roots
        else ""
    )
    silent = [
        f"pid {neighbour.pid} ({neighbour.problem})" for neighbour in found if neighbour.problem
    ]
    unknown = f"; not known is what these serve: {some_text(silent, 4)}" if silent else ""
    hidden = any(neighbour.problem and neighbour.may_serve(wanted) for neighbour in found)
    if held is not None:
        raise held
    raise (DaemonUnreachable if hidden else NoDaemon)(
        f"no daemon of uid {os.geteuid()} serves {root}{unknown}{hint}"
    )


def _connected(root: Location, later: float) -> Channel:
    """Return a connection to the daemon of a root, at a usual socket or by the lock of
    the root. The superuser may speak to the daemon of another user.

    Raises DaemonStopped, and what `root_daemon.connect` raises.
    """

    def check(holder: LockHolder) -> None:
        if holder.pid and is_stopped(holder.pid):
            raise DaemonStopped(
                f"no daemon of {root} answers; pid {holder.pid} does not answer: "
                f"{_stopped(holder.pid)}"
            )

    return root_daemon.connect(
        root, TIMEOUT, later=later, usual=_usual_sockets(root), any_user=True, check=check
    )


def _usual_sockets(root: Location) -> Iterator[Path]:
    yield from machine.private_sockets(root)
    yield from machine.default_sockets()


def _stopped(pid: int) -> str:
    return f"it is stopped by a signal: `kill -CONT {pid}`"


def status_of(root: Location) -> dict[str, Any]:
    """Return the status of the daemon that serves a root.

    Raises DaemonUnreachable, which names the roots that are served; Forbidden if it
    belongs to another user.
    """
    found = of_root(root).status
    assert found is not None
    return found


def named(root: Location | None, socket: Path | None) -> Neighbour:
    """Return the daemon of a root, or else the one at a socket, or else that of
    CKPTD_ROOT.

    Raises DaemonUnreachable, or InvalidConfig if none is named.
    """
    if root is None and socket is not None:
        status = daemon_status(socket)
        return Neighbour(status["pid"], str(socket), status)
    root = root or configured_root()
    if root is None:
        raise InvalidConfig("name the root of the daemon to stop; `ckptd ps` lists the daemons")
    return of_root(root)


def stop(neighbour: Neighbour, seconds: float) -> None:
    """Ask a daemon to end, and wait until it has saved what it owes.

    Raises Busy if it still runs after `seconds`; Forbidden if the process that another
    user's daemon has named is none of that user; DaemonUnreachable if the daemon runs and
    is not the process of its number here.
    """
    try:
        process = os.pidfd_open(neighbour.pid)
    except ProcessLookupError:
        _check_ended(neighbour)
        return
    try:
        _check_owner(neighbour)
        if not root_lock.may_hold(neighbour.pid):
            _check_ended(neighbour)
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
        ended, _, _ = select.select([process], [], [], seconds)
    except ProcessLookupError:
        return
    finally:
        os.close(process)
    if not ended:
        raise Busy(
            f"pid {neighbour.pid} is still saving after {seconds:g} s, and will end when it has "
            f"saved{_waiting(neighbour)}: "
            "wait for its end, or look at its log"
        )


def _check_owner(neighbour: Neighbour) -> None:
    if neighbour.owner is None:
        return
    with suppress(psutil.NoSuchProcess):
        uid = psutil.Process(neighbour.pid).uids().effective
        if uid != neighbour.owner:
            raise Forbidden(
                f"the daemon of uid {neighbour.owner} at {neighbour.socket} says that it is pid "
                f"{neighbour.pid}, which belongs to uid {uid}, and was not stopped"
            )


def _check_ended(neighbour: Neighbour) -> None:
    try:
        status = daemon_status(Path(neighbour.socket))
    except DaemonUnreachable:
        return
    if status["pid"] != neighbour.pid:  # the next daemon
        return
    raise DaemonUnreachable(
        f"the daemon at {neighbour.socket} says that it is pid {neighbour.pid}, and no process of "
        f"that number here holds the lock of a root: it runs in another container, and was not "
        f"stopped: stop it there"
    )


def _waiting(neighbour: Neighbour) -> str:
    try:
        told = unsaved.waiting_text(daemon_status(Path(neighbour.socket)))
    except CkptdError:
        return ""
    return f"; until then, {told}" if told else ""


# -- one daemon, by its socket


def daemon_status(socket: Path | None) -> dict[str, Any]:
    """Return the status of the daemon at `socket`.

    If `socket` is None, ask the first daemon at the usual places that accepts a
    connection, and that runs as this user or as the superuser.

    Raises DaemonUnreachable if no daemon answers, or Forbidden if the first socket that
    was found belongs to another user.
    """
    with closing(_connect(socket)) as channel:
        return _status(channel)


def _status(channel: Channel) -> dict[str, Any]:
    channel.send(m.Status(id=channel.new_id()))
    reply = channel.receive()[0]
    if isinstance(reply, m.Error):
        raise from_wire(reply.code, reply.message)
    assert isinstance(reply, m.StatusReport)
    status: dict[str, Any] = json.loads(reply.report)
    return status


def connection(root: Location | None, socket: Path | None, command: str, later: float) -> Channel:
    """Return a connection to the daemon of a root, or else to the one at a socket, or
    else at a usual place.

    command: as for `usual_status`. later: the seconds for each answer.

    Raises Forbidden; DaemonUnreachable, which is NoDaemon if there is no daemon that may
    be meant.
    """
    if root is not None:
        try:
            return _connected(root, later)
        except DaemonUnreachable:
            return Channel(Path(of_root(root).socket), TIMEOUT, later=later)
    try:
        return _connect(socket, later)
    except NoDaemon as error:
        if socket is None and find_all():
            raise DaemonUnreachable(f"{error}{_served(socket, command)}") from None
        raise


def served_root(socket: Path | None, command: str) -> Location:
    """Return the root that the daemon at `socket` serves, or at a usual place.

    `command` is the command that needs a root, like "ckptd ls ROOT", which an error
    names.

    Raises DaemonUnreachable, Forbidden.
    """
    try:
        return located(daemon_status(socket)["root"])
    except DaemonUnreachable as error:
        raise DaemonUnreachable(
            f"{error}; without a daemon, name the root: `{command}`{_served(socket, command)}"
        ) from None


def usual_status(socket: Path | None, command: str) -> dict[str, Any]:
    """Return the status of the daemon at `socket`, or at a usual place.

    Raises Forbidden; DaemonUnreachable, which says how `command` is typed for each of
    the other daemons that run.
    """
    try:
        return daemon_status(socket)
    except DaemonUnreachable as error:
        raise DaemonUnreachable(f"{error}{_served(socket, command)}") from None


class AskedDaemon:
    """A daemon that is asked for its status again and again.

    Once it has answered, it is asked at the same socket, which spares a search among all
    processes.
    """

    def __init__(self, root: Location | None, socket: Path | None, command: str) -> None:
        """root: the root that it serves, or None for the daemon at `socket` or at a
        usual place. command: as for `usual_status`.
        """
        self._root, self._socket = root, socket
        self._command = command
        self._found: Path | None = None

    def status(self) -> dict[str, Any]:
        """Return the status. Raises DaemonUnreachable, Forbidden."""
        if self._root is None:
            return usual_status(self._socket, self._command)
        if self._found is not None and (status := self._same(self._found)) is not None:
            return status
        status = status_of(self._root)
        self._found = Path(status["socket"])
        return status

    def _same(self, socket: Path) -> dict[str, Any] | None:
        """Return the status of the daemon at a socket, or None if there is none, or it
        serves another root.
        """
        assert self._root is not None
        try:
            status = daemon_status(socket)
        except (Forbidden, DaemonUnreachable):
            return None
        return status if is_same(located(status["root"]), self._root) else None


def _served(socket: Path | None, command: str) -> str:
    """Return what to add to an error about a command without a root: the roots whose
    daemons `ckptd ps` lists, and what to type for one of them.

    Return "" if the user has named a socket, or if no daemon runs.
    """
    roots = [found.status["root"] for found in find_all() if found.status] if not socket else []
    if not roots:
        return ""
    return (
        f"; `ckptd ps` lists daemons of {some_text(roots, _ROOTS)}: type "
        f"`{command.replace('ROOT', roots[0])}`, or set CKPTD_ROOT"
    )


def _connect(socket: Path | None, later: float = TIMEOUT) -> Channel:
    if socket is not None:
        return Channel(socket, TIMEOUT, later=later)
    usual = machine.default_sockets()
    problem: Forbidden | DaemonUnreachable | None = None
    for place in [place for place in usual if place.exists()]:
        try:
            return Channel(place, TIMEOUT, later=later)
        except (
            Forbidden,
            DaemonUnreachable,
        ) as error:  # another user's daemon or a dead one: the next place may have ours
            problem = problem or error
    tried = " and ".join(map(str, usual))
    raise problem or NoDaemon(
        f"no daemon at {tried}: start one with `ckptd run --root DIR`, or name its socket with "
        f"--socket PATH"
    )
