"""Dtypes and their names in a plan document: also of a dtype that the format does not
list, or that this torch does not have.
"""

from __future__ import annotations

import pytest
import torch

from ckptd.agent.state.dtypes import COPYABLE, copyable, dtype_name, dtype_of, sizeless, torch_dtype
from ckptd.shared.errors import IntegrityError, NotFound
from ckptd.shared.formats.plan import BLOB, ITEM_SIZES, element_size
from tests.support.cases import each_case

DTYPES = sorted(
    {
        found
        for found in vars(torch).values()
        if isinstance(found, torch.dtype) and not str(found).startswith("torch.q")
    },
    key=str,
)


@each_case("dtype", DTYPES, ids=str)
@each_case("listed", [True, False])
def test_a_name_leads_back_to_its_dtype(
    dtype: torch.dtype, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not listed:
        monkeypatch.delitem(ITEM_SIZES, str(dtype).removeprefix("torch."), raising=False)
    name = dtype_name(dtype)
    assert ("/" not in name) == (name in ITEM_SIZES)
    assert dtype_of(name) is dtype
    assert element_size(name) == dtype.itemsize


def test_a_stated_size_is_still_read_once_the_format_lists_the_dtype() -> None:
    assert dtype_of("uint16/2") is torch.uint16


def test_a_blob_is_bytes() -> None:
    assert dtype_of(BLOB) is torch.uint8
    with pytest.raises(NotFound):
        torch_dtype(BLOB)


@pytest.mark.parametrize("name", ["novel32", "Tensor"])
def test_a_dtype_that_torch_does_not_have(name: str) -> None:
    sentence = f"^torch {torch.__version__} has no dtype '{name}': install a newer torch$".replace(
        "+", r"\+"
    )
    with pytest.raises(NotFound, match=sentence):
        torch_dtype(name)
    with pytest.raises(NotFound, match=sentence):
        dtype_of(f"{name}/4")


@pytest.mark.parametrize("name", ["quint8/1", "uint16/4", "float32/8"])
def test_a_name_that_no_tensor_was_saved_under(name: str) -> None:
    with pytest.raises(IntegrityError, match=rf"^ckptd saves no tensor of dtype '{name}': "):
        dtype_of(name)


@each_case("dtype", DTYPES, ids=str)
def test_a_copyable_view_has_the_same_bytes(dtype: torch.dtype) -> None:
    raw = torch.arange(dtype.itemsize * 6, dtype=torch.uint8)
    source = (raw % 2 if dtype is torch.bool else raw).view(dtype).as_strided((2, 2), (3, 1))
    target = torch.zeros(dtype.itemsize * 4, dtype=torch.uint8).view(dtype).view(2, 2)
    view = copyable(target)
    assert view.dtype in COPYABLE
    assert (view is target) == (dtype in COPYABLE)
    view.copy_(copyable(source))
    for row in range(2):
        assert target[row].view(torch.uint8).tolist() == source[row].view(torch.uint8).tolist()


def test_dtypes_whose_size_dcp_cannot_tell() -> None:
    assert [
        name for name in ("int4", "uint1", "bits8", "bits2x4", "novel32/4") if not sizeless(name)
    ] == []
    assert [
        name
        for name in ("int64", "uint8", "bool", "bfloat16", "float8_e5m2", "complex64")
        if sizeless(name)
    ] == []
