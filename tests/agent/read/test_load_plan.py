"""A DCP `LoadPlan` on an open checkpoint: tensors to their places, values as bytes, and
pickles only where the caller says so.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from ckptd.agent import StorageWriter
from ckptd.agent.read.load_plan import read_plan
from ckptd.agent.read.sources import Opened, open_checkpoint
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.storage.locate import find_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Own:
    """A class that torch.save pickles by name."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    state = {"w": torch.arange(4.0), "n": 5, "object": Own()}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "x", weights_only=False))
    found = open_checkpoint(*find_checkpoint(tmp_path / "x"))
    yield found
    found.close()


def read(
    opened: Opened, state: dict[str, Any], planner: DefaultLoadPlanner, **options: Any
) -> None:
    planner.set_up_planner(state, opened.metadata(), is_coordinator=True)
    read_plan(opened, planner.create_local_plan(), planner, **options)


def test_tensors_and_values_come_to_the_callers_state(opened: Opened) -> None:
    tensor = torch.zeros(4)
    state = {"w": tensor, "n": 0}
    read(opened, state, DefaultLoadPlanner())
    assert (tensor.tolist(), state["n"]) == ([0.0, 1.0, 2.0, 3.0], 5)


def test_a_pickled_object_is_refused_by_key_unless_the_caller_trusts_it(opened: Opened) -> None:
    with pytest.raises(
        UnsavableValue,
        match="^object: it can only be loaded by running pickled code; pass weights_only=False",
    ):
        read(opened, {"object": None}, DefaultLoadPlanner())
    state: dict[str, Any] = {"object": None}
    read(opened, state, DefaultLoadPlanner(), weights_only=False)
    assert isinstance(state["object"], Own)


def test_a_planner_gets_the_tensors_before_the_values(opened: Opened) -> None:
    happened: list[str] = []

    class Watching(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            happened.append(read_item.storage_index.fqn)

        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            happened.append(
                f"{read_item.storage_index.fqn}: {torch.load(value, weights_only=True)}"
            )

    read(opened, {"n": 0, "w": torch.zeros(4)}, Watching())
    assert happened == ["w", "n: 5"]
