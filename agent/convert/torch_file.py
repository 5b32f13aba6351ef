"""Writes a state as a file of `torch.save`, and reads such a file, storage after
storage, so that only few are in memory at a time.

torch writes the file with room for the storages (`torch.serialization.skip_data`), and
then says where the bytes of each of them belong. In the same way it reads a file
without its storages.
"""

from __future__ import annotations

import argparse
import datetime
import io
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, cast
from uuid import UUID

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import safe_globals, skip_data

from ckptd.agent.convert.contents import (
    Contents,
    Leaf,
    check_tree,
    children,
    flat,
    replaced,
    with_leaves,
)
from ckptd.agent.convert.output import CheckedFile, OnProgress
from ckptd.agent.convert.stored import StoredBytes, fill, length_of, read_stored
from ckptd.agent.plan.layout import memory
from ckptd.agent.state.tree import any_node
from ckptd.shared.errors import IntegrityError, StorageError, UnsavableValue
from ckptd.shared.formats.plan import is_dense

_CENTRAL, _LOCAL_CRC, _CENTRAL_CRC, _LOCAL_LENGTHS = struct.Struct("<4s6H3I5H2I"), 14, 16, 26
"""The entry of a file in the directory of a zip, the places of its CRC-32 in its own
header and in that entry, and the place of the lengths of its name and extra field in
its own header, which they end (APPNOTE.TXT, 4.3).
"""

_PLAIN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace, SimpleNamespace, datetime.datetime, datetime.date, datetime.time,
    datetime.timedelta, datetime.timezone, Decimal, Fraction, UUID, PosixPath, frozenset,
    range, slice,
]  # fmt: skip
"""The types of the standard library that ckptd saves by value and that `torch.load` with
`weights_only` refuses by itself. They hold plain data, and to make one runs no code that
the file could choose.

NumPy's are not among them: NumPy makes a scalar out of bytes that may be a pickle.
"""

Group = tuple[str, torch.dtype]
"""The storage of some leaves, and the dtype that they all have in it: torch.save
refuses tensors of several dtypes in one storage.
"""


def write_file(path: Path, tree: Any, contents: Contents, progress: OnProgress) -> None:
    """Write a new file that `torch.load(weights_only=True)` reads.

    Tensors that share a storage in the checkpoint share one in the file.

    Raises UnsavableValue, naming the value, if `torch.load` would need pickled code for
    it; OSError, IntegrityError.
    """
    check_values(tree)
    # A sparse tensor, or one of a wrapper subclass.
    if any(isinstance(value, torch.Tensor) for _, value in flat(tree)):
        whole = contents.together(leaf for _, leaf in flat(tree) if isinstance(leaf, Leaf))
        with CheckedFile(path, progress) as file:
            save(replaced(tree, Leaf, lambda leaf: whole[leaf.name]), file)
        return
    groups: dict[Group, list[Leaf]] = {}
    for _, leaf in flat(tree):
        if isinstance(leaf, Leaf):
            groups.setdefault(_group(leaf), []).append(leaf)
    with FakeTensorMode():
        storages = {
            group: torch.empty(_length(leaves), dtype=leaves[0].dtype, device="cpu")
            for group, leaves in groups.items()
        }
        shown = replaced(tree, Leaf, lambda leaf: _view(storages[_group(leaf)], leaf))
    with skip_data(materialize_fake_tensors=True):
        try:
            torch.save(shown, path)
        except RuntimeError as error:
            raise StorageError(
                f"torch could not write {path.name}, maybe because the disk is full: "
                f"{str(error).splitlines()[0]}"
            ) from None
    places = dict(_places(tree, path))
    if places.keys() != groups.keys():
        raise IntegrityError(
            f"torch wrote {len(places)} of {len(groups)} storages into {path.name}"
        )
    crcs = {}
    with CheckedFile(path, progress, exists=True) as file:
        read = contents.read(leaf for leaves in groups.values() for leaf in leaves)
        for group, leaves in groups.items():
            storage = _storage(
                leaves, [tensor for _, (_, tensor) in zip(leaves, read, strict=False)]
            )
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
    """Return a tensor over the whole storage that these leaves have, with the elements
    of their tensors.
    """
    first, length = tensors[0], _length(leaves)
    if (
        len(tensors) == 1
        and first.numel() == length
        and first.stride() == leaves[0].stride
        and is_dense(first.shape, first.stride())
    ):
        return first.as_strided((length,), (1,))  # without a copy
    storage = torch.zeros(length, dtype=leaves[0].dtype, device="cpu")
    for leaf, tensor in zip(leaves, tensors, strict=True):
        fill(_view(storage, leaf), tensor)
    return storage


def _length(leaves: list[Leaf]) -> int:
    """Return the number of elements that a storage needs for these leaves."""
    return max(
        (length_of(leaf) // leaf.saved.itemsize for leaf in leaves if 0 not in leaf.shape),
        default=0,
    )


def _places(tree: Any, path: Path) -> Iterator[tuple[Group, int]]:
    """Yield the place of each storage in a file that torch has written, in bytes."""
    with FakeTensorMode():
        loaded = torch.load(path, weights_only=True)
    for (_, leaf), (_, tensor) in zip(flat(tree), flat(loaded), strict=True):
        if isinstance(leaf, Leaf):
            yield _group(leaf), tensor.untyped_storage()._checkpoint_offset


def _set_checksums(path: Path, file: CheckedFile, crcs: dict[int, int]) -> None:
    """Write the CRC-32 of each storage into the zip, which torch does not look at, but
    other programs do. `crcs` has them by place.
    """
    for record in _records(path):
        if record.place in crcs:
            crc = crcs[record.place].to_bytes(4, "little")
            file.write_at(record.info.header_offset + _LOCAL_CRC, crc)
            file.write_at(record.entry + _CENTRAL_CRC, crc)


class _Record(NamedTuple):
    """A file in a zip, the place of its bytes, and the place of its entry in the
    directory.
    """

    info: zipfile.ZipInfo
    place: int
    entry: int


def _records(path: Path) -> Iterator[_Record]:
    """Yield the files in a zip. Raises BadZipFile, OSError."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        at = archive.start_dir
        for info in archive.infolist():
            raw.seek(at)
            entry = _CENTRAL.unpack(raw.read(_CENTRAL.size))
            raw.seek(info.header_offset + _LOCAL_LENGTHS)
            lengths = struct.unpack("<2H", raw.read(4))
            yield _Record(info, info.header_offset + _LOCAL_LENGTHS + 4 + sum(lengths), at)
            at += _CENTRAL.size + sum(entry[10:13])


def check_values(tree: Any) -> None:
    """Raise UnsavableValue, naming the value, if `torch.load(weights_only=True)` could
    not load a value of a tree that is no tensor.
    """
    if (refused := _refused(replaced(tree, Leaf, lambda leaf: None), "")) is not None:
        name, value = refused
        raise UnsavableValue(
            f"{name or 'the state'}: a {type(value).__module__}.{type(value).__qualname__} cannot "
            f"be loaded with "
            "torch.load(weights_only=True): choose a part of the state without it with `only`"
        )


def _refused(tree: Any, name: str) -> tuple[str, Any] | None:
    """Return the first smallest part of a tree that cannot be loaded, with its dotted
    name, or None.
    """
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


def load_plain(source: Path | IO[bytes]) -> Any:
    """Return what torch.save has written, with tensors on the CPU. No code in it is run.

    Raises the errors of many types that torch.load raises.
    """
    with safe_globals(_PLAIN):
        return torch.load(source, weights_only=True, map_location="cpu")


def read_file(path: Path) -> Contents:
    """Return the contents of a file that torch.save has written.

    The storages stay in the file until they are read.

    A file is read whole at once if it is in the format of torch before 1.6, was
    compressed or written on a big-endian machine, or has sparse tensors, conjugate
    views, or tensors in sets.

    Raises UnsavableValue if only pickled code could load it, or if a tensor has no
    values; IntegrityError if it is damaged; OSError.
    """
    if (found := _without_storages(path)) is not None:
        return found
    loaded = _loaded(path)
    check_tree(loaded)
    return Contents(with_leaves(loaded), lambda leaves: {})


def _loaded(path: Path) -> Any:
    try:
        return load_plain(path)
    except OSError:
        raise
    except Exception as error:  # torch.load raises errors of many types for damaged files
        raise not_loaded(str(path), f"{path} is no file of torch.save, or damaged", error) from None


def not_loaded(name: str, damaged: str, error: Exception) -> UnsavableValue | IntegrityError:
    """Return the error for bytes that `torch.load(weights_only=True)` has refused.

    name: of the value. damaged: the sentence for bytes that nothing could load. error:
    of torch.load.
    """
    said = " ".join(str(error).split()) or repr(error)
    if type(error).__name__ == "UnpicklingError":
        if found := re.search(r"(?:GLOBAL |class |function )([\w.]+)", said):
            return UnsavableValue(
                f"{name} can only be loaded by running pickled code, which ckptd does not do: it "
                f"names {found[1]}; if you trust the file, load it with "
                "torch.load(..., weights_only=False), and torch.save what you need of it to "
                "another file, as tensors and plain values"
            )
        # Without torch's advice.
        if found := re.search(
            r"WeightsUnpickler error: (.{1,150}?)(?= Check the documentation|$)", said
        ):
            said = found[1]
    return IntegrityError(
        f"{damaged}, or it holds what torch.load(weights_only=True) refuses: {said[:200]}"
    )


def _without_storages(path: Path) -> Contents | None:
    """Return the contents of a file whose storages stay in it, or None if it has to be
    read whole, which also finds damage. Raises OSError.

    torch computes the places of storages from their sizes, so they count only if the
    file has a storage of that size there.
    """
    try:
        lengths = _storages(path)
        with FakeTensorMode():
            loaded = load_plain(path) if lengths is not None else None
    except OSError:
        raise
    except Exception:  # torch.load and zipfile raise errors of many types
        return None
    if lengths is None:
        return None
    check_tree(loaded)
    tensors = [value for _, value in flat(loaded) if isinstance(value, torch.Tensor)]
    if any(map(_needs_memory, tensors)) or _in_a_set(loaded):
        return None
    storages = {
        (tensor.untyped_storage()._checkpoint_offset or 0, tensor.untyped_storage().nbytes())
        for tensor in tensors
    }
    if any(nbytes and lengths.get(place) != nbytes for place, nbytes in storages):
        return None
    places = {str(place): StoredBytes(path, place, nbytes) for place, nbytes in storages}

    def leaf(tensor: torch.Tensor) -> Leaf:
        storage, offset = (
            str(tensor.untyped_storage()._checkpoint_offset or 0),
            int(tensor.storage_offset()) * tensor.itemsize,
        )
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Leaf(
            f"{storage}, {offset}, {tensor.dtype}, {shape}, {stride}",
            tensor.dtype,
            tensor.dtype,
            shape,
            stride,
            offset,
            storage,
        )

    tree = replaced(loaded, torch.Tensor, leaf)
    leaves = [value for _, value in flat(tree) if isinstance(value, Leaf)]
    if any(length_of(one) > places[one.storage].length for one in leaves if 0 not in one.shape):
        raise IntegrityError(f"{path} is damaged: a tensor in it lies outside its storage")
    return Contents(tree, lambda leaves: read_stored(leaves, places))


def _storages(path: Path) -> dict[int, int] | None:
    """Return the lengths of the storages in a zip by their places, or None if they do
    not lie there as torch.save writes them.

    Raises BadZipFile, OSError.
    """
    records = (
        sorted(_records(path), key=lambda record: record.info.header_offset)
        if zipfile.is_zipfile(path)
        else []
    )
    storages = [record for record in records if "/data/" in record.info.filename]
    with path.open("rb") as file:
        for record in records:
            if record.info.filename.endswith("/byteorder"):
                file.seek(record.place)
                if file.read(record.info.file_size) != sys.byteorder.encode():
                    return None
    names = [record.info.filename.rpartition("/")[2] for record in storages]
    if (
        not records
        or names != list(map(str, range(len(names))))
        or any(record.info.compress_type for record in records)
    ):
        return None
    return {record.place: record.info.file_size for record in storages}


def _needs_memory(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that is not described by dtype, shape, strides and the
    place of its storage alone.
    """
    plain = tensor.layout is torch.strided and not (
        tensor.is_nested or tensor.is_quantized or tensor.is_meta
    )
    return not plain or tensor.is_conj() or tensor.is_neg()


def _in_a_set(tree: Any) -> bool:
    """Return True if a tensor is in a container that `replaced` does not look into."""
    return any_node(
        tree,
        lambda node: isinstance(node, (set, frozenset)) and any_node(list(node), torch.is_tensor),
    )
