"""Reads tensors out of the bytes of storages that lie in files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptd.agent.convert.contents import Leaf
from ckptd.agent.plan.layout import memory
from ckptd.agent.state.dtypes import copyable
from ckptd.shared.errors import IntegrityError
from ckptd.shared.fs import read_exactly
from ckptd.shared.plan import is_dense


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes [offset, offset + length) of a file, which are those of a storage."""

    path: Path
    offset: int
    length: int


def read_stored(leaves: Iterable[Leaf], places: Mapping[str, StoredBytes]) -> dict[str, torch.Tensor]:
    """Return the tensors of leaves by their names, in new memory. `places` has the place of each storage by its name.

    Raises IntegrityError if a file ends before a tensor does, OSError.
    """
    found, files = dict[str, torch.Tensor](), dict[Path, int]()
    try:
        for leaf in leaves:
            place = places[leaf.storage]
            if place.path not in files:
                files[place.path] = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            length = length_of(leaf) - leaf.offset
            storage = torch.empty(length // leaf.saved.itemsize, dtype=leaf.saved)
            if read_exactly(files[place.path], memory(storage, length), place.offset + leaf.offset) != length:
                raise IntegrityError(f"{place.path} is cut short: {leaf.name} lies beyond its end")
            found[leaf.name] = storage.as_strided(leaf.shape, leaf.stride)
    finally:
        for file in files.values():
            os.close(file)
    return found


def length_of(leaf: Leaf, *, as_written: bool = False) -> int:
    """Return the bytes from the start of its storage to the end of a tensor. `as_written`: of a storage that is converted with it."""
    if 0 in leaf.shape:
        end = leaf.offset // leaf.saved.itemsize
    else:
        end = leaf.offset // leaf.saved.itemsize + 1 + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride, strict=True))
    return end * (leaf.dtype if as_written else leaf.saved).itemsize


def as_stored(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """Return the tensor with its elements in memory in C order, or in that of `stride`, without holes."""
    if stride is None:
        return copyable(tensor).contiguous()
    if tensor.stride() == stride and is_dense(tensor.shape, stride):
        return tensor
    made = torch.empty_strided(tensor.shape, stride, dtype=copyable(tensor).dtype)
    made.copy_(copyable(tensor))
    return made


def fill(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor into a view of the same shape. The elements of an expanded view are one in memory, so that one of them is copied."""
    for dimension, step in enumerate(view.stride()):
        if step == 0 and view.shape[dimension]:
            view, tensor = view.narrow(dimension, 0, 1), tensor.narrow(dimension, 0, 1)
    view.copy_(tensor)
