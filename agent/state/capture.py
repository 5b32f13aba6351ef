"""Captures a training state: its tensors by fully qualified name, and its plain values
as one encoded document.

A module, an optimizer or another object with a state_dict is captured through
`state_dict()`. Capturing changes nothing: no optimizer is made to take a step.
Parameters keep the names that they have in their module, whatever wraps it or its
submodules. The state of an optimizer is stored under these names.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from ckptd.agent.state.dtypes import dtype_name
from ckptd.agent.state.flat_optimizers import flat_optimizer_state
from ckptd.agent.state.merge import is_optimizer
from ckptd.agent.state.naming import (
    KeptNames,
    Names,
    ParameterKey,
    find,
    is_stateful,
    parameters_of,
)
from ckptd.agent.state.optimizers import class_of, taken_key, without_param_names
from ckptd.agent.state.packer import TENSORS, KnownDicts, LenientPacker, Packer
from ckptd.agent.state.tensor_check import check_values, is_uninitialized
from ckptd.agent.state.versions import Versions, versions_of
from ckptd.agent.state.wrappers import canonical_keys, flattens, unwrapped
from ckptd.shared.errors import CkptdError, UnsavableValue
from ckptd.shared.formats.bounds import Encoded

_ITEM_OVERHEAD = 512  # bytes that one more tensor takes in plan and metadata, rounded up
_PYTHON_RNG = struct.Struct("<625I")


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured state.

    `state` is its encoded part of the values document, and `tensors` are its live
    tensors, by name. `parameters` is the encoded part of the values document with the
    forms of parameters, or empty. `versions` is the encoded part with the versions of
    submodules, or empty. `modules` are those of the state.
    """

    state: bytes
    tensors: dict[str, torch.Tensor]
    parameters: bytes = b""
    versions: bytes = b""
    modules: list[torch.nn.Module] = field(default_factory=list)

    @property
    def encoded_bytes(self) -> int:
        """The length of the encoded parts of the values document."""
        return len(self.state) + len(self.parameters) + len(self.versions)


@dataclass(slots=True)
class _KeptVersions:
    """The versions of submodules in the last capture, with their encoding.

    Comparing versions takes less time than encoding them.
    """

    versions: dict[str, Versions] = field(default_factory=dict)
    encoded: bytes = b""

    def encode(self, versions: dict[str, Versions]) -> bytes:
        """Return the part of the values document that holds these versions, encoded, or
        b"" if there are none.
        """
        if versions != self.versions:
            self.versions, self.encoded = versions, Packer().encode(versions) if versions else b""
        return self.encoded


@dataclass(frozen=True, slots=True)
class Habits:
    """The caches that one capture leaves to the next.

    They make the next one faster if the state has the same structure.
    """

    dicts: KnownDicts = field(default_factory=dict)
    names: KeptNames = field(default_factory=KeptNames)
    held: dict[str, tuple[list[ParameterKey], bool]] = field(default_factory=dict)
    """Holds, for each optimizer, the names of its parameters, and whether the state has
    all of them.
    """
    versions: _KeptVersions = field(default_factory=_KeptVersions)


def capture(
    state: Any,
    *,
    rank: int = 0,
    habits: Habits | None = None,
    unsaved: dict[str, str] | None = None,
) -> Captured:
    """Return the tensors of a state by name, and the rest of the state encoded.

    `habits`, if given, is used and updated. If `unsaved` is given, a value that could
    not be restored is left out, and `unsaved` gets the reason under its key. Otherwise
    raises UnsavableValue for a value that could not be restored. The error names the
    key, unless the cause lies inside a state_dict or in the size of the whole state.
    """
    try:
        return _capture(state, rank, habits or Habits(), unsaved)
    except (RecursionError, ValueError) as error:
        if isinstance(error, ValueError) and "integer string" not in str(error):
            raise
        # Pack again with every object as a leaf. This raises UnsavableValue with the
        # key if one of the caller's own containers is nested too deep or contains
        # itself, or if an integer is too long. If nothing is raised, the cause lies
        # inside a state_dict.
        Packer(lambda value, path: ("stateful", None)).pack(state, "")
        raise UnsavableValue(
            "the state: a state_dict in it is nested too deep, or contains itself; nest it less"
        ) from None


def _capture(state: Any, rank: int, habits: Habits, unsaved: dict[str, str] | None) -> Captured:
    encoded = Encoded()
    names = habits.names.of(state, encoded)
    if names.modules:
        encoded.clear()  # a state_dict may change lists of the state
    trees, versions = dict[int, dict[str, Any]](), dict[str, Versions]()
    # Of modules whose state_dict raises: it is not called again, as it may wait for the
    # other ranks.
    failed = dict[int, Exception]()
    for path, module in names.modules:
        try:
            trees[id(module)], known = versioned_state(module)
        except (CkptdError, RecursionError):
            raise
        except Exception as error:
            failed[id(module)] = error
            continue
        if known is not None:
            versions[path] = known

    def expand(value: Any, path: str) -> tuple[str, Any] | None:
        if id(value) in trees:
            return "module", trees[id(value)]
        encoded.clear()
        with state_of(value, path):
            if id(value) in failed:
                raise failed[id(value)]
            return expand_object(value, names, path)

    packer = (
        Packer(expand, rank, habits.dicts, encoded)
        if unsaved is None
        else LenientPacker(expand, rank, unsaved, encoded)
    )
    document, tensors = packer.encode(state), packer.tensors
    if not TENSORS.issuperset(map(type, tensors.values())):
        for name, tensor in tensors.items():
            check_values(name, tensor)
    versions = packer.versions | versions
    return Captured(
        document,
        tensors,
        _parameter_forms(names, tensors, habits.held),
        habits.versions.encode(versions),
        [module for _, module in names.modules],
    )


@contextmanager
def state_of(value: Any, path: str) -> Iterator[None]:
    """Raise UnsavableValue, with the key, for an exception in the caller's object while
    it makes its state.
    """
    try:
        yield
    except (CkptdError, RecursionError):
        raise
    except Exception as error:
        raise UnsavableValue(
            f"{path or 'the state'}: the state_dict() of {class_of(value)} raised {error!r}: call "
            f"it when it works, or leave it out"
        ) from error


def _parameter_forms(
    names: Names, tensors: dict[str, torch.Tensor], held: dict[str, tuple[list[ParameterKey], bool]]
) -> bytes:
    """Return the encoded forms of the parameters of optimizers, for the values
    document.

    It has the optimizers that hold a parameter which is not in the state itself. A
    recovery compares these forms with the parameters that it finds, because moments do
    not fit a parameter of another shape. An optimizer without state over flat
    parameters of FSDP1 has an empty list of forms, which says that its groups name no
    parameters.
    """
    forms: dict[str, list[list[Any]]] = {}
    for path, optimizer in zip(names.optimizer_paths, names.optimizers, strict=True):
        if names.flattened_by(optimizer) is not None:
            if not any(isinstance(key, torch.Tensor) for key in optimizer.state):
                forms[path] = []  # its groups have no names
            continue
        keys = names.of(optimizer)
        if path not in held or held[path][0] is not keys:
            held[path] = keys, all(key in tensors for key in names.tensors_of(optimizer))
        if not held[path][1]:
            pairs = zip(keys, parameters_of(optimizer), strict=True)
            forms[path] = [
                [key, dtype_name(p.dtype), list(p.shape)]
                for key, p in pairs
                if not is_uninitialized(p)
            ]
    return Packer().encode(forms) if forms else b""


def values_document(captured: Captured, *, rng: bool) -> bytes:
    """Return the encoded values document: the captured state and, if `rng` is true, the
    random generators as they are now.
    """
    packer = Packer()
    parts = {
        "state": captured.state,
        "parameters": captured.parameters,
        "versions": captured.versions,
    }
    rest = {"rng": packer.pack(rng_state() if rng else None, "rng")}
    return packer.encode_map(rest, {key: part for key, part in parts.items() if part})


def expand_object(value: Any, names: Names, path: str = "") -> tuple[str, Any] | None:
    """Return (kind, plain tree) for an object that has a state of its own, or None for
    any other value.

    The kind is `module`, `optimizer`, or `stateful` for any other object with both
    `state_dict` and `load_state_dict`. path: the key of the value.
    """
    if isinstance(value, torch.nn.Module):
        return "module", module_state(value)
    if isinstance(value, torch.optim.Optimizer):
        root = names.flattened_by(value)
        return "optimizer", optimizer_state(value, names) if root is None else flat_optimizer_state(
            value, root, path
        )
    if is_stateful(value):
        return "stateful", value.state_dict()
    return None


def tensors_in(tree: Any, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors in a value of a state, by the names that `capture` gives them.

    path: the key of the value. If the value cannot be saved, only the tensors before
    the unsavable part are returned.
    """

    def expand(value: Any, path: str) -> tuple[str, Any] | None:
        with state_of(value, path):
            return expand_object(value, Names())

    packer = Packer(expand)
    with suppress(UnsavableValue):
        packer.pack(tree, path)
    return packer.tensors


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return `module.state_dict()` under canonical names.

    For FullyShardedDataParallel (FSDP1), return this rank's shards instead, as DCP's
    own `get_model_state_dict` gives them.
    """
    return versioned_state(module)[0]


def versioned_state(module: torch.nn.Module) -> tuple[dict[str, Any], Versions | None]:
    """Return `module_state` and the versions of the submodules.

    The versions are None for FSDP1, and for a state dict without versions.
    """
    if flattens(module):
        return get_model_state_dict(module), None
    module = unwrapped(module)
    state = module.state_dict()
    return canonical_keys(module, state), versions_of(module, state)


def optimizer_state(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """Return `optimizer.state_dict()` in DCP's form, with names in place of its
    integers.

    DCP's form is {"state": {fqn: ...}, "param_groups": [...]}. A parameter without a
    name has a number, counted among such parameters of the optimizer. An entry of the
    state that belongs to no parameter keeps its key. A state dict of another form,
    which a class of the caller's may return, is returned as it is.
    """
    state = optimizer.state_dict()
    if not is_optimizer(state):
        return state
    keys = names.of(optimizer)

    def name_of(number: Any) -> Any:
        return keys[number] if type(number) is int and 0 <= number < len(keys) else number

    groups = [
        {**group, "params": list(map(name_of, group["params"]))} for group in state["param_groups"]
    ]
    found = {name_of(number): value for number, value in state["state"].items()}
    if len(found) < len(state["state"]) or len(state["state"]) < len(optimizer.state):
        others: list[Any] = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        taken = next(
            (key for key in others if key in keys or (type(key) is int and 0 <= key < len(keys))),
            None,
        )
        if taken is not None:
            raise taken_key(taken)
    return {**state, "state": found, "param_groups": without_param_names(groups)}


def optimizer_bytes_to_come(state: Any, world_size: int = 1) -> int:
    """Return an estimate of the bytes that optimizers without state will add to this
    rank's slot when they take their first step.

    For each parameter, the Adam family adds two moments (three with `amsgrad`), and an
    optimizer with momentum adds one. A DTensor counts with this rank's shard. Any other
    parameter counts as replicated, with an equal share for each of the `world_size`
    ranks.
    """
    total = 0
    for _, optimizer in find(state, "", torch.optim.Optimizer):
        for group in optimizer.param_groups if not optimizer.state else ():
            moments = (
                2 + bool(group.get("amsgrad"))
                if "betas" in group
                else int(bool(group.get("momentum")))
            )
            for p in group["params"]:
                own = p._local_tensor.nbytes if isinstance(p, DTensor) else p.nbytes // world_size
                total += moments * (own + _ITEM_OVERHEAD)
    return total


def rng_state() -> dict[str, Any]:
    """Return the state of every generator that a training loop draws from: Python,
    NumPy (if loaded), torch, and all accelerators, if this process uses one.
    """
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
    if (kind := torch.accelerator.current_accelerator()) is not None:
        module = torch.get_device_module(kind)
        # A question to a device that is not in use would take memory on it, and its
        # processes that are forked later could not use it.
        if module.is_initialized():
            state["devices"] = [_bytes(generator) for generator in module.get_rng_state_all()]
            state["device"] = torch.accelerator.current_device_index()
    return state


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def set_rng_state(state: dict[str, Any]) -> None:
    """Set the generators to a state that `rng_state` has returned.

    The current device gets the state of the device that was the current one, which may
    have had another number. Each other device gets the state of its own number, if there
    is one.
    """
    version, words, gauss = state["python"]
    random.setstate((version, _PYTHON_RNG.unpack(words), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "numpy" in state:
        import numpy as np

        saved = state["numpy"]
        # Otherwise it is an array, as ckptd 0.1.0 saved it.
        if isinstance(saved["state"].get("key"), bytes):
            saved = {
                **saved,
                "state": {
                    **saved["state"],
                    "key": np.frombuffer(saved["state"]["key"], dtype=np.uint32),
                },
            }
        np.random.set_state(saved)
    if "devices" in state and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        states = dict(enumerate(state["devices"][: torch.accelerator.device_count()]))
        if "device" in state:
            current = torch.accelerator.current_device_index()
            states[current] = state["devices"][state["device"]]
        for device, saved in states.items():
            module.set_rng_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8), device)
