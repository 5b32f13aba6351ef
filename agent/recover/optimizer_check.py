"""Compares an optimizer or a scheduler with the saved one, so that one kind is not
loaded into another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptd.agent.state.optimizers import class_of, without_wrappers
from ckptd.agent.state.tree import TensorRef

_DECIDE_STATE = ("amsgrad", "centered", "momentum")
"""The settings that decide which state an optimizer of torch keeps for a parameter, by
whether they are true or not 0.
"""


def class_difference(place: Any, saved: str, path: str) -> list[str]:
    """Return a sentence if the saved object was of another class.

    Classes of the same name are the same, whatever module has them.

    `saved` is the full name of the saved object's class, or "" if it is not known. Any
    object but an optimizer and a scheduler may have another class, since its own
    load_state_dict decides what it accepts.
    """
    inner, own = without_wrappers(place), class_of(place)
    kind = "optimizer" if isinstance(inner, torch.optim.Optimizer) else "scheduler"
    if (
        not saved
        or _short(saved) == _short(own)
        or not isinstance(inner, (torch.optim.Optimizer, LRScheduler))
        # Earlier versions saved the class of a scheduler's wrapper.
        or _short(saved) in (type(place).__name__, "AcceleratedScheduler")
    ):
        return []
    return [
        f"{path or 'the state'}: the checkpoint has the {kind} {_short(saved)} ({saved}), the "
        f"state {_short(own)} ({own})"
    ]


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def settings_differences(
    own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], path: str
) -> list[str]:
    """Return a sentence for each setting with which the saved optimizer kept other
    state for its parameters than the caller's does.

    `own` and `saved` have the settings of each parameter group of the caller's
    optimizer.
    """
    return [
        f"{path}.param_groups.{number}.{name}: the checkpoint has {theirs[name]!r}, the state "
        f"{mine[name]!r}; the two keep different state"
        for number, (mine, theirs) in enumerate(zip(own, saved, strict=True))
        for name in _DECIDE_STATE
        if name in mine and name in theirs and bool(mine[name]) != bool(theirs[name])
    ]


def state_difference(own: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> list[str]:
    """Return a sentence if each of two states of one parameter has a key that the other
    lacks.
    """
    if own.keys() <= saved.keys() or saved.keys() <= own.keys():
        return []
    return [
        f"{path}: the checkpoint has {', '.join(sorted(saved))}, the state {', '.join(sorted(own))}"
    ]


def not_taken(
    place: torch.optim.Optimizer, saved: str, state: Mapping[Any, Mapping[str, Any]], path: str
) -> list[str]:
    """Return a sentence if the `__setstate__` of an optimizer of torch raises an error
    for this state.

    Called before anything is written. A copy of the optimizer tries a state with the
    same keys, in which every tensor is a zero. State of the optimizer's own class fits,
    and is not tried. `saved` is the full name of the saved class, and `state` has the
    saved state of each parameter.
    """
    method = type(place).__setstate__
    if _short(saved) == _short(class_of(place)) or not method.__module__.startswith("torch."):
        return []
    tried = object.__new__(type(place))
    tried.__dict__.update(vars(place))
    zeros = {
        parameter: {
            name: torch.zeros((), dtype=torch.float32, device="cpu")
            if isinstance(value, TensorRef)
            else value
            for name, value in entry.items()
        }
        for parameter, entry in state.items()
    }
    try:
        tried.__setstate__(
            {"state": zeros, "param_groups": [dict(group) for group in place.param_groups]}
        )
    except Exception as error:
        return [
            f"{path or 'the state'}: {class_of(place)} cannot take the state that the checkpoint "
            f"has: {error!r}"
        ]
    return []


def group_differences(
    own: Sequence[Sequence[Any]], saved: Sequence[Sequence[Any]], path: str
) -> list[str]:
    """Return a sentence if parameters of one saved group lie in several groups of the
    caller's optimizer.

    `own` and `saved` have the names of the parameters in each group.
    """
    group_of = {name: number for number, names in enumerate(own) for name in names}
    for number, names in enumerate(saved):
        if len(apart := {group_of[name] for name in names if name in group_of}) > 1:
            return [
                f"{path}.param_groups: the checkpoint has the parameters of its group {number} "
                f"together, the state has them in groups "
                f"{', '.join(map(str, sorted(apart)))} ({len(saved)} groups in the checkpoint, "
                f"{len(own)} in the state)"
            ]
    return []


def changed_settings(own: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> list[str]:
    """Return a phrase for each plain setting of a parameter group that the recovery
    changes.
    """
    return [
        f"{path}.{name} {value!r} (was {own[name]!r})"
        for name, value in saved.items()
        if name != "params" and name in own and not isinstance(value,
        TensorRef) and not isinstance(own[name], torch.Tensor)
        and not equal(own[name], value)
    ]  # fmt: skip


def tensors_to_compare(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> list[tuple[str, str]] | None:
    """Return None if two saved groups have different settings, or the names of the
    tensors that must be equal for them to be the same.
    """
    if one.keys() != other.keys():
        return None
    pairs = []
    for key, value in one.items():
        if isinstance(value, TensorRef) and isinstance(other[key], TensorRef):
            pairs.append((value.fqn, other[key].fqn))
        elif not equal(value, other[key]):
            return None
    return pairs


def equal(one: Any, other: Any) -> bool:
    """Return True if two settings are equal.

    `==` gives no answer for arrays of NumPy, which it compares element by element.
    """
    if hasattr(one, "tobytes") and hasattr(one, "shape"):
        same = type(one) is type(other) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and bool(one.tobytes() == other.tobytes())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            equal(value, other[key]) for key, value in one.items()
        )
    if (
        isinstance(one, (list, tuple))
        and isinstance(other, (list, tuple))
        and type(one) is type(other)
    ):
        return len(one) == len(other) and all(map(equal, one, other))
    try:
        return bool(one == other)
    except Exception:  # of the caller's object
        return False
