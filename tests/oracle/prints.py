"""Takes the fingerprint of a state: every value in it by a readable name, exact to the
bit, and which tensors share memory.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import random
import re
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.oracle.build import Run, canonical
from tests.oracle.optimizers import Holder
from tests.oracle.tensors import Doubled, EightBit

_ADDRESS = re.compile(" at 0x[0-9a-f]+")
Print = dict[str, str]
"""A text for each name. Two states are equal if their prints are."""


def print_of(run: Run) -> Print:
    """Return the fingerprint of everything in the state of a run."""
    found: Print = {}
    tensors: list[tuple[str, torch.Tensor]] = []
    for key, value in run.state.items():
        if isinstance(value, nn.Module):
            _module(value, key, found, tensors)
        elif key in run.optimizers:
            _optimizer(run.optimizers[key], key, run, found)
            if isinstance(value, Holder) and value.optimizer is not run.optimizers[key]:
                found[f"{key} is another optimizer"] = ""
        else:
            found[key] = text(value)
            if isinstance(value, torch.Tensor):
                tensors.append((key, value))
    found["(shared memory)"] = "; ".join(map(" = ".join, _shared(tensors)))
    return found


def differences(one: Print, other: Print) -> list[str]:
    """Return the names under which two prints differ."""
    return [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]


def _module(
    module: nn.Module, key: str, found: Print, tensors: list[tuple[str, torch.Tensor]]
) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[f"{key}:{canonical(name)}"] = (
            f"{text(parameter)} {'trained' if parameter.requires_grad else 'frozen'}"
        )
        tensors.append((f"{key}:{canonical(name)}", parameter))
    for name, buffer in module.named_buffers(remove_duplicate=False):
        found[f"{key}:{canonical(name)} (buffer)"] = text(buffer)
        tensors.append((f"{key}:{canonical(name)}", buffer))
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            found[f"{key}:{canonical(f'{name}.')}(extra state)"] = text(part.get_extra_state())


def _optimizer(optimizer: torch.optim.Optimizer, key: str, run: Run, found: Print) -> None:
    for parameter, entry in optimizer.state.items():
        name = (
            run.names.get(id(parameter), "?")
            if isinstance(parameter, torch.Tensor)
            else repr(parameter)
        )
        if isinstance(entry, dict):
            for part, value in entry.items():
                found[f"{key} state of {name}: {part}"] = text(value)
            if not entry:
                found[f"{key} state of {name}"] = "empty"
        else:
            found[f"{key} state of {name}"] = text(entry)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            # Written by a hook of the caller's whenever the saved form is asked for.
            if name == "saves":
                continue
            if name == "params":
                found[f"{key} group {number}: params"] = ", ".join(
                    run.names.get(id(one), "?") for one in value
                )
            else:
                found[f"{key} group {number}: {name}"] = text(value)
    for name in ("rounds", "memory", "stamp"):
        if name in vars(optimizer):
            found[f"{key} own {name}"] = text(vars(optimizer)[name])


def _shared(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[list[str]]:
    """Yield the names of each set of tensors that begin at the same byte."""
    at: dict[int, list[str]] = {}
    for name, tensor in tensors:
        plain = (
            type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
            and tensor.layout is torch.strided
            and not tensor.is_meta
        )
        if plain and tensor.numel() and tensor.untyped_storage().size():
            at.setdefault(tensor.data_ptr(), []).append(name)
    yield from (names for names in at.values() if len(names) > 1)


def text(value: Any) -> str:
    """Return a text that tells a value from every other: its type, and all of its
    contents to the bit.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return (
            f"ndarray {value.dtype} {value.shape} "
            f"{value.tolist() if value.dtype.kind in 'US' else _digest(value.tobytes())}"
        )
    if isinstance(value, np.generic):
        return f"{type(value).__name__} {value.tobytes().hex()}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    kind = type(value).__name__
    if isinstance(value, float):
        return f"{kind} {value.hex()}"
    if isinstance(value, complex):
        return f"complex {value.real.hex()} {value.imag.hex()}"
    if isinstance(value, enum.Enum):
        return f"{kind} {value.value!r}"
    if isinstance(value, (dict, Counter, OrderedDict, defaultdict)):
        pairs = [f"{text(key)}: {text(item)}" for key, item in value.items()]
        factory = f" of {value.default_factory}" if isinstance(value, defaultdict) else ""
        return (
            f"{kind}{factory} "
            f"{{{', '.join(pairs if isinstance(value, OrderedDict) else sorted(pairs))}}}"
        )
    if isinstance(value, ChainMap):
        return f"{kind} {text(value.maps)}"
    if isinstance(value, (list, tuple, deque)):
        limit = f" of {value.maxlen}" if isinstance(value, deque) else ""
        return f"{kind}{limit} [{', '.join(map(text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{kind} {sorted(map(text, value))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (
            f"{kind} "
            f"{text({one.name: getattr(value, one.name) for one in dataclasses.fields(value)})}"
        )
    if isinstance(value, torch.Generator):
        return f"Generator {_digest(value.get_state().numpy().tobytes())}"
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        state = (
            value.bit_generator.state
            if isinstance(value, np.random.Generator)
            else value.get_state(legacy=False)
        )
        return f"{kind} {text(state)}"
    if isinstance(value, random.Random):
        return f"Random {_digest(repr(value.getstate()).encode())}"
    if callable(getattr(value, "state_dict", None)):
        return f"{kind} {text(value.state_dict())}"
    if callable(getattr(value, "getvalue", None)):
        return f"{kind} {value.getvalue()!r}"
    if kind in ("Namespace", "SimpleNamespace"):
        return f"{kind} {text(vars(value))}"
    if kind == "datetime":
        return f"{value!r} fold {value.fold}"
    return f"{kind} {_ADDRESS.sub('', repr(value))}"


def _tensor(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        return f"{kind} uninitialized"
    tensor = tensor.detach()
    if tensor.is_nested:
        return f"{kind} nested {tensor.layout} ({', '.join(map(_tensor, tensor.unbind()))})"
    what = f"{kind} {tensor.dtype} {list(tensor.shape)}".replace("torch.", "")
    if isinstance(tensor, (Doubled, EightBit)):
        return (
            f"{what} "
            f"({', '.join(_tensor(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])})"  # noqa: E501
        )
    if tensor.is_meta:
        return f"{what} on meta"
    if tensor.layout is not torch.strided:
        parts = (
            ("_indices", "_values")
            if tensor.layout is torch.sparse_coo
            else ("crow_indices", "col_indices", "values")
        )
        return (
            f"{what} {tensor.layout} "
            f"({', '.join(_tensor(getattr(tensor, part)()) for part in parts)})"
        )
    needed = (
        sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        + 1
        + tensor.storage_offset()
    )
    if tensor.numel() and tensor.untyped_storage().size() < needed * tensor.element_size():
        return f"{what} freed"
    plain = (
        tensor.as_subclass(torch.Tensor)
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
    )
    if plain.numel() <= 4:
        shown = str(plain.double().tolist() if not plain.is_complex() else plain.tolist())
    else:
        shown = "..."
    return (
        f"{what} {shown} "
        f"{_digest(bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else b'')}"  # noqa: E501
    )


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()[:10]
