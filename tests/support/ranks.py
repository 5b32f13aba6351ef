"""Rank processes for tests: forked from a server that has imported torch, in one gloo
group, and commanded over pipes.

A function given to `call` runs on every rank with its own arguments. It keeps objects
between calls in `HERE`.
"""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptd.shared.system import failpoints
from tests.support import forks
from tests.support.measured import save_before_kill, save_on_signal

Lend = Callable[[int], AbstractContextManager["Ranks"]]
"""Gives so many ranks: `Ranks` starts them, and the fixture `pool` lends them."""
HERE: dict[str, Any] = {}
"""The objects of this rank, kept for as long as its process lives, or as a test borrows it."""

_TOLD_AT_EACH_USE = "Please use DTensor instead", "`_get_pg_default_device`", "Multiple backends"
"""Warnings of torch at each use of FSDP1, whose printing took half of the CPU time."""


class RankFailed(Exception):
    """The rank and the traceback of an exception that a function raised on that rank."""


class Ranks:
    """`world_size` running processes.

    Use it in a `with` statement, which kills them at its end.
    """

    def __init__(self, world_size: int, *, armed: dict[int, str] | None = None) -> None:
        self.world_size = world_size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = forks.context().Pipe()
            arguments = (rank, world_size, self._store.port, theirs, (armed or {}).get(rank, ""))
            process = forks.context().Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    @property
    def all_live(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in range(self.world_size):
            self.kill(rank)

    def begin(
        self, function: Callable[..., Any], *arguments: Any, only: Sequence[int] | None = None
    ) -> None:
        """Start a function on all ranks, or on those in `only`.

        `results` collects what it returns.
        """
        for rank in range(self.world_size) if only is None else only:
            self._pipes[rank].send((function, arguments))

    def results(self, *, only: Sequence[int] | None = None, timeout: float = 120.0) -> list[Any]:
        """Return the results of `begin`, by rank.

        Raises RankFailed, TimeoutError, or EOFError for a dead rank.
        """
        found = []
        for rank in range(self.world_size) if only is None else only:
            if not self._pipes[rank].poll(timeout):
                raise TimeoutError(f"rank {rank} has not answered within {timeout} s")
            ok, value = self._pipes[rank].recv()
            if not ok:
                raise RankFailed(f"rank {rank}:\n{value}")
            found.append(value)
        return found

    @property
    def any_answer(self) -> bool:
        """True if a rank has answered, or has died."""
        return any(pipe.poll() for pipe in self._pipes)

    def answers(self) -> str:
        """Return what the ranks have answered so far, as text, without waiting for any."""
        found = []
        for rank, pipe in enumerate(self._pipes):
            try:
                found.append(
                    f"rank {rank} said {pipe.recv()[1]}"
                    if pipe.poll()
                    else f"rank {rank} has not answered"
                )
            except (EOFError, ConnectionResetError):
                found.append(f"rank {rank} has died")
        return "; ".join(found)

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        only: Sequence[int] | None = None,
        timeout: float = 120.0,
    ) -> list[Any]:
        self.begin(function, *arguments, only=only)
        return self.results(only=only, timeout=timeout)

    def kill(self, rank: int) -> None:
        if self.processes[rank].is_alive():
            save_before_kill(self.processes[rank].pid)
        self.processes[rank].kill()
        self.processes[rank].join()

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)


def _serve(rank: int, world_size: int, port: int, pipe: Connection, armed: str) -> None:
    torch.set_num_threads(1)
    for text in _TOLD_AT_EACH_USE:
        warnings.filterwarnings("ignore", text)
    failpoints.arm(armed)
    save_on_signal()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


@pytest.fixture(scope="module")
def new_ranks() -> Lend:
    """New ranks for each test. A module with tests of DDP sets its `pool` to this: in
    ranks that had trained before, a backward pass has once got no result of its
    all-reduce.
    """
    return Ranks
