"""Checks of what a snapshot costs the training, beside torch's own copies."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from tests.gpu.rig import (
    Rig,
    Training,
    contents,
    differing,
    known,
    large,
    median,
    ms,
    rate,
    settled,
    slots,
)
from tests.gpu.table import CHECKS, NO_DEVICE, Line, check, passes, skipped

QUEUED = 300.0  # milliseconds of work that the device has to do at the call
EACH = 260 << 10  # bytes of a tensor, at least
COUNTS = {8: "2 ms", 320: "5 ms", 3000: "20 ms", 30000: "200 ms"}
"""Numbers of tensors, with the time in which the call should return."""


def holds(rig: Rig, count: int) -> Iterator[Line]:
    """Compare the time of the call on an idle and on a busy device."""
    nbytes = rig.nbytes if rig.simulated else max(rig.nbytes, count * EACH)
    if rig.simulated and count > 3000:
        yield skipped(f"bytes of {count} tensors", NO_DEVICE)
        yield skipped(f"held, {count} tensors", NO_DEVICE)
        return
    state: Any = rig.tensors(count, nbytes)
    optimizer, agent = torch.optim.SGD(state.values(), lr=0.0), rig.agent(f"held-{count}")
    agent.prepare(state)
    slots(agent)
    known(agent, optimizer, state)
    held: dict[bool, list[float]] = {False: [], True: []}
    some, wrong = dict(list(state.items())[:: max(1, count // 100)]), []
    for step in range(1, 7):
        queued = step % 2 == 0
        rig.change(state)
        rig.synchronize()
        rig.busy(QUEUED if queued else 0)
        pending = agent.snapshot(state, step=step, persist=False)
        optimizer.step()
        held[queued].append(pending.stall)
        pending.wait("sealed", timeout=30)
        wrong += differing(some, contents(agent, step))  # of a slot that is sealed just now
        settled(agent, step)
    yield passes(f"bytes of {count} tensors", not wrong, f"{len(wrong)} of them wrong", "equal")
    idle, busy = median(held[False]), median(held[True])
    yield rig.compared(
        f"held, {count} tensors",
        busy <= 2 * idle + 0.002,
        f"busy {ms(busy)}, idle {ms(idle)}, {busy / idle:.1f} x, {nbytes / 1e9:.1f} GB",
        "busy <= 2 x idle + 2 ms",
        f"<= {COUNTS[count]}",
    )


def held(count: int, rig: Rig) -> Iterator[Line]:
    """The call does not wait for the device, however many tensors there are."""
    yield from holds(rig, count)


CHECKS.update({f"held{count}": partial(held, count) for count in COUNTS})


@check
def one_queue(rig: Rig) -> Iterator[Line]:
    """The same with one queue to the device, as Megatron sets it."""
    if rig.simulated:
        yield skipped("held, 3000 tensors", NO_DEVICE)
        return
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    yield from holds(rig, 3000)


@check
def sealed(rig: Rig) -> Iterator[Line]:
    """A slot is sealed after the time that the bus needs for its bytes."""
    pinned, state = rig.bus(), rig.tensors(320, rig.nbytes)
    optimizer, agent = torch.optim.SGD(state.values(), lr=0.0), rig.agent()
    agent.prepare(state)
    slots(agent)
    nbytes, times = sum(t.nbytes for t in state.values()), []
    for step in range(5):
        rig.change(state)
        rig.synchronize()
        begun, cpu = time.perf_counter(), time.process_time()
        pending = agent.snapshot(state, step=step, persist=False)
        pending.wait("sealed", timeout=30)
        times.append((time.perf_counter() - begun, time.process_time() - cpu))
        settled(agent, step)
        optimizer.step()
    first, best = nbytes / times[0][0], nbytes / median(t for t, _ in times[1:])
    for what, found, bar in (
        ("first snapshot", first, 0.75),
        ("rate until sealed", best, 0.85),
    ):
        yield rig.compared(
            what,
            found >= bar * pinned,
            f"{rate(found)}, torch pinned {rate(pinned)}, {found / pinned:.2f} x",
            f">= {bar} x torch's pinned copy",
        )
    yield passes("bytes of 320 tensors", not differing(state, contents(agent, 4)), "", "equal")
    yield rig.compared("CPU time until sealed", True, ms(median(cpu for _, cpu in times[1:])))


STEPS = 8  # between two snapshots
BATCH = 4096


@check
def steps(rig: Rig) -> Iterator[Line]:
    """Steps lose less time to a snapshot than to dcp.async_save's pinned stager."""
    training = large(rig, BATCH if not rig.simulated else 8)
    agent = rig.agent()
    agent.prepare(training.state)
    slots(agent)
    known(agent, training.optimizer, training.state)

    def run() -> None:
        for _ in range(STEPS):
            training.step()

    run()
    usual, pending = rig.timed(run) / STEPS, list[Any]()

    def snapshot() -> None:
        training.step()
        pending.append(agent.snapshot(training.state, step=len(pending) + 1, persist=False))
        run()

    for seconds in (0.2, 1.0) if rig.long and not rig.simulated else (0.2,):
        if not rig.simulated:
            rows = max(1, round(BATCH * seconds / usual))
            training.data = torch.randn(rows, training.data.shape[1], device=rig.device)
            run()
        quiet, beside = [rig.timed(run) for _ in range(3)], []
        for _ in range(3):
            beside.append(rig.timed(snapshot))
            pending[-1].wait("sealed", timeout=30)
            settled(agent, len(pending))
        step, spread = median(quiet) / STEPS, max(quiet) - min(quiet)
        lost = median(beside) - (STEPS + 1) * step
        yield from _compared(rig, training, seconds, step, lost, spread)
    expected = training.values()
    rig.busy(200)
    pending.append(agent.snapshot(training.state, step=len(pending) + 1, persist=False))
    run()
    pending[-1].wait("sealed", timeout=30)
    wrong = differing(expected, contents(agent, len(pending)))
    yield passes("bytes beside steps", not wrong, f"{len(wrong)} tensors wrong", "equal")


def _compared(
    rig: Rig, training: Training, seconds: float, step: float, lost: float, spread: float
) -> Iterator[Line]:
    """Yield the lines about the seconds that steps have lost to a snapshot.

    seconds: of a step, about. step: of a step, as measured. spread: of several such steps.
    """
    nbytes = training.nbytes
    copy = nbytes / rig.bus()
    figure = f"{ms(lost)} of steps of {ms(step)}, {100 * lost / step:.1f} %, spread {ms(spread)}"
    yield rig.compared(
        f"lost to a snapshot, {seconds:g} s",
        lost <= max(0.5 * copy, spread),
        f"{figure}, {nbytes / 1e9:.1f} GB",
        f"<= half of the copy ({ms(copy)})",
    )
    yield rig.compared(
        f"lost, share of a step of {seconds:g} s",
        lost <= max(0.01 * step, spread),
        f"{100 * lost / step:.1f} %",
        "<= 1 % of a step, or the spread",
    )
    if seconds > 0.2:
        return
    if rig.simulated:
        yield skipped("lost to dcp.async_save, pinned", NO_DEVICE)
        return
    other = median(async_saves(rig, training)) - (STEPS + 1) * step
    yield passes(
        "lost to dcp.async_save, pinned",
        lost <= max(other, spread),
        f"{ms(other)}, {other / max(lost, spread):.1f} x a snapshot's",
        "a snapshot's is less",
    )


def async_saves(rig: Rig, training: Training) -> list[float]:
    """Return the seconds of steps around each save of dcp.async_save."""
    place, found = tempfile.mkdtemp(dir="/dev/shm"), []
    dist.init_process_group("gloo", init_method=f"file://{place}/s", rank=0, world_size=1)
    options = StagingOptions(
        use_pinned_memory=True,
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=True,
    )
    saving: list[Future[Any]] = []

    def save() -> None:
        training.step()
        stager = DefaultStager(options)  # of torch 2.11, one serves one save
        flat = {**training.model.state_dict()}
        flat |= {
            f"{n}.{key}": value
            for n, state in enumerate(training.optimizer.state.values())
            for key, value in state.items()
        }
        answer = async_save(
            flat, storage_writer=FileSystemWriter(f"{place}/d"), async_stager=stager
        )
        assert isinstance(answer, AsyncSaveResponse)
        saving.extend([answer.staging_completion, answer.upload_completion])
        training.loss().backward()
        answer.staging_completion.result()  # before the optimizer writes to what is copied
        training.optimizer.step()
        training.optimizer.zero_grad()
        for _ in range(STEPS - 1):
            training.step()

    try:
        for number in range(3):
            taken = rig.timed(save)
            saving[-1].result()
            shutil.rmtree(f"{place}/d")
            if number:  # the first one allocates the buffers
                found.append(taken)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        dist.destroy_process_group()
    return found


@check
def item(rig: Rig) -> Iterator[Line]:
    """Small copies of the training wait little for the copy of a snapshot."""
    if rig.simulated:
        yield skipped("`.item()` beside a copy", NO_DEVICE)
        return
    state = rig.tensors(8, rig.nbytes)
    optimizer, agent = torch.optim.SGD(state.values(), lr=0.0), rig.agent()
    known(agent, optimizer, state)
    slots(agent)
    small = torch.ones((), device=rig.device)

    def waits(until: Any) -> list[float]:
        times = []
        while not until():
            begun = time.perf_counter()
            (small + 1).item()
            times.append(time.perf_counter() - begun)
        return times

    calls = iter(range(500))
    quiet = waits(lambda: next(calls, None) is None)
    beside: list[float] = []
    for step in range(1, 4):
        pending = agent.snapshot(state, step=step, persist=False)
        beside += waits(lambda: pending.state != "staged")  # noqa: B023
        pending.wait("sealed", timeout=30)
        settled(agent, step)
        optimizer.step()
    worst, usual = max(beside), sorted(quiet)[int(0.99 * len(quiet))]
    yield passes(
        "`.item()` beside a copy",
        worst - usual <= 0.010,
        f"at most {ms(worst)}, median {ms(median(beside))}; else {ms(usual)} (p99)",
        "<= 10 ms more",
    )


@check
def full(rig: Rig) -> Iterator[Line]:
    """A snapshot succeeds on a device that has 64 MB left, and one of an agent that finds
    the device full.
    """
    if rig.simulated:
        yield skipped("64 MB left, expandable segments", NO_DEVICE)
        yield skipped("24 MB left for a new agent", NO_DEVICE)
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    state = rig.tensors(3000, 512 << 20)
    optimizer, agent = torch.optim.SGD(state.values(), lr=0.0), rig.agent()
    known(agent, optimizer, state)
    slots(agent)
    free, _ = torch.cuda.mem_get_info()
    filled = torch.empty(free - (64 << 20), dtype=torch.uint8, device=rig.device)
    before, held = torch.cuda.memory_stats()["num_alloc_retries"], []
    for step in range(1, 4):
        rig.synchronize()
        pending = agent.snapshot(state, step=step, persist=False)
        held.append(pending.stall)
        pending.wait("sealed", timeout=30)
        settled(agent, step)
        optimizer.step()
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
    right = not differing(state, contents(agent, 3))
    yield passes(
        "64 MB left, expandable segments",
        right and retries == 0,
        f"held {ms(median(held))}, {retries} allocator retries beside {filled.nbytes / 1e9:.0f} GB",
        "right, no retry",
    )
    agent.close()
    more = torch.empty(40 << 20, dtype=torch.uint8, device=rig.device)
    late = rig.agent("late")
    late.prepare(state)
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    pending = late.snapshot(state, step=1, persist=False)
    pending.wait("sealed", timeout=30)
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
    right = not differing(state, contents(late, 1))
    yield passes(
        "24 MB left for a new agent",
        right and retries == 0,
        f"held {ms(pending.stall)}, {retries} allocator retries beside {more.nbytes / 1e6:.0f} MB",
        "right, no retry",
    )
