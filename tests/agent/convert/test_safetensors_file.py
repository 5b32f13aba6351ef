"""Tests files in the safetensors format against the library of that format. `test_export.py` has every dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from ckptd.agent import Checkpoint
from ckptd.agent.convert.ckptd_directory import contents_of
from ckptd.agent.convert.contents import Leaf
from ckptd.agent.convert.safetensors_file import DTYPES, check, without_ties, write_file
from ckptd.shared.errors import InvalidRequest, UnsavableValue
from tests.agent.convert.saved import assert_same
from tests.agent.convert.saved import save as save_state


def leaf(name: str, storage: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32) -> Leaf:
    return Leaf(name, dtype, dtype, shape, (1,) * len(shape), 0, storage)


def test_the_names_of_dtypes_are_those_of_the_library() -> None:
    for dtype, name in DTYPES.items():
        assert f'"dtype":"{name}"'.encode() in save({"x": torch.empty(2, dtype=dtype)})


def test_second_names_of_tied_tensors_are_dropped() -> None:
    leaves = {"a": leaf("a", "a"), "b": leaf("b", "a"), "part": leaf("part", "a", (1,)), "c": leaf("c", "c"), "d": leaf("d", "a")}
    kept, dropped = without_ties(leaves)
    assert list(kept) == ["a", "part", "c"]
    assert dropped == {"b": "a", "d": "a"}


def test_a_dtype_that_the_format_lacks_is_refused() -> None:
    with pytest.raises(UnsavableValue, match="^y has the dtype torch.float4_e2m1fn_x2, .*, or give it another dtype with `dtype`$"):
        check({"x": leaf("x", "x"), "y": leaf("y", "y", dtype=torch.float4_e2m1fn_x2)})
    with pytest.raises(
        UnsavableValue, match="^y has the dtype torch.float4_e2m1fn_x2, which safetensors cannot hold: choose another `dtype`$"
    ):
        check({"y": replace(leaf("y", "y"), dtype=torch.float4_e2m1fn_x2)})
    with pytest.raises(UnsavableValue, match="which safetensors cannot hold: choose a part without it with `only`$"):
        check({"y": leaf("y", "y", dtype=torch.complex128)})


def test_names_and_parts_that_the_format_cannot_hold_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="^__metadata__ is the name of no tensor in this format: rename the tensor$"):
        check({"__metadata__": leaf("x", "x")})
    with pytest.raises(InvalidRequest, match="^the chosen part of the state has no tensors, and the format holds nothing else: choose"):
        check({})


def test_every_tensor_is_aligned_whatever_the_names_are(tmp_path: Path) -> None:
    state = {'quote " and \\': torch.ones(3, dtype=torch.int8), "é": torch.ones(5, dtype=torch.float64), "x" * 13: torch.ones(1)}
    with Checkpoint.open(save_state(state, tmp_path / "checkpoint")) as checkpoint:
        contents = contents_of(checkpoint.opened)
        write_file(tmp_path / "out", contents.tree, contents, {"format": "pt", "note": "ünï"}, lambda length: None)
    assert_same({name: load_file(tmp_path / "out")[name] for name in state}, state)
    data = (tmp_path / "out").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert len(data) == 8 + int.from_bytes(data[:8], "little") + 3 + 40 + 4
