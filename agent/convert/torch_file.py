"""Writes a state as a file of `torch.save`, storage after storage, so that only few are in memory at a time.

torch writes the file with room for the storages (`torch.serialization.skip_data`), and then says where the bytes of each of them belong.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from ckptd.agent.convert.contents import Contents, Leaf, children, flat, replaced
from ckptd.agent.convert.output import CheckedFile, Progress
from ckptd.agent.plan.layout import memory
from ckptd.shared.errors import IntegrityError, StorageError, UnsavableValue
from ckptd.shared.plan import is_dense

_CENTRAL, _LOCAL_CRC, _CENTRAL_CRC = struct.Struct("<4s6H3I5H2I"), 14, 16
"""The entry of a file in the directory of a zip, and the places of its CRC-32 in its own header and in that entry (APPNOTE.TXT, 4.3)."""

Group = tuple[str, torch.dtype]
"""The storage of some leaves, and the dtype that they all have in it: torch.save refuses tensors of several dtypes in one storage."""


def write_file(path: Path, tree: Any, contents: Contents, progress: Progress) -> None:
    """Write a new file that `torch.load(weights_only=True)` reads. Tensors that share a storage in the checkpoint share one in the file.

    Raises UnsavableValue, naming the value, if `torch.load` would need pickled code for it; OSError, IntegrityError.
    """
    check_values(tree)
    if any(isinstance(value, torch.Tensor) for _, value in flat(tree)):  # a sparse tensor, or one of a wrapper subclass
        whole = contents.together(leaf for _, leaf in flat(tree) if isinstance(leaf, Leaf))
        with CheckedFile(path, progress) as file:
            save(replaced(tree, Leaf, lambda leaf: whole[leaf.name]), file)
        return
    groups: dict[Group, list[Leaf]] = {}
    for _, leaf in flat(tree):
        if isinstance(leaf, Leaf):
            groups.setdefault(_group(leaf), []).append(leaf)
    with FakeTensorMode():
        storages = {group: torch.empty(_length(leaves), dtype=leaves[0].dtype) for group, leaves in groups.items()}
        shown = replaced(tree, Leaf, lambda leaf: _view(storages[_group(leaf)], leaf))
    with skip_data(materialize_fake_tensors=True):
        try:
            torch.save(shown, path)
        except RuntimeError as error:
            raise StorageError(f"torch could not write {path.name}, maybe because the disk is full: {str(error).splitlines()[0]}") from None
    places = dict(_places(tree, path))
    if places.keys() != groups.keys():
        raise IntegrityError(f"torch wrote {len(places)} of {len(groups)} storages into {path.name}")
    crcs = {}
    with CheckedFile(path, progress, exists=True) as file:
        read = contents.read(leaf for leaves in groups.values() for leaf in leaves)
        for group, leaves in groups.items():
            storage = _storage(leaves, [tensor for _, (_, tensor) in zip(leaves, read, strict=False)])
            data = memory(storage, storage.nbytes)
            file.write_at(places[group], data)
            crcs[places[group]] = zlib.crc32(data)
        _set_checksums(path, file, crcs)


def save(value: Any, file: CheckedFile) -> None:
    """Append a value as torch.save writes it. Raises OSError, IntegrityError."""
    try:
        torch.save(value, cast(IO[bytes], file))
    except RuntimeError:
        if file.failure is None:
            raise
        raise file.failure from None


def _group(leaf: Leaf) -> Group:
    return leaf.storage, leaf.saved


def _view(storage: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    return storage.as_strided(leaf.shape, leaf.stride, leaf.offset // leaf.saved.itemsize)


def _storage(leaves: list[Leaf], tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor over the whole storage that these leaves have, with the elements of their tensors."""
    first, length = tensors[0], _length(leaves)
    if len(tensors) == 1 and first.numel() == length and first.stride() == leaves[0].stride and is_dense(first.shape, first.stride()):
        return first.as_strided((length,), (1,))  # without a copy
    storage = torch.zeros(length, dtype=leaves[0].dtype)
    for leaf, tensor in zip(leaves, tensors, strict=True):
        view = _view(storage, leaf)
        for dimension, step in enumerate(leaf.stride):
            if step == 0 and leaf.shape[dimension]:  # expanded: its elements are one in the storage
                view, tensor = view.narrow(dimension, 0, 1), tensor.narrow(dimension, 0, 1)
        view.copy_(tensor)
    return storage


def _length(leaves: list[Leaf]) -> int:
    """Return the number of elements that a storage needs for these leaves."""
    ends = [0]
    for leaf in leaves:
        if 0 not in leaf.shape:
            last = sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride, strict=True))
            ends.append(leaf.offset // leaf.saved.itemsize + last + 1)
    return max(ends)


def _places(tree: Any, path: Path) -> Iterator[tuple[Group, int]]:
    """Yield the place of each storage in a file that torch has written, in bytes."""
    with FakeTensorMode():
        loaded = torch.load(path, weights_only=True)
    for (_, leaf), (_, tensor) in zip(flat(tree), flat(loaded), strict=True):
        if isinstance(leaf, Leaf):
            yield _group(leaf), tensor.untyped_storage()._checkpoint_offset


def _set_checksums(path: Path, file: CheckedFile, crcs: dict[int, int]) -> None:
    """Write the CRC-32 of each storage into the zip, which torch does not look at, but other programs do. `crcs` has them by place."""
    with zipfile.ZipFile(path) as archive:
        at, infos = archive.start_dir, archive.infolist()
        with path.open("rb") as raw:
            raw.seek(at)
            directory = raw.read()
    position = 0
    for info in infos:
        entry = _CENTRAL.unpack_from(directory, position)
        local = info.header_offset
        with path.open("rb") as raw:
            raw.seek(local + 26)
            lengths = struct.unpack("<2H", raw.read(4))
        place = local + 30 + sum(lengths)
        if place in crcs:
            crc = crcs[place].to_bytes(4, "little")
            file.write_at(local + _LOCAL_CRC, crc)
            file.write_at(at + position + _CENTRAL_CRC, crc)
        position += _CENTRAL.size + sum(entry[10:13])


def check_values(tree: Any) -> None:
    """Raise UnsavableValue, naming the value, if `torch.load(weights_only=True)` could not load a value of a tree that is no tensor."""
    without = replaced(tree, Leaf, lambda leaf: None)
    if (refused := _refused(without, "")) is not None:
        name, value = refused
        raise UnsavableValue(
            f"{name or 'the state'}: a {type(value).__module__}.{type(value).__qualname__} cannot be loaded with "
            "torch.load(weights_only=True): choose a part of the state without it with `only`"
        )


def _refused(tree: Any, name: str) -> tuple[str, Any] | None:
    """Return the first smallest part of a tree that cannot be loaded, with its dotted name, or None."""
    if _loads(tree):
        return None
    for key, value in children(tree) or ():
        if (found := _refused(value, f"{name}.{key}" if name else str(key))) is not None:
            return found
    return name, tree


def _loads(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # torch.load raises errors of many types
        return False
    return True
