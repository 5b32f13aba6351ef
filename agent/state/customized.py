"""Finds the objects that must load their state by methods of their own.

A recovery writes straight into the tensors of a module or an optimizer, which is faster
and needs no second copy. This is right only if torch's own methods would do no more
than copy. The functions here prove this, class by class and hook by hook. Hooks of
`torch.distributed` do not count, because they move shards and leave values as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

_STANDARD_LOADERS = frozenset(
    {
        torch.nn.Module._load_from_state_dict,
        _NormBase._load_from_state_dict,
        _InstanceNorm._load_from_state_dict,
    }
)
"""The loaders that copy the saved values.

Those of the norms also fill in a counter for checkpoints of torch 0.4 and older.
"""

_LOADED = ("_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def loads_by_itself(module: torch.nn.Module) -> bool:
    """Return True if the class of a module overrides `state_dict` or `load_state_dict`.

    torch calls these methods of the outermost module only.
    """
    return _overrides(type(module), module, torch.nn.Module, ("state_dict", "load_state_dict"))


def parts_with_loaders(module: torch.nn.Module) -> list[str]:
    """Return the prefixes of the submodules that change names, shapes or values when
    they load.

    A prefix is like "encoder.", and that of the module itself is "". Submodules of such
    a submodule are not examined, because the outer loader decides what they load.
    """
    found: list[str] = []
    for name, part in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if not any(prefix.startswith(outer) for outer in found) and _has_loader(part):
            found.append(prefix)
    return found


def needs_loading(module: torch.nn.Module) -> bool:
    """Return True if a module must be loaded through its `load_state_dict`.

    This is necessary if the module or a submodule has extra state, overrides
    `_save_to_state_dict`, or has hooks that run when a state dict is made or loaded.
    """
    return any(
        _has_extra_state(part) or _overrides_saving(part) or any(map(_own_hooks, _tables(part)))
        for part in module.modules()
    )


def optimizer_loads_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer must load its state by its own method.

    This is so if it has load or state-dict hooks, or if its class overrides
    `state_dict` or `load_state_dict`.
    """
    return _overrides(
        type(optimizer), optimizer, torch.optim.Optimizer, ("state_dict", "load_state_dict")
    ) or any(_own_hooks(getattr(optimizer, table, {}).values()) for table in _OPTIMIZER_HOOKS)


def _has_loader(part: torch.nn.Module) -> bool:
    return (
        type(part)._load_from_state_dict not in _STANDARD_LOADERS
        or "_load_from_state_dict" in vars(part)
        or _own_hooks(vars(part).get("_load_state_dict_pre_hooks", {}).values())
    )


def _has_extra_state(part: torch.nn.Module) -> bool:
    cls, own = type(part), torch.nn.Module
    return (
        cls.get_extra_state is not own.get_extra_state
        or cls.set_extra_state is not own.set_extra_state
    )


def _overrides_saving(part: torch.nn.Module) -> bool:
    return (
        type(part)._save_to_state_dict is not torch.nn.Module._save_to_state_dict
        or "_save_to_state_dict" in vars(part)
    )


def _tables(part: torch.nn.Module) -> list[Iterable[Any]]:
    return [vars(part).get(table, {}).values() for table in _LOADED]


def _own_hooks(hooks: Iterable[Any]) -> bool:
    return any(not _module_of(hook).startswith("torch.distributed.") for hook in hooks)


def _module_of(hook: Any) -> str:
    # Torch wraps a hook that takes the module as its first argument.
    hook = getattr(hook, "hook", hook)
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", None) or "")


def _overrides(cls: type, value: Any, base: type, methods: Iterable[str]) -> bool:
    """Return True if a class or an instance has another method than `base`.

    A wrapper of torch's own counts as `base`.
    """
    return any(
        getattr(cls, name) is not getattr(base, name) or name in vars(value) for name in methods
    )
