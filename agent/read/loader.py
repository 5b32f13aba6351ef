"""Loads tensors from parts or sealed slots, into given destinations or as new tensors.

`load` fills destinations in place, `materialize` makes new tensors, and `execute` reads
the items of a DCP planner. `read_plan` reads the items of a DCP `LoadPlan`, values that
are not tensors included. All return once every byte is verified. After an error the
destinations may hold damaged bytes. `load` checks all names and shapes before it reads
the first byte. `execute` checks those of an item before it writes to the item's
destination.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from ckptd.agent.plan.layout import memories, memory
from ckptd.agent.plan.save_plan import loads_as_weights, may_unpickle
from ckptd.agent.plan.structure import PLAIN, firsts, local_parts
from ckptd.agent.read.saved import Reads, Saved, Shard
from ckptd.agent.read.sources import Opened
from ckptd.agent.read.upload import Upload, Wanted
from ckptd.agent.state.dtypes import copyable, dtype_of
from ckptd.shared.errors import IntegrityError, NotFound, StructureMismatch, UnsavableValue
from ckptd.shared.formats.plan import Alias, Item, c_order
from ckptd.shared.formats.sharding import Box
from ckptd.shared.system.collector import paused_collector

# Bytes of temporaries that are filled at once, for data that cannot be read straight
# into its destination.
_BATCH = 512 << 20


@paused_collector()
def load(
    saved: Saved,
    destinations: Mapping[str, torch.Tensor],
    *,
    threads: int | None = None,
    upload: Upload | None = None,
) -> int:
    """Fill the tensors in `destinations`, by name, in place.

    Return the number of raw bytes read.

    A destination may be on any device, and have any dtype that torch converts to. A
    shard that was saved as this rank has it is read by itself. DCP plans the reads of
    all others. All that is not converted goes to an accelerator through the buffers of
    `upload`, or of an Upload of this call. Raises StructureMismatch if a shape differs,
    NotFound for an unknown name, IntegrityError, OSError.
    """
    names, tensors = list(destinations), list(destinations.values())
    boxes = _own_boxes(destinations)
    saved.check_each_whole(names)
    sizes = [size for size, _ in saved.described(names)]  # raises if this torch lacks a dtype
    if sizes != list(map(_shape, tensors)):
        name, size, tensor = next(
            found for found in zip(names, sizes, tensors, strict=True) if found[2].shape != found[1]
        )
        raise StructureMismatch(
            f"{name}: the checkpoint has shape {list(size)}, the state {list(tensor.shape)}"
        )
    shards, parts = saved.shards_at(names, boxes), local_parts(tensors)
    kinds = list(zip(
        map(type, parts), map(_dtype, parts), map(_shape, parts), map(_stride, parts),
        map(_device, parts), map(torch.Tensor.is_conj, parts), map(torch.Tensor.is_neg, parts),
        map(torch.Tensor.is_inference, parts),
        [None if shard is None else _dtype_sizes_stride(shard.item) for shard in shards],
        strict=True,
    ))  # fmt: skip
    found = list(zip(names, parts, shards, strict=True))
    ways = {kind: _way(*first) for kind, first in firsts(kinds, found).items()}
    way_of = list(map(ways.__getitem__, kinds))
    direct, sent = Reads(), list[Wanted]()
    converted: list[tuple[torch.Tensor, Shard]] = []
    planned: dict[str, torch.Tensor] = {}
    if any(way is not _Way.DIRECT for way, _ in ways.values()):
        for (way, _), (name, part, shard) in zip(way_of, found, strict=True):
            if shard is None:
                planned[name] = destinations[name]
            elif way is _Way.SENT:
                sent.append(Wanted(part, shard, 0, shard.stride))
            elif way is _Way.COPIED:
                converted.append((part, shard))
    read = [way is _Way.DIRECT for way, _ in way_of]
    lengths = [length for way, length in way_of if way is _Way.DIRECT]
    direct.add_all(
        [shard for shard in compress(shards, read) if shard is not None],
        memories(list(compress(parts, read)), lengths),
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(planned, saved.metadata(planned), is_coordinator=True)
    # Before the first write: it may be refused.
    plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    with Upload() if upload is None else nullcontext(upload) as uploading:
        return (
            direct.run(threads)
            + _convert(converted, threads)
            + execute(saved, plan.items, planner, uploading, sent, threads=threads)
        )


class _Way(Enum):
    """The way of a shard into its destination: by a read straight into that, through a
    buffer of an Upload, or by a copy of torch's.
    """

    DIRECT, SENT, COPIED = range(3)


def _way(name: str, part: torch.Tensor, shard: Shard | None) -> tuple[_Way, int]:
    """Return the way of a shard into its destination, and the length of the shard.

    Raises StructureMismatch if the destination has no memory.
    """
    if part.is_meta:
        raise StructureMismatch(
            f"{name}: the state's tensor is on the meta device, which has no memory"
        )
    if shard is None:
        return _Way.COPIED, 0
    dtype, length = dtype_of(shard.item.dtype), shard.item.length
    if Upload.takes(part, dtype):
        return _Way.SENT, length
    return (_Way.DIRECT if _has_bytes_of(part, shard.item, dtype) else _Way.COPIED), length


_dtype, _shape, _device = attrgetter("dtype"), attrgetter("shape"), attrgetter("device")
_stride = torch.Tensor.stride
_dtype_sizes_stride = attrgetter("dtype", "sizes", "stride")


def check_partition(saved: Saved, destinations: Mapping[str, torch.Tensor]) -> None:
    """Check that this rank's part of every destination was saved as one shard.

    `load` then does not check the other shards of the tensor.

    Raises StructureMismatch, NotFound for an unknown name.
    """
    for name, box in zip(destinations, _own_boxes(destinations), strict=True):
        saved.describe(name)
        if box is not None and name not in saved.aliases:
            saved.check_box(name, box)


def needed_shards(saved: Saved, destinations: Mapping[str, torch.Tensor]) -> dict[str, list[Shard]]:
    """Return the stored shards that `load` reads for each of these tensors.

    Raises StructureMismatch, NotFound for an unknown name.
    """
    found: dict[str, list[Shard]] = {}
    for name, box in zip(destinations, _own_boxes(destinations), strict=True):
        saved.describe(name)
        if name in saved.aliases:
            found[name] = [saved.aliases[name][0]]
        elif (own := saved.shard_at(name, box)) is not None:
            found[name] = [own]
        else:
            shards = saved.shards[name]
            found[name] = [s for s in shards if box is None or _meet(s.item, box)]
    return found


def _meet(item: Item, box: Box) -> bool:
    """Return True if a shard and a box of the same tensor have an element in common."""
    return all(
        start < other + length and other < start + size
        for start, size, other, length in zip(item.offsets, item.sizes, *box, strict=True)
    )


def _own_boxes(destinations: Mapping[str, torch.Tensor]) -> list[Box | None]:
    """Return the place and size of this rank's part in each whole tensor, or None if the
    part is not one box.
    """
    known: dict[object, Box | None] = {}  # of tensors that are sharded alike

    def box_of(name: str, tensor: torch.Tensor) -> Box | None:
        box: Box | None = None
        if isinstance(tensor, DTensor):
            if tensor._spec not in known:
                _check_placements(name, tensor)
                chunks: list[ChunkStorageMetadata] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
                known[tensor._spec] = (
                    (tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if len(chunks) == 1 else None
                )
            box = known[tensor._spec]
        elif not isinstance(tensor, ShardedTensor):
            box = (0,) * tensor.dim(), tuple(tensor.shape)
        elif len(tensor.local_shards()) == 1:
            shard = tensor.local_shards()[0].metadata
            box = tuple(shard.shard_offsets), tuple(shard.shard_sizes)
        empty = box is not None and 0 in box[1]  # an empty shard may not have been saved
        return None if empty else box

    tensors = list(destinations.values())
    # Of a plain tensor the shape tells all.
    kinds: list[object] = list(map(_shape, tensors))
    if not PLAIN.issuperset(map(type, tensors)):
        kinds = [
            kind if type(tensor) in PLAIN else number
            for number, (kind, tensor) in enumerate(zip(kinds, tensors, strict=True))
        ]
    boxes = {
        kind: box_of(*pair) for kind, pair in firsts(kinds, list(destinations.items())).items()
    }
    return list(map(boxes.__getitem__, kinds))


def _check_placements(name: str, tensor: DTensor) -> None:
    """Raise StructureMismatch if this rank's part is several pieces, for which torch
    gives the place of one.

    A _StridedShard is one piece only if later dimensions of the mesh divide the same
    dimension of the tensor `split_factor` times.
    """
    placements: Sequence[Any] = tensor.placements
    for number, placement in enumerate(placements):
        if type(placement).__name__ == "_StridedShard":
            later = [
                mesh
                for mesh, other in enumerate(placements)
                if mesh > number and getattr(other, "dim", None) == placement.dim
            ]
            if math.prod(tensor.device_mesh.size(mesh) for mesh in later) != placement.split_factor:
                raise StructureMismatch(
                    f"{name}: with the placements {placements}, this rank's part is several "
                    f"pieces of the tensor, which cannot be "
                    "loaded: redistribute it first"
                )


def _convert(wanted: Iterable[tuple[torch.Tensor, Shard]], threads: int | None) -> int:
    """Copy shards into tensors of other dtypes, strides or devices, batch by batch.

    Return the number of raw bytes read.
    """
    total, nbytes, batch = 0, 0, list[tuple[torch.Tensor, Shard, torch.Tensor]]()
    for tensor, shard in wanted:
        if nbytes + shard.item.length > _BATCH:
            total += _copy_converted(batch, threads)
            nbytes = 0
            batch.clear()
        batch.append(
            (tensor, shard, torch.empty(shard.item.length, dtype=torch.uint8, device="cpu"))
        )
        nbytes += shard.item.length
    return total + _copy_converted(batch, threads)


def _copy_converted(
    batch: Sequence[tuple[torch.Tensor, Shard, torch.Tensor]], threads: int | None
) -> int:
    reads = Reads()
    for _, shard, raw in batch:
        reads.add(shard, memory(raw, shard.item.length))
    total = reads.run(threads)
    with torch.no_grad():
        for tensor, shard, raw in batch:
            copy_any(tensor, view_item(raw, shard))
    return total


def _has_bytes_of(tensor: torch.Tensor, item: Item, dtype: torch.dtype) -> bool:
    """Return True if the stored bytes of an item of this dtype are those of the tensor
    in the memory of the host, so that none are converted.
    """
    plain = (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.dtype == dtype
    )
    return plain and (
        tensor.is_contiguous() if item.stride is None else _same_stride(tensor, item.stride)
    )


def execute(
    saved: Saved,
    reads: Iterable[ReadItem],
    planner: LoadPlanner,
    upload: Upload,
    sent: Iterable[Wanted] = (),
    *,
    threads: int | None = None,
) -> int:
    """Read the tensors of a planner's items into the destinations that it resolves.

    Return the number of raw bytes read.

    upload: fills the destinations on an accelerator, and with them those of `sent`.

    Reads batch by batch, so that an error may come after earlier batches are written.
    Raises as `load`.
    """
    total, batch, size_of_batch = 0, _Batch(planner, upload, sent), 0
    for read in reads:
        size_of_batch += batch.add(saved, read)
        if size_of_batch > _BATCH:
            total += batch.run(threads)
            batch, size_of_batch = _Batch(planner, upload, ()), 0
    return total + batch.run(threads)


class _Batch:
    """Read items that are fetched together. Call `add` for each of them, then `run`.

    Holds the reads, and the copies and commits to make after them.
    """

    def __init__(self, planner: LoadPlanner, upload: Upload, sent: Iterable[Wanted]) -> None:
        self._planner, self._upload = planner, upload
        self._reads = Reads()
        self._sent = list(sent)
        self._raw: dict[tuple[int, int], torch.Tensor] = {}
        self._copies: list[tuple[ReadItem, torch.Tensor | None, torch.Tensor | None]] = []
        self._own = not _is_default(planner)

    def add(self, saved: Saved, read: ReadItem) -> int:
        """Add a read item.

        Return the bytes of new temporaries that it needs. Raises NotFound,
        StructureMismatch, IntegrityError.
        """
        shard, alias = _stored(saved, read)
        item = shard.item
        # This planner may return the same memory every time, so it resolves a tensor
        # only when that is copied.
        if self._own:
            raw, fresh = self._temporary(shard)
            self._copies.append((read, None, _stored_piece(raw, shard, alias, read)))
            return item.length if fresh else 0
        target = self._target(read)
        if Upload.takes(target, dtype_of(item.dtype if alias is None else alias.dtype)):
            no_memory = torch.empty(item.length, dtype=torch.uint8, device="meta")
            place = _stored_piece(no_memory, shard, alias, read)
            begin = int(place.storage_offset()) * place.itemsize
            self._sent.append(Wanted(target, shard, begin, place.stride()))
            self._copies.append((read, target, None))
            return 0
        whole = (
            alias is None and not any(read.storage_offsets) and tuple(read.lengths) == item.sizes
        )
        if whole and _has_bytes_of(target, shard.item, dtype_of(item.dtype)):
            self._reads.add(shard, memory(target, item.length))
            self._copies.append((read, target, None))
            return 0
        raw, fresh = self._temporary(shard)
        self._copies.append((read, target, _stored_piece(raw, shard, alias, read)))
        return item.length if fresh else 0

    def _target(self, read: ReadItem) -> torch.Tensor:
        """Return the tensor that the planner resolves for an item.

        Raises StructureMismatch if its shape is wrong or it has no memory.
        """
        target = self._planner.resolve_tensor(read).detach()
        if tuple(target.shape) != tuple(read.lengths):
            raise StructureMismatch(
                f"{read.storage_index.fqn}: the planner reads a piece of shape "
                f"{list(read.lengths)} into a tensor of shape {list(target.shape)}"
            )
        if target.is_meta:
            raise StructureMismatch(
                f"{read.storage_index.fqn}: the planner reads into a tensor on the meta device, "
                f"which has no memory"
            )
        return target

    def _temporary(self, shard: Shard) -> tuple[torch.Tensor, bool]:
        key = (id(shard.source), shard.item.offset)
        if key in self._raw and len(self._raw[key]) == shard.item.length:
            return self._raw[key], False
        raw = self._raw[key] = torch.empty(shard.item.length, dtype=torch.uint8, device="cpu")
        self._reads.add(shard, memory(raw, shard.item.length))
        return raw, True

    def run(self, threads: int | None) -> int:
        total = self._reads.run(threads) + self._upload.fill(self._sent, threads)
        with torch.no_grad():
            for read, resolved, stored in self._copies:
                target = self._target(read) if resolved is None else resolved
                if stored is not None:
                    copy_any(target, stored)
                self._planner.commit_tensor(read, target)
        return total


def _is_default(planner: LoadPlanner) -> bool:
    """Return True if the planner resolves tensors as DCP's default planner does: to
    their places in the state.
    """
    own, default = type(planner), DefaultLoadPlanner
    return isinstance(planner, default) and all(
        getattr(own, name) is getattr(default, name)
        for name in ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
    )


def _stored_piece(
    raw: torch.Tensor, shard: Shard, alias: Alias | None, read: ReadItem
) -> torch.Tensor:
    stored = view_alias(raw, alias) if alias is not None else view_item(raw, shard)
    for dimension, (start, length) in enumerate(
        zip(read.storage_offsets, read.lengths, strict=True)
    ):
        stored = stored.narrow(dimension, start, length)
    return stored


def _stored(saved: Saved, read: ReadItem) -> tuple[Shard, Alias | None]:
    """Return the shard that holds a read item, and the alias if the item names one.

    Raises NotFound if nothing is stored at its name and offset, StructureMismatch if it
    reaches beyond the shard, IntegrityError if the tensor is not whole.
    """
    name, offset = read.storage_index.fqn, tuple(read.storage_index.offset or ())
    saved.describe(name)
    if name in saved.aliases:
        shard, alias = saved.aliases[name]
        size: tuple[int, ...] = alias.size
    else:
        saved.check_whole(name)
        found = [s for s in saved.shards[name] if tuple(s.item.offsets) == offset or not offset]
        if not found:
            raise NotFound(f"{name}: no shard is stored at {list(offset)}")
        shard, alias, size = found[0], None, found[0].item.sizes
    ends = [
        start + length for start, length in zip(read.storage_offsets, read.lengths, strict=False)
    ]
    if not len(read.storage_offsets) == len(read.lengths) == len(size) or any(
        e > s for e, s in zip(ends, size, strict=True)
    ):
        raise StructureMismatch(
            f"{name}: the planner reads {list(read.lengths)} from {list(read.storage_offsets)}, "
            f"and {list(size)} are stored there"
        )
    return shard, alias


def materialize(
    saved: Saved, names: Sequence[str], *, threads: int | None = None
) -> dict[str, torch.Tensor]:
    """Return new CPU tensors, by name, with the dtype, shape, strides and shared
    storage that they were saved with.

    A tensor that was saved in several shards comes back whole and contiguous. Raises
    NotFound, IntegrityError, OSError.
    """
    made: dict[str, torch.Tensor] = {}
    raws: dict[str, torch.Tensor] = {}
    reads = Reads()

    def base(name: str, shard: Shard) -> torch.Tensor:
        if name not in raws:
            raws[name] = torch.empty(shard.item.length, dtype=torch.uint8, device="cpu")
            reads.add(shard, memory(raws[name], shard.item.length))
        return raws[name]

    sharded = []
    for name in names:
        described, dtype = saved.describe(name), saved.dtype(name)
        saved.check_whole(name)
        if isinstance(described, Alias):
            shard, alias = saved.aliases[name]
            made[name] = view_alias(base(alias.base, shard), alias)
        elif len(saved.shards[name]) == 1 and described.sizes == described.size:
            made[name] = view_item(base(name, saved.shards[name][0]), saved.shards[name][0])
        else:
            sharded.append(name)
            made[name] = torch.empty(described.size, dtype=dtype, device="cpu")
    reads.run(threads)
    if sharded:
        load(saved, {name: made[name] for name in sharded}, threads=threads)
    for name in names:
        if saved.describe(name).requires_grad and (
            made[name].is_floating_point() or made[name].is_complex()
        ):
            made[name].requires_grad_()
    return made


def empty_on(saved: Saved, devices: Mapping[str, torch.device]) -> dict[str, torch.Tensor]:
    """Return new tensors for `load`, by name, on those of the devices that Upload fills.

    Their values are not set. Leaves out tensors that `materialize` must make: those that
    share a storage or require gradients. Raises NotFound.
    """
    described = {name: saved.describe(name) for name in devices}
    bases = {alias.base for alias in described.values() if isinstance(alias, Alias)}
    made: dict[str, torch.Tensor] = {}
    for name, item in described.items():
        device = devices[name]
        if (
            isinstance(item, Alias)
            or item.requires_grad
            or name in bases
            or not Upload.goes_to(device)
        ):
            continue
        whole = saved.shard_of_whole(name)
        stride = c_order(item.size) if whole is None else whole.stride
        made[name] = torch.empty_strided(item.size, stride, dtype=saved.dtype(name), device=device)
    return made


def view_item(raw: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return a stored shard as a tensor over its bytes in `raw`."""
    return raw.view(dtype_of(shard.item.dtype)).as_strided(shard.item.sizes, shard.stride)


def view_alias(raw: torch.Tensor, alias: Alias) -> torch.Tensor:
    """Return an alias as a tensor that shares the storage of `raw`, the bytes of its
    base. Raises IntegrityError if it does not fit.
    """
    dtype = dtype_of(alias.dtype)
    offset, rest = divmod(alias.offset, dtype.itemsize)
    if rest:
        raise IntegrityError(f"alias {alias.fqn!r} is misaligned")
    extent = (
        0
        if 0 in alias.size
        else 1 + sum((n - 1) * s for n, s in zip(alias.size, alias.stride, strict=True))
    )
    if alias.offset + extent * dtype.itemsize > raw.untyped_storage().nbytes():
        raise IntegrityError(f"alias {alias.fqn!r} reaches beyond its base {alias.base!r}")
    return torch.empty(0, dtype=dtype, device=raw.device).set_(
        raw.untyped_storage(), offset, alias.size, alias.stride
    )


def copy_any(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, bit for bit if they have the same dtype, whatever
    torch can do with that dtype.
    """
    if target.dtype == source.dtype and not target.is_conj() and not target.is_neg():
        target, source = copyable(target), copyable(source)
    # A tensor that was made in inference mode can be written in that mode only.
    with torch.inference_mode(target.is_inference()):
        target.copy_(source)


def _same_stride(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    return all(
        size == 1 or have == want
        for size, have, want in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )


def read_plan(
    opened: Opened, plan: LoadPlan, planner: LoadPlanner, *, weights_only: bool = True
) -> None:
    """Read the items of `plan`.

    Tensors go to the destinations that `planner` resolves, and all other values to its
    `load_bytes`.

    The planner gets verified bytes only. weights_only: refuse bytes that only pickled
    code could bring back.

    Raises NotFound, StructureMismatch, IntegrityError, OSError; UnsavableValue for
    bytes that are refused.
    """
    tensors = [read for read in plan.items if read.type is not LoadItemType.BYTE_IO]
    with Upload() as upload:
        execute(opened.saved, tensors, planner, upload)
    wanted = [read for read in plan.items if read.type is LoadItemType.BYTE_IO]
    blobs = opened.blobs([read.storage_index.fqn for read in wanted])
    for read in wanted:
        data = blobs[read.storage_index.fqn]
        if weights_only and may_unpickle(planner, data) and not loads_as_weights(data):
            # Refused by default: only the caller knows whether the writer of the file
            # can be trusted. The error says how to allow it.
            raise UnsavableValue(
                f"{read.storage_index.fqn}: it can only be loaded by running pickled code; pass "
                "weights_only=False to StorageReader if you trust everyone who could have written "
                "it"
            )
        planner.load_bytes(read, io.BytesIO(data))
