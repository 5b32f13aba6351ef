"""Applies the rules of torch's own `Optimizer.load_state_dict` when a recovery writes
into an optimizer directly.

It also restores an optimizer that was saved before its first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptd.shared.errors import UnsavableValue


def steps_on_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return True if the optimizer keeps the step counter of this parameter on the
    parameter's device.

    The rule is that of torch.optim.Optimizer._process_value_according_to_param_policy:
    the parameter's group is `capturable` or `fused`.
    """
    group = next(
        group for group in optimizer.param_groups if any(p is parameter for p in group["params"])
    )
    return bool(group.get("capturable") or group.get("fused"))


def without_wrappers(value: Any) -> Any:
    """Return the optimizer or the scheduler inside the wrappers of accelerate, or the
    value itself if it is no such wrapper.

    accelerate need not be installed: a wrapper is recognised by its attribute
    `optimizer` or `scheduler`. The wrapper of a scheduler is no LRScheduler itself, and
    has a method `step` besides those for its state.
    """
    while True:
        if isinstance(value, torch.optim.Optimizer):
            inner = getattr(value, "optimizer", None)
            wraps = isinstance(inner, torch.optim.Optimizer)
        else:
            inner = getattr(value, "__dict__", {}).get("scheduler")
            acts = all(
                callable(getattr(value, name, None))
                for name in ("step", "state_dict", "load_state_dict")
            )
            wraps = acts and isinstance(inner, LRScheduler) and not isinstance(value, LRScheduler)
        if not wraps or isinstance(value, type):
            return value
        value = inner


def class_of(value: Any) -> str:
    """Return the full name of an object's class.

    For a wrapper of accelerate, this is the class of the wrapped optimizer or
    scheduler.
    """
    cls = type(without_wrappers(value))
    return f"{cls.__module__}.{cls.__qualname__}"


def tell(place: torch.optim.Optimizer) -> None:
    """Make an optimizer apply the state and the settings that have been written into
    it.

    torch's own `load_state_dict` ends with `__setstate__`, so only `__setstate__` is
    called. If the class of the optimizer overrides `load_state_dict`, the override is
    called with the optimizer's own `state_dict()`.
    """
    if type(place).load_state_dict is torch.optim.Optimizer.load_state_dict:
        place.__setstate__({"state": place.state, "param_groups": place.param_groups})
    else:
        place.load_state_dict(place.state_dict())


def without_state(place: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Remove the state of an optimizer that was saved before its first step, and
    restore the settings of its groups.
    """
    place.state.clear()
    for group, saved in zip(place.param_groups, groups, strict=False):
        group.update({key: value for key, value in saved.items() if key != "params"})


def unshared(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the state of parameters without shared scalar tensors.

    A scalar tensor in the memory of one that an earlier parameter has is copied.
    """
    seen = set[int]()

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not value.dim() and (address := value.data_ptr()):
            if address in seen:
                return value.clone()
            seen.add(address)
        return value

    return {
        parameter: {name: own(value) for name, value in entry.items()}
        if isinstance(entry, dict)
        else entry
        for parameter, entry in state.items()
    }


def without_param_names(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups without the names that torch keeps in them.

    These names are no settings, and a recovery leaves the caller's as they are.
    """
    return [
        {key: value for key, value in group.items() if key != "param_names"} for group in groups
    ]


def taken_key(key: Any) -> UnsavableValue:
    """Return the error for an entry of no parameter whose key is also the name or the
    number of a parameter.
    """
    return UnsavableValue(
        f"the state of an optimizer has an entry of no parameter under the key {key!r}, which is "
        f"also the name or the number of one of its "
        "parameters: keep the entry under another key"
    )
