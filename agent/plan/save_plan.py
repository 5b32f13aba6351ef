"""Executes a DCP `SavePlan`: its planner resolves each item, and the items are laid out
in the packed slot.

Items are resolved twice. The first time gives their dtypes and lengths, on which the
layout depends. The second time they are resolved one after the other, each when it is
copied, so that a planner that makes new tensors (a cast) never has all of them in
memory at once.
"""

from __future__ import annotations

import io
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from ckptd.agent.plan.layout import Layout, Row, RowKey, check_item, layout_of, memory
from ckptd.agent.state.dtypes import copyable, dtype_name, dtype_of
from ckptd.agent.state.packer import Packer
from ckptd.agent.state.tensor_check import check_tensor
from ckptd.agent.state.tree import TensorRef
from ckptd.shared.errors import IntegrityError, InvalidRequest, UnsavableValue
from ckptd.shared.formats.coverage import check_all
from ckptd.shared.formats.plan import BLOB
from ckptd.shared.units import some_text


@dataclass(frozen=True, slots=True)
class Resolved:
    """The items of one rank's plan, resolved by its planner.

    `writes` has the write items by key. `rows` has one row for each of them, in the
    order of the plan. `blobs` has the bytes of the items that are not tensors, by key.
    """

    planner: SavePlanner
    writes: dict[RowKey, WriteItem]
    rows: list[Row]
    blobs: dict[RowKey, torch.Tensor]

    @classmethod
    def of(cls, plan: SavePlan, planner: SavePlanner, *, weights_only: bool) -> Resolved:
        """Resolve all items of a plan.

        With `weights_only`, bytes that could only be loaded by running pickled code are
        refused. Raises UnsavableValue for an item that cannot be saved, and
        InvalidRequest for an item that is inconsistent or occurs twice. Both errors
        name the item.
        """
        made = cls(planner, {}, [], {})
        for write in plan.items:
            row = (
                made._blob(write, weights_only)
                if write.type is WriteItemType.BYTE_IO
                else made._tensor(write)
            )
            check_item(row.fqn, row.dtype)
            if row.key in made.writes:
                raise InvalidRequest(
                    f"the planner writes {_shown(row.key)} twice on one rank; each item belongs "
                    f"to one rank, once"
                )
            made.writes[row.key] = write
            made.rows.append(row)
        return made

    def _tensor(self, write: WriteItem) -> Row:
        fqn, data = write.index.fqn, write.tensor_data
        if data is None:
            raise InvalidRequest(f"{fqn}: the planner's item is a tensor, but has no tensor_data")
        tensor = self._resolve(write)
        sizes, offsets = tuple(data.chunk.sizes), tuple(data.chunk.offsets)
        if tuple(tensor.shape) != sizes:
            raise InvalidRequest(
                f"{fqn}: the planner's item has shape {list(sizes)}, but resolves to a tensor of "
                f"shape {list(tensor.shape)}"
            )
        if len(data.size) != len(sizes) or any(
            o + s > t for o, s, t in zip(offsets, sizes, data.size, strict=True)
        ):
            raise InvalidRequest(
                f"{fqn}: the planner's item of shape {list(sizes)} at {list(offsets)} does not "
                f"lie within shape {list(data.size)}"
            )
        grad = bool(data.properties.requires_grad) and (
            tensor.is_floating_point() or tensor.is_complex()
        )
        return Row(
            fqn,
            dtype_name(tensor.dtype),
            tuple(data.size),
            offsets,
            sizes,
            None,
            tensor.device.type,
            grad,
        )

    def _resolve(self, write: WriteItem) -> torch.Tensor:
        tensor = self.planner.resolve_data(write)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidRequest(
                f"{write.index.fqn}: the planner's item is a tensor, but resolves to "
                f"{type(tensor).__name__}"
            )
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if isinstance(tensor, ShardedTensor):
            raise InvalidRequest(
                f"{write.index.fqn}: the planner's item resolves to a ShardedTensor; expected the "
                f"shard"
            )
        return check_tensor(write.index.fqn, tensor.detach())

    def _blob(self, write: WriteItem, weights_only: bool) -> Row:
        fqn, data = write.index.fqn, self.planner.resolve_data(write)
        if not isinstance(data, io.BytesIO):
            raise InvalidRequest(
                f"{fqn}: the planner's item is bytes, but resolves to {type(data).__name__}; "
                f"expected BytesIO"
            )
        if (
            weights_only
            and may_unpickle(self.planner, data.getbuffer())
            and not loads_as_weights(data.getbuffer())
        ):
            # Refused by default, because only the caller knows which users can write to
            # the storage. The error says how to allow it.
            raise UnsavableValue(
                f"{fqn}: the planner's bytes could not be loaded without running pickled code; "
                f"save plain values instead, or pass "
                # Only the text of an error: nothing is unpickled here.
                "weights_only=False to StorageWriter and StorageReader "
                "if you trust everyone who can write to the checkpoint"
            )
        length = len(data.getbuffer())
        blob = (
            torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
            if length
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        row = Row(fqn, BLOB, (length,), (0,), (length,), None, "cpu", False)
        self.blobs[row.key] = blob
        return row

    def source(self, key: RowKey, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor or the blob of an item as it is now.

        Raises InvalidRequest if the planner resolves the item to another dtype or shape
        than the first time.
        """
        if key in self.blobs:
            return self.blobs[key]
        write = self.writes[key]
        tensor = self._resolve(write)
        assert write.tensor_data is not None
        if tensor.dtype != dtype or tensor.shape != write.tensor_data.chunk.sizes:
            raise InvalidRequest(
                f"{_shown(key)}: the planner resolves it to another dtype or shape than it did "
                f"when the save began"
            )
        return tensor

    def sources_of(self, layout: Layout) -> Callable[[int], torch.Tensor]:
        """Return a function that takes the number of an item of the layout and returns
        its tensor, as `source` does.
        """
        items = layout.plan.items
        return lambda number: self.source(
            (items[number].fqn, items[number].offsets), dtype_of(items[number].dtype)
        )

    def lay_out(self, *, global_plan: bytes, metadata: dict[str, Any] | None = None) -> Layout:
        return layout_of(self.rows, [], metadata=metadata, global_plan=global_plan)


_loading_buffers = threading.Lock()


def _knowing_buffers() -> AbstractContextManager[None]:
    """Return a context manager in which `torch.load(weights_only=True)` accepts
    `BytesIO`.

    `safe_globals` alone would remove the class at its end, even if the caller had added
    it before.
    """
    if io.BytesIO in torch.serialization.get_safe_globals():
        return nullcontext()
    return torch.serialization.safe_globals([io.BytesIO])


def load_weights(data: bytes | memoryview) -> Any:
    """Return the value that torch.save has written as `data`, on the CPU.

    Raises errors of many types if only pickled code could bring it back, or if it is damaged.
    """
    data = bytes(data)
    if b"BytesIO" not in data:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    # DCP's example of a train state holds a BytesIO, which is nothing but data. torch's
    # reader of weights does not know that class, and its list of classes is global.
    with _loading_buffers, _knowing_buffers():
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def loads_as_weights(data: bytes | memoryview) -> bool:
    """Return True if bytes of torch.save can be loaded without running pickled code."""
    try:
        load_weights(data)
    except Exception:  # whatever the error is, these bytes cannot be loaded
        return False
    return True


def resolves_by_itself(planner: SavePlanner) -> bool:
    """Return True if the planner may make a new tensor when it resolves an item,
    possibly in the same memory each time.

    DCP's own planner returns the tensors of the state itself.
    """
    own, default = type(planner), DefaultSavePlanner
    names = ("resolve_data", "lookup_object", "transform_object")
    return not isinstance(planner, default) or any(
        getattr(own, name) is not getattr(default, name) for name in names
    )


def may_unpickle(planner: SavePlanner | LoadPlanner, data: bytes | memoryview) -> bool:
    """Return True if these bytes could be unpickled when they are loaded.

    DCP's own planners, and planners derived from them, treat all bytes as the output of
    torch.save. Any other planner may have its own format, so its bytes count only if
    they begin like a zip file or a pickle.
    """
    return (
        isinstance(planner, (DefaultSavePlanner, DefaultLoadPlanner))
        or bytes(data[:2]) == b"PK"
        or bytes(data[:1]) == b"\x80"
    )


def check_complete(
    metadata: Metadata, written: Iterable[tuple[MetadataIndex, tuple[int, ...]]]
) -> None:
    """Raise InvalidRequest unless every item of the metadata is written exactly once,
    in the size that the metadata says.

    `written` has the index and the sizes of each item that any rank writes. The error
    names the items that are missing, written twice, unknown or of another size, or the
    tensor whose shards leave holes or overlap.
    """
    planned: dict[tuple[str, tuple[int, ...] | None], tuple[int, ...] | None] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            planned.update(
                ((fqn, tuple(chunk.offsets)), tuple(chunk.sizes)) for chunk in entry.chunks
            )
        else:
            planned[fqn, None] = None
    pairs = [((index.fqn, _offsets(metadata, index)), tuple(sizes)) for index, sizes in written]
    found = Counter(key for key, _ in pairs)
    for what, keys in (
        ("has dropped", planned.keys() - found.keys()),
        ("has written items that its metadata lacks:", found.keys() - planned.keys()),
        ("writes more than once", {key for key, times in found.items() if times > 1}),
        (
            "writes in another size than its metadata says:",
            {key for key, sizes in pairs if planned.get(key) not in (None, sizes)},
        ),
    ):
        if keys:
            shown = sorted(_shown((fqn, offsets or ())) for fqn, offsets in keys)
            raise InvalidRequest(f"the planner {what} {some_text(shown, 3)}; nothing was saved")
    try:
        check_all({
            fqn: (tuple(entry.size), {(tuple(chunk.offsets),
            tuple(chunk.sizes)) for chunk in entry.chunks})
            for fqn, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        })  # fmt: skip
    except (
        IntegrityError
    ) as error:  # raised now, because a checkpoint with this tensor would count as damaged
        raise InvalidRequest(
            f"the planner's items do not make up whole tensors: {error}; nothing was saved"
        ) from None


def _offsets(metadata: Metadata, index: MetadataIndex) -> tuple[int, ...] | None:
    entry = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    return tuple(index.offset) if index.offset is not None else (0,) * len(entry.size)


def _shown(key: RowKey) -> str:
    return key[0] if not any(key[1]) else f"{key[0]} at {list(key[1])}"


def plain_metadata(
    metadata: Metadata, written: Sequence[Iterable[tuple[MetadataIndex, str]]]
) -> dict[str, Any]:
    """Return `Metadata.state_dict_metadata` in the form that the plan document and the
    manifest have (FORMAT.md, section 3).

    written: the index and the dtype of each item that each rank writes, by rank. A
    planner may cast a tensor, so that its metadata say another dtype.
    """
    stored = {
        (index.fqn, _offsets(metadata, index)): rank
        for rank, items in enumerate(written)
        for index, _ in items
    }
    dtypes = {index.fqn: dtype for items in written for index, dtype in items}
    found: dict[str, Any] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
            dtype = dtypes.get(fqn) or dtype_name(entry.properties.dtype)
            found[fqn] = {"dtype": dtype, "size": list(entry.size), "chunks": chunks}
            ranks = [stored.get((fqn, tuple(chunk.offsets)), 0) for chunk in entry.chunks]
        else:
            found[fqn] = {"dtype": BLOB}
            ranks = [stored.get((fqn, None), 0)]
        if any(ranks):
            found[fqn]["ranks"] = ranks
    return found


def values_of(metadata: Metadata | None, rng: Any = None, save_id: str = "") -> bytes:
    """Return the encoded values document of one rank's part in a save that a DCP
    planner has planned.

    `metadata` is given on the coordinating rank only. Its document also has the nested
    state, the planner data and `save_id`. On the other ranks the state in the document
    is empty. Raises UnsavableValue for planner data that holds tensors or could not be
    restored.
    """
    packer = Packer()
    document = {"state": {}, "rng": packer.pack(rng, "rng")}
    if metadata is not None:
        document["state"] = packer.pack(_tree(metadata), "")
        document["planner_data"] = packer.pack(metadata.planner_data, "the metadata's planner_data")
        if packer.tensors:
            raise UnsavableValue(
                f"{next(iter(packer.tensors))}: planner data cannot hold tensors; make it an item "
                f"of the plan, or a list"
            )
        document["save_id"] = save_id
    return packer.encode_map(document)


def _tree(metadata: Metadata) -> dict[str, Any]:
    """Return the state as it was nested before DCP's planner flattened it, with a
    TensorRef for each item.

    The planner data gives the path of each item. An item without a usable path stays at
    the top level, under its fqn.
    """
    mapping = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    tree: dict[str, Any] = {}
    for fqn in metadata.state_dict_metadata:
        path = mapping.get(fqn)
        if not (isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path)):
            path = (fqn,)
        set_element(tree, path, TensorRef(fqn))
    return tree


def stream(layout: Layout, resolved: Resolved) -> Iterator[memoryview]:
    """Yield the bytes of the regions of a packed slot, item by item.

    Each memoryview is valid until the next one is requested.
    """
    for item in layout.plan.items:
        if item.length:
            tensor = (
                copyable(resolved.source((item.fqn, item.offsets), dtype_of(item.dtype)))
                .to("cpu")
                .contiguous()
            )
            yield memory(tensor, item.length)
