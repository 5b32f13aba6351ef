"""Runs scripts that import torch and ckptd in forked processes, each of which has imported
them already.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.support.forks import context


@dataclass(frozen=True, slots=True)
class Ended:
    """A script that has ended, with an exit code as of `subprocess`."""

    code: int
    output: str
    errors: str


def run(
    script: Path, *arguments: str, environment: dict[str, str], timeout: float = 300.0
) -> Ended:
    """Run a script in its directory, as `python script arguments`.

    environment: all variables of the script's process.

    Raises TimeoutError after `timeout` seconds, when the process has been killed.
    """
    process = context().Process(target=_main, args=(script, arguments, environment))
    process.start()
    process.join(timeout)
    late = process.exitcode is None
    process.kill()
    process.join()
    output, errors = (_beside(script, name).read_text() for name in ("output", "errors"))
    if late:
        raise TimeoutError(f"{script} has not ended within {timeout:g} s:\n{errors}")
    assert process.exitcode is not None
    return Ended(process.exitcode, output, errors)


def _beside(script: Path, name: str) -> Path:
    return script.with_name(f"{script.name}.{name}")


def _main(script: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    for number, name in ((1, "output"), (2, "errors")):
        opened = os.open(_beside(script, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(script.parent)
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
