"""Brings a saved state back into the caller's own state: first compares the two, then writes.

`Binding` walks the caller's state beside the saved tree. It writes nothing. It collects every difference, the tensors to fill in place, the
tensors to make, and the work for the end. `Binding.finish` then does that work with the loaded tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ckptd.agent.plan.structure import local_part
from ckptd.agent.read.loader import Saved
from ckptd.agent.recover.reshape import put_into
from ckptd.agent.state.capture import expand_object
from ckptd.agent.state.merge import Foreign, OfRanks, has_own, own_part
from ckptd.agent.state.naming import Names, canonical, flattens, parameter_keys, parameter_names, unwrapped
from ckptd.agent.state.optimizers import steps_on_device, tell, without_state
from ckptd.agent.state.values import ObjectNode, Packer, PerRank, TensorRef, filled, like, tensor_names
from ckptd.shared.errors import StructureMismatch

Resolve = Callable[[str], torch.Tensor]
OnReshape = Callable[[str, list[Any]], Any]
"""Takes the key of a `per_rank` value and the list of the values of all ranks that saved it. Returns the value for this rank."""
_KEEP = object()
_COMPARED = (torch.Tensor, dict, list, tuple, PerRank)
_Value = Callable[[Resolve], Any]
"""Makes the value for a place in the caller's state, or returns `_KEEP` if the object in that place stays and is changed in place."""


class Binding:
    """A saved tree that fits the caller's state. Load its tensors, then call `finish`, or call `discard`. Raises StructureMismatch.

    in_place: the destinations of tensors, by name. fresh: the devices of the tensors to make, by name. unused: one text for each key of the
    checkpoint that has no place in the state; empty unless `strict`.
    """

    def __init__(
        self, state: Any, tree: Any, saved: Saved, *, strict: bool, on_reshape: OnReshape | None = None, foreign: Foreign | None = None
    ) -> None:
        self._foreign = foreign or {}
        self.in_place: dict[str, torch.Tensor] = {}
        self.fresh: dict[str, torch.device] = {}
        self.unused: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._saved, self._strict, self._on_reshape = saved, strict, on_reshape
        self._names = parameter_names(state)
        self._problems: list[str] = []
        value = self._bind(state, tree, "")
        if self._problems:
            self.discard()
            raise mismatch(self._problems)
        self._value = value

    def discard(self) -> None:
        """Undo everything that the comparison had to make in the state. Called instead of `finish`."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def finish(self, resolve: Resolve) -> None:
        """Write everything but the tensors in place. `resolve` returns the loaded tensor of a name in `fresh`."""
        with torch.no_grad():
            self._value(resolve)

    # -- one method for each kind of destination

    def _bind(self, place: Any, saved: Any, path: str) -> _Value:
        if isinstance(saved, OfRanks):
            return self._of_ranks(place, saved, path)
        if isinstance(place, PerRank):
            return _marked(self._bind(place.value, saved, path))
        if isinstance(place, torch.nn.Module):
            return self._module(place, saved, path)
        if isinstance(place, torch.optim.Optimizer):
            return self._optimizer(place, saved, path)
        if isinstance(place, torch.Tensor):
            return self._tensor(place, saved, path)
        if type(place) is not dict and (expanded := expand_object(place, Names())) is not None:
            return self._stateful(place, expanded[1], saved, path)
        if isinstance(saved, ObjectNode):
            saved = saved.tree
        if isinstance(place, dict):
            return self._dict(place, saved, path)
        if isinstance(place, list):
            return self._list(place, saved, path)
        if type(place) is tuple:
            return self._tuple(place, saved, path)
        return self._fresh(saved, path)

    def _of_ranks(self, place: Any, saved: OfRanks, path: str) -> _Value:
        if isinstance(place, PerRank):
            return _marked(self._of_ranks(place.value, saved, path))
        if saved.own is not None:
            return self._bind(place, saved.values[saved.own], path)
        on_reshape = self._on_reshape
        if on_reshape is None:
            self._problems.append(
                f"{path} is each rank's own, was saved on {len(saved.values)} ranks, none of them this one: recover on as many "
                "ranks, or pass recover() a function on_reshape(key, values) that makes this rank's value"
            )
            return lambda resolve: _KEEP
        fresh = self._fresh(saved.values, path)

        def put(resolve: Resolve) -> Any:
            made = put_into(place, on_reshape(path, fresh(resolve)))
            return _KEEP if made is place else made

        return put

    def _differs(self, path: str, saved: Any, expected: str) -> _Value:
        found = "a tensor" if isinstance(saved, TensorRef) else "an object" if isinstance(saved, ObjectNode) else type(saved).__name__
        self._problems.append(f"{path or 'the state'}: the checkpoint has {found}, the state {expected}")
        return lambda resolve: _KEEP

    def _tensor(self, place: torch.Tensor, saved: Any, path: str) -> _Value:
        if not isinstance(saved, TensorRef):
            return self._differs(path, saved, "a tensor")
        size = tuple(self._saved.describe(saved.fqn).size)
        if tuple(place.shape) != size:
            self._problems.append(f"{path}: the checkpoint has shape {list(size)}, the state {list(place.shape)}")
        elif _expanded(local_part(place)):
            self._problems.append(f"{path}: the state's tensor is expanded, so that its elements share memory; clone() it first")
        elif not isinstance(place, ShardedTensor) and place.is_meta:
            self._problems.append(f"{path}: the state's tensor is on the meta device; give it memory first (module.to_empty(device=...))")
        else:
            self.in_place[saved.fqn] = place if isinstance(place, ShardedTensor) else place.detach()
        return lambda resolve: _KEEP

    def _dict(self, place: dict[Any, Any], saved: Any, path: str) -> _Value:
        if not isinstance(saved, dict):
            return self._differs(path, saved, "a dict")
        if not place:
            return self._into(place.update, saved, path)
        self._compare(list(saved), list(place), path)
        values = {key: self._bind(place[key], saved[key], f"{path}.{key}" if path else str(key)) for key in place if key in saved}

        def put(resolve: Resolve) -> Any:
            for key, value in values.items():
                if (made := value(resolve)) is not _KEEP:
                    place[key] = made
            return _KEEP

        return put

    def _list(self, place: list[Any], saved: Any, path: str) -> _Value:
        if not isinstance(saved, list):
            return self._differs(path, saved, "a list")
        if not any(isinstance(item, _COMPARED) or expand_object(item, Names()) is not None for item in place):
            return self._into(partial(place.__setitem__, slice(None)), saved, path)  # plain values, like a history: any length fits
        if len(place) != len(saved):
            self._problems.append(f"{path}: the checkpoint has a list of {len(saved)}, the state one of {len(place)}")
            return lambda resolve: _KEEP
        values = [self._bind(item, saved[n], f"{path}.{n}" if path else str(n)) for n, item in enumerate(place)]

        def put(resolve: Resolve) -> Any:
            for n, value in enumerate(values):
                if (made := value(resolve)) is not _KEEP:
                    place[n] = made
            return _KEEP

        return put

    def _tuple(self, place: tuple[Any, ...], saved: Any, path: str) -> _Value:
        if not isinstance(saved, tuple) or len(saved) != len(place):
            return self._fresh(saved, path) if not place else self._differs(path, saved, f"a tuple of {len(place)}")
        values = [self._bind(item, saved[n], f"{path}.{n}" if path else str(n)) for n, item in enumerate(place)]

        def make(resolve: Resolve) -> Any:
            made = [value(resolve) for value in values]
            return tuple(item if new is _KEEP else new for item, new in zip(place, made, strict=True))

        return make

    def _fresh(self, saved: Any, path: str, device: torch.device | None = None, *, mark: bool = True) -> _Value:
        """Make the saved value itself, with new tensors. With `mark`, the `per_rank` values in it get their mark again."""
        saved = own_part(saved, self._foreign)
        if has_own(saved):
            return self._with_own(saved, path, mark=mark)
        for name in tensor_names(saved):
            self.fresh.setdefault(name, device or torch.device("cpu"))
        return lambda resolve: filled(saved, resolve)

    def _into(self, put: Callable[[Any], None], saved: Any, path: str) -> _Value:
        fresh = self._fresh(saved, path)

        def take(resolve: Resolve) -> Any:
            put(fresh(resolve))
            return _KEEP

        return take

    def _with_own(self, saved: Any, path: str, *, mark: bool) -> _Value:
        if isinstance(saved, OfRanks):
            return self._of_ranks(PerRank(None) if mark else None, saved, path)
        if isinstance(saved, ObjectNode):
            return self._with_own(saved.tree, path, mark=mark)
        if isinstance(saved, dict):
            values = {key: self._fresh(value, f"{path}.{key}" if path else str(key), mark=mark) for key, value in saved.items()}
            return lambda resolve: type(saved)({key: value(resolve) for key, value in values.items()})
        items = [self._fresh(value, f"{path}.{n}" if path else str(n), mark=mark) for n, value in enumerate(saved)]
        return lambda resolve: like(saved, [item(resolve) for item in items])

    def _stateful(self, place: Any, template: Any, saved: Any, path: str) -> _Value:
        """Bind an object with load_state_dict. It loads its whole saved state, each tensor placed and sharded like its own of that name."""
        packer = Packer(lambda value, _: expand_object(value, Names()))
        packer.pack(template, path)
        fresh = self._fresh(saved.tree if isinstance(saved, ObjectNode) else saved, path, mark=False)
        sharded: dict[str, torch.Tensor] = {}
        for name in self.fresh.keys() & packer.tensors.keys():
            own = packer.tensors[name]
            self.fresh[name] = own.device
            if isinstance(own, (DTensor, ShardedTensor)) and tuple(own.shape) == tuple(self._saved.describe(name).size):
                del self.fresh[name]
                sharded[name] = self.in_place[name] = own if isinstance(own, ShardedTensor) else torch.empty_like(own.detach())

        def put(resolve: Resolve) -> Any:
            place.load_state_dict(fresh(lambda name: sharded[name] if name in sharded else resolve(name)))
            return _KEEP

        return put

    def _module(self, place: torch.nn.Module, saved: Any, path: str) -> _Value:
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        if not isinstance(tree, dict):
            return self._differs(path, saved, "a module")
        module, flat = unwrapped(place), flattens(place)
        own = get_model_state_dict(place) if flat else module.state_dict()
        raw_names = {canonical(name): name for name in own}
        tree = {canonical(name): value for name, value in tree.items()}
        self._compare(list(tree), list(raw_names), path)
        values = {raw: self._bind(own[raw], tree[name], f"{path}.{name}") for name, raw in raw_names.items() if name in tree}

        def put(resolve: Resolve) -> Any:
            for raw, value in values.items():
                if (made := value(resolve)) is not _KEEP:
                    own[raw] = made
            found = {raw: own[raw] for raw in values}  # loaded as a whole, for hooks and extra state; the names are compared already
            if flat:
                set_model_state_dict(place, found, options=StateDictOptions(strict=False))
            else:
                module.load_state_dict(found, strict=False)
            return _KEEP

        return put

    def _optimizer(self, place: torch.optim.Optimizer, saved: Any, path: str) -> _Value:
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        if not isinstance(tree, dict) or not {"state", "param_groups"} <= set(tree):
            return self._differs(path, saved, "an optimizer")
        if (root := self._names.flattened_by(place)) is not None:
            return self._flattened_optimizer(place, root, tree, path)
        parameters = [parameter for group in place.param_groups for parameter in group["params"]]
        keys = parameter_keys(place, self._names)
        if all(type(name) is int for group in tree["param_groups"] for name in group["params"]):
            keys = list(range(len(parameters)))
        own, position = [], 0
        for group in place.param_groups:
            own.append(keys[position : position + len(group["params"])])
            position += len(group["params"])
        settings = self._settings(tree["param_groups"], own, path)
        if self._problems:
            return lambda resolve: _KEEP
        parameter_of = dict(zip(keys, parameters, strict=True))
        values: dict[Any, dict[str, _Value]] = {}
        for key, entry in tree["state"].items():
            if key in parameter_of:
                values[key] = self._optimizer_entry(place, parameter_of[key], entry, f"{path}.state.{key}")
        group_values = [{k: self._group_value(g.get(k), v, f"{path}.param_groups.{n}.{k}") for k, v in found.items() if k != "params"}
                        for n, (g, found) in enumerate(zip(place.param_groups, settings, strict=True))]  # fmt: skip

        def put(resolve: Resolve) -> Any:
            for group, group_entries in zip(place.param_groups, group_values, strict=True):
                for key, value in group_entries.items():
                    if (made := value(resolve)) is not _KEEP:
                        group[key] = made
            state: dict[Any, Any] = {}
            for key, entries in values.items():
                mine = place.state.get(parameter_of[key], {})
                made_entries = {name: value(resolve) for name, value in entries.items()}
                state[parameter_of[key]] = {name: mine[name] if made is _KEEP else made for name, made in made_entries.items()}
            place.state.clear()
            place.state.update(state)
            tell(place)
            return _KEEP

        return put

    def _settings(self, saved: list[dict[str, Any]], own: list[list[Any]], path: str) -> list[dict[str, Any]]:
        """Return for each group of the optimizer the settings that its parameters were saved with, whatever groups they were in."""
        group_of = {name: group for group in saved for name in group["params"]}
        self._compare(list(group_of), [name for names in own for name in names], f"{path}.param_groups")
        found = []
        for number, names in enumerate(own):
            groups = [group_of[name] for name in names if name in group_of] or saved[number : number + 1]
            plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            if any(other != plain[0] for other in plain):
                self._problems.append(
                    f"{path}.param_groups.{number}: the checkpoint has the parameters of this group in groups with different settings "
                    f"(it has {len(saved)} groups, the optimizer {len(own)})"
                )
            found.append(plain[0] if plain else {})
        return found

    def _flattened_optimizer(self, place: torch.optim.Optimizer, root: torch.nn.Module, tree: dict[str, Any], path: str) -> _Value:
        """Bind an optimizer over FSDP1's flat parameters. DCP converts its state."""
        self._fresh(tree["param_groups"], f"{path}.param_groups")  # settings may be tensors, like a learning rate
        if not tree["state"]:
            return self._into(lambda groups: without_state(place, groups), tree["param_groups"], f"{path}.param_groups")
        if not place.state:
            self._undo.append(place.state.clear)  # DCP makes the optimizer take a fake step, which creates its state
        own = get_optimizer_state_dict(root, place)
        groups: list[dict[str, Any]] = own["param_groups"]  # type: ignore[assignment]
        settings = self._settings(tree["param_groups"], [list(group["params"]) for group in groups], path)
        state = self._dict(own["state"], tree["state"], f"{path}.state")  # type: ignore[arg-type]

        def put(resolve: Resolve) -> Any:
            state(resolve)
            for group, found in zip(groups, settings, strict=True):
                group.update(filled(found, resolve))
            set_optimizer_state_dict(root, place, own)
            return _KEEP

        return put

    def _optimizer_entry(self, place: torch.optim.Optimizer, parameter: torch.Tensor, entry: Any, path: str) -> dict[str, _Value]:
        """Bind the state of a parameter. Tensors that fit are filled in place, others made where torch's own load_state_dict puts them."""
        if not isinstance(entry, dict):
            return {}
        mine = place.state.get(parameter, {})
        values: dict[str, _Value] = {}
        for name, saved in entry.items():
            own = mine.get(name)
            if isinstance(saved, TensorRef):
                described = self._saved.describe(saved.fqn)
                dtype = self._saved.dtype(saved.fqn)
                if isinstance(own, torch.Tensor) and tuple(own.shape) == tuple(described.size) and own.dtype == dtype:
                    values[name] = self._tensor(own, saved, f"{path}.{name}")
                    continue
                if isinstance(parameter, DTensor) and tuple(parameter.shape) == tuple(described.size):
                    values[name] = self._like(parameter, saved, dtype)
                    continue
            on_cpu = name == "step" and not steps_on_device(place, parameter)
            values[name] = self._fresh(saved, f"{path}.{name}", torch.device("cpu") if on_cpu else parameter.device)
        return values

    def _like(self, parameter: DTensor, saved: TensorRef, dtype: torch.dtype) -> _Value:
        """Make state that the optimizer does not have yet for a sharded parameter, sharded like the parameter."""
        made = self.in_place[saved.fqn] = torch.empty_like(parameter.detach(), dtype=dtype)
        return lambda resolve: made

    def _group_value(self, own: Any, saved: Any, path: str) -> _Value:
        if isinstance(own, torch.Tensor) and isinstance(saved, TensorRef):
            return self._tensor(own, saved, path)
        return self._fresh(saved, path)

    def _compare(self, theirs: list[Any], ours: list[Any], path: str) -> None:
        if not self._strict:
            return
        known, wanted = set(theirs), set(ours)
        prefix = f"{path}." if path else ""
        self._problems += [f"key {prefix}{key} is in the state and not in the checkpoint" for key in ours if key not in known]
        self.unused += [f"key {prefix}{key} is in the checkpoint and not in the state" for key in theirs if key not in wanted]


def _expanded(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _marked(value: _Value) -> _Value:
    def put(resolve: Resolve) -> Any:
        made = value(resolve)
        return made if made is _KEEP else PerRank(made)

    return put


def mismatch(problems: list[str]) -> StructureMismatch:
    more = f" (and {len(problems) - 1} more differences)" if len(problems) > 1 else ""
    return StructureMismatch(f"{problems[0]}{more}; nothing was written")
