"""Tests the listening socket: only a dead daemon's own socket is ever removed, and no
other user can replace it.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ckptd.agent.link.launch import find_place
from ckptd.daemon.commands import neighbours
from ckptd.daemon.http_address import HttpAddress
from ckptd.daemon.process.listener import Door, listen, listen_for_http
from ckptd.shared.errors import (
    Busy,
    DaemonUnreachable,
    Forbidden,
    InvalidConfig,
    StorageError,
)
from ckptd.shared.system import machine
from ckptd.shared.wire.channel import Channel
from tests.support.daemons import Daemon, Home, until


@pytest.fixture
def path(place: Home) -> Path:
    return place.socket


def test_a_new_socket_is_accessible_to_its_user_only(path: Path) -> None:
    listener, ours = listen(path.parent / "made" / "s")
    assert ours
    assert (path.parent / "made").stat().st_mode & 0o777 == 0o700
    assert (path.parent / "made" / "s").stat().st_mode & 0o777 == 0o700
    listener.close()


@pytest.mark.usefixtures("processes")
def test_a_file_at_the_sockets_name_is_left_alone(place: Home) -> None:
    """`--socket FILE` once deleted any file, because a file refuses connections as a
    dead daemon's socket does.
    """
    place.socket.write_text("a thesis")
    daemon = Daemon(place)
    assert not daemon.reached_ready()
    assert daemon.died() == 1
    daemon.close()
    assert (
        "a file that is not a socket has this name and was left alone; name another --socket"
        in place.log_text()
    )
    assert place.socket.read_text() == "a thesis"


@pytest.mark.parametrize("kind", ["directory", "FIFO", "link to a socket", "link to nothing"])
def test_anything_but_a_socket_is_left_alone(path: Path, kind: str) -> None:
    target = path.parent / "target"
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    if kind == "link to a socket":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(target))
    before = path.lstat().st_ino, sorted(path.parent.iterdir())
    with pytest.raises(
        StorageError, match=f"^cannot listen at {path}: a file that is not a socket has this name"
    ):
        listen(path)
    assert (path.lstat().st_ino, sorted(path.parent.iterdir())) == before


def test_a_dead_daemons_socket_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    listener, ours = listen(path)
    assert ours
    with pytest.raises(Busy, match=f"another ckptd listens at {path}"):
        listen(path)
    listener.close()


def test_a_live_daemon_with_a_full_queue_is_not_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is full, so connect(2) would wait for ever."""
    monkeypatch.setattr("ckptd.daemon.process.listener._PROBE_SECONDS", 0.05)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first,
    ):
        live.bind(str(path))
        live.listen(0)
        first.connect(str(path))
        with pytest.raises(Busy):
            listen(path)
    assert path.is_socket()


def test_a_dead_socket_of_another_user_is_left_alone(path: Path) -> None:
    if os.getuid():
        pytest.skip("giving a file away needs root")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    os.chown(path, 65534, 65534)
    with pytest.raises(
        StorageError, match="this socket belongs to uid 65534, not to uid 0, and was left alone"
    ):
        listen(path)
    assert path.is_socket()


def test_a_directory_where_others_may_replace_it_is_refused(path: Path) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(
        Forbidden, match="has mode 777, so that other users could replace the socket"
    ):
        listen(path)
    assert not path.exists()
    path.parent.chmod(0o1777)
    listener, _ = listen(path)
    listener.close()


def test_many_ranks_may_connect_at_once(path: Path) -> None:
    """More than 128 ranks connect before the daemon accepts the first.

    The kernel allows net.core.somaxconn.
    """
    listener, _ = listen(path)
    count = min(1000, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    assert count > 128
    with ExitStack() as held:
        held.callback(listener.close)
        for _ in range(count):
            client = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.setblocking(False)
            client.connect(str(path))
        with pytest.raises(DaemonUnreachable, match="does not answer"):
            Channel(path, 0.05)


def test_a_port_that_is_taken_is_named() -> None:
    with listen_for_http(HttpAddress("127.0.0.1", 0)) as first:
        address = HttpAddress("127.0.0.1", first.getsockname()[1])
        with pytest.raises(Busy) as caught:
            listen_for_http(address)
    assert str(caught.value) == (
        f"another process listens at {address}: name another port with --http, or stop it first"
    )
    listen_for_http(address).close()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "Permission denied; name"),
        (errno.EAFNOSUPPORT, "Address family not supported by protocol (a unit of systemd may"),
    ],
)
def test_a_port_that_cannot_be_had_is_one_sentence(
    number: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(InvalidConfig) as caught:
        listen_for_http(HttpAddress("::1", 80))
    assert str(caught.value).startswith(f"cannot listen at [::1]:80: {said}")


def test_a_socket_for_metrics_is_replaced_only_if_nobody_listens(path: Path) -> None:
    with listen_for_http(HttpAddress(path=path)):
        assert path.stat().st_mode & 0o777 == 0o700
        with pytest.raises(Busy, match=f"another ckptd listens at {path}"):
            listen_for_http(HttpAddress(path=path))
    listen_for_http(HttpAddress(path=path)).close()
    path.unlink()
    path.write_text("a thesis")
    with pytest.raises(StorageError, match="was left alone; name another --http"):
        listen_for_http(HttpAddress(path=path))
    assert path.read_text() == "a thesis"


# -- a socket whose file vanishes


@pytest.fixture
def door(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """A socket in a directory that the system may remove. /tmp/ckptd-UID is elsewhere."""
    monkeypatch.setattr(machine, "plain_directory", lambda: path.parent / "plain")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    made = Door(path.parent / "runtime" / "s", path.parent / "root")
    yield made
    made.close()


def connects(door: Door) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(door.path))
        accepted, _ = door.listener.accept()
        accepted.close()
    return True


def test_a_socket_that_is_in_its_place_is_left_alone(door: Door) -> None:
    before = door.listener
    assert not door.mend()
    assert door.listener is before


def test_a_socket_whose_file_was_removed_is_made_again(door: Door) -> None:
    old, path = door.listener, door.path
    path.unlink()
    assert door.mend()
    old.close()
    assert door.path == path
    assert connects(door)
    assert not door.mend()


def test_a_socket_whose_directory_is_gone_is_made_elsewhere_and_comes_back(door: Door) -> None:
    old, path = door.listener, door.path
    shutil.rmtree(path.parent)
    assert door.mend()
    old.close()
    elsewhere = door.path
    assert elsewhere == machine.private_socket(path.parent.parent / "root")
    assert connects(door)
    assert not path.parent.exists()  # it is not for the daemon to make it
    assert not door.mend()
    path.parent.mkdir(mode=0o700)
    old = door.listener
    assert door.mend()
    old.close()
    assert (door.path, elsewhere.exists()) == (path, False)
    assert connects(door)


def test_a_name_that_another_daemon_has_taken_meanwhile_is_left_to_it(door: Door) -> None:
    old, path = door.listener, door.path
    path.unlink()
    other, _ = listen(path)
    assert door.mend()
    old.close()
    assert door.path == machine.private_socket(path.parent.parent / "root")
    assert not door.mend()
    door.close()
    assert path.exists()
    other.close()


def test_without_a_place_for_the_socket_the_error_says_so(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(door.path.parent)
    monkeypatch.setattr(Door, "_others", lambda self: iter(()))
    with pytest.raises(StorageError, match="is gone"):
        door.mend()


def test_a_daemon_whose_socket_vanishes_is_found_by_its_root(daemon: Daemon) -> None:
    home = daemon.home
    home.socket.unlink()
    until(home.socket.exists, "socket that was made again")
    assert neighbours.of_root(home.root).pid == daemon.process.pid
    home.socket.unlink()
    home.socket.mkdir()  # so that the name cannot be used
    try:
        until(lambda: not isinstance(found(home), str), "daemon at another socket")
        neighbour = found(home)
        assert not isinstance(neighbour, str)
        assert (neighbour.pid, neighbour.socket) == (
            daemon.process.pid, str(machine.private_socket(home.root)),
        )  # fmt: skip
        assert neighbour.status is not None
        assert neighbour.status["socket"] == neighbour.socket
        with closing(find_place(None, home.root).connect()) as channel:
            assert channel.welcome.root == str(home.root)
    finally:
        home.socket.rmdir()
    until(home.socket.is_socket, "socket at its place")


def found(home: Home) -> neighbours.Neighbour | str:
    try:
        return neighbours.of_root(home.root)
    except DaemonUnreachable as error:
        return str(error)
