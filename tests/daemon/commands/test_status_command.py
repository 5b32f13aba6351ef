"""Tests the verb `ckptd status` on a daemon: as an exit code, and again and again."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import torch
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.status_command import status
from tests.support.cases import each_case
from tests.support.daemons import Daemon


def test_the_exit_code_says_whether_all_is_well(daemon: Daemon) -> None:
    place = ["status", "--check", "--socket", str(daemon.home.socket)]
    agent = Agent("gpt", socket=daemon.home.socket)
    agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable", timeout=60)
    (job,) = daemon.status()["jobs"]
    assert 0 < job["running_seconds"] < 86_400
    well = CliRunner().invoke(main, place)
    assert well.exit_code == 0
    assert well.output.startswith("ok: ")
    assert well.output.count("\n") == 1
    fits = 10**15
    full = CliRunner().invoke(main, [*place, "--min-room", str(fits), "--json"])
    agent.close()
    assert full.exit_code == 1
    (problem,) = json.loads(full.output)["problems"]
    assert (problem["what"], problem["job"]) == ("room", "gpt")
    daemon.stop()
    gone = CliRunner().invoke(main, place)
    assert gone.exit_code == 14
    assert gone.output.count("\n") == 1


@each_case(
    ("typed", "said"),
    [
        (["--max-age", "30m"], "add --check"),
        (["--min-room", "3"], "add --check"),
        (["--check", "--job", "gpt"], "leave out --job"),
        (["--check", "--watch"], "leave out --watch"),
        (["--watch", "0"], "'0' is not allowed: expected 0.1 to 86400 seconds"),
        (["--watch=nan"], "'nan' is not allowed"),
        (["--watch", "inf"], "'inf' is not allowed"),
        (["--check", "--max-age", "soon"], "'soon' is no time: expected more than 0, like 90s"),
        (["--check", "--max-age", "0"], "'0' is no time"),
        (["--check", "--min-room", "-1"], "is not in the range"),
    ],
)
def test_options_that_make_no_sense_are_refused(typed: list[str], said: str) -> None:
    done = CliRunner().invoke(status, ["/nowhere", *typed])
    assert done.exit_code == 2
    assert said in done.output


def started(*typed: str, columns: int, out: int) -> subprocess.Popen[bytes]:
    """Start `ckptd status` with its output in a window of so many columns, or in a pipe."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    return subprocess.Popen(
        [sys.executable, "-m", "ckptd.daemon", "status", *typed],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env={**clean, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "30"},
    )


def read_until(place: int, wanted: bytes, times: int) -> bytes:
    """Read until something has come so many times."""
    found, end = b"", time.monotonic() + 120
    while found.count(wanted) < times:
        assert select.select([place], [], [], max(0.0, end - time.monotonic()))[0], found
        more = os.read(place, 1 << 16)
        assert more, f"the command ended after {found!r}"
        found += more
    return found


def drain(place: int) -> None:
    """Read until the last process that could write has ended."""
    with suppress(OSError):  # of a terminal, this is its end
        while os.read(place, 1 << 16):
            pass


def test_a_window_of_forty_columns_shows_each_status_in_place(daemon: Daemon) -> None:
    with_agent = Agent("a-job-with-a-rather-long-name", socket=daemon.home.socket)
    with_agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable", timeout=60)
    ours, theirs = pty.openpty()
    process = started("--watch", "0.1", "--socket", str(daemon.home.socket), columns=40, out=theirs)
    os.close(theirs)
    try:
        shown = read_until(ours, b"\x1b[J", 3).decode()
        process.send_signal(signal.SIGINT)
        drain(ours)  # a process that writes into a full terminal does not end
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    with_agent.close()
    first, second = shown.split("\x1b[J")[:2]
    assert first.startswith("\x1b[2J\x1b[H")
    assert second.startswith("\x1b[H")
    lines = re.sub(r"\x1b\[\??\d*[a-zA-Z]", "", second).split("\r\n")
    assert max(map(len, lines)) <= 40
    assert "JOB a-job-with-a-rather-long-name" in lines
    assert "  IN MEMORY   step 1" in lines


def test_in_a_pipe_each_status_is_plain_text_until_nobody_reads(daemon: Daemon) -> None:
    ours, theirs = os.pipe()
    process = started(
        "--watch", "0.1", "--socket", str(daemon.home.socket),
        columns=40, out=theirs,
    )  # fmt: skip
    os.close(theirs)
    try:
        shown = read_until(ours, b"no jobs yet\n", 2).decode()
        os.close(ours)
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
    assert "\x1b" not in shown
    assert shown.count("is ready (pid") >= 2
    assert f"  socket         {daemon.home.socket}\n" in shown  # not wrapped
