"""Brings the saved state of an optimizer back into the caller's optimizer: first
compares the two, then writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptd.agent.recover.leaves import KEEP, Leaves, Resolve, Value, load_into, loader_of, unchanged
from ckptd.agent.recover.optimizer_check import (
    class_difference,
    group_differences,
    not_taken,
    settings_differences,
    state_difference,
    tensors_to_compare,
)
from ckptd.agent.recover.parameters import SavedParameters
from ckptd.agent.state.capture import state_of
from ckptd.agent.state.components import TENSOR_KINDS, kind_of_tensor, size_of
from ckptd.agent.state.customized import optimizer_loads_by_itself
from ckptd.agent.state.flat_optimizers import flattened_state, load_flattened_state
from ckptd.agent.state.merge import is_optimizer
from ckptd.agent.state.naming import Names, ParameterKey, parameters_of, with_current_names
from ckptd.agent.state.optimizers import steps_on_device, tell, unshared, without_state
from ckptd.agent.state.tensor_check import is_uninitialized
from ckptd.agent.state.tree import ObjectNode, TensorRef, filled, tensor_names
from ckptd.shared.errors import UnsavableValue


class Optimizers:
    """Binds the optimizers of a state.

    `names` has the names of its parameters. `bind` binds any value of the state.
    """

    def __init__(
        self,
        leaves: Leaves,
        names: Names,
        parameters: SavedParameters,
        bind: Callable[[Any, Any, str], Value],
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._leaves = leaves
        self._names = names
        self._parameters = parameters
        self._bind = bind
        self._kept = kept

    def bind(self, place: torch.optim.Optimizer, saved: Any, path: str) -> Value:
        leaves = self._leaves
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        if (
            leaves.options.strict
            and isinstance(saved, ObjectNode)
            and (other := class_difference(place, saved.cls, path))
        ):
            return leaves.differ(*other, keep=path)
        if not is_optimizer(tree):
            return (
                self._whole(place, tree, path)
                if optimizer_loads_by_itself(place)
                else leaves.other_kind(path, saved, "an optimizer")
            )
        former = _names_in(tree)
        tree = with_current_names(tree, place, self._names, self._parameters.tensors)
        for number, group in enumerate(place.param_groups if leaves.options.keep else ()):
            for name in group:  # the checkpoint may lack a setting that the caller keeps
                leaves.note_kept(f"{path}.param_groups.{number}.{name}")
        keys = self._names.of(place)
        saved_names = _names_in(tree)
        self._parameters.rename(
            path, {new: old for new, old in zip(saved_names, former, strict=True) if new != old}
        )
        flat = self._names.flattened_by(place)
        if keys and saved_names and set(saved_names).isdisjoint(keys) and flat is None:
            return leaves.differ(
                f"{path or 'the state'}: no parameter of the optimizer is in the checkpoint, "
                f"which has {', '.join(map(str, saved_names[:3]))}, while the optimizer has "
                f"{', '.join(map(str, keys[:3]))}"
                + (
                    ": the names come from the modules, so put the modules into the state, too"
                    if all(type(key) is int for key in keys)
                    else ""
                ),
                keep=path,
            )
        if flat is not None:
            return self._flattened_optimizer(place, flat, tree, path)
        theirs, ours = (
            {name for name in names if type(name) is int} for names in (saved_names, keys)
        )
        if theirs and ours and theirs != ours:
            return leaves.differ(
                f"{path or 'the state'}: the checkpoint has {len(theirs)} parameters without "
                f"names in this optimizer, the state "
                f"{len(ours)}: put the module that holds them into the state, too",
                keep=path,
            )
        if not optimizer_loads_by_itself(place):
            parameter_of = dict(zip(keys, parameters_of(place), strict=True))
            state = {
                parameter_of[key]: entry
                for key, entry in tree["state"].items()
                if key in parameter_of
                and isinstance(entry, dict)
                and not leaves.is_kept(f"{path}.state.{key}")
            }
            leaves.differ(
                *not_taken(place, saved.cls if isinstance(saved, ObjectNode) else "", state, path),
                keep=path,
            )
        return self._named(place, tree, keys, path)

    def _whole(self, place: torch.optim.Optimizer, tree: Any, path: str) -> Value:
        """Bind an optimizer whose state dict has a form of its own."""
        fresh = self._leaves.alike(tree, {}, path)

        def put(resolve: Resolve) -> Any:
            load_into(place, fresh(resolve), path, self._leaves.options)
            return KEEP

        return put

    def _named(
        self,
        place: torch.optim.Optimizer,
        tree: dict[str, Any],
        keys: list[ParameterKey],
        path: str,
    ) -> Value:
        """Bind an optimizer whose parameters have names."""
        leaves, parameters = self._leaves, parameters_of(place)
        own, position = [], 0
        for group in place.param_groups:
            own.append(keys[position : position + len(group["params"])])
            position += len(group["params"])
        nameless = self._parameters.are_unnamed(path) and not any(
            group["params"] for group in tree["param_groups"]
        )
        if nameless and len(own) == len(tree["param_groups"]):
            # FSDP1 has no names for the parameters of an optimizer without state. Each
            # saved group goes to the group of the same number.
            groups = [
                {**group, "params": names}
                for group, names in zip(tree["param_groups"], own, strict=True)
            ]
            tree = {**tree, "param_groups": groups}
        settings = self._settings(tree["param_groups"], own, path)
        if leaves.options.strict:
            leaves.differ(*settings_differences(place.param_groups, settings, path), keep=path)
        if leaves.differences.others or leaves.differences.missing:
            return unchanged
        kept = {
            key
            for key, p in zip(keys, parameters, strict=True)
            if id(p) in self._kept or leaves.is_kept(f"{path}.state.{key}")
        }
        not_saved = set(keys).difference(
            name for group in tree["param_groups"] for name in group["params"]
        )
        parameter_of = {key: p for key, p in zip(keys, parameters, strict=True) if key not in kept}
        staying = [
            p for key, p in zip(keys, parameters, strict=True) if key in not_saved or key in kept
        ]
        by_itself = optimizer_loads_by_itself(place) or tree.keys() != {"state", "param_groups"}
        values: dict[Any, dict[Any, Value]] = {
            key: self._optimizer_entry(
                place, key, parameter_of[key], entry, path, in_place=not by_itself
            )
            for key, entry in tree["state"].items()
            if key in parameter_of and self._has_form(key, parameter_of[key], path)
        }
        others = self._of_no_parameter(place, tree, f"{path}.state")
        twice = _settings_of_several(place.param_groups)
        group_values = [
            self._group_values(
                group, found, f"{path}.param_groups.{number}", None if by_itself else twice
            )
            for number, (group, found) in enumerate(zip(place.param_groups, settings, strict=True))
        ]
        if by_itself:
            more = {
                key: leaves.make(value, f"{path}.{key}")
                for key, value in tree.items()
                if key not in ("state", "param_groups")
            }
            return self._through_loader(
                place, keys, values, others, group_values, more, staying, path
            )

        def put(resolve: Resolve) -> Any:
            for group, group_entries in zip(place.param_groups, group_values, strict=True):
                for key, value in group_entries.items():
                    if (made := value(resolve)) is not KEEP:
                        group[key] = made
            state: dict[Any, Any] = {
                parameter: place.state[parameter]
                for parameter in staying
                if parameter in place.state
            }
            for key, entries in values.items():
                mine = place.state.get(parameter_of[key], {})
                made_entries = {name: value(resolve) for name, value in entries.items()}
                state[parameter_of[key]] = {
                    name: mine[name] if made is KEEP else made
                    for name, made in made_entries.items()
                }
            if type(place).__module__.startswith("torch.optim."):
                # As flat parameters of FSDP1 had one `step` in checkpoints of earlier
                # versions.
                state = unshared(state)
            state.update({key: value(resolve) for key, value in others.items()})
            place.state.clear()
            place.state.update(state)
            with loader_of(place, path, leaves.options):
                tell(place)
            return KEEP

        return put

    def _through_loader(
        self,
        place: torch.optim.Optimizer,
        keys: list[ParameterKey],
        values: dict[Any, dict[Any, Value]],
        others: dict[Any, Value],
        group_values: list[dict[str, Value]],
        more: dict[str, Value],
        staying: list[torch.Tensor],
        path: str,
    ) -> Value:
        """Bind an optimizer that has hooks or methods of its own.

        Its `load_state_dict` gets the saved state in the form of its own state dict.
        `staying` are the parameters whose state the optimizer already has.
        """
        number_of = {key: number for number, key in enumerate(keys)}
        stay = {id(parameter) for parameter in staying}
        try:
            with state_of(place, path):
                own = place.state_dict()
        except UnsavableValue as error:
            return self._leaves.differ(str(error), keep=path)
        own_groups = own["param_groups"]
        own_state = {
            number: own["state"][number]
            for number, p in enumerate(parameters_of(place))
            if id(p) in stay and number in own["state"]
        }
        del own  # hooks may have copied the whole state into it

        def put(resolve: Resolve) -> Any:
            as_it_is = {
                parameter: place.state[parameter]
                for parameter in staying
                if parameter in place.state
            }
            state = dict(own_state)
            for key, entries in values.items():
                state[number_of[key]] = {name: value(resolve) for name, value in entries.items()}
            state |= {key: value(resolve) for key, value in others.items()}
            groups = []
            for group, entries in zip(own_groups, group_values, strict=True):
                made = {key: value(resolve) for key, value in entries.items()}
                groups.append(
                    {**group, **{key: value for key, value in made.items() if value is not KEEP}}
                )
            found = {
                **{key: value(resolve) for key, value in more.items()},
                "state": state,
                "param_groups": groups,
            }
            load_into(place, found, path, self._leaves.options)
            place.state.update(as_it_is)  # the loader may have converted this state
            return KEEP

        return put

    def _has_form(self, key: Any, parameter: torch.Tensor, path: str) -> bool:
        """Return True if a parameter may have had its present shape when it was saved.

        Otherwise, record that the saved state does not fit the parameter.
        """
        shapes = {form.shape for form in self._parameters.forms(path, key)}
        if not shapes or is_uninitialized(parameter) or tuple(parameter.shape) in shapes:
            return True
        self._leaves.differ(
            f"{path}.state.{key}: the parameter had shape "
            f"{' or '.join(str(list(shape)) for shape in shapes)} when it was saved, and has "
            f"{list(parameter.shape)} now",
            keep=f"{path}.state.{key}",
        )
        return False

    def _settings(
        self, saved: list[dict[str, Any]], own: list[list[Any]], path: str
    ) -> list[dict[str, Any]]:
        """Return the saved settings for each group of the optimizer.

        They are the settings with which the parameters of the group were saved, in
        whatever groups.
        """
        leaves = self._leaves
        group_of = {name: group for group in saved for name in group["params"]}
        if leaves.options.strict:
            apart = group_differences(own, [group["params"] for group in saved], path)
            leaves.differ(*apart)
            leaves.differences.loose |= bool(apart)
        leaves.compare(
            list(group_of), [name for names in own for name in names], f"{path}.param_groups"
        )
        found = []
        for number, names in enumerate(own):
            groups = [group_of[name] for name in names if name in group_of]
            if not names and len(saved) == len(own) and not saved[number]["params"]:
                groups = [saved[number]]
            apart_groups = {
                id(group): {key: value for key, value in group.items() if key != "params"}
                for group in groups
            }
            plain, *others = apart_groups.values() if apart_groups else ({},)
            sentence = (
                f"{path}.param_groups.{number}: the checkpoint has the parameters of this group "
                f"in groups with different settings "
                f"(it has {len(saved)} groups, the optimizer {len(own)})"
            )
            for other in others:
                if (tensors := tensors_to_compare(plain, other)) is None:
                    leaves.differ(sentence, keep=path)
                else:
                    leaves.expect_equal(tensors, sentence, keep=path)
            found.append(plain)
        return found

    def _of_no_parameter(
        self, place: torch.optim.Optimizer, tree: dict[str, Any], path: str
    ) -> dict[Any, Value]:
        """Bind the entries of the state that belong to no parameter.

        As in torch, they replace the entries of this kind that the optimizer has.
        """
        named = {name for group in tree["param_groups"] for name in group["params"]}
        device = next((parameter.device for parameter in parameters_of(place)), None)
        return {
            key: (lambda _, own=place.state[key]: own)  # type: ignore[misc]
            if key in place.state and self._leaves.is_kept(f"{path}.{key}")
            else self._leaves.make(entry, f"{path}.{key}", device)
            for key, entry in tree["state"].items()
            if key not in named
        }

    def _flattened_optimizer(
        self, place: torch.optim.Optimizer, root: torch.nn.Module, tree: dict[str, Any], path: str
    ) -> Value:
        """Bind an optimizer over FSDP1's flat parameters. DCP converts its state."""
        leaves = self._leaves
        leaves.wholes[f"{path}.param_groups"] = path
        # Settings may be tensors, like a learning rate.
        leaves.make(tree["param_groups"], f"{path}.param_groups")
        others = self._of_no_parameter(place, tree, f"{path}.state")
        of_parameters = {key: value for key, value in tree["state"].items() if key not in others}
        if not of_parameters:
            theirs = tree["param_groups"]
            if len(theirs) != len(place.param_groups):
                return leaves.differ(
                    f"{path}.param_groups: the checkpoint has {len(theirs)} groups, the optimizer "
                    f"{len(place.param_groups)}, and no state "
                    "that says which parameters are in which",
                    keep=path,
                )
            if leaves.options.strict:
                leaves.differ(*settings_differences(place.param_groups, theirs, path), keep=path)
            for number, (group, found) in enumerate(
                zip(place.param_groups, self._without_kept(theirs, path), strict=True)
            ):
                leaves.note_settings(group, found, f"{path}.param_groups.{number}")
            groups_of = leaves.make(tree["param_groups"], f"{path}.param_groups")

            def put_without_state(resolve: Resolve) -> Any:
                without_state(place, self._without_kept(groups_of(resolve), path))
                place.state.update({key: value(resolve) for key, value in others.items()})
                return KEEP

            return put_without_state
        if not any(isinstance(key, torch.Tensor) for key in place.state):
            before = dict(place.state)
            # DCP makes the optimizer take a fake step
            leaves.undo += [place.state.clear, lambda: place.state.update(before)]
        try:
            with state_of(place, path):
                own = flattened_state(place, root, path)
        except UnsavableValue as error:
            return leaves.differ(str(error), keep=path)
        groups: list[dict[str, Any]] = own["param_groups"]
        own["state"] = {
            key: value
            for key, value in own["state"].items()
            if any(key in group["params"] for group in groups)
        }
        settings = self._settings(
            tree["param_groups"], [list(group["params"]) for group in groups], path
        )
        if leaves.options.strict:
            leaves.differ(*settings_differences(groups, settings, path), keep=path)
        restored = self._without_kept(settings, path)
        for number, (group, found) in enumerate(zip(groups, restored, strict=True)):
            leaves.note_settings(group, found, f"{path}.param_groups.{number}")
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
            {
                name: value
                for name, value in group.items()
                if not self._leaves.is_kept(f"{path}.param_groups.{number}.{name}")
            }
            for number, group in enumerate(groups)
        ]

    def _optimizer_entry(
        self,
        place: torch.optim.Optimizer,
        key: ParameterKey,
        parameter: torch.Tensor,
        entry: Any,
        path: str,
        *,
        in_place: bool,
    ) -> dict[Any, Value]:
        """Bind the state of a parameter.

        Tensors that fit are filled in place. Other tensors are made on the device on
        which torch's own load_state_dict puts them. Without `in_place`, the optimizer's
        own method gets the values as they were saved.
        """
        leaves, optimizer, path = self._leaves, path, f"{path}.state.{key}"
        if not isinstance(entry, dict):
            return {}
        mine = place.state.get(parameter, {}) if in_place else {}
        if leaves.options.strict:
            leaves.differ(*state_difference(mine, entry, path), keep=optimizer)
        values: dict[Any, Value] = {}
        converted = (
            in_place
            and parameter.is_floating_point()
            and self._is_converted(parameter, key, optimizer)
        )
        for name, saved in entry.items():
            own, inside = mine.get(name), f"{path}.{name}"
            device = (
                torch.device("cpu")
                if name == "step" and not steps_on_device(place, parameter)
                else parameter.device
            )
            dtypes = self._new_dtypes(saved, parameter) if converted and name != "step" else {}
            # An optimizer that has only some of the state of a parameter fails at its next
            # step.
            leaves.wholes[inside] = path
            if isinstance(saved, TensorRef):
                size, dtype = (
                    tuple(leaves.saved.describe(saved.fqn).size),
                    dtypes.get(saved.fqn, leaves.saved.dtype(saved.fqn)),
                )
                if isinstance(own, torch.Tensor) and own.shape == size and own.dtype == dtype:
                    values[name] = leaves.tensor(own, saved, inside)
                    continue
                if isinstance(parameter, DTensor) and tuple(parameter.shape) == size:
                    values[name] = self._like(parameter, saved, dtype, inside)
                    continue
            elif isinstance(saved, ObjectNode):  # saved in parts, such as a quantized tensor
                if (
                    own is None
                    and isinstance(parameter, DTensor)
                    and size_of(saved.kind, saved.tree) == tuple(parameter.shape)
                ):
                    leaves.differ(
                        f"{inside}: the checkpoint has a tensor of class {saved.cls}, which "
                        f"consists of several tensors, "
                        "and the parameter is a DTensor: it cannot be divided as the parameter is",
                        keep=path,
                    )
                    continue
                if isinstance(own, torch.Tensor) and (
                    isinstance(own, DTensor) or (not dtypes and self._has_dtypes(own, saved))
                ):
                    values[name] = self._bind(own, saved, inside)
                    continue
            for fqn, dtype in dtypes.items():
                leaves.convert(fqn, inside, dtype)
            values[name] = leaves.make(saved, inside, device)
        return values

    def _has_dtypes(self, own: torch.Tensor, saved: ObjectNode) -> bool:
        """Return True if the inner tensors of `own` have the dtypes of the saved ones."""
        kind = kind_of_tensor(own)
        inner = TENSOR_KINDS[kind].fields(own) if kind and isinstance(saved.tree, dict) else {}
        pairs = ((inner.get(name), value) for name, value in saved.tree.items()) if inner else ()
        return all(
            mine.dtype == self._leaves.saved.dtype(theirs.fqn)
            for mine, theirs in pairs
            if isinstance(mine, torch.Tensor) and isinstance(theirs, TensorRef)
        )

    def _is_converted(self, parameter: torch.Tensor, key: ParameterKey, path: str) -> bool:
        """Return True if the dtype of a parameter has changed since the save."""
        before = {form.dtype for form in self._parameters.forms(path, key)}
        return bool(before) and parameter.dtype not in before

    def _new_dtypes(self, saved: Any, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """Return the dtype of a converted parameter for each tensor in its saved state
        that takes it.

        torch gives all state but the step the dtype of its parameter. State of a
        parameter whose dtype has not changed keeps its own dtype here, because some
        optimizers have moments of a higher precision than the parameters.
        """
        names = [saved.fqn] if isinstance(saved, TensorRef) else tensor_names(saved)
        dtypes = {name: self._leaves.saved.dtype(name) for name in names}
        return {
            name: parameter.dtype
            for name, dtype in dtypes.items()
            if (dtype.is_floating_point or dtype.is_complex) and dtype != parameter.dtype
        }

    def _like(self, parameter: DTensor, saved: TensorRef, dtype: torch.dtype, path: str) -> Value:
        """Make state that the optimizer does not have yet for a sharded parameter,
        sharded like the parameter.
        """
        leaves = self._leaves
        leaves.paths[saved.fqn] = path
        made = leaves.in_place[saved.fqn] = torch.empty_like(parameter.detach(), dtype=dtype)
        return lambda resolve: made

    def _group_values(
        self, own: dict[str, Any], saved: dict[str, Any], path: str, twice: frozenset[int] | None
    ) -> dict[str, Value]:
        """Bind the saved settings of a parameter group to the live group `own`.

        A tensor of the live group is filled in place unless its `id()` is in `twice`,
        the ids of the tensors that several groups share. Filling a shared tensor would
        change the other groups, too, so the group gets a tensor of its own. `twice` is
        None if the optimizer loads the settings by its own method. Then no tensor is
        filled in place.
        """
        leaves, values = self._leaves, dict[str, Value]()
        saved = {
            name: value
            for name, value in saved.items()
            if name != "params" and not leaves.is_kept(f"{path}.{name}")
        }
        leaves.note_settings(own, saved, path)
        for name, value in saved.items():
            place = own.get(name)
            # A saved group may have been divided.
            alone = isinstance(value, TensorRef) and value.fqn not in leaves.in_place
            values[name] = (
                leaves.tensor(place, value, f"{path}.{name}")
                if alone
                and isinstance(place, torch.Tensor)
                and twice is not None
                and id(place) not in twice
                else leaves.make(value, f"{path}.{name}")
            )
        return values


def _names_in(tree: dict[str, Any]) -> list[Any]:
    """Return the names of the parameters in all groups of an optimizer's saved state,
    in their order.
    """
    return [name for group in tree["param_groups"] for name in group["params"]]


def _settings_of_several(groups: list[dict[str, Any]]) -> frozenset[int]:
    """Return the ids of the tensors that are settings of several groups.

    A learning rate with which all groups were made is such a tensor.
    """
    count = Counter(
        id(value) for group in groups for value in group.values() if isinstance(value, torch.Tensor)
    )
    return frozenset(one for one, number in count.items() if number > 1)
