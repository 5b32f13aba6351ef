"""Reads a checkpoint into NumPy arrays, on any operating system, without torch and
without a daemon.

`ArrayCheckpoint.open("ckpts/gpt")` opens the newest checkpoint of a job. Everything
that it reads is verified.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound, storage_errors
from ckptd.shared.formats.bounds import is_flat
from ckptd.shared.formats.coverage import check_cover, two_dtypes, two_sizes
from ckptd.shared.formats.manifest import MAX_MANIFEST, Manifest, PartEntry
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plain_values import Undecoded, decode_plain, merged
from ckptd.shared.formats.plan import BLOB, HIDDEN, Alias, Item, c_order, element_size
from ckptd.shared.formats.receipt import is_abandonment
from ckptd.shared.formats.scatter import scatter, verify
from ckptd.shared.location import local

log = logging.getLogger("ckptd.arrays")

_NUMPY = frozenset({
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "complex64", "complex128",
})  # fmt: skip
_ML_DTYPES = frozenset(
    {
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    }
)


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of elements, given the name of their dtype in a plan
    document.

    bfloat16 and the 8-bit floats need the package ml_dtypes. Without it they come as
    unsigned integers of their size, with the same bits. So do all dtypes that neither
    NumPy nor ml_dtypes has.
    """
    if name in _NUMPY:
        return np.dtype(name)
    if name in _ML_DTYPES:
        with suppress(ImportError, AttributeError):
            found: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), name))
            return found
    size = element_size(name)
    return np.dtype(f"u{size}") if size <= 8 else np.dtype(f"V{size}")


Range = tuple[int, int, int]
"""The number of a part, and the offset and the length of bytes in its packed slot."""


class ArrayCheckpoint:
    """An open, committed checkpoint, made by `ArrayCheckpoint.open`.

    Use it in a `with` statement.

    manifest: its manifest, with step, tag, metrics and user_content. This reader takes
    no lease: ckptd may delete the checkpoint while it is read, which then raises
    StorageError or IntegrityError.
    """

    def __init__(self, manifest: Manifest, open_part: Callable[[PartEntry], PartReader]) -> None:
        """open_part: opens a part of the checkpoint. `close` closes it.

        Raises IntegrityError, NewerFormat, OSError.
        """
        self.manifest = manifest
        self._held = ExitStack()
        self._parts: list[PartReader] = []
        self._part_numbers: dict[int, int] = {}
        self._items: dict[str, list[tuple[PartReader, Item]]] = {}
        self._aliases: dict[str, tuple[PartReader, Item, Alias]] = {}
        try:
            for part in self.manifest.parts:
                reader = open_part(part)
                self._held.callback(reader.close)
                self.manifest.check_part(part, reader)
                self._add(reader)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str], which: str | int = "newest") -> ArrayCheckpoint:
        """Open a checkpoint.

        path: the directory of a job, or of one checkpoint. which: for a job, "newest",
        a step or a tag; of several attempts with this step or tag, the highest counts.

        Raises NotFound; IntegrityError if the checkpoint is damaged; NewerFormat if a
        newer ckptd wrote it; StorageError. "newest" passes over damaged checkpoints,
        but not over one that a newer ckptd wrote.
        """
        where = local(path, "path")
        with storage_errors(f"read {where}"):
            return cls._open(where, which)

    @classmethod
    def _open(cls, where: Path, which: str | int) -> ArrayCheckpoint:
        if (where / names.MANIFEST).is_file():
            return cls._in(where)
        failure: IntegrityError | None = None
        for directory in _newest_first(where, which):
            try:
                return cls._in(directory)
            except NotFound:
                continue
            except NewerFormat:
                raise
            except IntegrityError as error:
                failure = failure or error
                if which != "newest":
                    raise
                log.warning(
                    "checkpoint %s/%s is passed over: %s", where.name, directory.name, error
                )
        raise failure or NotFound(
            f"no checkpoint{'' if which == 'newest' else f' {which!r}'} in {where}"
        )

    @classmethod
    def _in(cls, directory: Path) -> ArrayCheckpoint:
        return cls(_manifest(directory), lambda part: _open_part(directory, part))

    def _add(self, part: PartReader) -> None:
        self._part_numbers[id(part)] = len(self._parts)
        self._parts.append(part)
        part.check_codecs()
        own = {item.fqn: item for item in part.plan.items}
        for item in part.plan.items:
            others = self._items.setdefault(item.fqn, [])
            if others and others[0][1].size != item.size:
                raise two_sizes(item.fqn, others[0][1].size, item.size)
            if others and others[0][1].dtype != item.dtype:
                raise two_dtypes(item.fqn, others[0][1].dtype, item.dtype)
            others.append((part, item))
        for alias in part.plan.aliases:
            self._aliases[alias.fqn] = part, own[alias.base], alias

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        named = [
            name
            for name, items in self._items.items()
            if items[0][1].dtype != BLOB and not name.startswith(HIDDEN)
        ]
        return named + list(self._aliases)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises NotFound."""
        return tuple(self._described(name).size)

    def dtype(self, name: str) -> str:
        """Return the name that the dtype of a tensor has in torch, without a size.

        Raises NotFound.
        """
        return self._described(name).dtype.partition("/")[0]

    def _described(self, name: str) -> Item | Alias:
        if name in self._aliases:
            return self._aliases[name][2]
        if (
            name not in self._items
            or name.startswith(HIDDEN)
            or self._items[name][0][1].dtype == BLOB
        ):
            raise NotFound(
                f"no tensor {name!r}; the checkpoint has {len(self.keys())}, "
                f"such as {', '.join(sorted(self.keys())[:3])}"
            )
        return self._items[name][0][1]

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a tensor as a new array.

        Only the chunks that hold it are read. See `numpy_dtype`.

        A tensor of several shards comes whole, in C order. Raises NotFound,
        IntegrityError, StorageError.
        """
        with storage_errors(f"read {name}"):
            found = self._array(name, _read)
        return found.copy() if name in self._aliases else found

    def arrays(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Return several tensors by name, as `array` does, and read each chunk once.

        Tensors that share memory in the checkpoint share it. Raises the errors of `array`.
        """
        wanted = {name: _Reference(name) for name in names if self._described(name)}
        with storage_errors("read tensors"):
            found: dict[str, np.ndarray[Any, Any]] = self._filled(wanted)
        return found

    def _array(
        self, name: str, read: Callable[[PartReader, Item], bytearray]
    ) -> np.ndarray[Any, Any]:
        described = self._described(name)
        dtype = numpy_dtype(described.dtype)
        if isinstance(described, Alias):
            part, base, alias = self._aliases[name]
            return _view(read(part, base), dtype, alias.size, alias.stride, alias.offset, name)
        shards = self._items[name]
        check_cover(name, described.size, [(item.offsets, item.sizes) for _, item in shards])
        if len(shards) == 1:
            [(part, item)] = shards
            return _view(
                read(part, item), dtype, item.sizes, item.stride or c_order(item.sizes), 0, name
            )
        whole = np.empty(described.size, dtype)
        for part, item in shards:
            place = tuple(
                slice(at, at + size) for at, size in zip(item.offsets, item.sizes, strict=True)
            )
            whole[place] = _view(
                read(part, item), dtype, item.sizes, item.stride or c_order(item.sizes), 0, name
            )
        return whole

    def load(self) -> Any:
        """Return the whole state, with an array for each tensor.

        Objects come as their state dicts, and records as dicts of their fields.

        See `plain_values` for the values that need torch. Raises IntegrityError,
        NewerFormat, StorageError.
        """
        with storage_errors(f"read {self.manifest.tag}"):
            return self._filled(self._tree(_Reference))

    def tree(self, place: Callable[[str], Any]) -> Any:
        """Return the state of all ranks as one tree, as `load` does, without reading a
        tensor.

        `place` returns what takes the place of a tensor or a blob, given its name, and
        must be hashable. Raises IntegrityError, NewerFormat, StorageError.
        """
        with storage_errors(f"read {self.manifest.tag}"):
            return self._tree(place)

    def blob(self, name: str) -> bytes | None:
        """Return the bytes of a value that only torch can decode, or None if this is the
        name of a tensor. Raises IntegrityError, StorageError.
        """
        self._check_known([name])
        shards = self._items.get(name, ())
        if not shards or shards[0][1].dtype != BLOB:
            return None
        with storage_errors(f"read {name}"):
            return bytes(_read(*shards[0]))

    def is_in_order(self, name: str) -> bool:
        """Return True if `rows` reads only the rows that are wanted, since they lie in
        C order in storages of their own. Raises NotFound.
        """
        self._described(name)
        return name not in self._aliases and all(
            item.stride is None or tuple(item.stride) == tuple(c_order(item.sizes))
            for _, item in self._items[name]
        )

    def placed(self, name: str) -> tuple[str, tuple[int, ...], list[Range]]:
        """Return the dtype and the shape of a tensor, and the places of its bytes, one
        after another in C order: [] if they cannot be read so. Raises NotFound.
        """
        described = self._described(name)
        dtype, size = described.dtype.partition("/")[0], described.size
        if isinstance(described, Alias):
            return dtype, size, []
        found, row, rows, shards = list[Range](), 0, size[0] if size else 1, self._items[name]
        for part, item in sorted(shards, key=_offsets_of) if len(shards) > 1 else shards:
            sizes, stride = item.sizes, item.stride
            # A further shard must go on with the next rows.
            if (stride is not None and stride != c_order(sizes)) or (
                sizes != size and (sizes[1:] != size[1:] or item.offsets[0] != row)
            ):
                return dtype, size, []
            row += sizes[0] if sizes else 1
            found.append((self._part_numbers[id(part)], item.offset, item.length))
        return dtype, size, found if row == rows else []

    def read(self, ranges: Iterable[Range]) -> np.ndarray[Any, Any]:
        """Return the bytes of these places, one after another. Each chunk is read once.

        Raises IntegrityError, StorageError.
        """
        places = list(ranges)
        found = bytearray(sum(length for _, _, length in places))
        view, start, end = memoryview(found), 0, 0
        targets = defaultdict[int, list[tuple[int, memoryview]]](list)
        for number, (part, offset, length) in enumerate(places):
            end += length
            # Neighbours become one target: most tensors lie side by side.
            if number + 1 == len(places) or places[number + 1][:2] != (part, offset + length):
                targets[part].append((offset + length - (end - start), view[start:end]))
                start = end
        with storage_errors("read tensors"):
            for part, wanted in targets.items():
                scatter(self._parts[part], wanted)
        return np.frombuffer(found, np.uint8)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return the rows `start` to `stop` of a tensor that has a dimension, as a new
        array.

        Only the chunks that hold them are read, if the tensor `is_in_order`. Raises
        NotFound, IntegrityError, StorageError.
        """
        if not self.is_in_order(name):
            return self.array(name)[start:stop].copy()
        described, shards = self._described(name), self._items[name]
        check_cover(name, described.size, [(item.offsets, item.sizes) for _, item in shards])
        whole = np.empty((stop - start, *described.size[1:]), numpy_dtype(described.dtype))
        with storage_errors(f"read {name}"):
            for part, item in shards:
                low = max(start, item.offsets[0])
                high = min(stop, item.offsets[0] + item.sizes[0])
                if low >= high or not item.length:
                    continue
                width = item.length // item.sizes[0]
                data = bytearray((high - low) * width)
                first = item.offset + (low - item.offsets[0]) * width
                scatter(part, [(first, memoryview(data))])
                across = zip(item.offsets[1:], item.sizes[1:], strict=True)
                sizes = (high - low, *item.sizes[1:])
                whole[(slice(low - start, high - start), *(slice(a, a + n) for a, n in across))] = (
                    _view(data, whole.dtype, sizes, c_order(sizes), 0, name)
                )
        return whole

    def _tree(self, place: Callable[[str], Any]) -> Any:
        documents = []
        for part in self._parts:
            offset, length = part.values
            data = bytearray(length)
            scatter(part, [(offset, memoryview(data))])
            documents.append(decode_plain(bytes(data), place))
        try:
            return merged([document["state"] for document in documents])
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"the values documents cannot be merged: {error!r}") from None

    def _check_known(self, names: Iterable[str]) -> None:
        for name in names:
            if (name not in self._items and name not in self._aliases) or name.startswith(HIDDEN):
                raise IntegrityError(
                    f"the values document names the tensor {name!r}, which no part has"
                )

    def _filled(self, tree: Any) -> Any:
        """Return a tree with arrays in place of references.

        Arrays that share a storage in the checkpoint share it.
        """
        names = dict.fromkeys(reference.name for reference in _references(tree))
        bases = {name: self._aliases[name][:2] for name in names if name in self._aliases}
        shards = {_key(part, item): (part, item) for part, item in bases.values()}
        self._check_known(names)
        for name in names.keys() - bases.keys():
            shards |= {_key(part, item): (part, item) for part, item in self._items[name]}
        held = _read_all(shards.values())
        return _replaced(tree, {name: self._made(name, held) for name in names})

    def _made(self, name: str, held: _Blocks) -> Any:
        shards = self._items.get(name, ())
        if shards and shards[0][1].dtype == BLOB:
            return Undecoded("torch", bytes(held[_key(*shards[0])]))
        return self._array(name, lambda part, item: held[_key(part, item)])

    def verify(self) -> int:
        """Check all that `load` needs: every byte, every tensor, and every value.

        Return the number of raw bytes.

        Raises IntegrityError, NewerFormat, StorageError.
        """
        for name, shards in self._items.items():
            if shards[0][1].dtype != BLOB:
                check_cover(
                    name, shards[0][1].size, [(item.offsets, item.sizes) for _, item in shards]
                )
        with storage_errors(f"read {self.manifest.tag}"):
            total = sum(map(verify, self._parts))
            self._check_known(reference.name for reference in _references(self._tree(_Reference)))
        return total

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> ArrayCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open_part(directory: Path, part: PartEntry) -> PartReader:
    try:
        file = _File(directory / part.file)
    except FileNotFoundError:
        raise IntegrityError(f"{part.file} is missing") from None
    try:
        return PartReader(file, part.file, part.index_sha256, lambda name: _File(directory / name))
    except BaseException:
        file.close()
        raise


class _File:
    """A file of a part as a `Source`, without any call that only POSIX has."""

    remote = False

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    def view(self, offset: int, length: int) -> memoryview:
        buffer = memoryview(bytearray(length))
        return buffer[: self.read(buffer, offset)]

    def read(self, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self._file.seek(offset)
            done = 0
            while done < len(buffer) and (count := self._file.readinto(buffer[done:])):
                done += count
            return done

    def close(self) -> None:
        self._file.close()


def _manifest(directory: Path) -> Manifest:
    """Return the manifest in a directory.

    Raises NotFound if an abandonment has its name, IntegrityError, OSError.
    """
    with (directory / names.MANIFEST).open("rb") as file:
        data = file.read(MAX_MANIFEST + 1)
    if is_abandonment(data):
        raise NotFound(
            f"{directory} contains no complete checkpoint, because its save was abandoned or the "
            f"checkpoint was deleted: load another checkpoint"
        )
    return Manifest.decode(data)


def _newest_first(job: Path, which: str | int) -> Iterator[Path]:
    """Yield the committed directories of a job that `which` selects, the newest first.

    A directory with a damaged manifest is ordered by the step in its name. If its name
    has no step, because the user chose the tag, it comes first in its attempt.
    """
    found: list[tuple[tuple[float, ...], Path]] = []
    for directory in job.iterdir() if job.is_dir() else ():
        parsed = names.parse_tag_directory(directory.name)
        if parsed is None or not (directory / names.MANIFEST).is_file():
            continue
        step = parsed.step
        order: tuple[float, ...] = (parsed.attempt, math.inf if step is None else step)
        if step is None:
            try:
                manifest = _manifest(directory)
                order, step = manifest.order, manifest.step
            except NotFound:
                continue
            except IntegrityError:
                pass  # it may be the newest of its attempt
        if which in ("newest", parsed.tag, directory.name) or (
            isinstance(which, int) and which == step
        ):
            found.append((order, directory))
    return (directory for _, directory in sorted(found, reverse=True))


@dataclass(frozen=True, slots=True)
class _Reference:
    """A reference to a tensor or blob in a tree."""

    name: str


def _references(tree: Any) -> Iterator[_Reference]:
    if isinstance(tree, _Reference):
        yield tree
    elif isinstance(tree, (dict, list, tuple, set, frozenset)):
        items = tree.values() if isinstance(tree, dict) else tree
        for item in () if is_flat(items) else items:
            yield from _references(item)


def _replaced(tree: Any, made: Mapping[str, Any]) -> Any:
    if isinstance(tree, _Reference):
        return made[tree.name]
    if isinstance(tree, (dict, list, tuple)) and is_flat(
        tree.values() if isinstance(tree, dict) else tree
    ):
        return tree
    if isinstance(tree, dict):
        return {key: _replaced(item, made) for key, item in tree.items()}
    if isinstance(tree, (set, frozenset)) and any(isinstance(item, _Reference) for item in tree):
        return [_replaced(item, made) for item in tree]  # an array has no hash
    return (
        type(tree)(_replaced(item, made) for item in tree) if type(tree) in (list, tuple) else tree
    )


def _read(part: PartReader, item: Item) -> bytearray:
    return _read_all([(part, item)])[_key(part, item)]


_Blocks = dict[tuple[int, str, tuple[int, ...]], bytearray]
"""The bytes of shards."""


def _offsets_of(shard: tuple[PartReader, Item]) -> tuple[int, ...]:
    return shard[1].offsets


def _key(part: PartReader, item: Item) -> tuple[int, str, tuple[int, ...]]:
    """Return what tells a shard from all others: a part may have several shards of one
    tensor.
    """
    return id(part), item.fqn, item.offsets


def _read_all(shards: Iterable[tuple[PartReader, Item]]) -> _Blocks:
    """Return the bytes of shards, by `_key`. Each chunk is read once."""
    found, targets = _Blocks(), dict[int, tuple[PartReader, list[tuple[int, memoryview]]]]()
    for part, item in shards:
        data = found[_key(part, item)] = bytearray(item.length)
        if data:
            targets.setdefault(id(part), (part, []))[1].append((item.offset, memoryview(data)))
    for part, wanted in targets.values():
        scatter(part, wanted)
    return found


def _view(
    data: bytearray,
    dtype: np.dtype[Any],
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    name: str,
) -> np.ndarray[Any, Any]:
    """Return an array over bytes. Raises IntegrityError if they do not hold it."""
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and offset + (last + 1) * dtype.itemsize > len(data):
        raise IntegrityError(f"{name} reaches beyond the bytes that hold it")
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, data, offset, [step * dtype.itemsize for step in stride])
