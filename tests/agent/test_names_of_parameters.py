"""A program that is wrapped otherwise, or has other objects in its state, recovers as
torch's own round trip would, and trains on so.
"""

from __future__ import annotations

import copy
import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ckptd.agent import Agent, Checkpoint
from ckptd.shared import errors
from tests.golden import make_names
from tests.golden.make_names import STEP, layers, made, train
from tests.support.daemons import Daemon
from tests.support.shared_daemon import LentDaemon

ARCHIVE = Path(__file__).parents[1] / "golden" / "v1" / "names.tar.xz"
compiled: Callable[[nn.Module], Any] = partial(torch.compile, backend="eager")
State = dict[str, Any]


@pytest.fixture
def agent(shared_daemon: LentDaemon) -> Any:
    made = Agent(shared_daemon.job, socket=shared_daemon.home.socket)
    yield made
    if not made.closed:
        made.close()


@pytest.fixture
def group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain(module: nn.Module) -> nn.Module:
    return module


def program(
    around: Callable[[nn.Module], nn.Module] = plain,
    inside: Callable[[nn.Module], nn.Module] = plain,
    seed: int = 7,
) -> State:
    torch.manual_seed(seed)
    model = around(layers(inside))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def reloaded(state: State) -> State:
    """Return a plain program with this state, as it comes through torch.save and
    load_state_dict of the same objects.
    """
    file = io.BytesIO()
    torch.save(
        {key: value.state_dict() for key, value in state.items() if hasattr(value, "state_dict")},
        file,
    )
    file.seek(0)
    loaded, other = torch.load(file, weights_only=True), program(seed=1)
    for key in ("model", "optim"):
        other[key].load_state_dict(loaded[key])
    return other


def bits(state: State) -> list[Any]:
    """Return the parameters and the moments, in the order of the parameters, and the
    settings.
    """
    optimizer: torch.optim.Optimizer = state["optim"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert set(map(id, state["model"].parameters())) <= set(map(id, parameters))
    found: list[Any] = [parameter.detach().clone() for parameter in parameters]
    found += [
        (key, value.clone())
        for parameter in parameters
        for key, value in sorted(optimizer.state[parameter].items())
    ]
    return [
        *found,
        [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ],
    ]


def same(one: list[Any], other: list[Any]) -> bool:
    """Return True if all tensors and settings are equal, the tensors bit for bit."""
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return one[0] == other[0] and _equal(one[1], other[1])
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.view(torch.int32), other.view(torch.int32))
        )
    return bool(one == other)


def resumes(
    agent: Agent,
    saved: State,
    into: State,
    step: int,
    expected: State | None = None,
    **options: Any,
) -> None:
    """Save one program, recover another from it, and compare it with torch's own round
    trip, now and after three more steps.
    """
    expected = reloaded(saved) if expected is None else expected
    agent.snapshot(saved, step=step).wait("durable", timeout=60)
    assert agent.recover(into, **options) is not None
    assert same(bits(into), bits(expected))
    train(into)
    train(expected)
    assert same(bits(into), bits(expected))


WRAPPINGS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "around: data parallel": (nn.DataParallel, plain),
    "around: compiled data parallel": (lambda module: compiled(nn.DataParallel(module)), plain),
    "around: data parallel compiled": (lambda module: nn.DataParallel(compiled(module)), plain),
    "inside: data parallel": (plain, nn.DataParallel),
    "inside: compiled": (plain, compiled),
    "inside: checkpointed": (plain, checkpoint_wrapper),
    "both": (compiled, lambda module: checkpoint_wrapper(compiled(nn.DataParallel(module)))),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS.values(), ids=WRAPPINGS)
def test_wrappers_leave_no_trace_in_either_direction(agent: Agent, wrapping: Any) -> None:
    around, inside = wrapping
    saved, back = program(), program(around, inside, seed=1)
    train(saved)
    resumes(agent, saved, back, 1)
    wrapped, other = program(around, inside), program(*WRAPPINGS["both"], 1)
    train(wrapped)
    expected = program()
    train(expected)
    resumes(agent, wrapped, program(seed=1), 2, reloaded(expected))
    resumes(agent, back, other, 3, copy.deepcopy(expected_after(2)))


def expected_after(rounds: int) -> State:
    state = program()
    for _ in range(rounds):
        train(state)
    return state


def test_a_distributed_module_recovers_without_its_wrapper_and_back(
    agent: Agent, group: Any
) -> None:
    for number, (around, inside) in enumerate(
        [
            (DistributedDataParallel, plain),
            (plain, DistributedDataParallel),
            (lambda m: compiled(DistributedDataParallel(m)), plain),
        ]
    ):
        wrapped = program(around, inside)
        train(wrapped)
        resumes(agent, wrapped, program(seed=1), 2 * number + 1, expected_after(1))
        saved = program()
        train(saved)
        resumes(agent, saved, program(around, inside, seed=1), 2 * number + 2)


def test_an_average_beside_the_model_changes_no_name(agent: Agent) -> None:
    saved = program()
    saved["ema"] = AveragedModel(saved["model"])
    train(saved)
    saved["ema"].update_parameters(saved["model"])
    resumes(agent, saved, program(seed=1), 1, expected_after(1), strict=False)
    alone, into = program(), program(seed=1)
    into = {"ema": copy.deepcopy(into["model"]), "first": into["model"][0], **into}
    train(alone)
    resumes(agent, alone, into, 2, strict=False)


def test_the_average_of_a_wrapped_model_recovers_as_that_of_the_model(
    agent: Agent, shared_daemon: LentDaemon
) -> None:
    model = layers()
    saved = {"ema": AveragedModel(nn.DataParallel(model))}
    for _ in range(2):
        saved["ema"].update_parameters(nn.DataParallel(layers()))
    agent.snapshot(saved, step=1).wait("durable", timeout=60)
    with Checkpoint.open(shared_daemon.directory, 1) as checkpoint:
        assert list(checkpoint.load()["ema"]) == ["n_averaged", *layers().state_dict()]
    into = {"ema": AveragedModel(compiled(layers()))}
    agent.recover(into)
    assert into["ema"].n_averaged == 2
    mine, theirs = list(into["ema"].parameters()), list(saved["ema"].parameters())
    assert len(mine) == len(list(layers().parameters()))
    assert all(map(torch.equal, mine, theirs))


def test_an_attribute_of_the_users_own_is_no_wrapper(agent: Agent) -> None:
    class Mine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    agent.snapshot({"model": Mine(nn.Linear(2, 2))}, step=1).wait("durable", timeout=60)
    into = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in into.state_dict().items()}
    with pytest.raises(
        errors.StructureMismatch,
        match=r"model: no key of the module is in the checkpoint, which has module\.weight, ",
    ):
        agent.recover({"model": into})
    assert all(torch.equal(before[name], value) for name, value in into.state_dict().items())


def test_names_of_parameters_in_a_group_are_those_of_the_callers_program(agent: Agent) -> None:
    saved, into = program(), program(seed=1)
    saved["optim"] = torch.optim.AdamW(
        [{"params": [p], "lr": 0.1} for p in saved["model"].named_parameters()]
    )
    into["optim"] = torch.optim.AdamW(
        [(f"mine.{name}", p) for name, p in into["model"].named_parameters()], lr=0.1
    )
    train(saved)
    plain_one = expected_after(1)
    resumes(agent, saved, into, 1, plain_one)
    assert [group["param_names"] for group in into["optim"].param_groups] == [
        [f"mine.{name}" for name in layers().state_dict()]
    ]
    unnamed = program(seed=1)
    resumes(agent, into, unnamed, 2, expected_after(2))
    assert "param_names" not in unnamed["optim"].param_groups[0]


def scaled(seed: int = 7, *, key: str = "scale", first: bool = True) -> State:
    """A program with a parameter that is in no module.

    It is in the state under `key`, or in nothing but the optimizer.
    """
    torch.manual_seed(seed)
    model, scale = layers(), nn.Parameter(torch.full((2,), float(seed)))
    model.forward = lambda x, forward=model.forward: forward(x) * scale
    parameters = [scale, *model.parameters()] if first else [*model.parameters(), scale]
    return {
        "model": model,
        **({key: scale} if key else {}),
        "optim": torch.optim.AdamW(parameters, lr=0.1),
    }


def in_order(state: State) -> list[Any]:
    """Return copies of the parameters and the moments in the order of the model, and then
    of those of the other parameters.
    """
    return [value.detach().clone() for value in live(state)]


def live(state: State) -> list[torch.Tensor]:
    """Return the tensors that `in_order` copies."""
    own = list(state["model"].parameters())
    others = [
        p
        for group in state["optim"].param_groups
        for p in group["params"]
        if all(p is not mine for mine in own)
    ]
    return [
        value
        for p in (*own, *others)
        for value in (p, *map(state["optim"].state[p].get, ("step", "exp_avg", "exp_avg_sq")))
    ]


def test_a_bare_parameter_has_its_key_as_its_name(agent: Agent, shared_daemon: LentDaemon) -> None:
    saved, into = scaled(), scaled(1, first=False)
    train(saved)
    agent.snapshot(saved, step=1).wait("durable", timeout=60)
    with Checkpoint.open(shared_daemon.directory, 1) as checkpoint:
        assert list(checkpoint.load()["optim"]["state"]) == ["scale", *layers().state_dict()]
    agent.recover(into)
    for _ in range(2):
        assert all(map(torch.equal, in_order(into), in_order(saved)))
        train(saved)
        train(into)


def test_a_parameter_without_a_name_leaves_the_others_theirs(
    agent: Agent, shared_daemon: LentDaemon
) -> None:
    saved, into = scaled(key=""), scaled(1, key="", first=False)
    train(saved)
    agent.snapshot(saved, step=1).wait("durable", timeout=60)
    with Checkpoint.open(shared_daemon.directory, 1) as checkpoint:
        assert list(checkpoint.load()["optim"]["state"]) == [0, *layers().state_dict()]
    agent.recover(into)
    mine, theirs = in_order(into), in_order(saved)
    assert all(map(torch.equal, mine[:-4] + mine[-3:], theirs[:-4] + theirs[-3:]))
    # A parameter that is nowhere in the state is not saved, and its moments are.
    assert mine[-4].tolist() == [1.0, 1.0]


class Counting(torch.optim.SGD):
    """An optimizer with state that belongs to no parameter, as torch's own
    load_state_dict keeps it.
    """

    def step(self, closure: Any = None) -> Any:
        whole = self.state["global"]  # type: ignore[index]
        whole["count"] = whole.get("count", 0) + 1
        whole["norm"] = whole.get("norm", torch.zeros(2)) + whole["count"]
        for group in self.param_groups:
            group["lr"] = 0.1 / whole["count"]
        return super().step(closure)


def counting(seed: int = 7) -> State:
    state = program(seed=seed)
    groups: list[State] = [
        {"params": list(state["model"].parameters())},
        {"params": [], "lr": 0.5, "momentum": 0.25},
    ]
    state["optim"] = Counting(groups, lr=0.1, momentum=0.9)
    return state


@pytest.mark.parametrize("warm", [False, True])
def test_state_of_no_parameter_comes_back(agent: Agent, warm: bool) -> None:
    saved, into, expected = counting(), counting(1), counting(2)
    train(saved)
    agent.snapshot(saved, step=1).wait("durable", timeout=60)
    if warm:
        train(into)
        into["optim"].state["other"] = {"of": "mine"}
    agent.recover(into)
    expected["optim"].load_state_dict(copy.deepcopy(saved["optim"].state_dict()))
    expected["model"].load_state_dict(saved["model"].state_dict())
    for _ in range(2):
        assert same(bits(into), bits(expected))
        (whole,) = (value for key, value in into["optim"].state.items() if isinstance(key, str))
        assert whole["count"] == expected["optim"].state["global"]["count"]
        assert torch.equal(whole["norm"], expected["optim"].state["global"]["norm"])
        train(into)
        train(expected)


def test_state_of_no_parameter_under_the_name_of_a_parameter_is_refused(agent: Agent) -> None:
    state = program()
    train(state)
    for key, text in (("1.weight", "'1.weight'"), (2, "2")):
        state["optim"].state[key] = {"a": 1}
        with pytest.raises(
            errors.UnsavableValue,
            match=rf"an entry of no parameter under the key {text}, .* keep the entry under "
            rf"another "
            rf"key",
        ):
            agent.snapshot(state, step=1)
        del state["optim"].state[key]
    agent.snapshot(state, step=2).wait("durable", timeout=60)


# FSDP1 warns about its own deprecation
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_flattened_parameters_keep_groups_without_parameters_and_state_of_none(
    agent: Agent, group: Any, steps: int, warm: bool
) -> None:
    def flattened(seed: int) -> State:
        torch.manual_seed(seed)
        model = FullyShardedDataParallel(
            layers(),
            device_id=torch.device("cpu"),
            use_orig_params=False,
            sharding_strategy=ShardingStrategy.NO_SHARD,
        )
        groups: list[State] = [
            {"params": [], "lr": seed, "weight_decay": 0.5},
            {"params": list(model.parameters())},
        ]
        groups.append({"params": [], "lr": -seed})
        optimizer = torch.optim.Adam(groups, lr=0.1, foreach=False)
        state: dict[Any, Any] = optimizer.state
        state["global"] = {"seen": torch.tensor([seed]), "epoch": seed}
        return {"model": model, "optim": optimizer}

    saved, into = flattened(7), flattened(1)
    train(saved, steps)
    agent.snapshot(saved, step=1).wait("durable", timeout=60)
    if warm:
        train(into)
    agent.recover(into)
    assert [group["lr"] for group in into["optim"].param_groups] == [7, 0.1, -7]
    assert into["optim"].state["global"]["epoch"] == 7
    assert into["optim"].state["global"]["seen"].tolist() == [7]
    for _ in range(2):
        assert len(into["optim"].state) == len(saved["optim"].state)
        assert same(bits(into), bits(saved))
        train(saved)
        train(into)


# -- wrappers of accelerate, which need not be installed


class WrappedOptimizer(torch.optim.Optimizer):
    """A wrapper like accelerate's AcceleratedOptimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class WrappedScheduler:
    """A wrapper like accelerate's AcceleratedScheduler."""

    def __init__(self, scheduler: Any, optimizers: list[Any]) -> None:
        self.scheduler, self.optimizers = scheduler, optimizers

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


def scheduled(wraps: bool, seed: int = 7, kind: Any = torch.optim.lr_scheduler.StepLR) -> State:
    state = program(seed=seed)
    state["scheduler"] = kind(state["optim"], 2)
    if wraps:
        state["optim"] = WrappedOptimizer(state["optim"])
        state["scheduler"] = WrappedScheduler(state["scheduler"], [state["optim"]])
    return state


@pytest.mark.parametrize("wraps", [False, True])
def test_wrapped_optimizers_and_schedulers_recover_as_bare_ones(agent: Agent, wraps: bool) -> None:
    saved, into = scheduled(wraps), scheduled(not wraps, seed=1)
    train(saved)
    saved["scheduler"].step()
    agent.snapshot(saved, step=1).wait("durable", timeout=60)
    agent.recover(into)
    for _ in range(2):
        assert same(bits(into), bits(saved))
        assert into["scheduler"].state_dict() == saved["scheduler"].state_dict()
        for state in (saved, into):
            train(state)
            state["scheduler"].step()
    for other in (True, False):
        with pytest.raises(
            errors.StructureMismatch, match=r"has the scheduler StepLR .*, the state ExponentialLR"
        ):
            agent.recover(scheduled(other, kind=torch.optim.lr_scheduler.ExponentialLR))


# -- values that are not there


def test_a_lazy_module_is_refused_by_key_until_its_first_forward_pass(agent: Agent) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    state = {"net": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(
        errors.UnsavableValue,
        match=r"^net\.1\.weight: an uninitialized parameter .* run one forward pass before",
    ):
        agent.snapshot(state, step=1)
    model(torch.ones(4, 3))
    agent.snapshot(state, step=2).wait("durable", timeout=60)


def test_fake_tensors_are_refused_by_key(agent: Agent) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Linear(2, 2)
    with pytest.raises(
        errors.UnsavableValue, match=r"^net\.weight: a fake tensor, which has no values"
    ):
        agent.snapshot({"net": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}, step=1)
    agent.snapshot({"x": torch.ones(1)}, step=2).wait("durable", timeout=60)


# -- checkpoints of earlier versions


def old(daemon: Daemon, name: str) -> Agent:
    """Return an agent of a job that commit d0e5760 saved."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(
            daemon.home.root,
            members=[entry for entry in archive if entry.name.split("/")[0] == name],
            filter="data",
        )
    return Agent(name, socket=daemon.home.socket)


def averages(state: State) -> list[torch.Tensor]:
    return list(state["ema"].parameters()) if "ema" in state else []


def came_back(daemon: Daemon, name: str, found: list[Any], expected: list[Any]) -> bool:
    """Return True if each value has the bits of a tensor of the archive, and is the one
    that is expected.

    The archive was trained on another processor, which rounds in other places. So the
    tensor that is expected is known by its values, and its bits are those of the archive.
    """
    with Checkpoint.open(daemon.home.root / name) as checkpoint:
        stored = [*map(checkpoint.tensor, checkpoint.keys())]
    return len(found) == len(expected) and all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.allclose(one, other, rtol=1e-4, atol=1e-6)
        and any(one.shape == each.shape and torch.equal(one, each) for each in stored)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", make_names.PROGRAMS)
def test_a_checkpoint_of_an_earlier_version_is_recovered_by_the_program_that_saved_it(
    daemon: Daemon, name: str
) -> None:
    into, expected = made(name, seed=1), made(name)
    train(expected)
    agent = old(daemon, name)
    recovered = agent.recover(into)
    assert recovered is not None
    assert recovered.step == STEP
    pairs = [*zip(live(expected), live(into), strict=True)]
    pairs += zip(averages(expected), averages(into), strict=True)
    assert bool(averages(into)) == (name in ("around", "average", "wrapped average"))
    assert came_back(daemon, name, [one for _, one in pairs], [other for other, _ in pairs])
    with torch.no_grad():
        for mine, its in pairs:
            mine.copy_(its)
    for _ in range(2):
        assert all(map(torch.equal, in_order(into), in_order(expected)))
        train(into)
        train(expected)
    assert all(map(torch.equal, averages(into), averages(expected)))
    agent.close()


def test_an_old_checkpoint_is_recovered_without_the_average(daemon: Daemon) -> None:
    into, expected = made("average", seed=1), made("average")
    del into["ema"]
    train(expected)
    agent = old(daemon, "average")
    agent.recover(into, strict=False)
    assert came_back(daemon, "average", live(into), live(expected))
    assert settings(into) == settings(expected)
    agent.close()


def settings(state: State) -> list[tuple[str, Any]]:
    """Return the settings of the groups of the optimizer."""
    return [
        (key, value)
        for group in state["optim"].param_groups
        for key, value in group.items()
        if key != "params"
    ]
