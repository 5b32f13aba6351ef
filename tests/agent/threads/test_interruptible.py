"""Tests that an exception of a signal handler leaves a public call as it is, whatever it
has interrupted there, and that no handler is changed by it.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import pytest

from ckptd.agent.threads import interruptible as module
from ckptd.agent.threads.interruptible import interruptible

NUMBER = signal.SIGUSR2


class Preempted(Exception):
    pass


def preempt(*_: Any) -> None:
    raise Preempted("by the scheduler")


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(NUMBER, preempt)
    yield
    signal.signal(NUMBER, before)


def ring() -> None:
    signal.raise_signal(NUMBER)


@interruptible
def swallows(inner: Callable[[], Any] = ring) -> str:
    try:
        inner()
    except Exception as error:
        return f"swallowed {error!r}"
    return "returned"


def test_the_exception_leaves_the_call_with_the_places_of_both_in_its_traceback() -> None:
    with pytest.raises(Preempted, match="by the scheduler") as caught:
        swallows()
    assert (caught.value.__context__, caught.value.__cause__) == (None, None)
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert names.index("swallows") < names.index("ring") < names.index("preempt")


def test_an_instruction_without_a_line_may_be_interrupted_too() -> None:
    code = ring.__code__
    no_line = bytes([0b1_1111_111])  # for 8 code units; InternalDocs/code_objects.md of CPython
    bare = FunctionType(code.replace(co_linetable=no_line * len(code.co_code)), globals())
    with pytest.raises(Preempted) as caught:
        swallows(bare)
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert names.index("swallows") < names.index("ring") < names.index("preempt")


@pytest.mark.parametrize("raising", [partial(int, "not a number"), lambda *_: [][1]])
def test_a_handler_without_a_frame_of_its_own_counts_too(raising: Any) -> None:
    signal.signal(NUMBER, lambda *_: raising())
    with pytest.raises((ValueError, IndexError)):
        swallows()
    signal.signal(NUMBER, partial(int.__add__, 1))  # raises TypeError, in C
    with pytest.raises(TypeError):
        swallows()


def test_an_error_that_no_handler_has_raised_is_the_calls_own() -> None:
    def fails() -> None:
        raise ValueError

    assert swallows(fails) == "swallowed ValueError()"


def test_it_leaves_the_outermost_call() -> None:
    with pytest.raises(Preempted):
        swallows(swallows)


def test_a_base_exception_of_a_handler_is_not_carried() -> None:
    def leave(*_: Any) -> None:
        raise SystemExit(143)

    signal.signal(NUMBER, leave)
    with pytest.raises(SystemExit) as caught:
        swallows()
    assert caught.value.code == 143


def test_a_handler_that_was_set_inside_the_call_belongs_to_the_code_that_has_set_it() -> None:
    def with_a_limit_of_its_own() -> None:
        signal.signal(NUMBER, lambda *_: preempt())
        ring()

    assert swallows(with_a_limit_of_its_own).startswith("swallowed Preempted")
    assert signal.getsignal(NUMBER) is not preempt


def test_the_handlers_are_back_after_the_call() -> None:
    for inner in (lambda: None, ring):
        try:
            swallows(inner)
        except Preempted:
            pass
        assert signal.getsignal(NUMBER) is preempt


def test_a_stand_in_that_another_handler_keeps_is_the_handler_after_the_call() -> None:
    def chain() -> None:
        before: Any = signal.getsignal(NUMBER)
        signal.signal(NUMBER, lambda *arguments: before(*arguments))

    swallows(chain)
    with pytest.raises(Preempted):
        ring()


def test_a_stand_in_that_was_left_by_an_exception_is_taken_away_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_put_back", lambda _: preempt())
        with pytest.raises(Preempted):
            swallows(lambda: None)
    assert signal.getsignal(NUMBER) is not preempt
    with pytest.raises(Preempted):
        ring()
    swallows(lambda: None)
    assert signal.getsignal(NUMBER) is preempt


def test_a_handler_that_runs_while_stand_ins_are_put_is_the_one_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(*_: Any) -> None: ...

    set_handler, seen = module.set_handler, list[int]()

    def interrupted(number: int, new: Any) -> Any:
        if number == NUMBER and not seen:
            seen.append(number)
            set_handler(number, other)
        return set_handler(number, new)

    monkeypatch.setattr(module, "set_handler", interrupted)
    swallows(lambda: None)
    assert signal.getsignal(NUMBER) is other


def test_the_disposition_in_the_kernel_stays_as_it_is() -> None:
    """As a library in C and `signal.siginterrupt` set it."""

    def disposition() -> bytes:
        found = ctypes.create_string_buffer(512)
        module._sigaction(NUMBER, None, found)
        # Handler, mask and flags; the C library leaves the rest undefined.
        return bytes(found)[:16] + bytes(found)[136:140]

    signal.siginterrupt(NUMBER, False)
    before, inside = disposition(), list[bytes]()
    swallows(lambda: inside.append(disposition()))
    assert [*inside, disposition()] == [before, before]


def test_another_thread_changes_no_handler() -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=swallows, args=(lambda: found.append(signal.getsignal(NUMBER)),)
    )
    thread.start()
    thread.join()
    assert found == [preempt]


def test_only_a_function_of_its_own_can_be_interruptible() -> None:
    """The code of a decorator's function is shared by all that it decorates."""
    with pytest.raises(AssertionError):
        interruptible(swallows)
