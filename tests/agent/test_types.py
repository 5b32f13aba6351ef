"""Tests that states with the types that real programs save come back, on one rank and
on two, from memory and from storage.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import random
import uuid
from collections import ChainMap, defaultdict
from contextlib import closing
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.state.tree import Unsaved
from ckptd.shared.errors import StructureMismatch, UnsavableValue
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Ranks
from tests.support.wrapped import Scaled

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested"),
]


@dataclasses.dataclass
class Metric:
    name: str
    total: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float
    betas: tuple[float, float]


class Position(NamedTuple):
    epoch: int
    batch: torch.Tensor


@dataclasses.dataclass
class Training:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    settings: Settings
    metric: Metric
    clock: dt.datetime = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def make_state(value: int) -> dict[str, Any]:
    """Return a state of every type, with values that follow from `value`."""
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=value / 8)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    tensor = torch.full((3,), float(value))
    default: defaultdict[str, int] = defaultdict(lambda: 7, {"k": value})
    settings, metric = Settings(value / 4, (0.5, value)), Metric("loss", tensor.clone())
    return {
        "training": Training(model, optimizer, settings, metric, dt.datetime(2026, 1, value)),
        "position": Position(value, tensor.clone()),
        "arguments": argparse.Namespace(
            lr=value, names=["a"] * value, nested=SimpleNamespace(tensor=tensor.clone())
        ),
        "history": [Metric(f"epoch {value}", tensor * 2), Metric("last", tensor * 3)],
        "plain": {
            "when": [
                dt.date(2026, 1, value),
                dt.time(value),
                dt.timedelta(value),
                dt.timezone(dt.timedelta(hours=value)),
            ],
            "numbers": [
                Decimal(value) / 8,
                Fraction(value, 7),
                complex(value, 1),
                range(value),
                slice(value, None, 2),
            ],
            "id": uuid.UUID(int=value),
        },
        "default": default,
        "chain": ChainMap({"a": value}, {"b": [value]}),
        "generators": {
            "torch": torch.Generator().manual_seed(value),
            "numpy": np.random.default_rng(value),
            "legacy": np.random.RandomState(value),
            "python": random.Random(value),
        },
        "sparse": (torch.eye(3) * value).to_sparse(),
        "csr": (torch.eye(3) * value).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([tensor, tensor[:value]], layout=torch.jagged),
        "quantized": Scaled(tensor.clone(), tensor[:1].clone(), 8),
    }


def described(state: Any) -> Any:
    """Return a state as plain values that can be compared."""
    if isinstance(state, Scaled):
        return ["scaled", state.data_part.tolist(), state.scale.tolist()]
    if isinstance(state, torch.Tensor):
        if state.is_nested:
            return [part.tolist() for part in state.unbind()]
        return [str(state.layout), state.detach().to_dense().tolist()]
    if isinstance(state, (torch.nn.Module, torch.optim.Optimizer)):
        return described(state.state_dict())
    if dataclasses.is_dataclass(state):
        return [
            type(state).__name__,
            described(
                {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
            ),
        ]
    if isinstance(state, (argparse.Namespace, SimpleNamespace)):
        return [type(state).__name__, described(vars(state))]
    if isinstance(state, (dict, ChainMap)):
        return {key: described(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [type(state).__name__, *map(described, state)]
    draw = {
        torch.Generator: lambda: torch.rand(2, generator=state).tolist(),
        np.random.Generator: lambda: state.random(2).tolist(),
    }
    if type(state) in draw:
        return draw[type(state)]()
    if isinstance(state, (np.random.RandomState, random.Random)):
        return state.random()
    return state


def parts(state: dict[str, Any]) -> list[Any]:
    """Return objects that must stay the same ones."""
    training = state["training"]
    return [
        training,
        training.model,
        training.optimizer,
        training.metric,
        training.metric.total,
        state["arguments"],
        state["quantized"],
    ]


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_every_type_comes_back_into_the_objects_of_the_caller(daemon: Daemon, source: str) -> None:
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(make_state(2), step=1).wait("durable", timeout=60)
    if source == "storage":
        daemon.stop()
        daemon = Daemon(daemon.home, forked=True)
        daemon.wait_ready()
    state = make_state(5)
    generators = dict(state["generators"])
    kept = parts(state)
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        recovered = agent.recover(state)
        assert recovered is not None
    assert all(one is other for one, other in zip(kept, parts(state), strict=True))
    assert state["generators"] == generators
    assert state["default"]["another"] == 7
    del state["default"]["another"]
    assert described(state) == described(make_state(2))
    if source == "storage":
        daemon.stop()


def test_checkpoint_load_gives_the_fields(daemon: Daemon) -> None:
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(make_state(2), step=1).wait("durable", timeout=60)
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        found = checkpoint.load()
    assert found["training"]["settings"] == {"lr": 0.5, "betas": (0.5, 2)}
    assert found["training"]["metric"]["total"].tolist() == [2.0] * 3
    assert found["position"]["epoch"] == 2
    assert found["arguments"].nested.tensor.tolist() == [2.0] * 3
    assert described(found["csr"]) == described(make_state(2)["csr"])
    assert described(found["quantized"]) == described(make_state(2)["quantized"])
    assert (type(found["chain"]), found["chain"].maps) == (ChainMap, [{"a": 2}, {"b": [2]}])


def test_records_without_a_place_come_back_as_dicts_and_that_is_logged(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot({"history": [Metric("loss", torch.ones(1))]}, step=1).wait(
            "durable", timeout=60
        )
        state: dict[str, Any] = {"history": []}
        agent.recover(state)
    assert state["history"] == [{"name": "loss", "total": torch.ones(1)}]
    assert "objects under history came back as dicts of their fields" in caplog.text


def test_fields_that_differ_are_named(daemon: Daemon) -> None:
    @dataclasses.dataclass
    class Other:
        name: str
        count: int

    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(
            {
                "m": Metric("loss", torch.ones(1)),
                "g": np.random.RandomState(1),
                "s": torch.eye(2).to_sparse(),
            },
            step=1,
        )
        state: dict[str, Any] = {
            "m": Other("x", 1),
            "g": np.random.default_rng(1),
            "s": torch.eye(3).to_sparse(),
        }
        with pytest.raises(StructureMismatch) as caught:
            agent.recover(state)
        for part in (
            "m.count",
            "g: the checkpoint has a numpy-random-state, the state a numpy-generator",
            "s: the checkpoint has a torch.sparse_coo tensor of shape [2, 2]",
        ):
            assert part in str(caught.value)
        assert (state["m"], state["s"].shape) == (Other("x", 1), (3, 3))


def test_what_cannot_be_saved_can_be_left_out(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    def hook() -> None: ...

    state = {
        "x": torch.ones(2),
        "hook": hook,
        "deep": {"odd": [1, hook]},
        "meta": torch.ones(1, device="meta"),
        "m": Metric("a", hook),  # type: ignore[arg-type]
    }
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        with pytest.raises(UnsavableValue, match=r"^hook: "):
            agent.snapshot(state, step=1)
        for step in (2, 3):
            pending = agent.snapshot(state, step=step, unsavable="skip").wait("durable", timeout=60)
            assert set(pending.unsaved or {}) == {"hook", "deep.odd.1", "meta", "m.total"}
        assert caplog.text.count("left out of the snapshots: hook: a value of type") == 1
        later: dict[str, Any] = {
            "x": torch.zeros(2),
            "hook": print,
            "deep": {"odd": [5, len]},
            "meta": torch.zeros(1),
            "m": Metric("b", torch.zeros(1)),
        }
        agent.recover(later)
        assert (later["x"].tolist(), later["hook"], later["deep"]) == (
            [1.0, 1.0],
            print,
            {"odd": [1, len]},
        )
        assert later["m"].name == "a"
        assert (
            "not in the checkpoint, since they could not be saved, and left as they are: hook, "
            "deep.odd.1, meta, m.total" in caplog.text
        )
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert checkpoint.load()["hook"] == Unsaved("builtins.function")


# -- two ranks


def take(socket: str, value: int) -> None:
    HERE["agent"] = agent = Agent("job", socket=socket)
    agent.snapshot(make_state(value), step=1).wait("durable", timeout=60)
    agent.close()


def recover(socket: str) -> Any:
    state = make_state(5)
    with closing(Agent("job", socket=socket)) as agent:
        assert agent.recover(state) is not None
    return described(state)


def test_every_type_comes_back_on_two_ranks(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        ranks.call(take, str(daemon.home.socket), 2)
    with Ranks(2) as ranks:
        assert ranks.call(recover, str(daemon.home.socket)) == [described(make_state(2))] * 2
    assert recover(str(daemon.home.socket)) == described(make_state(2))
