"""The tree that a values document is decoded into: the nodes that stand for tensors and
objects, and functions over such trees.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptd.agent.state.components import TENSOR_KINDS
from ckptd.agent.state.records import KINDS
from ckptd.shared.errors import CkptdError, IntegrityError
from ckptd.shared.formats.bounds import is_flat

RECORDS = KINDS | TENSOR_KINDS
"""The kinds of objects that are saved as their fields, by name."""


class TensorRef(msgspec.Struct, frozen=True, gc=False):
    """The node of a decoded tree that takes the place of the tensor of this name."""

    fqn: str


@dataclass(frozen=True, slots=True)
class ObjectNode:
    """The node of a decoded tree that takes the place of an object with a state_dict,
    or of a record.

    kind: module, optimizer or stateful, or the kind of a record, a key of `RECORDS`.
    cls: the full name of the object's class, "" if it was not saved.
    """

    kind: str
    tree: Any
    cls: str = ""


@dataclass(slots=True, unsafe_hash=True)
class PerRank:
    """A value that belongs to one rank, made by `per_rank`. The caller may set `value`
    to another one.

    In a decoded tree it belongs to the rank that wrote the document.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Unsaved:
    """The node of a decoded tree that takes the place of a value that could not be
    saved and was left out. `cls`: the name of its class.
    """

    cls: str

    def __repr__(self) -> str:
        return f"<not saved: a {self.cls}>"


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A placeholder node in a decoded tree for a value that this process cannot
    construct, such as a member of an enum class that is not imported.

    why: the reason, and how to fix it. code, data: the extension type and its payload,
    which are kept so that the value can be saved again unchanged. A tensor of a
    subclass has no payload. It has `fields` instead, a dict of its inner tensors.
    """

    why: str
    code: int = 0
    data: bytes = b""
    fields: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<not available: {self.why}>"


def per_rank(value: Any) -> Any:
    """Mark a value in the state as this rank's own, like the position of its data
    loader. Each rank gets its own value back.

    If the number of ranks has changed, `recover()` refuses the value by name, or passes
    the values of all ranks to `on_reshape=`.
    """
    return PerRank(value)


def tensor_names(tree: Any) -> list[str]:
    """Return the names of all tensors in a decoded tree."""
    if isinstance(tree, TensorRef):
        return [tree.fqn]
    return [name for value in inside(tree) or () for name in tensor_names(value)]


def names_in_records(tree: Any) -> list[str]:
    """Return the names of the tensors in the records of a decoded tree: sparse tensors
    and other records are made from them.
    """
    if isinstance(tree, ObjectNode) and tree.kind in RECORDS:
        return tensor_names(tree)
    return [name for value in inside(tree) or () for name in names_in_records(value)]


def empty_like(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Return a new empty dict of the same type as `tree`, with its `_metadata` if it
    has any.
    """
    if isinstance(tree, defaultdict):
        return defaultdict(tree.default_factory)
    made = type(tree)()
    if (metadata := getattr(tree, "_metadata", None)) is not None:
        made._metadata = metadata  # type: ignore[attr-defined]
    return made


def like(container: Any, items: list[Any]) -> Any:
    """Return a new list, tuple or deque of the same type as `container`, with these
    items.
    """
    return (
        deque(items, container.maxlen) if isinstance(container, deque) else type(container)(items)
    )


def inside(tree: Any) -> Iterable[Any] | None:
    """Return the contents of a container in a decoded tree, or None for any other
    value.

    The contents of a container that holds plain values only are left out, because none
    of them is a node or a container.
    """
    if isinstance(tree, (ObjectNode, PerRank)):
        return (tree.tree if isinstance(tree, ObjectNode) else tree.value,)
    if not isinstance(tree, (dict, list, tuple, set, frozenset, deque)):
        return None
    contents = tree.values() if isinstance(tree, dict) else tree
    return () if is_flat(contents) else contents


def any_node(tree: Any, condition: Callable[[Any], bool]) -> bool:
    """Return True if the condition holds for a node of a decoded tree."""
    return condition(tree) or any(any_node(item, condition) for item in inside(tree) or ())


def unavailable(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the reason of each value in a decoded tree that this process
    cannot make.

    The keys of dicts are examined, too.
    """
    if isinstance(tree, Unavailable):
        yield path, tree.why
    elif isinstance(tree, ObjectNode):
        if tree.kind in RECORDS and (why := RECORDS[tree.kind].lacks(tree.tree, tree.cls)):
            yield path, why
        yield from unavailable(tree.tree, path)
    elif isinstance(tree, PerRank):
        yield from unavailable(tree.value, path)
    elif isinstance(tree, dict):
        if not is_flat(tree):
            yield from unavailable(list(tree), path)
        if not is_flat(tree.values()):
            for key, value in tree.items():
                yield from unavailable(value, f"{path}.{key}" if path else str(key))
    else:
        for number, value in enumerate(inside(tree) or ()):
            yield from unavailable(value, f"{path}.{number}" if path else str(number))


def _stands_in(tree: Any) -> bool:
    """Return True if the tree contains a TensorRef, an ObjectNode or a PerRank."""
    return any_node(tree, lambda node: isinstance(node, (TensorRef, ObjectNode, PerRank)))


def filled(tree: Any, resolve: Callable[[str], Any], *, records: bool = True) -> Any:
    """Return a decoded tree with `resolve(name)` in place of each TensorRef.

    ObjectNode and PerRank are unwrapped. Containers keep their types. A record is made
    again if this needs no class of the caller's. A dict of its fields takes the place
    of any other record, and of all records if `records` is False. `Unavailable` takes
    the place of a tensor whose subclass this process lacks.
    """
    if isinstance(tree, TensorRef):
        return resolve(tree.fqn)
    if isinstance(tree, ObjectNode):
        inner = filled(tree.tree, resolve, records=records)
        return _made(tree.kind, inner, tree.cls) if records else inner
    if isinstance(tree, PerRank):
        return filled(tree.value, resolve, records=records)
    if isinstance(tree, dict) and _stands_in(tree):
        made = empty_like(tree)
        made.update({key: filled(value, resolve, records=records) for key, value in tree.items()})
        return made
    if type(tree) is list:
        return (
            list(tree)
            if is_flat(tree)
            else [filled(value, resolve, records=records) for value in tree]
        )
    if isinstance(tree, (tuple, set, frozenset)) and _stands_in(tree):
        return type(tree)(filled(value, resolve, records=records) for value in tree)
    if type(tree).__name__ == "deque" and _stands_in(tree):
        return type(tree)((filled(value, resolve, records=records) for value in tree), tree.maxlen)
    return tree


def _made(kind: str, tree: Any, cls: str) -> Any:
    if kind not in RECORDS:
        return tree
    try:
        if why := RECORDS[kind].lacks(tree, cls):
            return Unavailable(why, fields=tree)
        return RECORDS[kind].alone(tree, cls)
    except CkptdError:
        raise
    except Exception as error:  # the fields come from a file
        raise IntegrityError(
            f"a value of kind {kind} cannot be made from its fields: {error}"
        ) from None
