"""Tests `Agent(planner=, load_planner=)`: the caller's planners plan snapshots and
recoveries as they plan `dcp.save` and `dcp.load`.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from ckptd.agent import Agent, Checkpoint, StorageReader, StorageWriter, per_rank
from ckptd.shared.errors import CkptdError, InvalidRequest, StructureMismatch
from examples.planners import Balance
from tests.agent.dcp.test_storage_writer import (
    Dropping,
    Extra,
    Failing,
    Halved,
    HalvedUnawares,
    IntoAnotherShape,
    Inventing,
    OfAnotherShape,
    Reading,
    Renamed,
    blank,
    same,
    state,
)
from tests.support import ranks as rank_processes
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Lend
from tests.support.sharded import build, differing, together, train, whole

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore::FutureWarning"
)


pool = rank_processes.new_ranks


def agent(daemon: Daemon, planner: Any = None, load_planner: Any = None, job: str = "job") -> Agent:
    return Agent(job, socket=daemon.home.socket, planner=planner, load_planner=load_planner)


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_a_planned_snapshot_is_recovered(daemon: Daemon, source: str) -> None:
    trainer = agent(daemon, DefaultSavePlanner())
    model = torch.nn.Linear(7, 5)
    full = {**state(1), "net": model, "loader": per_rank({"position": 3})}
    before = torch.get_rng_state()
    trainer.snapshot(full, step=4, metrics={"loss": 0.5}).wait("durable", timeout=60)
    if source == "storage":
        trainer.close()
        trainer = agent(daemon, DefaultSavePlanner())
    torch.manual_seed(77)
    found: dict[str, Any] = {
        **blank(),
        "net": torch.nn.Linear(7, 5),
        "loader": per_rank({"position": 0}),
    }
    recovered = trainer.recover(found)
    assert torch.equal(torch.get_rng_state(), before)
    assert recovered is not None
    assert (recovered.step, recovered.source, recovered.metrics) == (4, source, {"loss": 0.5})
    assert same({key: found[key] for key in state(1)}, state(1))
    assert same(found["net"].state_dict(), model.state_dict())
    assert found["loader"] == per_rank({"position": 3})
    trainer.close()


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Renamed, Halved, HalvedUnawares, Extra])
def test_a_planned_snapshot_has_what_dcp_would_have_saved(
    daemon: Daemon, tmp_path: Path, planner: type[DefaultSavePlanner]
) -> None:
    trainer = agent(daemon, planner())
    trainer.snapshot(state(2), step=1).wait("durable", timeout=60)
    trainer.close()
    dcp.save(state(2), storage_writer=StorageWriter(tmp_path / "dcp"), planner=planner())
    ours, theirs = Checkpoint.open(daemon.home.root / "job"), Checkpoint.open(tmp_path / "dcp")
    assert same(ours.load(), theirs.load())
    assert ours.manifest.metadata == theirs.manifest.metadata
    readers = StorageReader(daemon.home.root / "job" / "step-1"), StorageReader(tmp_path / "dcp")
    assert readers[0].read_metadata().planner_data == readers[1].read_metadata().planner_data


def test_a_load_planner_plans_the_recovery(daemon: Daemon) -> None:
    planner = Reading()
    trainer = agent(daemon, load_planner=planner)
    trainer.snapshot({"a": torch.arange(4.0), "b": 2}, step=1).wait("durable", timeout=60)
    found = {"a": torch.zeros(4), "b": 0}
    trainer.recover(found)
    assert same(found, {"a": torch.arange(4.0) * 2, "b": 2})
    assert planner.calls == ["finish_plan", "resolve a", "commit a", "bytes b"]
    trainer.close()


def test_calls_come_in_the_order_of_dcp(daemon: Daemon, tmp_path: Path) -> None:
    planner = Noting()
    trainer = agent(daemon, planner)
    trainer.snapshot({"a": torch.zeros(3)}, step=1).wait("durable", timeout=60)
    trainer.close()
    ours, planner.calls = planner.calls, []
    dcp.save({"a": torch.zeros(3)}, storage_writer=StorageWriter(tmp_path / "dcp"), planner=planner)
    assert (
        ours
        == planner.calls
        == [
            "set_up_planner",
            "create_local_plan",
            "create_global_plan",
            "finish_plan",
            "resolve_data",
            "resolve_data",
        ]
    )


class Noting(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.calls.append("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self.calls.append("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.calls.append("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.calls.append("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.calls.append("resolve_data")
        return super().resolve_data(write_item)


class OfAnotherKind(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=Path)


@pytest.mark.parametrize(
    ("planner", "reason"),
    [
        (Dropping, "the planner has dropped a; nothing was saved"),
        (Inventing, "the planner has written items that its metadata lacks: b; nothing was saved"),
        (
            OfAnotherShape,
            "a: the planner's item has shape [4], but resolves to a tensor of shape [3]",
        ),
        (Failing, "the planner has failed: KeyError: 'lost'"),
        (
            OfAnotherKind,
            "the planner's plan holds an object that another rank could not load without running "
            "pickled code",
        ),
    ],
)
def test_a_planner_that_is_wrong_fails_the_snapshot_alone(
    daemon: Daemon, planner: type[DefaultSavePlanner], reason: str
) -> None:
    wrong = {"a": torch.zeros(4), "b": torch.zeros(4)}
    trainer = agent(daemon, planner())
    pending = trainer.snapshot(wrong, step=1, on_error="log")
    assert pending.state == "failed"
    assert isinstance(pending.error, InvalidRequest)
    assert str(pending.error).startswith(reason)
    trainer._planner = DefaultSavePlanner()
    trainer.snapshot(wrong, step=2).wait("durable", timeout=60)
    trainer.close()
    assert [path.parent.name for path in (daemon.home.root / "job").glob("*/manifest.json")] == [
        "step-00000002.a0001"
    ]


def test_planned_recoveries_that_are_impossible_are_refused(daemon: Daemon) -> None:
    trainer = agent(daemon, DefaultSavePlanner())
    trainer.snapshot({"a": torch.arange(4)}, step=1).wait("durable", timeout=60)
    found = {"b": torch.zeros(4)}
    with pytest.raises(
        StructureMismatch, match="Missing key in checkpoint state_dict: b.; nothing was written"
    ):
        trainer.recover(found)
    with pytest.raises(
        InvalidRequest, match="the state is of type list; with a planner, expected a dict"
    ):
        trainer.recover([torch.zeros(4)])
    assert trainer.snapshot([torch.zeros(4)], step=2).state == "failed"
    trainer.close()
    trainer = agent(daemon, load_planner=IntoAnotherShape())
    with pytest.raises(
        CkptdError,
        match=r"a: the planner reads a piece of shape \[4\] into a tensor of shape \[3\]",
    ):
        trainer.recover({"a": torch.zeros(4)})
    trainer.close()


def test_a_planned_snapshot_without_a_free_slot_is_skipped(daemon: Daemon) -> None:
    trainer = agent(daemon, DefaultSavePlanner())
    pendings = [
        trainer.snapshot({"a": torch.randn(2_000_000)}, step=step, on_busy="skip")
        for step in range(1, 9)
    ]
    assert {pending.state for pending in pendings} <= {"sealed", "durable", "skipped"}
    trainer.snapshot({"a": torch.zeros(2_000_000)}, step=9).wait("durable", timeout=60)
    trainer.close()


# -- several ranks


def states() -> dict[str, Any]:
    model, optimizer = HERE["model"], HERE["optimizer"]
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "count": HERE["count"],
    }


def save(socket: Path, step: int, planner: type[DefaultSavePlanner]) -> str:
    trainer = HERE.get("agent") or HERE.setdefault(
        "agent", Agent("job", socket=socket, planner=planner())
    )
    trainer._planner = planner()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pending = trainer.snapshot(states(), step=step)
        try:
            pending.wait("durable", timeout=60)
        except CkptdError as error:
            return str(error)
    return ""


def recover(socket: Path) -> tuple[str, int]:
    trainer = HERE.get("agent") or HERE.setdefault(
        "agent", Agent("job", socket=socket, planner=DefaultSavePlanner())
    )
    found = states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recovered = trainer.recover(found)
    set_model_state_dict(HERE["model"], found["model"])
    dcp.state_dict.set_optimizer_state_dict(HERE["model"], HERE["optimizer"], found["optim"])
    HERE["count"] = found["count"]
    return recovered.source, recovered.step


def changed(found: Any, wanted: Any) -> list[str]:
    """Return what differs, except buffers: each rank has its own, and DCP saves one of
    them.
    """
    return [name for name in differing(found, wanted) if not name.startswith("model.norm.running")]


class FailsOnRank1(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == 1:
            raise OSError("its own")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "2d"])
def test_planned_snapshots_and_recoveries_on_several_ranks(
    daemon: Daemon, kind: str, pool: Lend
) -> None:
    socket = daemon.home.socket
    with pool(4) as ranks:
        ranks.call(build, kind, 1)
        ranks.call(train, 2)
        assert ranks.call(save, socket, 1, Balance) == [""] * 4
        wanted = together(ranks.call(whole))
        ranks.call(train, 1)
        assert ranks.call(recover, socket) == [("memory", 1)] * 4
        assert changed(together(ranks.call(whole)), wanted) == []
        assert len(set(ranks.call(save, socket, 2, FailsOnRank1))) == 1
        assert ranks.call(save, socket, 3, Balance) == [""] * 4
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert checkpoint.step == 3
        assert min(part.items for part in checkpoint.manifest.parts) > 0
    with pool(2) as ranks:
        ranks.call(build, "tp" if kind == "2d" else kind, 2)
        ranks.call(train, 1)
        assert ranks.call(recover, socket)[0][1] == 3
        assert changed(together(ranks.call(whole)), wanted) == []
