"""Tests that the runbook has each alert, each event and each error, and that each event
and each error is made to happen by a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ckptd.daemon.log_events import EVENTS
from ckptd.shared import errors

ROOT = Path(__file__).parents[1]
RUNBOOK = (ROOT / "docs/how-to/runbook.md").read_text()
TABLE = (ROOT / "docs/reference/events.md").read_text()
ALERTS = (ROOT / "docs/monitoring/ckptd-alerts.yml").read_text()
GROUPS = {"CallerError", "MachineError", "ServiceError"}
"""The classes that are never raised themselves."""


@cache
def sources() -> str:
    """Return the source of all tests but those of the tables of names."""
    apart = {"test_log_events.py", "test_runbook.py", "test_errors.py"}
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name not in apart]
    return "\n".join(path.read_text() for path in sorted(paths))


def public(above: type[errors.CkptdError] = errors.CkptdError) -> Iterator[type[errors.CkptdError]]:
    for cls in above.__subclasses__():
        if cls.__module__ == errors.__name__ and cls.__name__ not in GROUPS:
            yield cls
        yield from public(cls)


def test_each_alert_has_a_row_and_what_to_do() -> None:
    alerts = re.findall(r"- alert: (\w+)", ALERTS)
    rows = re.findall(r"^\| `(Ckptd\w+)` \| [^|]+ \| [^|]+ \|$", RUNBOOK, re.MULTILINE)
    assert rows == alerts != []


def test_each_event_has_a_row_and_the_runbook_links_them() -> None:
    assert "](../reference/events.md#all-events)" in RUNBOOK
    rows = re.findall(r"^\| `([a-z._]+)` \| \w+ \|(?:[^|]+\|){3}$", TABLE, re.MULTILINE)
    assert sorted(rows) == sorted(EVENTS)
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)`", RUNBOOK)) - {"ckptd.shared"}
    assert named - set(EVENTS) == set()


def test_each_error_has_a_row_with_its_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([a-z-]+)` \|", RUNBOOK, re.MULTILINE))
    assert rows == {cls.__name__: cls.code for cls in public()}


def test_each_link_within_the_runbook_has_its_section() -> None:
    titles = re.findall(r"^## (.+)$", RUNBOOK, re.MULTILINE)
    sections = {title.lower().replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(#([^)]+)\)", RUNBOOK)
    assert len(links) > 30
    assert set(links) - sections == set()


def test_each_event_is_made_to_happen_by_a_test() -> None:
    assert [name for name in EVENTS if f'"{name}"' not in sources()] == []


def test_each_error_is_made_to_happen_by_a_test() -> None:
    made = set(re.findall(r"\b([A-Z]\w+)\b", sources()))
    assert [cls.__name__ for cls in public() if cls.__name__ not in made] == []
