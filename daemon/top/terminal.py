"""Takes a terminal for a whole-screen program: keys without Enter, the size of the
window, and signals; and gives the terminal back as it was.
"""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

_KEYS: Mapping[bytes, str] = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b[H": "home", b"\x1bOH": "home",
    b"\x1b[1~": "home", b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end",
    b"\r": "enter", b"\n": "enter", b"\x1b": "escape", b"\x1a": "suspend", b"\x0c": "redraw",
}  # fmt: skip
"""The bytes that terminals send for the keys that are not letters."""
_SEQUENCE = b"0123456789;:?<=> "
"""The bytes inside an escape sequence: a letter or `~` ends it."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(Exception):
    """Raised when a signal, or the end of the terminal, ends the program.

    `code` is the exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def keys(data: bytes) -> list[str]:
    """Return the names of the keys that a terminal has sent: `up`, `enter`, `q`.

    Sequences that stand for no known key are left out.
    """
    found, at = list[str](), 0
    while at < len(data):
        end = at + 1
        if data[at : at + 1] == b"\x1b" and data[at + 1 : at + 2] in (b"[", b"O"):
            end = at + 2
            while end < len(data) and data[end] in _SEQUENCE:
                end += 1
            end += 1
        one, at = data[at:end], end
        if name := _KEYS.get(one):
            found.append(name)
        elif len(one) == 1 and one.isascii() and one.decode().isprintable():
            found.append(one.decode())
    return found


class Terminal:
    """The terminal of this process while it is taken. Made by `taken`."""

    def __init__(self, fd: int) -> None:
        self._fd, self._attributes = fd, termios.tcgetattr(fd)
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._signal = 0
        # A signal may come while this thread holds it.
        self._lock, self._closed = threading.RLock(), False

    def wake(self) -> None:
        """End the wait of `events`. Any thread may call this, also after `close`."""
        with self._lock, suppress(BlockingIOError):  # if it is full, the wait ends
            if not self._closed:
                os.write(self._wake, b"\0")

    def events(self, seconds: float) -> list[str]:
        """Wait until a key is pressed, the window is resized or `wake` is called, but not
        longer than some seconds. Return the names of the keys.

        Raises Ended.
        """
        ready, _, _ = select.select([self._fd, self._woken], [], [], max(0.0, seconds))
        if self._woken in ready:
            os.read(self._woken, 1 << 16)
        if self._signal:
            raise Ended(128 + self._signal)
        if self._fd not in ready:
            return []
        try:
            data = os.read(self._fd, 1024)
        except OSError:  # the terminal is gone
            data = b""
        if not data:
            raise Ended(128 + signal.SIGHUP)
        return keys(data)

    def take(self) -> None:
        """Have the terminal send each key at once, and Ctrl-Z as a key."""
        tty.setcbreak(self._fd)
        attributes = termios.tcgetattr(self._fd)
        attributes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(self._fd, termios.TCSADRAIN, attributes)

    def give_back(self) -> None:
        """Set the terminal as it was before."""
        try:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._attributes)
        except termios.error:  # it is gone
            pass

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that ends the program: `events` raises Ended."""
        self._signal = number
        self.wake()

    def close(self) -> None:
        """Close the pipe that ends the wait."""
        with self._lock:
            self._closed = True
            os.close(self._woken)
            os.close(self._wake)


@contextmanager
def taken(fd: int) -> Iterator[Terminal]:
    """Context manager. Takes the terminal `fd`, and gives it back whatever happens.

    Signals that would end the process do so in order, by `Ended`.
    """
    terminal = Terminal(fd)
    handlers = {number: signal.signal(number, terminal.end) for number in _ENDING}
    handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: terminal.wake())
    try:
        terminal.take()
        yield terminal
    finally:
        terminal.give_back()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        terminal.close()
