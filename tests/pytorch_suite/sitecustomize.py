"""Imports `classes` in pytest and in the processes that a test starts.

Python imports a module of this name when it starts.

Other programs that torch starts with this Python, such as checks of the compiler, stay
as they are, because they need no torch.
"""

from __future__ import annotations

import sys

_COMMAND = " ".join(sys.orig_argv)
if "resource_tracker" not in _COMMAND and ("pytest" in _COMMAND or "multiprocessing" in _COMMAND):
    import tests.pytorch_suite.classes  # noqa: F401
