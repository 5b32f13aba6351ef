"""Saves one state in the ways that are compared: with ckptd, with PyTorch, and by the
limits of the machine.

Every way is called with a new path, and returns the seconds that it holds the training,
and the seconds until the bytes are synced.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from ckptd.agent.agent import Agent
from ckptd.shared.system.fs import closing_at_end

State = dict[str, torch.Tensor]
Times = tuple[float, float]
"""The seconds held, and the seconds from then on until the bytes are durable. If the
call does all of it, both are the same.
"""
Way = Callable[[State, Path], Times]
_BLOCK = 16 << 20


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


class WithAgent:
    """A snapshot by an agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._step = agent, 0

    def __call__(self, state: State, path: Path) -> Times:
        self._step += 1
        begun = time.perf_counter()
        pending = self._agent.snapshot(state, step=self._step)
        held = time.perf_counter() - begun
        pending.wait("durable")
        return held, time.perf_counter() - begun - held


def by_torch_save(state: State, path: Path) -> Times:
    """Save with torch.save, and sync the file."""

    def write() -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())

    taken = timed(write)
    return taken, taken


def by_dcp_save(state: State, path: Path) -> Times:
    """Save with dcp.save on two threads. It syncs its files. Needs a process group."""
    taken = timed(lambda: save(state, storage_writer=FileSystemWriter(path, thread_count=2)))
    return taken, taken


def by_dcp_async_save(state: State, path: Path, **options: Any) -> Times:
    """Save with dcp.async_save, in a thread unless these options of it say otherwise.

    Needs a process group.
    """
    begun = time.perf_counter()
    saving = async_save(state, storage_writer=FileSystemWriter(path, thread_count=2), **options)
    held = time.perf_counter() - begun
    (saving.upload_completion if isinstance(saving, AsyncSaveResponse) else saving).result()
    return held, time.perf_counter() - begun - held


class PlainCopy:
    """A copy made by torch into process memory whose pages are already faulted in.

    Its time is the lower bound for every way that copies with torch.
    """

    def __init__(self, state: State) -> None:
        self._place = [torch.ones_like(tensor, device="cpu") for tensor in state.values()]

    def __call__(self, state: State, path: Path) -> Times:
        taken = timed(lambda: torch._foreach_copy_(self._place, list(state.values())))
        return taken, taken


class DirectWrite:
    """An O_DIRECT write of as many bytes, 16 MiB at a time, with fdatasync: about the
    rate of the disk. Raises OSError without O_DIRECT.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, -(-nbytes // _BLOCK) * _BLOCK)
        for start in range(0, len(self._memory), mmap.PAGESIZE):
            self._memory[start] = 1

    def __call__(self, state: State, path: Path) -> Times:
        taken = timed(lambda: self._write(path))
        return taken, taken

    def _write(self, path: Path) -> None:
        with closing_at_end(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)) as file:
            os.posix_fallocate(file, 0, len(self._memory))
            with memoryview(self._memory) as whole:
                for start in range(0, len(whole), _BLOCK):
                    os.pwrite(file, whole[start : start + _BLOCK], start)
            os.fdatasync(file)
