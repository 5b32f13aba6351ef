"""Tests tensors that are read out of the bytes of storages in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptd.agent.convert.contents import Leaf, leaf_of
from ckptd.agent.convert.stored import StoredBytes, as_stored, fill, length_of, read_stored
from ckptd.shared.errors import IntegrityError
from tests.agent.convert.saved import bits, random


def test_parts_of_a_storage(tmp_path: Path) -> None:
    whole = random(torch.int16, 6, 4)
    (tmp_path / "file").write_bytes(b"before" + bits(whole) + b"after")
    views = {
        "whole": whole,
        "rows": whole[2:4],
        "transposed": whole.t(),
        "column": whole[:, 1],
        "same": whole[1].expand(3, 4),
        "none": whole[:0],
    }
    leaves = [
        replace(leaf_of(view), name=name, storage="s", value=None) for name, view in views.items()
    ]
    found = read_stored(leaves, {"s": StoredBytes(tmp_path / "file", 6, 48)})
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(view) for name, view in views.items()
    }
    assert found["transposed"].stride() == (1, 4)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    with pytest.raises(IntegrityError, match="file is cut short: x lies beyond its end$"):
        read_stored(
            [Leaf("x", torch.float32, torch.float32, (3,), (1,), 0, "s")],
            {"s": StoredBytes(tmp_path / "file", 0, 12)},
        )


def test_length_from_the_start_of_the_storage() -> None:
    assert length_of(leaf_of(torch.zeros(10)[4:6])) == 24
    assert length_of(leaf_of(torch.zeros(3, 4).t())) == 48
    assert length_of(leaf_of(torch.zeros(2).expand(5, 2))) == 8
    assert length_of(leaf_of(torch.zeros(10)[4:4])) == 16
    assert (
        length_of(Leaf("x", torch.float32, torch.float16, (3,), (1,), 8, "s"), as_written=True)
        == 10
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.float8_e5m2], ids=str)
def test_the_order_of_elements_in_memory(dtype: torch.dtype) -> None:
    tensor = random(dtype, 4, 6)
    assert bytes(as_stored(tensor.t(), None).view(torch.uint8).flatten().tolist()) == bits(
        tensor.t()
    )
    turned = as_stored(tensor, (1, 4))
    assert turned.stride() == (1, 4)
    assert bytes(turned.t().view(torch.uint8).flatten().tolist()) == bits(tensor.t())
    assert as_stored(turned, (1, 4)) is turned


def test_an_expanded_view_is_filled() -> None:
    place = torch.zeros(4)
    fill(place.as_strided((3, 2), (0, 1), 2), torch.tensor([5.0, 6.0]).expand(3, 2))
    assert place.tolist() == [0.0, 0.0, 5.0, 6.0]
