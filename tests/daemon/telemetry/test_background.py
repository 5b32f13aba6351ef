"""Tests that events reach the thread in their order, and that nothing waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from ckptd.daemon.log_events import SAVE_DONE, SAVE_FAILED
from ckptd.daemon.telemetry import background
from ckptd.daemon.telemetry.background import BackgroundHandler, LoggedEvent

LOG = logging.getLogger("ckptd.tests.background")


class Kept(BackgroundHandler):
    def __init__(self, level: int = logging.INFO, gather_seconds: float = 0.0) -> None:
        self.events: list[LoggedEvent] = []
        self.sizes: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.fails = 0
        super().__init__("ckptd-kept", level, gather_seconds)

    def take(self, events: Sequence[LoggedEvent]) -> None:
        assert self.may_go.wait(60)
        if self.fails:
            self.fails -= 1
            raise OSError("no")
        self.events += events
        self.sizes.append(len(events))


def log_to(handler: BackgroundHandler, count: int) -> None:
    LOG.setLevel(logging.INFO)
    LOG.addHandler(handler)
    try:
        for number in range(count):
            SAVE_DONE.log(LOG, "saved %d", number, job="gpt", step=number)
    finally:
        LOG.removeHandler(handler)


def test_events_come_in_their_order_and_all_before_the_end() -> None:
    kept = Kept()
    log_to(kept, 1_200)
    kept.close()
    assert [(event.text, event.job, event.facts["step"]) for event in kept.events] == [
        (f"saved {number}", "gpt", number) for number in range(1_200)
    ]
    assert {(event.name, event.level) for event in kept.events} == {("save.done", logging.INFO)}


def test_events_are_gathered_until_their_time_is_over_or_the_handler_ends() -> None:
    kept = Kept(gather_seconds=3600.0)
    log_to(kept, 3)
    kept.close()
    assert kept.sizes == [3]
    kept = Kept(gather_seconds=0.01)
    for number in range(3):
        log_to(kept, 1)
        while len(kept.sizes) <= number:
            pass
    kept.close()
    assert kept.sizes == [1, 1, 1]


def test_lines_without_an_event_and_of_a_lower_level_are_left_out() -> None:
    kept = Kept(logging.WARNING)
    LOG.addHandler(kept)
    LOG.error("no event")
    SAVE_FAILED.log(LOG, "failed")
    LOG.removeHandler(kept)
    log_to(kept, 1)
    kept.close()
    assert [(event.name, event.job) for event in kept.events] == [("save.failed", "")]


def test_a_storm_is_cut_and_a_thread_that_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "MAX_WAITING", 10)
    monkeypatch.setattr(background, "END_SECONDS", 0.05)
    kept = Kept()
    kept.may_go.clear()
    log_to(kept, 1)
    while kept._queue.qsize():  # the thread has taken the first
        pass
    log_to(kept, 25)
    assert kept.missed == 15
    kept.close()
    kept.may_go.set()


def test_an_error_costs_only_its_events(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.fails = 1
    log_to(kept, 1)
    while not caplog.records or "ckptd-kept has failed" not in caplog.text:
        pass
    log_to(kept, 2)
    kept.close()
    assert [event.text for event in kept.events] == ["saved 0", "saved 1"]
