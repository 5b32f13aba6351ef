"""Defines `ckptd top`, which shows a daemon live in the terminal.

What is drawn is in `daemon/top/`, and needs rich. This module imports it only when the
command runs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ckptd.daemon.commands import health, neighbours
from ckptd.shared import errors as e
from ckptd.shared.command import PLACE, configured_root, socket_option, speaks
from ckptd.shared.location import Location

if TYPE_CHECKING:
    from rich.console import Console

    from ckptd.daemon.top.choice import Choice
    from ckptd.daemon.top.poller import Poller
    from ckptd.daemon.top.terminal import Terminal

SECONDS = 1.0
"""The time between two questions, unless the user sets it."""
_REDRAW_SECONDS = 1.0
"""The screen is drawn at least as often, because ages grow."""
_INSTEAD = (
    "`ckptd status --watch` shows the jobs and their saves as plain text, without ranks and slots"
)


@click.command(short_help="Show a daemon live in the terminal.")
@click.argument("root", type=PLACE, required=False)
@click.option(
    "--every",
    "seconds",
    type=click.FloatRange(0.1, 3600.0),
    default=SECONDS,
    help=f"Seconds between two questions to the daemon. Default: {SECONDS:g}.",
)
@socket_option
@speaks
def top(root: Location | None, seconds: float, socket: Path | None) -> None:
    """Show the daemon that serves ROOT, otherwise the daemon at --socket, otherwise the
    daemon of CKPTD_ROOT, live in the terminal.

    It shows the jobs, their ranks and slots, what is being written with rate and time
    left, the age of the newest durable checkpoint, how many more fit, and how long
    snapshots held the training. Up and Down, or k and j, choose a job; Enter shows its
    ranks; q ends. NO_COLOR is respected.
    """
    if importlib.util.find_spec("rich") is None:
        raise e.InvalidConfig(
            f"ckptd top needs the package rich: install it with pip install rich; {_INSTEAD}"
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise e.InvalidRequest(
            f"ckptd top needs a terminal that can be drawn on, for its input and its output: "
            f"{_INSTEAD}"
        )
    from ckptd.daemon.top.poller import Poller

    if root is None and socket is None:
        root = configured_root()
    asked = neighbours.AskedDaemon(root, socket, "ckptd top ROOT")
    asked.status()  # an error at the first time ends the command
    poller = Poller(asked.status, seconds)
    poller.ask_once()
    _run(poller)


def _run(poller: Poller) -> NoReturn:
    """Show what the poller sees until the user ends that."""
    from rich.console import Console

    from ckptd.daemon.top.terminal import Ended, taken

    console = Console(force_terminal=True, highlight=False, markup=False, emoji=False)
    code = 0
    try:
        with taken(sys.stdin.fileno()) as terminal:
            poller.start(terminal.wake)
            _show(poller, terminal, console)
    except Ended as ended:
        code = ended.code
    finally:
        poller.stop()
    sys.exit(code)


def _show(poller: Poller, terminal: Terminal, console: Console) -> None:
    from ckptd.daemon.top.choice import Choice
    from ckptd.daemon.top.screen import job_names

    choice, leave = Choice(), _enter(console)
    try:
        while True:
            status = poller.seen.contact.status or {"jobs": []}
            names = job_names(status)
            ranks = {job["job"]: len(job.get("ranks", [])) for job in status["jobs"]}
            choice = choice.among(names, ranks.get(choice.job, 0))
            _draw(poller, choice, console)
            for key in terminal.events(_REDRAW_SECONDS):
                if key in ("q", "Q"):
                    return
                if key == "suspend":
                    leave()
                    terminal.give_back()
                    os.kill(0, signal.SIGTSTP)
                    terminal.take()
                    leave = _enter(console)
                choice = choice.pressed(key, names)
    finally:
        leave()


def _enter(console: Console) -> Callable[[], None]:
    """Show an empty screen beside that of the shell. Return a function that goes back."""
    console.set_alt_screen(True)
    console.show_cursor(False)

    def leave() -> None:
        console.show_cursor(True)
        console.set_alt_screen(False)

    return leave


def _draw(poller: Poller, choice: Choice, console: Console) -> None:
    from rich.console import Group

    from ckptd.daemon.top.screen import ASCII, UNICODE, View, screen

    seen = poller.seen
    problems = [] if seen.contact.status is None else health.problems(seen.contact.status)
    size = os.get_terminal_size(sys.stdout.fileno())
    columns, rows = size.columns or 80, size.lines or 24
    console.size = (columns, rows)
    view = View(
        seen=seen,
        choice=choice,
        problems=[(problem.job, problem.message) for problem in problems],
        waited=poller.waited(),
        now=time.time(),
        glyphs=ASCII if console.options.ascii_only else UNICODE,
    )
    console.update_screen(Group(*screen(view, columns, rows)))
