"""Tests that the daemons of this user are found, asked and stopped, by their roots."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.commands import neighbours
from ckptd.daemon.commands.neighbours import Neighbour
from ckptd.daemon.process.peers import is_stopped
from ckptd.shared.errors import DaemonUnreachable, InvalidConfig, InvalidName
from ckptd.shared.location import Location
from ckptd.shared.system import machine
from ckptd.shared.wire.channel import Channel, NoDaemon
from tests.support.cases import each_case
from tests.support.commands import ckptd
from tests.support.daemons import Daemon, Home, holds, home, running
from tests.support.trainers import vanish


@pytest.fixture
def served(processes: None, place: Home) -> Iterator[Daemon]:
    """A daemon that was started by its command, and not forked."""
    with running(place) as found:
        yield found


def test_a_daemon_is_listed_with_its_root_and_jobs(served: Daemon) -> None:
    with closing(Agent("gpt", socket=served.home.socket)):
        (row,) = [
            row
            for row in json.loads(ckptd("ps", "--json").stdout)
            if row["pid"] == served.process.pid
        ]
        assert row.pop("uptime_seconds") >= 0
        assert row == {
            "pid": served.process.pid, "root": str(served.home.root),
            "socket": str(served.home.socket), "private": False, "jobs": ["gpt"], "clients": 2,
            "problem": None,
        }  # fmt: skip
        (line,) = [
            line
            for line in ckptd("ps").stdout.splitlines()
            if line.startswith(str(served.process.pid))
        ]
        assert line.split() == [
            str(served.process.pid),
            str(served.home.root),
            "own",
            line.split()[3],
            "s",
            "gpt",
            "2",
            str(served.home.socket),
        ]


def test_stop_saves_what_is_in_memory_and_ends_the_daemon_of_the_root(served: Daemon) -> None:
    with home() as other, running(other) as second:
        with closing(Agent("gpt", socket=served.home.socket)) as agent:
            agent.snapshot({"x": torch.ones(3)}, step=1, persist=False).wait("sealed", timeout=60)
            found = ckptd("stop", served.home.root)
            assert (found.returncode, found.stdout) == (
                0,
                f"stopped pid {served.process.pid}, which served {served.home.root}\n",
            )
            assert served.died() == 0
            assert (served.home.root / "gpt" / "step-00000001.a0001" / "manifest.json").exists()
            vanish(agent)
        assert second.status()["ready"]
        missing = ckptd("stop", served.home.root)
        assert missing.returncode == 14
        assert missing.stderr.startswith(f"ckptd: no daemon of uid {os.getuid()} serves ")
        # Other tests may have more daemons than the error names.
        assert "; the roots that are served here: /" in missing.stderr


@pytest.mark.usefixtures("processes")
def test_a_command_that_waits_for_a_daemon_is_neither_listed_nor_stopped(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlocked(root: Location, later: float) -> Channel:
        raise NoDaemon("as if the lock could not be read")

    with closing(Daemon(place, under=("flock", str(place.path / "lock"))).wait_ready()) as wrapped:
        pid = wrapped.status()["pid"]
        try:
            assert pid != wrapped.process.pid
            rows = [row for row in neighbours.find_all() if row.socket == str(place.socket)]
            assert [row.pid for row in rows] == [pid]
            monkeypatch.setattr(neighbours, "_connected", unlocked)
            neighbours.stop(neighbours.of_root(place.root), 60)
            with pytest.raises(NoDaemon):
                neighbours.daemon_status(place.socket)
            assert wrapped.died() == 0
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("processes")
def test_a_daemon_that_answers_under_the_number_of_another_process_is_not_taken_for_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        found = Neighbour(other.pid, str(tmp_path / "s"), None)
        neighbours.stop(found, 60)  # nothing answers: the daemon has ended meanwhile
        monkeypatch.setattr(neighbours, "daemon_status", lambda socket: {"pid": other.pid})
        with pytest.raises(DaemonUnreachable, match="another container, and was not stopped"):
            neighbours.stop(found, 60)
        assert other.poll() is None
        other.kill()
    with pytest.raises(DaemonUnreachable, match=f"says that it is pid {other.pid}"):
        neighbours.stop(found, 60)
    monkeypatch.setattr(neighbours, "daemon_status", lambda socket: {"pid": other.pid + 1})
    neighbours.stop(found, 60)  # the next daemon answers


def test_status_finds_the_daemon_of_a_root_and_names_the_one_above(served: Daemon) -> None:
    assert (
        json.loads(ckptd("status", served.home.root, "--json").stdout)["pid"] == served.process.pid
    )
    found = ckptd("status", served.home.root / "gpt")
    assert (found.returncode, found.stdout) == (14, "")
    # A daemon of another test that does not answer is named between the two.
    assert f"serves {served.home.root / 'gpt'}" in found.stderr
    assert found.stderr.endswith(f": did you mean {served.home.root}?\n")


@each_case(
    ("command", "daemon"),
    [
        (["python", "-P", "-m", "ckptd.daemon", "run", "--private"], True),
        (["/venv/bin/python", "/venv/bin/ckptd", "run", "--root", "/r"], True),
        (["flock", "/lock", "ckptd", "run", "--root", "/r"], True),
        (["ckptd", "status"], False),
        (["python", "train.py", "run", "ckptd"], True),
        (["vim", "ckptd.md"], False),
        ([], False),
    ],
)
def test_a_process_may_be_a_daemon_by_its_command(command: list[str], daemon: bool) -> None:
    assert neighbours._names_daemon(command) is daemon


@pytest.mark.parametrize(
    "problem", [IndexError("list index out of range"), psutil.AccessDenied(), OSError(), None]
)
def test_where_sockets_are_hidden_the_command_names_the_socket(
    served: Daemon, monkeypatch: pytest.MonkeyPatch, problem: Exception | None
) -> None:
    def hidden(self: psutil.Process, kind: str) -> list[Any]:
        if problem is not None:
            raise problem
        return []

    monkeypatch.setattr(psutil.Process, "net_connections", hidden)
    assert neighbours.of_root(served.home.root).pid == served.process.pid


def test_without_a_root_nothing_is_stopped_unless_a_socket_or_the_environment_names_a_daemon(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTD_ROOT", raising=False)
    with pytest.raises(
        InvalidConfig, match="^name the root of the daemon to stop; `ckptd ps` lists the daemons$"
    ):
        neighbours.named(None, None)
    assert neighbours.named(None, daemon.home.socket).pid == daemon.process.pid
    monkeypatch.setenv("CKPTD_ROOT", str(daemon.home.root.parent / "other"))
    with pytest.raises(DaemonUnreachable, match="serves .*/other"):
        neighbours.named(None, None)


def test_the_roots_that_are_served_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Neighbour] = []
    monkeypatch.setattr(neighbours, "find_all", lambda: found)
    with pytest.raises(DaemonUnreachable, match="^no daemon of uid .* serves /ckpts$"):
        neighbours.of_root(Path("/ckpts"))
    found.append(Neighbour(7, "/s", None, "it is hung"))
    assert found[0].row()["problem"] == "it is hung"
    found.append(Neighbour(8, "/t", {"root": "/other"}))
    with pytest.raises(DaemonUnreachable, match="the roots that are served here: /other$"):
        neighbours.of_root(Path("/ckpts"))
    found += [Neighbour(pid, "/t", {"root": f"/{pid}"}) for pid in range(9, 20)]
    listed = "/other, /9, /10 and 9 more"
    with pytest.raises(DaemonUnreachable, match=f"roots that are served here: {listed}$"):
        neighbours.of_root(Path("/ckpts"))
    assert f"lists daemons of {listed}: type `ckptd ls /other`" in neighbours._served(
        None, "ckptd ls ROOT"
    )


def test_a_job_may_be_named_by_its_place(tmp_path: Path) -> None:
    (tmp_path / ".ckptd").mkdir()
    assert neighbours.root_and_job(None, "gpt") == (None, "gpt")
    assert neighbours.root_and_job(tmp_path, "gpt") == (tmp_path, "gpt")
    assert neighbours.root_and_job(None, str(tmp_path)) == (tmp_path, None)
    assert neighbours.root_and_job(None, f"{tmp_path}/gpt") == (tmp_path, "gpt")
    other = tmp_path / "a" / "b"  # a root that does not exist is named, too
    assert neighbours.root_and_job(None, str(other)) == (other, None)
    with pytest.raises(InvalidName, match="^job 'g/pt' cannot be a name"):
        neighbours.root_and_job(tmp_path, "g/pt")


def test_a_daemon_that_is_stopped_is_continued_and_no_other_is_started(served: Daemon) -> None:
    pid, root = served.process.pid, served.home.root
    os.kill(pid, signal.SIGSTOP)
    try:
        assert holds(lambda: is_stopped(pid), 60)
        said = (
            f"ckptd: no daemon of {root} answers; pid {pid} does not answer: it is stopped by a "
            f"signal: `kill -CONT {pid}`"
        )
        for command in (["status", "--check"], ["status"], ["stop"]):
            told = ckptd(*command, root)
            assert told.returncode == 14
            assert told.stderr.startswith(said)
            assert "start it" not in told.stderr
        other = ckptd("status", root.parent / "other", "--check")
        assert f"pid {pid} does not answer" not in other.stderr
        assert "start it" in other.stderr or "does not exist" in other.stderr
    finally:
        os.kill(pid, signal.SIGCONT)
    assert holds(lambda: ckptd("status", root, "--check").returncode == 0, 60)


@each_case(
    ("named", "may"),
    [("/ckpts", True), ("/ckpts/../ckpts", True), ("", True), ("ckpts", True), ("/other", False),
     ("s3://bucket/ckpts", False)],
)  # fmt: skip
def test_a_daemon_may_serve_the_root_that_its_command_names(named: str, may: bool) -> None:
    found = Neighbour(7, "/s", None, "it is hung", named_root=named)
    assert found.may_serve(Path("/ckpts")) is may


@each_case(
    ("found", "certain"),
    [
        ([], True),
        ([Neighbour(8, "/t", {"root": "/other"})], True),
        ([Neighbour(7, "/s", None, "it is hung", named_root="/other")], True),
        ([Neighbour(7, "/s", None, "it is hung", named_root="/ckpts")], False),
        ([Neighbour(7, "/s", None, "it is hung")], False),
    ],
)
def test_there_is_no_daemon_of_a_root_only_if_none_may_serve_it(
    monkeypatch: pytest.MonkeyPatch, found: list[Neighbour], certain: bool
) -> None:
    monkeypatch.setattr(neighbours, "find_all", lambda: found)
    with pytest.raises(DaemonUnreachable) as raised:
        neighbours.connection(Path("/ckpts"), None, "ckptd drain ROOT", 10.0)
    assert isinstance(raised.value, NoDaemon) is certain


def test_there_is_no_daemon_at_a_socket_on_which_none_listens(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon, match=f"no daemon listens at {tmp_path}/s"):
        neighbours.connection(None, tmp_path / "s", "ckptd drain ROOT", 10.0)


@pytest.mark.parametrize("runs", [True, False])
def test_there_is_no_daemon_at_the_usual_places_only_if_none_runs_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: bool
) -> None:
    monkeypatch.setattr(machine, "default_sockets", lambda: [tmp_path / "s"])
    others = [Neighbour(8, "/t", {"root": "/ckpts"})] if runs else []
    monkeypatch.setattr(neighbours, "find_all", lambda: others)
    with pytest.raises(DaemonUnreachable) as raised:
        neighbours.connection(None, None, "ckptd drain ROOT", 10.0)
    assert isinstance(raised.value, NoDaemon) is not runs
    assert ("type `ckptd drain /ckpts`" in str(raised.value)) is runs


def test_a_daemon_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that does not answer may be the one that was asked for: its loop may be
    stuck.
    """
    stuck = Neighbour(4711, "/run/x", None, "the daemon does not answer")
    other = Neighbour(4712, "/run/y", {"root": "/other"})
    monkeypatch.setattr(neighbours, "find_all", lambda: [stuck, other])
    with pytest.raises(DaemonUnreachable) as raised:
        neighbours.of_root(Path("/ckpts"))
    assert str(raised.value).partition(" serves ")[2] == (
        "/ckpts; not known is what these serve: pid 4711 (the daemon does not answer); the roots "
        "that are served here: /other"
    )


@pytest.mark.usefixtures("processes")
def test_a_daemon_that_starts_or_ends_is_no_reason_to_start_another(tmp_path: Path) -> None:
    socket = str(tmp_path / "s")
    found = neighbours._ask(os.getpid(), socket, "/ckpts")
    assert found is not None
    assert found.problem == f"it does not listen at {socket}: it is starting or ending"
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert neighbours._ask(ended.pid, socket, "/ckpts") is None
