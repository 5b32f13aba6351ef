"""Tests the formats of the log's lines: text, JSON and the priorities of journald."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest

from ckptd.daemon.log_events import SAVE_FAILED
from ckptd.daemon.telemetry.log_format import (
    JournalFormatter,
    JsonFormatter,
    TextFormatter,
    formatter_for,
)
from tests.support.cases import each_case


def failed(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    try:
        raise OSError("the disk\nis full")
    except OSError:
        logging.getLogger("ckptd.saver").exception("é\n%s", "internal")
    record = caplog.records[-1]
    record.created = 1_700_000_000.25
    return record


def test_a_json_line_has_the_event_and_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    SAVE_FAILED.log(logging.getLogger("ckptd.saver"), "no %s", "room", job="gpt", step=7)
    record = caplog.records[0]
    record.created = 1_700_000_000.25
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "error",
        "logger": "ckptd.saver",
        "text": "no room",
        "event": "save.failed",
        "facts": {"job": "gpt", "step": 7},
    }


def test_a_traceback_stays_within_its_json_line(caplog: pytest.LogCaptureFixture) -> None:
    line = JsonFormatter().format(failed(caplog))
    assert "\n" not in line
    found = json.loads(line)
    assert (found["text"], found["traceback"].splitlines()[-2:]) == (
        "é\ninternal",
        ["OSError: the disk", "is full"],
    )
    assert "event" not in found


def test_each_line_for_journald_has_its_priority(caplog: pytest.LogCaptureFixture) -> None:
    lines = JournalFormatter().format(failed(caplog)).splitlines()
    assert lines[:2] == [
        r"<3>ckptd.saver: é\ninternal",
        "<3>Traceback (most recent call last):",
    ]
    assert {line[:3] for line in lines} == {"<3>"}


@each_case(("level", "priority"), [(10, "<7>"), (20, "<6>"), (30, "<4>"), (40, "<3>"), (50, "<2>")])
def test_a_level_has_the_priority_of_syslog(level: int, priority: str) -> None:
    record = logging.LogRecord("ckptd", level, "", 0, "text", (), None)
    assert JournalFormatter().format(record) == f"{priority}ckptd: text"


def test_journald_is_recognized_by_its_stream(tmp_path: Path) -> None:
    with open(tmp_path / "stream", "w") as stream:
        status = os.fstat(stream.fileno())
        there = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        kinds = [
            type(formatter_for(*given))
            for given in (
                ("text", stream, there),
                ("text", stream, {"JOURNAL_STREAM": "1:1"}),
                ("text", None, there),
                ("json", stream, there),
            )
        ]
    assert kinds == [JournalFormatter, TextFormatter, TextFormatter, JsonFormatter]
    assert type(formatter_for("text", sys.stderr, {})) is TextFormatter


@pytest.mark.parametrize("formatter", [TextFormatter(), JournalFormatter()])
def test_a_message_cannot_forge_a_line_or_obey_a_terminal(
    formatter: logging.Formatter, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("ckptd.engine").warning("job gpt: %s", "x\n<0>ckptd: forged \x1b[2J")
    line = formatter.format(caplog.records[0])
    assert line.endswith(r"ckptd.engine: job gpt: x\n<0>ckptd: forged \x1b[2J")
    assert line.isprintable()
