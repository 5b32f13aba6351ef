"""Tests the count of values that are not finite: each dtype against torch, every place
against a count by hand.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ckptd.shared.formats import non_finite
from ckptd.shared.formats.non_finite import MOST_NAMED, Learned, NonFinite, count_words, runs_of
from ckptd.shared.formats.plan import Alias, Item, Plan, Region
from tests.shared.samples import sample_plan
from tests.support.cases import each_case

INF, NAN = float("inf"), float("nan")
FLOATS = {name: getattr(torch, name) for name in non_finite._WORDS if hasattr(torch, name)}


def plan_of(items: list[Item], aliases: list[Alias] | None = None) -> Plan:
    end = max((item.offset + item.length for item in items), default=0)
    return Plan(
        regions=[Region(0, end, 4)], items=items, aliases=aliases or [], metadata=None, writer={},
        learned=[(0, 100)],
    )  # fmt: skip


def floats(fqn: str, count: int, offset: int, dtype: str = "float32") -> Item:
    return Item(fqn, dtype, (count,), (0,), (count,), None, offset)


def counted(plan: Plan, data: bytes, offset: int = 0) -> dict[int, int]:
    learned = Learned.of(plan)
    assert learned is not None
    return dict(learned.count(memoryview(data), offset))


@each_case("name", [n for n, d in FLOATS.items() if not d.is_complex])
def test_every_dtype_counts_as_torch_does(name: str) -> None:
    dtype = FLOATS[name]
    width, mask, pattern = non_finite._WORDS[name]
    # All words of one or two bytes; of wider ones, all of the upper 16 bits.
    upper = np.arange(1 << min(16, 8 * width), dtype=f"<u{width}")
    words = upper << (8 * width - 16) if width > 2 else upper
    values = torch.frombuffer(bytearray(words.tobytes()), dtype=dtype)
    finite = torch.isfinite(values.to(torch.float64))
    assert count_words(words.tobytes(), width, mask, pattern) == int((~finite).sum()) > 0


@each_case(("width", "mask", "pattern"), sorted(set(non_finite._WORDS.values())))
def test_without_the_extension_numpy_counts_the_same(width: int, mask: int, pattern: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8).tobytes()
    wanted = sum((int(word) & mask) == pattern for word in np.frombuffer(data, f"<u{width}"))
    assert non_finite._count_with_numpy(data, width, mask, pattern) == wanted
    assert count_words(data, width, mask, pattern) == wanted


@each_case("words", [0, 1, 127, 128, 129, 300])
def test_counts_do_not_overflow_and_no_word_is_left_out(words: int) -> None:
    for width in (1, 2, 4, 8):
        assert count_words(b"\xff" * (words * width + width - 1), width, 0x7F, 0x7F) == words


def test_only_words_of_known_sizes_are_counted() -> None:
    with pytest.raises(ValueError, match="1, 2, 4 or 8"):
        count_words(b"1234", 3, 1, 1)


def test_each_tensor_has_its_own_count_wherever_a_chunk_begins() -> None:
    data = np.array([0, NAN, 1, INF, -INF, 2, NAN, 3], dtype="<f4").tobytes()
    plan = plan_of([floats("a", 3, 0), floats("b", 4, 12), floats("c", 1, 28)])
    assert counted(plan, data) == {0: 1, 1: 3}
    for cut in range(0, len(data) + 1, 4):
        learned = Learned.of(plan)
        assert learned is not None
        view = memoryview(data)
        both = learned.count(view[:cut], 0) + learned.count(view[cut:], cut)
        assert both == Counter({0: 1, 1: 3}), cut


def test_complex_numbers_count_by_their_halves() -> None:
    data = np.array([complex(NAN, 1), complex(INF, NAN), 1], dtype="<c8").tobytes()
    plan = plan_of([floats("z", 3, 0, "complex64")])
    assert counted(plan, data) == {0: 3}


def test_integers_and_tensors_that_are_not_learned_do_not_count() -> None:
    data = np.array([NAN, NAN, NAN], dtype="<f4").tobytes()
    items = [floats("i", 1, 0, "int32"), floats("w", 1, 4), floats("mask", 1, 8)]
    plan = msgspec.structs.replace(plan_of(items), learned=[(0, 2)])
    assert counted(plan, data) == {1: 1}


def test_a_plan_that_names_nothing_is_not_counted_and_one_that_names_none_is() -> None:
    assert Learned.of(sample_plan()) is None
    assert counted(msgspec.structs.replace(sample_plan(), learned=[]), bytes(200)) == {}


def test_bytes_with_several_names_count_once() -> None:
    data = np.array([NAN] * 6, dtype="<f4").tobytes()
    tied = Alias("tied", "w", 4, "float32", (2,), (1,))
    assert counted(plan_of([floats("w", 6, 0)], [tied]), data) == {0: 6}
    hidden = floats("~a", 24, 0, "uint8")
    parts = [Alias(n, "~a", at, "float32", (3,), (1,)) for n, at in (("a", 0), ("b", 8))]
    plan = msgspec.structs.replace(plan_of([hidden], parts), learned=[(1, 2)])
    assert counted(plan, data) == {1: 3, 2: 2}
    assert NonFinite.of([counted(plan, data)]).named(plan) == [("a", 3), ("b", 2)]


def test_the_gaps_of_a_strided_alias_count_as_its_own() -> None:
    data = np.array([NAN] * 6, dtype="<f4").tobytes()
    strided = Alias("s", "~s", 0, "float32", (3,), (2,))
    plan = msgspec.structs.replace(
        plan_of([floats("~s", 24, 0, "uint8")], [strided]), learned=[(1, 1)]
    )
    assert counted(plan, data) == {1: 5}


@each_case(
    ("runs", "wanted"),
    [
        ([(0, 1 << 60)], {0: 1, 1: 1}), ([(5, 3)], {}), ([(1, 1), (0, 1)], {1: 1}),
        ([(0, 0)], {}), ([(0, 2)] * 9, {0: 1, 1: 1}), ([(0, 1), (0, 2)], {0: 1, 1: 1}),
    ],
)  # fmt: skip
def test_numbers_from_a_hostile_plan_do_no_harm(
    runs: list[tuple[int, int]], wanted: dict[int, int]
) -> None:
    data = np.array([NAN, NAN], dtype="<f4").tobytes()
    plan = msgspec.structs.replace(plan_of([floats("a", 1, 0), floats("b", 1, 4)]), learned=runs)
    assert counted(plan, data) == wanted
    assert len(list(non_finite._places(plan, runs))) == len(wanted), "each number once"


def test_aliases_that_overlap_share_no_value() -> None:
    """Of another dtype too, and in a hidden item that does not begin at a whole word."""
    data = b"?" + b"\xff" * 20  # NaN in both dtypes
    single = Alias("single", "~a", 0, "float32", (2,), (1,))
    halves = Alias("halves", "~a", 4, "float16", (8,), (1,))
    plan = msgspec.structs.replace(
        plan_of([floats("~a", 20, 1, "uint8")], [single, halves]), learned=[(1, 2)]
    )
    assert counted(plan, data) == {1: 2, 2: 6}
    odd = Alias("odd", "~a", 2, "float16", (9,), (1,))
    plan = msgspec.structs.replace(
        plan_of([floats("~a", 20, 1, "uint8")], [single, odd]), learned=[(1, 2)]
    )
    assert counted(plan, data) == {1: 2, 2: 6}
    for cut in range(21):
        whole = [place for place in range(1, 21, 2) if place + 2 <= cut or place >= cut]
        alone = msgspec.structs.replace(
            plan_of([floats("~a", 20, 1, "uint8")], [Alias("h", "~a", 0, "float16", (10,), (1,))]),
            learned=[(1, 1)],
        )
        learned = Learned.of(alone)
        assert learned is not None
        view = memoryview(data)
        both = learned.count(view[:cut], 0) + learned.count(view[cut:], cut)
        assert both[1] == len(whole), cut


class Looked(list[Any]):
    """A list that counts how often a member is looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


def test_only_the_tensors_in_a_piece_are_looked_at() -> None:
    plan = plan_of([floats(f"t{n}", 4, 16 * n) for n in range(10_000)])
    learned = Learned.of(msgspec.structs.replace(plan, learned=[(0, 10_000)]))
    assert learned is not None
    learned._places = Looked(learned._places)
    data = np.array([NAN] * 400, dtype="<f4").tobytes()
    assert learned.count(memoryview(data), 80_000) == Counter(dict.fromkeys(range(5000, 5100), 4))
    assert learned._places.looks < 400


def test_a_part_names_those_that_have_the_most() -> None:
    half = {number: number for number in range(1, 11)}
    rest = {number: number - 1 for number in range(11, 21)}
    found = NonFinite.of([half, rest, dict.fromkeys(range(11, 21), 1)])
    assert (found.values, found.tensors) == (210, 20)
    assert found.most == [(number, number) for number in range(20, 20 - MOST_NAMED, -1)]
    assert NonFinite.of([]) == NonFinite(values=0, tensors=0, most=[])
    assert NonFinite(values=1, tensors=1, most=[(99, 1)]).named(sample_plan()) == []


def test_numbers_become_runs() -> None:
    assert runs_of([]) == []
    assert runs_of([3]) == [(3, 1)]
    assert runs_of([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 1), (7, 2)]
