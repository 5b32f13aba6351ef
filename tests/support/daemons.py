"""Real daemons for tests: started, killed, asked, and cleaned up after, shared memory included."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptd.daemon.app import App
from ckptd.daemon.report import daemon_status
from ckptd.shared import names

READY_SECONDS = 60.0  # machines are shared; nothing is measured here


class Home:
    """A root, a socket with a short path, and the place of its segments; gone when the test is."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
        self.root = self.path / "root"
        self.socket = self.path / "s"
        self.log = self.path / "daemon.log"

    @property
    def segments(self) -> Path:
        return Path("/dev/shm") / names.segment_directory(self.root)

    def segment_files(self) -> list[Path]:
        return sorted(self.segments.glob("*.seg")) if self.segments.exists() else []

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def remove(self) -> None:
        shutil.rmtree(self.segments, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


class Daemon:
    """One process. `died` and `stop` wait for it; `kill` is SIGKILL."""

    def __init__(
        self, home: Home, *arguments: str, failpoints: str = "", environment: dict[str, str] | None = None, under: tuple[str, ...] = ()
    ) -> None:
        """`under`: a command that runs the daemon's in its own process."""
        self.home = home
        ready, told = os.pipe()
        command = [sys.executable, "-m", "ckptd.daemon", "run", "--root", str(home.root), "--socket", str(home.socket)]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
        with home.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*under, *command, "--ready-fd", str(told), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[told],
                env={**clean, **(environment or {}), "CKPTD_FAILPOINTS": failpoints},
            )
        os.close(told)
        self._ready = ready
        self.ready = False

    def wait_ready(self) -> Daemon:
        """Raises AssertionError with the log if it ends first."""
        assert self.reached_ready(), f"daemon ended with {self.process.wait()}:\n{self.home.log_text()}"
        return self

    def reached_ready(self) -> bool:
        """Wait until it is ready (True) or has ended (False)."""
        if not self.ready:
            answered, _, _ = select.select([self._ready], [], [], READY_SECONDS)
            assert answered, f"daemon neither ready nor ended:\n{self.home.log_text()}"
            self.ready = bool(os.read(self._ready, 16))
        return self.ready

    def status(self) -> dict[str, Any]:
        return daemon_status(self.home.socket)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def stop(self, timeout: float = 60.0) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(timeout)
        self.close()
        return code

    def died(self, timeout: float = 60.0) -> int:
        """The exit code (negative: the signal) once it has ended by itself."""
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1


class Brief(App):
    """In this process: it recovers, and ends."""

    async def _serve(self, listener: Any) -> None:
        pass


@contextmanager
def home() -> Iterator[Home]:
    made = Home()
    try:
        yield made
    finally:
        made.remove()


@contextmanager
def running(place: Home, *arguments: str, failpoints: str = "", environment: dict[str, str] | None = None) -> Iterator[Daemon]:
    daemon = Daemon(place, *arguments, failpoints=failpoints, environment=environment)
    try:
        yield daemon.wait_ready()
    finally:
        daemon.close()
