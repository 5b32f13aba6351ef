"""Checks that snapshots are not torn, whatever the training enqueues next, and that
graphs can be captured beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptd.agent import Agent
from ckptd.agent.copy import mapped_slot
from ckptd.agent.copy.lanes import StreamLane
from ckptd.shared.errors import SnapshotFailed
from tests.gpu.rig import Rig, Training, contents, differing, known, slots
from tests.gpu.simulated import SimulatedLane
from tests.gpu.table import NO_DEVICE, Line, check, passes, skipped
from tests.oracle.tensors import EightBit

SNAPSHOTS = 25  # of each kind of training
SIMULATED = 4


def training(rig: Rig, make: Callable[[Any], torch.optim.Optimizer]) -> Training:
    return Training(rig.device, 64 if rig.simulated else 1024, 4, make)


def adam(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


def with_optimizer(options: dict[str, Any]) -> Callable[[Rig], tuple[Training, Callable[[], Any]]]:
    def made(rig: Rig) -> tuple[Training, Callable[[], Any]]:
        found = training(rig, adam(**options))
        return found, found.step

    return made


def with_average(rig: Rig) -> tuple[Training, Callable[[], Any]]:
    found = training(rig, adam())
    found.average()
    return found, found.step


def in_backward(rig: Rig) -> tuple[Training, Callable[[], Any]]:
    found = training(rig, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9))
    for parameter in found.model.parameters():
        own = torch.optim.SGD([parameter], lr=1e-2, momentum=0.9)

        def apply(parameter: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(apply)
    return found, lambda: found.loss().backward()


def loading(rig: Rig) -> tuple[Training, Callable[[], Any]]:
    found = training(rig, adam())
    other = {name: torch.zeros_like(value) for name, value in found.model.state_dict().items()}

    def step() -> None:
        found.step()
        found.model.load_state_dict(other)

    return found, step


def replayed(rig: Rig) -> tuple[Training, Callable[[], Any]]:
    found = training(rig, adam(capturable=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            found.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.step()
    return found, graph.replay


def clipped(rig: Rig) -> tuple[Training, Callable[[], Any]]:
    """The training writes to its parameters by `.data`, after its optimizer."""
    found = training(rig, adam())

    def step() -> None:
        found.step()
        for parameter in found.model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    return found, step


KINDS: dict[str, Callable[[Rig], tuple[Training, Callable[[], Any]]]] = {
    "fused": with_optimizer({"fused": True}),
    "foreach": with_optimizer({"foreach": True}),
    "single tensor": with_optimizer({"foreach": False}),
    "EMA copy": with_average,
    "optimizer in backward": in_backward,
    "load_state_dict": loading,
    "writes through .data": clipped,
    "replay of a graph": replayed,
}


def torn_in(
    rig: Rig, agent: Agent, found: Training, step: Callable[[], Any], first: int, count: int
) -> int:
    """Return how many of `count` snapshots are torn, of a training that goes on."""
    torn = 0
    for number in range(first, first + count):
        step()
        expected = found.values()
        rig.busy(5)  # the copy begins once the next steps are enqueued
        pending = agent.snapshot(found.state, step=number, persist=False)
        step()
        step()
        pending.wait("sealed", timeout=30)
        torn += bool(differing(expected, contents(agent, number)))
    return torn


@check
def torn(rig: Rig) -> Iterator[Line]:
    """Each snapshot has the bytes of its call. Without the fence they are torn."""
    count = SIMULATED if rig.simulated else SNAPSHOTS
    for number, (kind, make) in enumerate(KINDS.items()):
        if make is replayed and rig.simulated:
            yield skipped(kind, NO_DEVICE)
            continue
        found, step = make(rig)
        agent = rig.agent(f"torn-{number}")
        found_torn = torn_in(rig, agent, found, step, 0, count)
        yield passes(kind, found_torn == 0, f"{found_torn} of {count} torn", "0 torn")
    lane = SimulatedLane if rig.simulated else StreamLane
    with patch.object(lane, "hold_back", lambda self, mark: None):
        found = training(rig, adam())
        found.step()
        found.loss().backward()
        agent = rig.agent("unfenced")
        found_torn = torn_in(rig, agent, found, found.optimizer.step, 0, count)
    yield passes(
        "without the fence (must tear)", found_torn > 0, f"{found_torn} of {count} torn", "> 0 torn"
    )
    with patch.object(mapped_slot, "lock_pages", lambda address, length, device: False):
        found, step = with_average(rig)
        found_torn = torn_in(rig, rig.agent("unlocked"), found, step, 0, count)
    yield passes("slots that are not locked", found_torn == 0, f"{found_torn} of {count} torn")


def refused(rig: Rig, agent: Agent, state: Any, step: int, write: Callable[[], Any]) -> bool:
    """Return True if a snapshot fails because of a write after the call."""
    agent._link.handovers.sealer._fences._may_wait = True  # type: ignore[union-attr]
    rig.busy(100)
    pending = agent.snapshot(state, step=step, persist=False)
    with torch.no_grad():
        write()
    try:
        pending.wait("sealed", timeout=30)
    except SnapshotFailed as error:
        return "other than its optimizer wrote" in str(error)
    return False


@check
def writes(rig: Rig) -> Iterator[Line]:
    """A write that nothing orders behind the copy fails the snapshot."""
    mesh = DeviceMesh(rig.device.type, [0], _init_backend=False, _rank=0)
    dtensor = torch.nn.Parameter(
        DTensor.from_local(
            torch.ones(1 << 20, device=rig.device), mesh, [Shard(0)], run_check=False
        )
    )
    plain = torch.nn.Parameter(torch.ones(1 << 20, device=rig.device))
    for kind, parameter in ("a parameter", plain), ("a DTensor", dtensor):
        state, optimizer = {"w": parameter}, torch.optim.SGD([parameter], lr=0.0)
        agent, zeros = rig.agent(kind[2:].lower()), parameter.detach() * 0
        known(agent, optimizer, state)
        found = [
            refused(rig, agent, state, 1, lambda p=parameter: p.mul_(2)),  # type: ignore[misc]
            refused(rig, agent, state, 2, lambda p=parameter, z=zeros: p.copy_(z)),  # type: ignore[misc]
        ]
        yield passes(f"writes to {kind}", all(found), f"{sum(found)} of 2 failed", "all fail")
    optimizer, agent = torch.optim.SGD([plain], lr=0.0), rig.agent("now")
    known(agent, optimizer, {"w": plain})
    kept = plain.detach().cpu().clone()
    rig.busy(100)
    pending = agent.snapshot({"w": plain}, step=1, persist=False, hold="now")
    plain.data.add_(1)
    pending.wait("sealed", timeout=30)
    yield passes(
        "writes by .data after hold='now'",
        not differing({"w": kept}, contents(agent, 1)),
        "",
        "equal",
    )
    other = torch.nn.Parameter(torch.ones(64, device=rig.device))
    holder = torch.optim.SGD([other], lr=0.0)
    holder.state[other]["moment"] = EightBit.quantized(torch.ones(1024, device=rig.device))
    holder.step()
    agent.snapshot({"w": plain}, step=3, persist=False).wait("sealed", timeout=30)
    yield passes("8-bit optimizer beside", True, "sealed", "a snapshot succeeds")


@check
def capture(rig: Rig) -> Iterator[Line]:
    """A graph can be captured while slots are made, and while a slot is sealed."""
    if rig.simulated:
        yield skipped("capture while slots are made", NO_DEVICE)
        return

    side = torch.cuda.Stream()

    def captured() -> str:
        """Capture as `torch.cuda.graph` does, which also waits for the device first."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                graph.capture_begin()
                y = x
                for _ in range(200):
                    y = y * 1.01
                graph.capture_end()
                graph.replay()
        except Exception as error:
            return str(error).split("\n")[0]
        return ""

    state = {"w": torch.ones(rig.nbytes // 4, device=rig.device)}
    x = torch.ones(1024, device=rig.device)
    rig.synchronize()
    assert captured() == ""
    agent = rig.agent()
    agent.prepare(state)
    answers = []
    while not agent._link.handovers.slots._preparing._over.is_set():  # type: ignore[union-attr]
        answers.append(captured())
    failed = [answer for answer in answers if answer]
    locked = all(slot._bytes.is_pinned() for slot in slots(agent))
    yield passes(
        "capture while slots are made",
        not failed and locked and len(answers) > 0,
        f"{len(failed)} of {len(answers)} failed, locked: {locked} {failed[:1]}",
        "none fails",
    )
    failed, sealed, few = [], 0, rig.tensors(8, 1 << 28)
    agent = rig.agent("sealed")
    agent.prepare(few)
    slots(agent)
    for step in range(10):
        rig.busy(20)
        pending = agent.snapshot(few, step=step, persist=False)
        failed += [answer for answer in [captured()] if answer]
        pending.wait("sealed", timeout=30)
        sealed += not differing(few, contents(agent, step))
    yield passes(
        "capture while a slot is sealed",
        not failed and sealed == 10,
        f"{len(failed)} of 10 failed, {sealed} of 10 sealed right {failed[:1]}",
        "none fails",
    )
