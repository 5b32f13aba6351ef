"""Writes a state as a directory that `torch.distributed.checkpoint` reads, tensor after tensor, so that only few are in memory at a time.

DCP's own planner names the items, and DCP's own classes are in the `.metadata`. Each item in a file is written by `torch.save`, as
`FileSystemWriter` does. That writer would keep all tensors of a file in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ckptd.agent.convert.contents import Contents, Leaf, flat, not_dense, replaced
from ckptd.agent.convert.output import CheckedFile, Progress
from ckptd.agent.convert.torch_file import save
from ckptd.shared.errors import InvalidRequest

_FILE_BYTES = 4 << 30
"""Bytes after which another file begins."""


class Planned:
    """A state as DCP's planner sees it: with tensors that have no memory, each of which stands for a leaf.

    Raises InvalidRequest for a state that is no dict, and UnsavableValue for a tensor that DCP cannot hold.
    """

    def __init__(self, tree: Any) -> None:
        if not isinstance(tree, dict):
            kind = "tensor" if isinstance(tree, (Leaf, torch.Tensor)) else type(tree).__name__
            raise InvalidRequest(f"a DCP checkpoint holds a dict, and the chosen part is a {kind}: choose another with `only`")
        if other := next((name for name, value in flat(tree) if isinstance(value, torch.Tensor)), None):
            raise not_dense(other)
        self._leaves: dict[int, Leaf] = {}
        self._planner = DefaultSavePlanner()
        try:
            self._planner.set_up_planner(replaced(tree, Leaf, self._without_memory), is_coordinator=True)
        except ValueError as error:
            raise InvalidRequest(f"DCP cannot name the values of the state: {error}: choose another part with `only`") from None
        plans, self.metadata = self._planner.create_global_plan([self._planner.create_local_plan()])
        self.items = self._planner.finish_plan(plans[0]).items

    def _without_memory(self, leaf: Leaf) -> torch.Tensor:
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        self._leaves[id(made)] = leaf  # the planner keeps the tensor, so that no other gets its id
        return made

    def leaf(self, item: WriteItem) -> Leaf:
        return self._leaves[id(self._planner.state_dict[item.index.fqn])]

    def value(self, item: WriteItem, contents: Contents) -> Any:
        """Return a value that is no tensor. DCP pickles tensors in tuples and the like with the value, so it comes with these."""
        value = self._planner.state_dict[item.index.fqn]
        return replaced(value, torch.Tensor, lambda tensor: next(contents.read([self._leaves[id(tensor)]]))[1])


def write_directory(directory: Path, planned: Planned, contents: Contents, progress: Progress) -> None:
    """Write a DCP checkpoint into an empty directory, `.metadata` last. Raises OSError, IntegrityError."""
    plain = [item for item in planned.items if item.type is WriteItemType.BYTE_IO]
    results = list[WriteResult]()
    for number, part in enumerate(_parts(planned)):
        name = f"__0_{number}.distcp"
        with CheckedFile(directory / name, progress) as file:
            for item in plain if number == 0 else []:
                results.append(_written(file, name, item, planned.value(item, contents)))
            for item, (_, tensor) in zip(part, contents.read(map(planned.leaf, part)), strict=True):
                dense = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
                results.append(_written(file, name, item, dense))
    writer = FileSystemWriter(directory)
    planned.metadata.storage_meta = writer.storage_meta()
    writer.finish(planned.metadata, [results])


def _written(file: CheckedFile, name: str, item: WriteItem, value: Any) -> WriteResult:
    """Append an item to a file, as torch.save writes it, and return DCP's entry for it."""
    start = file.tell()
    save(value, file)
    length = file.tell() - start
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, start, length))


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
