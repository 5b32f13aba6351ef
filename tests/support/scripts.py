"""Runs scripts in forked processes that have imported torch, ckptd and the frameworks
already: a life of a training takes a tenth of the time that a new interpreter needs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.forks import context


@dataclass(frozen=True, slots=True)
class Ended:
    """A script that has ended, with an exit code as of `subprocess`."""

    code: int
    output: str


class Script:
    """A script that runs as `python script arguments`, in a process group of its own.

    environment: all variables of its process. directory: where it runs. Standard output
    and standard error are appended to the file `output`.
    """

    def __init__(
        self,
        script: Path,
        *arguments: str,
        environment: dict[str, str],
        directory: Path,
        output: Path,
    ) -> None:
        self._process = context().Process(
            target=_main, args=(script, arguments, environment, directory, output)
        )
        self._process.start()

    @property
    def code(self) -> int | None:
        """The exit code, or None while the script runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the script and its children with SIGKILL."""
        assert self._process.pid is not None
        while self.code is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
                break
            except ProcessLookupError:  # it has no group of its own yet
                time.sleep(0.001)
        self._process.join()


def run(
    script: Path, *arguments: str, environment: dict[str, str], timeout: float = 300.0
) -> Ended:
    """Run a script in its directory until its end.

    Raises TimeoutError after `timeout` seconds, when the script has been killed.
    """
    output = script.with_name(f"{script.name}.output")
    output.unlink(missing_ok=True)
    running = Script(
        script, *arguments, environment=environment, directory=script.parent, output=output
    )
    running._process.join(timeout)
    code = running.code
    if code is None:
        running.kill()
        raise TimeoutError(f"{script} has not ended within {timeout:g} s:\n{output.read_text()}")
    return Ended(code, output.read_text())


def _main(
    script: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    directory: Path,
    output: Path,
) -> None:
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # the default, and not the server's
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.environ.clear()
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):  # which was read before the fork
        torch.set_num_threads(int(threads))
    os.chdir(directory)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
