"""The functions that run on a rank: they make the objects of a program, train, spoil,
save and recover them, and gather their print.

Gradients are elementwise functions of the values alone, so that every way of splitting
a model trains alike, to the bit. A recovery into another way, or on another number of
ranks, must then end with the saved tensors, and train on like the program that saved
them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptd.agent import Agent, per_rank
from ckptd.shared.errors import CkptdError
from tests.oracle.build import canonical
from tests.oracle.extras import Meter
from tests.oracle.optimizers import EightBitMomentum
from tests.oracle.prints import text
from tests.oracle.spread import Spread
from tests.oracle.tensors import EightBit
from tests.support.ranks import HERE

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, foreach=False),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=False),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True, foreach=False),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, foreach=False),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, foreach=False),
    "eight-bit": lambda groups: EightBitMomentum(groups, lr=0.1),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "small": lambda: nn.Linear(1, 1),
    "norm": lambda: nn.BatchNorm1d(3),
    "embedding": lambda: nn.Embedding(5, 3),
}
SPLIT = {"up": ColwiseParallel, "down": RowwiseParallel}


class Net(nn.Module):
    """Two layers that tensor parallelism splits, and any others.

    Its sizes leave uneven and empty shards.
    """

    def __init__(self, layers: tuple[str, ...], experts: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)
        self.more = nn.ModuleList(LAYERS[name]() for name in layers)
        if experts:
            self.experts = nn.Linear(2, 3)


def build(plan: Spread) -> None:
    """Make the objects of this rank, from the same random numbers on all ranks."""
    logging.getLogger("ckptd").setLevel(logging.CRITICAL)
    torch.manual_seed(plan.seed)
    net = Net(plan.layers, plan.experts == "inside")
    model: nn.Module = net
    if plan.frozen >= 0:
        net.up.requires_grad_(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if plan.kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif plan.kind == "fsdp2":
        fully_shard(net.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif plan.kind == "tp":
        model = parallelize_module(model, mesh, {name: split() for name, split in SPLIT.items()})
    elif plan.kind.startswith("fsdp1"):
        model = FullyShardedDataParallel(
            model, use_orig_params=plan.kind == "fsdp1", device_id=torch.device("cpu")
        )
    if plan.compiled:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    if plan.experts == "inside":
        _differ(net.experts)
    optimizer = OPTIMIZERS[plan.optimizer](
        _groups(plan, [parameter for parameter in model.parameters() if parameter.requires_grad])
    )
    state: dict[str, Any] = {"model": model, "optim": optimizer, "meter": Meter(0.0), "number": 0}
    if plan.copied:
        state["ema"] = nn.Linear(2, 2)
    if plan.own:
        order = torch.zeros(2)  # under two keys, as metrics of a training are
        state["own"] = {"loader": per_rank({"position": 0, "order": order, "first": order[:1]})}
    HERE.update(plan=plan, state=state, experts={}, count=0)
    if plan.experts and plan.experts != "inside":
        HERE["experts"] = _experts(plan.experts)
        state |= {
            key: per_rank(value) if plan.marked else value for key, value in HERE["experts"].items()
        }
    for _ in range(plan.steps):
        step()


def _groups(plan: Spread, parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
    if plan.grouping == "decay" and plan.kind != "fsdp1-flat":
        return [
            {"params": parameters[::2], "weight_decay": 0.1},
            {"params": parameters[1::2], "weight_decay": 0.0},
        ]
    if plan.grouping == "empty":
        return [{"params": parameters}, {"params": [], "weight_decay": 0.5, "label": "none"}]
    if plan.grouping == "empty first":
        return [{"params": [], "weight_decay": 0.5, "label": "none"}, {"params": parameters}]
    return [{"params": parameters}]


def _experts(form: str) -> dict[str, Any]:
    """Return tensors of this rank's own, by the keys that they have in the state."""
    if form == "tensor":
        return {"experts": torch.randn(3, 2) + dist.get_rank()}
    if form == "dict":
        return {
            "experts": {
                "weight": torch.randn(3, 2) + dist.get_rank(),
                "load": torch.arange(3) + dist.get_rank(),
                "name": "e",
            }
        }
    module = nn.Linear(2, 3)
    _differ(module)
    return {"experts": module} | (
        {"experts_optim": torch.optim.Adam(module.parameters(), lr=0.1)}
        if form == "trained"
        else {}
    )


@torch.no_grad()
def _differ(module: nn.Module) -> None:
    """Make every element of a module another one on each rank."""
    for parameter in module.parameters():
        parameter.add_(0.5 * dist.get_rank())


def step() -> None:
    """Train one step."""
    state = HERE["state"]
    HERE["count"] += 1
    _descend(state["optim"])
    for group in state["optim"].param_groups:
        group["lr"] *= 0.75
    state["meter"].update(HERE["count"])
    state["number"] += HERE["count"]
    if "own" in state:
        mine = state["own"]["loader"].value
        mine["position"] += 10 * dist.get_rank() + 1
        mine["order"] = mine["order"] + dist.get_rank()
        mine["first"] = mine["order"][:1]
    if "experts_optim" in state:
        _descend(_own("experts_optim"))
    elif "experts" in state:
        for tensor in _tensors(_own("experts")):
            tensor.add_(HERE["count"] * (1 + dist.get_rank()))
    for module in state["model"].modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.add_(HERE["count"])  # type: ignore[union-attr]


def _descend(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.tanh(parameter.detach()) * 0.25 + 0.125 * HERE["count"]
    optimizer.step()


def _own(key: str) -> Any:
    """Return a value of the state without its mark."""
    value = HERE["state"][key]
    return value.value if HERE["plan"].marked else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, nn.Module):
        return [parameter.detach() for parameter in value.parameters()]
    return (
        [value]
        if isinstance(value, torch.Tensor)
        else [one for one in value.values() if isinstance(one, torch.Tensor)]
    )


def steps(count: int) -> None:
    for _ in range(count):
        step()


# -- spoiling


@torch.no_grad()
def spoil(how: str, seed: int) -> list[str]:
    """Make something differ from the other ranks: every element, or one bit of one
    element. Return the keys that differ now.

    All ranks return the same keys. The seed chooses the element, and the rank that
    changes it.
    """
    chance, world = Random(seed), dist.get_world_size()
    spoilt = dist.get_rank() == (chance.randrange(world) if how == "element" else world - 1)
    tensors = dict(_replicas(how))
    if how == "element":
        tensors = dict([chance.choice(list(tensors.items()))])
    elif how == "expert":
        tensors = dict(list(tensors.items())[-1:])
    for tensor in tensors.values() if spoilt else ():
        if how == "element":
            flat = tensor.reshape(-1).view(torch.uint8)
            flat[chance.randrange(flat.numel())] ^= 1 << chance.randrange(8)
        else:
            tensor.add_(1)
    return list(tensors)


def _replicas(how: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the key and the memory of each tensor that all ranks hold, and that may be
    spoilt in this way.
    """
    state = HERE["state"]
    names = {parameter: canonical(name) for name, parameter in state["model"].named_parameters()}
    if how == "buffer":
        for name, buffer in state["model"].named_buffers():
            yield f"model.{canonical(name)}", buffer
    if how in ("parameter", "expert", "element"):
        for parameter, name in names.items():
            if (found := _whole_copy(parameter.detach())) is not None:
                yield f"model.{name}", found
    if how in ("moment", "element"):
        for parameter, entry in state["optim"].state.items():
            for key, value in entry.items():
                if isinstance(value, EightBit):
                    yield f"optim.state.{names[parameter]}.{key}", value.codes
                elif (
                    isinstance(value, torch.Tensor)
                    and (value.dim() or how == "element")
                    and (found := _whole_copy(value)) is not None
                ):
                    yield f"optim.state.{names[parameter]}.{key}", found


def _whole_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of a tensor that all ranks hold whole, or None for a shard."""
    if isinstance(tensor, DTensor):
        return (
            tensor._local_tensor
            if all(placement.is_replicate() for placement in tensor.placements)
            else None
        )
    return tensor


def quantized() -> bool:
    """Return True if this rank holds a moment that consists of several tensors, as a
    shard or as a part of a flat parameter.
    """
    kind = HERE["plan"].kind
    flat = kind == "fsdp1-flat" or (kind == "fsdp1" and dist.get_world_size() > 1)
    for entry in HERE["state"]["optim"].state.values():
        for value in entry.values():
            if isinstance(value._local_tensor if isinstance(value, DTensor) else value, EightBit):
                return isinstance(value, DTensor) or flat
    return False


def _anywhere(found: bool) -> bool:
    """Return True on all ranks if it holds on any."""
    most = torch.tensor(int(found))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return bool(most)


# -- saving and recovering


def save(socket: Path, job: str, step: int, first: bool, compare: int) -> str:
    """Take a snapshot.

    `first` makes the agent, with the setting `compare`. Return the error of the
    snapshot, or "".
    """
    if first:
        HERE["agent"] = _agent(socket, job, compare)
    try:
        HERE["agent"].snapshot(HERE["state"], step=step, on_error="raise").wait(
            "durable", timeout=60
        )
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _agent(socket: Path, job: str, compare: int) -> Agent:
    if compare:
        os.environ["CKPTD_COMPARE_REPLICAS"] = str(compare)
    try:
        return Agent(job, socket=socket)
    finally:
        os.environ.pop("CKPTD_COMPARE_REPLICAS", None)


def recover(socket: Path, job: str, again: bool) -> tuple[str, int | None, str]:
    """Recover.

    `again` makes another agent. Return the error, or "", and the step and the source of
    the snapshot, or None and "".
    """
    if again:
        HERE["agent"] = Agent(job, socket=socket)
    try:
        recovered = HERE["agent"].recover(HERE["state"])
    except CkptdError as error:
        return f"{type(error).__name__}: {error}", None, ""
    return ("", None, "") if recovered is None else ("", recovered.step, recovered.source)


def close() -> None:
    if (agent := HERE.pop("agent", None)) is not None:
        with suppress(CkptdError):
            agent.close()


def set_count(count: int) -> None:
    HERE["count"] = count


# -- prints


def whole() -> dict[str, str]:
    """Return the print of the state as one rank would have it, gathered from the shards
    of all ranks.
    """
    state = HERE["state"]
    model, optimizer = state["model"], state["optim"]
    # FSDP1 cannot gather such moments
    if HERE["plan"].kind.startswith("fsdp1") and _anywhere(quantized()):
        entries = dict(enumerate(optimizer.state.values()))
        return {
            f"optim.{number}.{key} of rank {dist.get_rank()}": text(value)
            for number in entries
            for key, value in entries[number].items()
        }
    if HERE["plan"].kind.startswith("fsdp1"):
        options = StateDictOptions(full_state_dict=True)
        tensors: dict[str, Any] = get_model_state_dict(model, options=options)
        if optimizer.state:
            full: Any = get_optimizer_state_dict(model, optimizer, options=options)
            states, groups = full["state"], full["param_groups"]
        else:  # torch would make the optimizer take a step
            states, groups = {}, _named_groups(model, optimizer, list(tensors))
    else:
        tensors = model.state_dict()
        names = {parameter: canonical(name) for name, parameter in model.named_parameters()}
        states = {names[parameter]: entry for parameter, entry in optimizer.state.items()}
        groups = [
            {**group, "params": [names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
    found = {f"model.{canonical(name)}": text(_full(value)) for name, value in tensors.items()}
    for name, entry in states.items():
        for key, value in entry.items():
            # Which nothing can gather.
            if isinstance(value, DTensor) and _anywhere(isinstance(value._local_tensor, EightBit)):
                found[f"optim.{canonical(name)}.{key} of rank {dist.get_rank()}"] = text(
                    value._local_tensor
                )
            else:
                found[f"optim.{canonical(name)}.{key}"] = text(_full(value))
    for group in groups:
        settings = {
            key: value
            for key, value in group.items()
            if key not in ("params", "foreach", "param_names")
        }
        found |= {
            f"group of {canonical(name)}: {key}": text(value)
            for name in group["params"]
            for key, value in settings.items()
        }
    empty = [
        {k: v for k, v in group.items() if k not in ("params", "foreach")}
        for group in optimizer.param_groups
        if not group["params"]
    ]
    found["groups without parameters"] = text(empty)
    for key in ("meter", "number"):
        found[key] = text(state[key])
    if "own" in state:
        found[f"own of rank {dist.get_rank()}"] = text(state["own"]["loader"].value)
    for key in HERE["experts"]:
        found[f"{key} of rank {dist.get_rank()}"] = text(_own(key))
    return found


def _named_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str]
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer over an FSDP1 model.

    One flat parameter stands for all parameters of the model.
    """
    if HERE["plan"].kind == "fsdp1-flat":
        every = [name for name in names if name.rpartition(".")[2] in ("weight", "bias")]
        return [
            {**group, "params": every if group["params"] else []}
            for group in optimizer.param_groups
        ]
    of = {parameter: canonical(name) for name, parameter in model.named_parameters()}
    return [
        {**group, "params": [of[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _full(value: Any) -> Any:
    return (
        value.full_tensor()
        if isinstance(value, DTensor)
        else value.detach()
        if isinstance(value, torch.Tensor)
        else value
    )
