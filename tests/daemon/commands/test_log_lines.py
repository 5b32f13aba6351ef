"""Tests the reading of a log that grows and rotates, without waiting."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.daemon.commands.log_lines import EntriesOf, LogFiles
from ckptd.daemon.process.rotating_log import RotatingLog
from ckptd.shared.errors import StorageError
from tests.support.cases import each_case


class Ended(Exception):
    """The end of a log that is followed, in place of Ctrl-C."""


def followed(path: Path, events: list[Callable[[], object]]) -> tuple[list[str], list[str]]:
    """Return the lines that are there, and those that each event adds, until the last."""
    left = iter(events)

    def sleep(seconds: float) -> None:
        event = next(left, None)
        if event is None:
            raise Ended
        event()

    with LogFiles(path) as files:
        there, more = list(files.there()), list[str]()
        with pytest.raises(Ended):
            collect(files.more(sleep), more)
    return there, more


def collect(lines: Iterator[str], found: list[str]) -> None:
    """Append the lines to `found`, also those before an error."""
    for line in lines:
        found.append(line)


def add(path: Path, text: str) -> Callable[[], object]:
    def write() -> None:
        with path.open("a") as file:
            file.write(text)

    return write


def rotate(path: Path) -> Callable[[], object]:
    def turn() -> None:
        path.rename(path.with_name(f"{path.name}.1"))
        path.touch()

    return turn


def both(*events: Callable[[], object]) -> Callable[[], object]:
    return lambda: [event() for event in events]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "daemon.log"


def test_the_rotated_file_comes_first(log: Path) -> None:
    add(log.with_name("daemon.log.1"), "one\ntwo\n")()
    add(log, "three\nfour")()
    with LogFiles(log) as files:
        assert list(files.there()) == ["one", "two", "three"]
        assert files.rest == "four"


def test_the_rotated_file_alone_is_enough(log: Path) -> None:
    add(log.with_name("daemon.log.1"), "one\n")()
    with LogFiles(log) as files:
        assert list(files.there()) == ["one"]


def test_no_file_is_one_sentence(log: Path) -> None:
    with pytest.raises(StorageError, match=f"cannot read the log {log}: No such file"):
        LogFiles(log)


def test_bytes_that_are_no_text_are_shown_as_escapes(log: Path) -> None:
    log.write_bytes(b"\xff\xc3\xa9\n")
    with LogFiles(log) as files:
        assert list(files.there()) == ["\\xffé"]


def test_new_lines_come_once_they_are_whole(log: Path) -> None:
    add(log, "one\ntw")()
    events = [add(log, "o\nthr"), lambda: None, add(log, "ee\n"), add(log, "four\nfi")]
    assert followed(log, events) == (["one"], ["two", "three", "four"])


def test_a_rotation_loses_no_line(log: Path) -> None:
    add(log, "one\n")()
    events = [
        both(add(log, "two\n"), rotate(log), add(log, "three\n")),
        add(log, "four\n"),
        # Two rotations between two looks.
        both(add(log, "5\n"), rotate(log), add(log, "6\n"), rotate(log), add(log, "7\n")),
        # A look between the two renames.
        lambda: log.rename(log.with_name("daemon.log.1")),
        add(log, "8\n"),
        # Somebody empties it.
        lambda: log.write_text(""),
        add(log, "9\n"),
    ]
    assert followed(log, events) == (
        ["one"],
        ["two", "three", "four", "5", "6", "7", "8", "9"],
    )


def test_the_log_of_a_daemon_is_followed_over_its_rotations(log: Path) -> None:
    handler = RotatingLog(log, most=100)

    def say(number: int) -> Callable[[], object]:
        record = logging.LogRecord("ckptd", 20, "", 0, f"line {number:03d} {'x' * 40}", (), None)
        return lambda: handler.emit(record)

    say(0)()
    _, more = followed(log, [say(number) for number in range(1, 20)])
    handler.close()
    assert [line[:8] for line in more] == [f"line {number:03d}" for number in range(1, 20)]


def test_a_log_that_begins_later_is_followed(log: Path) -> None:
    add(log.with_name("daemon.log.1"), "one\n")()
    assert followed(log, [add(log, "two\n")]) == (["one"], ["two"])


AT = "2026-11-26T22:16:04.123 INFO ckptd:"


@each_case(
    ("text", "wanted"),
    [
        ("job gpt attempt 2: begins", True),
        ("job gpt: retention deletes nothing", True),
        ("job gpt.", True),
        ("saved gpt/step-00000001.a0001: 3 MB", True),
        ("checkpoint gpt/best: deleted", True),
        ("cannot delete /ckpts/gpt/best", True),
        ("there is no job 'gpt' in /ckpts", True),
        ("job gpt-2 attempt 1: begins", False),
        ("job gpt.v2: begins", False),
        ("job my-gpt: begins", False),
        ("saved my.gpt/step-1", False),
        ("ckptd 0.1 ready: root /work/gpt, socket /s", False),
        ("a gpt is no job", False),
    ],
)
def test_the_lines_about_a_job(text: str, wanted: bool) -> None:
    assert EntriesOf("gpt").keeps(f"{AT} {text}") is wanted
    assert EntriesOf(None).keeps(f"{AT} {text}")


def test_a_traceback_belongs_to_its_line() -> None:
    lines = [
        f"{AT} snapshot gpt/step-1: internal error", "Traceback (most recent call last):",
        "  job llama: is only a text here", f"{AT} saved llama/step-1", "  in gpt/x",
    ]  # fmt: skip
    assert list(filter(EntriesOf("gpt").keeps, lines)) == lines[:3]
    assert list(filter(EntriesOf("llama").keeps, lines)) == lines[3:]


def test_lines_of_json_are_about_the_job_of_their_facts() -> None:
    lines = [
        json.dumps({"text": "saved", "event": "save.done", "facts": {"job": "gpt"}}),
        json.dumps({"text": "job gpt attempt 1: begins"}),
        json.dumps({"text": "saved llama/x of gpt/x", "facts": {"job": "llama", "tag": "gpt"}}),
        json.dumps({"text": "odd", "facts": ["gpt"]}),
        "{no json, but job gpt",
    ]
    keeps = EntriesOf("gpt").keeps
    assert [keeps(line) for line in lines] == [True, True, False, False, True]
