"""Recognises an interactive session, such as a notebook, and that it runs a loop again."""

from __future__ import annotations

import sys
from types import CodeType


class InteractiveSession:
    """Knows the statement of an interactive session that took the last step.

    A cell of a notebook, or a statement at a prompt, is compiled each time that it is
    executed. So a loop that is run again is other code, and one that repeats a step by
    mistake is not.
    """

    def __init__(self) -> None:
        self._last: CodeType | None = None

    def took_step(self) -> None:
        """Remember the statement that is executed now."""
        self._last = statement()

    def runs_again(self) -> bool:
        """Return True if another statement than at the last step is executed now.

        Return False outside of an interactive session, and on a thread that executes no
        statement.
        """
        now = statement()
        return now is not None and now is not self._last


def is_interactive() -> bool:
    """Return True if a person types at a prompt, or executes the cells of a notebook."""
    if hasattr(sys, "ps1"):
        return True
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and shell() is not None


def statement() -> CodeType | None:
    """Return the code of the cell or of the statement at the prompt that is executed on
    this thread.

    Return None if there is no such code, or if the session is not interactive.
    """
    main = getattr(sys.modules.get("__main__"), "__dict__", None)
    frame = sys._getframe() if is_interactive() else None
    while frame is not None:
        typed = frame.f_globals is main or frame.f_globals.get("__name__") == "__console__"
        if typed and frame.f_code.co_name.startswith(_TYPED):
            return frame.f_code
        frame = frame.f_back
    return None


_TYPED = ("<module>", "<cell")  # as some versions of IPython call it
