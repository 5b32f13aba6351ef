"""A state as named values: modules, optimizers and other objects with a state_dict, by fully qualified name.

Capturing changes nothing: `state_dict()` is called, and no optimizer is made to take a step. Parameters keep the names that they have in
their module, whatever wraps it (DistributedDataParallel, torch.compile); an optimizer's state is named by those.
"""

from __future__ import annotations

import ctypes
import random
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ckptd.agent.values import Known, Packer, PerRank
from ckptd.shared.errors import UnsavableValue

T = TypeVar("T")

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_ITEM_OVERHEAD = 512  # bytes in plan and metadata for one more tensor, rounded up
_PYTHON_RNG = struct.Struct("<625I")


@dataclass(frozen=True, slots=True)
class Captured:
    """`values`: the values document; `tensors`: the live sources, by name."""

    values: bytes
    tensors: dict[str, torch.Tensor]


def capture(state: Any, *, rng: bool, rank: int = 0, known: Known | None = None) -> Captured:
    """`known` is kept from one capture to the next. Raises UnsavableValue naming the key of what could not be brought back."""
    names = parameter_names(state)

    def expand(value: Any, path: str) -> tuple[str, Any] | None:
        return expand_object(value, names)

    packer = Packer(expand, rank, known)
    tree = packer.pack(state, "")
    values = packer.encode_map({"state": tree, "rng": packer.pack(rng_state() if rng else None, "rng")})
    return Captured(values, packer.tensors)


def expand_object(value: Any, names: Names) -> tuple[str, Any] | None:
    """(kind, plain tree) of a module, an optimizer or anything else with a state_dict; None of the rest."""
    if isinstance(value, torch.nn.Module):
        return "module", module_state(value)
    if isinstance(value, torch.optim.Optimizer):
        root = names.flattened_by(value)
        return "optimizer", optimizer_state(value, names) if root is None else flattened_optimizer_state(value, root)
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "stateful", value.state_dict()
    return None


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside DataParallel or DistributedDataParallel."""
    while isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        module = module.module
    return module


@lru_cache(maxsize=1 << 18)
def canonical(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    return _WRAPPERS.sub("", name)


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """`module.state_dict()` under canonical names; of FullyShardedDataParallel (FSDP1) each rank's shards, by DCP's own means."""
    if flattens(module):
        return get_model_state_dict(module)
    return {canonical(name): value for name, value in unwrapped(module).state_dict().items()}


def flattens(module: torch.nn.Module) -> bool:
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def flattened_optimizer_state(optimizer: torch.optim.Optimizer, root: torch.nn.Module) -> dict[str, Any]:
    """Of an optimizer over FSDP1's parameters. Without a state it is captured as empty: DCP would have it take a step."""
    if optimizer.state:
        return get_optimizer_state_dict(root, optimizer)
    return {"state": {}, "param_groups": [{**group, "params": []} for group in optimizer.param_groups]}


def optimizer_state(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of its integers, in DCP's form: {"state": {fqn: ...}, "param_groups": [...]}.

    Parameters that belong to no module of the state keep their integers (all of them, or the names would mix).
    """
    state = optimizer.state_dict()
    of_number = parameter_keys(optimizer, names)
    return {
        **state,
        "state": {of_number[number]: value for number, value in state["state"].items()},
        "param_groups": [{**group, "params": [of_number[number] for number in group["params"]]} for group in state["param_groups"]],
    }


def parameter_keys(optimizer: torch.optim.Optimizer, names: Names) -> list[Any]:
    """What each parameter is called, by the number that `state_dict()` gives it: its place over all groups."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names.of for parameter in parameters):
        return list(range(len(parameters)))
    return [names.of[id(parameter)] for parameter in parameters]


def optimizer_bytes_to_come(state: Any) -> int:
    """What optimizers that have not taken a step yet will add: two moments a parameter for the Adam family, one for momentum."""
    total = 0
    for _, optimizer in _find(state, "", torch.optim.Optimizer):
        for group in optimizer.param_groups if not optimizer.state else ():
            moments = 2 + bool(group.get("amsgrad")) if "betas" in group else int(bool(group.get("momentum")))
            total += sum(moments * (p.nbytes + _ITEM_OVERHEAD) for p in group["params"])
    return total


@dataclass(frozen=True, slots=True)
class Names:
    """`of`: id(parameter) -> name; `flattened`: id(parameter) -> the module under which FSDP1 has flattened it."""

    of: dict[int, str] = field(default_factory=dict)
    flattened: dict[int, torch.nn.Module] = field(default_factory=dict)

    def flattened_by(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return next((self.flattened[id(parameter)] for parameter in parameters if id(parameter) in self.flattened), None)


def buffer_names(state: Any) -> list[str]:
    """The keys of all modules' buffers."""
    return [
        f"{path}.{canonical(name)}" if path else canonical(name)
        for path, module in _find(state, "", torch.nn.Module)
        for name, _ in unwrapped(module).named_buffers(remove_duplicate=False)
    ]


def parameter_names(state: Any) -> Names:
    """Over all modules in the state; a name that two modules share is told apart by the module's own key."""
    found: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    flattened: dict[int, torch.nn.Module] = {}
    for path, module in _find(state, "", torch.nn.Module):
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
    return [module for _, module in _find(state, "", torch.nn.Module)]


def _find(state: Any, path: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Objects of `kind` in the containers of a state, with their keys."""
    if isinstance(state, PerRank):
        state = state.value
    if isinstance(state, kind):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                yield from _find(value, f"{path}.{key}" if path else str(key), kind)
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            if not isinstance(value, torch.Tensor):
                yield from _find(value, f"{path}.{number}" if path else str(number), kind)


def rng_state() -> dict[str, Any]:
    """Every generator that a training loop draws from: Python, NumPy (if loaded), torch, and the accelerator's devices."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, _PYTHON_RNG.pack(*words), gauss],
        "torch": _bytes(torch.get_rng_state()),
    }
    if "numpy" in sys.modules:
        import numpy as np

        state["numpy"] = np.random.get_state(legacy=False)
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        state["devices"] = [_bytes(generator) for generator in module.get_rng_state_all()]
    return state


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def set_rng_state(state: dict[str, Any]) -> None:
    """The reverse of `rng_state`. Devices that are not there are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, _PYTHON_RNG.unpack(words), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "devices" in state and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        for device, saved in zip(range(torch.accelerator.device_count()), state["devices"], strict=False):
            module.set_rng_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8), device)


def check_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes can say it, or the sharded tensor itself. Raises UnsavableValue for sparse, quantized, nested, meta and foreign
    tensors, and for those of which every rank holds a summand."""
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise UnsavableValue(f"{name}: a DTensor placed {tensor.placements} holds summands, not values; redistribute() it first")
        check_tensor(name, tensor._local_tensor)
        return tensor
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            check_tensor(name, shard.tensor.detach())
        return tensor
    kind = type(tensor)
    problem = None
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        problem = f"a tensor of type {kind.__module__}.{kind.__qualname__}"
    elif tensor.is_meta:
        problem = "a tensor on the meta device, which has no values"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        problem = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = f"a quantized tensor ({tensor.dtype})"
    if problem is not None:
        raise UnsavableValue(f"{name}: {problem} cannot be saved; give a strided torch.Tensor (its values, scales or indices as tensors)")
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
