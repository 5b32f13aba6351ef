"""Encodes everything in a state that is not a tensor as the values document (FORMAT.md,
section 3).

`Packer` turns a state into msgpack and collects its tensors by fully qualified name.
`decode` in `values.py` does the reverse. A value is pickled only if nothing but
`torch.save` can encode it, and is accepted only if `torch.load(weights_only=True)` then
loads it. A value that could not be restored is refused, and the error names its key.
"""

from __future__ import annotations

import enum
import io
import pathlib
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ckptd.agent.state.components import kind_of_tensor
from ckptd.agent.state.optimizers import class_of
from ckptd.agent.state.records import kind_of
from ckptd.agent.state.references import (
    class_parts,
    constant_parts,
    flag_parts,
    is_named,
    member_parts,
)
from ckptd.agent.state.tensor_check import check_own, check_tensor
from ckptd.agent.state.tree import RECORDS, PerRank, TensorRef, Unavailable, any_node
from ckptd.agent.state.values import (
    ARRAY,
    BIG_INT,
    BYTEARRAY,
    CLASS,
    COMPLEX,
    CONSTANT,
    COUNTER,
    DEFAULT_DICT,
    DEQUE,
    DEVICE,
    DTYPE,
    ENUM,
    FACTORIES,
    FLAG,
    FROZENSET,
    HASHED,
    MAP,
    NESTED,
    OBJECT,
    OBJECT_OF_CLASS,
    ORDERED_DICT,
    PATH,
    PATHS,
    PER_RANK,
    RECORD,
    SCALAR,
    SET,
    SIZE,
    STANDARD,
    STREAM,
    TENSOR,
    TORCH,
    TUPLE,
    UNSAVED,
    Ext,
    array_of,
    decode,
)
from ckptd.agent.state.versions import Versions, plain_metadata
from ckptd.shared.errors import IntegrityError, UnsavableValue
from ckptd.shared.formats import bounds
from ckptd.shared.formats.bounds import (
    MAX_DEPTH,
    PLAIN_TYPES,
    Encoded,
    check_msgpack,
    types_of,
)
from ckptd.shared.formats.plan import MAX_DOCUMENT
from ckptd.shared.formats.standard import parts_of, stream_parts

_PLAIN = {type(None), bool, float, str, bytes}
_NUMBERS = frozenset({type(None), bool, float, bytes})
_TEXT = frozenset({str})
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})


class _Floats:
    """A long list of floats in a packed tree."""

    __slots__ = ("encoded", "values")

    def __init__(self, values: Collection[Any], encoded: Encoded) -> None:
        self.values, self.encoded = values, encoded

    def msgpack(self) -> Any:
        """Return the msgpack of the list, or the list if its msgpack is not known."""
        known = self.encoded.get(id(self.values))
        return self.values if known is None else msgspec.Raw(known[1])


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_Floats.msgpack)


def _reference(name: str) -> Ext:
    return Ext(TENSOR, name.encode())


KnownDicts = dict[str, tuple[list[list[Any]], list[str], msgspec.Raw]]
"""Dicts packed by `Packer._only_tensors`, by path: all their keys, the tensors' names,
and the encoded dict.
"""
_MOST_KNOWN = 1 << 17
_layout, _STRIDED = attrgetter("layout"), {torch.strided}
_OBJECTS_OF_ONE = 8
"""A bound for the maps, lists, texts and extensions of one value in the document.

The values inside the value are not counted.
"""
_ROOM = 4096
"""The number of objects that a state leaves free for the other parts of a values
document.

The states of random generators are such a part.
"""
_ROOM_BYTES = 1 << 20


def check_size(document: bytes, objects: int, *, within: bool = False) -> None:
    """Raise UnsavableValue if a reader would refuse this document because of its size.

    objects: as `Packer.objects`. within: True for a state that becomes a part of a
    values document. Takes time in proportion to the document only if `objects` is so
    large that an exact count is needed.
    """
    most, room = (MAX_DOCUMENT - _ROOM_BYTES, _ROOM) if within else (MAX_DOCUMENT, 0)
    if len(document) > most:
        raise UnsavableValue(
            f"the state: its values, without the tensors, take {len(document):,d} bytes; expected "
            f"at most {most:,d}: save large values, "
            "such as bytes and NumPy arrays, as tensors"
        )
    if objects <= bounds.MAX_OBJECTS - room:
        return
    try:
        check_msgpack(document, "the state", NESTED, room=room)
    except IntegrityError as error:
        raise UnsavableValue(f"{error}: save them as tensors or NumPy arrays instead") from None


class Packer:
    """An encoder for one state.

    `pack` returns a tree that msgspec can encode. `tensors` then holds every tensor by
    name, in order. `expand`, if given, is called with each value of an unknown type and
    its path, and returns (kind, plain tree) or None. `rank` becomes part of the names
    of tensors in a `per_rank` value. `known` is filled, and makes the next packing of a
    state with the same keys faster. `encoded` has lists of the state. `expand` clears it
    where it runs code of the caller's, which may change them.

    `objects` is at least the number of maps, lists, texts and extensions in the packed
    values. `versions` has the metadata of each state dict of a module among the values,
    by its path.
    """

    def __init__(
        self,
        expand: Callable[[Any, str], tuple[str, Any] | None] | None = None,
        rank: int = 0,
        known: KnownDicts | None = None,
        encoded: Encoded | None = None,
    ) -> None:
        self._known: KnownDicts = {} if known is None else known
        self._lists: Encoded = {} if encoded is None else encoded
        self.tensors: dict[str, torch.Tensor] = {}
        self.versions: dict[str, Versions] = {}
        self.objects = 0
        self._rank = rank
        self._expand = expand
        # Ids and paths of the containers around the value being packed, outermost
        # first.
        self._above: list[tuple[int, str]] = []

    def encode(self, value: Any, prefix: str = "") -> bytes:
        """Pack a value and return it as msgpack.

        Raises UnsavableValue for a value that could not be restored, naming the key,
        and for a document that is too large for a reader.
        """
        return self._encoded(self.pack(value, prefix), within=True)

    def encode_map(
        self, packed: dict[str, Any], encoded: Mapping[str, bytes] | None = None
    ) -> bytes:
        """Return the document of values that this packer has packed.

        encoded: further values, by key, that come first. There may be 15 keys in all.

        Raises UnsavableValue if the document is too large for a reader.
        """
        document = self._encoded(packed)
        if encoded:
            # In one piece of memory: msgspec would make larger ones, and the C library would
            # then give the memory back, and have it faulted in again at each snapshot.
            count = len(encoded) + len(packed)
            assert count < 16  # a map with a head of one byte
            parts = (part for key, value in encoded.items() for part in (_encode(key), value))
            document = b"".join((bytes([0x80 + count]), *parts, document[1:]))
            check_size(document, self.objects)
        return document

    def _encoded(self, packed: Any, *, within: bool = False) -> bytes:
        try:
            document = _encode(packed)
        except ValueError as error:  # a single value has 2^32 bytes or more
            raise UnsavableValue(f"the state: {error}: save them as a tensor") from None
        check_size(document, self.objects, within=within)
        return document

    def pack(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            if kind is str:
                _check_text(value, path)
                self.objects += 1
            return value
        if kind is int and -(1 << 63) <= value < 1 << 64:
            return value
        self.objects += _OBJECTS_OF_ONE
        if kind is int:
            return Ext(BIG_INT, _digits(value, path))
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if len(self._above) == MAX_DEPTH:
            raise _too_deep(self._above, path)
        self._above.append((id(value), path))
        try:
            if kind is dict:
                return self._dict(value, path)
            return self._items(value, path) if kind is list else self._other(value, kind, path)
        finally:
            self._above.pop()

    def _items(self, values: Collection[Any], path: str) -> Any:
        """Return the packed items of a sequence.

        If msgspec encodes all items, as it does for a history of losses, this is the
        sequence itself.
        """
        if self._is_flat(values):
            return _Floats(values, self._lists) if id(values) in self._lists else values
        prefix = f"{path}." if path else ""
        return [
            item if type(item) in _NUMBERS else self.pack(item, f"{prefix}{n}")
            for n, item in enumerate(values)
        ]

    def _is_flat(self, values: Collection[Any]) -> bool:
        """Return True if msgspec encodes all values as `pack` would pack them.

        Adds the texts among the values to `objects`.
        """
        # A state may hold millions of plain values, so all of this runs in C.
        kinds = types_of(values, self._lists)
        if not kinds <= PLAIN_TYPES:
            return False
        if str in kinds:
            self.objects += len(values)
            if not _are_texts(
                values if len(kinds) == 1 else [value for value in values if type(value) is str]
            ):
                return False
        if int in kinds:
            numbers = (
                values if len(kinds) == 1 else [value for value in values if type(value) is int]
            )
            return bool(min(numbers) >= -(1 << 63) and max(numbers) < 1 << 64)
        return True

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if kind := kind_of_tensor(value):
            return self._record(kind, value, path)
        name = path or "tensor"
        # Two keys give one name: {"a.b": ...} beside {"a": {"b": ...}}, or 0 beside
        # "0".
        if name in self.tensors:
            number = 2
            while f"{name}#{number}" in self.tensors:
                number += 1
            name = f"{name}#{number}"
        self.tensors[name] = value
        return _reference(name)

    def _set(self, value: Collection[Any], path: str) -> bytes:
        flat = self._is_flat(value)
        ordered = sorted(value, key=repr if flat else partial(_said, repr))
        prefix = f"{path}." if path else ""
        return _encode(
            ordered
            if flat
            else [self._hashed(item, f"{prefix}{n}") for n, item in enumerate(ordered)]
        )

    def _hashed(self, value: Any, path: str, *, is_key: bool = False) -> Any:
        """Pack a key of a dict, or an item of a set.

        Raises UnsavableValue for a value that would come back without a hash.
        """
        # Not LenientPacker.pack, which would return an Unsaved.
        packed = Packer.pack(self, value, path)
        if type(packed) is not Ext or packed.code in HASHED:
            return packed
        found = decode(_encode(packed))
        try:
            hash(found)
        except TypeError:
            pass
        else:
            refused = (TensorRef, PerRank) if is_key else PerRank
            if not any_node(found, lambda node: isinstance(node, refused)):
                return packed
        kind = type(value)
        role = "key of a dict" if is_key else "part of a set"
        raise UnsavableValue(
            f"{path}: a value of type {kind.__module__}.{kind.__qualname__} cannot be brought "
            f"back as a {role}: use a number, a text, or a "
            "tuple of these"
        )

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        prefix = f"{path}." if path else ""
        if not _TEXT.issuperset(map(type, value)):
            return Ext(MAP, self._pairs(value, path))
        self.objects += len(value)
        kinds = set(map(type, value.values()))
        if kinds <= PLAIN_TYPES and _are_texts(value) and self._is_flat(value.values()):
            return value
        if (
            value
            and TENSORS.issuperset(kinds)
            and (packed := self._only_tensors([value], path)) is not None
        ):
            return packed
        if (
            kinds == {dict}
            and (packed := self._only_tensors([value, *value.values()], path)) is not None
        ):
            return packed
        for key in value:
            _check_text(key, path)
        return {
            key: item if type(item) in _NUMBERS else self.pack(item, prefix + key)
            for key, item in value.items()
        }

    def _only_tensors(self, dicts: list[dict[Any, Any]], path: str) -> Any:
        """Pack a dict of tensors, or a dict of dicts of tensors.

        Return None if it holds anything else, or a name is already taken.
        """
        # Most of any state consists of these dicts, so the loops run in C, and dicts
        # with the same keys as last time are not encoded again.
        keys = list(map(list, dicts))
        tensors = list(chain.from_iterable(map(dict.values, dicts[1:] or dicts)))
        known = self._known.get(path)
        if not TENSORS.issuperset(map(type, tensors)):
            return None
        if not _STRIDED.issuperset(map(_layout, tensors)):  # also where one was strided before
            return None
        if known is None or known[0] != keys:
            names = self._names(dicts, path)
            if names is None or any(map(kind_of_tensor, tensors)):
                return None
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            references = iter(map(_reference, names))
            packed = [{key: next(references) for key in one} for one in dicts[1:] or dicts]
            whole = dict(zip(dicts[0], packed, strict=True)) if dicts[1:] else packed[0]
            known = self._known[path] = keys, names, msgspec.Raw(_encode(whole))
        if not self.tensors.keys().isdisjoint(known[1]):
            return None
        self.tensors.update(zip(known[1], tensors, strict=True))
        self.objects += 2 * sum(map(len, keys)) + len(keys)
        return known[2]

    def _names(self, dicts: list[dict[Any, Any]], path: str) -> list[str] | None:
        """Return the name of every tensor, or None if a key is not a string, a name is
        empty, or two names are equal.
        """
        if not all(type(key) is str for one in dicts for key in one):
            return None
        for key in chain.from_iterable(dicts):
            _check_text(key, path)
        prefix = f"{path}." if path else ""
        if dicts[1:]:
            names = [
                f"{prefix}{outer}.{key}"
                for outer, one in zip(dicts[0], dicts[1:], strict=True)
                for key in one
            ]
        else:
            names = [prefix + key for key in dicts[0]]
        return names if all(names) and len(set(names)) == len(names) else None

    def _pairs(self, value: dict[Any, Any], path: str) -> bytes:
        self.objects += len(value)
        prefix, flat = f"{path}." if path else "", self._is_flat(value)
        if flat and self._is_flat(value.values()):
            return _encode(list(value.items()))
        pairs = []
        for key, item in value.items():
            packed = (
                key if flat else self._hashed(key, f"{prefix}key {_said(repr, key)}", is_key=True)
            )
            pairs.append(
                [
                    packed,
                    item
                    if type(item) in _NUMBERS
                    else self.pack(item, f"{prefix}{_said(str, key)}"),
                ]
            )
        return _encode(pairs)

    def _other(self, value: Any, kind: type, path: str) -> Any:
        if kind is TensorRef:
            return _reference(value.fqn)
        if kind is Unavailable:
            return self._unavailable(value, path)
        if kind is PerRank:
            before = len(self.tensors)
            packed = self.pack(value.value, f"{path}@{self._rank}")
            for name in islice(self.tensors, before, None):
                check_own(name, self.tensors[name])
            return Ext(PER_RANK, _encode(packed))
        if kind is tuple:
            return Ext(TUPLE, _encode(self._items(value, path)))
        if kind is torch.Size:
            return Ext(SIZE, _encode(list(value)))
        if kind is OrderedDict:
            if (metadata := plain_metadata(value)) is not None:
                self.versions[path] = metadata
                self.objects += _OBJECTS_OF_ONE * len(metadata)
            return Ext(ORDERED_DICT, self._pairs(value, path))
        if kind is Counter:
            return Ext(COUNTER, self._pairs(value, path))
        if kind is defaultdict:
            factory = next(
                (name for name, cls in FACTORIES.items() if cls is value.default_factory), ""
            )
            return Ext(DEFAULT_DICT, _encode([factory, msgspec.Raw(self._pairs(value, path))]))
        if kind is deque:
            return Ext(DEQUE, _encode([self._items(list(value), path), value.maxlen]))
        if kind is set or kind is frozenset:
            return Ext(SET if kind is set else FROZENSET, self._set(value, path))
        if kind is complex:
            return Ext(COMPLEX, _encode([value.real, value.imag]))
        if kind is bytearray:
            return Ext(BYTEARRAY, bytes(value))
        if kind is torch.dtype:
            return Ext(DTYPE, str(value).removeprefix("torch.").encode())
        if kind is torch.device:
            return Ext(DEVICE, str(value).encode())
        if isinstance(value, enum.Enum):
            return self._member(value, path)
        if isinstance(value, pathlib.PurePath) and kind.__name__ in PATHS:
            _check_text(str(value), path)
            return Ext(PATH, _encode([kind.__name__, str(value)]))
        if "numpy" in sys.modules and (packed := _pack_numpy(value, path)) is not None:
            return packed
        if self._expand is not None and (expanded := self._expand(value, path)) is not None:
            name, tree = expanded
            packed = self.pack(tree, path)
            if name == "module":
                return Ext(OBJECT, _encode([name, packed]))
            return Ext(OBJECT_OF_CLASS, _encode([name, packed, class_of(value)]))
        if record := kind_of(value):
            return self._record(record, value, path)
        for code, parts in (
            (STANDARD, parts_of(value)),
            (STREAM, stream_parts(value)),
            (CONSTANT, constant_parts(value)),
        ):
            if parts is not None:
                return Ext(
                    code,
                    _encode(
                        [self.pack(part, path) if type(part) is str else part for part in parts]
                    ),
                )
        if (named := class_parts(value, path)) is not None:
            return Ext(CLASS, _encode(named))
        return self._torch(value, kind, path)

    def _unavailable(self, value: Unavailable, path: str) -> Ext:
        """Pack a value that this process could not make, as it was read."""
        if not value.code:
            raise UnsavableValue(f"{path or 'the state'}: {value.why}")
        self.objects += len(value.data)
        return Ext(value.code, value.data)

    def _member(self, value: enum.Enum, path: str) -> Ext:
        if is_named(value) or not isinstance(value, enum.Flag):
            return Ext(ENUM, _encode(member_parts(value, path)))
        module, qualname, names, rest = flag_parts(value, path)
        self.objects += len(names)
        return Ext(FLAG, _encode([module, qualname, names, self.pack(rest, path)]))

    def _record(self, kind: str, value: Any, path: str) -> Any:
        return Ext(
            RECORD, _encode([kind, class_of(value), self.pack(RECORDS[kind].fields(value), path)])
        )

    def _torch(self, value: Any, kind: type, path: str) -> Any:
        """Encode with torch.save, as the last resort.

        A value that `weights_only` would not load is refused now, not at the recovery.
        """
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception:
            raise UnsavableValue(
                f"{path or 'the state'}: a value of type {kind.__module__}.{kind.__qualname__} "
                f"could not be brought back without running pickled code; save "
                f"{_instead(value)} instead, or leave it out (unsavable='skip' leaves out all such "
                f"values)"
            ) from None
        return Ext(TORCH, buffer.getvalue())


class LenientPacker(Packer):
    """A Packer that leaves out what cannot be saved, instead of raising.

    `unsaved` is filled with the reason for each such key.
    """

    def __init__(
        self,
        expand: Callable[[Any, str], tuple[str, Any] | None],
        rank: int,
        unsaved: dict[str, str],
        encoded: Encoded | None = None,
    ) -> None:
        super().__init__(expand, rank, encoded=encoded)
        self._unsaved = unsaved

    def pack(self, value: Any, path: str) -> Any:
        try:
            if isinstance(value, torch.Tensor) and not kind_of_tensor(value):
                check_tensor(path, value)
            return super().pack(value, path)
        except UnsavableValue as error:
            self._unsaved[path] = str(error)
            self.objects += 1
            return Ext(UNSAVED, class_of(value).encode())

    def _only_tensors(self, dicts: list[dict[Any, Any]], path: str) -> Any:
        """Return None: each tensor is checked."""
        return None


def _check_text(text: str, path: str) -> None:
    """Raise UnsavableValue if a text holds surrogates, which UTF-8 cannot encode."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsavableValue(
            f"{path or 'the state'}: a text or key holds surrogates, which UTF-8 cannot encode: "
            f"{text[:40]!r}"
        ) from None


def _are_texts(values: Iterable[str]) -> bool:
    """Return True if UTF-8 can encode all of these texts.

    Takes little time for a million of them.
    """
    if all(map(str.isascii, values)):
        return True
    try:
        deque(map(str.encode, values), maxlen=0)
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(above: Sequence[tuple[int, str]], path: str) -> UnsavableValue:
    """Return the error for a value that lies in MAX_DEPTH containers.

    The cause is either deep nesting or a container that contains itself.

    `above` has the id and the path of each of these containers, outermost first.
    """
    first: dict[int, str] = {}
    for number, where in above:
        if number in first:
            whole = first[number] or "the state"
            return UnsavableValue(
                f"{where}: it is the same object as {whole}, which contains itself; save a copy, "
                f"or leave it out"
            )
        first[number] = where
    return UnsavableValue(
        f"{path[:80]}...: it lies in more than {MAX_DEPTH} containers; nest the state less, or "
        f"save the inner part under a key of its own"
    )


def _digits(value: int, path: str) -> bytes:
    """Return an integer as decimal text.

    Raises UnsavableValue if it has more digits than Python converts to and from text by
    default. A higher limit of this process does not count, because the process that
    reads the integer may have the default.
    """
    most = sys.int_info.default_max_str_digits
    if (about := value.bit_length() * 30_103 // 100_000 + 1) <= most + 1:
        try:
            if len(text := str(abs(value))) <= most:
                return (f"-{text}" if value < 0 else text).encode()
        except ValueError:  # this process has a lower limit
            most = sys.get_int_max_str_digits()
    raise UnsavableValue(
        f"{path or 'the state'}: an integer of about {about:,d} digits; expected at most "
        f"{most:,d}, as many as "
        "Python converts to text: save it as bytes (int.to_bytes) or as a tensor"
    )


def _said(how: Callable[[Any], str], value: Any) -> str:
    """Return `how(value)`, where `how` is str or repr.

    Return the name of the value's type instead if the value holds an integer that is
    too long for Python to write. `_digits` refuses that integer when it is packed.
    """
    try:
        return how(value)
    except ValueError:
        return type(value).__name__


def _instead(value: Any) -> str:
    """Return the words for what is saved instead of a value that cannot be."""
    if isinstance(value, DataLoader):
        return "ckptd.Batches(loader), which has its position,"
    return "its state_dict() or plain values"


def _pack_numpy(value: Any, path: str) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        code, array = SCALAR, np.asarray(value)
    elif type(value) is np.ndarray:
        code, array = ARRAY, value
    else:
        return None
    if array.dtype.hasobject:
        return None
    if not _in_npy(array.dtype):
        raise UnsavableValue(
            f"{path or 'the state'}: a NumPy value of dtype {array.dtype}, which NumPy's own file "
            f"format does not have; save its bits as "
            "integers (array.view()), or a tensor"
        )
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    if code == SCALAR:
        found = array_of(buffer.getvalue())[()]
        if type(found) is not type(value) or found.tobytes() != value.tobytes():
            raise UnsavableValue(
                f"{path or 'the state'}: the NumPy value {value!r} comes back as {found!r} from "
                f"NumPy's own file format; save a "
                "plain value of Python instead (value.item())"
            )
    return Ext(code, buffer.getvalue())


@lru_cache(maxsize=256)
def _in_npy(dtype: Any) -> bool:
    """Return True if an array of this dtype has the same dtype when it is read from a
    `.npy` file.
    """
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype)
        except (TypeError, ValueError):
            return False
