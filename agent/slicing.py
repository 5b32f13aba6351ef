"""A slice of a saved tensor, from the bytes that hold it: of a chunk that it does not touch nothing is read."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch

from ckptd.agent.loading import Saved, copy_any
from ckptd.agent.planning import dtype_of, memory
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.part import ChunkSource
from ckptd.shared.plan import Alias
from ckptd.shared.scatter import Target, scatter

Index = SupportsIndex | slice
_SPANS = 4096
"""Byte ranges that one stored shard is read in at most: beyond that they take longer than the bytes between them."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes in a source that are a box of a tensor: its first element at `offset` (bytes), `origin` where the box begins in the tensor."""

    source: ChunkSource
    offset: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    origin: tuple[int, ...]
    sizes: tuple[int, ...]


def read_slice(
    saved: Saved, name: str, index: Sequence[Index], *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """What `tensor[index]` would be, on `device` and in `dtype`. An `index` shorter than the tensor's dimensions means all of the rest.

    Raises NotFound, InvalidRequest for an index that the tensor does not have, IntegrityError, OSError.
    """
    described = saved.describe(name)
    starts, lengths, last = _resolve(name, index, tuple(described.size))
    made = torch.empty(lengths, dtype=dtype or dtype_of(described.dtype), device=device)
    targets: dict[int, tuple[ChunkSource, list[Target]]] = {}
    copies = []
    for block in _blocks(saved, name):
        low = [max(start, begin) for start, begin in zip(starts, block.origin, strict=True)]
        high = [
            min(start + length, begin + size) for start, length, begin, size in zip(starts, lengths, block.origin, block.sizes, strict=True)
        ]
        if all(a < b for a, b in zip(low, high, strict=True)):
            box = [b - a for a, b in zip(low, high, strict=True)]
            first = sum((a - begin) * step for a, begin, step in zip(low, block.origin, block.stride, strict=True))
            wanted, stored = _read(block, first, box)
            targets.setdefault(id(block.source), (block.source, []))[1].extend(wanted)
            place = tuple(slice(a - start, b - start) for a, b, start in zip(low, high, starts, strict=True))
            copies.append((made[place], stored))
    for source, wanted in targets.values():
        scatter(source, wanted)
    for target, stored in copies:
        copy_any(target, stored)
    return made[last].contiguous()


def _blocks(saved: Saved, name: str) -> Iterator[_Block]:
    described = saved.describe(name)
    if isinstance(described, Alias):
        shard, alias = saved.aliases[name]
        offset = shard.item.offset + alias.offset
        yield _Block(shard.source, offset, dtype_of(alias.dtype), alias.stride, (0,) * len(alias.size), alias.size)
        return
    for shard in saved.shards[name]:
        item = shard.item
        yield _Block(shard.source, item.offset, dtype_of(item.dtype), shard.stride, item.offsets, item.sizes)


def _read(block: _Block, first: int, box: list[int]) -> tuple[list[Target], torch.Tensor]:
    """Where the bytes of a box go, and the box as a view of them: as few ranges as leave no more than gaps worth reading between them."""
    order = sorted((n for n in range(len(box)) if box[n] > 1), key=lambda n: block.stride[n], reverse=True)
    outer: list[int] = []
    while order and _span(block, box, order) > math.prod(box[n] for n in order):
        if math.prod(box[n] for n in [*outer, order[0]]) > _SPANS:
            break
        outer.append(order.pop(0))
    span = _span(block, box, order)
    width = block.dtype.itemsize
    corners = list(itertools.product(*(range(box[n]) for n in outer)))
    raw = torch.empty(len(corners) * span * width, dtype=torch.uint8)
    view = memory(raw, raw.numel())
    targets = []
    for number, corner in enumerate(corners):
        at = first + sum(i * block.stride[n] for i, n in zip(corner, outer, strict=True))
        targets.append((block.offset + at * width, view[number * span * width : (number + 1) * span * width]))
    stride = list(block.stride)
    for place, n in enumerate(outer):
        stride[n] = span * math.prod(box[m] for m in outer[place + 1 :])
    return targets, raw.view(block.dtype).as_strided(box, stride)


def _span(block: _Block, box: list[int], dimensions: list[int]) -> int:
    """Elements from the first to the last of a box that has these dimensions only."""
    return 1 + sum((box[n] - 1) * block.stride[n] for n in dimensions)


def _resolve(name: str, index: Sequence[Index], size: tuple[int, ...]) -> tuple[list[int], list[int], tuple[int | slice, ...]]:
    """The box to read, and what of it to give: a number takes its dimension away, a step passes elements over."""
    if len(index) > len(size):
        raise InvalidRequest(f"{name} has {len(size)} dimensions, and {len(index)} slices were given")
    starts, lengths, last = [], [], list[int | slice]()
    for dimension, (entry, extent) in enumerate(itertools.zip_longest(index, size, fillvalue=slice(None))):
        assert isinstance(extent, int)
        if isinstance(entry, slice):
            start, stop, step = entry.indices(extent)
            if step < 1:
                raise InvalidRequest(f"slice {dimension} of {name} has the step {step}; expected 1 or more")
            starts.append(start)
            lengths.append(max(0, stop - start))
            last.append(slice(None, None, step))
            continue
        number = operator.index(entry)
        if not -extent <= number < extent:
            raise InvalidRequest(f"{name} has {extent} elements in dimension {dimension}: there is no {number}")
        starts.append(number % extent)
        lengths.append(1)
        last.append(0)
    return starts, lengths, tuple(last)
