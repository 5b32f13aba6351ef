"""Tells whether ckptd was installed with its native code, which NumPy replaces where no C
compiler was found.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache

_MODULES = (
    "ckptd.shared.codecs._planes",
    "ckptd.shared.codecs._delta",
    "ckptd.shared.codecs._huffman",
    "ckptd.shared.formats._non_finite",
)
"""The modules in C that every processor has whose words are little-endian. A compiler
that makes them makes those of the agent, too.
"""


def missing() -> list[str]:
    """Return the names of the modules in C that this installation does not have."""
    found = []
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            found.append(name.rpartition(".")[2])
    return found


def problem() -> str:
    """Return a sentence about native code that is missing, or "" if all is there."""
    if not (names := missing()):
        return ""
    return (
        f"ckptd was installed without its native code ({', '.join(names)}), so that encoding and "
        "counting take about three times as long: install a C compiler and the headers of Python "
        "(gcc, python3-dev), then install ckptd again"
    )


@cache
def warn_once(log: logging.Logger) -> None:
    """Log a warning if native code is missing, once in each process."""
    if text := problem():
        log.warning("%s", text)
