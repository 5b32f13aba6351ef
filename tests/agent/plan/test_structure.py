"""Tests that a layout is kept only while nothing changes that it depends on, and that
nothing kept keeps a tensor alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch

from ckptd.agent.plan.layout import lay_out, layout_of, plan_locally
from ckptd.agent.plan.structure import (
    Sources,
    Structure,
    accelerator_of,
    all_lacking_memory,
    current_accelerator,
    difference,
    lacking_memory,
    local_part,
)
from ckptd.shared.errors import UnsavableValue
from tests.support.cases import each_case

Tensors = dict[str, torch.Tensor]


def some(count: int = 600) -> Tensors:
    """Return tensors for more than two blocks."""
    return {f"w{number}": torch.full((4, 3), float(number)) for number in range(count)}


def last(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        changed = change(tensors["w599"])
        if changed is not None:
            tensors["w599"] = changed

    return apply


def swapped(tensors: Tensors) -> None:
    tensors["w1"], tensors["w0"] = tensors.pop("w0"), tensors.pop("w1")


def shared(tensors: Tensors) -> None:
    tensors["w599"] = tensors["w598"].view(4, 3)


CHANGES: dict[str, Callable[[Tensors], object]] = {
    "a name more": lambda tensors: tensors.setdefault("new", torch.zeros(1)),
    "a name less": lambda tensors: tensors.pop("w5"),
    "another order": swapped,
    "dtype": last(lambda tensor: tensor.to(torch.float64)),
    "dtype in place": last(lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32))),
    "shape": last(lambda tensor: tensor.reshape(3, 4)),
    "shape in place": last(lambda tensor: (tensor.resize_(3, 4), None)[1]),
    "stride in place": last(
        lambda tensor: setattr(tensor, "data", tensor.data.as_strided((4, 3), (1, 4)))
    ),
    "requires_grad": last(lambda tensor: (tensor.requires_grad_(), None)[1]),
    "type": last(torch.nn.Parameter),
    "device": last(lambda tensor: tensor.to("meta")),
    "a storage shared": shared,
    "sparse": last(lambda tensor: tensor.to_sparse()),
}


@pytest.fixture(params=["guard", "columns"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard, as in a torch that has none, the comparison must give the same
    result.
    """
    if request.param == "columns":
        monkeypatch.setattr("ckptd.agent.plan.structure._guard", lambda parts: None)


@each_case("change", CHANGES)
def test_changes_that_the_layout_depends_on_are_detected(change: str) -> None:
    tensors = some()
    structure, _ = Structure.of(tensors)
    found = structure.again(dict(tensors))
    assert found is not None
    CHANGES[change](tensors)
    with torch.no_grad():  # as snapshots may be taken
        assert found[0].again(tensors) is None


def test_this_torch_has_the_guard(request: pytest.FixtureRequest) -> None:
    structure, _ = Structure.of(some())
    assert (structure.guard is not None) == ("guard" in request.node.callspec.params.values())
    with torch.no_grad():
        again = structure.again(some())
    assert again is not None
    assert again[0].guard is structure.guard


@pytest.mark.parametrize("grad", [False, True])
def test_changes_in_inference_mode_and_of_a_tensor_with_two_names_are_detected(grad: bool) -> None:
    """In these cases the guard does not help."""
    with torch.inference_mode():
        tensors = {"a": torch.zeros(3), "b": torch.zeros(4)}
    tensors["c"] = tensors["b"]
    structure, _ = Structure.of(tensors)
    with torch.set_grad_enabled(grad):
        assert structure.again(dict(tensors)) is not None
        assert structure.again({**tensors, "a": torch.zeros(3, 1)}) is None


def test_changes_of_values_do_not_change_the_structure() -> None:
    tensors = some()
    structure, _ = Structure.of(tensors)
    elsewhere = {name: tensor.clone() + 1 for name, tensor in tensors.items()}
    elsewhere["w5"].data = torch.zeros(4, 3)
    found = structure.again(elsewhere)
    assert found is not None
    after, parts = found
    assert [id(part) for part in parts] == [id(tensor) for tensor in elsewhere.values()]
    assert after.addresses == [tensor.data_ptr() for tensor in elsewhere.values()]
    assert after.again(elsewhere) is not None


def test_tensors_that_share_a_storage_are_detected() -> None:
    base = torch.arange(10.0)
    tensors = {"first": base[:6], "second": base[2:8], "alone": torch.zeros(6)}
    structure, _ = Structure.of(tensors)
    moved = torch.arange(10.0)
    assert structure.again({**tensors, "first": moved[:6], "second": moved[2:8]}) is not None
    assert structure.again({**tensors, "second": base[3:9]}) is None
    assert structure.again({**tensors, "second": torch.zeros(6)}) is None
    assert structure.again({**tensors, "alone": base[:6]}) is None


def test_negatives_and_conjugates_of_one_storage_are_no_aliases() -> None:
    """Each is copied correctly on its own, but they are not aliases of each other."""
    values = torch.tensor([1 + 2j, 3 - 4j])
    structure, _ = Structure.of({"a": values, "b": values.view(2)})
    assert structure.again({"a": values, "b": values.view(2)}) is not None
    assert structure.again({"a": values, "b": values.conj()}) is None


def test_a_structure_keeps_no_tensor_alive() -> None:
    tensors = some(3)
    structure, parts = Structure.of(tensors)
    structure, _ = structure.again(tensors) or (structure, [])
    seen = [weakref.ref(tensor) for tensor in tensors.values()]
    del tensors, parts, _
    gc.collect()
    assert [reference() for reference in seen] == [None] * 3
    assert len(structure.addresses) == 3


def test_a_tensor_without_memory_is_named() -> None:
    with pytest.raises(UnsavableValue, match=r"^b: a tensor of layout torch\.sparse_coo"):
        Structure.of({"a": torch.zeros(2), "b": torch.eye(2).to_sparse()})


def test_the_first_difference_is_described() -> None:
    before, _ = Structure.of({"a": torch.zeros(2), "b": torch.zeros(3)})

    def said(**tensors: torch.Tensor) -> str:
        return difference(before, Structure.of(tensors)[0])

    assert said(a=torch.zeros(2), b=torch.zeros(3), c=torch.zeros(1)) == "c is new"
    assert said(a=torch.zeros(2)) == "b is gone"
    assert (
        said(a=torch.zeros(2), b=torch.zeros(3, 1, dtype=torch.int8))
        == "b was float32 [3] and is int8 [3, 1]"
    )
    assert (
        said(a=torch.zeros(2), b=torch.zeros(3, requires_grad=True))
        == "tensors have another layout, placement or storage"
    )
    assert difference(None, before) == "it has no plan yet"


def test_sources_finds_the_present_tensors() -> None:
    """This includes a storage that two tensors share where neither covers the
    other.
    """
    base = torch.arange(10.0)
    tensors = {"first": base[:6], "alone": torch.zeros(2), "second": base[2:8]}
    structure, _ = Structure.of(tensors)
    local = plan_locally(tensors)
    bases = [number for number, row in enumerate(local.rows) if not row.base]
    plan = lay_out(local, bases, aliases={"first", "second"}, metadata=None, global_plan=b"").plan
    sources = Sources(structure, tensors, plan)
    now = torch.arange(10.0) * 10
    tensors = {"first": now[:6], "alone": torch.ones(2), "second": now[2:8]}
    found = dict(
        zip(
            [item.fqn for item in plan.items],
            sources.of([local_part(tensor) for tensor in tensors.values()], tensors),
            strict=True,
        )
    )
    assert found.pop("alone") is tensors["alone"]
    [hidden] = found.values()
    assert torch.equal(hidden.view(torch.float32), now[:8])


@pytest.mark.parametrize("held", [0, 8])
def test_a_tensor_whose_storage_was_freed_or_has_shrunk_is_refused_by_key(held: int) -> None:
    tensor = torch.arange(1000.0)
    tensors = {"a": torch.zeros(2), "b": tensor}
    structure, _ = Structure.of(tensors)
    tensor.untyped_storage().resize_(held)
    expected = (
        f"^b: the tensor needs 4000 bytes, and its storage has {held}: take the snapshot while "
        f"the tensor has its memory"
    )
    with pytest.raises(UnsavableValue, match=expected):
        structure.again(tensors)
    with pytest.raises(UnsavableValue, match=expected):
        Structure.of(tensors)
    tensor.untyped_storage().resize_(4000)
    assert structure.again(tensors) is not None


def test_the_accelerator_is_that_of_the_first_tensor_on_one() -> None:
    places = [torch.device(kind) for kind in ("cpu", "meta", "cuda:3", "cuda:1")]
    on = cast(list[torch.Tensor], [SimpleNamespace(device=place) for place in places])
    assert (accelerator_of(on), accelerator_of(on[:2])) == (torch.device("cuda", 3), None)


def test_the_accelerator_of_a_plan_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = layout_of(
        plan_locally({"w": torch.ones(4)}).rows, [], metadata=None, global_plan=b""
    ).plan
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert current_accelerator(plan) is None
    plan.items[0] = msgspec.structs.replace(plan.items[0], device="cuda")
    assert current_accelerator(plan) == torch.device("cuda", 3)


def test_tensors_without_enough_memory_are_found_among_many() -> None:
    freed, short, view = torch.ones(4), torch.ones(4, 2).T, torch.ones(8)[4:]
    tensors = [torch.ones(4), freed, torch.empty(0), short, view, torch.ones(4, device="meta")]
    freed.untyped_storage().resize_(0)
    short.untyped_storage().resize_(28)
    view.untyped_storage().resize_(28)
    assert all_lacking_memory(tensors) == [1, 3, 4]
    assert [bool(lacking_memory(tensor)) for tensor in tensors] == [
        number in (1, 3, 4) for number in range(6)
    ]
