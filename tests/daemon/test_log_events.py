"""Tests that an event of the log has its name, its level and its facts, and that the
documentation lists all events.
"""

from __future__ import annotations

import ast
import logging
import re

import pytest

from ckptd.daemon import log_events
from ckptd.daemon.log_events import EVENTS, SAVE_DONE, SAVE_FAILED, event_of, facts_of
from tests.support.rooms import ROOT, modules

PAGE = ROOT / "docs/reference/events.md"


def test_an_event_is_a_line_of_the_log_with_a_name_and_facts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    SAVE_FAILED.log(logging.getLogger("ckptd.x"), "%s failed", "gpt", job="gpt", step=None)
    (record,) = caplog.records
    assert (record.getMessage(), record.levelno, record.name) == (
        "gpt failed",
        logging.ERROR,
        "ckptd.x",
    )
    assert (event_of(record), facts_of(record)) == ("save.failed", {"job": "gpt"})
    assert record.filename == "test_log_events.py"


def test_a_line_that_tells_no_event_has_no_name(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ckptd.x").warning("hello")
    assert (event_of(caplog.records[0]), facts_of(caplog.records[0])) == ("", {})


def facts_in_the_code() -> dict[str, set[str]]:
    """Return the facts that the calls of each event give, by the name of the event."""
    found: dict[str, set[str]] = {}
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        attr="log", value=ast.Attribute(value=ast.Name("log_events"), attr=constant)
                    )
                ):
                    name = getattr(log_events, constant).name
                    facts = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                    found.setdefault(name, set()).update(facts)
    return found


def facts_on_the_page() -> dict[str, tuple[str, set[str]]]:
    """Return the level and the facts of each event in the table of the page."""
    rows = re.findall(r"^\| `([a-z._]+)` \| (\w+) \| ([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    return {name: (level, set(re.findall(r"`(\w+)`", facts))) for name, level, facts in rows}


def test_the_page_lists_the_events_that_the_code_logs_with_their_facts() -> None:
    logged = facts_in_the_code()
    assert set(logged) == set(EVENTS)
    assert facts_on_the_page() == {
        name: (logging.getLevelName(EVENTS[name].level).lower(), facts)
        for name, facts in logged.items()
    }
    assert EVENTS["save.done"] is SAVE_DONE
