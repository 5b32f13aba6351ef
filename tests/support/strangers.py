"""Another process that may only read files, and locks them.

It has another user if the tests run as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

NOBODY = 65534
_AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")

_HOLD = """
import fcntl, os, struct, sys
kinds = {"flock-ex": fcntl.LOCK_EX, "flock-sh": fcntl.LOCK_SH}
for path in sys.argv[2:]:
    fd = os.open(path, os.O_RDONLY)
    if sys.argv[1] in kinds:
        fcntl.flock(fd, kinds[sys.argv[1]] | fcntl.LOCK_NB)
    else:
        kind = fcntl.F_RDLCK if sys.argv[1] == "ofd-read" else fcntl.F_WRLCK
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))
print("held", flush=True)
sys.stdin.read()
"""

KINDS = ("flock-ex", "flock-sh", "ofd-read")
"""Every lock that a process can take on a file that it may only read."""


@contextmanager
def holding(kind: str, *paths: Path) -> Iterator[int]:
    """Context manager.

    Run a process that holds a lock of this kind on each path. Yield its pid.

    The process runs as the user `nobody` if `is_another_user()`. Otherwise it has the
    user of the tests, but opens the files for reading only.
    """
    command = [sys.executable, "-I", "-S", "-c", _HOLD, kind, *map(str, paths)]
    if is_another_user():
        command = [*_AS_NOBODY, *command]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n", f"{kind} of {paths} was not granted"
        yield process.pid
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(60)


@cache
def is_another_user() -> bool:
    """Return True if `holding` runs as another user: the tests run as root, and the
    user `nobody` can run this Python.
    """
    if os.geteuid() or not shutil.which("setpriv"):
        return False
    return (
        subprocess.run(
            [*_AS_NOBODY, sys.executable, "-I", "-S", "-c", ""], capture_output=True, check=False
        ).returncode
        == 0
    )


@contextmanager
def open_place() -> Iterator[Path]:
    """Context manager.

    Yields a new directory that every user may list, unlike pytest's own.
    """
    place = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
    try:
        place.chmod(0o755)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
