"""Decodes the values document, which holds everything in a state that is not a tensor
(FORMAT.md, section 3).

The constants are the extension types of the document. `packer.py` encodes it.
"""

from __future__ import annotations

import io
import pathlib
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ckptd.agent.state.dtypes import torch_dtype
from ckptd.agent.state.references import make_class, make_constant, make_flag, make_member
from ckptd.agent.state.tree import (
    RECORDS,
    ObjectNode,
    PerRank,
    TensorRef,
    Unavailable,
    Unsaved,
    inside,
)
from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound
from ckptd.shared.formats import standard
from ckptd.shared.formats.bounds import MAX_DEPTH_READ, check_msgpack, deeper_than
from ckptd.shared.system.collector import paused_collector

Ext = msgspec.msgpack.Ext
(
    TENSOR,
    TUPLE,
    SET,
    FROZENSET,
    MAP,
    BIG_INT,
    COMPLEX,
    ARRAY,
    SCALAR,
    ENUM,
    PATH,
    DTYPE,
    DEVICE,
    SIZE,
) = range(1, 15)
(
    ORDERED_DICT,
    COUNTER,
    DEQUE,
    TORCH,
    BYTEARRAY,
    OBJECT,
    PER_RANK,
    OBJECT_OF_CLASS,
    STANDARD,
    RECORD,
    DEFAULT_DICT,
    UNSAVED,
) = range(15, 27)
FLAG, CONSTANT, CLASS, STREAM = range(27, 31)

FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (int, float, bool, str, bytes, list, tuple, set, dict, Counter, OrderedDict, deque)
}
"""The factories of a defaultdict that a file may name."""
PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.Path,
        pathlib.PurePath,
    )
}


@paused_collector()
def decode(
    document: bytes | memoryview, resolve: Callable[[str], Any] = TensorRef, *, objects: bool = True
) -> Any:
    """Return the value that `Packer.encode` was given.

    `resolve` returns the object that takes the place of a tensor, given its name. If
    `objects` is false, an ObjectNode is replaced by its tree and a PerRank by its
    value. `Unavailable` takes the place of a value that this process cannot make, such
    as a member of an enum whose module is not imported. Raises IntegrityError for an
    invalid document, and NewerFormat for an unknown extension type.
    """

    def hook(code: int, data: memoryview) -> Any:
        if code == TENSOR:
            return resolve(str(data, "utf-8"))
        if code == OBJECT:
            kind, tree = msgspec.msgpack.decode(data, ext_hook=hook)
            return ObjectNode(kind, tree) if objects else tree
        if code == OBJECT_OF_CLASS:
            kind, tree, cls = msgspec.msgpack.decode(data, ext_hook=hook)
            return ObjectNode(kind, tree, cls) if objects else tree
        if code == RECORD:
            kind, cls, tree = msgspec.msgpack.decode(data, ext_hook=hook)
            return _record_node(kind, cls, tree) if objects else tree
        if code == PER_RANK:
            return (
                PerRank(msgspec.msgpack.decode(data, ext_hook=hook))
                if objects
                else msgspec.msgpack.decode(data, ext_hook=hook)
            )
        try:
            if code in _BY_ITEMS:
                return _BY_ITEMS[code](msgspec.msgpack.decode(data, ext_hook=hook))
            if code in _BY_BYTES:
                return _BY_BYTES[code](bytes(data))
        except NotFound as error:
            return Unavailable(str(error), code, bytes(data))
        raise NewerFormat(
            f"a value has the unknown type {code}: it was written by a newer ckptd; upgrade this "
            f"one"
        )

    check_msgpack(document, "values document", NESTED)
    try:
        found = msgspec.msgpack.decode(document, ext_hook=hook)
    except IntegrityError:
        raise
    except Exception as error:
        raise IntegrityError(f"values document cannot be read: {error}") from None
    if deeper_than(found, MAX_DEPTH_READ, inside):
        raise IntegrityError(f"values document is nested more than {MAX_DEPTH_READ} levels deep")
    return found


def _record_node(kind: str, cls: str, fields: Any) -> ObjectNode:
    if kind not in RECORDS:
        raise NewerFormat(
            f"a value has the unknown kind {kind!r}: it was written by a newer ckptd; upgrade "
            f"this one"
        )
    if not isinstance(fields, dict) or not set(RECORDS[kind].required) <= fields.keys():
        raise IntegrityError(f"values document: a value of kind {kind} lacks its fields")
    return ObjectNode(kind, fields, cls)


def _default_dict(factory: str, pairs: Any) -> defaultdict[Any, Any]:
    made: defaultdict[Any, Any] = defaultdict(FACTORIES.get(factory))
    made.update({key: value for key, value in pairs})  # noqa: C416 (a list of lists, not of pairs)
    return made


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise NotFound(
            f"torch {torch.__version__} has no device {text!r}: import the package that brings it "
            f"before loading"
        ) from None


_NOT_OF_TORCH = "values document has a value whose bytes are not those of torch.save"


def _load(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except RuntimeError:  # the value was saved on a device that this machine does not have
        try:
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except Exception:  # torch.load raises errors of many types
            raise IntegrityError(_NOT_OF_TORCH) from None
    except Exception as error:  # torch's refusal has a type that is private to its unpickler
        if (name := re.search(r"GLOBAL ([\w.]+)", str(error))) is None:
            raise IntegrityError(_NOT_OF_TORCH) from None
        raise NotFound(
            f"torch.load(weights_only=True) does not accept {name[1]}: call "
            f"torch.serialization.add_safe_globals() with it before "
            "loading, as the program that saved it did"
        ) from None


def array_of(data: bytes) -> Any:
    """Return the array in the bytes of a `.npy` file."""
    import numpy as np

    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


_BY_ITEMS: dict[int, Callable[[Any], Any]] = {
    TUPLE: tuple,
    SET: set,
    FROZENSET: frozenset,
    MAP: lambda pairs: {key: value for key, value in pairs},  # noqa: C416 (a list of lists, not of pairs)
    COMPLEX: lambda parts: complex(*parts),
    ENUM: make_member,
    PATH: lambda parts: PATHS[parts[0]](parts[1]),
    SIZE: torch.Size,
    ORDERED_DICT: lambda pairs: OrderedDict((key, value) for key, value in pairs),
    COUNTER: lambda pairs: Counter({key: value for key, value in pairs}),  # noqa: C416
    DEQUE: lambda parts: deque(parts[0], parts[1]),
    DEFAULT_DICT: lambda parts: _default_dict(*parts),
    STANDARD: standard.make,
    FLAG: make_flag,
    CONSTANT: make_constant,
    CLASS: make_class,
    STREAM: standard.make_stream,
}
_BY_BYTES: dict[int, Callable[[bytes], Any]] = {
    BIG_INT: lambda data: int(data),
    ARRAY: array_of,
    SCALAR: lambda data: array_of(data)[()],
    DTYPE: lambda data: torch_dtype(data.decode()),
    DEVICE: lambda data: _device(data.decode()),
    TORCH: _load,
    BYTEARRAY: bytearray,
    UNSAVED: lambda data: Unsaved(data.decode()),
}
# Extension types whose payload is msgpack itself.
NESTED = frozenset(_BY_ITEMS) | {OBJECT, PER_RANK, OBJECT_OF_CLASS, RECORD}
HASHED = frozenset(
    {BIG_INT, COMPLEX, SCALAR, ENUM, PATH, DTYPE, DEVICE, SIZE, STANDARD, FLAG, CONSTANT, CLASS}
)
"""Extension types whose values have a hash and hold no others."""
