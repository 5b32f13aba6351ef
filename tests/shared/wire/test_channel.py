"""Tests the blocking connection against a daemon that is a socket in this process."""

from __future__ import annotations

import errno
import os
import select
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ckptd.shared.errors import Busy, DaemonUnreachable, Forbidden, ProtocolError, VersionMismatch
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel
from ckptd.shared.wire.session import Role, Session

TIMEOUT = 20.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "s"


class Daemon:
    """The daemon's end of the connection. A test plays as much of it as it needs."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.session = Session(Role.DAEMON)
        self.received: list[m.Message] = []

    def receive(self) -> m.Message:
        while not self.received:
            self.received += self.session.receive(self.socket.recv(4096))
        return self.received.pop(0)

    def send(self, reply: m.Reply, descriptors: list[int] | None = None) -> None:
        socket.send_fds(self.socket, [self.session.send(reply)], descriptors or [])

    def welcome(self) -> None:
        hello = self.receive()
        assert isinstance(hello, m.Hello)
        self.send(m.Welcome(re=hello.id, version=1, root="/ckpts"))


@contextmanager
def daemon(place: Path, play: Callable[[Daemon], None]) -> Iterator[None]:
    """Play the daemon on another thread with the first client.

    An error there is raised here.
    """
    problems: list[BaseException] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(place))
        listener.listen(1)

        def serve() -> None:
            try:
                client, _ = listener.accept()
                with client:
                    play(Daemon(client))
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(TIMEOUT)
    assert not thread.is_alive()
    if problems:
        raise problems[0]


def test_a_channel_sends_hello_and_receives_welcome(place: Path) -> None:
    heard: list[m.Message] = []

    def play(peer: Daemon) -> None:
        hello = peer.receive()
        heard.append(hello)
        peer.send(m.Welcome(re=1, version=1, root="/ckpts", slots=3))

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)
    assert channel.welcome == m.Welcome(re=1, version=1, root="/ckpts", slots=3)
    assert isinstance(heard[0], m.Hello)
    assert (heard[0].id, heard[0].min_version, heard[0].max_version, heard[0].client[:6]) == (
        1,
        1,
        1,
        "ckptd ",
    )
    channel.close()


def test_requests_and_replies(place: Path) -> None:
    def play(peer: Daemon) -> None:
        peer.welcome()
        request = peer.receive()
        assert isinstance(request, m.Status)
        frame = peer.session.send(m.StatusReport(re=request.id, report="{}"))
        for byte in frame:
            peer.socket.send(bytes([byte]))

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)
        number = channel.new_id()
        channel.send(m.Status(id=number))
        assert channel.receive() == [m.StatusReport(re=number, report="{}")]
        channel.close()


def test_a_receive_without_waiting_takes_only_what_has_arrived(place: Path) -> None:
    looked, answered = threading.Event(), threading.Event()

    def play(peer: Daemon) -> None:
        peer.welcome()
        request = peer.receive()
        assert isinstance(request, m.Status)
        looked.wait(TIMEOUT)
        frame = peer.session.send(m.StatusReport(re=request.id, report="{}"))
        peer.socket.send(frame[:5])
        answered.set()
        looked.clear()
        looked.wait(TIMEOUT)
        peer.socket.send(frame[5:])

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)
        channel.send(m.Status(id=channel.new_id()))
        assert channel.receive(wait=False) == []
        looked.set()
        answered.wait(TIMEOUT)
        channel.wait()
        assert channel.receive(wait=False) == []  # half of a frame
        looked.set()
        channel.wait()
        assert channel.receive(wait=False) == [m.StatusReport(re=2, report="{}")]
        channel.wait()  # the connection has ended
        with pytest.raises(DaemonUnreachable, match="closed the connection"):
            channel.receive(wait=False)
        channel.close()
        with pytest.raises(DaemonUnreachable, match="the connection is closed"):
            channel.wait()


@pytest.mark.parametrize(("seconds", "milliseconds"), [(2.5, 2500.0), (0, 0), (None, None)])
def test_a_wait_takes_seconds(
    place: Path, monkeypatch: pytest.MonkeyPatch, seconds: float | None, milliseconds: float | None
) -> None:
    class Poll:
        def register(self, *arguments: object) -> None: ...

        def poll(self, timeout: float | None) -> list[object]:
            waited.append(timeout)
            return []

    waited: list[float | None] = []
    with daemon(place, lambda peer: peer.welcome()):
        channel = Channel(place, TIMEOUT)
        monkeypatch.setattr(select, "poll", Poll)
        assert not channel.wait(seconds)
        channel.close()
    assert waited == [milliseconds]


def test_descriptors_come_along_and_are_taken_in_order(place: Path) -> None:
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.write(first, b"first")
    os.write(second, b"second")

    def play(peer: Daemon) -> None:
        peer.welcome()
        begin = peer.receive()
        assert isinstance(begin, m.Begin)
        peer.send(m.Began(re=begin.id, attempt=1))
        fetch = peer.receive()
        assert isinstance(fetch, m.Fetch)
        peer.send(m.Fetched(re=fetch.id, ranks=[0, 1]), [first, second])

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)
        channel.send(m.Begin(id=channel.new_id(), job="gpt", rank=0, world_size=2))
        channel.receive()
        channel.send(m.Fetch(id=channel.new_id(), attempt=1, step=5))
        assert channel.receive() == [m.Fetched(re=3, ranks=[0, 1])]
        with pytest.raises(
            ProtocolError, match="the daemon announced 3 descriptors, and 2 have arrived"
        ):
            channel.take(3)
        taken = channel.take(1) + channel.take(1)
        assert [os.pread(fd.fileno(), 10, 0) for fd in taken] == [b"first", b"second"]
        assert [os.get_inheritable(fd.fileno()) for fd in taken] == [False, False]
        with pytest.raises(ProtocolError):
            channel.take(1)
        channel.close()
    for descriptor in taken:
        descriptor.close()
        descriptor.close()
    for fd in (first, second):
        os.close(fd)


def open_copies(name: str) -> int:
    """Return the descriptors of this process for the memfd `name`."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += f"memfd:{name} " in os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
    return found


def test_descriptors_that_nobody_took_are_closed(place: Path) -> None:
    sent = os.memfd_create("sent")

    def play(peer: Daemon) -> None:
        hello = peer.receive()
        assert isinstance(hello, m.Hello)
        peer.send(m.Welcome(re=1, version=1), [sent, sent, sent])

    with daemon(place, play):
        Channel(place, TIMEOUT).close()
    assert open_copies("sent") == 1  # held by this test
    os.close(sent)
    assert open_copies("sent") == 0


# -- a daemon of another user


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Do something as another user, who does not listen for this one."""
    if os.getuid():
        pytest.skip("becoming another user needs root")
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Context manager.

    Yields the path of a socket in a directory like /tmp, where every user may make
    files.
    """
    with tempfile.TemporaryDirectory(prefix="ckptd-test-") as name:
        os.chmod(name, 0o1777)
        yield Path(name) / "s"


def heard_by(listener: socket.socket) -> bytes:
    """Return everything that a client has sent to `listener`."""
    listener.settimeout(0.2)
    try:
        client, _ = listener.accept()
    except TimeoutError:
        return b""
    with client:
        client.settimeout(TIMEOUT)
        return client.recv(65536)


def test_a_daemon_of_another_user_gets_nothing(open_place: Path) -> None:
    """The socket belongs to this user, and the process that listens does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(open_place))
        with as_user(65534):
            listener.listen(1)
        with pytest.raises(
            Forbidden,
            match=f"^the process that listens at {open_place} belongs to uid 65534, not to uid 0 "
            f"or root, and",
        ):
            Channel(open_place, TIMEOUT)
        assert heard_by(listener) == b""


def test_a_socket_of_another_user_is_not_even_connected_to(open_place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with as_user(65534):
            listener.bind(str(open_place))
            listener.listen(1)
        with pytest.raises(
            Forbidden, match=f"^the socket {open_place} belongs to uid 65534, not to uid 0 or root"
        ):
            Channel(open_place, TIMEOUT)
        link = open_place.parent / "link"
        link.symlink_to(open_place)
        with pytest.raises(Forbidden, match=f"^the socket {open_place} belongs to uid 65534"):
            Channel(link, TIMEOUT)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_daemon_of_root_is_trusted(open_place: Path) -> None:
    os.chmod(open_place.parent, 0o755)
    with daemon(open_place, Daemon.welcome):
        os.chmod(open_place, 0o666)
        with as_user(65534):
            Channel(open_place, TIMEOUT).close()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_directory_where_others_may_replace_the_socket_is_refused(
    open_place: Path, mode: int
) -> None:
    os.chmod(open_place.parent, mode)
    with pytest.raises(
        Forbidden,
        match=rf"has mode {mode:o}, so that other users could replace the socket s in it: run "
        rf"`chmod go-w",
    ):
        Channel(open_place, TIMEOUT)
    link = open_place.parent.with_name(open_place.parent.name + "-link")
    link.symlink_to(open_place.parent)
    try:
        with pytest.raises(Forbidden, match=f"^{open_place.parent} has mode"):
            Channel(link / "s", TIMEOUT)
    finally:
        link.unlink()


def test_a_socket_in_a_directory_of_another_user_is_refused(open_place: Path) -> None:
    os.chmod(open_place.parent, 0o755)
    with as_user(0):
        os.chown(open_place.parent, 65534, 65534)
    with pytest.raises(
        Forbidden,
        match=f"^{open_place.parent} belongs to uid 65534, who could replace the socket s in it",
    ):
        Channel(open_place, TIMEOUT)


# -- a missing daemon, and a daemon that ends


def test_a_full_queue_is_waited_for(place: Path) -> None:
    """connect(2) fails with EAGAIN at once in this case.

    That does not mean that there is no daemon.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(place))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(place))
            with pytest.raises(DaemonUnreachable, match="does not answer within"):
                Channel(place, 0.05)

            def serve() -> None:
                looked.wait(TIMEOUT)
                listener.accept()[0].close()
                client, _ = listener.accept()
                with client:
                    Daemon(client).welcome()

            looked, thread = threading.Event(), threading.Thread(target=serve)
            thread.start()
            threading.Timer(0.1, looked.set).start()
            Channel(place, TIMEOUT).close()
            thread.join(TIMEOUT)
            assert not thread.is_alive()


def test_without_a_listening_daemon_the_error_says_how_to_start_one(place: Path) -> None:
    with pytest.raises(
        DaemonUnreachable, match=f"no daemon listens at {place} on {machine.host()}: start one"
    ):
        Channel(place, TIMEOUT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(place))
    with pytest.raises(DaemonUnreachable, match="no daemon listens"):
        Channel(place, TIMEOUT)


def test_a_daemon_that_does_not_answer_is_unreachable(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(place))
        silent.listen(1)
        with pytest.raises(DaemonUnreachable, match="does not answer"):
            Channel(place, 0.01)


def test_a_daemon_that_stops_answering_is_unreachable(place: Path) -> None:
    over = threading.Event()

    def play(peer: Daemon) -> None:
        peer.welcome()
        assert over.wait(TIMEOUT)

    with daemon(place, play), closing(Channel(place, TIMEOUT, later=0.01)) as channel:
        channel.send(m.Status(id=channel.new_id()))
        with pytest.raises(DaemonUnreachable, match="does not answer"):
            channel.receive()
        over.set()


@pytest.mark.parametrize(
    ("code", "error"),
    [("version", VersionMismatch), ("forbidden", Forbidden), ("busy", Busy)],
    ids=["version", "forbidden", "busy"],
)
@pytest.mark.parametrize("re", [0, 1])
def test_an_error_for_a_greeting_is_raised(
    place: Path, code: str, error: type[Exception], re: int
) -> None:
    def play(peer: Daemon) -> None:
        peer.receive()
        peer.send(m.Error(re=re, code=code, message="not today"))

    with daemon(place, play), pytest.raises(error, match="not today"):
        Channel(place, TIMEOUT)


def test_an_error_that_comes_before_the_greeting_is_sent_is_raised(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()

    def play(peer: Daemon) -> None:
        peer.send(m.Error(re=0, code="busy", message="no room"))
        peer.socket.close()
        gone.set()

    def check_slowly(peer: socket.socket, path: Path, owner: int | None) -> None:
        assert gone.wait(TIMEOUT)

    monkeypatch.setattr("ckptd.shared.wire.channel.check_peer", check_slowly)
    with daemon(place, play), pytest.raises(Busy, match="no room"):
        Channel(place, TIMEOUT)


def test_a_peer_with_another_protocol_is_refused(place: Path) -> None:
    def play(peer: Daemon) -> None:
        peer.socket.recv(65536)
        peer.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    with daemon(place, play), pytest.raises(ProtocolError):
        Channel(place, TIMEOUT)


def test_a_peer_that_closes_the_connection_at_once_is_unreachable(place: Path) -> None:
    with daemon(place, lambda peer: None), pytest.raises(DaemonUnreachable):
        Channel(place, TIMEOUT)


def test_a_daemon_that_ends_is_gone(place: Path) -> None:
    gone = threading.Event()

    def play(peer: Daemon) -> None:
        peer.welcome()
        peer.socket.close()
        gone.set()

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)
        assert gone.wait(TIMEOUT)
        with pytest.raises(DaemonUnreachable, match="closed the connection"):
            channel.receive()
        with pytest.raises(DaemonUnreachable, match="the daemon is gone"):
            channel.send(m.Status(id=channel.new_id()))
        channel.close()


def test_a_daemon_that_dies_with_requests_unread_is_gone(place: Path) -> None:
    """The kernel then reports ECONNRESET, not the end of the file."""
    sent, gone = threading.Event(), threading.Event()

    def play(peer: Daemon) -> None:
        peer.welcome()
        assert sent.wait(TIMEOUT)
        peer.socket.close()
        gone.set()

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)
        channel.send(m.Status(id=channel.new_id()))
        sent.set()
        assert gone.wait(TIMEOUT)
        with closing(channel), pytest.raises(DaemonUnreachable):
            channel.receive()


def test_a_request_out_of_order_is_not_sent(place: Path) -> None:
    def play(peer: Daemon) -> None:
        peer.welcome()
        assert isinstance(peer.receive(), m.Status)

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)
        with pytest.raises(
            ProtocolError, match="Persist is not allowed in session state 'greeted'"
        ):
            channel.send(m.Persist(id=channel.new_id()))
        channel.send(m.Status(id=channel.new_id()))
        channel.close()


def test_close_wakes_the_receiving_thread(place: Path) -> None:
    woken: list[str] = []
    hung_up = threading.Event()

    def play(peer: Daemon) -> None:
        peer.welcome()
        assert hung_up.wait(TIMEOUT)

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)

        def listen() -> None:
            try:
                channel.receive()
            except (DaemonUnreachable, OSError) as error:
                woken.append(type(error).__name__)

        thread = threading.Thread(target=listen)
        thread.start()
        channel.close()
        hung_up.set()
        thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert len(woken) == 1


def test_abandon_leaves_the_parents_connection_alone(place: Path) -> None:
    """A forked child closes its copy.

    Here a duplicate plays the connection of the parent.
    """

    def play(peer: Daemon) -> None:
        peer.welcome()
        assert peer.socket.recv(100) == b"still here"

    with daemon(place, play):
        channel = Channel(place, TIMEOUT)
        parents = socket.socket(fileno=os.dup(channel._socket.fileno()))
        channel.abandon()
        with pytest.raises(OSError) as caught:
            channel._socket.getpeername()
        assert caught.value.errno == errno.EBADF
        parents.sendall(b"still here")
        parents.close()
