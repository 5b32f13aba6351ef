"""Reads the `.metadata` of a DCP checkpoint, which is a pickle, with an allow-list.

Nothing that the pickle names is imported or called.

A pickle can name any function and have it called. So the reader gives a class of its
own for each class and function that DCP's metadata names. These classes are made for
one load, and keep the state that the pickle gives to their objects. All other names are
refused. Then the kept states are checked.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch

from ckptd.shared.errors import IntegrityError, NotFound, UnsavableValue
from ckptd.shared.formats.bounds import MAX_DEPTH
from ckptd.shared.formats.coverage import check_all

METADATA = ".metadata"
_OF_DCP = "torch.distributed.checkpoint."
_CLASSES = {
    _OF_DCP + "metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    _OF_DCP + "filesystem": ("_StorageInfo", "_StoragePrefix"),
    # Of torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "pathlib": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}  # fmt: skip
"""The classes that the metadata of DCP may name, by module."""
_Extents = tuple[int, ...]
_MOST_METADATA = 1 << 30


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one item in a file, as torch.save has written them.

    file: its path, relative to the checkpoint. offsets, sizes: of the shard of the
    tensor, in elements. transforms: the names of the codecs that the bytes went
    through.
    """

    file: str
    offset: int
    length: int
    offsets: _Extents = ()
    sizes: _Extents = ()
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """The entry of a tensor or another value in the metadata.

    dtype: None for a value that is no tensor. size: in elements. pieces: the shards.
    path: the keys of the value in the nested state.
    """

    dtype: torch.dtype | None
    size: _Extents
    pieces: list[Piece]
    path: tuple[str | int, ...]


def read_metadata(directory: Path) -> dict[str, MetadataEntry]:
    """Return the entries of the metadata by DCP's names for them.

    Raises NotFound if there is no metadata; UnsavableValue if it names something that
    is no class of DCP's metadata; IntegrityError if it is damaged; OSError.
    """
    path = directory / METADATA
    if not path.is_file():
        raise NotFound(
            f"{directory} has no {METADATA}: it is no DCP checkpoint, or its save did not end"
        )
    if (size := path.stat().st_size) > _MOST_METADATA:
        raise IntegrityError(f"{path} has {size:,d} bytes; expected at most {_MOST_METADATA:,d}")
    try:
        with path.open("rb") as file:
            kept = _Reader(file).load()
        return _entries(directory, kept)
    except OSError:
        raise
    except (UnsavableValue, IntegrityError) as error:
        raise type(error)(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises errors of many types
        raise IntegrityError(f"{path} is damaged: {error!r}") from None


class _Reader(pickle.Unpickler):
    """An unpickler that makes no object of a class that the pickle names."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that takes the place of a class or function of DCP's
        metadata. Raises UnsavableValue for any other name.
        """
        if name in _CLASSES.get(module, ()):
            return self._made.setdefault((module, name), type(name, (_Kept,), {}))
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch", "Size"):
            return self._made.setdefault((module, name), type(name, (_KeptTuple,), {}))
        if (module, name) == ("torch.serialization", "_get_layout"):
            return self._made.setdefault((module, name), type(name, (_Kept,), {}))
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise UnsavableValue(
            f"it names {module}.{name}, which is neither a class of DCP's metadata nor a dtype; "
            f"nothing was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UnsavableValue("it refers to objects outside itself, which DCP's metadata never does")


class _Kept:
    """An object that takes the place of one of DCP's classes.

    `state` is the state that the pickle gives to it.
    """

    state: Any = MappingProxyType({})

    def __init__(self, *arguments: Any) -> None:
        """`arguments` are those of a function or of an enum, which the metadata has in
        fields that are not needed.
        """

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        return self.state.get(name, default)

    @property
    def kind(self) -> str:
        return type(self).__name__


class _KeptTuple(tuple[Any, ...]):
    """An object that takes the place of a torch.Size."""

    __slots__ = ()


def _entries(directory: Path, kept: Any) -> dict[str, MetadataEntry]:
    described, stored, paths = (
        kept.get("state_dict_metadata"),
        kept.get("storage_data"),
        kept.get("planner_data"),
    )
    pieces, sizes = dict[str, list[Piece]](), dict[str, int]()
    for index, info in stored.items():
        name, piece = _text(index.get("fqn")), _piece(info, _numbers(index.get("offset") or ()))
        pieces.setdefault(name, []).append(piece)
        if piece.file not in sizes:
            file = directory / piece.file
            if not file.is_file():
                raise IntegrityError(
                    f"the file {piece.file} is not there: the checkpoint is not complete"
                )
            sizes[piece.file] = file.stat().st_size
        if piece.offset + piece.length > sizes[piece.file]:
            raise IntegrityError(
                f"the file {piece.file} is cut short: {name} would end at "
                f"{piece.offset + piece.length:,d}"
            )
    found = {
        _text(name): _entry(
            name, entry, pieces.get(name, []), paths.get(name) if isinstance(paths, dict) else None
        )
        for name, entry in described.items()
    }
    check_all({
        name: (entry.size, {(piece.offsets, piece.sizes) for piece in entry.pieces}) for name,
        entry in found.items() if entry.dtype
    })  # fmt: skip
    return found


def _entry(name: str, entry: Any, pieces: list[Piece], path: Any) -> MetadataEntry:
    keys = (
        tuple(path)
        if isinstance(path, tuple) and 0 < len(path) <= MAX_DEPTH and all(map(_is_key, path))
        else (name,)
    )
    if entry.kind == "BytesStorageMetadata":
        if len(pieces) != 1:
            raise IntegrityError(f"{name} is stored {len(pieces)} times; expected once")
        return MetadataEntry(None, (), pieces, keys)
    dtype = entry.get("properties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise IntegrityError(f"{name} has no dtype")
    sizes = {
        _numbers(chunk.get("offsets")): _numbers(chunk.get("sizes"))
        for chunk in entry.get("chunks")
    }
    if sizes.keys() != {one.offsets for one in pieces} or len(sizes) != len(pieces):
        raise IntegrityError(
            f"{name} has {len(sizes)} shards, and those that are stored are {len(pieces)} others"
        )
    placed = [replace(one, sizes=sizes[one.offsets]) for one in pieces]
    for one in placed:
        if not one.transforms and math.prod(one.sizes) * dtype.itemsize > one.length:
            raise IntegrityError(
                f"{name}: a shard of shape {list(one.sizes)} cannot be in {one.length:,d} bytes"
            )
    return MetadataEntry(dtype, _numbers(entry.get("size")), placed, keys)


def _piece(info: Any, offsets: _Extents) -> Piece:
    file, (offset, length) = (
        _text(info.get("relative_path")),
        _numbers((info.get("offset"), info.get("length"))),
    )
    if not file or Path(file).is_absolute() or ".." in Path(file).parts:
        raise IntegrityError(
            f"it names the file {file!r}, which is not in the directory of the checkpoint"
        )
    return Piece(
        file,
        offset,
        length,
        offsets,
        (),
        tuple(map(_text, info.get("transform_descriptors") or ())),
    )


def _is_key(key: Any) -> bool:
    """Return True for a key of a dict, or a place in a list."""
    return type(key) is str or (type(key) is int and key >= 0)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise IntegrityError(
            f"it contains a value of type {type(value).__name__} where a string was expected (the "
            f"name of a tensor, of a file or of a transform): use another checkpoint"
        )
    return value


def _numbers(values: Any) -> _Extents:
    found = tuple(values)
    if (
        not all(type(number) is int and number >= 0 for number in found)
        or math.prod(found) >= 1 << 62
    ):
        raise IntegrityError(f"it has {found!r} where sizes belong")
    return found
