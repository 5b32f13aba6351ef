"""What torch's own `load_state_dict` of optimizers knows about them, and what it does not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptd.agent.state.values import filled


def steps_on_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether the parameter's group counts its steps on the device: torch.optim.Optimizer._process_value_according_to_param_policy."""
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    return bool(group.get("capturable") or group.get("fused"))


def tell(place: torch.optim.Optimizer) -> None:
    """What torch's own load_state_dict does at its end, and the whole of it for optimizers that have one of their own."""
    if type(place).load_state_dict is torch.optim.Optimizer.load_state_dict:
        place.__setstate__({"state": place.state, "param_groups": place.param_groups})
    else:
        place.load_state_dict(place.state_dict())


def without_state(place: torch.optim.Optimizer, groups: list[dict[str, Any]], resolve: Callable[[str], torch.Tensor]) -> None:
    """It was saved before its first step: that is how it will be."""
    place.state.clear()
    for group, saved in zip(place.param_groups, groups, strict=False):
        group.update({key: filled(value, resolve) for key, value in saved.items() if key != "params"})
