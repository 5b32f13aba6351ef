"""Names the parameters and buffers of a module as they are named without its wrappers, such as DistributedDataParallel and torch.compile.

The names are derived from the tree of submodules, so that an attribute of the user's own with the name `module` stays in them. A wrapper
that cannot be left out without making two names equal stays in them, too.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed.fsdp import FullyShardedDataParallel

_WRAPPERS = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""The attribute with the wrapped module, by the wrapper's class. By name, because importing torch.compile takes a second."""

_ATTRIBUTES = tuple(dict.fromkeys(_WRAPPERS.values()))
_PARTS = tuple(f".{attribute}." for attribute in _ATTRIBUTES)
_TO_THE_LAST = re.compile(rf"(?:.*\.)?(?:{'|'.join(_ATTRIBUTES)})\.", re.DOTALL)
_FORMERLY_LEFT_OUT = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_flattening: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


class _Known(NamedTuple):
    """The canonical names of one state dict: its keys, their prefixes that could name wrappers, without the wrappers, and the names."""

    keys: list[str]
    prefixes: dict[str, str]
    names: list[str]


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module inside DataParallel or DistributedDataParallel."""
    while isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        module = module.module
    return module


def flattens(module: torch.nn.Module) -> bool:
    """Return True if FullyShardedDataParallel (FSDP1) has flattened parameters of the module.

    FSDP1 needs a process group, so the answer is False until one is initialised. After that, each module is searched only once.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    if module not in _flattening:
        _flattening[module] = any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
    return _flattening[module]


# -- names


def canonical_names(module: torch.nn.Module, raw: Iterable[str]) -> list[str]:
    """Return the canonical name for each raw name in the state dict of a module. Equal names are returned only for equal raw names."""
    raw = list(raw)
    return _names(raw, _prefixes(module, raw)) if _may_have_wrappers(raw) else raw


def raw_names(module: torch.nn.Module, raw: Iterable[str]) -> dict[str, str]:
    """Return the raw name for each canonical name, for the way back from a checkpoint into `load_state_dict`."""
    raw = list(raw)
    return dict(zip(canonical_names(module, raw), raw, strict=True))


def canonical_keys(module: torch.nn.Module, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of a module under canonical names. The names are kept for the next call and checked, which takes less time."""
    raw = list(tree)
    if not _may_have_wrappers(raw):
        return dict(tree)
    known = _known.get(module)
    prefixes = known.prefixes if known is not None and known.keys == raw else None
    found = _prefixes(module, raw) if prefixes is None else {prefix: _shortened(module, prefix) for prefix in prefixes}
    if known is None or prefixes != found:
        known = _known[module] = _Known(raw, found, _names(raw, found))
    return dict(zip(known.names, tree.values(), strict=True))


def current_names(raw_of: dict[str, str], saved: Collection[str]) -> dict[str, str]:
    """Return the canonical name that each saved name of a module has now. A name that is not known stays as it is.

    `raw_of` has the raw names of the module by canonical name. Checkpoints of other tools have raw names. Earlier versions left out only
    some of the wrappers.
    """
    formerly: dict[str, str] = {}
    for name, raw in raw_of.items():
        formerly.setdefault(raw, name)
        formerly.setdefault(former_name(raw), name)
    taken = raw_of.keys() & set(saved)
    current: dict[str, str] = {}
    for known in saved:
        name = known if known in taken else formerly.get(known) or former_name(known)
        free = name in raw_of and name not in taken
        current[known] = name if free else known
        taken = taken | {name} if free else taken
    return current


@lru_cache(maxsize=1 << 18)
def former_name(raw: str) -> str:
    """Return the name that a checkpoint of an earlier version has for a raw name."""
    return _FORMERLY_LEFT_OUT.sub("", raw)


def _may_have_wrappers(raw: list[str]) -> bool:
    joined = "." + "\n.".join(raw)
    return any(part in joined for part in _PARTS)


def _prefixes(module: torch.nn.Module, raw: list[str]) -> dict[str, str]:
    """Return the prefixes that end with the attribute of a wrapper, with what remains of them without wrappers."""
    found = {match[0] for match in map(_TO_THE_LAST.match, raw) if match}
    return {prefix: _shortened(module, prefix) for prefix in found}


def _names(raw: list[str], prefixes: dict[str, str]) -> list[str]:
    if all(prefix == short for prefix, short in prefixes.items()):
        return raw
    names = [prefixes[found[0]] + name[found.end() :] if (found := _TO_THE_LAST.match(name)) else name for name in raw]
    return names if len(set(names)) == len(set(raw)) else raw  # a hook may have added a key that is like the short name of another


def _shortened(module: torch.nn.Module, prefix: str) -> str:
    """Return a prefix, which ends with a dot, without the wrappers on its way through the module."""
    parts, kept, position = prefix.split(".")[:-1], list[str](), 0
    while position < len(parts):
        part, attribute = parts[position], wrapped_at(module)
        if attribute and part not in module._modules:  # this wrapper removes itself from the keys
            module = module._modules[attribute]  # type: ignore[assignment]
            continue
        if part not in module._modules:
            kept += parts[position:]
            break
        kept += [] if part == attribute else [part]
        module, position = module._modules[part], position + 1  # type: ignore[assignment]
    return "".join(f"{part}." for part in kept)


# -- wrappers


def wrapped_at(module: torch.nn.Module) -> str:
    """Return the name of the attribute with the wrapped module, or "" for a module that is no wrapper, or cannot be left out of names."""
    attribute = _attribute(type(module))  # type: ignore[arg-type]
    if not attribute or (inner := module._modules.get(attribute)) is None:
        return ""
    own = _own_names(module) - {attribute}
    return "" if own and not own.isdisjoint(_outer_names(inner)) else attribute


@lru_cache(maxsize=4096)
def _attribute(cls: type) -> str:
    return next((_WRAPPERS[name] for base in cls.__mro__ if (name := f"{base.__module__}.{base.__qualname__}") in _WRAPPERS), "")


def _own_names(module: torch.nn.Module) -> set[str]:
    extra = () if type(module).get_extra_state is torch.nn.Module.get_extra_state else ("_extra_state",)
    return {*module._parameters, *module._buffers, *module._modules, *extra}


def _outer_names(module: torch.nn.Module) -> set[str]:
    """Return the first parts of the canonical names of a module."""
    attribute = wrapped_at(module)
    own = _own_names(module)
    return own if not attribute else (own - {attribute}) | _outer_names(module._modules[attribute])  # type: ignore[arg-type]
