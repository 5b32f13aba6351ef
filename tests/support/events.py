"""Reads the events that a test has made to happen out of the log."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptd.daemon.log_events import Fact, event_of, facts_of


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[Mapping[str, Fact]]:
    """Return the facts of each event of this name that this process has logged."""
    return [facts_of(record) for record in caplog.records if event_of(record) == name]
