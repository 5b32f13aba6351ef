"""Prints a text again and again until Ctrl-C, for `ckptd status --watch`.

On a terminal, each text takes the place of the one before, and is made to fit into the
window. Elsewhere, as in a pipe or a file, the texts follow each other as plain lines.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click

from ckptd.shared.command import as_object
from ckptd.shared.errors import CkptdError
from ckptd.shared.units import count_text, printable

SECONDS = 2.0
"""The time between two texts, unless the user sets it."""
_LEAST, _MOST = 0.1, 86_400.0
_WIDE = 60
"""A window of so many columns or more has room for the labels beside every line of a
value that is wrapped.
"""


class Watchable(click.Command):
    """A command with the option `--watch`, whose value may be left out.

    click alone would take the argument that follows `--watch` for its value.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        given = [
            f"{arg}={SECONDS:g}"
            if arg == "--watch" and (at + 1 >= end or _number(args[at + 1]) is None)
            else arg
            for at, arg in enumerate(args[:end])
        ]
        return super().parse_args(ctx, [*given, *args[end:]])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class _Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = _number(str(value))
        if seconds is None or not _LEAST <= seconds <= _MOST:
            self.fail(
                f"{value!r} is not allowed: expected {_LEAST:g} to {_MOST:g} seconds", param, ctx
            )
        return seconds


watch_option = click.option(
    "--watch",
    "again",
    type=_Seconds(),
    metavar="[SECONDS]",
    help=f"Print it again every {SECONDS:g} s, or every SECONDS, until Ctrl-C.",
)


def watch(
    tell: Callable[[int | None], str],
    seconds: float,
    *,
    as_json: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> NoReturn:
    """Print what `tell` returns every so many seconds. Ends with KeyboardInterrupt.

    tell: is called with the columns of the window, or None if there is no window. An
    error that it raises at the first call ends the command. A later one is printed, and
    the next call may succeed again: a daemon may be started again meanwhile.
    as_json: print one JSON object on each line.
    """
    on_window = not as_json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    first = True
    while True:
        size = shutil.get_terminal_size()
        try:
            text = tell(size.columns if on_window else None)
        except CkptdError as error:
            if first:
                raise
            text = json.dumps(as_object(error)) if as_json else printable(f"ckptd: {error}")
        if on_window:
            title = f"{time.strftime('%H:%M:%S')}, every {seconds:g} s, Ctrl-C ends"
            click.echo(frame(f"{title}\n\n{text}", size.columns, size.lines, first=first), nl=False)
        else:
            click.echo(text if first or as_json else f"\n{text}")
        first = False
        sleep(seconds)


def frame(text: str, columns: int, lines: int, *, first: bool) -> str:
    """Return the characters that show a text in a window, in place of the one before.

    No line is longer than the window, and the last line says how many have no room.
    """
    shown = fitted(text, columns)
    room = max(lines - 1, 1)
    if len(shown) > room:
        hidden = count_text(len(shown) - room + 1, "more line")
        shown = [*shown[: room - 1], f"... {hidden}"[:columns]]
    body = "".join(f"\033[2K{line}\n" for line in shown)
    # Characters of double width make a line longer than it seems. The terminal must not
    # continue such a line on the next one.
    return f"{chr(27) + '[2J' if first else ''}\033[H\033[?7l{body}\033[?7h\033[J"


def fitted(text: str, columns: int) -> list[str]:
    """Return the lines of a text, wrapped so that none has more than `columns`."""
    indent = " " * min(17 if columns >= _WIDE else 4, max(columns // 4, 0))
    found: list[str] = []
    for line in text.split("\n"):
        found += (
            [line]
            if len(line) <= columns
            else textwrap.wrap(
                line, max(columns, len(indent) + 1), subsequent_indent=indent,
                break_on_hyphens=False,
            )
        )  # fmt: skip
    return found
