"""Tests the check that shards make up a tensor, against an oracle that counts every
element, and with shards that are made to cost much.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.coverage import Effort, Shards, check_all, check_cover
from ckptd.shared.formats.plan import BLOB, Item, Plan, Region
from ckptd.shared.formats.sharding import Box, Shape
from tests.shared.samples import WRITER, steady
from tests.support.cases import each_case


def whole(size: Shape, boxes: list[Box]) -> bool:
    try:
        check_cover("w", size, boxes)
    except IntegrityError:
        return False
    return True


def oracle(size: Shape, boxes: list[Box]) -> bool:
    """Count for each element of the tensor how many different boxes hold it.

    Return True if it is one box each.
    """
    times = dict.fromkeys(itertools.product(*map(range, size)), 0)
    for offsets, sizes in set(boxes):
        for element in itertools.product(
            *(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        ):
            times[element] += 1
    return set(times.values()) <= {1}


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """Draw a tensor that is cut into shards again and again.

    Then perhaps one shard is dropped, doubled, moved or made larger.
    """
    size = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    boxes: list[Box] = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 6))):
        if not size:
            break
        number, dimension = (
            draw(st.integers(0, len(boxes) - 1)),
            draw(st.integers(0, len(size) - 1)),
        )
        offsets, sizes = boxes.pop(number)
        at = draw(st.integers(0, sizes[dimension]))
        for start, length in ((0, at), (at, sizes[dimension] - at)):
            boxes.append((
                (*offsets[:dimension], offsets[dimension] + start, *offsets[dimension + 1 :]),
                (*sizes[:dimension], length, *sizes[dimension + 1 :]),
            ))  # fmt: skip
    for change in draw(st.lists(st.sampled_from(["drop", "double", "move"]), max_size=2)):
        number = draw(st.integers(0, len(boxes) - 1))
        if change == "drop" and len(boxes) > 1:
            boxes.pop(number)
        elif change == "double":
            boxes.append(boxes[number])
        else:
            sizes = boxes[number][1]
            boxes[number] = (
                tuple(draw(st.integers(0, t - s)) for t, s in zip(size, sizes, strict=True)),
                sizes,
            )
    return size, draw(st.permutations(boxes))


@st.composite
def any_boxes(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    size = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    boxes: list[Box] = []
    for _ in range(draw(st.integers(1, 7))):
        offsets = tuple(draw(st.integers(0, t)) for t in size)
        boxes.append(
            (
                offsets,
                tuple(draw(st.integers(0, t - o)) for t, o in zip(size, offsets, strict=True)),
            )
        )
    return size, boxes


PINWHEEL: list[Box] = [
    ((0, 0), (1, 2)),
    ((0, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 0), (2, 1)),
    ((1, 1), (1, 1)),
]
"""Five boxes that make a square of 3 by 3 and cannot be separated by a straight cut."""


@steady
@given(cuts() | any_boxes())
@example(((3, 3), PINWHEEL))
@example(((3, 3), PINWHEEL[:-1]))
@example(((3, 3), [*PINWHEEL[:-1], ((0, 1), (1, 1))]))
@example(((), [((), ()), ((), ())]))
@example(((), []))
@example(((0, 4), []))
@example(((4,), [((0,), (3,)), ((2,), (1,))]))
def test_the_check_agrees_with_a_count_of_every_element(case: tuple[Shape, list[Box]]) -> None:
    size, boxes = case
    assert whole(size, boxes) == oracle(size, boxes)


def test_overlaps_that_hide_a_hole_are_named() -> None:
    with pytest.raises(
        IntegrityError,
        match=r"^w: the shards \[4\] at \[0\] and \[4\] at \[2\] overlap; each element belongs to "
        r"one shard$",
    ):
        check_cover("w", (8,), [((0,), (4,)), ((2,), (4,))])
    with pytest.raises(IntegrityError, match=r"^w: only 6 of 8 elements are stored$"):
        check_cover("w", (8,), [((0,), (4,)), ((6,), (2,))])
    with pytest.raises(
        IntegrityError,
        match=r"^w: the shard \[4\] at \[6\] lies outside the tensor, which has the size \[8\]$",
    ):
        check_cover("w", (8,), [((0,), (4,)), ((6,), (4,))])
    with pytest.raises(IntegrityError, match=r"lies outside the tensor"):
        check_cover("w", (8,), [((0, 0), (8, 1))])


@each_case(
    ("counts", "lengths"),
    [
        ((4096,), (3,)),
        ((64, 64), (3, 5)),
        ((1, 4096), (7, 2)),
        ((16, 16, 16), (2, 2, 2)),
        ((4096, 1, 1), (1, 9, 9)),
    ],
)
def test_a_grid_takes_at_most_two_steps_for_each_shard_and_dimension(
    counts: Shape, lengths: Shape
) -> None:
    size = tuple(count * length for count, length in zip(counts, lengths, strict=True))
    boxes = [
        (tuple(n * length for n, length in zip(corner, lengths, strict=True)), lengths)
        for corner in itertools.product(*map(range, counts))
    ]
    effort = Effort(0)
    before = effort._left
    check_cover("w", size, boxes, effort)
    assert before - effort._left <= 2 * len(counts) * len(boxes)
    boxes[-1] = boxes[0][0], boxes[1][1]
    assert not whole(size, boxes)
    assert not whole(size, boxes[:-1])


def strips(count: int) -> tuple[Shape, list[Box]]:
    """Return a forged tensor of four dimensions.

    All its shards cross each other's planes without an overlap, and they leave a hole
    that an overlapping shard would hide.
    """
    size = (count, count + 2, 2, 2)
    boxes: list[Box] = [((0, n, 0, 0), (count, 1, 1, 2)) for n in range(count + 2)]
    boxes += [((n, 0, 1, 0), (1, count + 2, 1, 1)) for n in range(count)]
    boxes += [((n, 0, 1, 1), (1, count + 2, 1, 1)) for n in range(count)]
    return size, boxes


def test_forged_shards_cannot_cost_more_than_the_limit() -> None:
    size, boxes = strips(30)
    assert whole(size, boxes)
    stairs = [((n, n, 0), (2, 2, 1)) for n in range(20_000)]  # each box overlaps the next
    filler = [((0, 0, 1), (20_001, 20_001, 1))]
    assert math.prod(filler[0][1]) + 4 * len(stairs) < 2 * 20_001**2
    with pytest.raises(IntegrityError, match="only"):
        check_cover("w", (20_001, 20_001, 2), stairs + filler)
    effort = Effort(0)
    effort.spend(effort._left)
    with pytest.raises(
        IntegrityError,
        match=r"^w: its shards are too irregular to be checked for holes and overlaps$",
    ):
        check_cover("w", (3, 3), PINWHEEL, effort)


def test_all_tensors_share_one_limit_of_effort() -> None:
    size: Shape = (2, 3000)
    lane: list[Box] = [((0, n), (1, 1)) for n in range(3000)]
    tangled = {
        f"w{n}": (size, {*lane, ((1, 0), (1, 1500)), ((1, 1500), (1, 1500))}) for n in range(3)
    }
    check_all(tangled)


def part(*items: Item) -> Plan:
    return Plan(
        regions=[Region(0, 4096, 4)], items=list(items), aliases=[], metadata=None, writer=WRITER
    )


def shard(offset: int, length: int, size: int = 8, name: str = "w") -> Item:
    return Item(name, "float32", (size,), (offset,), (length,), None, 0)


def test_shards_of_all_parts_count_together() -> None:
    gathered = Shards()
    gathered.add(part(shard(0, 4), Item("blob", BLOB, (9,), (0,), (9,), None, 0)))
    with pytest.raises(IntegrityError, match="w: only 4 of 8 elements are stored"):
        gathered.check()
    gathered.add(part(shard(4, 4), shard(0, 4)))
    gathered.check()
    with pytest.raises(IntegrityError, match=r"w has two sizes: \[9\] and \[8\]"):
        gathered.add(part(shard(0, 9, 9)))
