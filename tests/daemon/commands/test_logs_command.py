"""Tests the verb `ckptd logs`: whose log it prints, and what of it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.logs_command import log_of
from ckptd.shared.errors import DaemonUnreachable
from ckptd.shared.location import located
from ckptd.shared.system import machine
from tests.support.daemons import Daemon, Home, home, running


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    """A daemon with two jobs that logs to a file."""
    with home() as place:
        log = place.path / "own.log"
        with running(place, "--log-file", str(log), forked=True) as daemon:
            save(daemon, "gpt")
            save(daemon, "llama")
            yield daemon


def save(daemon: Daemon, job: str) -> None:
    agent = Agent(job, socket=daemon.home.socket)
    agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable", timeout=60)
    agent.close()


def ran(*typed: object) -> tuple[int, list[str]]:
    done = CliRunner().invoke(main, ["logs", *map(str, typed)])
    return done.exit_code, done.output.splitlines()


def test_the_log_is_printed_whole_or_of_a_job(served: Daemon) -> None:
    socket = served.home.socket
    code, whole = ran("--socket", socket)
    assert code == 0
    assert whole == (served.home.path / "own.log").read_text().splitlines()
    code, own = ran("gpt", "--socket", socket)
    assert code == 0
    assert sum("gpt/step-00000001.a0001" in line for line in own) >= 1
    assert [line for line in own if "llama" in line] == []
    assert set(own) < set(whole)
    assert ran("gpt", "-n", "1", "--socket", socket) == (0, own[-1:])
    assert ran("nobody", "--socket", socket) == (0, [])


@pytest.mark.usefixtures("processes")
def test_a_log_is_followed_until_ctrl_c(served: Daemon) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptd.daemon", "logs", "-f", "-n", "0", "later", "--socket",
         str(served.home.socket)],
        stdout=subprocess.PIPE, env=clean,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        found, end, number = b"", time.monotonic() + 120, 0
        while b"later/step-00000001" not in found:
            assert time.monotonic() < end, found
            number += 1
            save(served, "later" if number % 2 else "other")  # it may not read yet
            if select.select([process.stdout], [], [], 0.5)[0]:
                found += os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert b"later" in found
    assert b"other" not in found


def test_a_daemon_that_logs_to_standard_error_is_named(daemon: Daemon) -> None:
    code, said = ran("--socket", daemon.home.socket)
    assert code == 10
    assert len(said) == 1
    assert f"(pid {daemon.status()['pid']}) logs to its standard error" in said[0]
    assert "--log-file FILE" in said[0]


def test_the_last_private_daemon_has_left_its_log(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(place.path / "state"))
    monkeypatch.delenv("CKPTD_ROOT", raising=False)
    root = place.root
    (root / ".ckptd").mkdir(parents=True)
    code, said = ran("--root", root)
    assert (code, len(said)) == (14, 1)
    assert "no private daemon has left a log at" in said[0]
    log = machine.state_directory(machine.configured_state_dir(), root) / "daemon.log"
    log.parent.mkdir(parents=True)
    log.write_text("2026-11-26T22:16:04.123 INFO ckptd: job gpt: \x1b[2J\nof gpt\ncut")
    lines = ["2026-11-26T22:16:04.123 INFO ckptd: job gpt: \\x1b[2J", "of gpt", "cut"]
    told = f"ckptd: no daemon serves {root}. This is the log of its last private daemon:"
    assert ran(root) == (0, [told, *lines])
    assert ran(root / "gpt") == (0, [told, *lines])
    assert ran(root / "llama") == (0, [told])
    monkeypatch.setenv("CKPTD_ROOT", str(root))
    assert ran("gpt") == (0, [told, *lines])
    with pytest.raises(DaemonUnreachable, match="no daemon of uid"):
        log_of(located(root / "nothing"), None)


@pytest.mark.parametrize(
    ("typed", "said"),
    [(["-x"], "No such option"), (["no job"], "'no job'"), (["-n", "-1"], "not in the range")],
)
def test_mistakes_are_one_sentence(typed: list[str], said: str) -> None:
    code, lines = ran(*typed)
    assert code == 2
    assert said in lines[-1]
