"""Real daemons for tests: they are started, killed and queried, and everything that
they leave is removed, shared memory included.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ckptd.daemon.commands import cli
from ckptd.daemon.commands.neighbours import daemon_status
from ckptd.daemon.composition import Components, opened
from ckptd.daemon.config import Config
from ckptd.daemon.engine import steps
from ckptd.shared.system import failpoints as points
from ckptd.shared.system import machine
from ckptd.shared.system.fs import FileSystem, PosixFileSystem
from tests.support.forks import context
from tests.support.measured import save_before_kill, save_on_signal

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
# Processes that a test starts use its directory: many of them are killed.
if os.environ.get("STATE_DIRECTORY_OF_TEST") != _WORKER:
    _state = tempfile.TemporaryDirectory(prefix="ckptd-test-state-")
    # For daemons and commands that are started without --state-dir.
    os.environ["STATE_DIRECTORY"] = _state.name
    os.environ["STATE_DIRECTORY_OF_TEST"] = _WORKER

READY_SECONDS = 120.0  # shared machines may be slow; the timeout measures nothing
STALL_SECONDS = "30"
"""The stall budget of daemons whose test sets none. With the default of 10 s, a machine
that is busy skips the first steps of several ranks, while their slots are being made.
"""


class Home:
    """A root, a socket with a short path, and a directory for segments.

    All are removed when the test ends.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
        self.root: Path = self.path / "root"
        self.environ: dict[str, str] = {}
        self.socket = self.path / "s"
        self.log = self.path / "daemon.log"

    @property
    def state(self) -> Path:
        """The daemon's `state_dir`, on the file system of the root, if it has one."""
        return self.root.parent / "state" if isinstance(self.root, Path) else self.path / "state"

    @property
    def journal(self) -> Path:
        """The directory of the journal. A daemon must have been started here."""
        (found,) = machine.state_directory(self.state, self.root).glob("journal-*")
        return found

    @property
    def segments(self) -> Path:
        return Path("/dev/shm") / machine.segment_directory(self.root)

    def segment_files(self) -> list[Path]:
        return sorted(self.segments.glob("*.seg")) if self.segments.exists() else []

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the facts of each event of this name in the log, which must be JSON."""
        lines = [line for line in self.log_text().splitlines() if line.startswith("{")]
        entries = [json.loads(line) for line in lines]
        return [entry["facts"] for entry in entries if entry.get("event") == name]

    def remove(self) -> None:
        shutil.rmtree(self.segments, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


class Daemon:
    """One daemon process.

    `kill` sends SIGKILL; `stop` and `died` wait for the process to end.
    """

    def __init__(
        self,
        home: Home,
        *arguments: str,
        failpoints: str = "",
        environment: dict[str, str] | None = None,
        under: tuple[str, ...] = (),
        forked: bool | Callable[[], None] = False,
    ) -> None:
        """Start the daemon.

        under: a command that replaces itself by the daemon's command, so that the
        process is the same. forked: fork the daemon instead, at a fifth of the cost,
        for tests that start thousands. It may be a function to call first in the
        process.
        """
        self.home = home
        ready, told = os.pipe()
        arguments = (
            "run",
            "--root",
            str(home.root),
            "--socket",
            str(home.socket),
            "--state-dir",
            str(home.state),
            *arguments,
        )
        environment = {
            "CKPTD_STALL_BUDGET": STALL_SECONDS,
            **home.environ,
            **(environment or {}),
            "CKPTD_FAILPOINTS": failpoints,
        }
        self.process: subprocess.Popen[bytes] | Fork
        if forked:
            self.process = Fork(
                home.log, told, arguments, environment, forked if callable(forked) else None
            )
        else:
            clean = {
                key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")
            }
            with home.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [
                        *under,
                        sys.executable,
                        "-m",
                        "ckptd.daemon",
                        *arguments,
                        "--ready-fd",
                        str(told),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[told],
                    env={**clean, **environment},
                )
        os.close(told)
        self._ready = ready
        self.ready = False

    def wait_ready(self) -> Daemon:
        """Wait until the daemon is ready.

        Raises AssertionError with the log if it ends first.
        """
        assert self.reached_ready(), (
            f"daemon ended with {self.process.wait()}:\n{self.home.log_text()}"
        )
        return self

    def reached_ready(self) -> bool:
        """Wait until the daemon is ready (True) or has ended (False)."""
        if not self.ready:
            answered, _, _ = select.select([self._ready], [], [], READY_SECONDS)
            assert answered, f"daemon neither ready nor ended:\n{self.home.log_text()}"
            self.ready = bool(os.read(self._ready, 16))
        return self.ready

    def status(self) -> dict[str, Any]:
        return daemon_status(self.home.socket)

    def kill(self) -> None:
        self._save_measured()
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def stop(self, timeout: float = 60.0) -> int:
        """Send SIGTERM. Return the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(timeout)
        self.close()
        return code

    def died(self, timeout: float = 60.0) -> int:
        """Wait until the daemon has ended by itself.

        Return the exit code, which is negative after a signal.
        """
        return self.process.wait(timeout)

    def _save_measured(self) -> None:
        if isinstance(self.process, Fork) and self.process.poll() is None:
            save_before_kill(self.process.pid)

    def close(self) -> None:
        if self.process.poll() is None:
            self._save_measured()
            self.process.kill()
        self.process.wait()
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1


class Fork:
    """A process of the `ckptd` command that is forked instead of started.

    It is used like subprocess.Popen.
    """

    def __init__(
        self,
        log: Path,
        ready: int,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        first: Callable[[], None] | None,
    ) -> None:
        everything = (log, Connection(os.dup(ready)), arguments, environment, first)
        self._process = context().Process(target=_ckptd, args=everything, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("ckptd", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the fork server reports its end a moment later
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _ckptd(
    log: Path,
    ready: Connection,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    first: Callable[[], None] | None,
) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        del os.environ[name]
    os.environ.update(environment)
    points.arm(environment["CKPTD_FAILPOINTS"])
    save_on_signal()
    if first is not None:
        first()
    try:
        cli.main([*arguments, "--ready-fd", str(os.dup(ready.fileno()))])
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not call


def warn_soon() -> None:
    """Make the daemon of this process name the ranks soon that have not come to a step."""
    steps.WAIT_SECONDS, steps.BEGUN_SECONDS = 0.3, 0.1


async def recover_only(config: Config, fs: FileSystem | None = None) -> Components:
    """Start a daemon in this process, and end it once it has recovered.

    Return its parts, which are closed.
    """
    failures: list[BaseException] = []
    async with opened(config, fs or PosixFileSystem(), failed=failures.append) as parts:
        pass
    if failures:
        raise failures[0]
    return parts


@contextmanager
def home() -> Iterator[Home]:
    made = Home()
    try:
        yield made
    finally:
        made.remove()


@contextmanager
def running(
    place: Home,
    *arguments: str,
    failpoints: str = "",
    environment: dict[str, str] | None = None,
    forked: bool | Callable[[], None] = False,
) -> Iterator[Daemon]:
    """Context manager.

    Run a daemon. If the body fails, the error's report has the end of the daemon's log.
    """
    daemon = Daemon(
        place, *arguments, failpoints=failpoints, environment=environment, forked=forked
    )
    try:
        yield daemon.wait_ready()
    except BaseException:
        print(
            f"the daemon's exit code: {daemon.process.poll()}; the end of its "
            f"log:\n{place.log_text()[-8000:]}"
        )
        raise
    finally:
        daemon.close()


def holds(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds, at most `seconds`.

    Return True once it has held: it is not asked again, since it may end to hold.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for the condition, two minutes at most.

    The time is long because machines may be slow; it measures nothing.
    """
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)
