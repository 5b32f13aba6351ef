"""Checks of kills, of recovery, and of errors of the device."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing as mp
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader

from ckptd.agent import Agent, Pending
from ckptd.agent.copy import sealer
from tests.gpu.rig import Rig, contents, known, large, rate, slots
from tests.gpu.table import Line, check, passes
from tests.support.daemons import holds

FORK = mp.get_context("fork")  # these processes begin before this one uses the device
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
SLACK = 1_000_000_000  # bytes


def child(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process that does the work, and dies with this one."""
    mine, its = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_bound, args=(work, its, *arguments))
    process.start()
    its.close()
    return process, mine


def _bound(work: Callable[..., None], *arguments: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    work(*arguments)


def train_until_killed(tell: Connection, rig: Rig) -> None:
    """Fill the state with the number of each step, and take snapshots without a pause."""
    count = 64
    state: Any = rig.tensors(count, min(rig.nbytes, 1 << 30))
    optimizer, agent = torch.optim.SGD(state.values(), lr=0.0), rig.agent("kill")
    recovered = agent.recover(state)
    first = recovered.step + 1 if recovered else 1  # new slots hold zeros
    slots(agent)
    for step in range(first, first + 100_000):
        with torch.no_grad():
            torch._foreach_zero_(list(state.values()))
            torch._foreach_add_(list(state.values()), float(step))
        if rig.simulated:
            rig.busy(300)  # longer than it takes until the kill
        pending = agent.snapshot(state, step=step, persist=False)
        tell.send(("is copied", step))
        optimizer.step()
        pending.wait("sealed", timeout=30)
        tell.send(("is sealed", step))


def look(tell: Connection, rig: Rig) -> None:
    """Recover, and say which step it was and which values it has."""
    state: Any = rig.tensors(64, min(rig.nbytes, 1 << 30))
    recovered = rig.agent("kill").recover(state)
    values = {float(value) for t in state.values() for value in t.detach().aminmax()}
    tell.send((recovered and (recovered.step, recovered.source), values))
    os._exit(0)


def sealed_before_kill(process: Any, told: Connection, seconds: float) -> int:
    """Kill a trainer that many seconds after its second copy has begun. Return the last
    step that it has sealed.
    """
    last: int = [told.recv() for _ in range(3)][1][1]
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with suppress(EOFError, OSError):  # OSError if it died while it sent
        while True:
            what, step = told.recv()
            last = step if what == "is sealed" else last
    return last


@check
def kill(rig: Rig) -> Iterator[Line]:
    """A trainer that is killed in the middle of a copy leaves the last whole snapshot."""
    chosen, right, sources = random.Random(0), 0, []
    for _ in range(rig.kills):
        process, told = child(train_until_killed, rig)
        last = sealed_before_kill(process, told, chosen.uniform(0, 0.1 if rig.simulated else 0.04))
        process, told = child(look, rig)
        found, values = told.recv()
        process.join()
        right += found is not None and found[0] >= last and values == {float(found[0])}
        sources.append(found and found[1])
    yield passes(
        "killed in the copy",
        right == rig.kills,
        f"{right} of {rig.kills} recovered whole, {sources.count('memory')} from memory",
        "all",
    )


@check
def recover(rig: Rig) -> Iterator[Line]:
    """Recovery from memory gives the same bits, and the same losses afterwards."""
    training = large(rig, 512 if not rig.simulated else 8)
    agent = rig.agent()
    agent.prepare(training.state)
    slots(agent)
    agent.snapshot(training.state, step=1, persist=False).wait("sealed", timeout=30)
    expected = training.values()
    nbytes = sum(value.nbytes for value in expected.values())
    losses = [training.step() for _ in range(5)]
    source = torch.empty(min(nbytes, 1 << 30), dtype=torch.uint8, pin_memory=not rig.simulated)
    target = torch.empty_like(source, device=rig.device)
    pinned = source.nbytes / min(
        rig.timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(3)
    )
    peak = 0
    if rig.simulated:
        rig.busy(20)  # a buffer is wanted again before its copy has begun
    else:
        torch.cuda.reset_peak_memory_stats()
        peak = torch.cuda.memory_allocated()
    taken = rig.timed(lambda: agent.recover(training.state))
    if not rig.simulated:
        peak = torch.cuda.max_memory_allocated() - peak
    found = training.values()
    same = all(torch.equal(found[name], value) for name, value in expected.items())
    yield passes("recovered bits", same, f"{len(expected)} tensors, {nbytes / 1e9:.1f} GB", "equal")
    again = [training.step() for _ in range(5)]
    yield passes("the next five losses", all(map(torch.equal, losses, again)), "", "bit-equal")
    yield rig.compared(
        "memory beside the state", peak <= SLACK, f"{peak / 1e6:.0f} MB on the device", "<= 1 GB"
    )
    yield rig.compared(
        "rate of recovery",
        nbytes / taken >= 0.25 * pinned,
        f"{taken:.2f} s, {rate(nbytes / taken)}, torch pinned {rate(pinned)}, "
        f"{nbytes / taken / pinned:.2f} x",
        ">= 0.25 x torch's pinned copy",
        ">= 16 GB/s",
    )
    # Rows and columns, as rank 1 of 2 has them.
    side, agent = 512 if rig.simulated else 8192, rig.agent("shards")
    whole = [torch.randn(side, side, device=rig.device) for _ in range(2)]
    state: dict[str, Any] = {"rows": whole[0], "columns": whole[1]}
    agent.snapshot(state, step=1, persist=False).wait("sealed", timeout=30)
    mesh = DeviceMesh(rig.device.type, [0, 1], _init_backend=False, _rank=1)
    mine = [part.chunk(2, dim)[1].contiguous() for dim, part in enumerate(whole)]
    for dim, name in enumerate(state):
        blank = torch.zeros_like(mine[dim])
        state[name] = DTensor.from_local(blank, mesh, [Shard(dim)], run_check=False)
    agent.recover(state)
    same = all(map(torch.equal, (part.to_local() for part in state.values()), mine))
    yield passes("bits of another sharding", same, f"2 x {mine[0].nbytes / 1e6:.0f} MB", "equal")


class HostMemory:
    """Context manager. `peak` is how much the memory of this process has grown meanwhile,
    without what it shares with others.
    """

    def __enter__(self) -> HostMemory:
        self.peak, self._over = 0, threading.Event()
        self._before = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @staticmethod
    def _now() -> int:
        found = psutil.Process().memory_info()
        return int(found.rss - found.shared)

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, self._now() - self._before)


@check
def new(rig: Rig) -> Iterator[Line]:
    """Recovery into an optimizer without state makes that state on the device."""
    batch = 512 if not rig.simulated else 8
    training, agent = large(rig, batch), rig.agent()
    agent.snapshot(training.state, step=1, persist=False).wait("sealed", timeout=30)
    expected = training.values()
    losses = [training.step() for _ in range(5)]
    del training
    again, before = large(rig, batch, steps=0), 0
    if not rig.simulated:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with HostMemory() as host:
        taken = rig.timed(lambda: agent.recover(again.state))
    nbytes = sum(value.nbytes for value in expected.values())
    peak = 0 if rig.simulated else torch.cuda.max_memory_allocated() - before
    found = again.values()
    same = all(torch.equal(found[name], value) for name, value in expected.items())
    yield passes("bits of a new optimizer", same, f"{len(expected)} tensors, {taken:.2f} s")
    same = all(map(torch.equal, losses, [again.step() for _ in range(5)]))
    yield passes("the next five losses of it", same, "", "bit-equal")
    yield rig.compared(
        "memory for a new optimizer",
        peak <= nbytes + SLACK and host.peak <= SLACK,
        f"{peak / 1e6:.0f} MB on the device, {host.peak / 1e6:.0f} MB on the host",
        "the state and 1 GB, 1 GB",
    )


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> int:
        return number


def fail_on_device(tell: Connection, rig: Rig) -> None:
    agent, state = rig.agent("assert"), {"w": torch.full((1 << 20,), 3.0, device=rig.device)}
    agent.snapshot(state, step=7).wait("sealed", timeout=30)
    tell.send("sealed")
    torch.zeros(1, device=rig.device)[torch.tensor([5], device=rig.device)].sum().item()


def hang(rig: Rig, seconds: float) -> Pending:
    """Take a snapshot whose copies begin after the work of a device that hangs, so long
    that simulated lanes never end it.
    """
    agent, state = rig.agent(f"hung-{seconds:.0f}"), rig.tensors(2, 8 << 20)
    optimizer = torch.optim.SGD(state.values(), lr=0.0)
    # The step makes the copies late. No call waits for them on the CPU, as on a device.
    known(agent, optimizer, state)
    rig.busy(3_600_000 if rig.simulated else 1000 * seconds)
    kept.append((agent, optimizer))
    return agent.snapshot(state, step=1, persist=False)


kept: list[tuple[Agent, torch.optim.Optimizer]] = []
"""Agents and optimizers that must not be collected before the process ends."""


def close_while_busy(tell: Connection, rig: Rig, timeout: float) -> None:
    pending, begun = hang(rig, 20), time.perf_counter()
    try:
        kept[0][0].close(timeout=timeout)
    except Exception as error:
        tell.send((time.perf_counter() - begun, type(error).__name__))
    else:
        tell.send((time.perf_counter() - begun, "closed"))
    try:
        pending.wait("sealed", timeout=5)
    except Exception as error:
        tell.send(type(error).__name__)
    else:
        tell.send("sealed")
    os._exit(0)


def end_while_busy(tell: Connection, rig: Rig) -> None:
    hang(rig, 60)
    sealer.EXIT_SECONDS = 0.5 if rig.simulated else 5.0
    tell.send("ends")
    atexit._run_exitfuncs()  # which multiprocessing does not call


def ends(process: Any, seconds: float) -> int | None:
    """Return the exit code of a process, or None if it does not end by itself in time."""
    process.join(seconds)
    code: int | None = process.exitcode
    process.kill()
    process.join()
    return code


@check
def errors(rig: Rig) -> Iterator[Line]:
    """An error of the device, or of the training, and a device that hangs."""
    seconds, timeout = (5.0, 0.5) if rig.simulated else (10.0, 5.0)
    process, told = child(fail_on_device, rig)
    told.recv()
    ended, job = ends(process, seconds), rig.place.root / "assert"
    saved = holds(lambda: job.exists() and any(job.glob("step*")), 10)
    yield passes(
        "device assert after the seal",
        ended is not None and saved,
        f"exit {ended}, saved: {saved}",
        f"ends within {seconds:.0f} s, saved",
    )
    process, told = child(close_while_busy, rig, timeout)
    limit = seconds if rig.simulated else 35.0
    taken, answer = told.recv() if told.poll(limit) else (limit, "no answer")
    outcome = told.recv() if taken < limit and told.poll(limit) else "no answer"
    process.kill()
    process.join()
    yield passes(
        "close() of a hung device",
        taken <= seconds and answer != "no answer",
        f"{taken:.1f} s, {answer} (timeout={timeout:g})",
        f"{seconds:.0f} s",
    )
    yield passes(
        "its snapshot, which was not copied", outcome == "SnapshotFailed", outcome, "SnapshotFailed"
    )
    process, told = child(end_while_busy, rig)
    told.recv()
    code = ends(process, limit)
    yield passes("exit while the device hangs", code is not None, f"exit {code}", f"{limit:.0f} s")


@check
def workers(rig: Rig) -> Iterator[Line]:
    """Worker processes that are forked while slots are page-locked disturb no copy."""
    agent: Agent = rig.agent("workers")
    state = {"w": torch.full((1 << 20,), 3.0, device=rig.device)}
    agent.prepare(state)
    slots(agent)
    loader: Any = DataLoader(Numbers(), batch_size=4, num_workers=2)
    seen, wrong = 0, 0
    for step, batch in enumerate(loader):
        with torch.no_grad():
            state["w"].fill_(float(step))
        agent.snapshot(state, step=step, persist=False).wait("sealed", timeout=30)
        wrong += not bool((contents(agent, step)["w"] == float(step)).all())
        seen += len(batch)
    yield passes("forked loader workers", (seen, wrong) == (64, 0), f"{seen} items, {wrong} wrong")
