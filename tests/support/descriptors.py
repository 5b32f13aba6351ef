"""The open descriptors of this process, for tests that must leave none behind."""

from __future__ import annotations

import os
from pathlib import Path


def opened(directory: Path) -> list[str]:
    """Return the paths of all open files and directories under `directory`, one for each descriptor."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor that listed them
            continue
        if Path(path).is_relative_to(directory):
            found.append(path)
    return sorted(found)
