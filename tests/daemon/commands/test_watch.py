"""Tests the repeated printing of a text with a fake clock, in windows of any size."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from os import terminal_size

import click
import pytest
from click.testing import CliRunner

from ckptd.daemon.commands.report import as_table
from ckptd.daemon.commands.watch import Watchable, fitted, frame, watch, watch_option
from ckptd.shared.errors import CkptdError, DaemonUnreachable
from tests.support.cases import each_case


class Ended(Exception):
    """The end of a test, in place of Ctrl-C."""


def repeated(
    told: Iterator[str | CkptdError], times: int, *, as_json: bool = False
) -> tuple[list[int | None], list[float]]:
    """Watch what `told` yields, and stop after some times.

    Return the columns that were asked for, and the times that were waited.
    """
    columns, waits = list[int | None](), list[float]()

    def tell(window: int | None) -> str:
        columns.append(window)
        found = next(told)
        if isinstance(found, CkptdError):
            raise found
        return found

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == times:
            raise Ended

    with pytest.raises(Ended):
        watch(tell, 2.5, as_json=as_json, sleep=sleep)
    return columns, waits


def test_in_a_pipe_the_texts_follow_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    gone = DaemonUnreachable("no daemon \x1b serves /ckpts")
    columns, waits = repeated(iter(["one", gone, "two"]), 3)
    assert (columns, waits) == ([None] * 3, [2.5] * 3)
    assert capsys.readouterr().out == ("one\n\nckptd: no daemon \\x1b serves /ckpts\n\ntwo\n")


def test_json_is_one_object_on_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    repeated(
        iter(['{"ready": true}', DaemonUnreachable("gone"), '{"ready": true}']), 3, as_json=True
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == lines[2] == {"ready": True}
    assert (lines[1]["exit"], lines[1]["error"]["message"]) == (14, "gone")


def test_an_error_at_the_first_time_ends_the_command() -> None:
    def tell(columns: int | None) -> str:
        raise DaemonUnreachable("no daemon serves /ckpst")

    with pytest.raises(DaemonUnreachable, match="no daemon serves /ckpst"):
        watch(tell, 2.0, sleep=lambda seconds: None)


@pytest.mark.parametrize(("term", "window"), [("xterm", 40), ("dumb", None)])
def test_a_terminal_is_drawn_on_unless_it_is_dumb(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    term: str,
    window: int | None,
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: terminal_size((40, 10)))
    columns, _ = repeated(iter(["one", DaemonUnreachable("gone"), "two"]), 3)
    assert columns == [window] * 3
    shown = capsys.readouterr().out
    assert shown.count("\x1b[2J") == (window is not None)
    assert shown.count("\x1b[H") == (0 if window is None else 3)
    assert [word in shown for word in ("one", "ckptd: gone", "two")] == [True] * 3


def lines_of(drawn: str) -> list[str]:
    """Return the lines of a frame, without what clears them."""
    head, _, rest = drawn.partition("\x1b[?7l")
    body, _, tail = rest.rpartition("\x1b[?7h")
    assert (head, tail) == ("\x1b[H", "\x1b[J")
    return [line.removeprefix("\x1b[2K") for line in body.removesuffix("\n").split("\n")]


def test_a_window_that_is_too_low_says_how_many_lines_are_missing() -> None:
    text = "\n".join(f"line {number}" for number in range(10))
    assert lines_of(frame(text, 40, 11, first=False)) == text.split("\n")
    assert lines_of(frame(text, 40, 5, first=False)) == [
        "line 0", "line 1", "line 2", "... 7 more lines",
    ]  # fmt: skip
    assert lines_of(frame(text, 8, 2, first=False)) == ["... 10 m"]
    assert lines_of(frame(text, 40, 1, first=False)) == ["... 10 more lines"]


def test_long_lines_are_wrapped_below_their_values() -> None:
    line = f"  root           {'/very/long' * 8} (1.2 GB free)"
    narrow, wide = fitted(line, 40), fitted(line, 70)
    assert max(map(len, narrow)) <= 40
    assert max(map(len, wide)) <= 70
    assert "".join(narrow).replace(" ", "") == line.replace(" ", "")
    assert {each[:4] for each in narrow[1:]} == {"    "}
    assert {each[:17] for each in wide[1:]} == {" " * 17}
    assert fitted("", 40) == [""]


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
def test_the_narrowest_windows_lose_nothing(columns: int) -> None:
    found = fitted("  socket  /run/x", columns)
    assert max(map(len, found)) <= max(columns, 2)
    assert "".join(found).replace(" ", "") == "socket/run/x"


def test_a_table_that_is_too_wide_becomes_lists() -> None:
    rows = [("JOB", "IN MEMORY", "SAVING"), ("gpt", "step 7", "-"), ("llama", "step 12", "")]
    assert as_table(rows, 80) == as_table(rows)
    assert as_table(rows, 22) == [
        "JOB gpt", "  IN MEMORY  step 7", "  SAVING     -", "JOB llama", "  IN MEMORY  step 12",
    ]  # fmt: skip


@each_case(
    ("typed", "said"),
    [
        ([], "None None"),
        (["--watch"], "2.0 None"),
        (["--watch", "5"], "5.0 None"),
        (["--watch", "/ckpts"], "2.0 /ckpts"),
        (["--watch=0.5", "/ckpts"], "0.5 /ckpts"),
        (["/ckpts", "--watch"], "2.0 /ckpts"),
        (["--watch", "--", "5"], "2.0 5"),
        (["--", "--watch"], "None --watch"),
    ],
)
def test_the_seconds_may_be_left_out(typed: list[str], said: str) -> None:
    command: Callable[[Callable[..., None]], click.Command] = click.command(cls=Watchable)

    @command
    @click.argument("root", required=False)
    @watch_option
    def told(root: str | None, again: float | None) -> None:
        click.echo(f"{again} {root}")

    done = CliRunner().invoke(told, typed)
    assert (done.exit_code, done.output) == (0, f"{said}\n")
