"""Rank processes that several tests use, one after another: the first agent, DTensor and
collective of a process cost more than most tests.

A test borrows ranks with the fixture `pool`. When it gives them back, their agents are
closed, and what the test has changed in the processes is changed back. Ranks with which
a test has failed, that have died or that do not answer are killed, and the next test
gets new ones. A test that leaves a thread, a descriptor or a mapping behind fails.

To a daemon, these ranks end as a program does that calls `close`. Tests that kill
ranks, that recover from the memory of dead ranks, or that need processes in which
nothing has run, start `Ranks` of their own.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from ckptd.agent import Agent
from ckptd.agent.dcp.targets import leave_all
from ckptd.shared.errors import CkptdError
from ckptd.shared.system import failpoints
from tests.support.ranks import HERE, Ranks

SETTLE_SECONDS = 20.0
"""Seconds in which the threads of closed agents must have ended."""
MOST_GROUPS = 24
"""Ranks in more groups than this are replaced. Torch keeps the groups of every mesh, and
each has threads and sockets.
"""


class LeftBehind(AssertionError):
    """Raised in a test whose ranks have died, or that has left something in them."""


class Pool:
    """The ranks of one worker, by their number, that no test uses now."""

    def __init__(self, settle: float = SETTLE_SECONDS, answer: float = 120.0) -> None:
        """answer: seconds that ranks may take to give back what the test has used."""
        self._idle: dict[int, list[Ranks]] = {}
        self._settle, self._answer = settle, answer

    @contextmanager
    def ranks(self, world_size: int) -> Iterator[Ranks]:
        """Context manager. Lend ranks, which other tests may have used before."""
        idle = self._idle.setdefault(world_size, [])
        ranks = idle.pop() if idle else Ranks(world_size)
        try:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            ranks.call(_begin, store.port)
            yield ranks
            left = self._left(ranks)
        except BaseException:
            ranks.__exit__()
            raise
        problems = [f"rank {rank} has {end.left}" for rank, end in enumerate(left) if end.left]
        if problems or max(end.groups for end in left) > MOST_GROUPS:
            ranks.__exit__()
        else:
            idle.append(ranks)
        if problems:
            raise LeftBehind("; ".join(problems))

    def _left(self, ranks: Ranks) -> list[_End]:
        try:
            left = ranks.call(_end, self._settle, timeout=self._answer)
            if all(isinstance(end, _End) for end in left):
                return left
            problem = "nobody has taken the answer of a rank"
        except (EOFError, OSError, TimeoutError) as error:
            problem = f"a rank has died or hangs ({error!r})"
        raise LeftBehind(
            f"{problem}: {ranks.answers()}; a test that kills ranks starts Ranks of its own"
        )

    def close(self) -> None:
        """Kill the ranks that no test uses."""
        for idle in self._idle.values():
            while idle:
                idle.pop().__exit__()


# -- what a rank does


_before: dict[str, Any] = {}
"""The facts and settings of this process when the test has borrowed it."""


def _begin(port: int) -> None:
    """Give the default group an empty store, and remember the state of this process."""
    group = dist.group.WORLD
    assert group is not None
    kind, _ = _world.pg_map[group]
    _world.pg_map[group] = kind, dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    _before["groups"] = len(_world.pg_map)
    _before.update(
        environment=dict(os.environ),
        directory=os.getcwd(),
        signals={number: signal.getsignal(number) for number in signal.valid_signals()},
        filters=list(warnings.filters),
        loggers=_loggers(),
        dtype=torch.get_default_dtype(),
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        gradients=torch.is_grad_enabled(),
        held=_held(),
    )


class _End(NamedTuple):
    """The leftovers of a test in a rank, as text, and the number of the rank's groups."""

    left: str
    groups: int


def _end(settle: float) -> _End:
    """Close the agents, and undo what the test has done to this process.

    settle: seconds until threads must have ended.
    """
    failpoints.arm("")
    with suppress(CkptdError):
        leave_all()
    # An agent whose constructor has failed has no link.
    for agent in [
        each for each in gc.get_objects() if isinstance(each, Agent) and hasattr(each, "_link")
    ]:
        with suppress(CkptdError):
            agent.close()
        del agent
    HERE.clear()
    _restore()
    deadline = time.monotonic() + settle
    while (left := _held() - _before["held"]) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
    return _End(", ".join(sorted(left.elements())), len(_world.pg_map))


def _restore() -> None:
    os.environ.clear()
    os.environ.update(_before["environment"])
    os.chdir(_before["directory"])
    for number, handler in _before["signals"].items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)
    warnings.filters[:] = _before["filters"]  # type: ignore[index]
    for name, (level, disabled, handlers) in _before["loggers"].items():
        logger = logging.getLogger(name)
        logger.level, logger.disabled = level, disabled
        logger.handlers[:] = handlers
    torch.set_default_dtype(_before["dtype"])
    torch.set_default_device(None)
    torch.set_num_threads(_before["threads"])
    torch.use_deterministic_algorithms(_before["deterministic"])
    torch.set_grad_enabled(_before["gradients"])


def _loggers() -> dict[str, tuple[int, bool, list[logging.Handler]]]:
    names = (name for name in logging.root.manager.loggerDict if name.startswith("ckptd"))
    return {
        name: (logger.level, logger.disabled, list(logger.handlers))
        for name in ("ckptd", "ckptd.agent", *names)
        for logger in [logging.getLogger(name)]
    }


def _held() -> Counter[str]:
    """Return the threads, mappings and descriptors of this process.

    Those of torch's groups are left out: threads that Python does not know, and, if
    there are new groups, sockets and pipes.
    """
    found = Counter(f"the thread {thread.name}" for thread in threading.enumerate())
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/" in line or "memfd:" in line:
            found[f"the mapping {line.split(maxsplit=5)[-1]}"] += 1
    new_groups = len(_world.pg_map) > _before["groups"]
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{number}")
            kind = target.partition(":[")[0]
            if target.startswith("/") or not new_groups:
                found[f"the descriptor of {kind}"] += 1
    return found
