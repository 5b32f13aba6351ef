"""Names the parameters and buffers of a module as they are named without its wrappers,
such as DistributedDataParallel and torch.compile.

The names are derived from the tree of submodules, so that an attribute of the user's
own with the name `module` stays in them. A wrapper that cannot be left out without
making two names equal stays in them, too.
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
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}
"""The attribute with the wrapped module, by the wrapper's class.

The classes are given by name, because importing torch.compile takes a second.
"""

_ATTRIBUTES = tuple(dict.fromkeys(_WRAPPERS.values()))
_PARTS = tuple(f".{attribute}." for attribute in _ATTRIBUTES)
_TO_THE_LAST = re.compile(rf"(?:.*\.)?(?:{'|'.join(_ATTRIBUTES)})\.", re.DOTALL)
_FORMERLY_LEFT_OUT = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
_flattening: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


class Ways:
    """The ways from some modules to submodules. All ways are walked at once.

    Each step is the number of a module and the name of its child, which gets the next
    number. The first numbers are those of the `roots` modules where the ways begin.
    """

    __slots__ = ("_numbers", "_roots", "_steps")

    def __init__(self, roots: int) -> None:
        self._roots = roots
        self._steps: list[tuple[int, str]] = []
        self._numbers: dict[tuple[int, str], int] = {}

    def add(self, root: int, names: Iterable[str]) -> int:
        """Add the way over these names. Return the number of the submodule at its end."""
        number = root
        for name in names:
            step = (number, name)
            if step not in self._numbers:
                self._numbers[step] = self._roots + len(self._steps)
                self._steps.append(step)
            number = self._numbers[step]
        return number

    def walk(self, roots: Iterable[torch.nn.Module]) -> list[Any]:
        """Return the modules by number.

        Raises LookupError or AttributeError if a way does not exist.
        """
        found: list[Any] = list(roots)
        for number, name in self._steps:
            found.append(found[number]._modules[name])
        return found


class _Known(NamedTuple):
    """The canonical names of one state dict.

    keys: the keys of the state dict. names: the canonical names. ways: the ways through
    wrappers. kinds: the class of each module on these ways.
    """

    keys: list[str]
    names: list[str]
    ways: Ways
    kinds: list[type]

    def holds(self, module: torch.nn.Module, raw: list[str]) -> bool:
        try:
            return self.keys == raw and list(map(type, self.ways.walk([module]))) == self.kinds
        except (LookupError, AttributeError):
            return False


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module inside DataParallel or DistributedDataParallel."""
    while isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        module = module.module
    return module


def flattens(module: torch.nn.Module) -> bool:
    """Return True if FullyShardedDataParallel (FSDP1) has flattened parameters of the
    module.

    FSDP1 needs a process group, so the answer is False until one is initialised. After
    that, each module is searched only once.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    if module not in _flattening:
        _flattening[module] = any(
            isinstance(part, FullyShardedDataParallel) for part in module.modules()
        )
    return _flattening[module]


# -- names


def canonical_names(module: torch.nn.Module, raw: Iterable[str]) -> list[str]:
    """Return the canonical name for each raw name in the state dict of a module.

    Equal names are returned only for equal raw names.
    """
    raw = list(raw)
    return _names(raw, _prefixes(module, raw)) if _may_have_wrappers(raw) else raw


def raw_names(module: torch.nn.Module, raw: Iterable[str]) -> dict[str, str]:
    """Return the raw name for each canonical name, for the way back from a checkpoint
    into `load_state_dict`.
    """
    raw = list(raw)
    return dict(zip(canonical_names(module, raw), raw, strict=True))


def canonical_keys(module: torch.nn.Module, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of a module under canonical names.

    The names are kept for the next call and checked then, which takes less time.
    """
    raw = list(tree)
    if not _may_have_wrappers(raw):
        return dict(tree)
    known = _known.get(module)
    if known is None or not known.holds(module, raw):
        ways, prefixes = Ways(1), _prefixes(module, raw)
        for _, way in prefixes.values():
            ways.add(0, way)
        known = _known[module] = _Known(
            raw, _names(raw, prefixes), ways, list(map(type, ways.walk([module])))
        )
    return dict(zip(known.names, tree.values(), strict=True))


def current_names(raw_of: dict[str, str], saved: Collection[str]) -> dict[str, str]:
    """Return the present canonical name for each saved name of a module.

    A name that is not known stays as it is. `raw_of` has the raw names of the module by
    canonical name. Checkpoints of other tools have raw names. Earlier versions left out
    only some of the wrappers.
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


def may_name_wrappers(prefixes: Iterable[str]) -> bool:
    """Return False if no prefix goes through a wrapper. Takes little time.

    Prefixes are those of submodules, without their last dot.
    """
    joined = "." + ".\n.".join(prefixes) + "."
    return any(part in joined for part in _PARTS)


def _may_have_wrappers(raw: list[str]) -> bool:
    joined = "." + "\n.".join(raw)
    return any(part in joined for part in _PARTS)


_Prefixes = dict[str, tuple[str, list[str]]]


def _prefixes(module: torch.nn.Module, raw: list[str]) -> _Prefixes:
    """Return the prefixes that end with the attribute of a wrapper.

    Each comes with the prefix without its wrappers, and with its way through the
    module.
    """
    found = {match[0]: None for match in map(_TO_THE_LAST.match, raw) if match}
    return {prefix: _shortened(module, prefix) for prefix in found}


def _names(raw: list[str], prefixes: _Prefixes) -> list[str]:
    if all(prefix == short for prefix, (short, _) in prefixes.items()):
        return raw
    names = [
        prefixes[found[0]][0] + name[found.end() :] if (found := _TO_THE_LAST.match(name)) else name
        for name in raw
    ]
    # A hook may have added a key that is like the short name of another.
    return names if len(set(names)) == len(set(raw)) else raw


def _shortened(module: torch.nn.Module, prefix: str) -> tuple[str, list[str]]:
    """Return a prefix without the wrappers on its way through the module, and this way.

    The prefix ends with a dot.
    """
    parts, kept, way, position = prefix.split(".")[:-1], list[str](), list[str](), 0
    while position < len(parts):
        part, attribute = parts[position], wrapped_at(module)
        if attribute and part not in module._modules:  # this wrapper removes itself from the keys
            part = attribute
        elif part not in module._modules:
            kept += parts[position:]
            break
        else:
            kept += [] if part == attribute else [part]
            position += 1
        module = module._modules[part]  # type: ignore[assignment]
        way.append(part)
    return "".join(f"{part}." for part in kept), way


# -- wrappers


def wrapped_at(module: torch.nn.Module) -> str:
    """Return the name of the attribute with the wrapped module.

    Return "" for a module that is no wrapper, or that cannot be left out of names.
    """
    attribute = _attribute(type(module))  # type: ignore[arg-type]
    if not attribute or (inner := module._modules.get(attribute)) is None:
        return ""
    own = _own_names(module) - {attribute}
    return "" if own and not own.isdisjoint(_outer_names(inner)) else attribute


@lru_cache(maxsize=4096)
def _attribute(cls: type) -> str:
    return next(
        (
            _WRAPPERS[name]
            for base in cls.__mro__
            if (name := f"{base.__module__}.{base.__qualname__}") in _WRAPPERS
        ),
        "",
    )


def _own_names(module: torch.nn.Module) -> set[str]:
    extra = (
        () if type(module).get_extra_state is torch.nn.Module.get_extra_state else ("_extra_state",)
    )
    return {*module._parameters, *module._buffers, *module._modules, *extra}


def _outer_names(module: torch.nn.Module) -> set[str]:
    """Return the first parts of the canonical names of a module."""
    attribute = wrapped_at(module)
    own = _own_names(module)
    return own if not attribute else (own - {attribute}) | _outer_names(module._modules[attribute])  # type: ignore[arg-type]
