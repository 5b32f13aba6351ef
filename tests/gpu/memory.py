"""Checks of the bus, and of the page locks of slots."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from ckptd.agent import Agent
from ckptd.agent.copy import lanes, mapped_slot
from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.copy.mapping import map_segment
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.system.numa import nodes
from tests.gpu.rig import Rig, contents, differing, rate, slots
from tests.gpu.table import NO_DEVICE, Line, check, passes, skipped
from tests.support.daemons import holds, home, running

GB = 1 << 30


@check
def env(rig: Rig) -> Iterator[Line]:
    """Say where this runs."""
    shm = os.statvfs("/dev/shm")
    room = shm.f_bavail * shm.f_frsize
    name = "simulated lanes" if rig.simulated else torch.cuda.get_device_name()
    yield passes("device", True, f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    driver = Path("/proc/driver/nvidia/version")
    yield passes("driver", True, driver.read_text().split("\n")[0][:90] if driver.exists() else "-")
    yield passes(
        "machine",
        True,
        f"Linux {platform.release()}, {os.cpu_count()} CPUs, {len(nodes())} NUMA nodes, "
        f"{psutil.virtual_memory().total / 1e9:.0f} GB",
    )
    yield passes("room in /dev/shm", room > 2.5 * rig.nbytes, f"{room / 1e9:.1f} GB", "2.5 states")


class Segment:
    """A segment that is mapped, as a slot is."""

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("segment")
        os.truncate(fd, nbytes)
        self.mapped = map_segment(fd, nbytes)
        os.close(fd)
        self.address, self.nbytes = ctypes.addressof(self.mapped), nbytes

    def populate(self) -> None:
        MappedSlot._fault(self.address, self.nbytes, mapped_slot.fault_threads())

    def lock(self, device: torch.device) -> bool:
        return lanes.lock_pages(self.address, self.nbytes, device)

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self.mapped, dtype=torch.uint8)


@check
def lock(rig: Rig) -> Iterator[Line]:
    """Slots are pinned. Locking memory takes as long as it takes torch."""
    if rig.simulated:
        yield skipped("slots are pinned", NO_DEVICE)
        yield skipped("fault and lock", NO_DEVICE)
        return
    agent = rig.agent()
    agent.prepare({"w": torch.ones(1 << 20, device=rig.device)})
    pinned = [slot._bytes.is_pinned() for slot in slots(agent)]
    yield passes("slots are pinned", len(pinned) > 0 and all(pinned), f"{sum(pinned)} slots")
    torch.empty(1 << 20, pin_memory=True)
    nbytes = max(GB, rig.nbytes // 2)
    torchs = rig.timed(lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
    segment = Segment(nbytes)
    faults = rig.timed(segment.populate)
    locks = rig.timed(lambda: segment.lock(rig.device))
    yield passes(
        "fault and lock",
        faults + locks <= 2 * torchs,
        f"{faults / nbytes * 1e9:.3f} + {locks / nbytes * 1e9:.3f} s/GB, torch "
        f"{torchs / nbytes * 1e9:.3f} s/GB",
        "<= 2 x torch's pin_memory",
        "0.5 + 0.15 s/GB",
    )
    lanes.unlock_pages(segment.address, rig.device)


@check
def bus(rig: Rig) -> Iterator[Line]:
    """Copies into a slot run at the rate of torch's pinned copies."""
    if rig.simulated:
        yield skipped("copies into a locked slot", NO_DEVICE)
        return
    pinned, source = rig.bus(), torch.empty(GB, dtype=torch.uint8, device=rig.device)
    segment = Segment(GB)
    segment.populate()
    target = segment.tensor()
    pageable = GB / min(rig.timed(lambda: target.copy_(source)) for _ in range(2))
    segment.lock(rig.device)
    locked = GB / min(rig.timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(5))
    yield passes(
        "copies into a locked slot",
        locked >= 0.95 * pinned,
        f"{rate(locked)}, torch pinned {rate(pinned)}, pageable {rate(pageable)}",
        "95 % of torch's pinned copy",
        ">= 45 GB/s",
    )
    lanes.unlock_pages(segment.address, rig.device)


@check
def early(rig: Rig) -> Iterator[Line]:
    """A snapshot before there are slots waits until its slot is locked."""
    if rig.simulated:
        yield skipped("a snapshot before the slots are locked", NO_DEVICE)
        return
    agent = rig.agent("early")
    state = {"w": torch.randn(min(GB, rig.nbytes) // 4, device=rig.device)}
    pending = agent.snapshot(state, step=0, persist=False)
    pending.wait("sealed", timeout=60)
    unlocked, budget = pending._snapshot.unlocked, agent._link.stall_budget
    yield passes(
        "a snapshot before the slots are locked",
        (unlocked == 0 or pending.stall >= budget) and not differing(state, contents(agent, 0)),
        f"held {pending.stall:.2f} s, {unlocked} bytes not locked",
        f"locked, or held {budget:.0f} s",
    )


@check
def halves(rig: Rig) -> Iterator[Line]:
    """A slot that is locked in pieces gets every byte. Locks end inside of tensors."""
    if rig.simulated:
        yield skipped("slots that are locked in pieces", NO_DEVICE)
        return
    with patch.object(lanes, "LOCKED", 40 << 20):
        agent = rig.agent("halves")
        state = {
            "w": torch.randn(5000, 7000, device=rig.device),
            "b": torch.randn(17, device=rig.device),
            "t": torch.randn(3000, 9000, device=rig.device).t(),
        }
        agent.snapshot(state, step=0, persist=False).wait("sealed", timeout=60)
        locks = [len(slot._unlocks) for slot in slots(agent)]  # once they are locked
        state["w"] += 1
        agent.snapshot(state, step=1, persist=False).wait("sealed", timeout=60)
        wrong = differing(state, contents(agent, 1))
    yield passes(
        "slots that are locked in pieces",
        min(locks) > 1 and not wrong,
        f"{locks} locks, {len(wrong)} tensors wrong",
        "every byte arrives",
    )


@check
def address(rig: Rig) -> Iterator[Line]:
    """A slot at the address of one that was dropped gets the bytes.

    The first line shows what happens if locked memory is unmapped. It asserts nothing:
    a driver may notice.
    """
    if rig.simulated:
        yield skipped("what was locked before is unlocked", NO_DEVICE)
        return
    nbytes, source = 64 << 20, torch.full((64 << 20,), 7, dtype=torch.uint8, device=rig.device)
    first = Segment(nbytes)
    first.populate()
    runtime: Any = torch.cuda.cudart()
    register = int(runtime.cudaHostRegister(first.address, nbytes, 1))
    assert register == 0
    place = first.address
    del first
    again = Segment(nbytes)
    again.populate()
    same, answer = again.address == place, int(runtime.cudaHostRegister(again.address, nbytes, 1))
    target = again.tensor()
    target.copy_(source, non_blocking=True)
    rig.synchronize()
    yield passes(
        "unmapped while locked: the driver",
        True,
        f"same address: {same}, error {answer}, bytes arrive: {bool((target == 7).all())}",
    )
    target.zero_()
    locked = again.lock(rig.device)
    target.copy_(source, non_blocking=True)
    rig.synchronize()
    yield passes(
        "what was locked before is unlocked",
        locked and bool((target == 7).all()),
        "bytes arrive",
    )
    lanes.unlock_pages(again.address, rig.device)


@check
def lost(rig: Rig) -> Iterator[Line]:
    """Slots that the daemon has lost are replaced, and the new ones get the bytes."""
    refused: list[int] = []

    def counted(address: int, length: int, device: torch.device) -> bool:
        locked = lanes.lock_pages(address, length, device)
        refused.extend([] if locked else [address])
        return locked

    state = {"w": torch.ones(1 << 22, device=rig.device)}
    with (
        home() as place,
        running(place) as daemon,
        patch.object(mapped_slot, "lock_pages", counted),
    ):
        agent = Agent("lost", socket=place.socket)
        # Durable, so that the next daemon knows this attempt without its segments.
        agent.snapshot(state, step=1).wait("durable", timeout=30)
        old = {slot._bytes.data_ptr() for slot in slots(agent)}
        daemon.kill()
        free = next(slot for slot in slots(agent) if slot.header.state != SlotState.SEALED)
        (place.segments / free.name).unlink()
        with running(place):
            assert holds(lambda: len(slots(agent)) == 1, 30), "the slot is not missed"
            state["w"] = torch.full((1 << 22,), 2.0, device=rig.device)
            state["more"] = torch.ones(1 << 20, device=rig.device)  # needs larger slots
            agent.snapshot(state, step=2, persist=False).wait("sealed", timeout=30)
            values = contents(agent, 2)["w"]
            new = {slot._bytes.data_ptr() for slot in slots(agent)}
    yield passes(
        "the next slots get the bytes",
        bool((values == 2).all()) and not refused,
        f"{len(old & new)} of {len(new)} at an old address, {len(refused)} locks refused",
    )
