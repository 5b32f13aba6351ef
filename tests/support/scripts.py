"""Runs scripts in forked processes that have imported torch, ckptd and the frameworks
already: a life of a training takes a tenth of the time that a new interpreter needs.

Such a process ends as an interpreter does: it waits for its threads, and calls what was
registered with `atexit`. It takes its modules apart only on request, because that costs
more than the rest.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

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


def python(
    *command: object,
    environment: dict[str, str] | None = None,
    directory: Path | None = None,
    typed: str = "",
    finalized: bool = False,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a script, `-c CODE` or `-m MODULE` with its arguments, as `subprocess.run`
    would run `python` with this command, environment and directory.

    Raises TimeoutError after `timeout` seconds, when the process has been killed.
    """
    with tempfile.TemporaryDirectory() as place:
        running = Python(
            *command,
            place=Path(place),
            environment=environment,
            directory=directory,
            typed=typed,
            finalized=finalized,
        )
        return running.communicate(timeout)


class Python:
    """A process that runs a script, `-c CODE` or `-m MODULE`, with its arguments.

    Its standard output and standard error are the files `out` and `err` in `place`.
    typed: its standard input. finalized: end it with all that the interpreter does when
    it exits, such as to stop the threads that are daemons.
    """

    def __init__(
        self,
        *command: object,
        place: Path,
        environment: dict[str, str] | None = None,
        directory: Path | None = None,
        typed: str = "",
        finalized: bool = False,
    ) -> None:
        (place / "in").write_text(typed)
        self.command = [str(word) for word in command]
        self.out, self.err = place / "out", place / "err"
        self.process = context().Process(
            target=_python,
            args=(
                self.command,
                dict(os.environ) if environment is None else environment,
                directory or Path.cwd(),
                place / "in",
                self.out,
                self.err,
                finalized,
            ),
            daemon=True,
        )
        self.process.start()

    def communicate(self, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Wait until the process has ended. Return its exit code and what it printed.

        Raises TimeoutError after `timeout` seconds, when the process has been killed.
        """
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        printed = [file.read_text() if file.exists() else "" for file in (self.out, self.err)]
        if code is None:
            raise TimeoutError(f"{self.command} has not ended within {timeout:g} s:\n{printed}")
        return subprocess.CompletedProcess(self.command, code, *printed)


def _main(
    script: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    directory: Path,
    output: Path,
) -> None:
    os.setsid()
    command = [str(script), *arguments]
    _python(command, environment, directory, Path(os.devnull), output, output, False)


def _python(
    command: list[str],
    environment: dict[str, str],
    directory: Path,
    typed: Path,
    out: Path,
    err: Path,
    finalized: bool,
) -> None:
    multiprocessing.set_start_method(None, force=True)  # the default, and not the server's
    # A script is no child of multiprocessing, and may have such children.
    multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
    os.dup2(os.open(typed, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):  # which was read before the fork
        torch.set_num_threads(int(threads))
    os.chdir(directory)
    sys.orig_argv = [sys.executable, *command]
    code = 0
    try:
        _interpret(command)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if finalized:
        gc.freeze()  # so that what the server has imported is not searched for garbage
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _interpret(command: list[str]) -> None:
    """Run a command as the module `__main__`, which stays until the process ends."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path.insert(0, "")
        exec(compile(command[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        main.__file__ = command[0]
        exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), vars(main))
