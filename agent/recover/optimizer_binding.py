"""Brings the saved state of an optimizer back into the caller's optimizer: first compares the two, then writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptd.agent.recover.leaves import KEEP, Leaves, Resolve, Value, keep
from ckptd.agent.recover.optimizer_check import (
    changed_settings,
    class_difference,
    group_differences,
    settings_differences,
    state_difference,
)
from ckptd.agent.state.capture import flattened_state, load_flattened_state
from ckptd.agent.state.naming import Names, parameters_of, with_current_names
from ckptd.agent.state.optimizers import steps_on_device, tell, without_state
from ckptd.agent.state.tree import ObjectNode, TensorRef, filled


class Optimizers:
    """Binds the optimizers of a state. `names` has the names of its parameters. `bind` binds any value of the state."""

    def __init__(self, leaves: Leaves, names: Names, bind: Callable[[Any, Any, str], Value]) -> None:
        self._leaves, self._names, self._bind = leaves, names, bind

    def bind(self, place: torch.optim.Optimizer, saved: Any, path: str) -> Value:
        leaves = self._leaves
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        if not isinstance(tree, dict) or not {"state", "param_groups"} <= set(tree):
            return leaves.other_kind(path, saved, "an optimizer")
        if leaves.options.strict and isinstance(saved, ObjectNode) and (other := class_difference(place, saved.cls, path)):
            leaves.differences.others += other
            return keep
        tree = with_current_names(tree, place, self._names)
        if (root := self._names.flattened_by(place)) is not None:
            return self._flattened_optimizer(place, root, tree, path)
        parameters, keys = parameters_of(place), self._names.of(place)
        own, position = [], 0
        for group in place.param_groups:
            own.append(keys[position : position + len(group["params"])])
            position += len(group["params"])
        settings = self._settings(tree["param_groups"], own, path)
        if leaves.options.strict:
            leaves.differences.others += settings_differences(place.param_groups, settings, path)
        if leaves.differences.others or leaves.differences.missing:
            return keep
        parameter_of = dict(zip(keys, parameters, strict=True))
        not_saved = set(keys).difference(name for group in tree["param_groups"] for name in group["params"])
        values: dict[Any, dict[str, Value]] = {}
        for key, entry in tree["state"].items():
            if key in parameter_of:
                values[key] = self._optimizer_entry(place, parameter_of[key], entry, f"{path}.state.{key}")
        others = self._of_no_parameter(place, tree, f"{path}.state")
        group_values = [
            self._group_values(group, found, f"{path}.param_groups.{number}")
            for number, (group, found) in enumerate(zip(place.param_groups, settings, strict=True))
        ]

        def put(resolve: Resolve) -> Any:
            for group, group_entries in zip(place.param_groups, group_values, strict=True):
                for key, value in group_entries.items():
                    if (made := value(resolve)) is not KEEP:
                        group[key] = made
            state: dict[Any, Any] = {
                parameter_of[key]: place.state[parameter_of[key]] for key in not_saved if parameter_of[key] in place.state
            }
            for key, entries in values.items():
                mine = place.state.get(parameter_of[key], {})
                made_entries = {name: value(resolve) for name, value in entries.items()}
                state[parameter_of[key]] = {name: mine[name] if made is KEEP else made for name, made in made_entries.items()}
            state.update({key: value(resolve) for key, value in others.items()})
            place.state.clear()
            place.state.update(state)
            tell(place)
            return KEEP

        return put

    def _settings(self, saved: list[dict[str, Any]], own: list[list[Any]], path: str) -> list[dict[str, Any]]:
        """Return for each group of the optimizer the settings that its parameters were saved with, whatever groups they were in."""
        leaves = self._leaves
        group_of = {name: group for group in saved for name in group["params"]}
        if leaves.options.strict:
            leaves.differences.others += group_differences(own, [group["params"] for group in saved], path)
        leaves.compare(list(group_of), [name for names in own for name in names], f"{path}.param_groups")
        found = []
        for number, names in enumerate(own):
            groups = [group_of[name] for name in names if name in group_of] if names else saved[number : number + 1]
            plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            if any(other != plain[0] for other in plain):
                leaves.differences.others.append(
                    f"{path}.param_groups.{number}: the checkpoint has the parameters of this group in groups with different settings "
                    f"(it has {len(saved)} groups, the optimizer {len(own)})"
                )
            found.append(plain[0] if plain else {})
        return found

    def _of_no_parameter(self, place: torch.optim.Optimizer, tree: dict[str, Any], path: str) -> dict[Any, Value]:
        """Bind the entries of the state that belong to no parameter. They replace those that the optimizer has, as torch does it."""
        named = {name for group in tree["param_groups"] for name in group["params"]}
        device = next((parameter.device for parameter in parameters_of(place)), None)
        return {
            key: (lambda _, own=place.state[key]: own)  # type: ignore[misc]
            if key in place.state and self._leaves.is_kept(f"{path}.{key}")
            else self._leaves.make(entry, f"{path}.{key}", device)
            for key, entry in tree["state"].items()
            if key not in named
        }

    def _flattened_optimizer(self, place: torch.optim.Optimizer, root: torch.nn.Module, tree: dict[str, Any], path: str) -> Value:
        """Bind an optimizer over FSDP1's flat parameters. DCP converts its state."""
        leaves = self._leaves
        leaves.make(tree["param_groups"], f"{path}.param_groups")  # settings may be tensors, like a learning rate
        others = self._of_no_parameter(place, tree, f"{path}.state")
        of_parameters = {key: value for key, value in tree["state"].items() if key not in others}
        if not of_parameters:
            groups_of = leaves.make(tree["param_groups"], f"{path}.param_groups")

            def put_without_state(resolve: Resolve) -> Any:
                without_state(place, self._without_kept(groups_of(resolve), path))
                place.state.update({key: value(resolve) for key, value in others.items()})
                return KEEP

            return put_without_state
        if not any(isinstance(key, torch.Tensor) for key in place.state):
            before = dict(place.state)
            leaves.undo += [place.state.clear, lambda: place.state.update(before)]  # DCP makes the optimizer take a fake step
        own = flattened_state(place, root)
        groups: list[dict[str, Any]] = own["param_groups"]
        own["state"] = {key: value for key, value in own["state"].items() if any(key in group["params"] for group in groups)}
        settings = self._settings(tree["param_groups"], [list(group["params"]) for group in groups], path)
        if leaves.options.strict:
            leaves.differences.others += settings_differences(groups, settings, path)
        restored = self._without_kept(settings, path)
        for number, (group, found) in enumerate(zip(groups, restored, strict=True)):
            leaves.changed += changed_settings(group, found, f"{path}.param_groups.{number}")
        state = self._bind(own["state"], of_parameters, f"{path}.state")

        def put(resolve: Resolve) -> Any:
            state(resolve)
            for group, found in zip(groups, restored, strict=True):
                group.update(filled(found, resolve))
            own["state"].update({key: value(resolve) for key, value in others.items()})
            load_flattened_state(place, root, own)
            return KEEP

        return put

    def _without_kept(self, groups: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
        """Return the settings of each group without those that the caller keeps."""
        return [
            {name: value for name, value in group.items() if not self._leaves.is_kept(f"{path}.param_groups.{number}.{name}")}
            for number, group in enumerate(groups)
        ]

    def _optimizer_entry(self, place: torch.optim.Optimizer, parameter: torch.Tensor, entry: Any, path: str) -> dict[str, Value]:
        """Bind the state of a parameter. Tensors that fit are filled in place, others made where torch's own load_state_dict puts them."""
        leaves = self._leaves
        if not isinstance(entry, dict):
            return {}
        mine = place.state.get(parameter, {})
        if leaves.options.strict:
            leaves.differences.others += state_difference(mine, entry, path)
        values: dict[str, Value] = {}
        for name, saved in entry.items():
            own = mine.get(name)
            if isinstance(saved, TensorRef):
                described = leaves.saved.describe(saved.fqn)
                dtype = leaves.saved.dtype(saved.fqn)
                if isinstance(own, torch.Tensor) and tuple(own.shape) == tuple(described.size) and own.dtype == dtype:
                    values[name] = leaves.tensor(own, saved, f"{path}.{name}")
                    continue
                if isinstance(parameter, DTensor) and tuple(parameter.shape) == tuple(described.size):
                    values[name] = self._like(parameter, saved, dtype)
                    continue
            elif isinstance(own, torch.Tensor):  # a tensor that is saved in parts, such as a quantized one
                values[name] = self._bind(own, saved, f"{path}.{name}")
                continue
            on_cpu = name == "step" and not steps_on_device(place, parameter)
            values[name] = leaves.make(saved, f"{path}.{name}", torch.device("cpu") if on_cpu else parameter.device)
        return values

    def _like(self, parameter: DTensor, saved: TensorRef, dtype: torch.dtype) -> Value:
        """Make state that the optimizer does not have yet for a sharded parameter, sharded like the parameter."""
        leaves = self._leaves
        made = leaves.in_place[saved.fqn] = torch.empty_like(parameter.detach(), dtype=dtype)
        return lambda resolve: made

    def _group_values(self, own: dict[str, Any], saved: dict[str, Any], path: str) -> dict[str, Value]:
        leaves = self._leaves
        saved = {name: value for name, value in saved.items() if name != "params" and not leaves.is_kept(f"{path}.{name}")}
        leaves.changed += changed_settings(own, saved, path)
        return {name: self._group_value(own.get(name), value, f"{path}.{name}") for name, value in saved.items()}

    def _group_value(self, own: Any, saved: Any, path: str) -> Value:
        leaves = self._leaves
        if isinstance(own, torch.Tensor) and isinstance(saved, TensorRef):
            return leaves.tensor(own, saved, path)
        return leaves.make(saved, path)
