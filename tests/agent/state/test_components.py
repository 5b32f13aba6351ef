"""Tests that sparse, nested and wrapper tensors are taken apart and made again, and
that forged parts are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptd.agent.state.components import TENSOR_KINDS, kind_of_tensor
from ckptd.agent.state.tree import ObjectNode, filled
from ckptd.shared.errors import IntegrityError, NotFound
from tests.support.cases import each_case
from tests.support.wrapped import Scaled

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested"),
]


def coo() -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 3], [1, 0]]), torch.tensor([1.5, 2.5]), (4, 4), check_invariants=True
    )


SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": coo,
    "coalesced": lambda: coo().coalesce(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}
PARTS = [torch.arange(4.0).view(2, 2), torch.ones(3, 2)]


def is_coalesced(tensor: torch.Tensor) -> bool:
    """Return True for a coalesced COO tensor. torch raises for other layouts."""
    return tensor.layout is torch.sparse_coo and tensor.is_coalesced()


@each_case("name", SPARSE)
def test_a_sparse_tensor_is_made_again_and_put_in_place(name: str) -> None:
    tensor = SPARSE[name]()
    kind = TENSOR_KINDS[kind_of_tensor(tensor)]
    fields = kind.fields(tensor)
    made = kind.alone(fields, "")
    assert (made.layout, made.shape) == (tensor.layout, tensor.shape)
    assert torch.equal(made.to_dense(), tensor.to_dense())
    assert is_coalesced(made) == is_coalesced(tensor) == (name == "coalesced")
    place = torch.nn.Parameter(tensor * 0)
    restored = kind.restore(place, fields)
    assert isinstance(restored, torch.nn.Parameter)
    assert torch.equal(restored.detach().to_dense(), tensor.to_dense())
    assert kind.differs(place, {**fields, "size": [5, 4]}).endswith(
        "of shape [5, 4], the state a " + f"{tensor.layout} one of [4, 4]"
    )


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_made_again(layout: torch.layout) -> None:
    tensor = torch.nested.nested_tensor(PARTS, layout=layout)
    kind = TENSOR_KINDS[kind_of_tensor(tensor)]
    made = kind.restore(tensor, kind.fields(tensor))
    assert made.layout == tensor.layout
    for part, its in zip(made.unbind(), PARTS, strict=True):
        assert torch.equal(part, its)


def test_a_wrapper_keeps_its_identity_and_its_components_too() -> None:
    place, saved = (
        Scaled(torch.zeros(3), torch.zeros(1), 2),
        Scaled(torch.arange(3.0), torch.ones(1), 2),
    )
    kind = TENSOR_KINDS[kind_of_tensor(place)]
    fields = kind.fields(saved)
    assert kind.differs(place, fields) == ""
    assert kind.restore(place, kind.fields(place)) is place
    made = kind.alone(fields, "tests.support.wrapped.Scaled")
    assert isinstance(made, Scaled)
    assert (made.data_part.tolist(), made.scale.tolist(), made.bits) == ([0.0, 1.0, 2.0], [1.0], 2)
    other = Scaled(torch.zeros(3), torch.zeros(1), 4)
    assert (
        kind.differs(other, fields)
        == "the checkpoint has a Scaled of settings {'bits': 2}, the state one of {'bits': 4}"
    )


def test_a_new_component_is_put_into_the_wrapper() -> None:
    place, scale = Scaled(coo() * 0, torch.zeros(1), 2), torch.zeros(1)
    made = coo()
    restored = TENSOR_KINDS["subclass"].restore(place, {"data_part": made, "scale": scale})
    assert restored is place
    assert place.data_part is made
    assert place.scale is not scale  # it was filled in place


@each_case(
    "name", ["os.system", "torch.Tensor", "nowhere.Scaled", "", "tests.support.wrapped.NotATensor"]
)
def test_a_wrapper_is_made_only_of_a_class_that_is_imported_and_wraps_tensors(name: str) -> None:
    fields = TENSOR_KINDS["subclass"].fields(Scaled(torch.zeros(3), torch.zeros(1), 2))
    with pytest.raises(
        NotFound, match=f"^the checkpoint holds a tensor of class {name}: import module"
    ):
        TENSOR_KINDS["subclass"].alone(fields, name)


def test_plain_and_sharded_tensors_are_not_taken_apart() -> None:
    for tensor in (
        torch.ones(2),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64),
    ):
        assert kind_of_tensor(tensor) == ""


FORGED: list[tuple[str, dict[str, Any]]] = [
    (
        "sparse",
        {
            "layout": "torch.sparse_coo",
            "size": [2, 2],
            "coalesced": False,
            "indices": torch.tensor([[9], [9]]),
            "values": torch.ones(1),
        },
    ),
    ("sparse", {"layout": "torch.strided", "size": [2, 2]}),
    (
        "sparse",
        {"layout": "torch.sparse_csr", "size": [2, 2], "crow_indices": torch.tensor([0, 9, 9])},
    ),
    ("nested", {"jagged": False, "parts": "text"}),
]


@pytest.mark.parametrize(("kind", "fields"), FORGED)
def test_forged_parts_are_damage(kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(
        IntegrityError, match=f"^a value of kind {kind} cannot be made from its fields: "
    ):
        filled(ObjectNode(kind, fields), lambda name: torch.empty(0))
