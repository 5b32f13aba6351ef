"""Checks that the stored shards of a tensor make up the whole tensor: every element is in exactly one of them. Pure.

Replicas may be stored twice, so identical shards count once. Counting elements alone is not enough: two shards that overlap would hide a
hole of the same size, and a reader would hand out memory that nothing was written to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ckptd.shared.errors import IntegrityError
from ckptd.shared.plan import BLOB, Plan

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes of a shard."""

_STEPS = 1 << 23
_STEPS_PER_SHARD = 64


class Effort:
    """A limit on the work that the shards of one checkpoint may cause. A grid of n shards takes n steps for each dimension that is cut."""

    def __init__(self, shards: int) -> None:
        self._left = _STEPS + _STEPS_PER_SHARD * shards

    def spend(self, steps: int) -> None:
        """Raises IntegrityError once the shards have caused too much work."""
        self._left -= steps
        if self._left < 0:
            raise IntegrityError("its shards are too irregular to be checked for holes and overlaps")


def check_cover(name: str, size: Shape, boxes: Iterable[Box], effort: Effort | None = None) -> None:
    """Raise IntegrityError, naming the tensor, unless each element of a tensor of this size lies in exactly one of the boxes.

    Identical boxes count once, and empty boxes do not count.
    """
    wanted = {(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes if 0 not in sizes}
    if wanted == {((0,) * len(size), size)} or (not wanted and 0 in size):
        return
    for offsets, sizes in wanted:
        if not len(offsets) == len(sizes) == len(size) or any(o < 0 or o + s > t for o, s, t in zip(offsets, sizes, size, strict=True)):
            raise IntegrityError(f"{name}: the shard {_shown((offsets, sizes))} lies outside the tensor, which has the size {list(size)}")
    total, there = math.prod(size), sum(math.prod(sizes) for _, sizes in wanted)
    if there < total:
        raise IntegrityError(f"of {name} only {there} of {total} elements are there")
    try:
        pair = _overlap(size, list(wanted), effort or Effort(len(wanted)))
    except IntegrityError as error:
        raise IntegrityError(f"{name}: {error}") from None
    if pair is not None:
        one, other = sorted(pair)
        raise IntegrityError(f"{name}: the shards {_shown(one)} and {_shown(other)} overlap; each element belongs to one shard")
    # Boxes inside the tensor that do not overlap and hold at least as many elements as the tensor are all of the tensor.


class Shards:
    """Gathers the shards of all tensors of a checkpoint, part by part. `check` then looks for holes and overlaps."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Shape, set[Box]]] = {}

    def add(self, plan: Plan) -> None:
        """Add the shards of one part. Raises IntegrityError for a tensor that has another size in an earlier part."""
        for item in plan.items:
            if item.dtype == BLOB:
                continue
            size, boxes = self._found.setdefault(item.fqn, (item.size, set()))
            if size != item.size:
                raise two_sizes(item.fqn, size, item.size)
            boxes.add((item.offsets, item.sizes))

    def check(self) -> None:
        """Raise IntegrityError for the first tensor that is not whole."""
        check_all(self._found)


def check_all(tensors: Mapping[str, tuple[Shape, set[Box]]]) -> None:
    """Raise IntegrityError for the first of these tensors, given by name with its size and its shards, that is not whole."""
    effort = Effort(sum(len(boxes) for _, boxes in tensors.values()))
    for name, (size, boxes) in tensors.items():
        check_cover(name, size, boxes, effort)


def two_sizes(name: str, one: Shape, other: Shape) -> IntegrityError:
    """Return the error for a tensor that has two sizes."""
    return IntegrityError(f"{name} has two sizes: {list(other)} and {list(one)}")


def _overlap(size: Shape, boxes: list[Box], effort: Effort) -> tuple[Box, Box] | None:
    """Return two boxes that have an element in common, or None.

    Boxes are split where no box crosses a plane, dimension after dimension: boxes on different sides cannot overlap. A grid falls apart
    into single boxes at once. Boxes that no plane separates are compared with each other.
    """
    cut = [d for d in range(len(size)) if any(sizes[d] != size[d] for _, sizes in boxes)]
    groups = [boxes]
    while groups:
        group = groups.pop()
        if len(group) == 1:
            continue
        for dimension in cut:
            effort.spend(len(group))
            parts = _split(group, dimension)
            if len(parts) > 1:
                groups.extend(parts)
                break
        else:
            pair = _sweep(group, cut, effort)
            if pair is not None:
                return pair
    return None


def _split(boxes: list[Box], dimension: int) -> list[list[Box]]:
    """Divide boxes by the planes across this dimension that cross none of them."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda b: b[0][dimension]):
        start = box[0][dimension]
        if start >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, start + box[1][dimension])
    return parts


def _sweep(boxes: list[Box], cut: list[int], effort: Effort) -> tuple[Box, Box] | None:
    """Move a plane along the first dimension that is cut, and compare each box with the active ones, which the plane still crosses."""
    first, others = cut[0], cut[1:]
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[0][first]):
        (offsets, sizes), start = box, box[0][first]
        effort.spend(len(active) + 1)
        active = [other for other in active if other[0][first] + other[1][first] > start]
        for other in active:
            if all(offsets[d] < other[0][d] + other[1][d] and other[0][d] < offsets[d] + sizes[d] for d in others):
                return box, other
        active.append(box)
    return None


def _shown(box: Box) -> str:
    return f"{list(box[1])} at {list(box[0])}"
