"""Gives the state dicts of modules in a state the versions of submodules that they were
saved with.

A module loads its state dict with these versions, which are in the attribute
`_metadata` of the state dict. As with `torch.load`, a state dict that is a value in a
state has them when it comes back.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from ckptd.agent.state.tree import ObjectNode, PerRank, like
from ckptd.agent.state.versions import USUAL, Versions, prefixes


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

    taken: the keys whose values come from the saved state dict. A submodule of which no
    value is taken keeps its own metadata.
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
