"""Writes a state as a directory that `torch.distributed.checkpoint` reads, tensor after tensor, so that only few are in memory at a time.

DCP's own planner names the items, and DCP's own classes are in the `.metadata`. Each item in a file is written by `torch.save`, as
`FileSystemWriter` does. That writer would keep all tensors of a file in memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ckptd.agent.convert.contents import Contents, Leaf, flat
from ckptd.agent.convert.output import CheckedFile, Progress
from ckptd.agent.convert.selection import mapped
from ckptd.shared.errors import InvalidRequest, UnsavableValue

_FILE_BYTES = 4 << 30
"""Bytes after which another file begins."""


def write_directory(directory: Path, tree: Any, contents: Contents, progress: Progress) -> None:
    """Write a DCP checkpoint into an empty directory, `.metadata` last.

    Raises InvalidRequest for a state that is no dict, UnsavableValue for a tensor that DCP cannot hold, OSError, IntegrityError.
    """
    planner, leaves = planned(tree)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    items = planner.finish_plan(plans[0]).items
    plain = [item for item in items if item.type is WriteItemType.BYTE_IO]
    results = list[WriteResult]()
    for number, part in enumerate(_parts([item for item in items if item.type is not WriteItemType.BYTE_IO], leaves)):
        name = f"__0_{number}.distcp"
        with CheckedFile(directory / name, progress) as file:
            for item in plain if number == 0 else []:
                data = planner.resolve_data(item)
                assert isinstance(data, io.BytesIO)
                start = file.tell()
                file.write(data.getbuffer())
                results.append(_written(item, name, start, file.tell()))
            read = contents.read(leaves[item.index.fqn] for item in part)
            for item, (_, tensor) in zip(part, read, strict=True):
                start = file.tell()
                torch.save(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone(), cast(IO[bytes], file))
                results.append(_written(item, name, start, file.tell()))
    writer = FileSystemWriter(directory)
    metadata.storage_meta = writer.storage_meta()
    writer.finish(metadata, [results])


def planned(tree: Any) -> tuple[DefaultSavePlanner, dict[str, Leaf]]:
    """Return DCP's planner for a state with tensors that have no memory, and the leaves by DCP's names for them."""
    if not isinstance(tree, dict):
        raise InvalidRequest(f"a DCP checkpoint holds a dict, and the chosen part is a {type(tree).__name__}: choose another with `only`")
    if other := next((name for name, value in flat(tree) if isinstance(value, torch.Tensor)), None):
        raise UnsavableValue(
            f"{other} is a sparse tensor or one of a subclass, which DCP cannot hold: choose a part without it with `only`"
        )
    made: list[tuple[torch.Tensor, Leaf]] = []

    def shown(leaf: Leaf) -> torch.Tensor:
        made.append((torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), leaf))
        return made[-1][0]

    planner = DefaultSavePlanner()
    planner.set_up_planner(mapped(tree, shown), is_coordinator=True)
    by_id = {id(tensor): leaf for tensor, leaf in made}
    return planner, {fqn: by_id[id(value)] for fqn, value in planner.state_dict.items() if id(value) in by_id}


def _parts(items: list[WriteItem], leaves: dict[str, Leaf]) -> Iterator[list[WriteItem]]:
    """Yield the items of each file: about `_FILE_BYTES`, and at least one file."""
    part, size = list[WriteItem](), 0
    for item in items:
        if part and size + leaves[item.index.fqn].nbytes > _FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += leaves[item.index.fqn].nbytes
    yield part


def _written(item: WriteItem, file: str, start: int, end: int) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=end - start, storage_data=_StorageInfo(file, start, end - start))
