"""Tests that loads fill destinations of every kind bit for bit, that shards which were
saved as they are now need no plan, and that a `LoadPlan` of DCP gets pickles only where
the caller says so.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptd.agent import Agent, Checkpoint, StorageWriter
from ckptd.agent.read import loader
from ckptd.agent.read.checkpoint import opened_of
from ckptd.agent.read.loader import check_partition, load, read_plan
from ckptd.agent.read.saved import Saved
from ckptd.agent.read.sources import Opened, open_checkpoint
from ckptd.shared.errors import NotFound, StructureMismatch, UnsavableValue
from ckptd.shared.storage.locate import find_checkpoint
from tests.support.daemons import Daemon
from tests.support.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BIG = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def saved(daemon: Daemon) -> Iterator[Saved]:
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(
            {
                "big": BIG,
                "turned": BIG.t(),
                "view": BIG[1],
                "own": BIG.clone(),
                "other": BIG.clone(),
                "empty": BIG[:0],
            },
            step=1,
        ).wait(timeout=60)
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        yield opened_of(checkpoint).saved


DESTINATIONS: dict[str, torch.Tensor] = {
    "same": torch.zeros(4, 6),
    "float64": torch.zeros(4, 6, dtype=torch.float64),
    "bfloat16": torch.zeros(4, 6, dtype=torch.bfloat16),
    "transposed": torch.zeros(6, 4).t(),
    "every other row": torch.zeros(8, 6)[::2],
    "parameter": torch.nn.Parameter(torch.zeros(4, 6)),
    "conjugate": torch.zeros(4, 6, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", DESTINATIONS)
def test_every_kind_of_destination(saved: Saved, name: str) -> None:
    destination = DESTINATIONS[name]
    assert destination.is_conj() == (name == "conjugate")
    assert load(saved, {"own": destination}) == 3 * 96  # of the chunk that has all three storages
    assert torch.equal(destination, BIG.to(destination.dtype))


def test_a_destination_without_memory_is_refused(saved: Saved) -> None:
    with pytest.raises(
        StructureMismatch,
        match="^own: the state's tensor is on the meta device, which has no memory$",
    ):
        load(saved, {"own": torch.zeros(4, 6, device="meta")})


def test_tensors_that_share_a_storage(saved: Saved) -> None:
    state = {
        "big": torch.zeros(4, 6),
        "turned": torch.zeros(6, 4),
        "view": torch.zeros(6),
        "empty": torch.zeros(0, 6),
    }
    load(saved, state)
    assert torch.equal(state["big"], BIG)
    assert torch.equal(state["turned"], BIG.t())
    assert torch.equal(state["view"], BIG[1])


def test_a_wrong_shape_and_a_wrong_name_change_nothing(saved: Saved) -> None:
    state = {"big": torch.zeros(4, 6), "own": torch.zeros(6, 4)}
    with pytest.raises(
        StructureMismatch, match=r"^own: the checkpoint has shape \[4, 6\], the state \[6, 4\]$"
    ):
        load(saved, state)
    with pytest.raises(NotFound, match="^no tensor 'none'"):
        load(saved, {"big": state["big"], "none": torch.zeros(1)})
    with pytest.raises(
        StructureMismatch,
        match=r"^own: this rank has the shard \[2, 6\] at \[0, 0\], which was not saved as one",
    ):
        check_partition(saved, {"own": torch.zeros(2, 6)})
    assert not state["big"].any()


def test_conversions_are_made_batch_by_batch(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_BATCH", 100)  # bytes: one tensor a batch
    batches: list[int] = []
    right = loader._copy_converted

    def copy(batch: Any, threads: int | None) -> int:
        batches.append(len(batch))
        return right(batch, threads)

    monkeypatch.setattr(loader, "_copy_converted", copy)
    state = {name: torch.zeros(4, 6, dtype=torch.float64) for name in ("own", "other")}
    assert load(saved, state) == 2 * 3 * 96  # each batch reads the chunk
    assert batches == [1, 1]
    assert all(torch.equal(tensor, BIG.double()) for tensor in state.values())


def load_strided(path: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    errors = []
    for placements in (
        [_StridedShard(0, split_factor=2), Shard(0)],
        [_StridedShard(0, split_factor=2), Replicate()],
    ):
        place = DTensor.from_local(torch.zeros(1 if placements[1].is_shard() else 2, 6), mesh,
            placements, run_check=False, shape=BIG.shape,
                                   stride=BIG.stride())  # fmt: skip
        try:
            with Checkpoint.open(path) as checkpoint:
                load(opened_of(checkpoint).saved, {"w": place})
        except StructureMismatch as error:
            errors.append(str(error))
    return errors


def test_a_part_of_several_pieces_is_refused(daemon: Daemon) -> None:
    """torch gives one place for it, where other rows are."""
    with Ranks(4) as ranks:
        ranks.call(save_shards, daemon.home.socket)
        for errors in ranks.call(load_strided, daemon.home.root / "job"):
            assert len(errors) == 1
            assert errors[0].startswith("w: with the placements ")
            assert errors[0].endswith(
                "this rank's part is several pieces of the tensor, which cannot be loaded: "
                "redistribute it first"
            )


def sharded(value: torch.Tensor) -> DTensor:
    """Return a tensor that is sharded over all ranks by rows. This rank has
    the first part after its number.
    """
    mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
    chunks = value.chunk(mesh.size())
    local = (
        chunks[mesh.get_local_rank()].clone()
        if mesh.get_local_rank() < len(chunks)
        else value[:0].clone()
    )
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
    )


def save_shards(socket: Path) -> None:
    with closing(Agent("job", socket=socket)) as agent:
        agent.snapshot({"w": sharded(BIG), "uneven": sharded(torch.arange(5.0))}, step=1).wait(
            "durable", timeout=60
        )


def planned_names(path: Path, dtype: torch.dtype) -> list[str]:
    """Load shards into tensors of this rank. Return the names that DCP has planned."""
    names: list[str] = []

    class Noting(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, *arguments: Any, **options: Any) -> None:
            names.extend(state_dict)
            super().set_up_planner(state_dict, *arguments, **options)

    vars(loader)["DefaultLoadPlanner"] = Noting
    state: dict[str, Any] = {
        "w": sharded(torch.zeros(4, 6).to(dtype)),
        "uneven": sharded(torch.zeros(5).to(dtype)),
    }
    with Checkpoint.open(path) as checkpoint:
        load(opened_of(checkpoint).saved, state)
    assert torch.equal(state["w"].to_local(), sharded(BIG).to_local().to(dtype))
    assert torch.equal(state["uneven"].to_local(), sharded(torch.arange(5.0)).to_local().to(dtype))
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_that_were_saved_so_are_not_planned(daemon: Daemon, dtype: torch.dtype) -> None:
    with Ranks(4) as ranks:
        ranks.call(save_shards, daemon.home.socket)
        found = ranks.call(planned_names, daemon.home.root / "job", dtype)
        assert found == [[], [], [], ["uneven"]]  # 5 rows in chunks of 2: the last rank has none
    with Ranks(3) as ranks:
        found = ranks.call(planned_names, daemon.home.root / "job", dtype)
        assert [names.count("w") for names in found] == [1, 1, 1]


# -- a `LoadPlan` of DCP


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
