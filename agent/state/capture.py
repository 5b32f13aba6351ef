"""A state as named values: modules, optimizers and other objects with a state_dict, by fully qualified name.

Capturing changes nothing: `state_dict()` is called, and no optimizer is made to take a step. Parameters keep the names that they have in
their module, whatever wraps it (DistributedDataParallel, torch.compile); an optimizer's state is named by those.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from ckptd.agent.state.naming import KeptNames, Names, canonical_keys, find, flattens, modules_of, parameter_keys, unwrapped
from ckptd.agent.state.values import NESTED, Known, Packer
from ckptd.shared.bounds import check_msgpack
from ckptd.shared.errors import IntegrityError, UnsavableValue
from ckptd.shared.plan import MAX_DIMENSIONS

_ITEM_OVERHEAD = 512  # bytes in plan and metadata for one more tensor, rounded up
_PYTHON_RNG = struct.Struct("<625I")


@dataclass(frozen=True, slots=True)
class Captured:
    """`state`: the state's part of the values document, encoded; `tensors`: the live sources, by name."""

    state: bytes
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Habits:
    """What is kept from one capture to the next, to make it faster when the state is as before."""

    dicts: Known = field(default_factory=dict)
    names: KeptNames = field(default_factory=KeptNames)
    checked: dict[str, int] = field(default_factory=dict)
    """`bytes`: the length up to which a state is taken for as simple as the last one that was counted."""


def capture(state: Any, *, rank: int = 0, habits: Habits | None = None) -> Captured:
    """Raises UnsavableValue naming the key of what could not be brought back."""
    try:
        captured = _capture(state, rank, habits or Habits())
    except (RecursionError, ValueError) as error:
        if isinstance(error, ValueError) and "integer string" not in str(error):
            raise
        Packer(lambda value, path: ("stateful", None)).pack(state, "")  # names the key: it contains itself, is too deep or too long
        raise UnsavableValue("the state: a state_dict in it is nested too deep, or contains itself; nest it less") from None
    checked = (habits or Habits()).checked
    if len(captured.state) <= checked.get("bytes", 0):  # counting costs time in proportion to its bytes, at every snapshot
        return captured
    try:
        check_msgpack(captured.state, "the state", NESTED)
        checked["bytes"] = len(captured.state) * 9 // 8
    except IntegrityError as error:  # no reader would take it
        raise UnsavableValue(f"{error}: save them as tensors or NumPy arrays instead") from None
    return captured


def _capture(state: Any, rank: int, habits: Habits) -> Captured:
    trees = {id(module): module_state(module) for module in modules_of(state)}
    names = habits.names.of(state, list(trees.values()))

    def expand(value: Any, path: str) -> tuple[str, Any] | None:
        return ("module", trees[id(value)]) if id(value) in trees else expand_object(value, names)

    packer = Packer(expand, rank, habits.dicts)
    return Captured(packer.encode(state), packer.tensors)


def values_document(captured: Captured, *, rng: bool) -> bytes:
    """With the random generators as they are now."""
    packer = Packer()
    return packer.encode_map({"state": msgspec.Raw(captured.state), "rng": packer.pack(rng_state() if rng else None, "rng")})


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


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """`module.state_dict()` under canonical names; of FullyShardedDataParallel (FSDP1) each rank's shards, by DCP's own means."""
    if flattens(module):
        return get_model_state_dict(module)
    return canonical_keys(unwrapped(module).state_dict())


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


def optimizer_bytes_to_come(state: Any, world_size: int = 1) -> int:
    """What optimizers that have not taken a step yet will add: two moments a parameter for the Adam family, one for momentum; of replicas
    this rank's share."""
    total = 0
    for _, optimizer in find(state, "", torch.optim.Optimizer):
        for group in optimizer.param_groups if not optimizer.state else ():
            moments = 2 + bool(group.get("amsgrad")) if "betas" in group else int(bool(group.get("momentum")))
            for p in group["params"]:
                own = p._local_tensor.nbytes if isinstance(p, DTensor) else p.nbytes // world_size
                total += moments * (own + _ITEM_OVERHEAD)
    return total


def rng_state() -> dict[str, Any]:
    """Every generator that a training loop draws from: Python, NumPy (if loaded), torch, and the accelerator's devices."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, _PYTHON_RNG.pack(*words), gauss],
        "torch": _bytes(torch.get_rng_state()),
    }
    if "numpy" in sys.modules:
        import numpy as np

        state["numpy"] = found = dict(np.random.get_state(legacy=False))
        if found["bit_generator"] == "MT19937":
            found["state"] = {**found["state"], "key": found["state"]["key"].tobytes()}
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

        saved = state["numpy"]
        if isinstance(saved["state"].get("key"), bytes):  # of ckptd 0.1.0 it is the array itself
            saved = {**saved, "state": {**saved["state"], "key": np.frombuffer(saved["state"]["key"], dtype=np.uint32)}}
        np.random.set_state(saved)
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
    if tensor.dim() > MAX_DIMENSIONS:
        raise UnsavableValue(f"{name}: a tensor of {tensor.dim()} dimensions cannot be saved, {MAX_DIMENSIONS} at most; reshape() it")
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
