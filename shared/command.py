"""Turns the errors of a command into one sentence and an exit code.

Every command of the command line uses it.

Exit codes: 0 ok, 1 failed, 2 usage, 10 no such checkpoint, 11 busy, 12 forbidden, 13
integrity, 14 daemon unreachable, 15 snapshots are in memory only, 130 cancelled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ckptd.shared import errors as e
from ckptd.shared.location import Location, located
from ckptd.shared.storage.choice import Named, choose, offered
from ckptd.shared.units import parse_span, printable, size_text

MEMORY_ONLY = 15
"""The exit code of `stop` and `run` if the daemon could not save a snapshot, which is
in memory only.
"""


def _action(error: OSError) -> str:
    return f"use {error.filename}" if error.filename else "do that"


def complete_path(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Have the shell complete a path, as the `shell_complete` of an option or an
    argument whose value is text.
    """
    return [CompletionItem(incomplete, type="file")]


def complete_word(
    *words: str,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return the `shell_complete` of an option that has one of these words as its
    value, among others.
    """
    return lambda ctx, param, incomplete: [
        CompletionItem(word) for word in words if word.startswith(incomplete)
    ]


def configured_root() -> Location | None:
    """Return the root that CKPTD_ROOT names, or None if it is not set. Raises
    InvalidConfig.
    """
    variable = os.environ.get("CKPTD_ROOT")
    return located(os.path.expanduser(variable)) if variable else None


class _Place(click.ParamType[Location]):
    name = "place"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return complete_path(ctx, param, incomplete)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Location:
        try:
            return located(value)
        except e.InvalidConfig as error:
            self.fail(str(error), param, ctx)


PLACE = _Place()
"""The type of an argument that is a path or a URL: the command gets a `Location`."""


class _Span(click.ParamType[float]):
    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = parse_span(str(value))
        except ValueError:
            seconds = 0.0
        if not seconds:
            self.fail(
                f"{value!r} is no time: expected more than 0, like 90s, 30m, 12h or 7d", param, ctx
            )
        return seconds


SPAN = _Span()
"""The type of an option that is a time: the command gets seconds."""


class _Checkpoint(click.ParamType[Named]):
    name = "place"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            found = offered(incomplete, configured_root())
        except e.InvalidConfig:
            found = []
        return [
            *complete_path(ctx, param, incomplete),
            *(CompletionItem(text) for text in found),
        ]

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Named:
        try:
            return Named.parse(value)
        except e.InvalidConfig as error:
            self.fail(str(error), param, ctx)


CHECKPOINT = _Checkpoint()
"""The type of an argument that is a root, a job or a checkpoint: the command gets what
was `Named`, and passes it to `chosen`.
"""
socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    envvar="CKPTD_SOCKET",
    help="The daemon's Unix socket.",
)
step_option = click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="For a job: the step of the checkpoint, like DIR/JOB/STEP.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for programs instead of text."
)


def as_object(error: e.CkptdError) -> dict[str, Any]:
    """Return the object that a command prints with `--json` if an error ends it."""
    return {
        "error": {"code": error.code, "message": str(error), "retry": error.retry},
        "exit": error.exit_code,
    }


def speaks(command: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper of `command` that turns an error into one sentence, or one JSON
    object with `--json`, and an exit code.
    """

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            raise  # click ends the command, whose output nobody reads any more
        except (e.CkptdError, OSError) as caught:
            error = (
                caught
                if isinstance(caught, e.CkptdError)
                else e.StorageError.of(_action(caught), caught)
            )
            if kwargs.get("as_json"):
                click.echo(json.dumps(as_object(error)))
            else:
                click.echo(f"ckptd: {error}", err=True)
            sys.exit(error.exit_code)

    return wrapped


def chosen(named: Named, step: int | None = None) -> Location:
    """Return the place that a user means, and print on standard error which damaged
    checkpoints were skipped.

    A text that is relative and not there is looked for in CKPTD_ROOT. Raises as
    `choose` does.
    """
    if (root := configured_root()) is not None:
        named = named.in_root(root)
    found = choose(named, step)
    for damaged in found.skipped:
        click.echo(f"ckptd: skipped: {printable(damaged)}", err=True)
    return found.place


def on_terminal() -> bool:
    """Return True if a person can see the standard error of this command and answer on
    its standard input.
    """
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_before_deleting(what: str, listed: Sequence[str], instead: str, *, never: bool) -> None:
    """Ask on the terminal before a deletion. Return if the answer is yes.

    what: the things to delete, in words. listed: a line for each of them. If the answer
    is no, which is the default, the command ends with exit code 1. If there is no
    terminal, or `never` is True, raises InvalidConfig, which names the option that is
    needed, and what the user can do `instead`.
    """
    if never or not on_terminal():
        raise e.InvalidConfig(
            f"nothing was deleted, because this would delete {what}: pass --yes to delete that "
            f"all the same, {instead}"
        )
    for line in listed:
        click.echo(line, err=True)
    if not click.confirm(f"Delete {what}?", default=False, err=True):
        click.echo("nothing was deleted", err=True)
        sys.exit(1)


@contextmanager
def progress_bar(
    out: Location, hidden: bool
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Context manager.

    Yields two functions of a progress bar, which shows nothing if it is hidden.

    The first is called once with all bytes that will be written to `out`, and shows the
    bar. The second is called with those that were.
    """
    bars: list[Any] = []

    def begin(nbytes: int) -> None:
        if not hidden:
            bars.append(
                click.progressbar(
                    length=nbytes, label=f"{size_text(nbytes)} to {out}", file=sys.stderr
                )
            )
            bars[0].render_progress()

    def progress(length: int) -> None:
        for bar in bars:
            bar.update(length)

    try:
        yield begin, progress
    finally:
        for bar in bars:
            bar.render_finish()
