"""Tests what is said of a daemon that goes away and comes back, with a fake clock."""

from __future__ import annotations

import time

from ckptd.daemon.top.contact import BACK_SECONDS, SLOW_SECONDS, Contact
from tests.support.reports import status_report


def clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def test_a_daemon_that_answers_needs_no_words() -> None:
    contact = Contact().answered(status_report(), 100.0).answered(status_report(), 101.0)
    assert (contact.taken, contact.lost, contact.back) == (101.0, None, None)
    assert contact.remark(101.5, 0.0) == ""


def test_a_silent_daemon_is_silent_since_the_first_failure() -> None:
    contact = Contact().answered(status_report(), 100.0)
    contact = contact.failed("gone", 101.0).failed("still\x1b gone", 135.0)
    assert contact.status == status_report()
    assert contact.remark(136.0, 0.0) == (f"no answer since {clock(101.0)} (35 s): still\\x1b gone")


def test_a_daemon_that_comes_back_is_told_for_a_while() -> None:
    lost = Contact().answered(status_report(), 100.0).failed("gone", 101.0)
    same = lost.answered(status_report(), 151.0)
    assert same.remark(152.0, 0.0) == (
        f"it has answered since {clock(151.0)}, after 50 s without an answer"
    )
    assert same.answered(status_report(), 160.0).remark(152.0, 0.0) == same.remark(152.0, 0.0)
    assert same.remark(151.0 + BACK_SECONDS + 0.1, 0.0) == ""
    other = lost.answered(status_report(pid=9), 151.0)
    told = other.remark(152.0, 0.0)
    assert told.startswith(f"a new daemon (pid 9) has answered since {clock(151.0)}")


def test_a_daemon_that_was_replaced_between_two_questions_is_told() -> None:
    contact = Contact().answered(status_report(), 100.0).answered(status_report(pid=9), 101.0)
    assert contact.remark(102.0, 0.0) == f"a new daemon (pid 9) has answered since {clock(101.0)}"


def test_a_question_that_waits_is_told_before_it_fails() -> None:
    contact = Contact().answered(status_report(), 100.0)
    assert contact.remark(101.0, SLOW_SECONDS - 0.1) == ""
    assert contact.remark(106.0, 5.0) == (
        f"no answer since {clock(101.0)} (5 s): the daemon hangs, or is very busy"
    )
