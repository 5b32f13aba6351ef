"""What a recovery must end as: torch's own round trip, and, where ckptd is better on
purpose, the same with the values by name.

`dump` and `load_as_torch` are `torch.save({key: object.state_dict()})`, `torch.load`
and `load_state_dict` on the same kinds of objects. `load_by_name` does the same, with
these improvements, which are the closed list of cases in which ckptd may differ from
torch:

1. `names`: parameters are found by the names that they have in their module, whatever
   wraps it, and in whatever order they are.
2. `context`: a recovery under `torch.inference_mode()` or another default device or
   dtype ends as one without.
3. `moments`: a tensor of an optimizer's state keeps its dtype if its parameter's dtype
   has not changed, and always if it holds no floating numbers; torch converts it. Texts
   come back as they were; torch takes them for sequences. An optimizer with hooks or
   methods of its own is given its state through these, and ends as torch's.
4. `settings`: groups that were saved with the same settings may be merged. The names in
   a param group stay those of the recovering program, and so do settings that the
   checkpoint lacks. A group without parameters that the checkpoint lacks stays as it
   is.
5. `strict=False`: an optimizer takes the state of the parameters that it still has.
   Keys of a dict that only one side has are left.
6. `keep`: the values that the caller keeps are those of the recovering program.
7. A dict of another type than the saved one, such as a Counter, stays, and takes the
   saved values. An OrderedDict takes their order, too.
"""

from __future__ import annotations

import copyreg
import io
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from tests.oracle.build import Run, canonical, context
from tests.oracle.optimizers import Holder
from tests.oracle.prints import text
from tests.oracle.program import Call


def _memory_format(name: str) -> torch.memory_format:
    made: torch.memory_format = getattr(torch, name)
    return made


def _reduced(value: torch.memory_format) -> tuple[Callable[[str], torch.memory_format], tuple[str]]:
    return _memory_format, (str(value).removeprefix("torch."),)


# Which torch.save cannot write, although it has a plain form.
copyreg.pickle(torch.memory_format, _reduced)


class Unfit(Exception):
    """A saved state does not fit the recovering program."""


@dataclass(slots=True)
class Facts:
    """What the saving program knows of its optimizers, and torch.save has not: the
    names of the parameters, in each group.

    shapes and dtypes: those of each parameter, by name. held: the keys of the
    optimizers that lie in an object of the caller's.
    """

    groups: dict[str, list[list[str]]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


def facts_of(run: Run) -> Facts:
    found = Facts()
    found.held = {key for key in run.optimizers if isinstance(run.state.get(key), Holder)}
    for key, optimizer in run.optimizers.items():
        found.groups[key] = names_by_group(run, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = run.names[id(parameter)]
                found.shapes[name], found.dtypes[name] = tuple(parameter.shape), parameter.dtype
    return found


def by_position(facts: Facts, target: Run) -> Facts:
    """Return the facts of optimizers that were saved without their modules, which have
    no names: a parameter goes by its position.
    """
    found = Facts(shapes=dict(facts.shapes), dtypes=dict(facts.dtypes), held=facts.held)
    for key, groups in facts.groups.items():
        theirs = list(chain.from_iterable(groups))
        ours = (
            list(chain.from_iterable(names_by_group(target, target.optimizers[key])))
            if key in target.optimizers
            else []
        )
        if len(ours) != len(theirs):
            found.groups[key] = groups
            continue
        now = dict(zip(theirs, ours, strict=True))
        found.groups[key] = [[now[name] for name in names] for names in groups]
        for old, new in now.items():
            found.shapes[new], found.dtypes[new] = facts.shapes[old], facts.dtypes[old]
    return found


def names_by_group(run: Run, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [
        [run.names[id(parameter)] for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def dump(state: dict[str, Any]) -> bytes:
    """Return what torch.save makes of a state: each object with a `state_dict` as that,
    and everything else as it is.
    """
    buffer = io.BytesIO()
    torch.save(_plain(state), buffer)
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    if (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    ):
        return value.state_dict()
    if type(value) in (dict, list, tuple):
        return (
            {key: _plain(item) for key, item in value.items()}
            if isinstance(value, dict)
            else type(value)(map(_plain, value))
        )
    return value


def read(data: bytes) -> dict[str, Any]:
    """Return what torch.load makes of it.

    The classes in it are the rig's own, so pickled code may run.
    """
    made: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=False)
    return made


def load_as_torch(run: Run, data: bytes, call: Call) -> None:
    """Load a state as torch does: each object by its own method, parameters of
    optimizers by their numbers.
    """
    with context(call.context):
        _load(run, read(data), call, lambda key, place, saved: place.load_state_dict(saved))


def load_by_name(run: Run, data: bytes, call: Call, facts: Facts) -> None:
    """Load a state as ckptd promises to.

    Raises Unfit if the two programs do not fit, and whatever an object raises.
    """
    kept = _Kept(run, call)

    def load(key: str, place: Any, saved: Any) -> None:
        if isinstance(place, nn.Module):
            _module(key, place, saved, call)
        elif key in run.optimizers and not isinstance(place, Holder):
            _optimizer(run, key, place, saved, facts, call)
        elif isinstance(place, Holder) and key not in facts.held:
            place.load_state_dict(
                {
                    **saved,
                    "param_groups": [_without_names(group) for group in saved["param_groups"]],
                }
            )
        else:
            place.load_state_dict(saved)

    _load(run, read(data), call, load)
    kept.put_back()


def _load(
    run: Run, saved: dict[str, Any], call: Call, load: Callable[[str, Any, Any], None]
) -> None:
    for key in list(run.state):
        if (call.only and key not in call.only) or any(
            fnmatchcase(key, pattern) for pattern in call.keep
        ):
            continue
        if key not in saved:
            if call.strict:
                raise Unfit(f"{key} was not saved")
            continue
        place = run.state[key]
        try:
            if isinstance(place, nn.Module) and not call.strict and load.__name__ != "load":
                place.load_state_dict(saved[key], strict=False)
            else:
                run.state[key] = _into(place, saved[key], key, load, call)
        except Exception as error:
            error.key = key  # type: ignore[attr-defined]  # for the judge
            raise


def _into(
    place: Any, saved: Any, key: str, load: Callable[[str, Any, Any], None], call: Call
) -> Any:
    """Return what is in this place afterwards: the same object if it can take the saved
    value.
    """
    if callable(getattr(place, "load_state_dict", None)) and not isinstance(place, type):
        load(key, place, saved)
        return place
    if isinstance(place, torch.Tensor) and isinstance(saved, torch.Tensor):
        if place.shape != saved.shape:
            raise Unfit(f"{key} has shape {list(saved.shape)}, not {list(place.shape)}")
        if isinstance(place, nn.Parameter) or place.requires_grad:
            with torch.no_grad():
                place.copy_(saved)
            return place
        return (
            saved
            if isinstance(place, type(saved)) and place.dtype == saved.dtype
            else place.copy_(saved)
        )
    if isinstance(place, torch.Tensor) and not isinstance(saved, torch.Tensor):
        raise Unfit(f"{key} is {type(saved).__name__}, not {type(place).__name__}")
    if (
        isinstance(place, dict)
        and isinstance(saved, dict)
        and place
        and (type(place) is dict or type(place) is not type(saved))
    ):
        if call.strict and place.keys() != saved.keys():
            raise Unfit(f"{key} has other keys")
        for name in (name for name in saved if name in place):
            place[name] = _into(place[name], saved[name], key, load, call)
            if isinstance(place, OrderedDict):
                place.move_to_end(name)
        return place
    # The caller's dict keeps its class, whatever class was saved.
    if type(place) is dict and not place and isinstance(saved, dict):
        return dict(saved)
    if type(place) in (list, tuple) and isinstance(saved, type(place)) and len(place) == len(saved):
        return type(place)(
            _into(one, item, key, load, call) for one, item in zip(place, saved, strict=True)
        )
    return saved


def _module(key: str, module: nn.Module, saved: dict[str, Any], call: Call) -> None:
    if type(module).state_dict is not nn.Module.state_dict:  # the names are those of its own form
        module.load_state_dict(saved, strict=call.strict)
        return
    by_name = {canonical(name): value for name, value in saved.items()}
    own = {canonical(name): name for name in module.state_dict()}
    named = {own.get(name, name): value for name, value in by_name.items()}
    mine = module.state_dict() if call.keep else {}
    for name in own if call.keep else ():  # a value that is kept need not have its saved shape
        if own[name] in named and any(
            fnmatchcase(f"{key}.{name}", pattern) for pattern in call.keep
        ):
            named[own[name]] = mine[own[name]]
    metadata = getattr(saved, "_metadata", None)
    if metadata is not None:
        renamed = type(saved)(named)
        parts = {canonical(f"{name}."): name for name, _ in module.named_modules()}
        renamed._metadata = {  # type: ignore[attr-defined]
            parts.get(canonical(f"{name}."), name): version for name, version in metadata.items()
        }
        named = renamed
    module.load_state_dict(named, strict=call.strict)


def _optimizer(
    run: Run, key: str, place: Any, saved: dict[str, Any], facts: Facts, call: Call
) -> None:
    optimizer = run.optimizers[key]
    theirs, ours = facts.groups.get(key), names_by_group(run, optimizer)
    if theirs is None:
        raise Unfit(f"{key} was no optimizer")
    numbers = {
        name: number
        for names, group in zip(theirs, saved["param_groups"], strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    wanted = [name for names in ours for name in names]
    if call.strict and set(wanted) != set(numbers):
        raise Unfit(f"{key} has other parameters")
    if not set(wanted) & set(numbers) and wanted and numbers:
        raise Unfit(f"{key} has no parameter of the checkpoint")
    state = {
        name: value for name, value in saved["state"].items() if name not in set(numbers.values())
    }
    own_state: dict[int, Any] = {}  # of parameters that the checkpoint does not have
    groups, number = [], 0
    for position, (names, own) in enumerate(zip(ours, optimizer.param_groups, strict=True)):
        settings = _settings(names, position, len(ours), theirs, saved["param_groups"], call)
        settings = dict(own if settings is None else settings)
        settings["params"] = list(range(number, number + len(names)))
        settings.pop("param_names", None)
        if "param_names" in own:
            settings["param_names"] = list(own["param_names"])
        groups.append(settings)
        for name in names:
            if name in numbers and numbers[name] in saved["state"]:
                state[number] = saved["state"][numbers[name]]
            elif name not in numbers and (mine := _entry(optimizer, number)) is not None:
                own_state[number] = mine
            number += 1
    lacking = [
        {name: value for name, value in group.items() if name != "params" and name not in given}
        for group, given in zip(optimizer.param_groups, groups, strict=True)
    ]
    place.load_state_dict({**saved, "state": state, "param_groups": groups})
    for group, kept in zip(optimizer.param_groups, lacking, strict=True):
        group.update(kept)
    if not has_ways_of_its_own(optimizer):
        _widen(run, optimizer, state, facts)
    for number, entry in own_state.items():
        optimizer.state[_parameters(optimizer)[number]] = entry


def _without_names(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "param_names"}


def has_ways_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is given its state through its own method, which then
    decides about dtypes.
    """
    cls, plain = type(optimizer), torch.optim.Optimizer
    hooked = any(
        value
        for name, value in vars(optimizer).items()
        if "state_dict_" in name and name.endswith("hooks")
    )
    return (
        hooked
        or cls.state_dict is not plain.state_dict
        or cls.load_state_dict is not plain.load_state_dict
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _entry(optimizer: torch.optim.Optimizer, number: int) -> Any:
    """Return the state that an optimizer has for a parameter, or None."""
    return optimizer.state.get(_parameters(optimizer)[number])


def _settings(
    names: list[str],
    position: int,
    count: int,
    theirs: list[list[str]],
    groups: list[dict[str, Any]],
    call: Call,
) -> dict[str, Any] | None:
    """Return the saved settings of a group: those of the saved group that had its
    parameters.
    """
    from_groups = {number for number, saved in enumerate(theirs) if set(saved) & set(names)}
    # Groups with the same settings may be merged.
    if len({text(_of_group(groups[number])) for number in from_groups}) == 1:
        return groups[from_groups.pop()]
    if not names and count == len(theirs) and not theirs[position]:
        return groups[position]
    if call.strict and (from_groups or count <= len(theirs)):
        raise Unfit("the parameters are in other groups")
    return groups[min(from_groups)] if from_groups else None


def _of_group(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _widen(run: Run, optimizer: torch.optim.Optimizer, state: dict[Any, Any], facts: Facts) -> None:
    """Give each tensor of the state its saved dtype again, if the parameter still has
    the dtype that it was saved with.
    """
    for number, parameter in enumerate(_parameters(optimizer)):
        saved, loaded = state.get(number), optimizer.state.get(parameter)
        if isinstance(saved, dict) and isinstance(loaded, dict):
            same = facts.dtypes.get(run.names[id(parameter)]) == parameter.dtype
            for name, value in loaded.items():
                loaded[name] = _wide(value, saved.get(name), same)


def _wide(loaded: Any, saved: Any, same: bool) -> Any:
    """Return a loaded value as it was saved.

    If the dtype of its parameter is not the `same`, floating tensors stay as torch made
    them.
    """
    # Which torch takes for a sequence, and makes the text of a generator of it.
    if isinstance(saved, (str, bytes)):
        return saved
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        narrowed = loaded.dtype != saved.dtype and loaded.shape == saved.shape
        follows = saved.dtype.is_floating_point or saved.dtype.is_complex
        return saved.clone() if narrowed and (same or not follows) else loaded
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return type(loaded)(
            {name: _wide(value, saved.get(name), same) for name, value in loaded.items()}
        )
    if (
        type(loaded) in (list, tuple)
        and isinstance(saved, type(loaded))
        and len(saved) == len(loaded)
    ):
        return type(loaded)(
            _wide(one, other, same) for one, other in zip(loaded, saved, strict=True)
        )
    return loaded


class _Kept:
    """The values of the recovering program that `keep` names, taken before the
    recovery.
    """

    def __init__(self, run: Run, call: Call) -> None:
        self._back: list[Callable[[], None]] = []
        for pattern in call.keep:
            for key, optimizer in run.optimizers.items():
                for number, group in enumerate(optimizer.param_groups):
                    for name, value in group.items():
                        if name != "params" and fnmatchcase(
                            f"{key}.param_groups.{number}.{name}", pattern
                        ):
                            held = value.clone() if isinstance(value, torch.Tensor) else value
                            self._back.append(
                                partial(_set_setting, optimizer, number, name, value, held)
                            )
            for key, module in run.state.items():
                if isinstance(module, nn.Module):
                    for name, value in (*module.named_parameters(), *module.named_buffers()):
                        if fnmatchcase(f"{key}.{canonical(name)}", pattern):
                            self._back += self._of_tensor(run, value)

    @staticmethod
    def _of_tensor(run: Run, value: torch.Tensor) -> list[Callable[[], None]]:
        """Return what puts a tensor back, and the state that optimizers have for it."""
        held = value.detach().clone()

        def put() -> None:
            with torch.no_grad():
                value.copy_(held)

        back: list[Callable[[], None]] = [put]
        for key, optimizer in run.optimizers.items():
            # An object of the caller's. ckptd knows nothing about it but its state
            # dict.
            if isinstance(run.state.get(key), Holder):
                continue
            if any(
                value is parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                entry = optimizer.state.get(value)
                back.append(
                    lambda optimizer=optimizer, entry=entry: _set_entry(optimizer, value, entry)  # type: ignore[misc]
                )
        return back

    def put_back(self) -> None:
        for put in self._back:
            put()


def _set_entry(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, entry: Any) -> None:
    optimizer.state.pop(parameter, None)
    if entry is not None:
        optimizer.state[parameter] = entry


def _set_setting(
    optimizer: torch.optim.Optimizer, number: int, name: str, value: Any, held: Any
) -> None:
    """Put back a setting.

    A tensor stays the same object, which several groups may have.
    """
    if isinstance(value, torch.Tensor):
        value.copy_(held)
    optimizer.param_groups[number][name] = value  # looked up now, since loading has made new groups


__all__ = [
    "Facts",
    "Holder",
    "Unfit",
    "dump",
    "facts_of",
    "load_as_torch",
    "load_by_name",
    "names_by_group",
    "read",
]
