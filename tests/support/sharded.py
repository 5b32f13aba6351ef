"""Models split over ranks in every way that torch has, for tests: built, trained, saved
and recovered on rank processes.

Every way gives the same tensors under the same names, so that a state saved in one way
can be recovered in another. The functions here run on a rank (see `ranks.py`) and keep
what they make in `HERE`. `Plain` is the form in which tensors come back from a rank: as
bytes, so that equal means bit-equal.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptd.agent import Agent
from ckptd.shared.errors import CkptdError, StructureMismatch
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plan import Plan
from tests.oracle.optimizers import EightBitMomentum
from tests.support import forks
from tests.support.daemons import Daemon, Home, home
from tests.support.ranks import HERE, Lend, Ranks
from tests.support.storage import source

# The first optimizer of every rank would import _dynamo.
forks.context().set_forkserver_preload([__name__, "torch._dynamo"])

KINDS = ("ddp", "fsdp2", "hsdp", "tp", "2d", "pipeline", "fsdp1", "fsdp1-flat")
STAGES = 6

Plain = dict[str, Any]
"""The (dtype, shape, bytes) of a tensor, or the value itself, by name."""


class Net(nn.Module):
    """A network of 10 -> 12 -> 5.

    Neither 10 nor 5 is a multiple of 2, 4 and 6 at once, so some shards are shorter and
    some are empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return normed


class Tied(nn.Module):
    """A network whose head shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.tanh(self.embedding(x.argmax(1))))
        return scores


class Three(nn.Module):
    """A network with three parameters, so that one of two shards has two of them, and
    the other has one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.only(x[:, :3])
        return scores


class One(nn.Module):
    """A network with one parameter, so that one of two shards is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.only(x[:, :1])
        return scores


class Stage(nn.Module):
    """The layers of this rank in a pipeline, each trained by itself.

    The number of ranks decides which layers these are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        for number in range(STAGES):
            # Made on every rank, so that the random numbers are the same.
            layer = nn.Linear(10, 3 + number)
            if number * world_size // STAGES == rank:
                self.add_module(f"layer{number}", layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.children()], 1)


def build(kind: str, seed: int, optimizer: str = "adamw", model: type[nn.Module] = Net) -> None:
    """Build the model and optimizer of this rank, from the same random numbers on all
    ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    made: nn.Module = Stage(rank, size) if kind == "pipeline" else model()
    data = rank  # ranks that hold parts of one layer need the same data
    if kind == "ddp":
        made = nn.parallel.DistributedDataParallel(made)
    elif kind == "fsdp2":
        made = _fully_sharded(made, mesh((size,)))
    elif kind == "hsdp":
        made = _fully_sharded(made, mesh((2, size // 2), "replicate", "shard"))
    elif kind == "tp":
        made, data = _tensor_parallel(made, mesh((size,))), 0
    elif kind == "2d":
        both = mesh((size // 2, 2), "data", "tensor")
        made = _tensor_parallel(made, both["tensor"])
        made, data = _fully_sharded(made, both["data"]), both["data"].get_local_rank()
    elif kind.startswith("fsdp1"):
        made = FullyShardedDataParallel(
            made, use_orig_params=kind == "fsdp1", device_id=torch.device("cpu")
        )
    HERE.update(kind=kind, model=made, optimizer=_optimizer(made, optimizer), count=0, data=data)


@functools.cache
def mesh(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    """Return the mesh of all ranks, which a process makes once. Torch keeps the groups
    of a mesh for ever.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names or None)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if isinstance(model, Net):
        fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    if kind == "eight-bit":
        return EightBitMomentum(model.parameters(), lr=0.1)
    assert kind == "groups"
    first, *rest = model.parameters()
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.3, "weight_decay": 0.2}, {"params": rest, "lr": 0.05}],
        foreach=False,
    )


def train(steps: int) -> None:
    """Train. The data of a step follows from its number, and the learning rates change."""
    model, optimizer = HERE["model"], HERE["optimizer"]
    for _ in range(steps):
        generator = torch.Generator().manual_seed(1000 * HERE["count"] + HERE["data"])
        model(torch.randn(8, 10, generator=generator)).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.75
        HERE["count"] += 1


def save(socket: Path, step: int) -> None:
    """Save a durable snapshot of everything."""
    agent(socket).snapshot(_state(), step=step, rng=False).wait("durable", timeout=60)


def refusal_of_save(socket: Path, step: int) -> str:
    """Return the error of a snapshot."""
    try:
        agent(socket).snapshot(_state(), step=step, rng=False, on_error="raise").wait(
            "durable", timeout=60
        )
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusal_of_recovery(socket: Path) -> str:
    """Return the error of a recovery."""
    try:
        agent(socket).recover(_state())
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def recover(socket: Path, same_partition: bool = False) -> tuple[str, int]:
    """Recover. Return the source and the step."""
    state = _state()
    recovered = agent(socket).recover(state, same_partition=same_partition)
    assert recovered is not None
    HERE["count"] = state["count"]
    return recovered.source, recovered.step


def agent(socket: Path) -> Agent:
    """Return the agent of this rank, made at its first use."""
    if "agent" not in HERE:
        HERE["agent"] = Agent("job", socket=socket)
    made: Agent = HERE["agent"]
    return made


def _state() -> dict[str, Any]:
    return {"model": HERE["model"], "optimizer": HERE["optimizer"], "count": HERE["count"]}


def set_rate(rate: float) -> None:
    for group in HERE["optimizer"].param_groups:
        group["lr"] = rate


def recover_another(socket: Path) -> str:
    """Return the error of a recovery into a state that has one key more than was saved."""
    try:
        agent(socket).recover({**_state(), "more": 1})
    except StructureMismatch as error:
        return str(error)
    return ""


def optimizer_entries() -> int:
    """Return the number of parameters for which the optimizer has a state."""
    return len(HERE["optimizer"].state)


def is_tied() -> bool:
    model = HERE["model"].module if HERE["kind"] == "ddp" else HERE["model"]
    return model.head.weight is model.embedding.weight


def whole() -> Plain:
    """Return model and optimizer as one rank would have them, gathered from their
    shards, or this rank's stage of a pipeline.
    """
    model, optimizer = HERE["model"], HERE["optimizer"]
    if isinstance(model, FullyShardedDataParallel):
        options = StateDictOptions(full_state_dict=True)
        tensors, saved = (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )
        states: Any = saved["state"]
        groups: Any = saved["param_groups"]
    else:
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        tensors, names = (
            bare.state_dict(),
            {parameter: name for name, parameter in bare.named_parameters()},
        )
        states = {names[parameter]: state for parameter, state in optimizer.state.items()}
        groups = [
            {**group, "params": [names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
    found = {f"model.{name}": plain(value) for name, value in tensors.items()}
    for name, state in states.items():
        found |= {f"optimizer.{name}.{key}": plain(value) for key, value in state.items()}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        found |= {
            f"group.{name}.{key}": value
            for name in group["params"]
            for key, value in settings.items()
        }
    return {**found, "count": HERE["count"]}


def plain(value: Any) -> Any:
    """Return a tensor as (dtype, shape, bytes), gathered first if it is sharded."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(value.dtype), tuple(value.shape), bytes(flat.tolist())


@dataclass(slots=True)
class Saved:
    """A saved state.

    ranks: the state of each rank when they saved. wanted: the whole state. later: the
    whole state one training step later.
    """

    place: Home
    kind: str
    world_size: int
    source: str
    ranks: list[Plain]
    wanted: Plain
    later: Plain


@contextmanager
def saved(
    kind: str,
    world_size: int,
    source: str,
    *,
    optimizer: str = "adamw",
    model: type[nn.Module] = Net,
    pool: Lend = Ranks,
) -> Iterator[Saved]:
    """Context manager.

    Train and save on `world_size` ranks. A recovery then reads from `source`: "storage",
    or "memory", for which the ranks are killed. Otherwise they come from `pool`.
    """
    with home() as place:
        daemon = Daemon(place, forked=True).wait_ready()
        try:
            with (Ranks if source == "memory" else pool)(world_size) as ranks:
                ranks.call(build, kind, 1, optimizer, model)
                ranks.call(train, 2)
                ranks.call(save, place.socket, 2)
                found = ranks.call(whole)
                ranks.call(train, 1)
                later = together(ranks.call(whole))
            if source == "storage":
                daemon.kill()
                shutil.rmtree(place.segments)
                daemon = Daemon(place, forked=True).wait_ready()
            yield Saved(place, kind, world_size, source, found, together(found), later)
        finally:
            daemon.close()


def together(found: list[Plain]) -> Plain:
    """Return the union of what all ranks have.

    The lowest rank counts, as for the buffers of DistributedDataParallel.
    """
    return {name: value for plain in reversed(found) for name, value in plain.items()}


def differing(found: Plain, wanted: Plain) -> list[str]:
    """Return the names of what differs, or is on one side only."""
    missing = object()
    return sorted(
        name
        for name in found.keys() | wanted.keys()
        if found.get(name, missing) != wanted.get(name, missing)
    )


def parts(place: Home, step: int) -> list[Plan]:
    """Return what each rank has written of a step."""
    (directory,) = (place.root / "job").glob(f"step-{step:08}.*")
    plans = []
    for path in sorted(directory.glob("*.ckpt")):
        fd = os.open(path, os.O_RDONLY)
        plans.append(PartReader(source(fd), path.name).plan)
        os.close(fd)
    return plans
