"""Holds the contents of a checkpoint that is converted: its state as plain containers,
and its tensors, read when they are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ckptd.agent.state.components import kind_of_tensor
from ckptd.agent.state.tree import empty_like, like
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.bounds import MAX_DEPTH, MAX_OBJECTS

T = TypeVar("T")

BATCH = 256 << 20
"""The bytes of tensors that are read at a time. A larger tensor is read by itself."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in a state that is converted.

    name: in the checkpoint. saved: its dtype there. dtype: the dtype that it is to be
    written in. shape: in elements. stride: in elements. offset: in bytes from the start
    of its storage. storage: the name of that storage; tensors that share it have the
    same. value: the tensor itself if it is in memory already, as one that DCP has
    pickled with other values, or None.
    """

    name: str
    saved: torch.dtype
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str
    value: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes when it is written."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def is_tied_to(self, other: Leaf) -> bool:
        """Return True if both are the same elements of one storage, under two names."""
        mine, theirs = (
            (one.storage, one.offset, one.saved, one.shape, one.stride) for one in (self, other)
        )
        return mine == theirs


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint that is open, in any format.

    tree: the state in dicts, lists and other plain containers, with a Leaf in place of
    each tensor. A dict of its fields takes the place of a record, such as a dataclass.
    Sparse tensors and those of wrapper subclasses are there as they are. find: reads
    leaves without a value, and returns their tensors by the names of the leaves, each
    in the dtype in which it was saved. modules: the dotted names of the modules in it,
    as far as they are known. user_content: as it was saved. fill: copies leaves into
    given tensors, and reads only the shards that this rank has; None if the format
    cannot do that.
    """

    tree: Any
    find: Callable[[Sequence[Leaf]], Mapping[str, torch.Tensor]]
    modules: Sequence[str] = ()
    user_content: Any = None
    fill: Callable[[Sequence[tuple[Leaf, torch.Tensor]]], object] | None = None

    def read(self, leaves: Iterable[Leaf]) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """Yield each leaf with its tensor on the CPU, verified, in the dtype of the
        leaf.

        Up to `BATCH` bytes of tensors are read together, because a chunk may hold many.
        Raises IntegrityError, OSError.
        """
        batch, nbytes = list[Leaf](), 0
        for leaf in leaves:
            size = torch.Size(leaf.shape).numel() * leaf.saved.itemsize
            if batch and nbytes + size > BATCH:
                yield from self._read(batch)
                batch, nbytes = [], 0
            batch.append(leaf)
            nbytes += size
        yield from self._read(batch)

    def _read(self, batch: list[Leaf]) -> Iterator[tuple[Leaf, torch.Tensor]]:
        found = self.find([leaf for leaf in batch if leaf.value is None])
        for leaf in batch:
            tensor = found[leaf.name] if leaf.value is None else leaf.value
            yield leaf, tensor.detach().resolve_conj().resolve_neg().to(leaf.dtype)

    def together(self, leaves: Iterable[Leaf]) -> dict[str, torch.Tensor]:
        """Return all these tensors by the names of the leaves.

        Those that `find` makes in one storage share it, if none is converted.
        """
        return {leaf.name: tensor for leaf, tensor in self._read(list(leaves))}


def leaf_of(tensor: torch.Tensor) -> Leaf:
    """Return the leaf of a tensor that is in memory.

    Raises UnsavableValue if it is on the meta device.
    """
    if tensor.is_meta:
        raise UnsavableValue(
            f"a tensor of shape {list(tensor.shape)} was saved on the meta device, so that it has "
            f"no values: leave it out"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    storage, offset = (
        f"in memory at {tensor.untyped_storage().data_ptr()}",
        int(tensor.storage_offset()) * tensor.itemsize,
    )
    name = f"{storage}, {offset}, {tensor.dtype}, {tensor.shape}, {tensor.stride()}"
    return Leaf(
        name,
        tensor.dtype,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        offset,
        storage,
        tensor,
    )


def with_leaves(tree: Any) -> Any:
    """Return a tree with a Leaf in place of each tensor in memory.

    Sparse tensors and those of wrapper subclasses stay.
    """
    return replaced(
        tree, torch.Tensor, lambda tensor: tensor if kind_of_tensor(tensor) else leaf_of(tensor)
    )


def replaced(tree: Any, kind: type[T], change: Callable[[T], Any]) -> Any:
    """Return a tree with `change(value)` in place of each value of this type.

    Containers keep their types.
    """
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        made = empty_like(tree)
        for key, value in children(tree) or ():
            made[key] = replaced(value, kind, change)
        return made
    return (
        like(tree, [replaced(value, kind, change) for value in tree])
        if type(tree) in (list, tuple, deque)
        else tree
    )


def not_dense(name: str) -> UnsavableValue:
    """Return the error for a tensor that a format cannot hold because it is not one
    dense array.
    """
    return UnsavableValue(
        f"{name} is a sparse tensor or one of a subclass, which the format cannot hold: choose a "
        f"part without it with `only`"
    )


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in nested dicts, lists and tuples, with its dotted name.

    A Leaf and any other value is not looked into.
    """
    items = children(tree)
    if items is None:
        yield prefix, tree
    else:
        for key, value in items:
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def check_tree(tree: Any) -> None:
    """Raise UnsavableValue if containers are nested too deep, contain themselves, or
    hold too many values for a checkpoint.
    """
    level, count, depth = [tree], 0, 0
    while level:
        level = [value for container in level for _, value in children(container) or ()]
        count, depth = count + len(level), depth + 1
        if depth > MAX_DEPTH:
            raise UnsavableValue(
                f"the state is nested more than {MAX_DEPTH} levels deep, or contains itself: nest "
                f"it less"
            )
        if count > MAX_OBJECTS:
            raise UnsavableValue(
                f"the state holds more than {MAX_OBJECTS:,d} values: save them as tensors instead"
            )


def children(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container with their keys or numbers, or None for any other
    value.
    """
    if isinstance(tree, dict):
        # Not tree.items(), which a file may have given another meaning.
        return type(tree).items(tree)
    return enumerate(tree) if isinstance(tree, (list, tuple, deque)) else None


def without_tensors(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the largest parts of a tree that have no Leaf in them."""
    if not any(isinstance(value, Leaf) for _, value in flat(tree)):
        if any(True for _ in flat(tree)):
            yield prefix
    elif not isinstance(tree, Leaf):
        for key, value in children(tree) or ():
            yield from without_tensors(value, f"{prefix}.{key}" if prefix else str(key))


def model_of(contents: Contents) -> str:
    """Return "model" if that is a part of the state, otherwise the dotted name of the
    one module in it, or "" if there is not one.
    """
    if isinstance(contents.tree, dict) and "model" in contents.tree:
        return "model"
    return contents.modules[0] if len(contents.modules) == 1 else ""
