"""Tests plan documents: sound ones, everything that is not sound, and the chunks of a
packed slot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats.plan import (
    BLOB,
    HIDDEN,
    ITEM_SIZES,
    MIN_CHUNK,
    Alias,
    ChunkRange,
    Described,
    Item,
    Plan,
    Region,
    align_region,
    c_order,
    chunk_ranges,
    element_size,
    is_dense,
    most_chunks,
    origin,
    signature,
    with_values,
)
from tests.shared.samples import WRITER, sample_plan, steady, values_after
from tests.support.cases import each_case

DTYPES = {
    width: [name for name, size in ITEM_SIZES.items() if size == width and name != BLOB]
    for width in (16, 8, 4, 2, 1)
}


def make(
    items: list[Item],
    aliases: list[Alias] | None = None,
    regions: list[Region] | None = None,
    **changes: Any,
) -> Plan:
    """Return a plan with one region of 4096 bytes and 4-byte elements, unless others
    are given.
    """
    return Plan(
        regions=regions or [Region(0, 4096, 4)],
        items=items,
        aliases=aliases or [],
        metadata=None,
        writer=WRITER,
        **changes,
    )


def item(fqn: str = "w", offset: int = 0, sizes: tuple[int, ...] = (4,), **changes: Any) -> Item:
    fields: dict[str, Any] = {
        "dtype": "float32",
        "size": sizes,
        "offsets": (0,) * len(sizes),
        "stride": None,
        **changes,
    }
    return Item(fqn=fqn, sizes=sizes, offset=offset, **fields)


def alias(
    fqn: str = "a",
    base: str = "w",
    offset: int = 0,
    size: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
    dtype: str = "float32",
) -> Alias:
    return Alias(fqn, base, offset, dtype, size, stride)


SOUND = {
    "nothing": Plan(regions=[], items=[], aliases=[], metadata=None, writer={}),
    "sample": sample_plan(),
    "a scalar": make([item(sizes=())]),
    "an empty tensor": make([item(sizes=(0, 3), offset=99999)]),
    "back to back": make([item("a"), item("b", 16), item("c", 32)]),
    "a gap": make([item("a"), item("b", 1024)]),
    "out of order": make([item("b", 16), item("a")]),
    "full region": make([item(sizes=(1024,))]),
    "a shard": make([item(sizes=(2, 4), size=(8, 4), offsets=(6, 0))]),
    "two shards of one tensor": make([item(size=(8,)), item(offset=16, size=(8,), offsets=(4,))]),
    "transposed": make([item(sizes=(2, 3), stride=(1, 2))]),
    "strides of dimensions of one element": make([item(sizes=(1, 3, 1), stride=(77, 1, 5))]),
    "hidden base": make([item(HIDDEN + "1")], [alias(base=HIDDEN + "1")]),
    "dtypes that are not listed": make(
        [item(dtype="novel32/4", sizes=(8,))], [alias(dtype="novel8/1", offset=3)]
    ),
    "alias of another width": make(
        [item(sizes=(8,))], [alias(size=(2,), dtype="float64", offset=16)]
    ),
    "alias with broadcast": make([item()], [alias(size=(1000, 4), stride=(0, 1))]),
    "empty alias": make([item()], [alias(size=(0, 4), stride=(10**6, 1), offset=16)]),
    "regions of every size": make(
        [], regions=[Region(64 * n, 64, width) for n, width in enumerate((16, 8, 4, 2, 1))]
    ),
    "older writer without a global plan": make([item()], global_plan=b""),
}


@each_case("plan", SOUND.values(), ids=SOUND.keys())
def test_a_sound_plan_round_trips(plan: Plan) -> None:
    document = plan.encode()
    assert Plan.decode(document) == plan
    assert Plan.decode(memoryview(document)).encode() == document


UNSOUND = {
    "region not at 64": (make([], regions=[Region(32, 64, 4)]), "misplaced"),
    "regions overlap": (make([], regions=[Region(0, 128, 4), Region(64, 64, 2)]), "misplaced"),
    "regions out of order": (make([], regions=[Region(64, 64, 4), Region(0, 64, 2)]), "misplaced"),
    "region of part of an element": (make([], regions=[Region(0, 66, 4)]), "misplaced"),
    "item before its region": (make([item()], regions=[Region(64, 64, 4)]), "outside its region"),
    "item behind the last region": (make([item(offset=4096)]), "outside its region"),
    "item without any "
    "region": (Plan(regions=[], items=[item()], aliases=[], metadata=None, writer={}), "outside "
        "its region"),
    "item over the end": (make([item(sizes=(1025,))]), "outside its region"),
    "item over two "
    "regions": (make([item(sizes=(20,))], regions=[Region(0, 64, 4), Region(64, 64, 2)]), "outside "
        "its region"),
    "item in a "
    "gap": (make([item(offset=64)], regions=[Region(0, 64, 4), Region(128, 64, 2)]), "outside its "
        "region"),
    "items overlap": (make([item("a", sizes=(5,)), item("b", 16)]), "overlaps another item"),
    "items at one place": (make([item("a"), item("b")]), "overlaps another item"),
    "item between elements": (make([item(offset=2)]), "outside its region"),
    "item of another width": (make([item(dtype="float64")]), "outside its region"),
    "size and sizes differ in "
    "dimensions": (make([item(sizes=(4,), size=(4, 1))]), "same number of dimensions"),
    "offsets differ in dimensions": (make([item(offsets=())]), "same number of dimensions"),
    "shard outside its tensor": (make([item(size=(8,), offsets=(5,))]), "outside the tensor"),
    "strides with gaps": (make([item(sizes=(2, 2), stride=(4, 1))]), "do not cover"),
    "strides that overlap": (make([item(sizes=(2, 2), stride=(1, 1))]), "do not cover"),
    "strides of other dimensions": (make([item(sizes=(4,), stride=(1, 4))]), "do not cover"),
    "item named twice": (make([item(), item(offset=16)]), "twice"),
    "alias named as an item": (make([item()], [alias("w")]), "twice"),
    "alias named twice": (make([item()], [alias(), alias()]), "twice"),
    "alias of nothing": (make([item()], [alias(base="x")]), "impossible base"),
    "alias of an alias": (make([item()], [alias("a"), alias("b", base="a")]), "impossible base"),
    "alias with too few "
    "strides": (make([item()], [alias(stride=())]), "impossible base, dtype or stride"),
    "alias beyond its base": (make([item()], [alias(size=(5,))]), "beyond its base"),
    "alias beyond its base by offset": (make([item()], [alias(offset=4)]), "beyond its base"),
    "alias beyond its base by "
    "stride": (make([item()], [alias(size=(2,), stride=(4,))]), "beyond its base"),
    "alias between elements": (make([item()], [alias(size=(1,), offset=2)]), "beyond its base"),
    "empty alias beyond its "
    "base": (make([item()], [alias(size=(0,), offset=20)]), "beyond its base"),
}  # fmt: skip


@each_case(("plan", "reason"), UNSOUND.values(), ids=UNSOUND.keys())
def test_an_unsound_plan_is_refused(plan: Plan, reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason) as caught:
        Plan.decode(plan.encode())
    assert not isinstance(caught.value, NewerFormat)


@each_case(
    "plan",
    [
        make([item(dtype="float5")]),
        make([item(dtype="float5/3")]),
        make([item(dtype="float32/8")]),
        make([item(dtype="/4")]),
        make([item()], [alias(dtype="float31")]),
        make([item()], [alias(dtype="float31/32")]),
        make([], version=2),
        make([item(offset=3)], version=9),
    ],
)
def test_a_newer_plan_is_not_called_damaged(plan: Plan) -> None:
    with pytest.raises(NewerFormat):
        Plan.decode(plan.encode())


@pytest.mark.parametrize(
    "regions",
    [
        [Region(64 * n, 64, 1) for n in range(3000)],
        [Region(0, 64, 4), Region(64, 64, 4)],
        [Region(0, 63, 3)],
        [Region(0, 64, 4), Region(64, 64, 8)],
    ],
    ids=["thousands", "two of one size", "of no element size", "smaller elements first"],
)
def test_regions_are_those_that_the_format_has(regions: list[Region]) -> None:
    """Regions have elements of 16, 8, 4, 2 and 1 bytes, in this order.

    `most_chunks`, and so the size of the check area, relies on it.
    """
    with pytest.raises(IntegrityError):
        Plan.decode(make([], regions=regions).encode())


def _document(change: Callable[[dict[str, Any]], object]) -> bytes:
    plain: dict[str, Any] = msgspec.msgpack.decode(sample_plan().encode())
    change(plain)
    return msgspec.msgpack.encode(plain)


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "not msgpack": b"\xc1",
    "cut short": sample_plan().encode()[:-1],
    "more behind it": sample_plan().encode() + b"\0",
    "no map": msgspec.msgpack.encode([1, 2]),
    "no regions": _document(lambda d: d.pop("regions")),
    "no items": _document(lambda d: d.pop("items")),
    "items of another kind": _document(lambda d: d.update(items=[7])),
    "negative offset": _document(lambda d: d["regions"][0].__setitem__(0, -64)),
    "enormous offset": _document(lambda d: d["items"][0].__setitem__(6, 1 << 62)),
    "element size 0": _document(lambda d: d["regions"][0].__setitem__(2, 0)),
    "element size 17": _document(lambda d: d["regions"][0].__setitem__(2, 17)),
    "a float for a size": _document(lambda d: d["items"][0].__setitem__(4, [2.5])),
    "item without a name": _document(lambda d: d["items"][0].__setitem__(0, "")),
    "item with an endless name": _document(lambda d: d["items"][0].__setitem__(0, "x" * 16385)),
    "text that is not UTF-8": sample_plan().encode().replace(b"float32", b"float\xff2"),
    "nested without end": b"\x81\xa8metadata" + b"\x81\xa1a" * 100_000 + b"\xc0",
    "a list of four billion": b"\x81\xa7regions\xdd\xff\xff\xff\xff",
}


@each_case("document", BROKEN.values(), ids=BROKEN.keys())
def test_anything_but_a_plan_is_refused(document: bytes) -> None:
    with pytest.raises(IntegrityError):
        Plan.decode(document)


def test_unknown_keys_are_ignored() -> None:
    assert Plan.decode(_document(lambda d: d.update(novelty=[1, {"x": 2}]))) == sample_plan()


@steady
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(IntegrityError):
        Plan.decode(noise)


def test_a_flipped_bit_gives_a_sound_plan_or_an_integrity_error() -> None:
    """The document has no checksum itself.

    A damage that passes the outer checksums must still not crash the reader.
    """
    sound, whole = 0, sample_plan().encode()
    for bit in range(8 * len(whole)):
        document = bytearray(whole)
        document[bit >> 3] ^= 1 << (bit & 7)
        try:
            plan = Plan.decode(bytes(document))
        except IntegrityError:
            continue
        sound += 1
        assert all(
            i.offset >= 0 and i.offset + i.length <= plan.data_length
            for i in plan.items
            if i.length
        )
    assert 0 < sound < 4 * len(whole), "most bits count, and a bit of a name does not"


# -- sound plans of every shape


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    regions: list[Region] = []
    items: list[Item] = []
    aliases: list[Alias] = []
    offset = 0
    for width in (16, 8, 4, 2, 1):
        start = offset
        for _ in range(draw(st.integers(0, 3))):
            sizes = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
            before = tuple(draw(st.integers(0, 3)) for _ in sizes)
            after = tuple(draw(st.integers(0, 3)) for _ in sizes)
            order = draw(st.permutations(range(len(sizes))))
            stride = _strides(sizes, order) if draw(st.booleans()) else None
            name = f"layer.{len(items)}.{draw(st.text(max_size=5))}"
            dtype = draw(st.sampled_from(DTYPES[width]))
            size = tuple(a + b + c for a, b, c in zip(before, sizes, after, strict=True))
            made = Item(
                name,
                dtype,
                size,
                before,
                sizes,
                stride,
                offset,
                draw(st.sampled_from(["cpu", "cuda"])),
                draw(st.booleans()),
            )
            items.append(made)
            if made.length and draw(st.booleans()):
                aliases.append(
                    Alias(f"alias.{len(aliases)}", name, made.length - width, dtype, (1,), (9,))
                )
            offset += made.length
        if offset > start:
            regions.append(Region(start, offset - start, width))
            offset = align_region(offset)
    numbers = st.lists(st.integers(0, 1 << 40), max_size=3)
    described: st.SearchStrategy[Described] = st.fixed_dictionaries(
        {"dtype": st.text(min_size=1, max_size=3)},
        optional={"size": numbers, "chunks": st.lists(st.lists(numbers, min_size=2, max_size=2))},
    )  # type: ignore[assignment]
    metadata = draw(st.none() | st.dictionaries(st.text(max_size=5), described))
    return Plan(regions, items, aliases, metadata, WRITER, draw(st.binary(max_size=32)))


def _strides(sizes: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    stride, step = [0] * len(sizes), 1
    for dimension in order:
        stride[dimension] = step
        step *= max(sizes[dimension], 1)
    return tuple(stride)


@steady
@given(plans())
def test_every_sound_plan_round_trips(plan: Plan) -> None:
    document = plan.encode()
    again = Plan.decode(document)
    assert again == plan
    assert again.encode() == document


@steady
@given(plans(), st.integers(0, 200_000))
def test_the_check_area_has_room_for_every_chunk(plan: Plan, length: int) -> None:
    values = values_after(plan, length)
    ranges = chunk_ranges(with_values(plan.regions, values), MIN_CHUNK)
    assert len(ranges) <= most_chunks(values[0] + values[1], MIN_CHUNK)


# -- chunks


@steady
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 300), st.sampled_from([1, 2, 4, 8, 16])),
        max_size=6,
    ),
    st.integers(1, 100),
)
def test_chunks_cover_every_byte_of_every_region_exactly_once(
    shapes: list[tuple[int, int, int]], chunk_size: int
) -> None:
    regions, offset = [], 0
    for gap, length, width in shapes:
        regions.append(Region(offset + gap, length, width))
        offset += gap + length
    ranges = chunk_ranges(regions, chunk_size)
    covered = [n for r in ranges for n in range(r.offset, r.offset + r.length)]
    assert covered == [n for r in regions for n in range(r.offset, r.offset + r.length)]
    assert all(0 < r.length <= chunk_size for r in ranges)
    widths = {n: r.element_size for r in regions for n in range(r.offset, r.offset + r.length)}
    assert all(
        {widths[n] for n in range(r.offset, r.offset + r.length)} == {r.element_size}
        for r in ranges
    )


def test_the_last_chunk_of_a_region_is_shorter() -> None:
    assert chunk_ranges([Region(0, 250, 2), Region(256, 0, 4), Region(256, 100, 1)], 100) == [
        ChunkRange(0, 100, 2),
        ChunkRange(100, 100, 2),
        ChunkRange(200, 50, 2),
        ChunkRange(256, 100, 1),
    ]


def test_the_values_document_is_the_last_region() -> None:
    plan = sample_plan()
    values = values_after(plan)
    assert with_values(plan.regions, values) == [*plan.regions, Region(*values, 1)]
    assert values[0] >= plan.data_length


# -- strides


@each_case(
    ("sizes", "stride", "dense"),
    [
        ((), (), True), ((5,), (1,), True), ((5,), (2,), False), ((1,), (9,), True), ((2, 3), (3,
        1), True), ((2, 3), (1, 2), True), ((2, 3), (1, 3), False), ((2, 3), (4, 1), False), ((2,
        3), (1,), False), ((2, 2, 2), (2, 1, 4), True), ((0, 3), (3, 1), True), ((3,), (0,), False),
        ((2, 2), (1, 1), False),
    ],
)  # fmt: skip
def test_is_dense(sizes: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert is_dense(sizes, stride) is dense


@steady
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4))
def test_is_dense_agrees_with_the_addresses_of_all_elements(
    dimensions: list[tuple[int, int]],
) -> None:
    sizes, stride = tuple(size for size, _ in dimensions), tuple(step for _, step in dimensions)
    addresses = sorted(
        sum(i * s for i, s in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, sizes))
    )
    assert is_dense(sizes, stride) == (addresses == list(range(math.prod(sizes))))


def test_signature_is_the_sha256_of_the_document() -> None:
    assert (
        signature(b"abc").hex()
        == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert signature(sample_plan().encode()) != signature(sample_plan(7).encode())


@each_case(
    ("width", "dtypes"),
    [
        (
            1,
            [
                "bool",
                "uint8",
                "int8",
                "float8_e4m3fn",
                "float8_e8m0fnu",
                "float4_e2m1fn_x2",
                "int4",
                "uint7",
                "bits8",
            ],
        ),
        (2, ["int16", "uint16", "float16", "bfloat16"]),
        (4, ["int32", "uint32", "float32", "complex32"]),
        (8, ["int64", "uint64", "float64", "complex64"]),
        (16, ["complex128"]),
    ],
)
def test_element_sizes(width: int, dtypes: list[str]) -> None:
    assert [ITEM_SIZES[name] for name in dtypes] == [width] * len(dtypes)
    assert all(item(dtype=name, sizes=(3, 5)).length == 15 * width for name in dtypes)


@each_case(
    ("name", "size"),
    [
        ("float32", 4), ("float32/4", 4), ("bcomplex32/4", 4), ("novel/16", 16), ("novel/1", 1),
        ("novel/2", 2), ("novel/8", 8), ("novel", 0), ("novel/", 0), ("novel/3", 0), ("novel/04",
        0), ("novel/4/4", 0), ("novel/-4", 0), ("/4", 0), ("float32/8", 0),
    ],
)  # fmt: skip
def test_element_size_of_a_name(name: str, size: int) -> None:
    assert element_size(name) == size


def test_a_dtype_that_is_not_listed_lies_in_the_region_of_its_size() -> None:
    with pytest.raises(IntegrityError, match="outside its region"):
        Plan.decode(make([item(dtype="novel64/8")]).encode())


def test_the_origin_says_who_wrote_a_document_without_what_a_terminal_obeys() -> None:
    who = {"script": "train.py", "host": "node1", "user": "alice"}
    assert origin(who) == "train.py on node1 as alice"
    assert origin({**who, "script": ""}) == "an interactive session on node1 as alice"
    assert origin({"ckptd": "0.1.0"}) == ""
    assert origin({**who, "user": "a\n\x1b[2J"}) == r"'train.py on node1 as a\n\x1b[2J'"


@each_case(
    ("sizes", "strides"),
    [
        ((), ()),
        ((3,), (1,)),
        ((2, 3, 4), (12, 4, 1)),
        ((0, 3), (3, 1)),
        ((2, 0, 3), (3, 3, 1)),
        ((1, 1), (1, 1)),
    ],
)
def test_strides_in_c_order_are_those_of_torch(
    sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    assert c_order(sizes) == strides == torch.empty(sizes).stride()


@pytest.mark.parametrize(
    "change",
    [
        {
            "items": [
                ["w", "float32", [4], [0], [4], None, 0],
                ["odd", "float32", "x", [0], [4], None, 0],
            ]
        },
        {"aliases": [["odd", "w", -1, "float32", [4], [1]]]},
        {"metadata": {"w": {"dtype": "float32"}, "odd": {"dtype": ""}}},
        {"metadata": {"odd": 7}},
    ],
)
def test_a_document_that_cannot_be_read_names_the_tensor(change: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=r"plan document cannot be read: .* \(of 'odd'\)$"):
        Plan.decode(
            msgspec.msgpack.encode(
                {**msgspec.to_builtins(sample_plan(), builtin_types=(bytes,)), **change}
            )
        )


@each_case(
    "change",
    [
        {"items": 7},
        {"metadata": [1]},
        {"regions": 7},
        {"version": "x"},
        {"items": [[]]},
        {"items": [7]},
    ],
)
def test_a_document_that_cannot_be_read_may_name_no_tensor(change: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="plan document cannot be read"):
        Plan.decode(
            msgspec.msgpack.encode(
                {**msgspec.to_builtins(sample_plan(), builtin_types=(bytes,)), **change}
            )
        )


def test_tensors_that_are_described_alike_share_an_entry() -> None:
    entry: Described = {"dtype": "float32", "size": [4], "chunks": [[[0], [4]]]}
    alike = {name: dict(entry) for name in ("a", "b")} | {"c": {**entry, "size": [5]}}
    found = Plan.decode(msgspec.structs.replace(sample_plan(), metadata=alike).encode())
    assert found.metadata == alike
    assert found.metadata["a"] is found.metadata["b"]
