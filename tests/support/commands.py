"""Runs the command `ckptd` for tests: in this process, where an execution takes some
milliseconds, or in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from click.testing import CliRunner

from ckptd.daemon.commands import cli
from tests.support import scripts

_NOTHING: dict[str, str] = {}
_NAMES = ("CKPTD_", "XDG_RUNTIME")
"""Beginnings of the names of variables that a command gets only from its test."""


def ckptd(
    *arguments: object, environment: dict[str, str] = _NOTHING
) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, with these variables. Raises what the command
    raises.
    """
    unset: dict[str, str | None] = {name: None for name in os.environ if name.startswith(_NAMES)}
    words = [str(argument) for argument in arguments]
    ended = CliRunner().invoke(
        cli.main, words, env={**unset, **environment}, prog_name="ckptd", catch_exceptions=False
    )
    return subprocess.CompletedProcess(words, ended.exit_code, ended.stdout, ended.stderr)


def forked(
    *arguments: object, environment: dict[str, str] = _NOTHING
) -> subprocess.CompletedProcess[str]:
    """Run the command in a forked process. `ckptd run` needs that, because it changes
    the log and the limits of its process.
    """
    return scripts.python("-m", "ckptd.daemon", *arguments, environment=_variables(environment))


def started(
    *arguments: object, environment: dict[str, str] = _NOTHING
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a new interpreter. One such execution costs as
    much as fifty in this process.
    """
    return subprocess.run(
        [sys.executable, "-m", "ckptd.daemon", *map(str, arguments)],
        env=_variables(environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _variables(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_NAMES)
    } | environment
