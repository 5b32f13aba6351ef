"""Programs on one or two ranks: how the tensors of a recovery, gathered from all ranks, compare with those that were saved.

Gradients are elementwise functions of the values alone, so that every way of splitting a model trains alike, to the bit. A recovery into
another way, or on another number of ranks, must then end with the saved tensors, and train on like the program that saved them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptd.agent import Agent, per_rank
from ckptd.shared.errors import CkptdError
from tests.oracle.build import canonical
from tests.oracle.extras import Meter
from tests.oracle.judge import AGREED, REFUSED, STEPS, Verdict
from tests.oracle.prints import differences, text
from tests.support.daemons import Home
from tests.support.ranks import HERE, RankFailed, Ranks

KINDS = ("ddp", "replicated", "fsdp1", "fsdp1-flat", "fsdp2", "tp")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, foreach=False),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=False),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True, foreach=False),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, foreach=False),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, foreach=False),
}
"""Optimizers that treat each element by itself."""
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "small": lambda: nn.Linear(1, 1),
    "norm": lambda: nn.BatchNorm1d(3),
    "embedding": lambda: nn.Embedding(5, 3),
}
SPLIT = {"up": ColwiseParallel, "down": RowwiseParallel}
SPOILT = ("parameter", "moment", "expert", "late")


@dataclass(frozen=True, slots=True)
class Spread:
    """A program on `world` ranks.

    layers: keys of `LAYERS`; two layers that tensor parallelism splits come first. grouping: "one", "decay" (two groups), "empty" (a second
    group without parameters) or "empty first". frozen: the number of the layer that does not train, or -1. compiled: the model is in
    torch.compile's wrapper. copied: the state has another module. own: the state has values of each rank's own, marked with `per_rank`.
    """

    kind: str
    world: int = 2
    layers: tuple[str, ...] = ()
    optimizer: str = "adam"
    grouping: str = "one"
    frozen: int = -1
    compiled: bool = False
    copied: bool = False
    own: bool = False
    seed: int = 0
    steps: int = 2


@dataclass(frozen=True, slots=True)
class SpreadPair:
    """Two programs, and from where the second recovers: "memory" or "storage". spoilt: how the ranks' replicas differ when they save."""

    before: Spread
    after: Spread
    source: str = "memory"
    spoilt: str = ""
    changes: tuple[str, ...] = ()
    seed: int = -1


def to_json(pair: SpreadPair) -> str:
    return json.dumps(asdict(pair))


def make(seed: int) -> SpreadPair:
    """Return the pair of a seed."""
    chance = Random(seed)
    before = Spread(
        chance.choice(KINDS),
        chance.choice((1, 2, 2, 2)),
        tuple(chance.choice(list(LAYERS)) for _ in range(chance.choice((0, 1, 2)))),
        chance.choice(list(OPTIMIZERS)),
        chance.choice(("one", "one", "decay", "empty", "empty first")),
        chance.choice((-1, -1, -1, 0)),
        chance.random() < 0.15,
        chance.random() < 0.15,
        chance.random() < 0.2,
        chance.randrange(1000),
        chance.choice((0, 1, 2, 2)),
    )
    after = replace(before, seed=before.seed + 1, steps=chance.choice((0, 0, 1)))
    pair = SpreadPair(before, after, chance.choice(("memory", "storage")), seed=seed)
    pair = _possible(pair)
    for _ in range(chance.choice((0, 1, 1, 2))):
        name = chance.choice(("kind", "kind", "world", "world", "compiled", "copied", "spoilt", "spoilt", "optimizer"))
        pair = replace(_changed(chance, pair, name), changes=(*pair.changes, name))
    return pair


def _changed(chance: Random, pair: SpreadPair, name: str) -> SpreadPair:
    after = pair.after
    if name == "kind":
        after = replace(after, kind=chance.choice(KINDS))
    elif name == "world":
        after = replace(after, world=3 - after.world, own=False)
        pair = replace(pair, before=replace(pair.before, own=False))
    elif name == "optimizer":
        after = replace(after, optimizer=chance.choice(list(OPTIMIZERS)))
    elif name == "spoilt":
        spread = replace(pair.before, world=2, kind=chance.choice(("ddp", "replicated")), own=False, steps=2)
        pair, after = replace(pair, before=spread, spoilt=chance.choice(SPOILT)), replace(spread, seed=1)
    else:
        after = replace(after, compiled=not after.compiled) if name == "compiled" else replace(after, copied=not after.copied)
    return _possible(replace(pair, after=after))


def _possible(pair: SpreadPair) -> SpreadPair:
    """Return the pair without what FSDP1 cannot do: freeze a layer, or have flat parameters compiled or in two groups."""
    kinds = {pair.before.kind, pair.after.kind}
    limits: dict[str, Any] = {}
    if any(kind.startswith("fsdp1") for kind in kinds):
        limits |= {"frozen": -1}
    if "fsdp1-flat" in kinds:
        limits |= {"compiled": False} | ({"grouping": "one"} if pair.before.grouping == "decay" else {})
    return replace(pair, before=replace(pair.before, **limits), after=replace(pair.after, **limits))


# -- on a rank


class Net(nn.Module):
    """Two layers that tensor parallelism splits, and any others. Its sizes leave uneven and empty shards."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)
        self.more = nn.ModuleList(LAYERS[name]() for name in layers)


def build(plan: Spread) -> None:
    """Make the objects of this rank, from the same random numbers on all ranks."""
    logging.getLogger("ckptd").setLevel(logging.CRITICAL)
    torch.manual_seed(plan.seed)
    net = Net(plan.layers)
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
        model = FullyShardedDataParallel(model, use_orig_params=plan.kind == "fsdp1", device_id=torch.device("cpu"))
    if plan.compiled:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    optimizer = OPTIMIZERS[plan.optimizer](_groups(plan, [parameter for parameter in model.parameters() if parameter.requires_grad]))
    state: dict[str, Any] = {"model": model, "optim": optimizer, "meter": Meter(0.0), "number": 0}
    if plan.copied:
        state["ema"] = nn.Linear(2, 2)
    if plan.own:
        state["own"] = {"loader": per_rank({"position": 0, "order": torch.zeros(2)})}
    HERE.update(plan=plan, state=state, count=0)
    for _ in range(plan.steps):
        step()


def _groups(plan: Spread, parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
    if plan.grouping == "decay" and plan.kind != "fsdp1-flat":
        return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
    if plan.grouping == "empty":
        return [{"params": parameters}, {"params": [], "weight_decay": 0.5, "label": "none"}]
    if plan.grouping == "empty first":
        return [{"params": [], "weight_decay": 0.5, "label": "none"}, {"params": parameters}]
    return [{"params": parameters}]


def step() -> None:
    """Train one step."""
    state = HERE["state"]
    HERE["count"] += 1
    for group in state["optim"].param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.tanh(parameter.detach()) * 0.25 + 0.125 * HERE["count"]
    state["optim"].step()
    for group in state["optim"].param_groups:
        group["lr"] *= 0.75
    state["meter"].update(HERE["count"])
    state["number"] += HERE["count"]
    if "own" in state:
        mine = state["own"]["loader"].value
        mine["position"] += 10 * dist.get_rank() + 1
        mine["order"] = mine["order"] + dist.get_rank()
    for module in state["model"].modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.add_(HERE["count"])  # type: ignore[union-attr]


def steps(count: int) -> None:
    for _ in range(count):
        step()


@torch.no_grad()
def spoil(how: str) -> None:
    """Make every element of something differ from the other rank's."""
    state = HERE["state"]
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    parameters = list(state["model"].parameters())
    if how == "moment" and state["optim"].state:
        for entry in state["optim"].state.values():
            for value in entry.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.add_(1.0)
    elif how == "expert":
        parameters[-1].add_(1.0)
    else:
        for parameter in parameters:
            parameter.add_(1.0)


def save(socket: Path, job: str, number: int) -> str:
    """Take a snapshot. Return the error of the snapshot, or ""."""
    if number == 0:
        HERE["agent"] = Agent(job, socket=socket)
    try:
        HERE["agent"].snapshot(HERE["state"], step=number, on_error="raise").wait("durable", timeout=60)
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def recover(socket: Path, job: str, again: bool) -> str:
    """Recover. `again` makes another agent. Return the error, or ""."""
    if again:
        HERE["agent"] = Agent(job, socket=socket)
    try:
        recovered = HERE["agent"].recover(HERE["state"])
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    assert recovered is not None
    return ""


def close() -> None:
    if (agent := HERE.pop("agent", None)) is not None:
        with suppress(CkptdError):
            agent.close()


def set_count(count: int) -> None:
    HERE["count"] = count


def whole() -> dict[str, str]:
    """Return the print of the state as one rank would have it, gathered from the shards of all ranks."""
    state = HERE["state"]
    model, optimizer = state["model"], state["optim"]
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
        groups = [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups]
    found = {f"model.{canonical(name)}": text(_full(value)) for name, value in tensors.items()}
    for name, entry in states.items():
        found |= {f"optim.{canonical(name)}.{key}": text(_full(value)) for key, value in entry.items()}
    for group in groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "foreach", "param_names")}
        found |= {f"group of {canonical(name)}: {key}": text(value) for name in group["params"] for key, value in settings.items()}
    empty = [{k: v for k, v in group.items() if k not in ("params", "foreach")} for group in optimizer.param_groups if not group["params"]]
    found["groups without parameters"] = text(empty)
    for key in ("meter", "number"):
        found[key] = text(state[key])
    if "own" in state:
        found[f"own of rank {dist.get_rank()}"] = text(state["own"]["loader"].value)
    return found


def _named_groups(model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer over an FSDP1 model. One flat parameter stands for all parameters of the model."""
    if HERE["plan"].kind == "fsdp1-flat":
        every = [name for name in names if name.rpartition(".")[2] in ("weight", "bias")]
        return [{**group, "params": every if group["params"] else []} for group in optimizer.param_groups]
    of = {parameter: canonical(name) for name, parameter in model.named_parameters()}
    return [{**group, "params": [of[parameter] for parameter in group["params"]]} for group in optimizer.param_groups]


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach() if isinstance(value, torch.Tensor) else value


# -- above the ranks


class Pools:
    """Rank processes that judge many pairs: one alone, and two together. They are started again after one has died."""

    def __init__(self, place: Home, after: str = "") -> None:
        """`after`: how each rank spoils its state once it has recovered, for the tests of the rig."""
        self._place, self._number, self._after = place, 0, after
        self._pools: dict[int, Ranks] = {}

    def _pool(self, world: int) -> Ranks:
        if world not in self._pools or not self._pools[world].all_live:
            self._end(world)
            self._pools[world] = Ranks(world)
        return self._pools[world]

    def _end(self, world: int) -> None:
        if (pool := self._pools.pop(world, None)) is not None:
            for rank in range(world):
                pool.kill(rank)

    def close(self) -> None:
        for world in list(self._pools):
            self._end(world)

    def judge(self, pair: SpreadPair) -> Verdict:
        """Return the verdict of a pair."""
        self._number += 1
        try:
            return self._judge(pair, f"spread-{self._number}-{pair.seed}")
        except RankFailed as error:
            self.close()
            return Verdict("a rank failed", str(error)[-600:])
        except (TimeoutError, EOFError, ConnectionError) as error:
            self.close()
            return Verdict("a rank died or hung", repr(error))

    def _judge(self, pair: SpreadPair, job: str) -> Verdict:
        first, second = self._pool(pair.before.world), self._pool(pair.after.world)
        socket = self._place.socket
        first.call(build, pair.before)
        try:
            errors = []
            if pair.spoilt and pair.spoilt != "late":
                first.call(spoil, pair.spoilt)
            for number in range(4 if pair.spoilt else 1):
                if number == 1 and pair.spoilt == "late":
                    first.call(spoil, "parameter")
                errors += [error for error in first.call(save, socket, job, number) if error]
            if pair.spoilt:
                return _spoilt(pair, errors)
            if errors:
                return Verdict("snapshot refused", errors[0])
            wanted = _together(first.call(whole))
            again = pair.source == "storage" or pair.before.world != pair.after.world
            first.call(steps, STEPS)
            later = _together(first.call(whole))
            count = pair.before.steps
            if again:
                first.call(close)
            second.call(build, pair.after)
            refusals = [error for error in second.call(recover, socket, job, again) if error]
            if refusals:
                return _refused(pair, refusals[0])
            if self._after:
                second.call(spoil, self._after)
            found = _together(second.call(whole))
            second.call(set_count, count)
            second.call(steps, STEPS)
            trained = _together(second.call(whole))
            for when, mine, theirs in (("recovered", found, wanted), ("trained", trained, later)):
                if names := differences(mine, theirs):
                    shown = "; ".join(f"{name}: ckptd {mine.get(name)} / saved {theirs.get(name)}" for name in names[:3])
                    return Verdict("tensors differ from the saved ones", f"{when}, {len(names)} differ: {shown}")
            return Verdict(AGREED)
        finally:
            for pool in {id(one): one for one in (first, second)}.values():
                with suppress(RankFailed, TimeoutError, EOFError, ConnectionError):
                    pool.call(close)


def _together(found: list[dict[str, str]]) -> dict[str, str]:
    """Return the union of what all ranks have. The lowest rank counts, as for the buffers of DistributedDataParallel."""
    return {name: value for one in reversed(found) for name, value in one.items()}


def _spoilt(pair: SpreadPair, errors: list[str]) -> Verdict:
    """Judge snapshots of replicas that differ in every element: at most two may succeed, and the failure says what differs and why."""
    if pair.spoilt == "moment" and pair.before.optimizer == "sgd":
        return Verdict(AGREED)
    if not errors:
        return Verdict("replicas that differ were saved as one", f"spoilt: {pair.spoilt}")
    if "per_rank" not in errors[-1] or not ("model" in errors[-1] or "optim" in errors[-1]):
        return Verdict("the refusal names no key", errors[-1])
    return Verdict(REFUSED)


def _refused(pair: SpreadPair, error: str) -> Verdict:
    if pair.before.optimizer != pair.after.optimizer or pair.before.copied != pair.after.copied:
        return Verdict(REFUSED)
    if pair.before.grouping == "decay" and "fsdp1-flat" in (pair.before.kind, pair.after.kind):
        return Verdict(REFUSED)  # parameters of two groups cannot be in one flat parameter
    return Verdict("refused what must come back", error)


def shrink(pair: SpreadPair, verdict: Verdict, judge: Callable[[SpreadPair], Verdict]) -> tuple[SpreadPair, Verdict]:
    """Return a pair with as many plain fields as still give a verdict of the same kind."""
    plain = Spread("replicated", optimizer="sgd", steps=1)
    for one in fields(Spread):
        value = getattr(plain, one.name)
        both = replace(pair, before=replace(pair.before, **{one.name: value}), after=replace(pair.after, **{one.name: value}))
        for smaller in (both, replace(pair, after=replace(pair.after, **{one.name: getattr(pair.before, one.name)}))):
            if smaller != pair and one.name != "seed" and (found := judge(smaller)).kind == verdict.kind:
                pair, verdict = smaller, found
                break
    return pair, verdict


def features(pair: SpreadPair) -> tuple[str, ...]:
    """Return what is not plain in a pair, and what differs between its two programs."""
    plain = Spread("replicated", optimizer="sgd", steps=1)
    found = {f"spoilt {pair.spoilt}"} if pair.spoilt else set()
    for one in fields(Spread):
        mine, theirs = getattr(pair.before, one.name), getattr(pair.after, one.name)
        if one.name not in ("seed", "steps", "layers") and (mine, theirs) != 2 * (getattr(plain, one.name),):
            found.add(f"{one.name} {mine}" + (f" -> {theirs}" if theirs != mine else ""))
    return tuple(sorted(found))


def from_json(line: str) -> SpreadPair:
    """Return the pair that `to_json` has written."""
    made = json.loads(line)
    before, after = (Spread(**{**made[which], "layers": tuple(made[which]["layers"])}) for which in ("before", "after"))
    return SpreadPair(before, after, made["source"], made["spoilt"], tuple(made["changes"]), made["seed"])
