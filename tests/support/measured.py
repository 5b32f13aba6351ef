"""Lets `make coverage-all` count the daemons and ranks that tests kill: a process that
gets SIGKILL cannot save what was measured in it.

A forked process calls `save_on_signal` at its start, and the test calls
`save_before_kill` before it kills that process. Without coverage both do nothing.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

_SIGNAL = signal.SIGUSR2
_SECONDS = 5.0  # a process that is stopped, or hangs in the kernel, saves nothing


def save_on_signal() -> None:
    """Make this process save what coverage has measured in it whenever
    `save_before_kill` asks for it. Call this on the main thread.
    """
    if not _measuring():
        return
    from coverage import Coverage

    def save(number: int, frame: FrameType | None) -> None:
        if (coverage := Coverage.current()) is not None:
            coverage.save()
        _saved(os.getpid()).touch()

    signal.signal(_SIGNAL, save)


def save_before_kill(pid: int) -> None:
    """Make the process save what coverage has measured in it, and wait until it has.

    It must have called `save_on_signal`.
    """
    if not _measuring():
        return
    saved = _saved(pid)
    saved.unlink(missing_ok=True)
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + _SECONDS
    while not saved.exists() and time.monotonic() < deadline and _runs(pid):
        time.sleep(0.002)
    saved.unlink(missing_ok=True)


def _measuring() -> bool:
    return "COVERAGE_PROCESS_CONFIG" in os.environ  # set by `patch = subprocess`


def _saved(pid: int) -> Path:
    return Path(f"/tmp/ckptd-measured-{pid}")


def _runs(pid: int) -> bool:
    """Return False if the process has ended or is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZXTt"
    except (FileNotFoundError, ProcessLookupError):
        return False
