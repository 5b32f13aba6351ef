"""A call that takes long says what it waits for, and a short one says nothing."""

from __future__ import annotations

import logging
import threading

import pytest

from ckptd.agent.threads import reminder as reminder_module
from ckptd.agent.threads.reminder import reminder
from tests.support.daemons import until

log = logging.getLogger("ckptd.agent")


def test_a_long_call_is_explained_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reminder_module, "REMINDER_SECONDS", 0.01)
    with reminder(log, "waits for storage"):
        until(lambda: len(caplog.records) > 2, "reminders")
    until(
        lambda: all(thread.name != "ckptd-reminder" for thread in threading.enumerate()),
        "end of the thread",
    )
    assert {record.getMessage() for record in caplog.records} == {"waits for storage"}


def test_a_short_call_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="bad"), reminder(log, "waits for storage"):
        raise ValueError("bad")
    assert caplog.records == []
