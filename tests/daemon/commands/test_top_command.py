"""Tests `ckptd top` on a real pseudo-terminal with a real daemon."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.top_command import top
from tests.support.daemons import Daemon, Home, running

SECONDS = 60.0  # a shared machine may be slow; the limit measures nothing


class Window:
    """A terminal in which a command runs. `shown` is what it has written so far."""

    def __init__(self, ours: int, theirs: int, process: subprocess.Popen[bytes]) -> None:
        self.ours, self.theirs, self.process, self.shown = ours, theirs, process, ""

    def size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Press keys. What was shown before is forgotten."""
        self.read(0.0)
        self.shown = ""
        os.write(self.ours, keys.encode())

    def read(self, seconds: float) -> None:
        while select.select([self.ours], [], [], seconds)[0]:
            self.shown += os.read(self.ours, 1 << 16).decode(errors="replace")

    def until(self, pattern: str) -> str:
        """Read until the last screen has a line that matches. Return the screen."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            self.read(0.05)
            for screen in reversed(self.shown.split("\x1b[1;1H")):
                lines = re.sub(r"\x1b\[\d+;1H", "\n", screen)
                text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", lines)
                if re.search(pattern, text):
                    return text
        raise AssertionError(f"{pattern!r} was not shown:\n{self.shown[-3000:]}")

    def end(self) -> int:
        """Wait for the end of the command. Return its exit code."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.05)  # a process that writes into a full terminal does not end
        self.read(0.05)
        return self.process.wait(1)


@contextmanager
def window(socket: Path, columns: int = 80, rows: int = 24, **changes: str) -> Iterator[Window]:
    ours, theirs = pty.openpty()

    def take() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    shown = Window(ours, theirs, None)  # type: ignore[arg-type]
    shown.size(columns, rows)
    environment = {
        key: value for key, value in os.environ.items()
        if key not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")
    }  # fmt: skip
    shown.process = subprocess.Popen(
        [sys.executable, "-m", "ckptd.daemon", "top", "--every", "0.1", "--socket", str(socket)],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=take,
        env={**environment, "TERM": "xterm", **changes},
    )  # fmt: skip
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.process.wait()
        os.close(ours)
        os.close(theirs)


def test_jobs_ranks_and_sizes_are_shown_until_the_user_ends_it(daemon: Daemon) -> None:
    agents = [Agent(name, socket=daemon.home.socket) for name in ("gpt", "llama")]
    for agent in agents:
        agent.snapshot({"w": torch.ones(1000)}, step=7).wait("durable", timeout=60)
    with window(daemon.home.socket) as shown:
        before = termios.tcgetattr(shown.theirs)
        text = shown.until("(?m)^>  gpt")
        assert re.search(r"(?m)^ckptd top  .*\d\d:\d\d:\d\d *$", text)
        assert re.search(rf"pid {daemon.process.pid}   CPU", text)
        assert re.search(r"(?m)^   llama +1 +7 +\d+ s", text)
        assert "[?1049h" in shown.shown
        assert "[?25l" in shown.shown
        text = shown.until(r"held +.*last \d")  # from the history
        shown.press("j")
        shown.until("(?m)^>  llama")
        shown.press("\r")
        text = shown.until(r"(?m)^     0 ")
        assert re.search(rf"(?m)^     0 +{os.getpid()}  .*step 7 durable", text)
        shown.press("\r")
        shown.until("(?m)^>  llama")
        shown.press("\x1a")  # no shell would continue it, so the kernel does not stop it
        shown.until("(?m)^>  llama")
        assert "\x1b[?1049l\x1b[?1049h" in shown.shown.replace("\x1b[H", "")
        shown.size(40, 12)
        text = shown.until(r"(?m)^   JOB +STEP +AGE  ROOM  SAVING *$")
        assert max(map(len, text.strip("\n").split("\n"))) == 40
        assert text.strip("\n").count("\n") == 11
        shown.press("q")
        assert shown.end() == 0
        assert shown.shown.endswith("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(shown.theirs) == before
    for agent in agents:
        agent.close()


@pytest.mark.parametrize(("number", "code"), [(None, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_ctrl_c_and_sigterm_give_the_terminal_back(
    daemon: Daemon, number: signal.Signals | None, code: int
) -> None:
    with window(daemon.home.socket, NO_COLOR="1") as shown:
        before = termios.tcgetattr(shown.theirs)
        shown.until("no jobs yet")
        assert re.search(r"\x1b\[(\d+;)*3\d(;\d+)*m", shown.shown) is None
        if number is None:
            os.write(shown.ours, b"\x03")
        else:
            shown.process.send_signal(number)
        assert shown.end() == code
        assert shown.shown.endswith("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(shown.theirs) == before


@pytest.mark.usefixtures("processes")
def test_a_daemon_may_go_away_and_come_back(place: Home) -> None:
    with running(place, forked=True) as daemon, window(place.socket, columns=200) as shown:
        shown.until("no jobs yet")
        daemon.kill()
        text = shown.until(r"no answer since \d\d:\d\d:\d\d \(\d+ s\): ")
        assert "no jobs yet" in text
        with running(place, forked=True) as later:
            text = shown.until(rf"a new daemon \(pid {later.process.pid}\) has answered since ")
            assert re.search(r"after \d+ s without an answer", text)
            shown.press("q")
            assert shown.end() == 0


def test_an_error_gives_the_terminal_back(daemon: Daemon, tmp_path: Path) -> None:
    broken = "import ckptd.daemon.top.screen as s\ns.screen = lambda *_: 1 / 0\n"
    (tmp_path / "sitecustomize.py").write_text(broken)
    with window(daemon.home.socket, PYTHONPATH=str(tmp_path)) as shown:
        before = termios.tcgetattr(shown.theirs)
        assert shown.end() == 1
        left = shown.shown.index("\x1b[?25h\x1b[?1049l")
        assert "ZeroDivisionError" in shown.shown[left:]
        assert termios.tcgetattr(shown.theirs) == before


def test_without_the_extra_one_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "rich" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    told = CliRunner().invoke(main, ["top"])
    assert told.exit_code == 2
    assert told.output == (
        "ckptd: ckptd top needs the package rich: install it with pip install rich; "
        "`ckptd status --watch` shows the jobs and their saves as plain text, "
        "without ranks and slots\n"
    )


def test_without_a_terminal_one_sentence_says_what_to_do(daemon: Daemon) -> None:
    told = CliRunner().invoke(top, ["--socket", str(daemon.home.socket)])
    assert told.exit_code == 2
    assert told.output.count("\n") == 1
    assert "`ckptd status --watch`" in told.output


@pytest.mark.usefixtures("processes")
def test_no_daemon_at_the_start_ends_the_command(tmp_path: Path) -> None:
    with window(tmp_path / "none") as shown:
        assert shown.end() == 14
        assert "1049h" not in shown.shown
        assert "ckptd: " in shown.shown
