"""Tests `ckptd run` as a user or systemd starts it: signals, sockets, and the daemons
that are there already.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.support.commands import ckptd, forked
from tests.support.daemons import Daemon, Home, running, until

pytestmark = pytest.mark.usefixtures("processes")


def test_a_daemon_takes_no_core_from_the_training(daemon: Daemon) -> None:
    process = psutil.Process(daemon.process.pid)
    assert {os.sched_getscheduler(thread.id) for thread in process.threads()} == {os.SCHED_BATCH}


def test_a_start_that_hangs_can_be_ended_by_sigterm(place: Home) -> None:
    """No snapshot waits to be saved yet, so the signal keeps its default action."""
    daemon = Daemon(place, failpoints="start.locked=hang", forked=True)
    try:
        until(lambda: list(place.root.glob("**/lock")), "lock of the root")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.died() == -signal.SIGTERM
    finally:
        daemon.kill()


def test_a_crash_in_native_code_leaves_a_traceback(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGABRT)
    assert daemon.died() == -signal.SIGABRT
    log = daemon.home.log_text()
    assert "Fatal Python error: Aborted" in log
    assert "daemon/process/app.py" in log or "daemon/commands/run_command.py" in log


def test_an_unknown_setting_names_the_nearest(place: Home, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'root = "{place.root}"\nkeep_lst = 3\n')
    result = forked("run", "--config", file, "--socket", place.socket)
    assert result.returncode == 2
    assert "there is no setting 'keep_lst'; did you mean 'keep_last'?" in result.stderr
    assert not place.root.exists()


def test_twenty_daemons_at_once_leave_one(place: Home) -> None:
    with ExitStack() as ended:
        started = []
        for _ in range(20):
            started.append(Daemon(place, forked=True))
            ended.callback(started[-1].close)
        until(
            lambda: sum(daemon.process.poll() is not None for daemon in started) >= 19,
            "19 daemons that have ended",
        )
        (left,) = [daemon for daemon in started if daemon.process.poll() is None]
        assert [daemon.died() for daemon in started if daemon is not left] == [11] * 19
        found = json.loads(ckptd("status", "--socket", place.socket, "--json").stdout)
        assert found["pid"] == left.process.pid
        assert left.stop() == 0
    assert not place.socket.exists()


def test_a_stale_socket_is_replaced(place: Home) -> None:
    first = Daemon(place, forked=True).wait_ready()
    first.kill()
    assert place.socket.exists()
    with running(place, forked=True) as daemon:
        assert daemon.status()["ready"]


def test_sigint_ends_the_daemon_cleanly(place: Home) -> None:
    with running(place) as daemon:
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.died() == 0


def test_the_death_of_the_process_that_waits_for_readiness_ends_no_daemon(place: Home) -> None:
    """A trainer starts a private daemon, and is killed before that daemon is ready."""
    waits, told = os.pipe()
    os.close(waits)
    command = [sys.executable, "-m", "ckptd.daemon", "run", "--root", str(place.root)]
    command += ["--socket", str(place.socket), "--ready-fd", str(told)]
    with subprocess.Popen(command, pass_fds=[told], stderr=subprocess.PIPE) as daemon:
        os.close(told)
        try:
            asks = {"CKPTD_SOCKET": str(place.socket)}
            until(
                lambda: "is ready" in ckptd("status", environment=asks).stdout,
                "the daemon is ready",
            )
            assert daemon.poll() is None
        finally:
            daemon.terminate()
    assert daemon.returncode == 0


def test_systemd_gets_readiness_and_the_watchdog_message(place: Home) -> None:

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(place.path / "n"))
        told.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(place.path / "n"), "WATCHDOG_USEC": "100000"}
        with running(place, environment=environment, forked=True) as daemon:
            assert told.recv(100) == b"READY=1"
            assert told.recv(100) == b"WATCHDOG=1"
            daemon.process.terminate()
            while (word := told.recv(100)) == b"WATCHDOG=1":
                pass
            assert word == b"STOPPING=1"


def test_a_daemon_serves_the_socket_that_systemd_passes(place: Home) -> None:

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(place.socket))
    listener.listen()
    script = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = "
        "str(os.getpid()); os.environ['LISTEN_FDS'] = '1';"
        "os.execv(sys.executable, [sys.executable, '-m', 'ckptd.daemon', 'run', "
        f"'--root', {str(place.root)!r}, '--socket', {str(place.socket)!r}])"
    )
    command = [sys.executable, "-c", script, str(listener.fileno())]
    with (
        place.log.open("ab") as log,
        subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=log) as daemon,
    ):
        listener.close()
        try:
            until(lambda: " ready in " in place.log_text(), "the daemon is ready")
            found = json.loads(ckptd("status", "--socket", place.socket, "--json").stdout)
            assert found["ready"]
        finally:
            daemon.terminate()
    assert daemon.returncode == 0
    assert place.socket.exists()  # the file belongs to systemd
