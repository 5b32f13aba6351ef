"""Tests that one call runs at a time: threads wait, nested calls are refused, and
interrupted calls do not keep the lock.
"""

from __future__ import annotations

import os
import threading

import pytest

from ckptd.agent.threads.call_lock import CallLock, Nested, call_around
from ckptd.shared.errors import Busy
from tests.support.scripts import python


def interrupted(lock: CallLock) -> None:
    """Enter and end without leaving, as if Ctrl-C had come between two instructions."""
    lock("snapshot").__enter__()


def inside(lock: CallLock) -> str:
    with lock("snapshot"):
        return lock.nested


def test_a_nested_call_is_refused_and_the_outer_one_goes_on() -> None:
    lock = CallLock()
    with lock("snapshot"):
        with (
            pytest.raises(
                Busy,
                match=r"^close\(\) was called while snapshot\(\) of the same thread is still "
                r"running, from a signal handler or from the "
                r"state being saved: set a flag in the handler, and call close\(\) once the "
                r"running call has returned$",
            ),
            lock("close"),
        ):
            pass
        assert (lock.nested, call_around()) == ("snapshot", "snapshot")
    assert (lock.nested, call_around()) == ("", "")
    assert inside(lock) == "snapshot"


def test_a_call_of_another_lock_is_not_nested() -> None:
    with CallLock()("snapshot"), CallLock()("close"):
        pass


def test_another_thread_waits() -> None:
    lock, order = CallLock(), list[str]()
    entered = threading.Event()

    def work() -> None:
        entered.set()
        with lock("close"):
            order.append("second")

    thread = threading.Thread(target=work)
    with lock("snapshot"):
        thread.start()
        assert entered.wait(60)
        with pytest.raises(Nested):
            lock("snapshot").__enter__()
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_another_thread_waits_until_its_timeout() -> None:
    lock, problems = CallLock(), list[str]()

    def work() -> None:
        try:
            lock("close", 0.0).__enter__()
        except TimeoutError as error:
            problems.append(str(error))

    with lock("snapshot"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    assert problems == ["close() has waited 0.0 s for another thread's call"]


def test_an_interrupted_call_does_not_keep_the_lock() -> None:
    lock = CallLock()
    interrupted(lock)
    assert (lock.nested, inside(lock)) == ("", "snapshot")
    interrupted(lock)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(inside(lock)))
    thread.start()
    thread.join(60)
    assert found == ["snapshot"]


def test_a_thread_that_has_ended_does_not_keep_the_lock() -> None:
    lock = CallLock()
    thread = threading.Thread(target=interrupted, args=(lock,))
    thread.start()
    thread.join(60)
    assert inside(lock) == "snapshot"


def test_tidy_runs_when_a_call_enters_and_when_it_leaves() -> None:
    seen: list[str] = []
    lock = CallLock(lambda: seen.append(lock.nested))
    inside(lock)
    assert seen == ["snapshot", "snapshot"]
    interrupted(lock)
    inside(lock)
    assert seen == ["snapshot"] * 5


def test_a_forked_child_is_in_no_call_of_its_parent() -> None:
    with CallLock()("snapshot"):
        child = os.fork()
        if child == 0:
            os._exit(call_around() != "")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


STOPPED = """
import gc, os, sys, threading
from ckptd.agent.threads.call_lock import CallLock

class Finalized:
    def __init__(self):
        self.me = self
        waiting.add(id(self))

    def __del__(self):
        waiting.discard(id(self))
        os.stat("/")  # lets another thread run

def hold():
    with lock("snapshot"):
        entered.set()
        done.wait()

def look():
    while not done.is_set():
        if len(waiting) < 50:  # without a limit they come faster than a collection ends, and each collection takes longer than the last
            Finalized()
        assert not call.over() or done.is_set()

waiting = set()
lock, entered, done = CallLock(), threading.Event(), threading.Event()
threads = [threading.Thread(target=hold)]
threads[0].start()
entered.wait()
call = lock._running
gc.freeze()
gc.set_threshold(10)
sys.setswitchinterval(1e-5)
threads += [threading.Thread(target=look) for _ in range(2)]
threads[1].start()
threads[2].start()
for _ in range(200):
    short = threading.Thread(target=int)
    short.start()
    short.join()
done.set()
for thread in threads:
    thread.join()
print(call.over())
"""  # noqa: E501


@pytest.mark.usefixtures("processes")
def test_threads_that_start_while_a_waiting_call_looks_for_another_do_not_stop_the_process() -> (
    None
):
    ended = python("-c", STOPPED, timeout=90)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
