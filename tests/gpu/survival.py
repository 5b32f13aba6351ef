"""Checks of kills, of recovery, and of errors of the device."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader

from ckptd.agent import Agent
from tests.gpu.rig import Rig, contents, large, rate, slots
from tests.gpu.table import NO_DEVICE, Line, check, passes, skipped
from tests.support.daemons import holds

FORK = mp.get_context("fork")  # these processes begin before this one uses the device
SLACK = 1_000_000_000  # bytes


def child(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    mine, its = FORK.Pipe(duplex=False)
    process = FORK.Process(target=work, args=(its, *arguments))
    process.start()
    its.close()
    return process, mine


def train_until_killed(tell: Connection, rig: Rig) -> None:
    """Fill the state with the number of each step, and take snapshots without a pause."""
    count = 64
    state: Any = rig.tensors(count, min(rig.nbytes, 1 << 30))
    optimizer, agent = torch.optim.SGD(state.values(), lr=0.0), rig.agent("kill")
    agent.recover(state)
    first = agent.last_step + 1
    slots(agent)
    for step in range(first, first + 100_000):
        with torch.no_grad():
            torch._foreach_zero_(list(state.values()))
            torch._foreach_add_(list(state.values()), float(step))
        pending = agent.snapshot(state, step=step, persist=False)
        optimizer.step()
        pending.wait("sealed", timeout=30)
        tell.send(step)


def look(tell: Connection, rig: Rig) -> None:
    """Recover, and say which step it was and which values it has."""
    state: Any = rig.tensors(64, min(rig.nbytes, 1 << 30))
    recovered = rig.agent("kill").recover(state)
    values = {float(value) for t in state.values() for value in t.detach().aminmax()}
    tell.send((recovered and (recovered.step, recovered.source), values))
    os._exit(0)


@check
def kill(rig: Rig) -> Iterator[Line]:
    """A trainer that is killed in the middle of a copy leaves the last whole snapshot."""
    chosen, right, sources = random.Random(0), 0, []
    for _ in range(rig.kills):
        process, told = child(train_until_killed, rig)
        told.recv()
        time.sleep(chosen.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        last = -1
        while told.poll():
            try:
                last = told.recv()
            except EOFError:
                break
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
    if not rig.simulated:
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
    yield passes(
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
    yield passes(
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


def close_while_busy(tell: Connection, rig: Rig) -> None:
    agent, state = rig.agent("hung"), {"w": torch.full((1 << 20,), 3.0, device=rig.device)}
    agent.snapshot(state, step=1, persist=False).wait("sealed", timeout=30)
    rig.busy(20_000)
    agent.snapshot(state, step=2, persist=False)
    begun = time.perf_counter()
    try:
        agent.close(timeout=5)
    except Exception as error:
        tell.send((time.perf_counter() - begun, type(error).__name__))
    else:
        tell.send((time.perf_counter() - begun, "closed"))
    os._exit(0)


@check
def errors(rig: Rig) -> Iterator[Line]:
    """An error of the device, a device that hangs, and forked workers."""
    if rig.simulated:
        yield skipped("device assert", NO_DEVICE)
        yield skipped("close() of a hung device", NO_DEVICE)
    else:
        process, told = child(fail_on_device, rig)
        told.recv()
        process.join(10)
        ended = process.exitcode
        process.kill()
        job = rig.place.root / "assert"
        saved = holds(lambda: job.exists() and any(job.glob("step*")), 10)
        yield passes(
            "device assert after the seal",
            ended is not None and saved,
            f"exit {ended}, saved: {saved}",
            "ends within 10 s, saved",
        )
        process, told = child(close_while_busy, rig)
        seconds, answer = told.recv() if told.poll(35) else (35.0, "no answer")
        process.kill()
        yield passes(
            "close(timeout=5) of a hung device", seconds <= 10, f"{seconds:.1f} s, {answer}", "10 s"
        )
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
