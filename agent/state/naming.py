"""Names each parameter as its module does, whatever wraps the module (DistributedDataParallel, FSDP1, torch.compile).

Walking ten thousand parameters takes longer than copying them. Names are therefore kept from one capture to the next, and only checked: a
name still holds if the parameter has the same memory address as the tensor of that name in the module's own state dict.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ckptd.agent.state.records import KINDS, WITH_FIELDS, kind_of
from ckptd.agent.state.tree import PerRank
from ckptd.agent.state.values import TENSORS
from ckptd.shared.bounds import PLAIN_TYPES, types_of

T = TypeVar("T")

_LEAVES = TENSORS | PLAIN_TYPES
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(_WRAPPED)})\.")
_flattening: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module inside DataParallel or DistributedDataParallel."""
    while isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        module = module.module
    return module


def canonical_keys(tree: dict[str, Any]) -> dict[str, Any]:
    joined = "\n".join(tree)
    if not any(wrapper in joined for wrapper in _WRAPPED):
        return dict(tree)
    return {canonical(name): value for name, value in tree.items()}


@lru_cache(maxsize=1 << 18)
def canonical(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile, activation checkpointing and FSDP1 insert into it."""
    return _WRAPPERS.sub("", name)


def flattens(module: torch.nn.Module) -> bool:
    """Return True if FullyShardedDataParallel (FSDP1) has flattened parameters of the module.

    FSDP1 needs a process group, so the answer is False until one is initialised. After that, each module is searched only once.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    if module not in _flattening:
        _flattening[module] = any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
    return _flattening[module]


@dataclass(frozen=True, slots=True)
class Names:
    """The names of parameters.

    `of` maps id(parameter) to the name. `flattened` maps id(parameter) to the module in which FSDP1 has flattened it, if it has.
    """

    of: dict[int, str] = field(default_factory=dict)
    flattened: dict[int, torch.nn.Module] = field(default_factory=dict)

    def flattened_by(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """Return the module in which FSDP1 has flattened parameters of the optimizer, or None if it has flattened none of them."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return next((self.flattened[id(parameter)] for parameter in parameters if id(parameter) in self.flattened), None)


def buffer_names(state: Any) -> list[str]:
    """Return the keys of the buffers of all modules in a state."""
    return [
        f"{path}.{canonical(name)}" if path else canonical(name)
        for path, module in find(state, "", torch.nn.Module)
        for name, _ in unwrapped(module).named_buffers(remove_duplicate=False)
    ]


def parameter_names(state: Any) -> Names:
    """Return the names of the parameters of all modules in a state.

    If different parameters in two modules have the same name, each gets the key of its module as a prefix.
    """
    found: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    flattened: dict[int, torch.nn.Module] = {}
    for path, module in find(state, "", torch.nn.Module):
        if flattens(module):
            flattened |= {id(parameter): module for parameter in module.parameters()}
        for name, parameter in unwrapped(module).named_parameters():
            entries = found.setdefault(canonical(name), [])
            if all(known is not parameter for _, known in entries):
                entries.append((path, parameter))
    names: dict[int, str] = {}
    for name, entries in found.items():
        for path, parameter in entries:
            names.setdefault(id(parameter), name if len(entries) == 1 else f"{path}.{name}")
    return Names(names, flattened)


def modules_of(state: Any) -> list[torch.nn.Module]:
    return [module for _, module in find(state, "", torch.nn.Module)]


def is_stateful(value: Any) -> bool:
    """Return True if an object has both `state_dict` and `load_state_dict`."""
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(map(callable, methods))


def find(state: Any, path: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield (key, object) for each object of `kind` in the dicts, lists, tuples, records and `per_rank` values of a state."""
    if isinstance(state, PerRank):
        state = state.value
    if isinstance(state, kind):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items() if not types_of(state.values()) <= _LEAVES else ():
            if not isinstance(value, torch.Tensor):
                yield from find(value, f"{path}.{key}" if path else str(key), kind)
    elif (record := kind_of(state)) in WITH_FIELDS and not is_stateful(state):
        yield from find(KINDS[record].fields(state), path, kind)
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state if not types_of(state) <= _LEAVES else ()):  # a history has a million numbers
            if not isinstance(value, torch.Tensor):
                yield from find(value, f"{path}.{number}" if path else str(number), kind)


def parameter_keys(optimizer: torch.optim.Optimizer, names: Names) -> list[Any]:
    """Return the name of each parameter of an optimizer, in the order of all groups, which is how `state_dict()` numbers the parameters.

    Return the numbers themselves if any parameter has no name.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names.of for parameter in parameters):
        return list(range(len(parameters)))
    return [names.of[id(parameter)] for parameter in parameters]


@dataclass(slots=True)
class KeptNames:
    """The names of the parameters in a state, kept from one capture to the next.

    `ids` are the ids of all optimizers' parameters. `places` has, for each of them, the number of the module whose state dict contains it,
    and its name there. If a parameter is in no state dict, `places` is None and the names are looked up at every capture.
    """

    names: Names = field(default_factory=Names)
    ids: list[int] = field(default_factory=list)
    places: list[tuple[int, str]] | None = None

    def of(self, state: Any, trees: list[dict[str, Any]]) -> Names:
        """Return the names of the parameters in `state`. `trees` are the state dicts of its modules, in the order of `modules_of`."""
        parameters = [
            p for _, optimizer in find(state, "", torch.optim.Optimizer) for group in optimizer.param_groups for p in group["params"]
        ]
        if not self._hold(parameters, trees):
            self.names = parameter_names(state)
            self.ids = list(map(id, parameters))
            self.places = self._places(parameters, trees)
        return self.names

    def _hold(self, parameters: list[torch.Tensor], trees: list[dict[str, Any]]) -> bool:
        if self.places is None or self.ids != list(map(id, parameters)):
            return False
        try:
            found = [trees[number][name] for number, name in self.places]
            where = address if DTensor in set(map(type, found)) else torch.Tensor.data_ptr
            return list(map(where, parameters)) == list(map(where, found))
        except (LookupError, AttributeError, RuntimeError):
            return False

    def _places(self, parameters: list[torch.Tensor], trees: list[dict[str, Any]]) -> list[tuple[int, str]] | None:
        at: dict[int, tuple[int, str]] = {}
        for number, tree in enumerate(trees):
            for name, value in tree.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, (torch.nn.Buffer, ShardedTensor)):
                    at.setdefault(address(value), (number, name))
        try:
            return [at[address(parameter)] for parameter in parameters]
        except LookupError:
            return None


def address(tensor: torch.Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()
