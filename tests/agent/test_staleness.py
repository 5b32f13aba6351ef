"""Tests that a snapshot is neither stale nor torn: it holds the values of its call,
whatever is done to their tensors before or after.

Each case takes a snapshot, does something to the state, takes another, does the same at
once again, and compares both snapshots with the values at their calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from tests.support.daemons import Daemon


class Everything:
    """A small model with buffers, its optimizer after a step, an EMA copy, and a
    separate tensor.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        self.tensor = torch.arange(6.0)
        self.train()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "tensor": self.tensor,
        }

    def train(self) -> None:
        self.model(torch.randn(5, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.model)

    def values(self) -> dict[str, torch.Tensor]:
        """Return a copy of every tensor, by its name in a checkpoint."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            found |= {
                f"optimizer.state.{names[parameter]}.{key}": value for key, value in state.items()
            }
        found |= {
            f"ema.{name.removeprefix('module.')}": value
            for name, value in self.ema.state_dict().items()
        }
        return {
            name: value.detach().clone() for name, value in {**found, "tensor": self.tensor}.items()
        }


def _train(it: Everything) -> None:
    it.train()


def _change_in_place(it: Everything) -> None:
    with torch.no_grad():
        for value in [*it.model.parameters(), *it.model.buffers(), it.tensor]:
            value.add_(1)


def _swap_data(it: Everything) -> None:
    for parameter in it.model.parameters():
        parameter.data = torch.randn_like(parameter)


def _write_through_data(it: Everything) -> None:
    for parameter in it.model.parameters():
        parameter.data.mul_(-2)


def _move_storage(it: Everything) -> None:
    for parameter in it.model.parameters():
        parameter.data = parameter.data.clone().mul_(3)
    it.tensor = it.tensor.clone() + 1


def _change_dtype(it: Everything) -> None:
    it.model.to(torch.float64 if it.model[0].weight.dtype is torch.float32 else torch.float32)


def _change_strides(it: Everything) -> None:
    weight = it.model[0].weight
    weight.data = (
        weight.data.t().contiguous().t() if weight.is_contiguous() else weight.data.contiguous()
    )
    weight.data.add_(1)


def _load_state_dict(it: Everything) -> None:
    it.model.load_state_dict({name: value + 1 for name, value in it.model.state_dict().items()})


def _load_optimizer(it: Everything) -> None:
    state = copy.deepcopy(it.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] += 1
    it.optimizer.load_state_dict(state)


def _replace_a_parameter(it: Everything) -> None:
    old, fresh = it.model[0].weight, torch.nn.Parameter(torch.randn(8, 4))
    it.optimizer.state[fresh] = it.optimizer.state.pop(old)
    it.optimizer.param_groups[0]["params"][0] = fresh
    it.model[0].weight = fresh


def _share_a_storage(it: Everything) -> None:
    if it.model[0].bias.data_ptr() == it.model[1].bias.data_ptr():
        it.model[1].bias.data = torch.randn(8)
    else:
        it.model[1].bias.data = it.model[0].bias.data


def _freeze(it: Everything) -> None:
    for parameter in it.model[2].parameters():
        parameter.requires_grad_(not parameter.requires_grad)


DOINGS = [
    value
    for name, value in list(globals().items())
    if name.startswith("_") and getattr(value, "__module__", "") == __name__
]


@pytest.fixture
def agent(daemon: Daemon) -> Iterator[Agent]:
    made = Agent("job", socket=daemon.home.socket)
    yield made
    if not made.closed:
        made.close()


@pytest.mark.parametrize("doing", DOINGS, ids=lambda doing: doing.__name__[1:])
def test_each_snapshot_holds_the_values_of_its_call(
    agent: Agent, daemon: Daemon, doing: Callable[[Everything], None]
) -> None:
    it, expected = Everything(), []
    for step in range(4):
        expected.append(it.values())
        pending = agent.snapshot(it.state, step=step)
        doing(it)  # at once: the daemon has not read the slot yet
        pending.wait("durable", timeout=60)
    assert len(expected) == 4
    for step, values in enumerate(expected):
        with Checkpoint.open(daemon.home.root / "job", step) as checkpoint:
            assert set(checkpoint.keys()) == set(values)
            for name, value in values.items():
                found = checkpoint.tensor(name)
                assert found.dtype == value.dtype, name
                assert torch.equal(found, value), f"{name} at step {step}"


def test_every_case_but_freezing_changes_a_value() -> None:
    """Freezing changes requires_grad only."""

    def changes_a_value(doing: Callable[[Everything], None]) -> bool:
        it = Everything()
        before = it.values()
        doing(it)
        after = it.values()
        return any(
            before[name].dtype != after[name].dtype or not torch.equal(before[name], after[name])
            for name in before
        )

    assert len(DOINGS) > 5
    assert [doing for doing in DOINGS if not changes_a_value(doing)] == [_freeze]
