"""Tests how a daemon is asked, with a fake clock, and how its history is read."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import GATHER_SECONDS, History
from ckptd.daemon.top.poller import Poller
from ckptd.shared.errors import DaemonUnreachable
from tests.support.daemons import until
from tests.support.reports import job_report, status_report


class World:
    """A daemon that answers what the test says, and a clock that it moves."""

    def __init__(self) -> None:
        self.now, self.answer = 100.0, status_report(job_report())
        self.problem: Exception | None = None
        self.poller = Poller(self.ask, 1.0, lambda: self.now)

    def ask(self) -> dict[str, Any]:
        if self.problem is not None:
            raise self.problem
        return self.answer

    def held(self) -> tuple[float, ...]:
        self.poller.ask_once()
        trend = self.poller.seen.trends.get("gpt")
        return () if trend is None else trend.held


def saved(file: Path, time: float, held: float) -> None:
    """Write a save into a history, as a daemon does."""
    history = History(file)
    facts: dict[str, str | int | float | None] = {"job": "gpt", "held_seconds": held}
    history.take([LoggedEvent(time, "save.done", logging.INFO, "saved", facts)])
    history.close()


def test_an_error_becomes_part_of_what_is_seen_until_the_next_answer() -> None:
    world = World()
    world.poller.ask_once()
    for problem in (DaemonUnreachable("gone"), OSError("no descriptors")):
        world.problem, world.now = problem, world.now + 5
        world.poller.ask_once()
        contact = world.poller.seen.contact
        assert (contact.lost, contact.problem) == (105.0, str(problem))
        assert contact.status == world.answer
    world.problem, world.now = None, 120.0
    world.poller.ask_once()
    assert (world.poller.seen.contact.lost, world.poller.seen.contact.back) == (None, 120.0)


def test_silence_counts_from_the_question_that_got_no_answer() -> None:
    world = World()
    world.poller.ask_once()

    def ask() -> dict[str, Any]:
        world.now += 21
        raise DaemonUnreachable("it does not answer")

    world.now = 130.0
    world.poller._ask = ask
    for end in (151.0, 172.0):
        world.poller.ask_once()
        assert (world.now, world.poller.seen.contact.lost) == (end, 130.0)


def test_an_answer_that_is_not_understood_does_not_end_the_questions() -> None:
    world, woken = World(), threading.Event()
    world.poller = Poller(world.ask, 0.01, lambda: world.now)
    world.problem = KeyError("pid")
    world.poller.start(woken.set)
    until(lambda: world.poller.seen.contact.lost is not None, "the error")
    assert world.poller.seen.contact.problem == (
        "its answer is not understood (KeyError: 'pid'): "
        "install the same version of ckptd in both places"
    )
    world.problem = None
    until(lambda: world.poller.seen.contact.back is not None, "the next answer")
    world.poller.stop()
    assert woken.is_set()
    assert world.poller.seen.contact.status == world.answer


def test_a_report_that_lacks_a_member_is_told_and_the_one_before_stays() -> None:
    world = World()
    world.poller.ask_once()
    before, world.answer = world.answer, {"pid": 1, "version": "9.9"}
    world.poller.ask_once()
    contact = world.poller.seen.contact
    assert (contact.status, contact.lost) == (before, 100.0)
    assert "KeyError: 'jobs'" in contact.problem
    assert world.poller.waited() == 0.0


def test_the_history_is_read_at_the_start_and_while_saves_may_be_written(tmp_path: Path) -> None:
    world, file = World(), tmp_path / "history.sqlite3"
    world.answer["history"] = str(file)
    assert (world.held(), world.poller.seen.history) == ((), "")
    saved(file, 1.0, 0.1)
    assert world.held() == (0.1,)
    world.now += 2 * GATHER_SECONDS + 0.1
    assert world.held() == (0.1,)  # the last time
    saved(file, 2.0, 0.2)
    assert world.held() == (0.1,)  # nothing has been saved as far as the report says
    world.answer["counters"]["persisted"] += 1
    assert world.held() == (0.1, 0.2)


def test_with_rare_questions_the_newest_save_is_found_by_the_next_one(tmp_path: Path) -> None:
    world, file = World(), tmp_path / "history.sqlite3"
    world.answer["history"] = str(file)
    assert world.held() == ()
    world.now += 60
    world.answer["counters"]["persisted"] += 1
    assert world.held() == ()  # the daemon has not written it yet
    saved(file, 1.0, 0.1)
    world.now += 60
    assert world.held() == (0.1,)
    saved(file, 2.0, 0.2)
    assert world.held() == (0.1,)  # it is not read again before the next save


def test_a_history_that_cannot_be_read_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    world, file = World(), tmp_path / "history\n.sqlite3"
    file.write_text("no database at all, but long enough to be looked at\n" * 100)
    world.answer["history"] = str(file)
    assert world.held() == ()
    assert f"{tmp_path}/history\\n.sqlite3 is damaged" in world.poller.seen.history
    assert world.poller.seen.contact.status is not None
    world.answer["history"] = None
    assert (world.held(), world.poller.seen.history) == ((), "the daemon keeps no history")


def test_a_question_without_an_answer_is_counted_and_the_keys_do_not_wait() -> None:
    world, answered, woken = World(), threading.Event(), threading.Event()
    world.poller.ask_once()
    assert world.poller.waited() == 0.0

    def ask() -> dict[str, Any]:
        answered.wait(60)
        return world.answer

    world.poller = Poller(ask, 0.01, lambda: world.now)
    world.poller.start(woken.set)
    until(lambda: world.poller._asked is not None, "the question")
    world.now += 7
    assert world.poller.waited() == 7.0
    world.poller.stop()
    answered.set()
    assert woken.wait(60)
    assert world.poller.waited() == 0.0
    assert world.poller.seen.contact.status == world.answer
