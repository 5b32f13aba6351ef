"""Tests flags and waits that Ctrl-C cannot break."""

from __future__ import annotations

import signal
import threading

import pytest

from ckptd.agent.threads.flag import Flag, Waiters
from tests.support.daemons import until


def test_a_flag_is_set_and_cleared() -> None:
    flag = Flag()
    assert (flag.is_set(), flag.wait(0.0)) == (False, False)
    flag.set()
    flag.set()
    assert (flag.is_set(), flag.wait(0.0), flag.wait()) == (True, True, True)
    flag.clear()
    assert flag.wait(0.0) is False


def test_all_waiting_threads_are_woken() -> None:
    flag, woken = Flag(), list[bool]()
    threads = [
        threading.Thread(target=lambda: woken.append(flag.wait(600)), daemon=True) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(flag._waiters._asleep) == 5, "five waiting threads")
    flag.set()
    for thread in threads:
        thread.join(20)
    assert woken == [True] * 5


def test_a_wait_for_what_will_not_come_ends_when_it_is_woken() -> None:
    flag, hopeless, results = Flag(), list[str](), list[bool]()
    thread = threading.Thread(
        target=lambda: results.append(flag.wait(unless=lambda: bool(hopeless))), daemon=True
    )
    thread.start()
    flag.wake()  # nothing has changed
    hopeless.append("the daemon serves another root")
    flag.wake()
    thread.join(60)
    assert results == [False]


def test_a_condition_is_checked_again_after_each_notification() -> None:
    waiters, values = Waiters(), list[int]()

    def count() -> None:
        for number in range(100):
            values.append(number)
            waiters.notify()

    thread = threading.Thread(target=count)
    thread.start()
    assert waiters.wait_for(lambda: len(values) == 100, 60)
    thread.join()


def test_an_interrupted_wait_leaves_no_lock_held() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    flag, before = Flag(), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            flag.wait(60)
    finally:
        signal.signal(signal.SIGALRM, before)
    flag.set()
    assert flag.wait(0.0)
