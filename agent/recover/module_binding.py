"""Brings the saved state of a module back into the caller's module: first compares the
two, then writes.

The tensors of a plain module are written in place. A submodule that loads its state in
its own way gets the saved values through `load_state_dict` of the whole module, as in
torch, and checks names and shapes by itself.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from ckptd.agent.plan.structure import PLAIN, local_part
from ckptd.agent.recover.leaves import KEEP, Leaves, Resolve, Value, load_into, unchanged
from ckptd.agent.recover.options import Options
from ckptd.agent.state.capture import state_of, tensors_in
from ckptd.agent.state.customized import loads_by_itself, needs_loading, parts_with_loaders
from ckptd.agent.state.tree import ObjectNode
from ckptd.agent.state.versions import Versions, metadata_for_loading
from ckptd.agent.state.wrappers import (
    canonical_names,
    current_names,
    flattens,
    raw_names,
    unwrapped,
)
from ckptd.shared.errors import UnsavableValue


class Modules:
    """The binder of the modules of a state.

    `bind` binds any values of the state. `versions` has the versions of submodules for
    each saved module, by the key of the module.
    """

    def __init__(
        self,
        leaves: Leaves,
        bind: Callable[[Mapping[Any, tuple[Any, Any, str]]], dict[Any, Value]],
        versions: Mapping[str, Versions],
    ) -> None:
        self._leaves = leaves
        self._bind = bind
        self._versions = versions

    def bind(self, place: torch.nn.Module, saved: Any, path: str) -> Value:
        leaves, flat = self._leaves, flattens(place)
        tree = saved.tree if isinstance(saved, ObjectNode) else saved
        if not isinstance(tree, dict):
            return leaves.other_kind(path, saved, "a module")
        module = unwrapped(place)
        parts = [] if flat else parts_with_loaders(module)
        by_itself = not flat and loads_by_itself(module)
        reload = not flat and (by_itself or bool(parts) or needs_loading(module))
        if reload and not leaves.have_memory(_tensors(module, path)):
            return unchanged
        try:
            with state_of(module, path):
                own = get_model_state_dict(place) if flat else module.state_dict()
        except UnsavableValue as error:
            return leaves.differ(str(error), keep=path)
        if by_itself:
            return self._whole(module, own, tree, path)
        raw_of = raw_names(module, own)
        current = current_names(raw_of, tree)
        tree = {current[name]: value for name, value in tree.items()}
        loaders = [_canonical_prefix(module, part) for part in parts]
        to_loaders = {
            name for name in (*raw_of, *tree) if any(name.startswith(prefix) for prefix in loaders)
        }
        plain_names = [name for name in raw_of if name not in to_loaders]
        saved_names = [name for name in tree if name not in to_loaders]
        inner = tuple(prefix for prefix in loaders if prefix)
        apart = not any(name in raw_of or name.startswith(inner) for name in tree)
        inside = f"{path}." if path else ""
        # A strict loader may know the names of another module.
        named_apart = apart and not (leaves.options.strict and to_loaders)
        if named_apart and not all(leaves.is_kept(f"{inside}{name}") for name in raw_of):
            return self._without_match(list(tree), list(raw_of), path)
        # A module without state matches another.
        leaves.matched += not plain_names and not saved_names
        leaves.compare(saved_names, plain_names, path)
        found = [name for name in plain_names if name in tree]
        values = self._bind({
            raw_of[name]: (own[raw_of[name]], tree[name], f"{inside}{name}") for name in found
        })  # fmt: skip
        if flat:
            return _flattened(place, own, values)
        through = self._through_loaders(
            own, raw_of, {name: tree[name] for name in tree if name in to_loaders}, to_loaders, path
        )
        metadata = (
            metadata_for_loading(module, own, tree, self._versions.get(path)) if reload else None
        )

        def put(resolve: Resolve) -> Any:
            made: dict[str, Any] = {raw: value(resolve) for raw, value in values.items()}
            if reload:
                found = _own_tensors(module, own)
                found = {
                    raw: found[raw] if made[raw] is KEEP else made[raw] for raw in values
                } | through(resolve)
                _load(module, found, metadata, path, leaves.options)
            else:
                found = {raw: new for raw, new in made.items() if new is not KEEP}
                if found:
                    module.load_state_dict(found, strict=False)
            return KEEP

        return put

    def _whole(self, module: torch.nn.Module, own: Any, tree: Any, path: str) -> Value:
        """Bind a module whose class overrides `load_state_dict` or `state_dict`.

        Its method gets the whole saved state dict, with the values of the module itself
        for the keys that the caller keeps.
        """
        if (
            not self._leaves.options.strict
            and isinstance(own, dict)
            and own
            and set(own).isdisjoint(tree)
        ):
            return self._without_match(list(tree), list(own), path)
        kept = self._kept(own, path) if isinstance(own, dict) else {}
        if kept:
            tree = {name: value for name, value in tree.items() if name not in kept}
        fresh = self._leaves.alike(tree, tensors_in(own, path), path, lossless=True)
        metadata = metadata_for_loading(module, own, tree, self._versions.get(path))

        def put(resolve: Resolve) -> Any:
            _load(module, fresh(resolve) | kept, metadata, path, self._leaves.options)
            return KEEP

        return put

    def _kept(self, own: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the values of a module's state dict that the caller keeps."""
        if not self._leaves.options.keep:
            return {}
        inside = f"{path}." if path else ""
        return {
            name: value for name, value in own.items() if self._leaves.is_kept(f"{inside}{name}")
        }

    def _without_match(self, theirs: list[str], ours: list[str], path: str) -> Value:
        known, wanted = (", ".join(map(str, keys[:3])) or "none" for keys in (theirs, ours))
        return self._leaves.differ(
            f"{path or 'the state'}: no key of the module is in the checkpoint, which has "
            f"{known}, while the state has {wanted}",
            keep=path,
        )

    def _through_loaders(
        self,
        own: dict[str, Any],
        raw_of: dict[str, str],
        tree: dict[str, Any],
        names: set[str],
        path: str,
    ) -> Callable[[Resolve], dict[str, Any]]:
        """Return a function that makes the values for the loaders of submodules, by raw
        name.

        The values are new tensors, placed as those of the module.
        """
        leaves = self._leaves
        mine = {name: own[raw_of[name]] for name in names if name in raw_of}
        kept = self._kept(mine, path)
        tree = {name: value for name, value in tree.items() if name not in kept}
        template = {name: value for name, value in mine.items() if name in tree}
        fresh = (
            leaves.alike(tree, tensors_in(template, path), path, lossless=True) if tree else None
        )

        def make(resolve: Resolve) -> dict[str, Any]:
            made: dict[str, Any] = ({} if fresh is None else fresh(resolve)) | kept
            return {raw_of.get(name, name): value for name, value in made.items()}

        return make


def _load(
    module: torch.nn.Module, found: dict[str, Any], metadata: Any, path: str, options: Options
) -> None:
    state = OrderedDict(found)
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]  # the versions by which loaders know an older state
    takes_strict = "strict" in inspect.signature(module.load_state_dict).parameters
    load_into(module, state, path, options, **({"strict": options.strict} if takes_strict else {}))


def _tensors(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the key and the tensor of each parameter and buffer of a module."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        yield f"{path}.{name}" if path else name, tensor


def _own_tensors(module: torch.nn.Module, own: dict[str, Any]) -> dict[str, Any]:
    """Return a module's state dict with the parameters and buffers themselves.

    torch does not copy a tensor onto itself.
    """
    themselves: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )
    return {
        raw: themselves[raw]
        if raw in themselves and _same_memory(themselves[raw], value)
        else value
        for raw, value in own.items()
    }


def _same_memory(one: torch.Tensor, value: Any) -> bool:
    return (
        (type(value) in PLAIN or isinstance(value, DTensor))
        and value.shape == one.shape
        and local_part(value).data_ptr() == local_part(one).data_ptr()
    )


def _flattened(place: torch.nn.Module, own: dict[str, Any], values: dict[str, Value]) -> Value:
    """Return the value for a module with flat parameters of FSDP1, which DCP fills from
    its shards.
    """

    def put(resolve: Resolve) -> Any:
        for raw, value in values.items():
            if (made := value(resolve)) is not KEEP:
                own[raw] = made
        set_model_state_dict(
            place, {raw: own[raw] for raw in values}, options=StateDictOptions(strict=False)
        )
        return KEEP

    return put


def _canonical_prefix(module: torch.nn.Module, prefix: str) -> str:
    return canonical_names(module, [f"{prefix}_"])[0][:-1]
