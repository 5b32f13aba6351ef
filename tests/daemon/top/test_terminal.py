"""Tests how a terminal is taken and given back, on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import termios
from collections.abc import Iterator

import pytest

from ckptd.daemon.top.terminal import Ended, Terminal, keys, taken
from tests.support.cases import each_case


@each_case(
    ("sent", "found"),
    [
        (b"q", ["q"]),
        (b"jk\r", ["j", "k", "enter"]),
        (b"\x1b[A\x1b[B\x1bOA\x1bOB", ["up", "down", "up", "down"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[1;5Cq", ["q"]),
        (b"\x1b[<0;3;4Mq", ["q"]),
        (b"\x1b[", []),
        (b"\x1aj\x00\xff", ["suspend", "j"]),
        (b"", []),
    ],
)
def test_keys_are_told_apart(sent: bytes, found: list[str]) -> None:
    assert keys(sent) == found


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """The two ends of a pseudo-terminal: ours, and that of the program."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    for end in (ours, theirs):
        os.close(end)


def is_woken(terminal: Terminal) -> bool:
    """Return True if the next wait ends at once."""
    return bool(select.select([terminal._woken], [], [], 0)[0])


def test_keys_come_at_once_and_wake_ends_the_wait(ends: tuple[int, int]) -> None:
    ours, theirs = ends
    with taken(theirs) as terminal:
        assert termios.tcgetattr(theirs)[3] & (termios.ICANON | termios.ECHO) == 0
        os.write(ours, b"j\x1a")
        assert terminal.events(60) == ["j", "suspend"]
        for _ in range(2):
            terminal.wake()
        assert is_woken(terminal)
        assert terminal.events(60) == []
        assert not is_woken(terminal)
    terminal.wake()  # a thread may be late


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_in_order(ends: tuple[int, int], number: signal.Signals) -> None:
    before, handler = termios.tcgetattr(ends[1]), signal.getsignal(number)
    with taken(ends[1]) as terminal:
        assert termios.tcgetattr(ends[1]) != before
        signal.raise_signal(number)
        with pytest.raises(Ended) as ended:
            terminal.events(60)
    assert ended.value.code == 128 + number
    assert termios.tcgetattr(ends[1]) == before
    assert signal.getsignal(number) == handler


def test_a_resized_window_ends_the_wait(ends: tuple[int, int]) -> None:
    with taken(ends[1]) as terminal:
        assert not is_woken(terminal)
        signal.raise_signal(signal.SIGWINCH)
        assert is_woken(terminal)
        assert terminal.events(60) == []


def test_an_error_gives_the_terminal_back(ends: tuple[int, int]) -> None:
    before = termios.tcgetattr(ends[1])
    with pytest.raises(ZeroDivisionError), taken(ends[1]):
        raise ZeroDivisionError
    assert termios.tcgetattr(ends[1]) == before


def test_the_end_of_the_terminal_ends_the_program() -> None:
    ours, theirs = pty.openpty()
    terminal = Terminal(theirs)
    os.close(ours)
    with pytest.raises(Ended) as ended:
        terminal.events(60)
    assert ended.value.code == 128 + signal.SIGHUP
    terminal.give_back()
    terminal.close()
    os.close(theirs)
