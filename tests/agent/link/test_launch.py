"""Tests private daemons: they are started if none runs, shared by ranks, outlive the
trainer, and end when nothing is left to do.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckptd.agent import Agent, Checkpoint, close, default, recover, snapshot
from ckptd.agent.handover.outcomes import Outcomes
from ckptd.agent.link import launch
from ckptd.agent.link.launch import Place, find_place
from ckptd.agent.link.script import script_job
from ckptd.daemon.commands.neighbours import daemon_status
from ckptd.shared import errors
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m
from tests.support.clock import Clock
from tests.support.daemons import Daemon, Home
from tests.support.descriptors import not_sockets
from tests.support.fake_daemon import FakeDaemon, fake_daemon
from tests.support.scripts import python


@pytest.fixture
def private(place: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    for key in [key for key in os.environ if key.startswith("CKPTD_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.path))
    monkeypatch.setenv("CKPTD_ROOT", str(place.root))
    monkeypatch.setenv("CKPTD_IDLE_TIMEOUT", "0.2")
    yield place
    # Or else `close` tells of snapshots that were meant to fail.
    monkeypatch.setattr(default, "_without_agent", Outcomes())
    close()
    for process in psutil.process_iter(["cmdline"]):
        if str(place.root) in (process.info["cmdline"] or []):
            process.kill()


def daemon_pid(home: Home) -> int:
    return int(daemon_status(machine.private_socket(home.root))["pid"])


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it never left"
        time.sleep(0.02)


@pytest.mark.usefixtures("processes")
def test_snapshot_and_recover_need_only_a_root(private: Home) -> None:
    state = {"w": torch.ones(10), "n": 1}
    assert recover(state) is None
    snapshot(state, step=1).wait("durable", timeout=60)
    pid = daemon_pid(private)
    assert os.getsid(pid) == pid
    state["w"].zero_()  # type: ignore[attr-defined]
    recovered = recover(state)
    assert recovered is not None
    assert recovered.source == "memory"
    assert state["w"].tolist() == [1.0] * 10  # type: ignore[attr-defined]
    close()
    until_gone(pid)
    assert not machine.private_socket(private.root).exists()
    assert private.segment_files() == []
    with Checkpoint.open(private.root / script_job()) as checkpoint:
        assert checkpoint.step == 1
    recovered = recover(state)
    assert recovered is not None
    assert recovered.source == "storage"


@pytest.mark.usefixtures("processes")
def test_settings_that_a_running_private_daemon_does_not_have_are_named(
    private: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CKPTD_KEEP_LAST", "2")
    agent = Agent("first")
    assert "was started with another value" not in caplog.text
    monkeypatch.setenv("CKPTD_KEEP_LAST", "1")
    Agent("second").close()
    assert (
        f"the private daemon of {private.root} was started with another value of CKPTD_KEEP_LAST, "
        f"and keeps it" in caplog.text
    )
    agent.close()


@pytest.mark.usefixtures("processes")
def test_a_private_daemon_outlives_its_trainer_and_is_restarted_when_killed(
    private: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The script below and this test would be named after different main scripts.
    monkeypatch.setenv("CKPTD_JOB", "gpt")
    script = (
        "import torch, os; from ckptd.agent import snapshot\n"
        "snapshot({'w': torch.ones(5)}, step=3, persist=False).wait('sealed'); "
        "os.kill(os.getpid(), 9)"
    )
    assert python("-c", script).returncode == -9
    agent = Agent()
    state = {"w": torch.zeros(5)}
    recovered = agent.recover(state)
    assert recovered is not None
    assert (recovered.step, recovered.source) == (3, "memory")
    pid = daemon_pid(private)
    os.kill(pid, 9)
    deadline = time.monotonic() + 60
    while (
        pending := agent.snapshot(state, step=4 + int(1000 * time.monotonic()))
    ).state != "sealed":
        assert time.monotonic() < deadline, pending
        time.sleep(0.05)
    pending.wait("durable", timeout=60)
    assert daemon_pid(private) != pid
    agent.close()


@pytest.mark.usefixtures("processes")
def test_a_job_that_was_called_default_is_not_started_under_another_name(
    private: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.agent.link.arguments.script_job", lambda: "train")
    state = {"w": torch.ones(10)}
    agent = Agent("default")
    agent.snapshot(state, step=1).wait("durable", timeout=60)
    agent.close()
    with pytest.raises(
        errors.NotFound,
        match=r"^job 'train', named after the main script, has no checkpoint, but .*: set "
        r"CKPTD_JOB=default ",
    ):
        recover(state)
    close()
    monkeypatch.setenv("CKPTD_JOB", "train")
    assert recover(state) is None
    close()
    monkeypatch.setenv("CKPTD_JOB", "default")
    assert (found := recover(state)) is not None
    assert found.step == 1
    close()


@pytest.mark.usefixtures("processes")
def test_two_agents_share_one_private_daemon(private: Home) -> None:
    one, two = Agent("one"), Agent("two")
    assert (
        daemon_status(machine.private_socket(private.root))["counters"]["connections_refused"] == 0
    )
    for agent in (one, two):
        agent.snapshot({"x": torch.ones(2)}, step=1).wait("durable", timeout=60)
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_root_that_cannot_be_used_is_an_error(
    private: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_ROOT", "/proc/nope")
    with pytest.raises(
        errors.DaemonUnreachable,
        match="the private daemon did not start: cannot use /proc/nope as the root for checkpoints",
    ):
        recover({"w": torch.ones(1)})
    pending = snapshot({"w": torch.ones(1)}, step=1)
    assert pending.state == "failed"


@pytest.mark.usefixtures("processes")
def test_an_invalid_setting_of_the_private_daemon_is_quoted(
    private: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_CODEC", "lz5")
    with pytest.raises(
        errors.DaemonUnreachable,
        match=r"the private daemon did not start: .*codec 'lz5' is not known.*the whole log is "
        r".*daemon\.log",
    ):
        Agent()


def test_without_a_root_and_a_daemon_the_error_says_what_to_do(
    private: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTD_ROOT")
    with pytest.raises(
        errors.DaemonUnreachable, match="no daemon runs on this node and no root is known"
    ):
        Agent()


# -- obstacles that another user of the node may have made


def give_away(path: Path) -> None:
    if os.getuid():
        pytest.skip("giving a file away needs root")
    os.chown(path, 65534, 65534, follow_symlinks=False)


def saves(root: Path, job: str = "job") -> None:
    """Check that a private daemon starts, and that its files belong to this user."""
    state = {"w": torch.ones(10)}
    agent = Agent(job, root=root)
    agent.snapshot(state, step=1).wait("durable", timeout=60)
    state["w"].zero_()
    assert agent.recover(state) is not None
    assert state["w"].tolist() == [1.0] * 10
    agent.close()


@pytest.fixture
def plain(private: Home, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that stands for /tmp/ckptd-UID. $XDG_RUNTIME_DIR is not set."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(
        "ckptd.shared.system.machine.plain_directory", lambda: private.path / "plain"
    )
    return private.path / "plain"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", ["directory", "link", "FIFO"])
def test_a_taken_name_of_the_socket_directory_does_not_block_the_daemon(
    private: Home, plain: Path, kind: str
) -> None:
    if kind == "directory":
        plain.mkdir(mode=0o777)
    elif kind == "link":
        (private.path / "elsewhere").mkdir(mode=0o777)
        plain.symlink_to("elsewhere")
    else:
        os.mkfifo(plain)
    give_away(plain)
    saves(private.root)
    (used,) = private.path.glob("plain.*")
    assert used.stat().st_mode & 0o777 == 0o700
    assert machine.private_socket(private.root).parent == used
    saves(private.root)
    assert kind == "FIFO" or list(plain.iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_a_runtime_directory_of_another_user_does_not_block_the_daemon(
    private: Home, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = private.path / "theirs"
    theirs.mkdir(mode=0o777)
    give_away(theirs)
    for stale in (theirs, private.path / "gone"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(stale))
        saves(private.root)
    assert list(theirs.iterdir()) == []
    assert plain.is_dir()


@pytest.mark.usefixtures("processes")
def test_a_private_daemon_is_found_where_another_environment_has_put_it(
    private: Home, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Agent("first", root=private.root)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private.path))
    saves(private.root)
    first.close()


@pytest.mark.usefixtures("processes")
def test_a_root_that_a_link_leads_to_has_one_private_daemon(private: Home) -> None:
    link = private.path / "link"
    link.symlink_to("root")
    first = Agent("first", root=private.root)
    saves(link, "second")
    assert daemon_status(machine.private_socket(link))["root"] == str(private.root)
    first.close()


@pytest.mark.usefixtures("processes")
def test_a_private_daemon_whose_socket_vanishes_serves_the_next_run(private: Home) -> None:
    """As after the last logout of a user who trains in tmux."""
    first = Agent("first")
    pid = daemon_pid(private)
    first.snapshot({"w": torch.ones(3)}, step=1, persist=False).wait("sealed", timeout=60)
    machine.private_socket(private.root).unlink()
    saves(private.root, "second")
    assert daemon_pid(private) == pid
    first.snapshot({"w": torch.ones(3)}, step=2).wait("durable", timeout=60)
    first.close()


@contextmanager
def stranger(path: Path) -> Iterator[list[bytes]]:
    """Context manager.

    Run another user's process that listens at `path`. Yields a list of everything that
    it is sent.
    """
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        give_away(path)
        os.chmod(path.parent, 0o1777)
        os.seteuid(65534)
        try:
            listener.listen(10)
        finally:
            os.seteuid(0)

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                    with client:
                        heard.append(client.recv(65536))
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_named_daemon_of_another_user_is_refused(private: Home) -> None:
    with stranger(private.socket) as heard:
        with pytest.raises(errors.Forbidden, match=f"{private.socket} belongs to uid 65534"):
            Agent(socket=private.socket)
        os.chown(private.socket, 0, 0)
        with pytest.raises(
            errors.Forbidden,
            match=f"the process that listens at {private.socket} belongs to uid 65534",
        ):
            Agent(socket=private.socket)
    assert b"".join(heard) == b""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("with_root", [True, False])
def test_a_daemon_of_another_user_at_a_default_path_is_not_used(
    private: Home,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    with_root: bool,
) -> None:
    monkeypatch.setattr(machine, "default_sockets", lambda: [private.socket])
    with stranger(private.socket) as heard:
        if with_root:
            os.chmod(private.path, 0o700)
            saves(private.root)
        else:
            monkeypatch.delenv("CKPTD_ROOT")
            with pytest.raises(
                errors.DaemonUnreachable, match="no daemon runs on this node and no root is known"
            ):
                Agent()
    assert b"".join(heard) == b""
    assert f"is not used: the socket {private.socket} belongs to uid 65534" in caplog.text


@pytest.mark.parametrize("kind", ["link", "FIFO", "second name", "another user's"])
def test_a_log_that_is_not_our_own_file_is_not_written(private: Home, kind: str) -> None:
    target, log = (
        private.path / "target",
        machine.state_directory(machine.configured_state_dir(), private.root) / "daemon.log",
    )
    target.write_text("mine")
    log.parent.mkdir(parents=True)
    if kind == "link":
        log.symlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(log)
    elif kind == "second name":
        os.link(target, log)
    else:
        log.touch()
        give_away(log)
    with pytest.raises(
        errors.DaemonUnreachable,
        match=r"its log cannot be written: .*daemon\.log is not a regular file.*: remove it",
    ):
        Agent()
    assert target.read_text() == "mine"


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_root_that_is_no_place_is_refused(
    private: Home, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.chdir(private.path)
    monkeypatch.setenv(
        "CKPTD_ROOT", "hdfs://bucket/runs" if by == "environment" else str(private.root)
    )
    with pytest.raises(
        errors.InvalidConfig,
        match=r"'hdfs://bucket/runs' is a URL that ckptd cannot save to; expected a directory, or "
        r"s3",
    ):
        Agent(root="hdfs://bucket/runs" if by == "argument" else None)
    assert list(private.path.iterdir()) == []


# -- which daemon is used, without starting one


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory for a root; the environment says nothing, and there is no daemon at a
    default place.
    """
    for key in [key for key in os.environ if key.startswith("CKPTD_")]:
        monkeypatch.delenv(key)
    monkeypatch.setattr(machine, "default_sockets", list)
    return tmp_path / "root"


def served(root: Path | str) -> m.Welcome:
    return m.Welcome(re=0, version=1, root=str(root))


def test_an_argument_comes_before_the_environment(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("named", "other"):
        (tmp_path / name).touch()
    monkeypatch.setenv("CKPTD_SOCKET", str(tmp_path / "other"))
    monkeypatch.setenv("CKPTD_ROOT", "/elsewhere")
    assert find_place(None, None) == Place(tmp_path / "other", Path("/elsewhere"), private=False)
    assert find_place(tmp_path / "named", bare) == Place(tmp_path / "named", bare, private=False)


def test_a_root_below_the_home_directory_may_begin_with_a_tilde(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("CKPTD_ROOT", "~/ckpts")
    assert find_place(None, None).root == Path("/home/ada/ckpts")


def test_a_relative_root_is_made_absolute(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bare.parent)
    assert find_place(None, "root").root == bare


def test_a_named_socket_that_is_not_there_is_refused(bare: Path) -> None:
    with pytest.raises(
        errors.DaemonUnreachable,
        match=f"^no daemon listens at /nowhere/s on {machine.host()}: start one with `ckptd run",
    ):
        find_place("/nowhere/s", bare)


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_a_named_socket_in_the_directory_of_another_user_is_refused(bare: Path) -> None:
    """Two directories: of the second, this user may not even look at the parent."""
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:
        Path(outer).chmod(0o711)
        theirs = Path(outer) / "theirs"
        theirs.mkdir(0o700)
        os.chown(theirs, 12345, 12345)
        os.seteuid(65534)
        try:
            with pytest.raises(errors.Forbidden, match=f"^{theirs} belongs to uid 12345"):
                find_place(theirs / "s", bare)
            with pytest.raises(errors.DaemonUnreachable, match="^no daemon listens at"):
                find_place(theirs / "deeper" / "s", bare)
        finally:
            os.seteuid(0)


def test_a_daemon_at_a_default_path_is_used_for_its_own_root_only(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_daemon(served(bare)) as daemon:
        monkeypatch.setattr(machine, "default_sockets", lambda: [Path("/nowhere/s"), daemon.socket])
        default = Place(daemon.socket, None, private=False)
        assert find_place(None, None) == find_place(None, bare) == default
        other = bare.with_name("other")
        assert find_place(None, other) == Place(machine.private_socket(other), other, private=True)


def test_a_daemon_at_a_default_path_that_is_restarting_is_used_if_no_root_is_named(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket_file = bare.parent / "s"
    socket_file.touch()
    monkeypatch.setattr(machine, "default_sockets", lambda: [socket_file])
    assert find_place(None, None) == Place(socket_file, None, private=False)
    assert find_place(None, bare).private


def test_a_daemon_of_another_root_is_refused(bare: Path) -> None:
    with fake_daemon(served("/ckpts")) as daemon:
        with pytest.raises(
            errors.InvalidRequest,
            match=f"^the daemon at {daemon.socket} uses root /ckpts, not {bare}: ",
        ):
            Place(daemon.socket, bare, private=False).connect()
        assert daemon.accepted().ended.wait(60)
        channel = Place(daemon.socket, Path("/ckpts"), private=False).connect()
        assert channel.welcome.root == "/ckpts"
        channel.close()


def test_a_daemon_of_the_same_root_is_used_through_a_link(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = bare.with_name("link")
    link.symlink_to("root")
    for makes in (lambda: None, bare.mkdir):  # a root that is still to be made counts, too
        makes()
        with fake_daemon(served(bare)) as daemon, monkeypatch.context() as patch:
            Place(daemon.socket, link, private=False).connect().close()
            patch.setattr(machine, "default_sockets", lambda: [daemon.socket])
            assert find_place(None, link) == Place(daemon.socket, None, private=False)


# -- private daemons that are faked


@pytest.fixture
def answering(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A daemon of this root.

    It stands at the second of the paths where a private one may listen.
    """
    with fake_daemon(served(bare)) as daemon:
        monkeypatch.setattr(
            machine, "private_sockets", lambda root: [root.parent / "first", daemon.socket]
        )
        yield daemon


def test_a_private_daemon_that_answers_is_not_started_again(
    bare: Path, answering: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(launch, "start_private", started.append)
    Place(answering.socket, bare, private=True).connect().close()
    assert started == []


def test_a_private_daemon_that_another_rank_has_started_is_waited_for(
    bare: Path, answering: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the root already, and is about to listen."""

    class Pauses(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 5:
                answering.listen()

    started: list[Path] = []
    clock = Pauses()
    answering.refuse()
    monkeypatch.setattr(launch, "start_private", started.append)
    monkeypatch.setattr(launch, "time", clock)
    Place(answering.socket, bare, private=True).connect().close()
    assert (started, clock.slept) == ([bare], [0.02] * 5)


def test_a_private_daemon_is_started_again_if_the_one_that_held_the_root_has_ended(
    bare: Path, answering: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []

    def start(root: Path) -> str:
        started.append(root)
        if len(started) == 1:
            return "another ckptd already serves it"
        answering.listen()
        return ""

    answering.refuse()
    monkeypatch.setattr(launch, "start_private", start)
    monkeypatch.setattr(launch, "time", Clock())
    Place(answering.socket, bare, private=True).connect().close()
    assert started == [bare, bare]


def test_a_private_daemon_that_never_listens_is_waited_for_until_the_deadline(
    bare: Path, answering: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    answering.refuse()
    monkeypatch.setattr(launch, "start_private", lambda root: None)
    monkeypatch.setattr(launch, "time", clock)
    with pytest.raises(
        errors.DaemonUnreachable, match=f"^no daemon listens at .*none holds the lock of {bare}: "
    ):
        Place(answering.socket, bare, private=True).connect()
    assert sum(clock.slept) == pytest.approx(launch.CONNECT_SECONDS, abs=0.05)


class FakeProcess:
    """In the place of `subprocess.Popen`: a daemon that says `word` when it is ready,
    or exits with `code`.
    """

    def __init__(self, word: bytes = b"", code: int | None = None, log: str = "") -> None:
        self.word, self.code, self.log = word, code, log
        self.command: list[str] = []
        self.told = -1

    def __call__(
        self, command: list[str], *, stdout: int, pass_fds: list[int], **options: Any
    ) -> FakeProcess:
        self.command = command
        os.write(stdout, self.log.encode())
        if self.word or self.code is None:
            self.told = os.dup(pass_fds[0])  # a process that runs holds it open
            os.write(self.told, self.word)
        return self

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> int:
        assert self.code is not None
        return self.code


@pytest.fixture
def start(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeProcess], str]]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(bare.parent))
    made: list[FakeProcess] = []

    def run(process: FakeProcess) -> str:
        made.append(process)
        monkeypatch.setattr(subprocess, "Popen", process)
        return launch.start_private(bare)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_started", [])
        yield run
    for process in made:
        if process.told >= 0:
            os.close(process.told)


def test_a_private_daemon_is_started_for_its_root_and_waited_for(
    bare: Path, start: Callable[[FakeProcess], str]
) -> None:
    process = FakeProcess(word=b"ready")
    start(process)
    assert process.command[1:6] == ["-P", "-m", "ckptd.daemon", "run", "--private"]
    assert process.command[6:10] == [
        "--root",
        str(bare),
        "--socket",
        str(machine.private_socket(bare)),
    ]
    assert (machine.state_directory(machine.configured_state_dir(), bare) / "daemon.log").exists()


def test_a_private_daemon_that_finds_another_at_its_root_is_no_error(
    start: Callable[[FakeProcess], str],
) -> None:
    assert (
        start(FakeProcess(code=11, log="ckptd: another ckptd already serves it\n"))
        == "another ckptd already serves it"
    )
    assert start(FakeProcess(word=b"ready")) == ""


def test_a_daemon_at_another_socket_is_found_by_the_lock_of_its_root(
    daemon: Daemon, bare: Path
) -> None:
    root = Path(daemon.home.root)
    link = bare.with_name("link")
    link.symlink_to(root)
    for named in (root, link):
        place = find_place(None, named)
        assert (place.socket, place.private) == (daemon.home.socket, False)
        with closing(place.connect()) as channel:
            assert channel.welcome.root == str(root)
    # A daemon that was restarted with another socket is found at the new one.
    with closing(Place(bare.with_name("old"), root, private=False).connect()) as channel:
        assert channel.path == daemon.home.socket


@pytest.mark.parametrize(
    ("log", "reason"),
    [("first\nckptd: the disk is full\n", "the disk is full"), ("", "its log is empty")],
)
def test_the_last_line_of_a_private_daemon_that_fails_is_the_reason(
    bare: Path, start: Callable[[FakeProcess], str], log: str, reason: str
) -> None:
    with pytest.raises(
        errors.DaemonUnreachable,
        match=rf"^the private daemon did not start: {reason} \(the whole log is .*daemon\.log\)$",
    ):
        start(FakeProcess(code=1, log=log))


def test_a_private_daemon_that_is_killed_while_it_starts_is_said_to_be(
    bare: Path, start: Callable[[FakeProcess], str]
) -> None:
    with pytest.raises(
        errors.DaemonUnreachable,
        match=r"^the private daemon did not start: SIGKILL has ended it \(the whole log is ",
    ):
        start(FakeProcess(code=-9, log="INFO of an earlier daemon"))


def test_a_private_daemon_that_hangs_is_an_error_after_a_while(
    start: Callable[[FakeProcess], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "START_SECONDS", 0.0)
    with pytest.raises(
        errors.DaemonUnreachable,
        match=r"^the private daemon is not ready after 0 s; see .*daemon\.log$",
    ):
        start(FakeProcess())


def test_a_private_daemon_that_cannot_be_started_leaves_no_descriptor(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(bare.parent))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = not_sockets()
    with pytest.raises(
        errors.DaemonUnreachable, match="^cannot start a private daemon: no memory$"
    ):
        launch.start_private(bare)
    assert not_sockets() == before


def test_a_private_daemon_that_has_exited_is_reaped_at_the_next_start(
    start: Callable[[FakeProcess], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = FakeProcess(code=11), FakeProcess(word=b"ready")
    start(first)
    assert list[object](launch._started) == [first]
    start(second)
    assert list[object](launch._started) == [second]


def test_a_socket_directory_that_cannot_be_made_is_an_error(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = bare.parent / "file"
    blocked.touch()
    monkeypatch.setattr(machine, "private_socket", lambda root: blocked / "directory" / "s")
    with pytest.raises(
        errors.DaemonUnreachable,
        match=f"^cannot make {blocked}/directory for the private daemon's socket: Not a",
    ):
        launch.start_private(bare)
    monkeypatch.setattr(machine, "private_socket", lambda root: blocked / "s")
    with pytest.raises(
        errors.DaemonUnreachable,
        match=f"^other users have taken all names tried, such as {blocked}: ",
    ):
        launch.start_private(bare)


@pytest.mark.usefixtures("processes")
def test_misspelled_variables_are_named_and_not_passed_to_a_private_daemon(
    private: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "_warned", set())
    monkeypatch.setenv("CKPTD_SHM_QUOTTA", "1G")
    monkeypatch.setenv("CKPTD_TAKEOVER", "1")
    assert recover({"w": torch.ones(3)}) is None
    assert (
        caplog.text.count(
            "CKPTD_SHM_QUOTTA is not a setting of ckptd, and is ignored: did you mean "
            "CKPTD_SHM_QUOTA?"
        )
        == 1
    )
    assert "TAKEOVER" not in caplog.text
