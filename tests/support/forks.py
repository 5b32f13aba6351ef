"""Processes for tests, forked from a server that has imported the slow modules, so that
each process is cheap.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import multiprocessing.context
import os
from collections.abc import Callable

_context: multiprocessing.context.ForkServerContext | None = None
before_start: list[Callable[[], None]] = []
"""Functions that are called before processes are forked. They raise if the present test
must start none.
"""


def context(*frameworks: str) -> multiprocessing.context.ForkServerContext:
    """Return the context whose server has imported what tests need.

    frameworks: modules that the server imports too, if they are installed, unless it runs
    already.
    """
    global _context
    for check in before_start:
        check()
    if _context is None:
        _context = mp.get_context("forkserver")
        slow = ["tests.support.trainers", "tests.support.daemons", "hypothesis.stateful"]
        # The first DTensor of a process imports torch._dynamo, which takes 0.6 s of CPU.
        _context.set_forkserver_preload([*slow, "torch._dynamo", *frameworks])
    return _context


# What the server has imported is shared by all processes, as long as none of them goes
# over it: a collection would copy each page, and take 0.2 s of CPU.
os.register_at_fork(after_in_child=gc.freeze)
