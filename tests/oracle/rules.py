"""The closed lists of the oracle: what must be refused, what may be refused, and what
must come back, whatever torch does.

Each rule has the point of the contract (`docs/explanation/what-comes-back.md`) that it
stands for. A refusal counts as allowed by a rule only if it names a key that the rule
is about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import nn

from tests.oracle.build import Run, canonical
from tests.oracle.extras import SCALERS, SCHEDULERS
from tests.oracle.optimizers import Holder
from tests.oracle.prints import text
from tests.oracle.program import Pair
from tests.oracle.references import Facts, by_position, has_ways_of_its_own, names_by_group

REFUSED_VALUES = frozenset({"plain-class", "ellipsis", "np-dtype"})
"""Values that cannot be saved, on purpose: a fresh process could not make them without
code that a file names.
"""
OWN_LOADERS = frozenset(
    {
        "resized", "prehook", "converted", "posthook", "ownload", "extra", "lazy", "oldweightnorm",
        "weightnorm", "orthogonal", "spectral",
    }
)  # fmt: skip
"""Blocks with hooks or methods for loading, which may raise."""
DECIDE_STATE = ("amsgrad", "centered", "momentum")
"""The settings that decide which state an optimizer of torch keeps."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason to refuse a recovery, and the keys of the state that it is about."""

    why: str
    keys: frozenset[str]

    def explains(self, said: str) -> bool:
        """Return True if an error names one of the keys."""
        return any(names(key, said) for key in self.keys)


def names(key: str, said: str) -> bool:
    """Return True if an error names a key of the state, or a key inside it.

    The call that it recommends does not count.
    """
    return (
        re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", said.partition("; nothing was written")[0])
        is not None
    )


def must_refuse(pair: Pair, run: Run, target: Run, facts: Facts) -> list[Reason]:
    """Return why a recovery must be refused although torch may load the state.

    Later reasons are left out if the state has no memory.
    """
    found = list(_without_memory(pair, target))
    return found or list(
        chain(
            _lossy(run, target),
            _shapes(pair, run, target, facts),
            _complex_moments(pair, run, target),
            _unmatched(pair, target, facts),
            _of_other_keys(pair, run, target),
            _of_other_optimizers(pair, run, target, facts),
            _of_other_schedulers(pair, run, target),
            _alone(pair, run, target),
        )
    )


def _reason(why: str, *keys: str) -> Reason:
    return Reason(why, frozenset(keys))


def _without_memory(pair: Pair, target: Run) -> Iterator[Reason]:
    """Nothing is written where there is no memory."""
    for model in pair.after.models:
        module = target.state.get(model.key)
        if (
            model.transform
            and module is not None
            and any(parameter.numel() for parameter in module.parameters())
        ):
            yield _reason(f"memory is {model.transform}", model.key)


def _lossy(run: Run, target: Run) -> Iterator[Reason]:
    """No loss is silent."""
    mine, theirs = _tensors(target), _tensors(run)
    at: dict[int, str] = {}
    for name, place in mine.items():
        key, saved = _key_of(name), theirs.get(name)
        if saved is None or saved.shape != place.shape:
            continue
        if saved.is_complex() and not place.is_complex():
            yield _reason("complex into real", key)
        wide = saved.dtype.is_floating_point or saved.is_complex()
        if wide and not (place.dtype.is_floating_point or place.is_complex()):
            yield _reason("float into integer", key)
        if wide and saved.numel() and not place.is_meta and place.dtype != saved.dtype:
            finite = saved.to(torch.complex128 if saved.is_complex() else torch.float64).isfinite()
            if bool((finite & ~_cast(saved, place.dtype).isfinite()).any()):
                yield _reason("finite into infinite", key)
        if place.numel() and not place.is_meta and (address := place.data_ptr()):
            other = at.setdefault(address, name)
            if (
                other != name
                and mine[other].shape == place.shape
                and not torch.equal(theirs[other], saved)
            ):
                yield _reason("two tensors into one memory", key, _key_of(other))


def _key_of(name: str) -> str:
    return name.partition(":")[0]


def _cast(saved: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(saved.shape)
    if saved.is_complex() and not dtype.is_complex:
        saved = saved.real
    return saved.to(dtype).to(torch.complex128 if dtype.is_complex else torch.float64)


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    """Return the plain tensors of all modules that have their own names in their state
    dict, and all bare parameters.

    The names in a state dict of a module's own form are as the module writes them.
    """
    found = {}
    for key, value in run.state.items():
        if isinstance(value, nn.Module):
            known = type(value).state_dict is nn.Module.state_dict
            for name, tensor in value.state_dict().items():
                if (
                    type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
                    and "old_weight" not in name
                ):
                    found[f"{key}:{canonical(name) if known else name}"] = tensor
        elif isinstance(value, nn.Parameter):
            found[f"{key}:"] = value.detach()
    return found


def _shapes(pair: Pair, run: Run, target: Run, facts: Facts) -> Iterator[Reason]:
    """The shape that a parameter had when its state was saved is compared with its
    shape now.
    """
    for key in _optimizers_of_both(pair, run, target):
        for name, parameter, theirs in _with_state(pair, run, target, key):
            if tuple(parameter.shape) != facts.shapes[run.names[id(theirs)]]:
                yield _reason("the state of a parameter of another shape", key, _key_of(name))


def _complex_moments(pair: Pair, run: Run, target: Run) -> Iterator[Reason]:
    """No imaginary part of a moment is dropped, as torch drops it for a parameter that
    is real now.
    """
    for key in _optimizers_of_both(pair, run, target):
        if has_ways_of_its_own(target.optimizers[key]):
            continue
        for _, parameter, theirs in _with_state(pair, run, target, key):
            moments = run.optimizers[key].state[theirs].values()
            if parameter.is_floating_point() and any(
                torch.is_tensor(moment) and moment.is_complex() for moment in moments
            ):
                yield _reason("complex moments into real", key)


def _optimizers_of_both(pair: Pair, run: Run, target: Run) -> list[str]:
    """Return the keys of the optimizers that both programs have in their states
    themselves, or none if the caller keeps something.
    """
    both = [key for key in target.optimizers if key in target.state and key in run.optimizers]
    return [key for key in both if not pair.call.keep and not isinstance(target.state[key], Holder)]


def _with_state(
    pair: Pair, run: Run, target: Run, key: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each parameter of an optimizer that gets saved state: its name, the
    parameter itself, and the one that was saved.

    Of an optimizer that was saved without modules, a parameter goes by its position.
    """
    ours, theirs = (
        [one for group in each.optimizers[key].param_groups for one in group["params"]]
        for each in (target, run)
    )
    if pair.call.saved and len(ours) == len(theirs):
        pairs = list(zip(ours, theirs, strict=True))
    else:
        named = {run.names[id(one)]: one for one in theirs}
        pairs = [
            (one, named[target.names[id(one)]]) for one in ours if target.names[id(one)] in named
        ]
    yield from (
        (target.names[id(mine)], mine, other)
        for mine, other in pairs
        if other in run.optimizers[key].state
    )


def _unmatched(pair: Pair, target: Run, facts: Facts) -> Iterator[Reason]:
    """An optimizer without any parameter that was found is an error, strict or not."""
    facts = by_position(facts, target) if pair.call.saved else facts
    for key, optimizer in target.optimizers.items():
        theirs = {name for names in facts.groups.get(key, []) for name in names}
        ours = {name for names in names_by_group(target, optimizer) for name in names}
        held = isinstance(target.state.get(key), Holder)
        if (
            key in target.state
            and theirs
            and ours
            and not theirs & ours
            and not pair.call.strict
            and not held
        ):
            yield _reason("no parameter of an optimizer was found", key)


def _of_other_keys(pair: Pair, run: Run, target: Run) -> Iterator[Reason]:
    """Keys that only one side has are refused, and so is a module or a state where
    nothing is found, even with strict=False.
    """
    apart = {key for key in run.state.keys() ^ target.state.keys() if not _is_kept(pair, key)}
    if pair.call.strict and apart:
        yield _reason("the states have other keys", *apart)
    if run.state.keys().isdisjoint(target.state) and not pair.call.keep:
        yield _reason("no key matches", *run.state, *target.state, "no key of the state")
    for key, value in target.state.items():
        if not pair.call.strict and not _is_kept(pair, key) and _apart(value, run.state.get(key)):
            yield _reason("no key of a module matches", key)


def _is_kept(pair: Pair, key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in pair.call.keep)


def _apart(mine: Any, theirs: Any) -> bool:
    """Return True if two modules have no key in common.

    The keys of a module with a state dict of its own form are as it writes them.
    """
    if not isinstance(mine, nn.Module) or not isinstance(theirs, nn.Module):
        return False
    known = [type(module).state_dict is nn.Module.state_dict for module in (mine, theirs)]
    ours, saved = (
        {canonical(name) if all(known) else name for name in module.state_dict()}
        for module in (mine, theirs)
    )
    return bool(ours) and ours.isdisjoint(saved)


def _of_other_optimizers(pair: Pair, run: Run, target: Run, facts: Facts) -> Iterator[Reason]:
    """An optimizer of another class, or of another division into groups, is refused.

    What an object of the caller's holds is unknown.
    """
    facts = by_position(facts, target) if pair.call.saved else facts
    for key, optimizer in target.optimizers.items():
        theirs = run.optimizers.get(key)
        if key not in target.state or theirs is None or key not in run.state or _is_kept(pair, key):
            continue
        held = {isinstance(which.state[key], Holder) for which in (run, target)}
        if held == {True}:
            continue
        if held == {True, False}:
            if isinstance(target.state[key], Holder):
                continue
            if pair.call.strict:
                yield _reason("the optimizer lay in an object of the caller's", key)
            elif (
                0 not in (counts := {_count(which.optimizers[key]) for which in (run, target)})
                and len(counts) > 1
            ):
                yield _reason("another number of parameters without names", key)
            continue
        if type(optimizer).__name__ != type(theirs).__name__:
            if pair.call.strict:
                yield _reason("the optimizer is of another class", key)
            continue
        ours, saved = names_by_group(target, optimizer), facts.groups[key]
        if pair.call.saved and _count(optimizer) != _count(theirs):
            yield _reason("another number of parameters without names", key)
            continue
        yield from (
            _reason(why, key)
            for why in _of_other_groups(
                pair, ours, saved, [_settings(group) for group in theirs.param_groups]
            )
        )


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _of_other_groups(
    pair: Pair, ours: list[list[str]], saved: list[list[str]], settings: list[str]
) -> Iterator[str]:
    own = {name: number for number, names in enumerate(ours) for name in names}
    former = {name: number for number, names in enumerate(saved) for name in names}
    if pair.call.strict and own.keys() != former.keys():
        yield "the optimizer has other parameters"
    if pair.call.strict and any(
        len({own[name] for name in names if name in own}) > 1 for names in saved
    ):
        yield "a group of parameters is divided"
    if any(len({settings[former[name]] for name in names if name in former}) > 1 for names in ours):
        yield "groups with different settings become one"


def _settings(group: dict[str, Any]) -> str:
    return text(
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
    )


def _of_other_schedulers(pair: Pair, run: Run, target: Run) -> Iterator[Reason]:
    """A scheduler of another class, or whose optimizer has another number of groups, is
    refused.
    """
    for before, after in _both(pair.before.extras, pair.after.extras):
        if (
            not {before.kind, after.kind} <= SCHEDULERS.keys()
            or after.key not in target.state
            or _is_kept(pair, after.key)
        ):
            continue
        counts = [
            len(which.optimizers[extra.of].param_groups)
            for which, extra in ((run, before), (target, after))
        ]
        if before.kind != after.kind and pair.call.strict:
            yield _reason("the scheduler is of another class", after.key)
        elif before.kind == after.kind != "plateau" and counts[0] != counts[1]:
            yield _reason("the scheduler was saved for another number of groups", after.key)


def _alone(pair: Pair, run: Run, target: Run) -> Iterator[Reason]:
    """An optimizer is refused without the modules that give its parameters their names,
    if the checkpoint has them.
    """
    for plan in pair.after.optimizers:
        if (
            plan.key not in target.state
            or plan.key not in run.state
            or _is_kept(pair, plan.key)
            or plan.wrapped
        ):
            continue
        before = next(one for one in pair.before.optimizers if one.key == plan.key)
        parameters = [
            any(group["params"] for group in which.optimizers[plan.key].param_groups)
            for which in (run, target)
        ]
        named = {
            _key_of(run.names[id(one)])
            for group in run.optimizers[plan.key].param_groups
            for one in group["params"]
        }
        mine = {
            _key_of(target.names[id(one)])
            for group in target.optimizers[plan.key].param_groups
            for one in group["params"]
        }
        if (
            all(parameters)
            and not before.wrapped
            and named <= run.state.keys()
            and mine.isdisjoint(target.state)
        ):
            yield _reason("an optimizer is recovered without its parameters", plan.key)


# -- refusals that are allowed


def may_refuse(pair: Pair, run: Run, target: Run) -> list[Reason]:
    """Return why a recovery may be refused although torch would load the state."""
    return list(
        chain(
            _partly_alone(pair, run, target),
            _of_other_values(pair),
            _of_other_settings(pair, run, target),
            _keep_without_match(pair, target),
            _sharing_elements(target),
            _without_parameters(target),
        )
    )


def _sharing_elements(target: Run) -> Iterator[Reason]:
    """A tensor whose elements share memory is refused, also where torch finds no value
    for it.
    """
    for key, value in target.state.items():
        if isinstance(value, nn.Module) and any(
            0 in buffer.stride() and buffer.numel() > 1 for buffer in value.buffers()
        ):
            yield _reason("elements share memory", key)


def _without_parameters(target: Run) -> Iterator[Reason]:
    """A state that has nothing but optimizers without parameters matches nothing."""
    if all(
        key in target.optimizers
        and not any(group["params"] for group in target.optimizers[key].param_groups)
        for key in target.state
    ):
        yield _reason("nothing is recovered", "no key of the state")


def _partly_alone(pair: Pair, run: Run, target: Run) -> Iterator[Reason]:
    """The names of an optimizer's parameters are those of the modules that hold them,
    and some of these are missing.
    """
    for plan in pair.after.optimizers:
        holders = {*plan.models, *plan.bares}
        if (
            plan.key in target.state
            and not holders <= target.state.keys() & run.state.keys()
            and not pair.call.saved
        ):
            yield _reason("an optimizer is recovered without its parameters", plan.key)


def _of_other_values(pair: Pair) -> Iterator[Reason]:
    """A value does not replace one of another kind."""
    for before, after in _both(pair.before.extras, pair.after.extras):
        if before.kind != after.kind:
            yield _reason("a value is of another kind", after.key)


def _of_other_settings(pair: Pair, run: Run, target: Run) -> Iterator[Reason]:
    """Settings with which an optimizer keeps another state are refused."""
    for key, optimizer in target.optimizers.items():
        theirs = run.optimizers.get(key)
        if theirs is None or not pair.call.strict or type(optimizer) is not type(theirs):
            continue
        kept = [
            {name: {bool(group.get(name)) for group in one.param_groups} for name in DECIDE_STATE}
            for one in (theirs, optimizer)
        ]
        if kept[0] != kept[1]:
            yield _reason("the optimizer keeps another state", key)


def _keep_without_match(pair: Pair, target: Run) -> Iterator[Reason]:
    """What the caller keeps must exist."""
    for pattern in pair.call.keep:
        key, _, name = pattern.partition(".")
        found = target.state.get(key)
        inside = (
            {canonical(one) for one in found.state_dict()}
            if isinstance(found, nn.Module)
            else set()
        )
        if key not in target.state or (
            inside and not any(fnmatchcase(one, name) for one in inside)
        ):
            yield _reason("nothing that is kept exists", pattern)


def _both(before: tuple[Any, ...], after: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    mine = {one.key: one for one in before}
    yield from ((mine[one.key], one) for one in after if one.key in mine)


def may_not_save(pair: Pair) -> Reason:
    """Return the keys of the values and the modules that the saving program holds, and
    that are refused on purpose.
    """
    tagged = {
        model.key
        for model in pair.before.models
        if any(block.kind == "tagged" for block in model.blocks)
    }
    copies = {model.key for model in pair.before.models if model.copy_of in tagged}
    return _reason(
        "it cannot be saved",
        *tagged,
        *copies,
        *(one.key for one in pair.before.extras if one.kind in REFUSED_VALUES),
    )


def may_be_late(pair: Pair, target: Run, key: str) -> bool:
    """Return True if the object with this key has a loader of its own, which may raise
    after other values are written.

    A scaler is refused before that. torch's own modules, and optimizers without hooks,
    are compared before anything is written.
    """
    if isinstance(target.state.get(key), Holder):
        return True
    for model in pair.after.models:
        if model.key == key:
            source = next((one for one in pair.after.models if one.key == model.copy_of), model)
            return "overridden" in source.wrappers or any(
                block.kind in OWN_LOADERS for block in source.blocks
            )
    for plan in pair.after.optimizers:
        if plan.key == key:
            return bool(plan.hooks) or plan.kind in ("saved", "exact")
    return all(extra.kind not in SCALERS for extra in pair.after.extras if extra.key == key)


def loads_by_itself(pair: Pair, key: str) -> bool:
    """Return True if the object with this key has a state dict of its own form, in
    which ckptd knows no names: torch is the measure.
    """
    models = {model.key for model in pair.after.models if "overridden" in model.wrappers}
    return key in models or any(plan.wrapped for plan in pair.after.optimizers if plan.key == key)
