"""Holds the contents of a checkpoint that is converted: its state as plain containers, and its tensors, read when they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckptd.agent.read.loader import materialize
from ckptd.agent.read.sources import Opened
from ckptd.agent.state.components import TENSOR_KINDS
from ckptd.agent.state.merge import bare, merge
from ckptd.agent.state.tree import ObjectNode, filled, inside, tensor_names
from ckptd.shared.plan import Alias

BATCH = 256 << 20
"""The bytes of tensors that are read at a time. A larger tensor is read by itself."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in a state that is converted.

    name: in the checkpoint. saved: its dtype there. dtype: the dtype that it is to be written in. shape: in elements. stride: in elements.
    offset: in bytes from the start of its storage. storage: the name of that storage; tensors that share it have the same.
    """

    name: str
    saved: torch.dtype
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes when it is written."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def is_tied_to(self, other: Leaf) -> bool:
        """Return True if both are the same elements of one storage, under two names."""
        mine, theirs = ((one.storage, one.offset, one.saved, one.shape, one.stride) for one in (self, other))
        return mine == theirs


class Contents:
    """The contents of an open checkpoint.

    tree: the state as `Checkpoint.load` returns it, with a Leaf in place of each tensor. modules: the dotted names of the modules in it.
    user_content: as it was saved.
    """

    def __init__(self, opened: Opened) -> None:
        """Raises IntegrityError, OSError; NotFound for an enum whose class is not imported, or a dtype that this torch does not have."""
        self._saved = opened.saved
        merged = merge([opened.document(rank)["state"] for rank in range(len(opened.sources))])
        tree = bare(merged)
        apart = sorted({name for node in _taken_apart(tree) for name in tensor_names(node)})
        whole = materialize(self._saved, apart)  # of sparse tensors and wrapper subclasses, which are made from their parts here
        self.tree: Any = filled(tree, lambda name: whole[name] if name in whole else self._leaf(name))
        self.modules = list(_modules(merged))
        self.user_content = opened.user_content

    def _leaf(self, name: str) -> Leaf:
        described, dtype = self._saved.describe(name), self._saved.dtype(name)
        size = tuple(described.size)
        if isinstance(described, Alias):
            return Leaf(name, dtype, dtype, size, tuple(described.stride), described.offset, described.base)
        stride = self._saved.shards[name][0].stride if self._saved.shard_of_whole(name) else torch.empty(size, device="meta").stride()
        return Leaf(name, dtype, dtype, size, tuple(stride), 0, name)

    def read(self, leaves: Iterable[Leaf]) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """Yield each leaf with its tensor on the CPU, verified, in the dtype of the leaf.

        Up to `BATCH` bytes of tensors are read together, because a chunk may hold many. Raises IntegrityError, OSError.
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
        found = materialize(self._saved, [leaf.name for leaf in batch])
        for leaf in batch:
            yield leaf, found[leaf.name].detach().to(leaf.dtype)


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in nested dicts, lists and tuples, with its dotted name. A Leaf and any other value is not looked into."""
    children = _children(tree)
    if children is None:
        yield prefix, tree
    else:
        for key, value in children:
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def _children(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container with their keys or numbers, or None for any other value."""
    if isinstance(tree, dict):
        return tree.items()
    return enumerate(tree) if isinstance(tree, (list, tuple, deque)) else None


def without_tensors(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the largest parts of a tree that have no Leaf in them."""
    if not any(isinstance(value, Leaf) for _, value in flat(tree)):
        if any(True for _ in flat(tree)):
            yield prefix
    elif not isinstance(tree, Leaf):
        for key, value in _children(tree) or ():
            yield from without_tensors(value, f"{prefix}.{key}" if prefix else str(key))


def _taken_apart(tree: Any) -> Iterator[Any]:
    """Yield the nodes of a bare tree that are made from several tensors, such as a sparse tensor."""
    if isinstance(tree, ObjectNode) and tree.kind in TENSOR_KINDS:
        yield tree
    else:
        for value in inside(tree) or ():
            yield from _taken_apart(value)


def _modules(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, ObjectNode):
        if tree.kind == "module":
            yield prefix
        else:
            yield from _modules(tree.tree, prefix)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _modules(value, f"{prefix}.{key}" if prefix else str(key))
