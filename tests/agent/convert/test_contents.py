"""Tests the contents of a checkpoint that is converted: leaves that stand for tensors,
and batches of tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import pytest
import torch

from ckptd.agent.convert import contents
from ckptd.agent.convert.contents import Contents, Leaf, flat, replaced, without_tensors
from tests.agent.convert.saved import bits


def test_tensors_are_read_in_batches_in_the_order_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {f"x{number}": torch.full((100,), float(number)) for number in range(20)}
    leaves = [Leaf(name, torch.float32, torch.float32, (100,), (1,), 0, name) for name in tensors]
    read = list[list[str]]()

    def find(batch: Sequence[Leaf]) -> dict[str, torch.Tensor]:
        read.append([leaf.name for leaf in batch])
        return {leaf.name: tensors[leaf.name] for leaf in batch}

    monkeypatch.setattr(contents, "BATCH", 1000)
    order = list(reversed(leaves))
    found = list(Contents(None, find).read(order))
    assert [leaf for leaf, _ in found] == order
    assert all(bits(tensor) == bits(tensors[leaf.name]) for leaf, tensor in found)
    assert [len(batch) for batch in read] == 10 * [2]


def test_names_of_what_has_no_tensor() -> None:
    leaf = Leaf("x", torch.float32, torch.float32, (2,), (1,), 0, "x")
    tree = {
        "a": leaf,
        "groups": [{"lr": 0.1, "t": leaf}, {"lr": 0.2}],
        "epoch": 3,
        "nothing": {},
        "run": {"seed": 1, "tags": ["a"]},
    }
    assert list(without_tensors(tree)) == ["groups.0.lr", "groups.1", "epoch", "run"]
    assert list(without_tensors({"epoch": 3})) == [""]
    assert [name for name, _ in flat(tree)] == [
        "a",
        "groups.0.lr",
        "groups.0.t",
        "groups.1.lr",
        "epoch",
        "run.seed",
        "run.tags.0",
    ]


def test_replaced_keeps_the_containers() -> None:
    tree = (1, [2, "x"], OrderedDict(c=3), deque([4], 9))
    found = replaced(tree, int, lambda number: number * 10)
    assert found == (10, [20, "x"], OrderedDict(c=30), deque([40]))
    assert (type(found[2]), found[3].maxlen) == (OrderedDict, 9)
    assert tree[2]["c"] == 3


def test_nothing_of_an_object_is_called_that_a_file_may_have_set() -> None:
    tree = OrderedDict(a=1)
    tree.__dict__.update(items=5, copy=5)
    assert replaced(tree, int, lambda number: number + 1) == OrderedDict(a=2)
    assert list(flat(tree)) == [("a", 1)]


def test_a_tensor_that_shares_a_storage_is_converted_after_its_values_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    leaf = Leaf("x", torch.complex64, torch.complex64, (1,), (1,), 0, "x")
    [(_, found)] = Contents(None, lambda leaves: {"x": tensor}).read([leaf])
    assert not found.is_conj()
    assert found.tolist() == [1 - 2j]
