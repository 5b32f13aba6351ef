"""Checks that the stored shards of a tensor make up the whole tensor, with every
element in exactly one shard.

Replicas may be stored twice, so identical shards count once. Counting elements is not
enough, because two shards that overlap would hide a hole of the same size. A reader
would then return memory that was never written. This module does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.plan import BLOB, HIDDEN, Plan
from ckptd.shared.formats.sharding import Box, Shape

_STEPS = 1 << 23
_STEPS_PER_SHARD = 64


class Effort:
    """A limit on the work that the check of one checkpoint's shards may cause.

    The limit grows with the number of shards. A grid of n shards that is cut in d
    dimensions takes at most n * d * (d + 1) / 2 steps. A checkpoint of grids that are
    cut in up to 10 dimensions never exceeds the limit.
    """

    def __init__(self, shards: int) -> None:
        self._left = _STEPS + _STEPS_PER_SHARD * shards
        self.tensors = 1
        """The number of tensors for which each step counts, because they have the same
        shards. What is refused does not depend on how many are checked at once.
        """

    def spend(self, steps: int) -> None:
        """Count `steps` steps of work. Raises IntegrityError if the limit is exceeded."""
        self._left -= steps * self.tensors
        if self._left < 0:
            raise IntegrityError(
                "its shards are too irregular to be checked for holes and overlaps"
            )


def check_cover(name: str, size: Shape, boxes: Iterable[Box], effort: Effort | None = None) -> None:
    """Raise IntegrityError, naming the tensor, unless each element of a tensor of this
    size lies in exactly one of the boxes.

    Identical boxes count once, and boxes without elements do not count. `effort` limits
    the work; if it is None, the limit is that of these boxes alone. If the work exceeds
    the limit, this raises IntegrityError, too.
    """
    wanted = {(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes if 0 not in sizes}
    if wanted == {((0,) * len(size), size)} or (not wanted and 0 in size):
        return
    for offsets, sizes in wanted:
        if not len(offsets) == len(sizes) == len(size) or any(
            o < 0 or o + s > t for o, s, t in zip(offsets, sizes, size, strict=True)
        ):
            raise IntegrityError(
                f"{name}: the shard {_shown((offsets, sizes))} lies outside the tensor, which has "
                f"the size {list(size)}"
            )
    total, there = math.prod(size), sum(math.prod(sizes) for _, sizes in wanted)
    if there < total:
        raise IntegrityError(f"{name}: only {there} of {total} elements are stored")
    try:
        pair = _overlap(size, list(wanted), effort or Effort(len(wanted)))
    except IntegrityError as error:
        raise IntegrityError(f"{name}: {error}") from None
    if pair is not None:
        one, other = sorted(pair)
        raise IntegrityError(
            f"{name}: the shards {_shown(one)} and {_shown(other)} overlap; each element belongs "
            f"to one shard"
        )
    # The boxes lie inside the tensor, do not overlap and hold at least as many elements
    # as the tensor. So they cover all of it.


class Shards:
    """The shards of all tensors of a checkpoint.

    Call `add` for each part, then `check`, which looks for holes and overlaps.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[Shape, set[Box]]] = {}
        self._dtypes: dict[str, str] = {}
        self._stored: dict[str, set[tuple[Box | None, int]]] = {}

    def add(self, plan: Plan, rank: int = 0) -> None:
        """Add the shards of one part.

        Raises IntegrityError if a tensor has another size or dtype here than in an
        earlier part.
        """
        for alias in plan.aliases:
            self._stored.setdefault(alias.fqn, set()).add(
                (((0,) * len(alias.size), alias.size), rank)
            )
        for item in plan.items:
            box = None if item.dtype == BLOB else (item.offsets, item.sizes)
            self._stored.setdefault(item.fqn, set()).add((box, rank))
            if (dtype := self._dtypes.setdefault(item.fqn, item.dtype)) != item.dtype:
                raise two_dtypes(item.fqn, dtype, item.dtype)
            if box is None:
                continue
            size, boxes = self._found.setdefault(item.fqn, (item.size, set()))
            if size != item.size:
                raise two_sizes(item.fqn, size, item.size)
            boxes.add((item.offsets, item.sizes))

    def check_described(self, name: str, places: Iterable[tuple[Box | None, int]]) -> None:
        """Raise IntegrityError if the metadata say that a tensor or blob has shards, at
        these places and ranks, that no part has.
        """
        wanted = set(places)
        if not wanted or not wanted <= self._stored.get(name, set()):
            raise IntegrityError(
                f"{name}: the metadata of the checkpoint name shards that no part has"
            )

    def check_named(self, names: Iterable[str]) -> None:
        """Raise IntegrityError if no part has a tensor or a blob of one of these names."""
        for name in names:
            if name not in self._stored or name.startswith(HIDDEN):
                raise IntegrityError(f"the values name the tensor {name!r}, which no part has")

    def check(self) -> None:
        """Raise IntegrityError for the first tensor that does not pass `check_cover`."""
        check_all(self._found)


def check_all(tensors: Mapping[str, tuple[Shape, set[Box]]]) -> None:
    """Raise IntegrityError for the first of these tensors that does not pass
    `check_cover`.

    `tensors` maps the name of each tensor to its size and its shards.
    """
    check_alike([(name, size, boxes, 1) for name, (size, boxes) in tensors.items()])


def check_alike(tensors: Sequence[tuple[str, Shape, set[Box], int]]) -> None:
    """Do the same for groups of tensors that are alike: each entry has the name of the
    first tensor, the size and the shards of each, and the number of tensors.
    """
    effort = Effort(sum(len(boxes) * count for _, _, boxes, count in tensors))
    for name, size, boxes, effort.tensors in tensors:
        check_cover(name, size, boxes, effort)


def two_sizes(name: str, one: Shape, other: Shape) -> IntegrityError:
    """Return the IntegrityError for a tensor that is stored with two different sizes."""
    return IntegrityError(f"{name} has two sizes: {list(other)} and {list(one)}")


def two_dtypes(name: str, one: str, other: str) -> IntegrityError:
    """Return the IntegrityError for a tensor that is stored with two different dtypes."""
    return IntegrityError(f"{name} has two dtypes: {other} and {one}")


def _overlap(size: Shape, boxes: list[Box], effort: Effort) -> tuple[Box, Box] | None:
    """Return two boxes that have an element in common, or None if there are none.

    Boxes on different sides of a plane that crosses none of them cannot overlap. So the
    boxes are first divided by all such planes, one dimension after another, which
    divides a grid into single boxes quickly. Boxes that no plane separates are compared
    with each other.
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
    """Return the boxes in groups.

    Two groups are on different sides of a plane across this dimension that cuts no box.
    """
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
    """Return two of the boxes that overlap, or None.

    `cut` holds the dimensions in which some box does not span the whole tensor.

    A plane moves along the first of these dimensions. Each box that it reaches is
    compared with the active boxes, which it still crosses.
    """
    first, others = cut[0], cut[1:]
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[0][first]):
        (offsets, sizes), start = box, box[0][first]
        effort.spend(len(active) + 1)
        active = [other for other in active if other[0][first] + other[1][first] > start]
        for other in active:
            if all(
                offsets[d] < other[0][d] + other[1][d] and other[0][d] < offsets[d] + sizes[d]
                for d in others
            ):
                return box, other
        active.append(box)
    return None


def _shown(box: Box) -> str:
    return f"{list(box[1])} at {list(box[0])}"
