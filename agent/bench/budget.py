"""Measures the budget of a snapshot: what each step of the call takes for itself, for
each tensor and for each MB, beside the least that this machine needs for it.

Three states of different sizes are saved to memory: one tensor, many small tensors, and
the state of the training. The steps are timed where they run.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from crc32c import crc32c

from ckptd.agent import agent as agent_module
from ckptd.agent.agent import Agent
from ckptd.agent.bench.ways import PlainCopy, State, timed
from ckptd.agent.copy.checked_copy import copy_pieces
from ckptd.agent.handover.handover import Handover
from ckptd.agent.plan.kept_plan import KeptPlan

TimedSteps = Mapping[str, tuple[Any, str]]
"""Names of steps, with the class or module that has the function, and its name."""
STEPS: TimedSteps = {
    "state dicts and names": (agent_module, "capture"),
    "plan check": (KeptPlan, "reuse"),
    "values": (agent_module, "values_document"),
    "wake-up": (Handover, "acquire"),
    "copy and checksums": (Handover, "copy"),
    "seal": (Handover, "seal_after"),
}
REST, WHOLE, CHECKSUMS = "the rest", "the whole call", "checksums, in the cache"
LIMITS = {
    "state dicts and names": "a new dict of the tensors",
    "plan check": "the address of each tensor",
    "values": "the random generators' states",
    "wake-up": "an echo by an idle process",
    "copy and checksums": "plain copy by torch",
    "seal": "pwrite of the documents",
    CHECKSUMS: "crc32c, in the cache",
}
"""The least that a machine must do for each step."""
_MANY, _ELEMENTS, _CALLS = 10_000, 64, 7
_CACHED = 1 << 17
_PAUSE = 0.05
"""The seconds between two calls, in which the daemon looks at the sealed slot, and its
processor falls asleep.
"""
_ECHO = (
    "import socket, sys\nwith socket.socket(fileno=int(sys.argv[1])) as s:\n while data := "
    "s.recv(64): s.send(data)"
)


class Cost(msgspec.Struct, frozen=True):
    """The seconds that a step takes for itself, for each tensor, and for each MB."""

    call: float
    tensor: float
    megabyte: float


class Budgeted(msgspec.Struct, frozen=True):
    """The cost of one step, and that of the limit; None if the machine sets none."""

    cost: Cost
    limit: Cost | None


class StateSize(msgspec.Struct, frozen=True):
    """The number of tensors of a state, and its size."""

    tensors: int
    megabytes: float

    @classmethod
    def of(cls, state: State) -> StateSize:
        return cls(len(state), sum(tensor.nbytes for tensor in state.values()) / 1e6)


@contextmanager
def timing(steps: TimedSteps) -> Iterator[dict[str, float]]:
    """Context manager. Gives the seconds that the calls of these functions have taken
    while it is held, by the name of the step.
    """
    times = defaultdict[str, float](float)

    def timed_call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                times[name] += time.perf_counter() - begun

        return call

    functions = {name: getattr(owner, attribute) for name, (owner, attribute) in steps.items()}
    try:
        for name, (owner, attribute) in steps.items():
            setattr(owner, attribute, timed_call(name, functions[name]))
        yield times
    finally:
        for name, (owner, attribute) in steps.items():
            setattr(owner, attribute, functions[name])


def cost(
    sizes: tuple[StateSize, StateSize, StateSize], seconds: tuple[float, float, float]
) -> Cost:
    """Return the cost of a step that takes these seconds for states of these sizes.

    The first state is so small that its seconds are those of the call itself. The others
    give two equations for the seconds of a tensor and of a MB.
    """
    (n1, n2), (m1, m2), (t1, t2) = (
        [value - values[0] for value in values[1:]]
        for values in (
            [float(size.tensors) for size in sizes],
            [size.megabytes for size in sizes],
            seconds,
        )
    )
    by = n1 * m2 - n2 * m1
    return Cost(seconds[0], max(0.0, (t1 * m2 - t2 * m1) / by), max(0.0, (n1 * t2 - n2 * t1) / by))


def budget(agent: Agent, state: State) -> dict[str, Budgeted]:
    """Save this state and two others to memory, and return the budget of each step."""
    device = next(iter(state.values())).device
    states: list[State] = [
        {"0": torch.ones(1000, dtype=torch.float32, device=device)},
        {
            str(number): torch.ones(_ELEMENTS, dtype=torch.float32, device=device)
            for number in range(_MANY)
        },
        state,
    ]
    one, many, large = (StateSize.of(each) for each in states)
    found = defaultdict[str, list[float]](list)
    limits = defaultdict[str, list[float]](list)
    echo = _echo()
    for each in states:
        times, documents = _timed(agent, each)
        for name, seconds in times.items():
            found[name].append(seconds)
        for name, seconds in (_limits(each, documents) | {"wake-up": echo}).items():
            limits[name].append(seconds)
    sizes = one, many, large

    def of(values: dict[str, list[float]], name: str) -> Cost:
        first, second, third = values[name]
        return cost(sizes, (first, second, third))

    return {
        name: Budgeted(of(found, name), of(limits, name) if name in limits else None)
        for name in found
    } | {CHECKSUMS: _checksums()}


def _timed(agent: Agent, state: State) -> tuple[dict[str, float], int]:
    """Return the medians of the seconds of each step and of the whole call, and the bytes
    of the documents in a slot.
    """
    times = defaultdict[str, list[float]](list)
    for number in range(_CALLS + 1):
        with timing(STEPS) as steps:
            pending = agent.snapshot(state, step=agent.last_step + 1, persist=False)
            pending.wait("sealed")
        if number:  # the first one plans
            for name in STEPS:
                times[name].append(steps.get(name, 0.0))
            times[REST].append(pending.stall - sum(steps.values()))
            times[WHOLE].append(pending.stall)
        time.sleep(_PAUSE)
    documents = pending.nbytes - sum(tensor.nbytes for tensor in state.values())
    return {name: median(each) for name, each in times.items()}, max(1, documents)


def _limits(state: State, documents: int) -> dict[str, float]:
    """Return the seconds that each step takes at least, for this state."""
    tensors, copy = list(state.values()), PlainCopy(state)
    data, slot = bytes(documents), os.memfd_create("slot")
    works: dict[str, Callable[[], object]] = {
        "state dicts and names": lambda: dict(state),
        "plan check": lambda: list(map(torch.Tensor.data_ptr, tensors)),
        "values": lambda: (torch.get_rng_state(), random.getstate()),
        "copy and checksums": lambda: copy(state, Path()),
        "seal": lambda: os.pwrite(slot, data, 0),
    }
    found = {
        name: median([timed(work) for _ in range(_CALLS + 1)][1:]) for name, work in works.items()
    }
    os.close(slot)
    return found


def _echo() -> float:
    """Return the seconds until another process, which is idle, has answered a message."""
    ours, theirs = socket.socketpair()
    with closing(ours):
        with closing(theirs):
            number = theirs.fileno()
            other = subprocess.Popen([sys.executable, "-c", _ECHO, str(number)], pass_fds=[number])

        found = []
        for _ in range(2 * _CALLS):
            begun = time.perf_counter()
            ours.send(b"x")
            ours.recv(64)
            found.append(time.perf_counter() - begun)
            time.sleep(_PAUSE)
    other.wait(60)
    return median(found)


def _checksums() -> Budgeted:
    """Return the cost of the checked copy of a MB on one thread, in the cache."""
    source, target = bytearray(_CACHED), bytearray(_CACHED)
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    works = (lambda: copy_pieces(address, [memoryview(target)])), (lambda: crc32c(source))
    ours, limit = (
        Cost(0.0, 0.0, median(timed(work) for _ in range(100)) / _CACHED * 1e6) for work in works
    )
    return Budgeted(ours, limit)
