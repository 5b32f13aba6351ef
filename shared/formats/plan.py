"""The plan document, which describes a packed slot: its regions, items and aliases, and
its chunks (FORMAT.md, section 3).

A plan comes from a trainer or a file and is not trusted. So `Plan.decode` checks that
every item lies inside a region, that its length follows from its shape, and that no two
items overlap. This module does no I/O.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, TypedDict

import msgspec

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats.bounds import MAX_DIMENSIONS, check_msgpack
from ckptd.shared.formats.sharding import Mesh, MeshRank, Rule
from ckptd.shared.system.collector import paused_collector

PLAN_VERSION = 1
REGION_ALIGN = 64  # bytes: a cache line, and enough for any SIMD load
MIN_CHUNK, DEFAULT_CHUNK, MAX_CHUNK = 64 << 10, 8 << 20, 16 << 20
MAX_DOCUMENT = 256 << 20
HIDDEN = "~"
BLOB = "bytes"
"""The dtype of an item that is not a tensor."""
VALUES_ELEMENT_SIZE = 1
ELEMENT_SIZES = (16, 8, 4, 2, 1)

ITEM_SIZES: dict[str, int] = {
    **dict.fromkeys(
        [
            "bool",
            "uint8",
            "int8",
            "bits8",
            "bits1x8",
            "bits2x4",
            "bits4x2",
            "float4_e2m1fn_x2",
            BLOB,
        ],
        1,
    ),
    **dict.fromkeys(
        ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"], 1
    ),
    **dict.fromkeys([f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)], 1),
    **dict.fromkeys(["uint16", "int16", "bits16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["uint32", "int32", "float32", "complex32"], 4),
    **dict.fromkeys(["uint64", "int64", "float64", "complex64"], 8),
    "complex128": 16,
}
"""The size of one element in bytes, by the name of the dtype in torch. A dtype that is
missing here is saved with its size in its name.
"""
_STATED_SIZES = {str(size): size for size in ELEMENT_SIZES}

MOST_ELEMENTS = 1 << 62
"""The number of elements of a tensor is less than this. The same holds for the product
of its dimensions without those of size 0.
"""
MAX_ITEMS = 1 << 20
"""The most items of one part, and the most aliases."""
MAX_CHUNKS = 1 << 22
"""The most chunks of one part. With chunks of 8 MiB this is 32 TiB."""
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
BoundedShape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
Numbers = Annotated[list[Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]
Device = Annotated[str, msgspec.Meta(max_length=64)]
Writer = Annotated[
    dict[str, Annotated[str, msgspec.Meta(max_length=1024)]], msgspec.Meta(max_length=64)
]
"""The versions of the programs that wrote a document, by the name of the program, and
who ran them: `script`, `path`, `host` and `user`; and about the run: `commit`, `command`,
`settings`, `wandb` and `mlflow`.
"""
RUN_FACTS = ("commit", "command", "settings", "wandb", "mlflow")
"""The names of what a `Writer` tells about its run."""
MAX_TEXT = 16384  # characters in the name of an item or alias
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]


def origin(writer: Writer) -> str:
    """Return who has written a document, like "train.py on node1 as alice", or "" for a
    document of a version that did not say.
    """
    if "host" not in writer:
        return ""
    said = (
        f"{writer.get('script') or 'an interactive session'} on {writer['host']} as "
        f"{writer.get('user', '')}"
    )
    return said if said.isprintable() else ascii(said)  # it comes from a file, and goes into a log


def element_size(dtype: str) -> int:
    """Return the size of one element in bytes, or 0 if the name of the dtype does not
    tell it.

    The name of a dtype that ITEM_SIZES does not list ends in its size, as in
    "bcomplex32/4".
    """
    if size := ITEM_SIZES.get(dtype):
        return size
    name, _, stated = dtype.partition("/")
    size = _STATED_SIZES.get(stated, 0)
    return size if name and ITEM_SIZES.get(name, size) == size else 0


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A range of the packed slot whose items all have elements of one size.

    All three values are in bytes.
    """

    offset: Size
    length: Size
    element_size: Annotated[int, msgspec.Meta(ge=1, le=16)]


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor shard, as in DCP's `WriteItem`, and the place of its bytes in the
    packed slot. A blob is an item, too.

    fqn: the fully qualified name in the state. dtype: the name of the dtype in torch,
    or BLOB. `element_size` explains the names of dtypes that ITEM_SIZES does not list.
    size: the size of the whole tensor, in elements. offsets, sizes: the place of the
    shard in the tensor, in elements. stride: the strides of the shard in the slot, in
    elements, or None if it is contiguous in C order. offset: the offset of its first
    byte in the packed slot, in bytes. device: the type of the device that it was copied
    from, such as "cuda". requires_grad: as in torch.
    """

    fqn: Text
    dtype: Text
    size: BoundedShape
    offsets: BoundedShape
    sizes: BoundedShape
    stride: BoundedShape | None
    offset: Size
    device: Device = "cpu"
    requires_grad: bool = False

    @property
    def length(self) -> int:
        return math.prod(self.sizes) * element_size(self.dtype)

    def checked(self) -> tuple[int, int]:
        """Return the size of an element, and the length, in bytes.

        Raises NewerFormat for an unknown dtype, IntegrityError for a shard that cannot be.
        """
        width, size, sizes = element_size(self.dtype), self.size, self.sizes
        if not width:
            raise NewerFormat(
                f"item {self.fqn!r} has the unknown dtype {self.dtype!r}: read it with a newer "
                f"ckptd"
            )
        check_elements(self.fqn, size)
        if not len(size) == len(self.offsets) == len(sizes):
            raise IntegrityError(
                f"item {self.fqn!r}: its size, offsets and sizes must have the same number of "
                f"dimensions"
            )
        if any(o + s > t for o, s, t in zip(self.offsets, sizes, size, strict=True)):
            raise IntegrityError(f"item {self.fqn!r}: its shard lies outside the tensor")
        if self.stride is not None and not is_dense(sizes, self.stride):
            raise IntegrityError(f"item {self.fqn!r}: its strides do not cover its bytes")
        return width, math.prod(sizes) * width


class Alias(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that shares the storage of the item named `base`.

    `offset` is in bytes from the first byte of that item.
    """

    fqn: Text
    base: Text
    offset: Size
    dtype: Text
    size: BoundedShape
    stride: BoundedShape
    requires_grad: bool = False
    device: Device = "cpu"

    @property
    def extent(self) -> int:
        """The number of elements from its first to its last one."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


class Described(TypedDict, total=False):
    """The entry of one tensor in the metadata of DCP, or of one blob, which has neither
    size nor shards.

    chunks: [offsets, sizes] of each of its shards. ranks: the rank that stores each of
    them; left out if that is always rank 0. A tensor that is divided by a rule has
    `rule` instead of both.
    """

    dtype: Text
    size: Numbers
    chunks: list[Annotated[list[Numbers], msgspec.Meta(min_length=2, max_length=2)]]
    ranks: list[MeshRank]
    rule: Rule


LearnedRuns = Annotated[list[tuple[Size, Size]], msgspec.Meta(max_length=1 << 20)]
Meshes = Annotated[list[Mesh], msgspec.Meta(max_length=1 << 20)]


class Plan(msgspec.Struct, frozen=True):
    regions: Annotated[list[Region], msgspec.Meta(max_length=len(ELEMENT_SIZES))]
    items: Annotated[list[Item], msgspec.Meta(max_length=MAX_ITEMS)]
    aliases: Annotated[list[Alias], msgspec.Meta(max_length=MAX_ITEMS)]
    metadata: dict[str, Described] | None
    writer: Writer
    global_plan: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    version: int = PLAN_VERSION
    meshes: Meshes | msgspec.UnsetType = msgspec.UNSET
    """The meshes of the rules in `metadata`. Left out if there are none."""
    learned: LearnedRuns | msgspec.UnsetType = msgspec.UNSET
    """[first, count] of each run of items, and after them of aliases, that are parameters
    or state of an optimizer. Left out if the writer does not know them.
    """

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Plan:
        """Return the plan in a plan document.

        Raises IntegrityError if the document is not a consistent plan. Raises
        NewerFormat if it has a newer version or an unknown dtype.
        """
        check_msgpack(data, "plan document")
        with paused_collector():
            try:
                plan = _DECODER.decode(data).plan()
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise IntegrityError(
                    f"plan document cannot be read: {error}{_culprit(data)}"
                ) from None
            if plan.version > PLAN_VERSION:
                raise NewerFormat(
                    f"plan document has version {plan.version}; this ckptd reads up to "
                    f"{PLAN_VERSION}: upgrade it"
                )
            plan._check()
        return plan

    @property
    def data_length(self) -> int:
        """The end of the last region, in bytes from the start of the packed slot.

        The values region starts there or later.
        """
        return max((r.offset + r.length for r in self.regions), default=0)

    def _check(self) -> None:
        end = 0
        widths = [region.element_size for region in self.regions]
        if widths != [width for width in ELEMENT_SIZES if width in widths]:
            raise IntegrityError(
                f"plan document has regions with element sizes {widths[:8]}; expected some of "
                f"{ELEMENT_SIZES}, in this order"
            )
        for region in self.regions:
            if (
                region.offset % REGION_ALIGN
                or region.offset < end
                or region.length % region.element_size
            ):
                raise IntegrityError(f"plan document: region at {region.offset} is misplaced")
            end = region.offset + region.length
        regions = iter(self.regions)
        current = next(regions, None)
        position = current.offset if current else 0
        # Many items have few shapes. What does not depend on the place is checked once.
        known: dict[tuple[object, ...], tuple[int, int]] = {}
        for item in sorted(self.items, key=attrgetter("offset")):
            kind = item.dtype, item.size, item.offsets, item.sizes, item.stride
            if (found := known.get(kind)) is None:
                found = known[kind] = item.checked()
            (width, length), offset = found, item.offset
            end = offset + length
            if end == offset:
                continue
            while current is not None and offset >= current.offset + current.length:
                current = next(regions, None)
                position = current.offset if current else 0
            if (
                current is None
                or offset < position
                or offset % width
                or end > current.offset + current.length
                or width != current.element_size
            ):
                raise IntegrityError(
                    f"item {item.fqn!r} lies outside its region or overlaps another item"
                )
            position = end
        named = [i.fqn for i in self.items if not any(i.offsets)] + [a.fqn for a in self.aliases]
        if len(set(named)) < len(named):
            twice = next(name for name, count in Counter(named).items() if count > 1)
            raise IntegrityError(f"plan document names {twice!r} twice")
        bases = {item.fqn: item for item in self.items} if self.aliases else {}
        several = Counter(item.fqn for item in self.items) if self.aliases else {}
        for alias in self.aliases:
            width = element_size(alias.dtype)
            if not width:
                raise NewerFormat(
                    f"alias {alias.fqn!r} has the unknown dtype {alias.dtype!r}: read it with a "
                    f"newer ckptd"
                )
            check_elements(alias.fqn, alias.size)
            base = bases.get(alias.base)
            if (
                base is None
                or base.dtype == BLOB
                or several[alias.base] > 1
                or len(alias.size) != len(alias.stride)
            ):
                raise IntegrityError(f"alias {alias.fqn!r} has an impossible base, dtype or stride")
            if alias.offset + alias.extent * width > base.length or alias.offset % width:
                raise IntegrityError(f"alias {alias.fqn!r} reaches beyond its base {alias.base!r}")


class _Packed(Plan, frozen=True, kw_only=True):
    """A plan whose metadata have not been decoded."""

    metadata: dict[str, msgspec.Raw] | None  # type: ignore[assignment]

    def plan(self) -> Plan:
        """Return the plan.

        Its metadata are those of `decode_described`. Raises DecodeError.
        """
        fields = msgspec.structs.asdict(self)
        if self.metadata is not None:
            fields["metadata"] = dict(
                zip(self.metadata, decode_described(self.metadata.values()), strict=True)
            )
        return Plan(**fields)


def decode_described(packed: Iterable[msgspec.Raw]) -> list[Described]:
    """Return the entries of the metadata of tensors.

    Tensors that are described by the same bytes share one entry, which is decoded once:
    many tensors have few shapes. Raises DecodeError.
    """
    entries = list(map(bytes, packed))
    known = {entry: _DESCRIBED_DECODER.decode(entry) for entry in dict.fromkeys(entries)}
    return list(map(known.__getitem__, entries))


_DECODER = msgspec.msgpack.Decoder(_Packed)
_MOST_SEARCHED = 4 << 20
"""The most bytes of a plan document in which the tensor is looked for that an error is
about.
"""


class _Loose(msgspec.Struct):
    """A plan document whose entries are not decoded yet."""

    items: list[msgspec.Raw] = []
    aliases: list[msgspec.Raw] = []
    metadata: dict[str, msgspec.Raw] | None = None


_LOOSE_DECODER = msgspec.msgpack.Decoder(_Loose)
_ITEM_DECODER, _ALIAS_DECODER = msgspec.msgpack.Decoder(Item), msgspec.msgpack.Decoder(Alias)
_DESCRIBED_DECODER = msgspec.msgpack.Decoder(Described)


def _culprit(data: bytes | memoryview) -> str:
    """Return words that name the tensor which a plan document describes wrongly, or ""
    if none can be named.
    """
    try:
        loose = _LOOSE_DECODER.decode(data if len(data) <= _MOST_SEARCHED else b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    described = (loose.metadata or {}).items()
    found: Iterator[tuple[str | msgspec.Raw, msgspec.Raw, Callable[[msgspec.Raw], object]]] = chain(
        ((entry, entry, _ITEM_DECODER.decode) for entry in loose.items),
        ((entry, entry, _ALIAS_DECODER.decode) for entry in loose.aliases),
        ((name, entry, _DESCRIBED_DECODER.decode) for name, entry in described),
    )
    for place, entry, decode in found:
        try:
            decode(entry)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return f" (of {_name_of(place)!r})"
    return ""


def _name_of(place: str | msgspec.Raw) -> str:
    """Return the name of an entry: its key, or the first member of an item or an alias."""
    if isinstance(place, str):
        return place[:200]
    try:
        found = msgspec.msgpack.decode(place)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return str(found[0])[:200] if isinstance(found, list) and found else ""


def check_elements(name: str, size: tuple[int, ...]) -> None:
    """Raise IntegrityError if the dimensions of a tensor, without those of size 0, have
    a product of MOST_ELEMENTS or more.
    """
    if (math.prod(size) or math.prod(filter(None, size))) >= MOST_ELEMENTS:
        raise IntegrityError(
            f"{name!r} has the size {list(size)}; expected fewer than 2^62 elements"
        )


def c_order(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a shard of these sizes in C order, in elements.

    As in torch, a dimension of size 0 counts as one of size 1.
    """
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def is_dense(sizes: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if elements at these strides fill a range of memory without gap or
    overlap, as in C order or a permutation of it.

    A shard without elements counts as dense. Return False if the number of strides is
    not that of the sizes.
    """
    if len(sizes) != len(stride):
        return False
    expected = 1
    for step, size in sorted((st, sz) for sz, st in zip(sizes, stride, strict=True) if sz != 1):
        if step != expected:
            return 0 in sizes
        expected *= size
    return True


def align_region(offset: int) -> int:
    return -(-offset // REGION_ALIGN) * REGION_ALIGN


def signature(plan_document: bytes | memoryview) -> bytes:
    """Return the signature of a plan document: its sha256, 32 bytes.

    Signatures are equal if and only if the plan documents are.
    """
    return hashlib.sha256(plan_document).digest()


def with_values(regions: list[Region], values: tuple[int, int]) -> list[Region]:
    """Return all regions of a packed slot: those of the plan, then the values document,
    whose offset and length `values` holds.
    """
    return [*regions, Region(values[0], values[1], VALUES_ELEMENT_SIZE)]


class ChunkRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chunk of the packed slot before it is encoded: a range inside one region.

    All three values are in bytes.
    """

    offset: int
    length: int
    element_size: int


def chunk_ranges(regions: list[Region], chunk_size: int) -> list[ChunkRange]:
    """Return the chunks of a packed slot, in order.

    Together they cover every region exactly once.

    Raises IntegrityError, before any chunk is made, if there would be more than
    MAX_CHUNKS.
    """
    if (count := sum(-(-region.length // chunk_size) for region in regions)) > MAX_CHUNKS:
        raise IntegrityError(
            f"the packed slot would have {count:,d} chunks of {chunk_size} bytes; a part has at "
            f"most {MAX_CHUNKS:,d}"
        )
    return [
        ChunkRange(
            start, min(chunk_size, region.offset + region.length - start), region.element_size
        )
        for region in regions
        for start in range(region.offset, region.offset + region.length, chunk_size)
    ]


def most_chunks(capacity: int, chunk_size: int) -> int:
    """Return an upper bound for the number of chunks in a slot of `capacity` bytes.

    It allows for a short last chunk in every region.
    """
    return -(-capacity // chunk_size) + 8
