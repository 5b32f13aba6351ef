"""Writes a state as a directory that `torch.distributed.checkpoint` reads, and reads
such a directory.

Tensors are written and read one after another, so that only few are in memory at a
time. DCP's own planner names the items, and DCP's own classes are in the `.metadata`.
Each item in a file is written by `torch.save`, as `FileSystemWriter` does. That writer
would keep all tensors of a file in memory, and `FileSystemReader` would unpickle the
metadata.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from ckptd.agent.convert.contents import (
    Contents,
    Leaf,
    check_tree,
    flat,
    not_dense,
    replaced,
    with_leaves,
)
from ckptd.agent.convert.dcp_metadata import MetadataEntry, Piece, read_metadata
from ckptd.agent.convert.output import CheckedFile, OnProgress, finish, result_of
from ckptd.agent.convert.torch_file import load_plain, not_loaded, save
from ckptd.agent.plan.save_plan import load_weights
from ckptd.agent.state.dtypes import copyable
from ckptd.shared.errors import IntegrityError, InvalidRequest
from ckptd.shared.formats.plan import c_order

_FILE_BYTES = 4 << 30
"""Bytes after which another file begins."""


class Planned:
    """A state as DCP's planner sees it.

    A tensor without memory stands in for each leaf.

    Raises InvalidRequest for a state that is no dict, and UnsavableValue for a tensor
    that DCP cannot hold.
    """

    def __init__(self, tree: Any) -> None:
        if not isinstance(tree, dict):
            kind = "tensor" if isinstance(tree, (Leaf, torch.Tensor)) else type(tree).__name__
            raise InvalidRequest(
                f"a DCP checkpoint holds a dict, and the chosen part is a {kind}: choose another "
                f"with `only`"
            )
        if other := next(
            (name for name, value in flat(tree) if isinstance(value, torch.Tensor)), None
        ):
            raise not_dense(other)
        self._leaves: dict[int, Leaf] = {}
        self._planner = DefaultSavePlanner()
        try:
            self._planner.set_up_planner(
                replaced(tree, Leaf, self._without_memory), is_coordinator=True
            )
        except ValueError as error:
            raise InvalidRequest(
                f"DCP cannot name the values of the state: {error}: choose another part with `only`"
            ) from None
        plans, self.metadata = self._planner.create_global_plan([self._planner.create_local_plan()])
        self.items = self._planner.finish_plan(plans[0]).items

    def _without_memory(self, leaf: Leaf) -> torch.Tensor:
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        self._leaves[id(made)] = leaf  # the planner keeps the tensor, so that no other gets its id
        return made

    def leaf(self, item: WriteItem) -> Leaf:
        return self._leaves[id(self._planner.state_dict[item.index.fqn])]

    def value(self, item: WriteItem, contents: Contents) -> Any:
        """Return a value that is no tensor.

        DCP pickles tensors in tuples and the like with the value, so it comes with
        these.
        """
        value = self._planner.state_dict[item.index.fqn]
        return replaced(
            value, torch.Tensor, lambda tensor: next(contents.read([self._leaves[id(tensor)]]))[1]
        )


def write_directory(
    directory: Path, planned: Planned, contents: Contents, progress: OnProgress
) -> None:
    """Write a DCP checkpoint into a directory of `continued`, `.metadata` last.

    Finished files stay. Raises OSError, IntegrityError.
    """
    plain = [item for item in planned.items if item.type is WriteItemType.BYTE_IO]
    results = list[WriteResult]()
    for number, part in enumerate(_parts(planned)):
        path = directory / f"__0_{number}.distcp"
        values = plain if number == 0 else []
        ends = result_of(path)
        if ends is None:
            file, ends = _write(path, planned, values, part, contents, progress)
            finish(file, ends)
        else:
            progress(path.stat().st_size)
        for item, (start, end) in zip([*values, *part], pairwise([0, *ends]), strict=True):
            info = _StorageInfo(path.name, start, end - start)
            results.append(
                WriteResult(index=item.index, size_in_bytes=end - start, storage_data=info)
            )
    writer = FileSystemWriter(directory)
    planned.metadata.storage_meta = writer.storage_meta()
    writer.finish(planned.metadata, [results])


def _write(
    path: Path,
    planned: Planned,
    values: list[WriteItem],
    tensors: list[WriteItem],
    contents: Contents,
    progress: OnProgress,
) -> tuple[CheckedFile, list[int]]:
    """Write a file with items, each as torch.save writes it.

    Return the file, closed, and the places where the items end.
    """
    ends = list[int]()
    with CheckedFile(path, progress) as file:
        for item in values:
            save(planned.value(item, contents), file)
            ends.append(file.tell())
        for _, tensor in contents.read(map(planned.leaf, tensors)):
            save(
                tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone(),
                file,
            )
            ends.append(file.tell())
    return file, ends


def _parts(planned: Planned) -> Iterator[list[WriteItem]]:
    """Yield the tensors of each file: about `_FILE_BYTES`. There is at least one file."""
    part, size = list[WriteItem](), 0
    for item in planned.items:
        if item.type is WriteItemType.BYTE_IO:
            continue
        nbytes = planned.leaf(item).nbytes
        if part and size + nbytes > _FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes
    yield part


def read_directory(directory: Path) -> Contents:
    """Return the contents of a DCP checkpoint, nested as they were saved.

    Tensors stay in the files until they are read.

    Raises NotFound if there is no `.metadata`; UnsavableValue if only pickled code
    could load it or one of its values; IntegrityError if it is damaged or not complete;
    OSError.
    """
    entries = read_metadata(directory)
    tree: dict[str | int, Any] = {}
    for name, entry in entries.items():
        value = (
            _value(directory, name, entry)
            if entry.dtype is None
            else _leaf(name, entry, entry.dtype)
        )
        container: Any = tree
        for key in entry.path[:-1]:
            container = (
                container.setdefault(key, _Container()) if isinstance(container, dict) else None
            )
        if not isinstance(container, dict) or entry.path[-1] in container:
            raise IntegrityError(
                f"{directory}: the path {list(entry.path)} of {name} in the state conflicts with "
                f"the path of another value: the metadata of this checkpoint are inconsistent, so "
                f"use another checkpoint"
            )
        container[entry.path[-1]] = value
    tree = {key: _as_list(value) for key, value in tree.items()}
    return Contents(
        tree,
        lambda leaves: {leaf.name: _tensor(directory, leaf, entries[leaf.name]) for leaf in leaves},
    )


class _Container(dict[str | int, Any]):
    """A dict or list of the state while it is put together from the paths of its
    values.
    """


def _as_list(value: Any) -> Any:
    """Return a container as a dict or, if its keys are places, as a list, with None in
    places that have no value.
    """
    if not isinstance(value, _Container):
        return value
    made = {key: _as_list(inner) for key, inner in value.items()}
    places = [key for key in made if isinstance(key, int)]
    if len(places) < len(made) or not places or max(places) > 2 * len(places) + 64:
        return made
    return [made.get(place) for place in range(max(places) + 1)]


def _leaf(name: str, entry: MetadataEntry, dtype: torch.dtype) -> Leaf:
    return Leaf(name, dtype, dtype, entry.size, c_order(entry.size), 0, name)


def _value(directory: Path, name: str, entry: MetadataEntry) -> Any:
    value = _loaded(directory, name, entry.pieces[0], lambda data: load_weights(data.read(-1)))
    check_tree(value)
    return with_leaves(value)


def _tensor(directory: Path, leaf: Leaf, entry: MetadataEntry) -> torch.Tensor:
    """Return a tensor, made from its shards. Raises IntegrityError, OSError."""
    whole = None
    for piece in entry.pieces:
        shard = _loaded(directory, leaf.name, piece, _load_shard)
        if not isinstance(shard, torch.Tensor) or (shard.dtype, tuple(shard.shape)) != (
            leaf.saved,
            piece.sizes,
        ):
            raise IntegrityError(
                f"{directory / piece.file}: the bytes of {leaf.name} are not the shard that the "
                f"metadata describes"
            )
        shard = shard.resolve_conj().resolve_neg()
        if piece.sizes == entry.size:
            return shard
        whole = torch.empty(leaf.shape, dtype=leaf.saved, device="cpu") if whole is None else whole
        part = tuple(
            slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True)
        )
        copyable(whole)[part].copy_(copyable(shard))
    return torch.empty(leaf.shape, dtype=leaf.saved, device="cpu") if whole is None else whole


def _load_shard(data: IO[bytes]) -> Any:
    """Return a tensor, without a copy of its bytes in memory."""
    return load_plain(data)


def _loaded(directory: Path, name: str, piece: Piece, load: Callable[[IO[bytes]], Any]) -> Any:
    """Return the tensor or value that torch.save has written, and that `load` reads.

    Raises UnsavableValue, IntegrityError, OSError.
    """
    path = directory / piece.file
    try:
        with path.open("rb") as file:
            data: Any = _create_file_view(file, piece.offset, piece.length)
            if piece.transforms:
                data = io.BytesIO(_reversed(directory, piece.transforms, data))
            return load(data)
    except OSError:
        raise
    except Exception as error:  # torch.load raises errors of many types
        raise not_loaded(name, f"{path}: the bytes of {name} cannot be read", error) from None


def _reversed(directory: Path, transforms: Sequence[str], data: IO[bytes]) -> bytes:
    """Return bytes as they were before the named codecs of DCP, such as ZStandard."""
    stream = FileSystemReader(directory).transforms.transform_load_stream(
        cast(Any, None), transforms, data
    )
    return stream.read(-1)
