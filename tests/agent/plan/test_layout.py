"""Rows, aliases and the packed slot, from tensors that lie anywhere in their storages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptd.agent.plan import layout as layout_module
from ckptd.agent.plan.layout import (
    Layout,
    check_item,
    digest,
    lay_out,
    layout_of,
    memories,
    memory,
    plan_locally,
    weigh,
)
from ckptd.agent.state.dtypes import dtype_name
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.plan import ELEMENT_SIZES, MAX_TEXT, Plan, align_region, signature


def laid_out(tensors: dict[str, torch.Tensor]) -> Layout:
    local = plan_locally(tensors)
    return layout_of(local.rows, local.aliases, metadata=None, global_plan=bytes(32))


def test_items_lie_by_element_size_and_do_not_overlap() -> None:
    tensors = {
        "byte": torch.ones(5, dtype=torch.uint8), "float": torch.ones(3), "double": torch.ones(2,
        dtype=torch.float64), "half": torch.ones(7, dtype=torch.float16), "complex": torch.ones(2,
        dtype=torch.complex128), "more": torch.ones(2, 2),
    }  # fmt: skip
    found = laid_out(tensors)
    plan = found.plan
    assert [region.element_size for region in plan.regions] == sorted(
        (r.element_size for r in plan.regions), key=ELEMENT_SIZES.index
    )
    assert all(region.offset == align_region(region.offset) for region in plan.regions)
    end = 0
    for item in sorted(plan.items, key=lambda item: item.offset):
        assert item.offset >= end
        end = item.offset + item.length
    assert found.plan.data_length == end
    assert {item.fqn: (item.dtype, item.sizes, item.length) for item in plan.items} == {
        name: (dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }
    assert (Plan.decode(found.document), found.signature) == (plan, signature(found.document))


def test_the_plan_numbers_what_is_learned() -> None:
    base = torch.ones(8)
    tensors = {"a": torch.ones(3), "mask": torch.ones(3), "b": torch.ones(2), "whole": base,
               "view": base[2:4], "byte": torch.ones(1, dtype=torch.uint8)}  # fmt: skip
    learned = frozenset({"a", "b", "view", "byte", "gone"})
    local = plan_locally(tensors, learned=learned)
    plan = layout_of(
        [row for row in local.rows if not row.base],
        local.aliases,
        metadata=None,
        global_plan=b"",
        learned=local.learned,
    ).plan
    names = [item.fqn for item in plan.items] + [alias.fqn for alias in plan.aliases]
    assert isinstance(plan.learned, list)
    assert [
        names[number] for first, count in plan.learned for number in range(first, first + count)
    ] == [name for name in names if name in learned]
    assert Plan.decode(plan.encode()) == plan
    assert laid_out(tensors).plan.learned is msgspec.UNSET


def test_a_dense_tensor_keeps_its_strides_and_any_other_is_packed() -> None:
    tensors = {
        "transposed": torch.ones(2, 3).T.contiguous().T,
        "strided": torch.ones(4, 4)[:, ::2],
        "plain": torch.ones(2, 3),
    }
    assert {item.fqn: item.stride for item in laid_out(tensors).plan.items} == {
        "transposed": (1, 2),
        "strided": None,
        "plain": None,
    }


# -- tensors that share a storage


def bases(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """Base and offset of each alias."""
    local = plan_locally(tensors)
    return {alias.fqn: (alias.base, alias.offset) for alias in local.aliases}


def test_a_view_of_another_tensor_is_stored_once() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert bases({"row": whole[1], "whole": whole, "same": whole, "other": torch.ones(2)}) == {
        "row": ("whole", 16),
        "same": ("whole", 0),
    }


def test_views_that_overlap_are_stored_in_what_they_cover_together() -> None:
    storage = torch.arange(10.0)
    local = plan_locally({"a": storage[1:5], "b": storage[3:9]})
    (hidden,) = [row for row in local.rows if row.fqn.startswith("~")]
    assert {(alias.fqn, alias.base, alias.offset) for alias in local.aliases} == {
        ("a", hidden.fqn, 4),
        ("b", hidden.fqn, 12),
    }
    assert (hidden.dtype, hidden.sizes) == ("uint8", (36,))


def test_neighbours_and_empty_tensors_share_nothing() -> None:
    storage = torch.arange(10.0)
    assert bases({"a": storage[:5], "b": storage[5:], "empty": storage[3:3]}) == {}


def test_a_base_must_have_each_member_at_a_multiple_of_its_element_size() -> None:
    raw = torch.zeros(24, dtype=torch.uint8)
    views = {"whole": raw[1:24], "floats": raw[4:20].view(torch.float32)}
    local = plan_locally(views)
    (hidden,) = [row for row in local.rows if row.fqn.startswith("~")]
    assert {alias.fqn: (alias.base,
    alias.offset % 4 if alias.fqn == "floats" else 0) for alias in local.aliases} == {
        "whole": (hidden.fqn, 0), "floats": (hidden.fqn, 0),
    }  # fmt: skip


def test_a_rank_lists_the_aliases_that_lie_in_what_it_writes() -> None:
    whole, other = torch.arange(4.0), torch.arange(6.0)
    local = plan_locally({"whole": whole, "view": whole[1:], "other": other, "half": other[:3]})
    (number,) = [number for number, row in enumerate(local.rows) if row.fqn == "whole"]
    found = lay_out(
        local, [number], aliases={"view", "half"}, metadata=None, global_plan=bytes(32)
    ).plan
    assert ([item.fqn for item in found.items], [alias.fqn for alias in found.aliases]) == (
        ["whole"],
        ["view"],
    )


# -- what ranks compare


def test_replicas_have_a_digest_if_another_rank_may_hold_them() -> None:
    tensors = {"w": torch.ones(3), "buffer": torch.ones(3)}
    alone = plan_locally(tensors)
    several = plan_locally(tensors, buffers=["buffer"], world_size=2)
    assert [row.digest for row in alone.rows] == [b"", b""]
    assert {row.fqn: (row.buffer, row.digest) for row in several.rows} == {
        "w": (False, digest(torch.ones(3))),
        "buffer": (True, b""),
    }


def test_a_digest_depends_on_every_byte_and_not_on_the_strides() -> None:
    tensor = torch.arange(100.0).reshape(10, 10)
    changed = tensor.clone()
    changed[9, 9] += 1
    assert digest(tensor) == digest(tensor.T.contiguous().T) != digest(changed)
    assert len(digest(tensor)) == len(digest(torch.empty(0))) == 8
    assert digest(torch.tensor([1 - 2j]).conj()) == digest(torch.tensor([1 + 2j]))


# -- refusals


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("", "float32", "a tensor has an empty key: give it a name"),
        ("~x", "float32", "~x: keys may not begin with '~', which marks shared storages"),
        (
            "x" * MAX_TEXT,
            "float32",
            f"{'x' * 40}...: this key has {MAX_TEXT:,d} characters; expected fewer than "
            f"{MAX_TEXT:,d}",
        ),
        (
            "w",
            "float7",
            "w: a tensor of dtype float7 cannot be saved: expected elements of 1, 2, 4, 8 or 16 "
            "bytes",
        ),
    ],
)
def test_an_item_that_cannot_be_is_refused(name: str, dtype: str, words: str) -> None:
    with pytest.raises(UnsavableValue) as caught:
        check_item(name, dtype)
    assert str(caught.value) == words
    check_item("x" * (MAX_TEXT - 1), "float32")


def test_more_tensors_than_a_plan_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "MAX_ITEMS", 2)
    laid_out({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(
        UnsavableValue, match="^the state has 3 tensors on this rank; ckptd saves up to 2$"
    ):
        laid_out({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)})
    whole = torch.ones(4)
    local = plan_locally({"whole": whole, "a": whole[:1], "b": whole[1:2], "c": whole[2:3]})
    (row,) = [row for row in local.rows if row.fqn == "whole"]
    with pytest.raises(UnsavableValue, match="^the state has 3 tensors on this rank"):
        layout_of([row], local.aliases, metadata=None, global_plan=bytes(32))


# -- memory


def test_memory_is_written_in_place() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    memory(tensor, 2)[:] = b"\x01\x02"
    assert tensor.tolist() == [1, 2, 0, 0]
    assert bytes(memory(tensor, 0)) == b""


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 3456])
def test_the_digest_of_an_accelerator_needs_little_memory(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Pieces of every length give the same digest."""
    torch.manual_seed(0)
    data = torch.randint(0, 256, (length,), dtype=torch.uint8)
    places = torch.arange(length) * 2 + 1
    expected = int(((data.long() + 1) * places * places).sum())
    assert int(weigh(data)) == expected
    monkeypatch.setattr(layout_module, "_DIGESTED", 1000)
    largest = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest[0] = max(largest[0], result.untyped_storage().nbytes())
            return result

    with Sizes():
        assert int(weigh(data)) == expected
    assert largest[0] <= 8000


def test_the_views_of_many_tensors_are_their_memory() -> None:
    tensors = [torch.arange(size, dtype=torch.uint8) for size in (3, 0, 70, 1)]
    views = memories(tensors, [tensor.nbytes for tensor in tensors])
    assert [view.tolist() for view in views] == [tensor.tolist() for tensor in tensors]
    views[2][1] = 200
    assert tensors[2][1] == 200
    assert memories([], []) == []
    assert memories([torch.empty(0)], [0]) == [memory(torch.empty(0), 0)]


def test_the_columns_of_a_layout_are_those_of_dense_tensors_in_the_slot() -> None:
    tensors = {
        "matrix": torch.zeros(2, 3),
        "turned": torch.zeros(2, 3).T,
        "number": torch.tensor(1),
        "empty": torch.zeros(2, 0, 3),
        "again": torch.zeros(2, 3),
    }
    found = layout_of(plan_locally(tensors).rows, [], metadata=None, global_plan=b"")
    sources = [tensors[item.fqn] for item in found.plan.items]
    columns = found.columns
    assert columns.offsets == [item.offset for item in found.plan.items]
    assert columns.lengths == [tensor.nbytes for tensor in sources]
    assert columns.dtypes == [tensor.dtype for tensor in sources]
    assert columns.shapes == [tensor.shape for tensor in sources]
    assert columns.strides == [tensor.stride() for tensor in sources]
    assert columns.elsewhere == []
