"""Gives the processes of a test's node name spaces of their own: a host name, and a
/dev/shm that no other node sees.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS = 0x0002_0000, 0x0400_0000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18


@cache
def are_permitted() -> bool:
    """Return True if this user may make the name spaces that `enter` needs."""
    tool = shutil.which("unshare")
    return (
        tool is not None
        and not subprocess.run([tool, "-mu", "true"], capture_output=True).returncode
    )


def enter(name: str, shm: Path) -> None:
    """Give this thread, and the threads and processes that it starts, the host name
    `name`, and the directory `shm` as /dev/shm.

    Raises OSError if that is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for result in (
        libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS),
        libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None),
        libc.mount(os.fsencode(shm), b"/dev/shm", None, ctypes.c_ulong(_MS_BIND), None),
    ):
        if result:
            raise OSError(ctypes.get_errno(), f"no name spaces for {name}")
    socket.sethostname(name)
