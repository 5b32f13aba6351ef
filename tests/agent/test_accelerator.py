"""Tests snapshots of tensors on an accelerator: each holds the values of its call,
whatever the training enqueues next.

They need an accelerator; `test_fences.py` tests the ordering without one. Between the
call and its copy each test keeps the device busy. A copy that is not ordered before
later writes would then come too late, and have wrong values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from tests.support.daemons import Daemon

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA or ROCm")
WIDTH = 2048  # 16 MB a layer, whose copy takes longer than enqueueing a step


@pytest.fixture
def agent(daemon: Daemon) -> Iterator[Agent]:
    made = Agent("job", socket=daemon.home.socket)
    yield made
    if not made.closed:
        made.close()


class Training:
    """A model on the device, trained by an optimizer of the given kind."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.device = torch.accelerator.current_accelerator()
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(
            self.device
        )
        self.optimizer = make(self.model.parameters())
        self.ema = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.data = torch.randn(64, WIDTH, device=self.device)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}

    def step(self) -> None:
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_lerp_(
            self.ema, [parameter.detach() for parameter in self.model.parameters()], 0.5
        )

    def values(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        names: dict[Any, str] = {
            parameter: name for name, parameter in self.model.named_parameters()
        }
        for parameter, state in self.optimizer.state.items():
            found |= {
                f"optimizer.state.{names[parameter]}.{key}": value
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            }
        found |= {f"ema.{number}": value for number, value in enumerate(self.ema)}
        return {name: value.detach().cpu().clone() for name, value in found.items()}


def check(
    agent: Agent, daemon: Daemon, training: Training, step: Callable[[], None], steps: int = 4
) -> None:
    """Take a snapshot at each step. Each must hold the values of its call."""
    agent.prepare(training.state)
    expected = []
    for number in range(steps):
        step()
        expected.append(training.values())
        # The device is busy when the copy is enqueued.
        torch.cuda._sleep(20_000_000) if torch.cuda.is_available() else None
        pending = agent.snapshot(training.state, step=number)
        step()
        step()
        pending.wait("durable", timeout=120)
    for number, values in enumerate(expected):
        with Checkpoint.open(daemon.home.root / "job", number) as checkpoint:
            for name, value in values.items():
                assert torch.equal(checkpoint.tensor(name), value), f"{name} at step {number}"


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}],
    ids=["foreach", "single", "fused"],
)
def test_each_kind_of_optimizer_step_comes_after_the_copy(
    agent: Agent, daemon: Daemon, options: dict[str, bool]
) -> None:
    training = Training(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options))  # type: ignore[arg-type]
    check(agent, daemon, training, training.step)


def test_steps_of_a_grad_scaler_come_after_the_copy(agent: Agent, daemon: Daemon) -> None:
    training = Training(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    scaler = torch.amp.GradScaler(training.device.type)  # type: ignore[union-attr]

    def step() -> None:
        with torch.autocast(training.device.type, torch.float16):  # type: ignore[union-attr]
            loss = training.model(training.data).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()

    check(agent, daemon, training, step)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_steps_come_after_the_copy(agent: Agent, daemon: Daemon) -> None:
    training = Training(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    compiled = torch.compile(lambda: training.optimizer.step())

    def step() -> None:
        training.model(training.data).square().mean().backward()
        compiled()
        training.optimizer.zero_grad()

    check(agent, daemon, training, step, steps=3)


def test_optimizers_in_backward_come_after_the_copy(agent: Agent, daemon: Daemon) -> None:
    training = Training(lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9))
    own = {
        parameter: torch.optim.SGD([parameter], lr=1e-2, momentum=0.9)
        for parameter in training.model.parameters()
    }

    def apply(parameter: torch.Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad()  # type: ignore[index]

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    check(agent, daemon, training, lambda: training.model(training.data).square().mean().backward())


@cuda
def test_replays_of_a_graph_come_after_the_copy(agent: Agent, daemon: Daemon) -> None:
    training = Training(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, capturable=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    check(agent, daemon, training, graph.replay)


def test_load_state_dict_comes_after_the_copy_on_a_device(agent: Agent, daemon: Daemon) -> None:
    training = Training(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    other = {name: torch.zeros_like(value) for name, value in training.model.state_dict().items()}

    def step() -> None:
        training.step()
        training.model.load_state_dict(other)

    check(agent, daemon, training, step)


@cuda
def test_slots_are_page_locked(agent: Agent, daemon: Daemon) -> None:
    training = Training(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    training.step()
    agent.prepare(training.state)
    agent._link.handovers.slots.wait()
    assert all(slot._bytes.is_pinned() for slot in agent._link.handovers.slots._slots.values())
    agent.close()


@cuda
def test_snapshots_are_right_without_page_locking(
    agent: Agent, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ckptd.agent.copy.mapped_slot.lock_pages", lambda address, length, device: False
    )
    training = Training(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    check(agent, daemon, training, training.step)


def test_recover_writes_into_tensors_on_the_device(agent: Agent, daemon: Daemon) -> None:
    training = Training(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    training.step()
    expected = training.values()
    agent.snapshot(training.state, step=0).wait("sealed")
    training.step()
    assert agent.recover(training.state) is not None
    found = training.values()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
