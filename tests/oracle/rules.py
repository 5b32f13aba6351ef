"""The closed lists of the oracle: what must be refused, what may be refused, and what must come back, whatever torch does.

Each rule has the point of the contract (`docs/explanation/what-comes-back.md`) that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from tests.oracle.build import Run, canonical
from tests.oracle.extras import SCALERS
from tests.oracle.optimizers import Holder
from tests.oracle.program import Pair
from tests.oracle.references import Facts, names_by_group

REFUSED_VALUES = frozenset({"plain-class", "ellipsis", "np-dtype"})
"""Values that cannot be saved, on purpose: a fresh process could not make them without code that a file names."""

NO_TRACE = frozenset(
    {
        "none", "wrapped model", "wrapped block", "other order", "names passed", "named entries moved", "context", "second snapshot",
        "subclass swapped", "warm", "held optimizer", "unfrozen", "frozen",
    }
)  # fmt: skip
"""Changes after which a recovery must succeed if the same recovery by name does (points 1, 3 and 4)."""


def must_refuse(pair: Pair, run: Run, target: Run, data: bytes | None, facts: Facts) -> str:
    """Return why a recovery must be refused although torch may load the state, or ""."""
    reasons = chain(  # made one after the other, because a state without memory can be asked for nothing more
        _without_memory(pair, target), _lossy(run, target), _shapes(pair, run, target, facts), _unmatched(pair, target, facts)
    )
    return next(reasons, "")


def _without_memory(pair: Pair, target: Run) -> Iterator[str]:
    """Point 4: nothing is written where there is no memory."""
    for model in pair.after.models:
        module = target.state.get(model.key)
        if model.transform and module is not None and any(parameter.numel() for parameter in module.parameters()):
            yield f"memory is {model.transform}"


def _lossy(run: Run, target: Run) -> Iterator[str]:
    """Point 5: no loss is silent."""
    mine, theirs = _tensors(target), _tensors(run)
    at: dict[int, str] = {}
    for name, place in mine.items():
        saved = theirs.get(name)
        if saved is None or saved.shape != place.shape:
            continue
        if saved.is_complex() and not place.is_complex():
            yield "complex into real"
        wide = saved.dtype.is_floating_point or saved.is_complex()
        if wide and not (place.dtype.is_floating_point or place.is_complex()):
            yield "float into integer"
        if wide and saved.numel() and not place.is_meta and place.dtype != saved.dtype:
            finite = saved.to(torch.complex128 if saved.is_complex() else torch.float64).isfinite()
            if bool((finite & ~_cast(saved, place.dtype).isfinite()).any()):
                yield "finite into infinite"
        if place.numel() and not place.is_meta and (address := place.data_ptr()):
            other = at.setdefault(address, name)
            if other != name and mine[other].shape == place.shape and not torch.equal(theirs[other], saved):
                yield "two tensors into one memory"


def _cast(saved: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(saved.shape)
    if saved.is_complex() and not dtype.is_complex:
        saved = saved.real
    return saved.to(dtype).to(torch.complex128 if dtype.is_complex else torch.float64)


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    """Return the plain tensors of all modules that have their own names in their state dict, and all bare parameters."""
    found = {}
    for key, value in run.state.items():
        if isinstance(value, nn.Module):
            for name, tensor in value.state_dict().items():
                if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and "old_weight" not in name:
                    found[f"{key}:{canonical(name)}"] = tensor
        elif isinstance(value, nn.Parameter):
            found[f"{key}:"] = value.detach()
    return found


def _shapes(pair: Pair, run: Run, target: Run, facts: Facts) -> Iterator[str]:
    """Point 5: the shape that a parameter had when its state was saved is compared with its shape now."""
    for key, optimizer in target.optimizers.items():
        if key not in target.state or key not in run.optimizers or isinstance(target.state[key], Holder):
            continue
        saved = {run.names[id(one)] for one in run.optimizers[key].state if isinstance(one, torch.Tensor)}
        for name, parameter in ((target.names[id(one)], one) for group in optimizer.param_groups for one in group["params"]):
            if name in saved and tuple(parameter.shape) != facts.shapes[name] and not pair.call.keep:
                yield "the state of a parameter of another shape"


def _unmatched(pair: Pair, target: Run, facts: Facts) -> Iterator[str]:
    """Point 5: an optimizer of which no parameter was found is an error even with strict=False."""
    for key, optimizer in target.optimizers.items():
        theirs = {name for names in facts.groups.get(key, []) for name in names}
        ours = {name for names in names_by_group(target, optimizer) for name in names}
        held = isinstance(target.state.get(key), Holder)
        if key in target.state and theirs and ours and not theirs & ours and not pair.call.strict and not held:
            yield "no parameter of an optimizer was found"


# -- refusals that are allowed


def may_refuse(pair: Pair, run: Run, target: Run, facts: Facts) -> str:
    """Return why a recovery may be refused although torch would load the state, or ""."""
    strict = pair.call.strict
    for plan in pair.after.optimizers:
        if plan.key in target.state and not {*plan.models, *plan.bares} <= target.state.keys() & run.state.keys() and not pair.call.saved:
            return "an optimizer is recovered without its parameters"
    if any(block.kind == "spread" for model in pair.after.models for block in model.blocks):
        return "a buffer's elements share memory"
    if not strict and any(_apart(value, run.state.get(key)) for key, value in target.state.items()):
        return "no key of a module matches"
    if set(run.state).isdisjoint(target.state):
        return "no key matches"
    if strict and set(run.state) != set(target.state):
        return "the states have other keys"
    if strict and _other_keys(pair):
        return "a dict has other keys"
    for before, after in _both(pair.before.optimizers, pair.after.optimizers):
        if strict and before.kind != after.kind:
            return "the optimizer is of another kind"
        if strict and (before.grouping != after.grouping or _in_other_groups(pair)):
            return "the parameters are in other groups"
        if before.wrapped != after.wrapped or before.hooks != after.hooks:
            return "the optimizer has another form"
        if (before.empty_group, before.extra) != (after.empty_group, after.extra):
            return "the groups differ"
    for key, optimizer in target.optimizers.items():
        if strict and {n for names in facts.groups.get(key, []) for n in names} != {
            n for names in names_by_group(target, optimizer) for n in names
        }:
            return "the optimizer has other parameters"
    for before, after in _both(pair.before.extras, pair.after.extras):
        if before.kind != after.kind:
            return "a value is of another kind"
    for one, other in _both(pair.before.models, pair.after.models):
        if {b.name: (b.kind, b.size) for b in one.blocks} != {b.name: (b.kind, b.size) for b in other.blocks}:
            return "the blocks differ"
        if one.dtype != other.dtype and _complexes(one.dtype) != _complexes(other.dtype):
            return "complex and real"
    return ""


def _in_other_groups(pair: Pair) -> bool:
    """Return True if parameters may have come into other groups, because these are divided by the order of the parameters."""
    grouped = any(plan.grouping != "one" for plan in pair.after.optimizers)
    return grouped and not {"other order", "second snapshot", "named entries moved", "subclass swapped"}.isdisjoint(pair.changes)


def _apart(mine: Any, theirs: Any) -> bool:
    """Return True if two modules have no key in common."""
    if not isinstance(mine, nn.Module) or not isinstance(theirs, nn.Module):
        return False
    ours, saved = ({canonical(name) for name in module.state_dict()} for module in (mine, theirs))
    return bool(ours and saved) and ours.isdisjoint(saved)


def _complexes(dtype: str) -> bool:
    return dtype.startswith("complex")


def _other_keys(pair: Pair) -> bool:
    return any(extra.kind == "counter" for extra in pair.after.extras)


def _both(before: tuple[Any, ...], after: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    mine = {one.key: one for one in before}
    yield from ((mine[one.key], one) for one in after if one.key in mine)


def may_not_save(pair: Pair) -> bool:
    """Return True if the program holds a value or a tensor that is refused on purpose (point 6)."""
    tagged = any(block.kind == "tagged" for model in pair.before.models for block in model.blocks)
    return tagged or any(extra.kind in REFUSED_VALUES for extra in pair.before.extras)


def may_be_late(pair: Pair) -> bool:
    """Return True if an object's own loader may raise after other values are written (point 1): never for a scaler (point 6)."""
    return not any(one.kind == "scaler-off" != other.kind in SCALERS for one, other in _both(pair.before.extras, pair.after.extras))


def must_succeed(pair: Pair) -> bool:
    """Return True if a refusal is a fault even where torch refuses, because the recovery by name succeeds.

    An object that loads a state dict of a form of its own knows no names without wrappers, and parameters in another order may be in other
    groups.
    """
    by_itself = any("overridden" in model.wrappers for model in pair.after.models) or any(plan.wrapped for plan in pair.after.optimizers)
    return set(pair.changes) <= NO_TRACE and pair.call.strict and not by_itself and not _in_other_groups(pair)
