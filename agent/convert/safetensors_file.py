"""Writes tensors as a file in the safetensors format, and reads such a file, one after
another, so that only few are in memory at a time.

The format: 8 bytes with the length of the header (little-endian), the header as JSON,
then the bytes of the tensors without holes. The header has `dtype`, `shape` and
`data_offsets` of each tensor, by name, and text by name in `__metadata__`
(https://huggingface.co/docs/safetensors). The library `safetensors` writes only tensors
that are all in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptd.agent.convert.contents import Contents, Leaf
from ckptd.agent.convert.output import CheckedFile, OnProgress
from ckptd.agent.convert.stored import StoredBytes, read_stored
from ckptd.agent.plan.layout import memory
from ckptd.shared.errors import IntegrityError, InvalidRequest, UnsavableValue
from ckptd.shared.formats.plan import c_order

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""The dtypes that the format has, each with its name there."""
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_METADATA = "__metadata__"
_MOST_HEADER = 100_000_000
"""The most bytes of a header, as in the library."""


def check(leaves: Mapping[str, Leaf]) -> None:
    """Raise UnsavableValue if the format has no name for the dtype of a tensor, and
    InvalidRequest if it cannot hold the name of one.
    """
    if not leaves:
        raise InvalidRequest(
            "the chosen part of the state has no tensors, and the format holds nothing else: "
            "choose another with `only`"
        )
    if _METADATA in leaves:
        raise InvalidRequest(
            f"{_METADATA} is the name of no tensor in this format: rename the tensor"
        )
    for name, leaf in leaves.items():
        if leaf.dtype not in DTYPES:
            advice = "choose a part without it with `only`"
            if leaf.dtype.is_floating_point:
                advice = (
                    "choose another `dtype`"
                    if leaf.dtype is not leaf.saved
                    else f"{advice}, or give it another dtype with `dtype`"
                )
            raise UnsavableValue(
                f"{name} has the dtype {leaf.dtype}, which safetensors cannot hold: {advice}"
            )


def without_ties(leaves: Mapping[str, Leaf]) -> tuple[dict[str, Leaf], dict[str, str]]:
    """Return the tensors without the second names of tied ones, and these names with
    the name that is kept.
    """
    kept, dropped = dict[str, Leaf](), dict[str, str]()
    by_storage: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        first = next(
            (other for other in by_storage.get(leaf.storage, ()) if kept[other].is_tied_to(leaf)),
            None,
        )
        if first is not None:
            dropped[name] = first
            continue
        by_storage.setdefault(leaf.storage, []).append(name)
        kept[name] = leaf
    return kept, dropped


def write_file(
    path: Path,
    leaves: Mapping[str, Leaf],
    contents: Contents,
    metadata: Mapping[str, str],
    progress: OnProgress,
) -> CheckedFile:
    """Write a new file with these tensors, each in C order, and return it, closed.

    Raises FileExistsError, OSError, IntegrityError.
    """
    # So that every tensor is aligned.
    ordered = sorted(leaves.items(), key=lambda pair: -pair[1].dtype.itemsize)
    with CheckedFile(path, progress) as file:
        file.write(_header(ordered, metadata))
        for (_, leaf), (_, tensor) in zip(
            ordered, contents.read(leaf for _, leaf in ordered), strict=True
        ):
            dense = tensor.contiguous()
            file.write(memory(dense, leaf.nbytes))
    return file


def _header(ordered: Iterable[tuple[str, Leaf]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, leaf in ordered:
        header[name] = {
            "dtype": DTYPES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [position, position + leaf.nbytes],
        }
        position += leaf.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # with spaces, so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def read_file(path: Path) -> Contents:
    """Return the contents of a file. Tensors stay in the file until they are read.

    The text in `__metadata__` is the user's content, except for names of tied tensors,
    which are tied again.

    Raises IntegrityError if it is damaged, UnsavableValue for a dtype that torch does
    not have, OSError.
    """
    leaves, text, places = leaves_of(path)
    tied = {name: first for name, first in text.items() if first in leaves and name not in leaves}
    tree = leaves | {name: leaves[first] for name, first in tied.items()}
    content = {name: value for name, value in text.items() if name not in tied and name != "format"}
    return Contents(tree, lambda leaves: read_stored(leaves, places), user_content=content or None)


def leaves_of(path: Path) -> tuple[dict[str, Leaf], dict[str, str], dict[str, StoredBytes]]:
    """Return the tensors of a file by name, the text in `__metadata__`, and the place
    of each storage. Raises as `read_file`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise IntegrityError(
                f"{path} is no safetensors file, or cut short: its header would have {length:,d} "
                f"bytes"
            )
        data = file.read(length)
    try:
        header = json.loads(data, object_pairs_hook=_without_twins)
        text = header.pop(_METADATA, {})
        if not all(type(value) is str for value in text.values()):
            raise ValueError(f"{_METADATA} holds other values than text")
        leaves = {name: _leaf(name, entry, path) for name, entry in header.items()}
        _check_ends(header, size - 8 - length)
    except UnsavableValue:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(
            f"{path} is no safetensors file, or damaged: its header cannot be read: {error}"
        ) from None
    places = {
        leaf.storage: StoredBytes(path, 8 + length + header[name]["data_offsets"][0], leaf.nbytes)
        for name, leaf in leaves.items()
    }
    return leaves, text, places


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"two tensors have the name {name!r}")
        found[name] = value
    return found


def _leaf(name: str, entry: dict[str, Any], path: Path) -> Leaf:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in _BY_NAME:
        raise UnsavableValue(
            f"{path}: {name} has the dtype {entry['dtype']!r}, which is not supported"
        )
    dtype = _BY_NAME[entry["dtype"]]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{name} has the shape {list(shape)} at {start} to {end}")
    if math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError(
            f"{name} has {end - start:,d} bytes; expected {math.prod(shape) * dtype.itemsize:,d}"
        )
    return Leaf(name, dtype, dtype, shape, c_order(shape), 0, f"{path.name}: {name}")


def _check_ends(header: Mapping[str, Any], size: int) -> None:
    """Raise ValueError unless the tensors lie one after another and end with the file,
    as the format demands.
    """
    position = 0
    for start, end, name in sorted(
        (*entry["data_offsets"], name) for name, entry in header.items()
    ):
        if start != position:
            raise ValueError(f"{name} begins at {start:,d}; expected {position:,d}")
        position = end
    if position != size:
        raise ValueError(f"its tensors have {position:,d} bytes, and the file has {size:,d}")
