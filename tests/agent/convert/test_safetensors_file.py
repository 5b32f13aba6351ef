"""Tests files in the safetensors format against the library of that format.

`test_export.py` has every dtype.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ckptd.agent import Checkpoint
from ckptd.agent.convert.ckptd_directory import contents_of
from ckptd.agent.convert.contents import Leaf
from ckptd.agent.convert.safetensors_file import DTYPES, check, read_file, without_ties, write_file
from ckptd.agent.read.checkpoint import opened_of
from ckptd.shared.errors import IntegrityError, InvalidRequest, UnsavableValue
from tests.agent.convert.saved import assert_same
from tests.agent.convert.saved import save as save_state
from tests.support.cases import each_case


def leaf(
    name: str, storage: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32
) -> Leaf:
    return Leaf(name, dtype, dtype, shape, (1,) * len(shape), 0, storage)


def test_the_names_of_dtypes_are_those_of_the_library() -> None:
    for dtype, name in DTYPES.items():
        assert f'"dtype":"{name}"'.encode() in save({"x": torch.empty(2, dtype=dtype)})


def test_second_names_of_tied_tensors_are_dropped() -> None:
    leaves = {
        "a": leaf("a", "a"),
        "b": leaf("b", "a"),
        "part": leaf("part", "a", (1,)),
        "c": leaf("c", "c"),
        "d": leaf("d", "a"),
    }
    kept, dropped = without_ties(leaves)
    assert list(kept) == ["a", "part", "c"]
    assert dropped == {"b": "a", "d": "a"}


def test_a_dtype_that_the_format_lacks_is_refused() -> None:
    with pytest.raises(
        UnsavableValue,
        match="^y has the dtype torch.float4_e2m1fn_x2, .*, or give it another dtype with `dtype`$",
    ):
        check({"x": leaf("x", "x"), "y": leaf("y", "y", dtype=torch.float4_e2m1fn_x2)})
    with pytest.raises(
        UnsavableValue,
        match="^y has the dtype torch.float4_e2m1fn_x2, which safetensors cannot hold: choose "
        "another `dtype`$",
    ):
        check({"y": replace(leaf("y", "y"), dtype=torch.float4_e2m1fn_x2)})
    with pytest.raises(
        UnsavableValue, match="which safetensors cannot hold: choose a part without it with `only`$"
    ):
        check({"y": leaf("y", "y", dtype=torch.complex128)})


def test_names_and_parts_that_the_format_cannot_hold_are_refused() -> None:
    with pytest.raises(
        InvalidRequest,
        match="^__metadata__ is the name of no tensor in this format: rename the tensor$",
    ):
        check({"__metadata__": leaf("x", "x")})
    with pytest.raises(
        InvalidRequest,
        match="^the chosen part of the state has no tensors, and the format holds nothing else: "
        "choose",
    ):
        check({})


def test_every_tensor_is_aligned_whatever_the_names_are(tmp_path: Path) -> None:
    state = {
        'quote " and \\': torch.ones(3, dtype=torch.int8),
        "é": torch.ones(5, dtype=torch.float64),
        "x" * 13: torch.ones(1),
    }
    with Checkpoint.open(save_state(state, tmp_path / "checkpoint")) as checkpoint:
        contents = contents_of(opened_of(checkpoint))
        write_file(
            tmp_path / "out",
            contents.tree,
            contents,
            {"format": "pt", "note": "ünï"},
            lambda length: None,
        )
    assert_same({name: load_file(tmp_path / "out")[name] for name in state}, state)
    data = (tmp_path / "out").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert len(data) == 8 + int.from_bytes(data[:8], "little") + 3 + 40 + 4


def file_with(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(*offsets: int, dtype: str = "U8", shape: object = (4,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@each_case(
    ("header", "data", "said"),
    [
        (b"{", b"", "its header cannot be read"),
        (b"[]", b"", "its header cannot be read"),
        (b"[" * 100_000, b"", "its header cannot be read"),
        ({"x": 3}, b"", "its header cannot be read"),
        ({"x": entry(0, 4)}, b"123", "its tensors have 4 bytes, and the file has 3"),
        ({"x": entry(0, 4)}, b"12345", "its tensors have 4 bytes, and the file has 5"),
        ({"x": entry(0, 4), "y": entry(2, 6)}, b"123456", "y begins at 2; expected 4"),
        ({"x": entry(0, 4), "y": entry(5, 9)}, b"123456789", "y begins at 5; expected 4"),
        ({"x": entry(0, 3)}, b"123", "x has 3 bytes; expected 4"),
        ({"x": entry(0, 4, shape=(-2, -2))}, b"1234", r"x has the shape \[-2, -2\] at 0 to 4"),
        ({"x": entry(0, 4, shape=(4.0,))}, b"1234", r"x has the shape \[4.0\] at 0 to 4"),
        ({"x": entry(0, 4, shape=(True, 4))}, b"1234", r"x has the shape \[True, 4\] at 0 to 4"),
        ({"x": entry(0, 4, 4)}, b"1234", "its header cannot be read"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ holds other values than text"),
        (b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"",  # noqa: E501
         "two tensors have the name 'x'"),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_right_is_refused(
    tmp_path: Path, header: object, data: bytes, said: str
) -> None:
    path = file_with(tmp_path / "file", header, data)
    with pytest.raises(IntegrityError, match=f"file is no safetensors file, or damaged: .*{said}"):
        read_file(path)
    if "two tensors" not in said and "True" not in said:
        with pytest.raises(SafetensorError):
            load_file(path)  # the library agrees


def test_a_header_of_any_length_is_not_read_before_it_is_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(
        IntegrityError, match="or cut short: its header would have 4,611,686,018,427,387,904 bytes$"
    ):
        read_file(tmp_path / "file")


def test_a_dtype_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsavableValue, match="file: x has the dtype 'F6_E2M3', which is not supported$"
    ):
        read_file(file_with(tmp_path / "file", {"x": entry(0, 3, dtype="F6_E2M3")}, b"123"))
