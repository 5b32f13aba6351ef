"""Writes tensors as a file in the safetensors format, one after another, so that only few are in memory at a time.

The format: 8 bytes with the length of the header (little-endian), the header as JSON, then the bytes of the tensors without holes. The
header has `dtype`, `shape` and `data_offsets` of each tensor, by name, and text by name in `__metadata__`
(https://huggingface.co/docs/safetensors). The library `safetensors` writes only tensors that are all in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ckptd.agent.convert.contents import Contents, Leaf
from ckptd.agent.convert.output import CheckedFile, Progress
from ckptd.agent.plan.layout import memory
from ckptd.shared.errors import InvalidRequest, UnsavableValue

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""The dtypes that the format has, each with its name there."""


_METADATA = "__metadata__"


def check(leaves: Mapping[str, Leaf]) -> None:
    """Raise UnsavableValue if the format has no name for the dtype of a tensor, and InvalidRequest if it cannot hold the name of one."""
    if not leaves:
        raise InvalidRequest("the chosen part of the state has no tensors, and the format holds nothing else: choose another with `only`")
    if _METADATA in leaves:
        raise InvalidRequest(f"{_METADATA} is the name of no tensor in this format: rename the tensor")
    for name, leaf in leaves.items():
        if leaf.dtype not in DTYPES:
            advice = "choose a part without it with `only`"
            if leaf.dtype.is_floating_point:
                advice = "choose another `dtype`" if leaf.dtype is not leaf.saved else f"{advice}, or give it another dtype with `dtype`"
            raise UnsavableValue(f"{name} has the dtype {leaf.dtype}, which safetensors cannot hold: {advice}")


def without_ties(leaves: Mapping[str, Leaf]) -> tuple[dict[str, Leaf], dict[str, str]]:
    """Return the tensors without the second names of tied ones, and these names with the name that is kept."""
    kept, dropped = dict[str, Leaf](), dict[str, str]()
    by_storage: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        first = next((other for other in by_storage.get(leaf.storage, ()) if kept[other].is_tied_to(leaf)), None)
        if first is not None:
            dropped[name] = first
            continue
        by_storage.setdefault(leaf.storage, []).append(name)
        kept[name] = leaf
    return kept, dropped


def write_file(path: Path, leaves: Mapping[str, Leaf], contents: Contents, metadata: Mapping[str, str], progress: Progress) -> None:
    """Write a new file with these tensors, each in C order. Raises FileExistsError, OSError, IntegrityError."""
    ordered = sorted(leaves.items(), key=lambda pair: -pair[1].dtype.itemsize)  # so that every tensor is aligned
    with CheckedFile(path, progress) as file:
        file.write(_header(ordered, metadata))
        for (_, leaf), (_, tensor) in zip(ordered, contents.read(leaf for _, leaf in ordered), strict=True):
            dense = tensor.contiguous()
            file.write(memory(dense, leaf.nbytes))


def _header(ordered: Iterable[tuple[str, Leaf]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, leaf in ordered:
        header[name] = {"dtype": DTYPES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [position, position + leaf.nbytes]}
        position += leaf.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # with spaces, so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text
