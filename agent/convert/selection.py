"""Selects what is exported of a state: a part of it, other names, another dtype.

Pure functions of trees and names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckptd.agent.convert.contents import Leaf, children, flat, not_dense, replaced, without_tensors
from ckptd.shared.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a state that is exported, and the changes on the way.

    only: the dotted name of a part of the state, such as "model", which then becomes
    the whole; "" for all of it. dtype: the dtype of floating-point tensors, or None for
    the saved ones. rename: pairs of a regular expression and its replacement, as for
    `re.sub`, which are applied in turn to the name of every tensor. names: new names by
    old ones, which come first.
    """

    only: str = ""
    dtype: torch.dtype | None = None
    rename: tuple[tuple[str, str], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, _ in self.rename:
            try:
                re.compile(pattern)
            except re.error as error:
                raise InvalidRequest(
                    f"rename: {pattern!r} is not a regular expression: {error}"
                ) from None
        if self.dtype is not None and not _can_hold_floats(self.dtype):
            raise InvalidRequest(
                f"dtype: torch cannot convert to {self.dtype}; expected a floating-point dtype "
                f"like torch.bfloat16"
            )

    def of(self, tree: Any) -> Any:
        """Return the selected part of a tree, with the new dtype in its leaves, and
        with new names if it is a dict of tensors.

        Raises NotFound if the tree lacks the part, and InvalidRequest if tensors have
        to be renamed that are in nested containers, or if two tensors would get one
        name.
        """
        part = _cast(part_of(tree, self.only), self.dtype)
        if not (self.rename or self.names):
            return part
        if not isinstance(part, dict) or any(
            isinstance(value, (dict, list, tuple)) for value in part.values()
        ):
            raise InvalidRequest(
                "tensors can be renamed in a flat dict only, such as the state dict of a module: "
                "choose one with `only`, like only='model'"
            )
        return self.renamed(part)

    def flat(self, tree: Any) -> tuple[dict[str, Leaf], list[str]]:
        """Return the tensors of the selected part by their new names, and the names of
        the parts of it that have none.

        Raises as `of`, and UnsavableValue for a tensor that is not one dense array.
        """
        part = _cast(part_of(tree, self.only), self.dtype)
        if isinstance(part, Leaf):
            part = {self.only.rpartition(".")[2]: part}
        leaves = dict[str, Leaf]()
        for name, value in flat(part):
            if isinstance(value, torch.Tensor):
                raise not_dense(name)
            if isinstance(value, Leaf):
                if name in leaves:
                    raise InvalidRequest(
                        f"two tensors would have the name {name!r}: choose a part with one of "
                        f"them with `only`"
                    )
                leaves[name] = value
        return self.renamed(leaves), list(without_tensors(part))

    def renamed(self, named: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the values with their new names.

        Raises InvalidRequest if two get one name or an old name is unknown.
        """
        if unknown := [name for name in self.names if name not in named]:
            raise InvalidRequest(
                f"names: there is no tensor {unknown[0]!r}; there are {len(named)}, such as "
                f"{', '.join(map(str, list(named)[:3]))}"
            )
        made, old_names = dict[Any, Any](), dict[str, Any]()
        for old, value in named.items():
            new = self.new_name(str(old))
            if not new:
                raise InvalidRequest(f"{old!r} would get an empty name")
            if new in old_names:
                raise InvalidRequest(
                    f"{old_names[new]} and {old} would both get the name {new!r}: give each "
                    f"tensor a name of its own"
                )
            made[old if new == str(old) else new], old_names[new] = value, old
        return made

    def new_name(self, name: str) -> str:
        """Return the new name of a tensor.

        Raises InvalidRequest if a replacement does not fit its regular expression.
        """
        name = self.names.get(name, name)
        for pattern, replacement in self.rename:
            try:
                name = re.sub(pattern, replacement, name)
            except (re.error, IndexError) as error:
                raise InvalidRequest(
                    f"rename: {replacement!r} cannot replace {pattern!r}: {error}"
                ) from None
        return name


def _can_hold_floats(dtype: torch.dtype) -> bool:
    try:
        return (
            dtype.is_floating_point
            and torch.ones(1, dtype=torch.float32, device="cpu").to(dtype).to(torch.float32).item()
            == 1.0
        )
    except RuntimeError:  # torch has no conversion between this dtype and others
        return False


def part_of(tree: Any, path: str) -> Any:
    """Return the part of a tree with this dotted name. Raises NotFound.

    If no container has the name, but keys of a dict begin with it and a dot, as those
    of a submodule do, the part is a dict of their values, without that beginning.
    """
    found = _part(tree, path) if path else (tree,)
    if found is None:
        keys = [str(key) for key in tree] if isinstance(tree, dict) else []
        raise NotFound(
            f"the checkpoint has no {path!r}; at its top are {', '.join(keys[:8]) or 'no names'}"
        )
    return found[0]


def _part(tree: Any, path: str) -> tuple[Any] | None:
    items = children(tree)
    if items is None:
        return None
    for key, value in items:
        name = str(key)
        if path == name:
            return (value,)
        if path.startswith(f"{name}.") and (found := _part(value, path[len(name) + 1 :])):
            return found
    inside = {
        str(key)[len(path) + 1 :]: value
        for key, value in children(tree) or ()
        if str(key).startswith(f"{path}.")
    }
    return (inside,) if inside else None


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return the tree with this dtype in every leaf that is a floating-point tensor."""
    if dtype is None:
        return tree
    return replaced(
        tree,
        Leaf,
        lambda leaf: replace(leaf, dtype=dtype) if leaf.saved.is_floating_point else leaf,
    )
