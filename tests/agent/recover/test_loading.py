"""Tests recoveries with the same partition, on real ranks: every shard comes back, and any other partition is refused before a write."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptd.agent import Agent, per_rank
from ckptd.shared.errors import CkptdError, InvalidRequest, StructureMismatch
from tests.support import sharded
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Ranks
from tests.support.storage import part_in


@pytest.mark.parametrize("kind", sharded.KINDS)
def test_every_sharding_comes_back(kind: str) -> None:
    with sharded.saved(kind, 4, "storage") as saved, Ranks(4) as ranks:
        ranks.call(sharded.build, kind, 2)
        assert ranks.call(sharded.recover, saved.place.socket, True) == [("storage", 2)] * 4
        assert sharded.differing(sharded.together(ranks.call(sharded.whole)), saved.wanted) == []


def test_shards_come_back_from_memory() -> None:
    with sharded.saved("fsdp2", 2, "memory") as saved, Ranks(2) as ranks:
        ranks.call(sharded.build, "fsdp2", 2)
        assert ranks.call(sharded.recover, saved.place.socket, True) == [("memory", 2)] * 2
        assert sharded.differing(sharded.together(ranks.call(sharded.whole)), saved.wanted) == []


def refused(socket: Path) -> tuple[str, bool]:
    """Return the error of a recovery with the same partition, and True if the model is as it was."""
    before = [part.detach().clone() for part in HERE["model"].parameters()]
    try:
        sharded.recover(socket, True)
    except StructureMismatch as error:
        after = list(HERE["model"].parameters())
        return str(error), all(torch.equal(one.to_local(), other.to_local()) for one, other in zip(before, after, strict=True))
    return "", False


def test_another_number_of_ranks_is_refused() -> None:
    with sharded.saved("fsdp2", 4, "storage") as saved, Ranks(2) as ranks:
        ranks.call(sharded.build, "fsdp2", 2)
        for error, same in ranks.call(refused, saved.place.socket):
            assert error.endswith("saved on 4 ranks, and this job has 2: recover without same_partition")
            assert same


def test_another_sharding_is_refused_by_name() -> None:
    with sharded.saved("fsdp2", 4, "storage") as saved, Ranks(4) as ranks:
        ranks.call(sharded.build, "2d", 2)
        for error, same in ranks.call(refused, saved.place.socket):
            assert "which was not saved as one: recover without same_partition" in error
            assert "model." in error
            assert same
        assert ranks.call(sharded.recover, saved.place.socket) == [("storage", 2)] * 4


def test_shards_of_the_same_shape_at_another_place_are_not_mixed_up(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        ranks.call(save_on_mesh, daemon.home.socket, [0, 1])
    with Ranks(2) as ranks:
        assert ranks.call(recover_on_mesh, daemon.home.socket, [1, 0], True) == ["", ""]
        assert ranks.call(recover_on_mesh, daemon.home.socket, [1, 0], False) == ["", ""]


def on_mesh(order: list[int], value: torch.Tensor) -> Any:
    return distribute_tensor(value, DeviceMesh("cpu", order), [Shard(0)], src_data_rank=None)


def save_on_mesh(socket: Path, order: list[int]) -> None:
    agent = Agent("job", socket=socket)
    agent.snapshot({"w": on_mesh(order, torch.arange(8.0)), "own": per_rank(agent.rank)}, step=1).wait("durable", timeout=60)


def recover_on_mesh(socket: Path, order: list[int], same: bool) -> str:
    HERE["agent"] = HERE.get("agent") or Agent("job", socket=socket)
    agent: Agent = HERE["agent"]
    state = {"w": on_mesh(order, torch.zeros(8)), "own": per_rank(-1)}
    try:
        agent.recover(state, same_partition=same)
    except CkptdError as error:
        return str(error)
    found: Any = state["w"]
    assert found.to_local().tolist() == torch.arange(8.0).chunk(2)[order.index(agent.rank)].tolist()
    own: Any = state["own"]
    assert own.value == agent.rank
    return ""


def recover_unlike(socket: Path) -> str:
    agent = Agent("job", socket=socket)
    try:
        agent.recover({"w": torch.zeros(2)}, same_partition=agent.rank == 1)
    except InvalidRequest as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_the_promise(daemon: Daemon) -> None:
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot({"w": torch.ones(2)}, step=1).wait("durable", timeout=60)
    with Ranks(2) as ranks:
        for error in ranks.call(recover_unlike, daemon.home.socket):
            assert error.endswith("some ranks recover with same_partition and others without: pass the same on all ranks")


def test_a_planner_has_its_own_way(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket, load_planner=DefaultLoadPlanner())
    with pytest.raises(InvalidRequest, match="^keep and same_partition cannot be combined with a load_planner"):
        agent.recover({}, same_partition=True)
    agent.close()


def test_keys_without_a_place_are_refused(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"a": torch.ones(2), "b": 3}, step=1).wait("durable", timeout=60)
    with pytest.raises(StructureMismatch, match="^key b is in the checkpoint and not in the state; nothing was written"):
        agent.recover({"a": torch.zeros(2)}, same_partition=True)
    state: dict[str, Any] = {"a": torch.zeros(2), "b": 0}
    agent.recover(state, same_partition=True)
    assert (state["a"].tolist(), state["b"]) == ([1.0, 1.0], 3)
    agent.close()


def test_a_damaged_checkpoint_is_passed_over(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    for step in (1, 2):
        agent.snapshot({"a": torch.full((3,), float(step))}, step=step).wait("durable", timeout=60)
    agent.close()
    [newest] = (daemon.home.root / "job").glob("step-00000002.*")
    part = part_in(newest)
    data = bytearray(part.read_bytes())
    data[4096] ^= 1  # the first byte of the first chunk in it
    part.write_bytes(data)
    agent = Agent("job", socket=daemon.home.socket)
    state = {"a": torch.zeros(3)}
    found = agent.recover(state, same_partition=True)
    assert found is not None
    assert (found.step, found.source, state["a"].tolist()) == (1, "storage", [1.0] * 3)
    agent.close()
