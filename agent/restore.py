"""Put what was saved back into the caller's own state: compare first, write after.

`Binding` walks the caller's state beside the saved tree. It writes nothing; it collects every difference, which tensors are to be filled
in place, which are to be made, and what is to be done at the end. `Binding.finish` then does that, with the loaded tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptd.agent.capture import canonical, expand_object, parameter_keys, parameter_names, unwrapped
from ckptd.agent.loading import Saved
from ckptd.agent.values import ObjectNode, Packer, TensorRef
from ckptd.shared.errors import StructureMismatch

Resolve = Callable[[str], torch.Tensor]
_KEEP = object()
_Value = Callable[[Resolve], Any]
"""Makes the value for a place in the caller's state; `_KEEP` where the object there was changed itself."""


class Binding:
    """`in_place`: name -> destination; `fresh`: names of tensors to make, with the device each belongs on."""

    def __init__(self, state: Any, tree: Any, saved: Saved, *, strict: bool) -> None:
        self.in_place: dict[str, torch.Tensor] = {}
        self.fresh: dict[str, torch.device] = {}
        self._saved, self._strict = saved, strict
        self._names = parameter_names(state)
        self._problems: list[str] = []
        value = self._bind(state, tree, "")
        if self._problems:
            more = f" (and {len(self._problems) - 1} more differences)" if len(self._problems) > 1 else ""
            raise StructureMismatch(f"{self._problems[0]}{more}; nothing was written")
        self._value = value

    def finish(self, resolve: Resolve) -> None:
        """Everything but the tensors in place. `resolve` gives the loaded tensor of a fresh name."""
        with torch.no_grad():
            self._value(resolve)

    # -- one method for each kind of destination

    def _bind(self, place: Any, saved: Any, path: str) -> _Value:
        if isinstance(place, torch.nn.Module):
            return self._module(place, saved, path)
        if isinstance(place, torch.optim.Optimizer):
            return self._optimizer(place, saved, path)
        if isinstance(place, torch.Tensor):
            return self._tensor(place, saved, path)
        if type(place) is not dict and (expanded := expand_object(place, {})) is not None:
            return self._stateful(place, expanded[1], saved, path)
        if isinstance(saved, ObjectNode):
            saved = saved.tree
        if isinstance(place, dict):
            return self._dict(place, saved, path)
        if isinstance(place, list):
            return self._list(place, saved, path)
        if type(place) is tuple:
            return self._tuple(place, saved, path)
        return self._fresh(saved)

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
        elif any(n > 1 and stride == 0 for n, stride in zip(place.shape, place.stride(), strict=True)):
            self._problems.append(f"{path}: the state's tensor is expanded, so that its elements share memory; clone() it first")
        elif place.is_meta:
            self._problems.append(f"{path}: the state's tensor is on the meta device; give it memory first (module.to_empty(device=...))")
        else:
            self.in_place[saved.fqn] = place.detach()
        return lambda resolve: _KEEP

    def _dict(self, place: dict[Any, Any], saved: Any, path: str) -> _Value:
        if not isinstance(saved, dict):
            return self._differs(path, saved, "a dict")
        if not place:
            fresh = self._fresh(saved)

            def take(resolve: Resolve) -> Any:
                place.update(fresh(resolve))
                return _KEEP

            return take
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
        if not any(isinstance(item, (torch.Tensor, dict, list, tuple)) or expand_object(item, {}) is not None for item in place):
            fresh = self._fresh(saved)  # plain values, or nothing yet: a history may be of any length

            def take(resolve: Resolve) -> Any:
                place[:] = fresh(resolve)
                return _KEEP

            return take
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
            return self._fresh(saved) if not place else self._differs(path, saved, f"a tuple of {len(place)}")
        values = [self._bind(item, saved[n], f"{path}.{n}" if path else str(n)) for n, item in enumerate(place)]

        def make(resolve: Resolve) -> Any:
            made = [value(resolve) for value in values]
            return tuple(item if new is _KEEP else new for item, new in zip(place, made, strict=True))

        return make

    def _fresh(self, saved: Any, device: torch.device | None = None) -> _Value:
        """The saved value itself, its tensors made anew."""
        for name in tensor_names(saved):
            self.fresh.setdefault(name, device or torch.device("cpu"))
        return lambda resolve: filled(saved, resolve)

    def _stateful(self, place: Any, template: Any, saved: Any, path: str) -> _Value:
        """Anything with load_state_dict: it gets all of the saved state, each tensor where its own of that name is."""
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        packer = Packer(lambda value, _: expand_object(value, {}))
        packer.pack(template, path)
        for name in tensor_names(tree):
            self.fresh[name] = packer.tensors[name].device if name in packer.tensors else torch.device("cpu")

        def put(resolve: Resolve) -> Any:
            place.load_state_dict(filled(tree, resolve))
            return _KEEP

        return put

    def _module(self, place: torch.nn.Module, saved: Any, path: str) -> _Value:
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        if not isinstance(tree, dict):
            return self._differs(path, saved, "a module")
        module = unwrapped(place)
        own = module.state_dict()
        raw_names = {canonical(name): name for name in own}
        tree = {canonical(name): value for name, value in tree.items()}
        self._compare(list(tree), list(raw_names), path)
        values = {raw: self._bind(own[raw], tree[name], f"{path}.{name}") for name, raw in raw_names.items() if name in tree}

        def put(resolve: Resolve) -> Any:
            for raw, value in values.items():
                if (made := value(resolve)) is not _KEEP:
                    own[raw] = made
            module.load_state_dict({raw: own[raw] for raw in values}, strict=False)  # hooks and extra state; names are compared
            return _KEEP

        return put

    def _optimizer(self, place: torch.optim.Optimizer, saved: Any, path: str) -> _Value:
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        if not isinstance(tree, dict) or not {"state", "param_groups"} <= set(tree):
            return self._differs(path, saved, "an optimizer")
        parameters = [parameter for group in place.param_groups for parameter in group["params"]]
        keys = parameter_keys(place, self._names)
        if all(type(name) is int for group in tree["param_groups"] for name in group["params"]):
            keys = list(range(len(parameters)))
        groups, own, position = tree["param_groups"], [], 0
        for group in place.param_groups:
            own.append(keys[position : position + len(group["params"])])
            position += len(group["params"])
        if len(groups) != len(own):
            self._problems.append(f"{path}: the checkpoint has {len(groups)} parameter groups, the optimizer {len(own)}")
        for n, (theirs, ours) in enumerate(zip(groups, own, strict=False)):
            self._compare(theirs["params"], ours, f"{path}.param_groups.{n}.params")
        if self._problems:
            return lambda resolve: _KEEP
        parameter_of = dict(zip(keys, parameters, strict=True))
        values: dict[Any, dict[str, _Value]] = {}
        for key, entry in tree["state"].items():
            if key in parameter_of:
                values[key] = self._optimizer_entry(place, parameter_of[key], entry, f"{path}.state.{key}")
        group_values = [{k: self._group_value(g.get(k), v, f"{path}.param_groups.{n}.{k}") for k, v in t.items() if k != "params"}
                        for n, (g, t) in enumerate(zip(place.param_groups, groups, strict=True))]  # fmt: skip

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
            _tell(place)
            return _KEEP

        return put

    def _optimizer_entry(self, place: torch.optim.Optimizer, parameter: torch.Tensor, entry: Any, path: str) -> dict[str, _Value]:
        """In place where the optimizer has such a tensor already; else made where torch's own load_state_dict would put it."""
        if not isinstance(entry, dict):
            return {}
        mine = place.state.get(parameter, {})
        values: dict[str, _Value] = {}
        for name, saved in entry.items():
            own = mine.get(name)
            if isinstance(saved, TensorRef) and isinstance(own, torch.Tensor):
                described = self._saved.describe(saved.fqn)
                if tuple(own.shape) == tuple(described.size) and str(own.dtype) == f"torch.{described.dtype}":
                    values[name] = self._tensor(own, saved, f"{path}.{name}")
                    continue
            on_cpu = name == "step" and not _steps_on_device(place, parameter)
            values[name] = self._fresh(saved, torch.device("cpu") if on_cpu else parameter.device)
        return values

    def _group_value(self, own: Any, saved: Any, path: str) -> _Value:
        if isinstance(own, torch.Tensor) and isinstance(saved, TensorRef):
            return self._tensor(own, saved, path)
        return self._fresh(saved)

    def _compare(self, theirs: list[Any], ours: list[Any], path: str) -> None:
        if not self._strict:
            return
        known, wanted = set(theirs), set(ours)
        prefix = f"{path}." if path else ""
        self._problems += [f"key {prefix}{key} is in the state and not in the checkpoint" for key in ours if key not in known]
        self._problems += [f"key {prefix}{key} is in the checkpoint and not in the state" for key in theirs if key not in wanted]


def _steps_on_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether the parameter's group counts its steps on the device: torch.optim.Optimizer._process_value_according_to_param_policy."""
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    return bool(group.get("capturable") or group.get("fused"))


def _tell(place: torch.optim.Optimizer) -> None:
    """What torch's own load_state_dict does at its end, and the whole of it for optimizers that have one of their own."""
    if type(place).load_state_dict is torch.optim.Optimizer.load_state_dict:
        place.__setstate__({"state": place.state, "param_groups": place.param_groups})
    else:
        place.load_state_dict(place.state_dict())


def tensor_names(tree: Any) -> list[str]:
    """Names of all tensors in a decoded tree."""
    if isinstance(tree, TensorRef):
        return [tree.fqn]
    if isinstance(tree, ObjectNode):
        return tensor_names(tree.tree)
    if isinstance(tree, dict):
        return [name for value in tree.values() for name in tensor_names(value)]
    if isinstance(tree, (list, tuple, set, frozenset)) or type(tree).__name__ == "deque":
        return [name for value in tree for name in tensor_names(value)]
    return []


def filled(tree: Any, resolve: Resolve) -> Any:
    """A decoded tree with its tensors in place of their names; containers keep their types."""
    if isinstance(tree, TensorRef):
        return resolve(tree.fqn)
    if isinstance(tree, ObjectNode):
        return filled(tree.tree, resolve)
    if isinstance(tree, dict) and tensor_names(tree):
        made = type(tree)()
        made.update({key: filled(value, resolve) for key, value in tree.items()})
        return made
    if type(tree) is list:
        return [filled(value, resolve) for value in tree]
    if isinstance(tree, (tuple, set, frozenset)) and tensor_names(tree):
        return type(tree)(filled(value, resolve) for value in tree)
    if type(tree).__name__ == "deque" and tensor_names(tree):
        return type(tree)((filled(value, resolve) for value in tree), tree.maxlen)
    return tree
