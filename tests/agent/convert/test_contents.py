"""Tests the contents of a checkpoint that is converted: leaves in the place of tensors, and batches of tensors."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint, per_rank
from ckptd.agent.convert import contents
from ckptd.agent.convert.contents import Contents, Leaf, flat, replaced, without_tensors
from ckptd.agent.read import loader
from tests.agent.convert.saved import bits, save
from tests.support.daemons import Daemon


def leaves(found: Contents) -> dict[str, Leaf]:
    return {name: value for name, value in flat(found.tree) if isinstance(value, Leaf)}


def test_leaves_tell_which_tensors_are_tied(daemon: Daemon) -> None:
    weight, agent = torch.arange(12.0).reshape(3, 4), Agent("job", socket=daemon.home.socket)
    state = {"a": weight, "b": weight, "rows": weight[1:], "t": weight.t(), "other": weight.clone(), "own": per_rank({"x": torch.ones(2)})}
    agent.snapshot(state, step=1)
    agent.close()
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        found = leaves(Contents(checkpoint.opened))
    assert found["a"].is_tied_to(found["b"])
    assert not any(found["a"].is_tied_to(found[name]) for name in ("rows", "t", "other"))
    assert {found[name].storage for name in ("a", "b", "rows", "t")} == {found["a"].storage}
    assert (found["rows"].shape, found["rows"].offset, found["t"].stride) == ((2, 4), 16, (1, 4))
    assert found["own.x"].nbytes == 8


def test_modules_are_found_by_their_place(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"nets": {"g": torch.nn.Linear(1, 1), "d": torch.nn.Linear(1, 1)}, "plain": torch.nn.Linear(1, 1).state_dict()}, step=1)
    agent.close()
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert Contents(checkpoint.opened).modules == ["nets.g", "nets.d"]


def test_tensors_are_read_in_batches_in_the_order_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"x{number}": torch.full((100,), float(number)) for number in range(20)}
    read, right = list[list[str]](), loader.materialize

    def materialize(saved: Any, names: Any) -> Any:
        read.append(list(names))
        return right(saved, names)

    with Checkpoint.open(save(state, tmp_path / "checkpoint")) as checkpoint:
        found = Contents(checkpoint.opened)
        monkeypatch.setattr(contents, "materialize", materialize)
        monkeypatch.setattr(contents, "BATCH", 1000)
        order = list(reversed(leaves(found).values()))
        tensors = list(found.read(order))
    assert [leaf for leaf, _ in tensors] == order
    assert all(bits(tensor) == bits(state[leaf.name]) for leaf, tensor in tensors)
    assert [len(batch) for batch in read] == 10 * [2]


def test_names_of_what_has_no_tensor() -> None:
    leaf = Leaf("x", torch.float32, torch.float32, (2,), (1,), 0, "x")
    tree = {"a": leaf, "groups": [{"lr": 0.1, "t": leaf}, {"lr": 0.2}], "epoch": 3, "nothing": {}, "run": {"seed": 1, "tags": ["a"]}}
    assert list(without_tensors(tree)) == ["groups.0.lr", "groups.1", "epoch", "run"]
    assert list(without_tensors({"epoch": 3})) == [""]
    assert [name for name, _ in flat(tree)] == ["a", "groups.0.lr", "groups.0.t", "groups.1.lr", "epoch", "run.seed", "run.tags.0"]


def test_replaced_keeps_the_containers() -> None:
    tree = (1, [2, "x"], OrderedDict(c=3), deque([4], 9))
    found = replaced(tree, int, lambda number: number * 10)
    assert found == (10, [20, "x"], OrderedDict(c=30), deque([40]))
    assert (type(found[2]), found[3].maxlen) == (OrderedDict, 9)
    assert tree[2]["c"] == 3
