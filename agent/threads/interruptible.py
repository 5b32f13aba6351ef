"""Public calls from which an exception of a signal handler comes out as Ctrl-C does.

A signal handler may raise: a preemption exception, a time limit by SIGALRM, or the
handler of torch's DataLoader, which raises RuntimeError when a worker has died. Python
raises it at any instruction of the main thread. If it is an `Exception`, any
`except Exception` around that instruction takes it for an error of the code that was
interrupted: in ckptd, in torch, which reads tensors of a module inside such a block, or
in an object of the caller.

Therefore each handler of this process is replaced while a public call runs. In its place
is a `_StandIn`, which calls the handler, and carries an `Exception` out of the call in an
`Interruption`. That is a BaseException, like KeyboardInterrupt: whatever settles an
interrupted call for Ctrl-C settles it for handlers that raise. Outside the call, the
caller gets the handler's own exception.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

# Without the enums that `signal` makes of arguments and results, which takes 50 us for all
# signals.
getsignal, set_handler = _signal.getsignal, _signal.signal
_SIGNALS = sorted(map(int, signal.valid_signals()))
_DISPOSITION_BYTES = 512  # more bytes than a `struct sigaction` has on any platform
_sigaction = ctypes.CDLL(None).sigaction


class Interruption(BaseException):
    """Carries the exception of a signal handler out of a public call.

    error: the exception.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(repr(error))
        self.error = error


class _StandIn:
    """The handler of a signal while a public call runs.

    handler: the handler of this process, which it calls.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        try:
            return self.handler(number, frame)
        except Exception as error:
            if _is_inside(frame):
                raise Interruption(error) from None
            # In a call that has just ended, or because another handler has kept this
            # stand-in as the one before it.
            raise


def interruptible(function: Callable[P, R]) -> Callable[P, R]:
    """Return the public call `function` as one that signal handlers may end by an
    exception.

    The function must settle what Ctrl-C leaves, and nothing more. The exception leaves
    the outermost interruptible call that runs.
    """
    assert not hasattr(function, "__wrapped__"), "the code of a wrapper is not its function's alone"
    _code.add(cast(FunctionType, function).__code__)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)  # Python runs no signal handler on this thread
        outermost = not _is_inside(sys._getframe(1))
        stand_ins = dict[int, _StandIn]()
        try:
            if outermost:
                _put(stand_ins)
            return function(*args, **kwargs)
        except Interruption as interruption:
            if not outermost:
                raise
            error = interruption.error
            error.__traceback__ = _joined(interruption.__traceback__, error.__traceback__)
        finally:
            _put_back(stand_ins)
        raise error

    return call


_code = set[CodeType]()
"""The code of all interruptible functions. While such a function runs, the `try` of its
`call` is around it.
"""


def _is_inside(frame: FrameType | None) -> bool:
    """Return True if an interruptible function is on the stack of this frame."""
    while frame is not None:
        if frame.f_code in _code:
            return True
        frame = frame.f_back
    return False


def _put(stand_ins: dict[int, _StandIn]) -> None:
    """Replace each handler by a stand-in, and add the stand-in to `stand_ins`."""
    for number in _SIGNALS:
        handler = getsignal(number)
        if isinstance(handler, _StandIn):  # left by a call that an exception has ended
            stand_ins[number] = handler
        # Ctrl-C has a BaseException of its own.
        elif callable(handler) and handler is not signal.default_int_handler:
            stand_ins[number] = _StandIn(handler)
            _replace(number, handler, stand_ins[number])


def _put_back(stand_ins: dict[int, _StandIn]) -> None:
    """Put the handlers back, except where another one was set during the call."""
    for number, stand_in in stand_ins.items():
        if getsignal(number) is stand_in:
            _replace(number, stand_in, stand_in.handler)


def _replace(number: int, old: Any, new: Any) -> None:
    """Set a Python handler, and leave the disposition of the signal in the kernel as it
    is: a library may have set a handler in C, and a caller `signal.siginterrupt`.
    """
    disposition = ctypes.create_string_buffer(_DISPOSITION_BYTES)
    _sigaction(number, None, disposition)
    found = set_handler(number, new)
    if found is not old:  # a handler that has run just now has set another one
        set_handler(number, found)
    _sigaction(number, disposition, None)


def _joined(outer: TracebackType | None, inner: TracebackType | None) -> TracebackType | None:
    """Return a traceback through the interrupted call and on through the handler."""
    if outer is None:
        return inner
    # Some instructions have no line: Python then says None, and takes none.
    line = outer.tb_lineno or outer.tb_frame.f_code.co_firstlineno
    return TracebackType(_joined(outer.tb_next, inner), outer.tb_frame, outer.tb_lasti, line)
