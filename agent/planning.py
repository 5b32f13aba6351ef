"""From named tensors to a plan: DCP's SavePlan, and where each of its items lies in the packed slot.

A `Layout` is kept while the structure stays the same (names, dtypes, shapes, strides, who shares storage with whom); the sources are looked
up anew at each snapshot, since storages move. Tensors that overlap in one storage are stored once: the widest as an item, the
others as aliases; where none covers the rest, the storage's range becomes a hidden item.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from ckptd.agent.capture import check_tensor
from ckptd.shared import __version__
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.plan import ELEMENT_SIZES, HIDDEN, ITEM_SIZES, Alias, Item, Plan, Region, align_region, is_dense, signature

Structure = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """`document` is the encoded `plan`, `signature` its sha256; `order` names the items' sources, in the order of the plan's items."""

    plan: Plan
    document: bytes
    signature: bytes

    @property
    def data_length(self) -> int:
        return self.plan.data_length


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises UnsavableValue for a dtype that this torch does not have."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsavableValue(f"this torch ({torch.__version__}) has no dtype {name!r}; load with a newer one")
    return found


_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIZELESS = re.compile(r"u?int[1-7]|bits\w+")  # torch 2.13's planner cannot tell how large their elements are


def as_integer(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers of the same size: for dtypes that torch does little with."""
    return tensor.view(_AS_INTEGER[tensor.element_size()])


def _sizeable(tensor: torch.Tensor) -> torch.Tensor:
    return as_integer(tensor) if _SIZELESS.fullmatch(dtype_name(tensor.dtype)) else tensor


@dataclass(slots=True)
class _Cluster:
    """Tensors whose bytes overlap in one storage: [start, end) of its addresses."""

    start: int
    end: int
    members: list[str]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses [start, end) of the tensor's bytes."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _clusters(tensors: dict[str, torch.Tensor]) -> list[_Cluster]:
    """Who overlaps with whom, by storage; lone tensors are left out."""
    by_storage: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage[str(tensor.device), tensor.untyped_storage().data_ptr()].append(name)
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


def structure(tensors: dict[str, torch.Tensor]) -> Structure:
    """What a layout depends on; equal structures may share one. Addresses count only in so far as tensors share a storage."""
    storages: dict[int, int] = {}
    shared = False
    rows: list[tuple[object, ...]] = []
    for name, tensor in tensors.items():
        try:
            pointer = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # what torch raises for tensors without a storage: sparse, nested
            check_tensor(name, tensor)
            raise
        number = storages.setdefault(pointer, len(storages))
        shared = shared or number != len(rows)
        lazy = tensor.is_conj() or tensor.is_neg()
        rows.append(
            (name, type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device.type, tensor.requires_grad, lazy, number)
        )
    offsets = tuple(tensor.storage_offset() for tensor in tensors.values()) if shared else ()
    return (tuple(rows), offsets)


def sources(tensors: dict[str, torch.Tensor], plan: Plan) -> list[torch.Tensor]:
    """The live tensor behind each item of the plan, in its order."""
    return [tensors[item.fqn] if item.fqn in tensors else _hidden(tensors, plan, item) for item in plan.items]


def _hidden(tensors: dict[str, torch.Tensor], plan: Plan, item: Item) -> torch.Tensor:
    alias = next(alias for alias in plan.aliases if alias.base == item.fqn)
    member = tensors[alias.fqn]
    offset = member.storage_offset() * member.element_size() - alias.offset
    return torch.empty(0, dtype=torch.uint8, device=member.device).set_(member.untyped_storage(), offset, (item.length,), (1,))


def make_layout(tensors: dict[str, torch.Tensor], *, coordinator: bool = True) -> Layout:
    """Plan and lay out. Raises UnsavableValue naming a tensor that cannot be saved."""
    tensors = {name: check_tensor(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if name.startswith(HIDDEN):
            raise UnsavableValue(f"{name}: keys may not begin with {HIDDEN!r}, which marks shared storages")
        if dtype_name(tensor.dtype) not in ITEM_SIZES:
            raise UnsavableValue(f"{name}: tensors of dtype {tensor.dtype} cannot be saved by this version")
    aliases, hidden = _aliases(tensors)
    names = {alias.fqn for alias in aliases}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: _sizeable(tensor) for name, tensor in tensors.items()}, is_coordinator=coordinator)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    final = planner.finish_plan(plans[0])
    rows: list[_Row] = [_row(write, tensors[write.index.fqn]) for write in final.items if write.index.fqn not in names]
    rows += [(name, "uint8", (length,), (0,), (length,), None, device, False) for name, length, device in hidden]
    regions, items = _place(rows)
    described = _metadata(metadata, tensors)
    plan = Plan(
        regions=regions,
        items=items,
        aliases=aliases,
        metadata=described if coordinator else None,
        global_plan=hashlib.sha256(msgspec.msgpack.encode(described)).digest(),
        writer={"ckptd": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )
    document = plan.encode()
    return Layout(plan, document, signature(document))


_Row = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, str, bool]


def _row(write: WriteItem, tensor: torch.Tensor) -> _Row:
    data = write.tensor_data
    assert data is not None
    sizes = tuple(data.chunk.sizes)
    dense = not tensor.is_contiguous() and is_dense(sizes, tensor.stride())
    return (
        write.index.fqn, dtype_name(tensor.dtype), tuple(data.size), tuple(data.chunk.offsets), sizes,
        tuple(tensor.stride()) if dense else None, tensor.device.type, tensor.requires_grad,
    )  # fmt: skip


def _place(rows: list[_Row]) -> tuple[list[Region], list[Item]]:
    regions, items, position = [], [], 0
    for width in ELEMENT_SIZES:
        start = align_region(position)
        end = start
        for name, dtype, size, offsets, sizes, stride, device, grad in rows:
            if ITEM_SIZES[dtype] == width:
                item = Item(name, dtype, size, offsets, sizes, stride, end, device, grad)
                items.append(item)
                end += item.length
        if end > start:
            regions.append(Region(start, end - start, width))
            position = end
    return regions, items


def _aliases(tensors: dict[str, torch.Tensor]) -> tuple[list[Alias], list[tuple[str, int, str]]]:
    """Aliases, and (name, bytes, device type) of each hidden item."""
    aliases: list[Alias] = []
    hidden: list[tuple[str, int, str]] = []
    order = {name: number for number, name in enumerate(tensors)}
    for cluster in _clusters(tensors):
        members = sorted(cluster.members, key=order.__getitem__)
        base = next((n for n in members if _covers(tensors[n], cluster) and _aligned(cluster, [tensors[m] for m in members])), None)
        if base is None:
            base = HIDDEN + members[0]
            storage = tensors[members[0]].untyped_storage().data_ptr()
            cluster.start -= (cluster.start - storage) % max(ELEMENT_SIZES)  # so that every member lies at a multiple of its element size
            hidden.append((base, cluster.end - cluster.start, tensors[members[0]].device.type))
        for name in members:
            if name != base:
                tensor = tensors[name]
                aliases.append(Alias(
                    name, base, tensor.data_ptr() - cluster.start, dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()),
                    tensor.requires_grad, tensor.device.type,
                ))  # fmt: skip
    return aliases, hidden


def _covers(tensor: torch.Tensor, cluster: _Cluster) -> bool:
    return _extent(tensor) == (cluster.start, cluster.end) and is_dense(tuple(tensor.shape), tensor.stride())


def _aligned(cluster: _Cluster, members: list[torch.Tensor]) -> bool:
    return all((member.data_ptr() - cluster.start) % member.element_size() == 0 for member in members)


def _metadata(metadata: Metadata, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """DCP's state_dict_metadata as plain data."""
    described = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        described[fqn] = {
            "dtype": dtype_name(tensors[fqn].dtype) if fqn in tensors else dtype_name(entry.properties.dtype),
            "size": list(entry.size),
            "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
        }
    return described
