"""The tree that a values document is decoded into: the nodes that stand for tensors and objects, and functions over such trees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The node of a decoded tree that takes the place of the tensor of this name."""

    fqn: str


@dataclass(frozen=True, slots=True)
class ObjectNode:
    """The node of a decoded tree that takes the place of an object with a state_dict.

    kind: module, optimizer or stateful. cls: the full name of the object's class, "" if it was not saved.
    """

    kind: str
    tree: Any
    cls: str = ""


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value that belongs to one rank, made by `per_rank`. In a decoded tree it belongs to the rank that wrote the document."""

    value: Any


def per_rank(value: Any) -> Any:
    """Mark a value in the state as this rank's own, like the position of its data loader. Each rank gets its own value back.

    If the number of ranks has changed, `recover()` refuses the value by name, or passes the values of all ranks to `on_reshape=`.
    """
    return PerRank(value)


def tensor_names(tree: Any) -> list[str]:
    """Return the names of all tensors in a decoded tree."""
    if isinstance(tree, TensorRef):
        return [tree.fqn]
    if isinstance(tree, (ObjectNode, PerRank)):
        return tensor_names(tree.tree if isinstance(tree, ObjectNode) else tree.value)
    if isinstance(tree, dict):
        return [name for value in tree.values() for name in tensor_names(value)]
    if isinstance(tree, (list, tuple, set, frozenset)) or type(tree).__name__ == "deque":
        return [name for value in tree for name in tensor_names(value)]
    return []


def like(container: Any, items: list[Any]) -> Any:
    """Return a new list, tuple or deque of the same type as `container`, with these items."""
    return deque(items, container.maxlen) if isinstance(container, deque) else type(container)(items)


def inside(tree: Any) -> Iterable[Any] | None:
    """Return the contents of a container in a decoded tree, or None for a value that is no container."""
    if isinstance(tree, dict):
        return tree.values()
    if isinstance(tree, (ObjectNode, PerRank)):
        return (tree.tree if isinstance(tree, ObjectNode) else tree.value,)
    return tree if isinstance(tree, (list, tuple, set, frozenset, deque)) else None


def _stands_in(tree: Any) -> bool:
    """Return True if the tree contains a TensorRef, an ObjectNode or a PerRank."""
    if isinstance(tree, (TensorRef, ObjectNode, PerRank)):
        return True
    if isinstance(tree, dict):
        return any(map(_stands_in, tree.values()))
    return isinstance(tree, (list, tuple, set, frozenset, deque)) and any(map(_stands_in, tree))


def filled(tree: Any, resolve: Callable[[str], Any]) -> Any:
    """Return a decoded tree with `resolve(name)` for each TensorRef, and ObjectNode and PerRank unwrapped. Containers keep their types."""
    if isinstance(tree, TensorRef):
        return resolve(tree.fqn)
    if isinstance(tree, (ObjectNode, PerRank)):
        return filled(tree.tree if isinstance(tree, ObjectNode) else tree.value, resolve)
    if isinstance(tree, dict) and _stands_in(tree):
        made = type(tree)()
        made.update({key: filled(value, resolve) for key, value in tree.items()})
        return made
    if type(tree) is list:
        return [filled(value, resolve) for value in tree]
    if isinstance(tree, (tuple, set, frozenset)) and _stands_in(tree):
        return type(tree)(filled(value, resolve) for value in tree)
    if type(tree).__name__ == "deque" and _stands_in(tree):
        return type(tree)((filled(value, resolve) for value in tree), tree.maxlen)
    return tree
