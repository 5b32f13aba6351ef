"""Checks that need two GPUs: slots beside a device other than the first one, and NCCL
beside a copy.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.copy.numa import home_node
from ckptd.shared.system.numa import nodes
from tests.gpu.rig import Rig, contents, differing, known, median, rate, settled, slots
from tests.gpu.survival import child
from tests.gpu.table import ONE_DEVICE, ONE_NODE, Line, check, passes, skipped

REDUCED = 256 << 20  # bytes of one all-reduce


def has_context(device: int) -> bool:
    """Return True if this process has a primary context on a device of NVIDIA."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    assert error == 0, f"the driver does not tell: error {error}"
    return bool(active.value)


def share_on(node: int, slot: MappedSlot) -> float:
    """Return the share of the pages of a slot that are on a NUMA node."""
    start = slot.data.data_ptr() - slot.header.data_offset
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        address, *facts = line.split()
        if int(address, 16) == start:
            on = [fact.split("=") for fact in facts if fact[0] == "N" and fact[1].isdigit()]
            pages = {int(key[1:]): int(count) for key, count in on}
            return pages.get(node, 0) / max(1, sum(pages.values()))
    raise AssertionError("the slot is not in /proc/self/numa_maps")


@check
def devices(rig: Rig) -> Iterator[Line]:
    """A training on the last GPU takes nothing from GPU 0, nor memory of its node."""
    if rig.devices < 2:
        yield skipped("no context on GPU 0", ONE_DEVICE)
        yield skipped("pages on the node of the GPU", ONE_NODE)
        return
    torch.cuda.set_device(rig.devices - 1)
    rig.device = torch.device("cuda", rig.devices - 1)
    state: Any = rig.tensors(8, 1 << 30)
    torch.cuda.synchronize()
    before, agent = has_context(0), rig.agent()
    agent.prepare(state)
    slots(agent)
    known(agent, torch.optim.SGD(state.values(), lr=0.0), state)
    rig.change(state)
    agent.snapshot(state, step=1, persist=False).wait("sealed", timeout=30)
    wrong = differing(state, contents(agent, 1))
    agent.recover(state)
    after = has_context(0)
    yield passes(
        "no context on GPU 0",
        not after and not wrong,
        f"before: {before}, after a snapshot and a recovery: {after}, {len(wrong)} tensors wrong",
        "none",
    )
    if len(nodes()) < 2:
        yield skipped("pages on the node of the GPU", ONE_NODE)
        return
    mine, first = home_node(rig.device), home_node(torch.device("cuda", 0))
    shares = [share_on(mine, slot) for slot in slots(agent)]
    yield passes(
        "pages on the node of the GPU",
        min(shares) >= 0.95,
        f"{[f'{share:.0%}' for share in shares]} on node {mine}; GPU 0 is on {first}",
        ">= 95 %",
    )


def reduce(tell: Connection, rig: Rig, rank: int, place: str) -> None:
    """Run one of two ranks. Rank 0 sends the seconds of all-reduces without and with a
    copy beside them, how many there were, and if the copies were right.
    """
    torch.cuda.set_device(rank)
    rig.device = torch.device("cuda", rank)
    agent = rig.agent(f"nccl-{rank}")
    state: Any = rig.tensors(64, rig.nbytes)
    optimizer = torch.optim.SGD(state.values(), lr=0.0)
    agent.prepare(state)
    slots(agent)
    known(agent, optimizer, state)
    dist.init_process_group("nccl", init_method=f"file://{place}/nccl", rank=rank, world_size=2)
    data = torch.ones(REDUCED // 4, device=rig.device)

    def several(count: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                dist.all_reduce(data)

        return work

    several(5)()
    each, copy = rig.timed(several(20)) / 20, sum(t.nbytes for t in state.values()) / rig.bus()
    wanted = torch.tensor([max(5, int(copy / each))], device=rig.device)
    dist.broadcast(wanted, 0)
    work, quiet, beside, wrong = several(int(wanted.item())), [], [], 0
    for step in range(1, 6):
        work()
        quiet.append(rig.timed(work))
        rig.change(state)
        several(1)()
        rig.synchronize()  # both ranks are here
        pending = agent.snapshot(state, step=step, persist=False)
        beside.append(rig.timed(work))
        pending.wait("sealed", timeout=30)
        wrong += len(differing(state, contents(agent, step)))
        settled(agent, step)
        optimizer.step()
        several(1)()
    if rank == 0:
        tell.send((median(quiet), median(beside), int(wanted.item()), wrong == 0))
    dist.destroy_process_group()


@check
def nccl(rig: Rig) -> Iterator[Line]:
    """All-reduces between two GPUs keep their bandwidth beside copies from both."""
    if rig.devices < 2:
        yield skipped("NCCL beside a copy", ONE_DEVICE)
        return
    with tempfile.TemporaryDirectory() as place:
        started = [child(reduce, rig, rank, place) for rank in range(2)]
        first = started[0][1]
        quiet, beside, count, right = first.recv() if first.poll(80) else (1.0, 0.0, 0, False)
        for process, _ in started:
            process.join(10)
            process.kill()
            process.join()
    kept = quiet / beside if beside else 0.0
    bandwidth = rate(count * REDUCED / quiet)
    yield passes(
        "NCCL beside a copy",
        kept >= 0.95 and right,
        f"{kept:.0%} of {bandwidth}, {count} all-reduces of 256 MB, bytes right: {right}",
        ">= 95 % of the bandwidth",
    )
