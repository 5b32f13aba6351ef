"""The open descriptors of this process, for tests that must leave none behind.

Agents of earlier tests may still be connecting on threads of their own, so the number
of all descriptors tells nothing.
"""

from __future__ import annotations

import os
from pathlib import Path


def opened(directory: Path) -> list[str]:
    """Return the paths of all open files and directories under `directory`, one for
    each descriptor.
    """
    return [target for target in _targets() if Path(target).is_relative_to(directory)]


def not_sockets() -> list[str]:
    """Return what all descriptors lead to that are not sockets: paths, and names like
    `pipe:[4711]`.
    """
    return [target for target in _targets() if not target.startswith("socket:")]


def _targets() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the descriptor that listed them
            continue
    return sorted(found)
