"""The kinds of optimizers that programs are made of: all of torch's, and a dozen of the
kinds that users write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import optim
from torch.distributed.tensor import DTensor

from tests.oracle.tensors import BLOCK, Doubled, EightBit


class Own(optim.Optimizer):
    """The common part of the optimizers of users' kinds: a momentum, and a state that
    `keep` writes in its own form.
    """

    def __init__(self, params: Any, lr: Any = 0.01, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(float(group["lr"]) * self.keep(parameter, parameter.grad, group))

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        """Update the state of a parameter. Return the direction of its step."""
        raise NotImplementedError


class Factored(Own):
    """Keeps sums over rows and columns in place of a second moment, as Adafactor does."""

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        state = self.state[parameter]
        flat = grad.abs().reshape(grad.shape[0] if grad.dim() else 1, -1)
        rows = state.setdefault("rows", flat.new_zeros(flat.shape[0]))
        columns = state.setdefault("columns", flat.new_zeros(flat.shape[1]))
        rows.add_(flat.sum(1))
        columns.add_(flat.sum(0))
        state["step"] = state.get("step", 0) + 1
        return grad / (1 + rows.sum() + columns.sum())


class Packed(Own):
    """Keeps its momentum in bytes, two to a number, with a scale: a state of another
    shape and dtype than the parameter.
    """

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        state = self.state[parameter]
        codes = state.setdefault("codes", torch.zeros(2 * grad.numel(), dtype=torch.uint8))
        state["scale"] = torch.as_tensor(grad.abs().sum().item() + 1, dtype=torch.float64)
        codes.add_(torch.arange(2 * grad.numel(), dtype=torch.uint8) + 1)
        return grad * (1 + codes.float().sum().item() / 1000)


class Shared(Own):
    """Keeps entries in its state that belong to no parameter."""

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        shared = self.state.setdefault("shared", {"norm": torch.zeros(()), "count": 0})  # type: ignore[call-overload]
        shared["norm"].add_(grad.abs().sum().float().cpu())
        shared["count"] += 1
        self.state[parameter]["momentum"] = grad + self.state[parameter].get("momentum", 0)
        return self.state[parameter]["momentum"] * (1 + shared["count"] / 100)


class Nested(Own):
    """Keeps dicts, lists and tuples with tensors as the state of a parameter."""

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        state = self.state[parameter]
        if not state:
            state["inner"] = {"momentum": torch.zeros_like(grad), "history": []}
            state["pair"] = (torch.zeros_like(grad), 0)
            state["note"] = "fresh"
        state["inner"]["momentum"].add_(grad)
        state["inner"]["history"].append(grad.sum().clone())
        state["pair"] = (state["pair"][0] + grad, state["pair"][1] + 1)
        state["note"] = f"seen {len(state['inner']['history'])}"
        return state["inner"]["momentum"] + state["pair"][0] * len(state["inner"]["history"])


class Wide(Own):
    """Keeps a master copy in double precision beside its parameter, as mixed precision
    does.
    """

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        state = self.state[parameter]
        wide = torch.complex128 if grad.is_complex() else torch.float64
        master = state.setdefault("master", parameter.detach().to(wide, copy=True))
        master.sub_(grad.to(wide), alpha=0.001)
        return parameter - master.to(parameter.dtype)


class Saved(Own):
    """Overrides `state_dict` and `load_state_dict`, and has a number and a tensor
    beside its state.
    """

    def __init__(self, params: Any, lr: Any = 0.01) -> None:
        super().__init__(params, lr)
        self.rounds, self.memory = 0, torch.zeros(2)

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        self.rounds += 1
        self.memory = self.memory + self.rounds
        state = self.state[parameter]
        state["momentum"] = grad * self.rounds + state.get("momentum", 0)
        return state["momentum"]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds, "memory": self.memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.rounds, self.memory = state_dict.pop("rounds"), state_dict.pop("memory").clone()
        super().load_state_dict(state_dict)


class Exact(Own):
    """Puts its own loaded state into place, because the base class would convert the
    moments to the parameter's dtype.
    """

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        state = self.state[parameter]
        wide = torch.complex128 if grad.is_complex() else torch.float64
        state["momentum"] = grad.to(wide) + state.get("momentum", 0)
        return state["momentum"].to(grad.dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter]["momentum"] = state_dict["state"][number]["momentum"].clone()


class Scheduled(Own):
    """Keeps counters and histories in its param groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: Any = 0.01) -> None:
        super().__init__(params, lr, k=0, weight_sum=0.0, history=[], running=torch.zeros(2))

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        group["k"] += 1
        group["weight_sum"] += 1.0 / group["k"]
        group["history"] = [*group["history"], group["k"]]
        group["running"] = group["running"] + group["k"]
        state = self.state[parameter]
        state["z"] = grad + state.get("z", 0)
        return state["z"] * group["weight_sum"]


class Anchored(Own):
    """Makes its whole state when it is built, not at the first step."""

    def __init__(self, params: Any, lr: Any = 0.01) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"anchor": parameter.detach().clone(), "count": 0}

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        state = self.state[parameter]
        state["count"] += 1
        return (parameter - state["anchor"]) * state["count"] + grad


class Alone(Own):
    """Keeps one tensor for all parameters of a group, in the state of the first of
    them, as flattening optimizers do.
    """

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        first = group["params"][0]
        total = sum(one.numel() for one in group["params"])
        flat = self.state[first].setdefault("flat", torch.zeros(total))
        flat.add_(float(grad.abs().sum()))
        return grad * (1 + float(flat.sum()) / 1000)


class EightBitMomentum(Own):
    """Keeps its momentum in 8 bits where the local tensor has whole blocks, inside
    DTensor for a parameter that is one, as torchao does.
    """

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Any:
        state, (mine, local) = self.state[parameter], map(_local, (parameter, grad))
        if "momentum" not in state:
            whole = mine.numel() >= BLOCK and mine.numel() % BLOCK == 0
            made = EightBit.quantized(torch.zeros_like(mine)) if whole else torch.zeros_like(mine)
            state["momentum"] = _like(parameter, made)
        moment = _local(state["momentum"])
        moment.copy_(0.9 * (moment.values_of() if isinstance(moment, EightBit) else moment) + local)
        return _like(parameter, moment.values_of() if isinstance(moment, EightBit) else moment)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a local tensor in the form of its parameter."""
    if not isinstance(parameter, DTensor):
        return local
    shape: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, **shape
    )


class Holder:
    """Holds an optimizer, and has its `state_dict` and `load_state_dict`, as
    accelerate's wrapper does.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of optimizer.

    make: builds it from groups of parameters and a learning rate. accepts: the
    parameters that it can train. sparse: gradients are sparse. closure: `step` takes a
    closure. single: it takes one group only. fused: its kernel does not compare the
    shapes of moments and parameters, and reads beyond moments that are too small.
    """

    make: Callable[[Any, Any], optim.Optimizer]
    accepts: Callable[[torch.Tensor], bool] = lambda parameter: True
    sparse: bool = False
    closure: bool = False
    single: bool = False
    fused: bool = False


def _real(parameter: torch.Tensor) -> bool:
    return not parameter.is_complex()


def _filled(parameter: torch.Tensor) -> bool:
    return _real(parameter) and parameter.numel() > 0


def _kernel(parameter: torch.Tensor) -> bool:
    """Return True for a parameter that torch's fused kernels take.

    They know no subclasses, and round short floats by their addresses.
    """
    return parameter.dtype in (torch.float32, torch.float64) and not isinstance(parameter, Doubled)


def _of(cls: Any, **settings: Any) -> Callable[[Any, Any], optim.Optimizer]:
    return lambda groups, lr: cls(groups, lr=lr, **settings)


OPTIMIZERS: dict[str, Kind] = {
    "sgd": Kind(_of(optim.SGD)),
    "momentum": Kind(_of(optim.SGD, momentum=0.9, nesterov=True)),
    "sgd-fused": Kind(_of(optim.SGD, momentum=0.9, fused=True), _kernel, fused=True),
    "adam": Kind(_of(optim.Adam)),
    "amsgrad": Kind(_of(optim.Adam, amsgrad=True, weight_decay=0.1)),
    "adam-foreach": Kind(_of(optim.Adam, foreach=True), _kernel),
    "adam-fused": Kind(_of(optim.Adam, fused=True), _kernel, fused=True),
    "adam-decoupled": Kind(_of(optim.Adam, decoupled_weight_decay=True, weight_decay=0.1)),
    "adamw": Kind(_of(optim.AdamW)),
    "adamax": Kind(_of(optim.Adamax)),
    "nadam": Kind(_of(optim.NAdam)),
    "radam": Kind(_of(optim.RAdam)),
    "asgd": Kind(_of(optim.ASGD), lambda parameter: not isinstance(parameter, Doubled)),
    "adadelta": Kind(_of(optim.Adadelta)),
    "adagrad": Kind(_of(optim.Adagrad, initial_accumulator_value=0.1)),
    "rmsprop": Kind(_of(optim.RMSprop)),
    "rmsprop-centered": Kind(_of(optim.RMSprop, centered=True, momentum=0.5)),
    "rprop": Kind(_of(optim.Rprop), _real),
    "adafactor": Kind(_of(optim.Adafactor), _filled),
    "muon": Kind(_of(optim.Muon), lambda parameter: parameter.dim() == 2 and _filled(parameter)),
    "sparse-adam": Kind(
        _of(optim.SparseAdam),
        lambda parameter: parameter.dim() == 2 and _real(parameter),
        sparse=True,
    ),
    "lbfgs": Kind(
        lambda groups, lr: optim.LBFGS(groups, lr=float(lr), max_iter=2),
        _real,
        closure=True,
        single=True,
    ),
    "factored": Kind(_of(Factored), _filled),
    "packed": Kind(_of(Packed), _real),
    "shared": Kind(_of(Shared)),
    "nested": Kind(_of(Nested)),
    "wide": Kind(_of(Wide)),
    "saved": Kind(_of(Saved)),
    "exact": Kind(_of(Exact)),
    "scheduled": Kind(_of(Scheduled)),
    "anchored": Kind(_of(Anchored)),
    "alone": Kind(_of(Alone), _real),
}
ADAMS = ("adam", "adamw", "adam-foreach", "adam-fused", "radam")
"""Kinds that keep the same state, and whose settings are alike enough that one loads
the state of another in torch.
"""


def _decay(named: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    return [[one for one in named if one[1].dim() > 1], [one for one in named if one[1].dim() <= 1]]


def _halves(named: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    return [named[: len(named) // 2], named[len(named) // 2 :]]


def _each(named: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    return [[one] for one in named]


GROUPINGS: dict[
    str, Callable[[list[tuple[str, torch.Tensor]]], list[list[tuple[str, torch.Tensor]]]]
] = {
    "one": lambda named: [named],
    "decay": _decay,
    "undecay": lambda named: _decay(named)[::-1],
    "halves": _halves,
    "each": _each,
}


def _stamp(optimizer: optim.Optimizer) -> None:
    """Add a number of the caller's own to the saved dict, and take it back from there."""
    optimizer.stamp = 7  # type: ignore[attr-defined]

    def write(self: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "stamp": self.stamp}

    def read(self: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.stamp = state_dict["stamp"]
        return {key: value for key, value in state_dict.items() if key != "stamp"}

    optimizer.register_state_dict_post_hook(write)
    optimizer.register_load_state_dict_pre_hook(read)


def _doubled(optimizer: optim.Optimizer) -> None:
    """Save every floating tensor of the state multiplied by two, and halve it before
    loading.
    """

    def change(state_dict: dict[str, Any], factor: float) -> dict[str, Any]:
        state = {
            key: {
                name: value * factor
                if isinstance(value, torch.Tensor)
                and value.dtype.is_floating_point
                and name != "step"
                else value
                for name, value in entry.items()
            }
            for key, entry in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    optimizer.register_state_dict_post_hook(lambda self, state_dict: change(state_dict, 2.0))
    optimizer.register_load_state_dict_pre_hook(lambda self, state_dict: change(state_dict, 0.5))


def _counting(optimizer: optim.Optimizer) -> None:
    """Note in the param groups that a state was loaded, in a hook after loading."""

    def note(self: Any) -> None:
        for group in self.param_groups:
            group["loads"] = group.get("loads", 0) + 1

    optimizer.register_load_state_dict_post_hook(note)


def _observing(optimizer: optim.Optimizer) -> None:
    """Write a number into the groups before `state_dict`."""

    def before(self: Any) -> None:
        for group in self.param_groups:
            group["saves"] = 1

    optimizer.register_state_dict_pre_hook(before)


HOOKS: dict[str, Callable[[optim.Optimizer], None]] = {
    "stamp": _stamp,
    "doubled": _doubled,
    "counting": _counting,
    "observing": _observing,
}


def _own_settings(number: int) -> dict[str, Any]:
    return {
        "label": f"group {number}",
        "scales": np.arange(2.0 + number),
        "bounds": (np.float32(0.5), [1, 2]),
    }


def groups_of(
    named: Iterable[tuple[str, torch.Tensor]],
    grouping: str,
    *,
    with_names: bool,
    extra: bool,
    empty: bool,
    single: bool,
) -> list[dict[str, Any]]:
    """Return param groups for an optimizer.

    `with_names` passes the parameters with their names.
    """
    made = GROUPINGS["one" if single else grouping](list(named))
    groups: list[dict[str, Any]] = [
        {
            "params": part if with_names else [parameter for _, parameter in part],
            **(_own_settings(number) if extra else {}),
        }
        for number, part in enumerate(made)
        if part or empty
    ]
    if empty and not single:
        groups.append({"params": [], "weight_decay": 0.25})
    return groups
