"""Names the parameters of each optimizer as they are named in the modules that hold
them.

The names of an optimizer's parameters depend only on the modules whose parameters it
holds. Other modules in the state, such as an average of the model, do not change them.

Walking ten thousand parameters takes longer than copying them. Names are therefore kept
from one capture to the next, and only checked: a name still holds if the module has the
same parameter in the same place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, TypeVar

import torch

from ckptd.agent.state.packer import TENSORS
from ckptd.agent.state.records import KINDS, WITH_FIELDS, kind_of
from ckptd.agent.state.tree import PerRank
from ckptd.agent.state.wrappers import Ways, canonical_names, flattens, former_name, unwrapped
from ckptd.shared.formats.bounds import PLAIN_TYPES, Encoded, types_of

T = TypeVar("T")
ParameterKey = str | int
"""The name of a parameter, or the number of a parameter without a name."""

_LEAVES = TENSORS | PLAIN_TYPES


def buffer_names(state: Any) -> list[str]:
    """Return the keys of the buffers of all modules in a state."""
    found = list[str]()
    for path, module in find(state, "", torch.nn.Module):
        module = unwrapped(module)
        names = canonical_names(
            module, [name for name, _ in module.named_buffers(remove_duplicate=False)]
        )
        found += [f"{path}.{name}" if path else name for name in names]
    return found


def learned_names(state: Any, names: Iterable[str]) -> frozenset[str] | None:
    """Return those of the tensors' names that are parameters of modules, or state of
    optimizers, in a state. Return None if the state has neither module nor optimizer.

    Their values should be finite. Buffers may hold infinities by right, as a mask does,
    and extra states are opaque.
    """
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    starts = tuple(f"{path}." if path else "" for path, _ in find(state, "", kinds))
    if not starts:
        return None
    buffers = set(buffer_names(state))
    return frozenset(
        name
        for name in names
        if name.startswith(starts) and name not in buffers and _EXTRA not in name.split(".")
    )


_EXTRA = "_extra_state"
"""The last component of the key of `Module.get_extra_state` in a state dict."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer in the order of all groups, which is how
    `state_dict()` numbers them.
    """
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_stateful(value: Any) -> bool:
    """Return True if an object has both `state_dict` and `load_state_dict`."""
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(map(callable, methods))


def find(
    state: Any,
    path: str,
    kind: type[T] | tuple[type[T], ...],
    *,
    tensors: bool = False,
    encoded: Encoded | None = None,
) -> Iterator[tuple[str, T]]:
    """Yield (key, object) for each object of `kind` in a state.

    The dicts, lists, tuples, records and `per_rank` values of the state are searched.
    Tensors are passed over unless `tensors` is true. `encoded` is as for `types_of`.
    """
    if isinstance(state, PerRank):
        state = state.value
    if isinstance(state, kind):
        yield path, state
    elif isinstance(state, dict):
        flat = types_of(state.values()) <= (PLAIN_TYPES if tensors else _LEAVES)
        for key, value in state.items() if not flat else ():
            if tensors or not isinstance(value, torch.Tensor):
                where = f"{path}.{key}" if path else str(key)
                yield from find(value, where, kind, tensors=tensors, encoded=encoded)
    elif (record := kind_of(state)) in WITH_FIELDS and not is_stateful(state):
        fields = KINDS[record].fields(state)
        yield from find(fields, path, kind, tensors=tensors, encoded=encoded)
    elif isinstance(state, (list, tuple)):
        # A history has a million numbers.
        flat = types_of(state, encoded) <= (PLAIN_TYPES if tensors else _LEAVES)
        for number, value in enumerate(state if not flat else ()):
            if tensors or not isinstance(value, torch.Tensor):
                where = f"{path}.{number}" if path else str(number)
                yield from find(value, where, kind, tensors=tensors, encoded=encoded)


_BARE = -1
"""The number that stands for "no module": the parameter lies directly under a key of
the state.
"""


class ModuleParameters(NamedTuple):
    """The parameters of a module.

    `number` has the number of each parameter by its id. `raw` and `names` have their
    raw and their canonical names, by these numbers. `others` has the further canonical
    names of tied parameters.
    """

    number: dict[int, int]
    raw: list[str]
    names: list[str]
    others: list[str]

    @classmethod
    def by(cls, module: torch.nn.Module) -> ModuleParameters:
        number, raw, others = dict[int, int](), list[str](), list[str]()
        for name, parameter in _named_parameters(module):
            if id(parameter) in number:
                others.append(name)
            else:
                number[id(parameter)] = len(raw)
                raw.append(name)
        return cls(number, raw, canonical_names(module, raw), canonical_names(module, others))


def _named_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return each parameter of a module with its name, a tied parameter under each of
    its names.
    """
    try:
        return list(module.named_parameters(remove_duplicate=False))
    except TypeError:  # a class of the caller's overrides it without this argument
        return list(module.named_parameters())


class Names:
    """The names of the parameters in a state, for each optimizer.

    modules: the modules in the state, with their keys. optimizers: the optimizers in
    the state. optimizer_paths: the keys of the optimizers. `encoded` is as for `types_of`.
    """

    def __init__(self, state: Any = None, encoded: Encoded | None = None) -> None:
        self._state = state
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.optimizer_paths: list[str] = []
        kinds: tuple[type[torch.nn.Module | torch.optim.Optimizer], ...] = (
            torch.nn.Module,
            torch.optim.Optimizer,
        )
        for path, found in find(state, "", kinds, encoded=encoded):
            if isinstance(found, torch.nn.Module):
                self.modules.append((path, found))
            else:
                self.optimizers.append(found)
                self.optimizer_paths.append(path)
        self._held: list[ModuleParameters] | None = None
        self._bare: dict[int, str] | None = None
        self._keys: dict[int, tuple[torch.optim.Optimizer, list[ParameterKey]]] = {}
        self._flattened: dict[int, tuple[torch.optim.Optimizer, torch.nn.Module | None]] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> list[ParameterKey]:
        """Return the name of each parameter of an optimizer, in the order of
        `parameters_of`.

        A parameter that is in no module and under no key of the state gets its number
        among such parameters of the optimizer.
        """
        if id(optimizer) not in self._keys:
            parameters = parameters_of(optimizer)
            named = self._named(self.places(parameters))
            unnamed = dict.fromkeys(
                id(parameter) for parameter in parameters if id(parameter) not in named
            )
            numbers = {parameter: number for number, parameter in enumerate(unnamed)}
            self.keep(
                optimizer, [named[id(p)] if id(p) in named else numbers[id(p)] for p in parameters]
            )
        return self._keys[id(optimizer)][1]

    def tensors_of(self, optimizer: torch.optim.Optimizer) -> list[str | None]:
        """Return the key of each parameter of an optimizer in the state.

        The order is that of `parameters_of`. The key of a parameter that is not in the
        state is None.
        """
        parameters, found = parameters_of(optimizer), list[str | None]()
        places = self.places(parameters)
        for parameter in map(id, parameters):
            place = places.get(parameter)
            if place is None or place == _BARE:
                found.append(None if place is None else self.raw(parameter, place))
                continue
            path, held = self.modules[place][0], self.held()[place]
            name = held.names[held.number[parameter]]
            found.append(f"{path}.{name}" if path else name)
        return found

    def flattened_by(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """Return the module in which FSDP1 has flattened parameters of the optimizer,
        or None.
        """
        if id(optimizer) not in self._flattened:
            own = (
                set(map(id, parameters_of(optimizer)))
                if any(flattens(module) for _, module in self.modules)
                else set()
            )
            holders = (
                m
                for _, m in reversed(self.modules)
                if own and flattens(m) and not own.isdisjoint(map(id, m.parameters()))
            )
            self.keep_flattened(optimizer, next(holders, None))
        return self._flattened[id(optimizer)][1]

    def keep(self, optimizer: torch.optim.Optimizer, keys: list[ParameterKey]) -> None:
        """Set the names of an optimizer's parameters."""
        # The optimizer is kept alive, because a later object could get its id.
        self._keys[id(optimizer)] = optimizer, keys

    def keep_flattened(
        self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | None
    ) -> None:
        """Set the module in which FSDP1 has flattened parameters of the optimizer."""
        self._flattened[id(optimizer)] = optimizer, module

    def former(self, optimizer: torch.optim.Optimizer) -> dict[str, ParameterKey]:
        """Return the present name for each name in checkpoints of earlier versions.

        An old name had the key of the module as prefix if any other module of the state
        had a parameter of the same name, and lacked only some of the wrappers. A name
        that could mean several parameters is left out.
        """
        today = dict(zip(map(id, parameters_of(optimizer)), self.of(optimizer), strict=True))
        found: dict[str, set[ParameterKey]] = {}
        for (path, module), held in zip(self.modules, self.held(), strict=True):
            outer = "module." * _depth(module)
            for parameter in held.number.keys() & today.keys():
                number = held.number[parameter]
                for name in (held.names[number], former_name(held.raw[number].removeprefix(outer))):
                    for known in (name, f"{path}.{name}"):
                        found.setdefault(known, set()).add(today[parameter])
        return {name: next(iter(keys)) for name, keys in found.items() if len(keys) == 1}

    def places(self, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
        """Return the number of the module that names each parameter, by the id of the
        parameter.

        The module that holds most of the parameters comes first, then the module that
        holds most of the rest, and so on. Bare tensors come last.
        """
        left, found = set(map(id, parameters)), dict[int, int]()
        if not left:
            return found
        tables = [held.number for held in self.held()]
        queue = [(-len(table.keys() & left), number) for number, table in enumerate(tables)]
        heapify(queue)
        # Counts only fall, so that a highest count that has not fallen is the highest
        # of all.
        while left and queue:
            known, number = heappop(queue)
            here = tables[number].keys() & left
            if here and -len(here) == known:
                found |= dict.fromkeys(here, number)
                left -= here
            elif here:
                heappush(queue, (-len(here), number))
        if left:
            if self._bare is None:
                self._bare = {}
                for path, tensor in find(self._state, "", torch.Tensor, tensors=True):
                    self._bare.setdefault(id(tensor), path)
            found |= dict.fromkeys(self._bare.keys() & left, _BARE)
        return found

    def raw(self, parameter: int, place: int) -> str:
        """Return the name of a parameter, given by its id, as the module in its place
        has it.
        """
        if place == _BARE:
            assert self._bare is not None
            return self._bare[parameter]
        held = self.held()[place]
        return held.raw[held.number[parameter]]

    def _named(self, places: dict[int, int]) -> dict[int, str]:
        """Return the names of parameters in their places.

        If two modules have the same name for different parameters, the names get the
        keys of the modules as prefixes. All names of tied parameters count, so that
        these prefixes do not depend on whether parameters are tied.
        """
        held = self.held() if places else []
        short = {
            p: self.raw(p, n) if n == _BARE else held[n].names[held[n].number[p]]
            for p, n in places.items()
        }
        count = Counter(short.values())
        count.update(name for n in {*places.values()} - {_BARE} for name in held[n].others)
        names = {
            p: name
            if places[p] == _BARE or count[name] == 1
            else f"{self.modules[places[p]][0]}.{name}"
            for p, name in short.items()
        }
        count = Counter(names.values())
        return {parameter: name for parameter, name in names.items() if count[name] == 1}

    def tensors(self) -> set[str]:
        """Return the keys of all parameters of the modules in the state."""
        return {
            f"{path}.{name}" if path else name
            for (path, _), held in zip(self.modules, self.held(), strict=True)
            for name in (*held.names, *held.others)
        }

    def held(self) -> list[ModuleParameters]:
        """Return the parameters of each module of the state."""
        if self._held is None:
            self._held = [ModuleParameters.by(module) for _, module in self.modules]
        return self._held


def _depth(module: torch.nn.Module) -> int:
    """Return the number of DataParallel and DistributedDataParallel around a module."""
    depth, own = 0, unwrapped(module)
    while module is not own:
        module, depth = module.module, depth + 1  # type: ignore[assignment]
    return depth


def with_current_names(
    tree: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Names,
    saved_tensors: Callable[[Any], Sequence[str]] = lambda name: (),
) -> dict[str, Any]:
    """Return the saved state of an optimizer under the present names of its parameters.

    saved_tensors: returns the keys of the saved tensors for which a saved name may
    stand. A name follows the key of its tensor, because the other modules of the state
    decide whether a name begins with the key of its module.

    `param_names`, which torch keeps in a group, are left out: they are names of the
    program that saved them, and no settings. Checkpoints of earlier versions have other
    names, or number all parameters. In the second case, the number is the position, as
    in torch.
    """
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        for group in tree["param_groups"]
    ]
    if names.flattened_by(optimizer) is not None:
        return {**tree, "param_groups": groups} if groups != tree["param_groups"] else tree
    saved, keys = [name for group in groups for name in group["params"]], names.of(optimizer)
    unknown = set(saved).difference(keys)
    current: dict[Any, ParameterKey] = {}
    if saved and all(type(name) is int for name in saved):
        if len(saved) == len(keys):
            current = {number: keys[number] for number in saved if number < len(keys)}
    else:
        current = _by_tensors(saved, names, optimizer, saved_tensors)
        unknown -= current.keys()
        taken = {current.get(name, name) for name in saved}.intersection(keys)
        former = names.former(optimizer).items() if unknown else ()
        others = {name: key for name, key in former if name in unknown and key not in taken}
        count = Counter(others.values())
        current |= {name: key for name, key in others.items() if count[key] == 1}
    for group in groups:
        group["params"] = [current.get(name, name) for name in group["params"]]
    return {
        **tree,
        "param_groups": groups,
        "state": {current.get(key, key): value for key, value in tree["state"].items()},
    }


def _by_tensors(
    saved: list[Any],
    names: Names,
    optimizer: torch.optim.Optimizer,
    saved_tensors: Callable[[Any], Sequence[str]],
) -> dict[Any, ParameterKey]:
    """Return the present names of the saved names that stand for a tensor under another
    name now.

    A name may stand for several saved tensors, as where a copy of a module was saved
    beside it. Then it is that of the only one that a parameter of the optimizer is now.
    A name whose tensor is no longer in its module may be that of another parameter now.
    It becomes the key of its tensor, which is the name of no parameter.
    """
    key_of = {
        tensor: key
        for tensor, key in zip(names.tensors_of(optimizer), names.of(optimizer), strict=True)
        if tensor is not None
    }
    taken, present = set(names.of(optimizer)), names.tensors()
    inside = tuple(f"{path}." for path, _ in names.modules if path)
    current: dict[Any, ParameterKey] = {}
    for name in saved:
        found = list(dict.fromkeys(map(former_name, saved_tensors(name))))
        here = [tensor for tensor in found if tensor in key_of]
        if name not in taken and len(here) == 1:
            current[name] = key_of[here[0]]
        elif (
            name in taken
            and found
            and present.isdisjoint(found)
            and all(tensor.startswith(inside) for tensor in found)
        ):
            current[name] = found[0]
    return current


@dataclass(slots=True)
class KeptNames:
    """The names of the parameters in a state, kept from one capture to the next.

    `keys` has the names for each optimizer, and `flattened` the number of the module in
    which FSDP1 has flattened its parameters, or None. `ways` lead from the modules of
    the state to the submodules that hold parameters, and `kinds` has the class of each
    module on them. `places` has, for each parameter of the optimizers, the number of
    its module on these ways, and its name there. It is None if the names are to be
    looked up at every capture, because a parameter has no name.
    """

    keys: list[list[ParameterKey]] = field(default_factory=list)
    flattened: list[int | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    ways: Ways = field(default_factory=lambda: Ways(0))
    kinds: list[type] = field(default_factory=list)
    places: list[tuple[int, str]] | None = None

    def of(self, state: Any, encoded: Encoded | None = None) -> Names:
        """Return the names of the parameters in `state`. `encoded` is as for `types_of`."""
        names = Names(state, encoded)
        modules = [module for _, module in names.modules]
        parameters = [parameters_of(optimizer) for optimizer in names.optimizers]
        if self._hold(state, names, parameters):
            for optimizer, keys, number in zip(
                names.optimizers, self.keys, self.flattened, strict=True
            ):
                names.keep(optimizer, keys)
                names.keep_flattened(optimizer, None if number is None else modules[number])
        else:
            self.keys = list(map(names.of, names.optimizers))
            roots = list(map(names.flattened_by, names.optimizers))
            self.flattened = [
                next((n for n, module in enumerate(modules) if module is root), None)
                for root in roots
            ]
            self.paths = [path for path, _ in names.modules]
            self._keep_places(names, modules, parameters)
        return names

    def _hold(self, state: Any, names: Names, parameters: list[list[torch.Tensor]]) -> bool:
        if (
            self.places is None
            or [path for path, _ in names.modules] != self.paths
            or list(map(len, parameters)) != list(map(len, self.keys))
        ):
            return False
        bare = (
            dict(find(state, "", torch.Tensor, tensors=True))
            if any(number == _BARE for number, _ in self.places)
            else {}
        )
        try:
            holders = self.ways.walk(module for _, module in names.modules)
            found = [
                bare[name] if number == _BARE else holders[number]._parameters[name]
                for number, name in self.places
            ]
        except (LookupError, AttributeError):
            return False
        own = [parameter for each in parameters for parameter in each]
        return list(map(id, found)) == list(map(id, own)) and list(map(type, holders)) == self.kinds

    def _keep_places(
        self, names: Names, modules: list[torch.nn.Module], parameters: list[list[torch.Tensor]]
    ) -> None:
        self.ways, self.places = Ways(len(modules)), None
        places: list[tuple[int, str]] = []
        for each in parameters:
            place_of = names.places(each)
            for parameter in each:
                place = place_of.get(id(parameter))
                if place is None:
                    return
                raw = names.raw(id(parameter), place)
                way, _, name = raw.rpartition(".") if place != _BARE else ("", "", raw)
                places.append((self.ways.add(place, way.split(".")) if way else place, name))
        try:
            self.kinds = list(map(type, self.ways.walk(modules)))
        except (
            LookupError,
            AttributeError,
        ):  # the names of this module are not those of its attributes
            return
        self.places = places
