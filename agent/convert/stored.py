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
from ckptd.shared.formats.plan import ELEMENT_SIZES, is_dense
from ckptd.shared.system.fs import read_exactly

_WIDEST = max(ELEMENT_SIZES)


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes [offset, offset + length) of a file, which are those of a storage."""

    path: Path
    offset: int
    length: int


def read_stored(
    leaves: Iterable[Leaf], places: Mapping[str, StoredBytes]
) -> dict[str, torch.Tensor]:
    """Return the tensors of leaves by their names, in new memory.

    Those of one storage share it.

    `places` has the place of each storage by its name. Between the tensors of one
    storage, bytes that none of them has are read, too. Raises IntegrityError if a file
    ends before a tensor does, OSError.
    """
    by_storage: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_storage.setdefault(leaf.storage, []).append(leaf)
    found, files = dict[str, torch.Tensor](), dict[Path, int]()
    try:
        for storage, members in by_storage.items():
            place = places[storage]
            if place.path not in files:
                files[place.path] = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            start = min(leaf.offset for leaf in members) // _WIDEST * _WIDEST
            length = max(0, max(map(length_of, members)) - start)
            raw = torch.empty(length, dtype=torch.uint8, device="cpu")
            if read_exactly(files[place.path], memory(raw, length), place.offset + start) != length:
                raise IntegrityError(
                    f"{place.path} is cut short: {members[0].name} lies beyond its end"
                )
            for leaf in members:
                view = torch.empty(0, dtype=leaf.saved, device="cpu")
                offset = 0 if 0 in leaf.shape else (leaf.offset - start) // leaf.saved.itemsize
                found[leaf.name] = view.set_(raw.untyped_storage(), offset, leaf.shape, leaf.stride)
    finally:
        for file in files.values():
            os.close(file)
    return found


def length_of(leaf: Leaf, *, as_written: bool = False) -> int:
    """Return the bytes from the start of its storage to the end of a tensor.

    `as_written`: of a storage that is converted with it.
    """
    end = leaf.offset // leaf.saved.itemsize
    if 0 not in leaf.shape:
        end += 1 + sum(
            (size - 1) * step for size, step in zip(leaf.shape, leaf.stride, strict=True)
        )
    return end * (leaf.dtype if as_written else leaf.saved).itemsize


def as_stored(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """Return the tensor with its elements in memory in C order, or in that of `stride`,
    without holes.
    """
    if stride is None:
        return copyable(tensor).contiguous()
    if tensor.stride() == stride and is_dense(tensor.shape, stride):
        return tensor
    made = torch.empty_strided(tensor.shape, stride, device="cpu", dtype=copyable(tensor).dtype)
    made.copy_(copyable(tensor))
    return made


def fill(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor into a view of the same shape.

    The elements of an expanded view are one in memory, so that one of them is copied.
    """
    for dimension, step in enumerate(view.stride()):
        if step == 0 and view.shape[dimension]:
            view, tensor = view.narrow(dimension, 0, 1), tensor.narrow(dimension, 0, 1)
    view.copy_(tensor)
