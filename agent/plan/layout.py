"""Lists the items that this rank could write, and lays out those that it does write in
its packed slot.

A `Layout` is kept while the structure stays the same: names, dtypes, shapes, strides,
placements, and which tensors share a storage. The tensors themselves are looked up
again at each snapshot, because storages move. Tensors that overlap in one storage are
stored once. If one of them covers all the others, it becomes the item, and the others
become aliases. If none does, the range that they cover together becomes a hidden item,
and all of them become aliases. `shares.py` decides which rank writes which item.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import add, attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec
import torch
from crc32c import crc32c
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from ckptd.agent.link.run_facts import run_facts
from ckptd.agent.link.script import script, script_path, storable
from ckptd.agent.plan.structure import PLAIN, firsts, shard_at
from ckptd.agent.state.dtypes import copyable, dtype_name, dtype_of, sizeless
from ckptd.agent.state.tensor_check import check_tensor
from ckptd.shared import __version__
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.non_finite import runs_of
from ckptd.shared.formats.plan import (
    ELEMENT_SIZES,
    HIDDEN,
    MAX_DOCUMENT,
    MAX_ITEMS,
    MAX_TEXT,
    Alias,
    Item,
    LearnedRuns,
    Plan,
    Region,
    align_region,
    c_order,
    element_size,
    is_dense,
    signature,
)
from ckptd.shared.formats.sharding import Box, Mesh
from ckptd.shared.system import machine
from ckptd.shared.system.collector import paused_collector
from ckptd.shared.system.failpoints import failpoint


class ItemColumns(NamedTuple):
    """The items of a plan in columns: their places in a slot, in bytes, and the dtypes,
    shapes and strides of dense tensors there.

    elsewhere: the numbers of the items whose sources are on accelerators.
    """

    offsets: list[int]
    lengths: list[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    elsewhere: list[int]


@dataclass(frozen=True)
class Layout:
    """A plan and its encoded form: `document` is the encoded `plan`, and `signature` is
    the sha256 of `document`.
    """

    plan: Plan
    document: bytes
    signature: bytes

    @cached_property
    @paused_collector()
    def columns(self) -> ItemColumns:
        items = self.plan.items
        # Many items have few shapes.
        kinds = list(map(attrgetter("dtype", "sizes", "stride"), items))
        known = {
            kind: (
                math.prod(kind[1]) * element_size(kind[0]), dtype_of(kind[0]),
                torch.Size(kind[1]), c_order(kind[1]) if kind[2] is None else kind[2],
            )
            for kind in dict.fromkeys(kinds)
        }  # fmt: skip
        found = list(map(known.__getitem__, kinds))
        lengths, dtypes, shapes, strides = (list(map(itemgetter(n), found)) for n in range(4))
        devices = list(map(attrgetter("device"), items))
        elsewhere = [number for number, device in enumerate(devices) if device != "cpu"]
        return ItemColumns(
            [item.offset for item in items], lengths, dtypes, shapes, strides, elsewhere
        )


# Bytes that are digested at once. As 64-bit integers, they and their places take 16 times
# as much memory on the device, which may be full.
_DIGESTED = 1 << 19


@dataclass(slots=True)
class _Cluster:
    """A group of tensors whose bytes overlap in one storage.

    Together they cover the addresses [start, end).
    """

    start: int
    end: int
    members: list[str]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses [start, end) of the tensor's bytes."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


def _clusters(tensors: dict[str, torch.Tensor]) -> list[_Cluster]:
    """Return the groups of tensors that overlap.

    A tensor that is empty or overlaps no other is in none of them.
    """
    parts = list(tensors.values())
    addresses = map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, parts))
    if len(set(zip(map(_device, parts), addresses, strict=True))) == len(parts):
        return []
    by_storage: dict[tuple[torch.device, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage[tensor.device, tensor.untyped_storage().data_ptr()].append(name)
    found = []
    for group in by_storage.values():
        if len(group) < 2:
            continue
        current: _Cluster | None = None
        for start, end, name in sorted((*_extent(tensors[name]), name) for name in group):
            if current is None or start >= current.end:
                current = _Cluster(start, end, [name])
                found.append(current)
            else:
                current.end = max(current.end, end)
                current.members.append(name)
    return [cluster for cluster in found if len(cluster.members) > 1]


RowKey = tuple[str, tuple[int, ...]]
"""The fqn of an item, and its offsets in the whole tensor."""


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One item that this rank could write: its shard of the tensor `fqn`.

    The first eight fields are those of `shared.plan.Item`. `replicated` is True if
    other ranks hold the same shard, as far as this rank knows. `buffer` is True for a
    buffer of a module. `digest` is the digest of the shard's bytes if ranks must
    compare them, and empty otherwise. `base` is the fqn of the item that contains this
    row's bytes, and empty if there is none. A row with a base can be stored as an alias
    of it. `in_order` is True if the elements lie in memory in C order, without gaps.
    """

    fqn: str
    dtype: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...] | None
    device: str
    requires_grad: bool
    replicated: bool = True
    buffer: bool = False
    digest: bytes = b""
    base: str = ""
    in_order: bool = True

    @property
    def key(self) -> RowKey:
        return self.fqn, self.offsets

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * element_size(self.dtype)


@dataclass(frozen=True, slots=True)
class Local:
    """All items that this rank could write, and the aliases in them.

    learned: the fqns of parameters and of optimizer state, or None if they are not known.
    settings: those of the optimizers and schedules, as `settings_of` gives them.
    """

    rows: list[Row]
    aliases: list[Alias] = field(default_factory=list)
    learned: frozenset[str] | None = None
    settings: str = ""


def plan_locally(
    tensors: dict[str, torch.Tensor],
    *,
    buffers: Iterable[str] = (),
    learned: frozenset[str] | None = None,
    settings: str = "",
    world_size: int = 1,
) -> Local:
    """Return DCP's local plan as rows, and the aliases.

    Each row adds the fields that a slot needs to those of DCP.

    `buffers` are the names of the modules' buffers. Any other item gets a digest if
    another of the `world_size` ranks may hold it too. An empty shard of a tensor that
    is not empty has no row. Raises UnsavableValue, naming the tensor, for a tensor that
    cannot be saved.
    """
    failpoint("agent.planning")
    tensors = savable(tensors)
    plain = {name: tensor for name, tensor in tensors.items() if type(tensor) in PLAIN}
    aliases, hidden = _aliases(plain)
    bases, of_modules = {alias.fqn: alias.base for alias in aliases}, set(buffers)
    parts = list(plain.values())
    columns = map(_dtype, parts), map(_shape, parts), map(torch.Tensor.stride, parts)
    kinds = list(zip(*columns, map(_device, parts), map(_requires_grad, parts), strict=True))
    known = {kind: _whole(tensor) for kind, tensor in firsts(kinds, parts).items()}
    rows, shards, whole = list[Row](), _Shards(), map(known.__getitem__, kinds)
    for name, tensor in tensors.items():
        buffer, base = name in of_modules, bases.get(name, "")
        if type(tensor) in PLAIN:
            of_kind, in_order = next(whole)
            compared = digest(tensor) if world_size > 1 and not buffer else b""
            rows.append(Row(name, *of_kind, True, buffer, compared, base, in_order))
        else:
            # `check_tensor` refuses any other class
            assert isinstance(tensor, DTensor | ShardedTensor)
            rows += _rows_of_shards(
                name, tensor, shards.of(name, tensor), world_size, buffer=buffer, base=base
            )
    rows += [
        Row(name, "uint8", (length,), (0,), (length,), None, device, False)
        for name, length, device in hidden
    ]
    return Local(rows, aliases, learned, settings)


_Whole = tuple[
    str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, str, bool
]


def _whole(tensor: torch.Tensor) -> tuple[_Whole, bool]:
    """Return the fields of a Row from `dtype` to `requires_grad`, and `in_order`, for a
    tensor that is one item, which every rank could write, as DCP's planner plans it.
    """
    size = tuple(tensor.shape)
    return (
        dtype_name(tensor.dtype), size, (0,) * len(size), size, _stride(tensor),
        tensor.device.type, tensor.requires_grad,
    ), tensor.is_contiguous()  # fmt: skip


def savable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in a form whose memory holds their values.

    Raises UnsavableValue, naming a tensor that cannot be saved.
    """
    parts = list(tensors.values())
    dtypes = list(map(_dtype, parts))
    names = {dtype: dtype_name(dtype) for dtype in dict.fromkeys(dtypes)}
    if not (all(map(_is_name, tensors)) and all(map(element_size, names.values()))):
        for name, dtype in zip(tensors, dtypes, strict=True):
            check_item(name, names[dtype])
    if PLAIN.issuperset(map(type, parts)):
        kinds = list(zip(
            map(type, parts), dtypes, map(_device, parts), map(_layout, parts),
            map(torch.Tensor.dim, parts), map(torch.Tensor.is_conj, parts),
            map(torch.Tensor.is_neg, parts), map(_is_nested, parts), strict=True,
        ))  # fmt: skip
        if all(map(_is_savable, firsts(kinds, parts).values())):
            return tensors
    return {name: check_tensor(name, tensor) for name, tensor in tensors.items()}


def _is_savable(tensor: torch.Tensor) -> bool:
    """Return True if the memory of a tensor, and of all of its kind, holds its values."""
    try:
        return check_tensor("", tensor) is tensor
    except UnsavableValue:
        return False


_dtype, _shape, _device, _layout, _requires_grad, _is_nested = (
    attrgetter(name)
    for name in ("dtype", "shape", "device", "layout", "requires_grad", "is_nested")
)


def _is_name(name: str) -> bool:
    """Return True if an item can have this name."""
    return 0 < len(name) < MAX_TEXT and name[0] != HIDDEN


def check_item(name: str, dtype: str) -> None:
    """Raise UnsavableValue if an item cannot have this name or this dtype."""
    if _is_name(name) and element_size(dtype):
        return
    if not name:
        raise UnsavableValue("a tensor has an empty key: give it a name")
    if name.startswith(HIDDEN):
        raise UnsavableValue(
            f"{name}: keys may not begin with {HIDDEN!r}, which marks shared storages"
        )
    if len(name) >= MAX_TEXT:
        raise UnsavableValue(
            f"{name[:40]}...: this key has {len(name):,d} characters; expected fewer than "
            f"{MAX_TEXT:,d}"
        )
    raise UnsavableValue(
        f"{name}: a tensor of dtype {dtype} cannot be saved: expected elements of 1, 2, 4, 8 "
        f"or 16 bytes"
    )


class _Shards:
    """The places of the shards of this rank, as DCP's planner divides tensors.

    DTensors that are divided alike are looked at once.
    """

    def __init__(self) -> None:
        self._known: dict[object, list[Box]] = {}

    def of(self, name: str, tensor: DTensor | ShardedTensor) -> list[Box]:
        """Return the offsets and sizes of each shard of this rank."""
        if isinstance(tensor, DTensor):
            if tensor._spec not in self._known:
                self._known[tensor._spec] = self._planned(name, tensor)
            return self._known[tensor._spec]
        return self._planned(name, tensor)

    @staticmethod
    def _planned(name: str, tensor: DTensor | ShardedTensor) -> list[Box]:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(
            {name: copyable(tensor) if sizeless(dtype_name(tensor.dtype)) else tensor},
            is_coordinator=False,
        )
        found = []
        for write in planner.create_local_plan().items:
            assert write.tensor_data is not None
            found.append(
                (tuple(write.tensor_data.chunk.offsets), tuple(write.tensor_data.chunk.sizes))
            )
        return found


def _rows_of_shards(
    name: str,
    tensor: DTensor | ShardedTensor,
    shards: Iterable[Box],
    world_size: int,
    *,
    buffer: bool,
    base: str,
) -> list[Row]:
    """Return the rows of a tensor that is divided among ranks, given the shards of this
    rank. An empty shard has none.
    """
    rows = []
    for offsets, sizes in shards:
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            replicated, holders = (
                any(p.is_replicate() for p in tensor.placements),
                tensor.device_mesh.size(),
            )
        else:
            local = shard_at(tensor, offsets)
            replicated, holders = False, torch.distributed.get_world_size(tensor._process_group)
        if not local.numel() and tensor.numel():
            continue
        # Ranks outside its mesh may have the same key.
        compare = world_size > 1 and not buffer and (replicated or holders < world_size)
        rows.append(Row(
            name, dtype_name(local.dtype), tuple(tensor.shape), offsets, sizes, _stride(local),
            local.device.type, tensor.requires_grad, replicated, buffer,
            digest(local) if compare else b"", base, local.is_contiguous(),
        ))  # fmt: skip
    return rows


def _stride(local: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a shard that is dense in another order than C's, otherwise
    None.
    """
    if local.is_contiguous():
        return None
    stride = tuple(local.stride())
    return stride if is_dense(tuple(local.shape), stride) else None


def digest(tensor: torch.Tensor) -> bytes:
    """Return 8 bytes that tell replicas apart: a crc32c on the CPU, and on an
    accelerator a sum of the bytes, weighted by position.
    """
    if tensor.device.type == "cpu":
        flat = _flat(tensor)
        return crc32c(memory(flat, flat.numel())).to_bytes(8, "little")
    return (int(weigh(tensor)) % (1 << 64)).to_bytes(8, "little")


def weigh(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bytes, weighted by position, as a tensor on the same
    device.

    The host does not wait for the device.
    """
    flat = _flat(tensor)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    most = min(_DIGESTED, flat.numel())
    places = torch.arange(1, 2 * most + 1, 2, dtype=torch.int64, device=flat.device)
    words = torch.empty_like(places)
    for at in range(0, flat.numel(), most or 1):
        piece = flat[at : at + most]
        here, weights = words[: len(piece)], places[: len(piece)]
        here.copy_(piece)
        total += here.add_(1).mul_(weights).mul_(weights).sum()
        places += 2 * most
    return total


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return (
        copyable(tensor.detach())
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .view(-1)
        .view(torch.uint8)
    )


def memory(tensor: torch.Tensor, length: int) -> memoryview:
    """Return a writable view of the first `length` bytes of a dense CPU tensor.

    The caller must keep the tensor alive.
    """
    if length == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(tensor.data_ptr())).cast("B")


def memories(tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[memoryview]:
    """Return `memory` of each tensor.

    They are pieces of one view of all addresses between: a view takes many times as long
    to make as a piece.
    """
    begins = list(map(torch.Tensor.data_ptr, tensors))
    ends = list(map(add, begins, lengths))
    first = min(begins, default=0)
    span = max(ends, default=first) - first
    if not span:
        return [memoryview(b"")] * len(begins)
    whole = memoryview((ctypes.c_char * span).from_address(first)).cast("B")
    return [whole[begin - first : end - first] for begin, end in zip(begins, ends, strict=True)]


def lay_out(
    local: Local,
    kept: Iterable[int],
    *,
    aliases: set[str],
    metadata: dict[str, Any] | None,
    global_plan: bytes,
    meshes: Sequence[Mesh] = (),
) -> Layout:
    """Return the layout of the rows that this rank writes, and of the aliases that lie
    in them.

    `kept` are the numbers of these rows. `aliases` are the fqns of the aliases that
    this rank is to list. `meshes` are those of the rules in `metadata`. Raises as
    `layout_of`.
    """
    rows = [local.rows[number] for number in kept]
    names = {row.fqn for row in rows}
    inside = [alias for alias in local.aliases if alias.base in names and alias.fqn in aliases]
    return layout_of(
        rows,
        inside,
        metadata=metadata,
        global_plan=global_plan,
        meshes=meshes,
        learned=local.learned,
        settings=local.settings,
    )


def layout_of(
    rows: list[Row],
    aliases: list[Alias],
    *,
    metadata: dict[str, Any] | None,
    global_plan: bytes,
    meshes: Sequence[Mesh] = (),
    learned: frozenset[str] | None = None,
    settings: str = "",
) -> Layout:
    """Return the layout of these rows and aliases. `learned` and `settings` are as in
    `Local`.

    Raises UnsavableValue if there are more than MAX_ITEMS of either, or if the plan
    document is larger than readers accept.
    """
    regions, items = _place(rows)
    plan = Plan(
        regions=regions,
        items=items,
        aliases=aliases,
        metadata=metadata,
        global_plan=global_plan,
        writer=_writer() | ({"settings": settings} if settings else {}),
        meshes=list(meshes) or msgspec.UNSET,
        learned=_learned_runs(items, aliases, learned),
    )
    document = plan.encode()
    if len(document) > MAX_DOCUMENT:
        raise UnsavableValue(
            f"the plan of this rank would have {len(document):,d} bytes, and readers accept at "
            f"most {MAX_DOCUMENT:,d}: save fewer tensors"
        )
    if len(items) > MAX_ITEMS or len(aliases) > MAX_ITEMS:
        raise UnsavableValue(
            f"the state has {max(len(items), len(aliases)):,d} tensors on this rank; ckptd saves "
            f"up to {MAX_ITEMS:,d}"
        )
    return Layout(plan, document, signature(document))


def _learned_runs(
    items: list[Item], aliases: list[Alias], learned: frozenset[str] | None
) -> LearnedRuns | msgspec.UnsetType:
    if learned is None:
        return msgspec.UNSET
    fqns = [*(item.fqn for item in items), *(alias.fqn for alias in aliases)]
    return runs_of(number for number, fqn in enumerate(fqns) if fqn in learned)


@cache
def _writer() -> dict[str, str]:
    """Return the versions of the programs that write a plan, who runs them, and what is
    known of the run.
    """
    versions = {
        "ckptd": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    who = {"script": storable(script()), "host": machine.host(), "user": machine.user()}
    return versions | who | {"path": script_path()} | run_facts(script_path())


def _place(rows: list[Row]) -> tuple[list[Region], list[Item]]:
    by_width: dict[int, list[Row]] = {width: [] for width in ELEMENT_SIZES}
    width_of = {dtype: element_size(dtype) for dtype in {row.dtype for row in rows}}
    for row in rows:
        by_width[width_of[row.dtype]].append(row)
    regions, items, position = [], [], 0
    for width in ELEMENT_SIZES:
        start = align_region(position)
        end = start
        for row in by_width[width]:
            items.append(
                Item(
                    row.fqn,
                    row.dtype,
                    row.size,
                    row.offsets,
                    row.sizes,
                    row.stride,
                    end,
                    row.device,
                    row.requires_grad,
                )
            )
            end += width * math.prod(row.sizes)
        if end > start:
            regions.append(Region(start, end - start, width))
            position = end
    return regions, items


def _aliases(tensors: dict[str, torch.Tensor]) -> tuple[list[Alias], list[tuple[str, int, str]]]:
    """Return the aliases, and (name, length in bytes, device type) of each hidden item."""
    aliases: list[Alias] = []
    hidden: list[tuple[str, int, str]] = []
    order = {name: number for number, name in enumerate(tensors)}
    for cluster in _clusters(tensors):
        members = sorted(cluster.members, key=order.__getitem__)
        base = next(
            (
                n
                for n in members
                if _covers(tensors[n], cluster) and _aligned(cluster, [tensors[m] for m in members])
            ),
            None,
        )
        if base is None:
            base = HIDDEN + members[0]
            storage = tensors[members[0]].untyped_storage().data_ptr()
            # So that every member lies at a multiple of its element size.
            cluster.start -= (cluster.start - storage) % max(ELEMENT_SIZES)
            hidden.append((base, cluster.end - cluster.start, tensors[members[0]].device.type))
        for name in members:
            if name != base:
                tensor = tensors[name]
                aliases.append(Alias(
                    name, base, tensor.data_ptr() - cluster.start, dtype_name(tensor.dtype),
                    tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad,
                    tensor.device.type,
                ))  # fmt: skip
    return aliases, hidden


def _covers(tensor: torch.Tensor, cluster: _Cluster) -> bool:
    return _extent(tensor) == (cluster.start, cluster.end) and is_dense(
        tuple(tensor.shape), tensor.stride()
    )


def _aligned(cluster: _Cluster, members: list[torch.Tensor]) -> bool:
    return all(
        (member.data_ptr() - cluster.start) % member.element_size() == 0 for member in members
    )
