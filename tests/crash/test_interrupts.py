"""Interrupts the agent a few dozen times, once in each way."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from tests.crash import interrupts


def test_interrupted_calls_leak_nothing_and_never_hang() -> None:
    tried, problems = interrupts.run(36, 7)
    assert problems == []
    assert tried.total() == 36


def _locked(lock: threading.Lock) -> None:
    with lock:
        word = str(1)
        try:
            str(word)
        except OSError:
            pass


def test_an_interruption_at_any_line_leaves_no_lock_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupts, "PLACES", (__file__,))
    for at in range(1, 20):
        lock, lines = threading.Lock(), interrupts.Lines(at, interrupt)
        with suppress(KeyboardInterrupt), lines.traced():
            _locked(lock)
        assert not lock.locked(), f"held after an interruption at line {at}"
    assert lines.seen >= 3
