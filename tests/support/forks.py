"""Processes for tests, forked from a server that has imported the slow modules, so that
each process is cheap.
"""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.context

_context: multiprocessing.context.ForkServerContext | None = None


def context() -> multiprocessing.context.ForkServerContext:
    global _context
    if _context is None:
        _context = mp.get_context("forkserver")
        slow = ["tests.support.trainers", "tests.support.daemons", "hypothesis.stateful"]
        # The first DTensor of a process imports it, which takes 0.6 s of CPU.
        _context.set_forkserver_preload([*slow, "torch._dynamo"])
    return _context
