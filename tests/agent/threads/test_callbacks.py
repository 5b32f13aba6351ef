"""Tests that functions of the caller run on threads of their own, in their order."""

from __future__ import annotations

import threading

import pytest

from ckptd.agent.threads.callbacks import Callbacks
from tests.support.scripts import python


def test_calls_run_one_after_the_other_and_hold_nobody() -> None:
    callbacks, may_go, done = Callbacks(), threading.Event(), threading.Event()
    heard: list[str] = []

    def first() -> None:
        may_go.wait(60)
        heard.append("first")

    callbacks.call(first, "first")
    callbacks.call(lambda: heard.append("second"), "second")
    callbacks.call(done.set, "third")
    assert heard == []
    may_go.set()
    assert done.wait(60)
    assert heard == ["first", "second"]


def test_an_exception_is_logged_and_the_next_call_comes(caplog: pytest.LogCaptureFixture) -> None:
    callbacks, done = Callbacks(), threading.Event()
    callbacks.call(lambda: 1 / 0, "on_failure of the snapshot of step 7")
    callbacks.call(done.set, "next")
    assert done.wait(60)
    assert [record.message for record in caplog.records] == ["on_failure of the snapshot of step 7"]
    assert "ZeroDivisionError" in caplog.text


def test_an_interpreter_that_is_ending_runs_the_call_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ending(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    callbacks, heard = Callbacks(), list[str]()
    monkeypatch.setattr(threading.Thread, "start", ending)
    callbacks.call(lambda: heard.append("called"), "late")
    assert heard == ["called"]


SCRIPT = """
import time
from ckptd.agent.threads import callbacks
callbacks._LAST_SECONDS = %s
made = callbacks.Callbacks()
made.call(lambda: (time.sleep(%s), print("told")), "on_failure")
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("most", "takes", "said"), [("60.0", "0.5", "told\n"), ("0.1", "60", "")])
def test_the_end_of_the_process_waits_for_a_call_but_not_for_ever(
    most: str, takes: str, said: str
) -> None:
    ended = python("-c", SCRIPT % (most, takes), timeout=60)
    assert (ended.returncode, ended.stdout) == (0, said)
    assert (
        "on_failure, or a function of a future, has not returned after 0.1 s, and ends with the "
        "process (calls: 1)" in ended.stderr
    ) == (not said)
