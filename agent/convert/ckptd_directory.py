"""Reads the contents of a ckptd checkpoint, and writes contents of any format as a
directory that is one checkpoint by itself.

A state is planned and its values are encoded exactly as `snapshot()` does it. For that,
each tensor that is still in a file is stood in for by a tensor that has an address and
no memory. Only when a region of the packed slot is written are its tensors read, one
after another.
"""

from __future__ import annotations

import mmap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from ckptd.agent.convert.contents import Contents, Leaf, flat, replaced, with_leaves
from ckptd.agent.convert.output import OnProgress
from ckptd.agent.convert.stored import as_stored, fill, length_of
from ckptd.agent.dcp.standalone import StandalonePart, commit
from ckptd.agent.plan.layout import Layout, memory, plan_locally
from ckptd.agent.plan.shares import Offer, share_out
from ckptd.agent.read.checkpoint import Checkpoint, opened_of
from ckptd.agent.read.loader import load, materialize
from ckptd.agent.read.sources import Opened
from ckptd.agent.state.capture import Captured, capture, values_document
from ckptd.agent.state.components import TENSOR_KINDS
from ckptd.agent.state.dtypes import copyable
from ckptd.agent.state.merge import bare, merge
from ckptd.agent.state.tree import ObjectNode, filled, tensor_names, unavailable
from ckptd.shared.codecs import codec as codecs
from ckptd.shared.errors import NotFound, UnsavableValue
from ckptd.shared.formats.part_writer import ONE_FILE
from ckptd.shared.formats.plan import HIDDEN, Alias, Item, c_order
from ckptd.shared.formats.snapshot_request import MAX_REQUEST, SnapshotRequest
from ckptd.shared.storage.standalone import StandaloneDirectory
from ckptd.shared.units import size_text

_ROOM = 1 << 16
"""Bytes of the part for its documents, beside the values document and the plan."""
_APART = 64
"""The addresses of two storages are at least so many bytes apart."""
_MOST_ADDRESSES = 1 << 46
"""The most addresses that are reserved: half of those that a process has."""


def contents_of(opened: Opened) -> Contents:
    """Return the contents of an open checkpoint.

    Raises UnsavableValue for a tensor in a set; NotFound for an enum whose class is not
    imported, or a dtype that this torch lacks; IntegrityError, OSError.
    """
    saved, named = opened.saved, list[str]()

    def made(node: ObjectNode) -> Any:
        """Return the sparse tensor or the tensor of a wrapper subclass that a node
        stands for. Any other node stays.
        """
        if node.kind in TENSOR_KINDS:
            return filled(node, materialize(saved, tensor_names(node)).__getitem__)
        return ObjectNode(node.kind, replaced(node.tree, ObjectNode, made), node.cls)

    def leaf(name: str) -> Leaf:
        named.append(name)
        described, dtype = saved.describe(name), saved.dtype(name)
        size = tuple(described.size)
        if isinstance(described, Alias):
            return Leaf(
                name, dtype, dtype, size, tuple(described.stride), described.offset, described.base
            )
        stride = saved.shards[name][0].stride if saved.shard_of_whole(name) else c_order(size)
        return Leaf(name, dtype, dtype, size, tuple(stride), 0, name)

    merged = merge([opened.document(rank)["state"] for rank in range(len(opened.sources))])
    for key, why in unavailable(bare(merged), ""):
        raise NotFound(f"{key or 'the state'}: {why}")
    tree = filled(replaced(bare(merged), ObjectNode, made), leaf, records=False)
    tree = with_leaves(tree)
    reached = {value.name for _, value in flat(tree) if isinstance(value, Leaf)}
    if lost := [name for name in named if name not in reached]:
        raise UnsavableValue(
            f"{lost[0]} is a tensor in a set, which cannot be converted: save it in a list"
        )
    return Contents(
        tree,
        lambda leaves: materialize(saved, [one.name for one in leaves]),
        list(_modules(merged)),
        opened.user_content,
        lambda places: load(saved, {one.name: tensor for one, tensor in places}),
    )


def _modules(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, ObjectNode):
        if tree.kind == "module":
            yield prefix
        else:
            yield from _modules(tree.tree, prefix)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _modules(value, f"{prefix}.{key}" if prefix else str(key))


class PlannedPart:
    """A state that is planned as a checkpoint of one rank.

    Raises UnsavableValue, naming the key, for a value or a tensor that ckptd cannot
    save.
    """

    def __init__(self, tree: Any, user_content: Any) -> None:
        self._leaves: dict[int, Leaf] = {}
        # Kept, so that no other tensor gets the id of one in it.
        self._tree = _with_addresses(tree, self._leaves)
        captured = capture(self._tree)
        self._tensors = captured.tensors
        self._inside: dict[str, list[Alias]] = {}
        if (
            self._leaves.keys()
            != {id(tensor) for tensor in self._tensors.values()} & self._leaves.keys()
        ):
            raise UnsavableValue(
                "a tensor is in a container that cannot be looked into: save it in a dict, a list "
                "or a tuple"
            )
        local = plan_locally(captured.tensors)
        self.layout: Layout = share_out([Offer(local.rows)])[0].lay_out(local)
        for alias in self.layout.plan.aliases:
            self._inside.setdefault(alias.base, []).append(alias)
        self.values = values_document(
            Captured(captured.state, {}, versions=captured.versions), rng=False
        )
        self.request = SnapshotRequest(
            user_content=msgspec.json.encode(user_content).decode(), created=time.time()
        )
        if len(self.request.encode()) > MAX_REQUEST:
            raise UnsavableValue(
                f"user_content: more than {MAX_REQUEST:,d} bytes; leave out the largest of its "
                f"members"
            )

    def stream(self, contents: Contents) -> Iterator[memoryview]:
        """Yield the bytes of the packed slot, item by item.

        Each memoryview is valid until the next one is requested.
        """
        for item, tensor in zip(self.layout.plan.items, self.tensors(contents), strict=True):
            if item.length:
                yield memory(tensor, item.length)

    def tensors(self, contents: Contents) -> Iterator[torch.Tensor]:
        """Yield the tensor of each item of the plan, in the plan's order, with its
        elements in memory as the item has them.
        """
        whole = {
            name: leaf
            for item in self.layout.plan.items
            for name in self._members(item)
            if item.length and (leaf := self._leaf(name))
        }
        read = contents.read(whole.values())
        for item in self.layout.plan.items:
            tensors = (
                next(read)[1] if name in whole else self._tensors[name]
                for name in self._members(item)
            )
            yield (
                self._together(item, tensors)
                if item.fqn.startswith(HIDDEN)
                else as_stored(next(tensors), item.stride)
            )

    def _leaf(self, name: str) -> Leaf | None:
        return self._leaves.get(id(self._tensors[name]))

    def _members(self, item: Item) -> list[str]:
        """Return the names of the tensors with the bytes of an item: itself, or those
        inside a storage that several share.
        """
        if not item.fqn.startswith(HIDDEN):
            return [item.fqn]
        return [alias.fqn for alias in self._inside[item.fqn]]

    def _together(self, item: Item, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of a hidden item, which are those of its members at their
        places.
        """
        whole = torch.zeros(item.length, dtype=torch.uint8, device="cpu")
        for alias, tensor in zip(self._inside[item.fqn], tensors, strict=True):
            width, elements = tensor.dtype.itemsize, copyable(tensor)
            place = whole[: item.length // width * width].view(elements.dtype)
            fill(place.as_strided(tensor.shape, alias.stride, alias.offset // width), elements)
        return whole


def _with_addresses(tree: Any, leaves: dict[int, Leaf]) -> Any:
    """Return the tree with a tensor that has an address and no memory in place of each
    leaf. `leaves` gets each leaf by the tensor's id.

    The addresses are inside one mapping that is never touched. Tensors that share a
    storage share it there, unless they are converted.
    """
    lengths: dict[tuple[str, torch.dtype | None], int] = {}
    for _, leaf in flat(tree):
        if isinstance(leaf, Leaf):
            lengths[_storage(leaf)] = max(
                lengths.get(_storage(leaf), 0), length_of(leaf, as_written=True)
            )
    starts, end = dict[tuple[str, torch.dtype | None], int](), 0
    for storage, length in lengths.items():
        starts[storage] = end
        end += -(-(length + 1) // _APART) * _APART
    if end > _MOST_ADDRESSES:
        raise UnsavableValue(
            f"the state would have {size_text(end)}; expected at most {size_text(_MOST_ADDRESSES)}"
        )
    addresses = _reserved(max(end, 1))

    def with_address(leaf: Leaf) -> torch.Tensor:
        made = torch.empty(0, dtype=leaf.dtype, device="cpu")
        offset = starts[_storage(leaf)] // leaf.dtype.itemsize + leaf.offset // leaf.saved.itemsize
        made.set_(addresses, offset, leaf.shape, leaf.stride)
        leaves[id(made)] = leaf
        return made

    return replaced(tree, Leaf, with_address)


def _storage(leaf: Leaf) -> tuple[str, torch.dtype | None]:
    """Return the key of the storage that a leaf will have.

    Tensors of two dtypes in one storage have one each if they are converted.
    """
    return leaf.storage, None if leaf.dtype is leaf.saved else leaf.saved


def _reserved(length: int) -> torch.UntypedStorage:
    """Return a storage that takes no memory, because nothing may be written to it."""
    reserved = mmap.mmap(
        -1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(reserved, dtype=torch.uint8).untyped_storage()


def write_directory(
    directory: Path, planned: PlannedPart, contents: Contents, codec: str, progress: OnProgress
) -> None:
    """Write a checkpoint into an empty directory, and read it back.

    Raises OSError; IntegrityError, also for values that cannot be made.
    """
    checkpoint = StandaloneDirectory(directory)
    part = StandalonePart(checkpoint, 0, 1, codecs.encoder(codec), None, ONE_FILE)
    layout = planned.layout
    try:
        part.write_pieces(
            layout,
            _counted(planned.stream(contents), progress),
            _ROOM + len(layout.document) + len(planned.values),
        )
        entry = part.finish(layout, planned.values, planned.request)
        commit(
            checkpoint, layout, [entry], planned.request, codec, overwrite=False, nonce=part.nonce
        )
    except BaseException as error:
        part.discard(str(error))
        raise
    part.close()
    with Checkpoint.open(directory) as written:
        written.verify()
        contents_of(opened_of(written))  # makes every value that is no plain tensor


def _counted(pieces: Iterator[memoryview], progress: Callable[[int], None]) -> Iterator[memoryview]:
    for piece in pieces:
        progress(len(piece))
        yield piece
