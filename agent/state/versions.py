"""Keeps the versions that the submodules of a module had when it was saved, as
`torch.save` keeps them with a state dict.

torch gives each submodule's `_load_from_state_dict` the metadata with which that
submodule was saved. They have the `_version` of its class. A class that has changed
since then uses this number to migrate the state. A state dict has the metadata of all
submodules in its attribute `_metadata`. As with `torch.load`, a state dict that is a
value in a state has them when it comes back.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ckptd.agent.state.tree import ObjectNode, PerRank, like
from ckptd.agent.state.wrappers import canonical_names, may_name_wrappers

Versions = Mapping[str, Mapping[str, Any]]
"""The metadata of submodules, by prefix without the dot at the end.

For a module, the prefixes are canonical, and submodules with the usual metadata are
left out. For a state dict among the values of a state, all prefixes are there, as they
are in the state dict.
"""

_known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[dict[str, Any], Versions]] = (
    weakref.WeakKeyDictionary()
)
"""The metadata of a module's last state dict, with the result of `versions_of` for
them.

Comparing metadata takes less time than computing the result.
"""
USUAL = {"version": 1}
"""The metadata that the submodules of most classes have."""
_PLAIN = (bool, int, float, str, type(None))


def versions_of(module: torch.nn.Module, state: Any) -> Versions | None:
    """Return the versions in a state dict of a module, or None if it has none."""
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, dict):
        return None
    if list(metadata.values()).count(USUAL) == len(metadata):  # nearly always
        return {}
    known = _known.get(module)
    if known is not None and known[0] == metadata:
        return known[1]
    unusual = {
        raw: entry
        for raw, entry in metadata.items()
        if entry != USUAL and isinstance(entry, dict) and type(raw) is str
    }
    names = canonical_prefixes(module, metadata)
    found: dict[str, Mapping[str, Any]] = {}
    # A wrapper comes before the module inside, which has the same prefix and counts.
    for raw in metadata:
        if raw in unusual:
            found[names[raw]] = _plain(unusual[raw])
        elif raw in names:
            found.pop(names[raw], None)
    # Otherwise the names also depend on the classes of wrappers.
    if names.keys() == set(names.values()):
        _known[module] = metadata, found
    return found


def metadata_for_loading(
    module: torch.nn.Module, own: Any, state: Collection[str], versions: Versions | None
) -> OrderedDict[str, Any] | None:
    """Return the metadata for `load_state_dict`, with the saved version of each
    submodule.

    own: the state dict of the module now. state: the saved names, canonical. versions:
    None if the checkpoint has none; the metadata are then those of `own`. As in torch,
    a submodule without any saved value has no metadata.
    """
    metadata = getattr(own, "_metadata", None)
    if versions is None or metadata is None:
        return metadata
    parts = prefixes(state) | versions.keys()
    found: OrderedDict[str, Any] = OrderedDict(
        (raw, dict(entry)) for raw, entry in versions.items()
    )
    for raw, name in canonical_prefixes(module, metadata).items():
        if name in parts:
            found[raw] = dict(versions.get(name, USUAL))
        else:
            found.pop(raw, None)
    return found


def merged_versions(documents: Sequence[Mapping[str, Any]], own: int | None) -> dict[str, Versions]:
    """Return the versions of all modules in the values documents of several ranks, by
    key.

    own: the number of this rank's document, or None. If ranks differ, this document
    counts, then the first one.
    """
    merged: dict[str, Versions] = {}
    for document in [*reversed(documents), *([] if own is None else [documents[own]])]:
        for path, known in document.get("versions", {}).items():
            merged[path] = {**merged.get(path, {}), **known}
    return merged


def prefixes(names: Iterable[str]) -> set[str]:
    """Return the prefixes of the submodules in which these names lie.

    They include "", which is the prefix of the module itself.
    """
    found = {""}
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in found:
            found.add(name)
    return found


def _plain(entry: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in entry.items() if type(key) is str and type(value) in _PLAIN
    }


def canonical_prefixes(module: torch.nn.Module, raw: Collection[Any]) -> dict[str, str]:
    """Return the canonical prefix for each raw prefix of a submodule.

    Both are without the dot at the end.
    """
    prefixes = [prefix for prefix in raw if type(prefix) is str]
    if not may_name_wrappers(prefixes):
        return dict(zip(prefixes, prefixes, strict=True))
    # Each prefix gets a name of its own in it, because names that would be equal stay
    # raw.
    leaves = [
        f"{prefix}.~{number}" if prefix else f"~{number}" for number, prefix in enumerate(prefixes)
    ]
    return {
        prefix: name.rpartition(".")[0]
        for prefix, name in zip(prefixes, canonical_names(module, leaves), strict=True)
    }


def plain_metadata(state: OrderedDict[Any, Any]) -> dict[str, dict[str, Any]] | None:
    """Return the metadata in a state dict, or None if it has none.

    Entries that are not plain are left out.
    """
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, dict):
        return None
    return {
        prefix: USUAL if entry == USUAL else _plain(entry)
        for prefix, entry in metadata.items()
        if type(prefix) is str and isinstance(entry, dict)
    }


# -- state dicts among the values of a state


def attach_versions(tree: Any, versions: Mapping[str, Versions], rank: int) -> Any:
    """Return the decoded state of a rank, with the metadata of each state dict.

    An OrderedDict gets its metadata as the attribute `_metadata`. The dict of a module
    is replaced by an OrderedDict with this attribute.
    """
    above = {
        key[:end]
        for key in versions
        for end in (*(n for n, letter in enumerate(key) if letter in ".@"), len(key))
    }

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, ObjectNode):
            tree = walk(node.tree, path)
            if node.kind == "module" and type(tree) is dict and path in versions:
                tree = _with_usual(tree, versions[path])
            return node if tree is node.tree else ObjectNode(node.kind, tree, node.cls)
        if isinstance(node, PerRank):
            value = walk(node.value, f"{path}@{rank}")
            return node if value is node.value else PerRank(value)
        if type(node) is OrderedDict and path in versions:
            node._metadata = _metadata(versions[path])  # type: ignore[attr-defined]
        if isinstance(node, dict):
            for key, value in node.items():
                if (inside := f"{path}.{key}" if path else str(key)) in above:
                    node[key] = walk(value, inside)
        elif isinstance(node, (list, tuple, deque)):
            inside = f"{path}." if path else ""
            found = [
                walk(value, f"{inside}{n}") if f"{inside}{n}" in above else value
                for n, value in enumerate(node)
            ]
            return node if all(map(operator.is_, found, node)) else like(node, found)
        return node

    return walk(tree, "") if versions else tree


def _with_usual(tree: dict[str, Any], versions: Versions) -> OrderedDict[str, Any]:
    """Return the saved state of a module as a state dict with all metadata."""
    state = OrderedDict(tree)
    usual = dict.fromkeys(sorted(prefixes(name for name in tree if type(name) is str)), USUAL)
    state._metadata = _metadata({**usual, **versions})  # type: ignore[attr-defined]
    return state


def _metadata(versions: Versions) -> OrderedDict[str, Any]:
    return OrderedDict((prefix, dict(entry)) for prefix, entry in versions.items())


def take_versions(place: OrderedDict[Any, Any], saved: Any, taken: Iterable[Any]) -> None:
    """Give a state dict of the caller's the metadata of the saved state dict.

    taken: the keys whose values come from the saved state dict. A submodule without
    such a key keeps its own metadata.
    """
    metadata = getattr(saved, "_metadata", None)
    if metadata is None:
        return
    own = getattr(place, "_metadata", None) or {}
    filled = {key.rpartition(".")[0] for key in taken if type(key) is str}
    stays = {key.rpartition(".")[0] for key in place if type(key) is str} - filled
    place._metadata = _metadata(  # type: ignore[attr-defined]
        {**metadata, **{prefix: own[prefix] for prefix in stays & own.keys()}}
    )
