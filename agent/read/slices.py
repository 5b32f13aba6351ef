"""Reads a slice of a saved tensor from the chunks that hold it.

If the slice cuts a stored shard into very many pieces, the chunks between these pieces
are read too.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch

from ckptd.agent.plan.layout import memory
from ckptd.agent.read.loader import copy_any
from ckptd.agent.read.saved import Saved
from ckptd.agent.state.dtypes import dtype_of
from ckptd.shared.errors import IntegrityError, InvalidRequest
from ckptd.shared.formats.part import ChunkSource
from ckptd.shared.formats.plan import Alias
from ckptd.shared.formats.scatter import ReadTarget, scatter

Index = SupportsIndex | slice
_SPANS = 16_384
"""The most byte ranges that one stored shard is read in. Reading more ranges takes
longer than reading the bytes between them.
"""


@dataclass(frozen=True, slots=True)
class _Block:
    """A stored box of a tensor: a shard, or an alias.

    offset: of the box's first element in the packed slot of `source`, in bytes. stride:
    in elements. origin: the index in the tensor at which the box begins. sizes: of the
    box, in elements.
    """

    source: ChunkSource
    offset: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    origin: tuple[int, ...]
    sizes: tuple[int, ...]


def read_slice(
    saved: Saved,
    name: str,
    index: Sequence[Index],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `tensor[index]` of a saved tensor, on `device` and in `dtype`, or in the
    saved dtype if that is None.

    Dimensions beyond the length of `index` are read whole. Raises NotFound;
    InvalidRequest for an index that the tensor does not have; IntegrityError; OSError.
    """
    own = saved.dtype(name)
    saved.check_whole(name)
    ranges = _ranges(name, index, tuple(saved.describe(name).size))
    made = torch.empty([len(wanted) for wanted in ranges], dtype=dtype or own, device=device)
    filled = 0
    for block in _blocks(saved, name):
        inside = [
            _inside(wanted, begin, size)
            for wanted, begin, size in zip(ranges, block.origin, block.sizes, strict=True)
        ]
        if all(inside):
            box = [range(wanted[ours.start] - begin, wanted[ours.stop - 1] - begin + 1, wanted.step)
                   for wanted, ours, begin in zip(ranges, inside, block.origin,
                   strict=True)]  # fmt: skip
            targets, stored = _read(block, box)
            scatter(block.source, targets)
            copy_any(made[tuple(slice(ours.start, ours.stop) for ours in inside)], stored)
            filled += stored.numel()
    if filled != made.numel():
        raise IntegrityError(f"{name}: only {filled} of {made.numel()} elements are stored")
    numbers = [n for n, entry in enumerate(index) if not isinstance(entry, slice)]
    return made.reshape([len(wanted) for n, wanted in enumerate(ranges) if n not in numbers])


def _inside(wanted: range, begin: int, size: int) -> range:
    """Return the positions in `wanted` of the indices that lie in the `size` elements
    from `begin` on.
    """
    first = max(0, -((wanted.start - begin) // wanted.step))
    return range(
        first, max(first, min(len(wanted), -((wanted.start - begin - size) // wanted.step)))
    )


def _blocks(saved: Saved, name: str) -> Iterator[_Block]:
    if isinstance(saved.describe(name), Alias):
        shard, alias = saved.aliases[name]
        yield _Block(
            shard.source,
            shard.item.offset + alias.offset,
            dtype_of(alias.dtype),
            alias.stride,
            (0,) * len(alias.size),
            alias.size,
        )
        return
    # Replicas of a shard are read once.
    for shard in {(s.item.offsets, s.item.sizes): s for s in saved.shards[name]}.values():
        item = shard.item
        yield _Block(
            shard.source, item.offset, dtype_of(item.dtype), shard.stride, item.offsets, item.sizes
        )


def _read(block: _Block, box: list[range]) -> tuple[list[ReadTarget], torch.Tensor]:
    """Return the targets that read a box of the block, and the box as a view of the
    buffer that the targets fill.

    box: the wanted indices of each dimension, relative to the block. Each target is a
    byte range without gaps, unless that would take more than `_SPANS` targets.
    """
    sizes = [len(wanted) for wanted in box]
    steps = [wanted.step * stride for wanted, stride in zip(box, block.stride, strict=True)]
    first = sum(wanted.start * stride for wanted, stride in zip(box, block.stride, strict=True))
    order = sorted(
        (n for n in range(len(box)) if sizes[n] > 1), key=lambda n: steps[n], reverse=True
    )
    outer: list[int] = []

    def span() -> int:
        """Return the number of elements that one range holds, from its first to its
        last, gaps included.
        """
        return 1 + sum((sizes[n] - 1) * steps[n] for n in order)

    while (
        order
        and span() > math.prod(sizes[n] for n in order)
        and math.prod(sizes[n] for n in [*outer, order[0]]) <= _SPANS
    ):
        outer.append(order.pop(0))
    length, width = span(), block.dtype.itemsize
    corners = list(itertools.product(*(range(sizes[n]) for n in outer)))
    raw = torch.empty(len(corners) * length * width, dtype=torch.uint8, device="cpu")
    view = memory(raw, raw.numel())
    targets = []
    for number, corner in enumerate(corners):
        at = first + sum(i * steps[n] for i, n in zip(corner, outer, strict=True))
        targets.append(
            (
                block.offset + at * width,
                view[number * length * width : (number + 1) * length * width],
            )
        )
    for place, n in enumerate(outer):
        steps[n] = length * math.prod(sizes[m] for m in outer[place + 1 :])
    strides = [step if size > 1 else 1 for step, size in zip(steps, sizes, strict=True)]
    return targets, raw.view(block.dtype).as_strided(sizes, strides)


def _ranges(name: str, index: Sequence[Index], size: tuple[int, ...]) -> list[range]:
    """Return the wanted indices of each dimension.

    Raises InvalidRequest for an index that the tensor does not have.
    """
    if len(index) > len(size):
        raise InvalidRequest(
            f"{name} has {len(size)} dimensions, and {len(index)} slices were given"
        )
    ranges = []
    for dimension, extent in enumerate(size):
        entry = index[dimension] if dimension < len(index) else slice(None)
        try:
            if isinstance(entry, bool):
                raise TypeError
            if isinstance(entry, slice):
                wanted = range(*entry.indices(extent))
                if wanted.step < 1:
                    raise ValueError
                ranges.append(range(wanted.start, wanted.stop, min(wanted.step, max(1, extent))))
                continue
            number = operator.index(entry)
        except (TypeError, ValueError):
            what = f"slice {dimension} of {name} is {entry!r}"
            raise InvalidRequest(
                f"{what}; expected a number, or a slice of numbers with a step of 1 or more"
            ) from None
        if not -extent <= number < extent:
            raise InvalidRequest(
                f"{name} has {extent} elements in dimension {dimension}: there is no element "
                f"{number}"
            )
        ranges.append(range(number % extent, number % extent + 1))
    return ranges
