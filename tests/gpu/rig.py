"""Gives the checks a device or its simulation, an agent, and models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptd.agent import Agent
from ckptd.agent.copy.mapped_slot import MappedSlot
from tests.gpu.simulated import SimulatedLane, simulate
from tests.gpu.table import NO_DEVICE, Line, passes, skipped
from tests.oracle.tensors import EightBit
from tests.support.daemons import Home, holds

CYCLES_PER_MS = 1_900_000  # of `torch.cuda._sleep`, at the clock of an H100 or H200


class Rig:
    """The device of one check's process, or its simulation.

    gigabytes: the size of a large state. kills: how often a trainer is killed. long: True
    if there is time for the checks that take long. devices: how many there are.
    """

    def __init__(
        self,
        place: Home,
        *,
        simulated: bool,
        gigabytes: float,
        kills: int,
        long: bool = False,
        devices: int = 1,
    ) -> None:
        self.place, self.simulated, self.kills = place, simulated, kills
        self.long, self.devices = long, devices
        self.nbytes = int(gigabytes * 1e9)
        self.device = torch.device("cpu") if simulated else torch.device("cuda", 0)
        if simulated:
            simulate()

    def agent(self, job: str = "job") -> Agent:
        return Agent(job, socket=self.place.socket)

    def compared(self, what: str, right: bool, *texts: str) -> Line:
        """Return a line about a time or a rate, which a simulation does not have."""
        return skipped(what, NO_DEVICE) if self.simulated else passes(what, right, *texts)

    def synchronize(self) -> None:
        if not self.simulated:
            torch.accelerator.synchronize()

    def busy(self, milliseconds: float) -> None:
        """Keep the device busy before the next copy."""
        if self.simulated:
            SimulatedLane.late = milliseconds / 1000
        else:
            torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))

    @contextmanager
    def copies_begin_late(self) -> Iterator[None]:
        """Context manager. Copies begin once the body has enqueued its work. On simulated
        lanes, they begin at its end, or when the training waits for them.
        """
        if self.simulated:
            SimulatedLane.late = 0.0
            SimulatedLane.gate.clear()
        else:
            self.busy(5)
        yield
        SimulatedLane.gate.set()

    def timed(self, work: Callable[[], object]) -> float:
        """Return the seconds that work takes on the device."""
        self.synchronize()
        begun = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begun

    def bus(self, nbytes: int = 1 << 30) -> float:
        """Return the bytes per second of torch's own copy into pinned memory."""
        source = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not self.simulated)
        return nbytes / min(
            self.timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(5)
        )

    def tensors(self, count: int, nbytes: int) -> dict[str, torch.nn.Parameter]:
        """Return parameters of `nbytes` in all. A step of their optimizer changes nothing."""
        each = max(1, nbytes // count // 4)
        return {
            f"t{n}": torch.nn.Parameter(torch.full((each,), float(n), device=self.device))
            for n in range(count)
        }

    @torch.no_grad()
    def change(self, state: Mapping[str, torch.Tensor]) -> None:
        """Change every tensor, so that the bytes of an older snapshot are wrong ones."""
        torch._foreach_add_(list(state.values()), 1.0)


class Training:
    """A model on the device, an EMA copy of it, and an optimizer of the given kind."""

    def __init__(
        self,
        device: torch.device,
        width: int,
        layers: int,
        make: Callable[[Any], torch.optim.Optimizer],
        batch: int = 64,
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = torch.nn.Sequential(
                *(torch.nn.Linear(width, width, bias=n == 0) for n in range(layers))
            )
            self.data = torch.randn(batch, width)
        self.optimizer = make(self.model.parameters())
        self.ema: list[torch.Tensor] = []

    def average(self) -> None:
        """Keep an EMA copy from now on."""
        self.ema = [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.data).square().mean()
        return loss

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema:
            torch._foreach_lerp_(self.ema, [p.detach() for p in self.model.parameters()], 0.5)
        return loss.detach()

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors on the device, by their names in a snapshot."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        names: dict[Any, str] = {p: name for name, p in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            found |= {
                f"optimizer.state.{names[parameter]}.{key}": value
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            }
        found |= {f"ema.{number}": value for number, value in enumerate(self.ema)}
        plain = chain.from_iterable(plain_parts(name, value) for name, value in found.items())
        return {name: value.detach().clone() for name, value in plain}

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values().values())


def plain_parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of which a tensor consists, by their names in a snapshot."""
    if isinstance(tensor, DTensor):
        return [(name, tensor.to_local())]
    if isinstance(tensor, EightBit):
        return [(f"{name}.codes", tensor.codes), (f"{name}.scale", tensor.scale)]
    return [(name, tensor)]


def large(rig: Rig, batch: int, steps: int = 1) -> Training:
    """Return a model with the Adam state of a large size, after its first steps. Without
    a step, the optimizer has no state.
    """
    width = 256 if rig.simulated else 4096
    layers = max(2, round(rig.nbytes / 12 / width / width))
    made = Training(
        rig.device, width, layers, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), batch
    )
    for _ in range(steps):
        made.step()
    return made


def contents(agent: Agent, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors in the slot that holds a sealed step, by name."""
    slot, kept = agent._link.handovers.slots.sealed(step), agent._kept_plan._kept
    assert slot is not None, f"no slot holds step {step}"
    assert kept is not None
    names = [item.fqn for item in kept[1].plan.items]
    return dict(zip(names, slot._views.targets.tensors, strict=True))


def slots(agent: Agent) -> list[MappedSlot]:
    """Return the slots, once they are ready."""
    agent._link.handovers.slots.wait()
    return list(agent._link.handovers.slots._slots.values())


def differing(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not bit-equal."""
    return [
        name
        for name, value in expected.items()
        if not torch.equal(_bytes(found[name]), _bytes(value.detach().cpu()))
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def known(agent: Agent, optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Take a first snapshot and a step, so that copies of parameters are late from now
    on.
    """
    agent.snapshot(state, step=0, persist=False).wait("sealed", timeout=60)
    settled(agent, 0)
    optimizer.step()


def settled(agent: Agent, step: int) -> None:
    """Wait until the daemon has made the checksums of a sealed step. It reads the whole
    slot for that, and does not grant the slot again before.
    """
    slot = agent._link.handovers.slots.sealed(step)
    assert slot is not None
    assert holds(lambda: slot.checks() is not None, 30), "the daemon made no checksums"


def median(found: Iterable[float]) -> float:
    return statistics.median(found)


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
