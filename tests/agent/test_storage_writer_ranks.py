"""Tests `dcp.save` and `load` of several ranks through ckptd: sharded in every way,
resharded, asynchronous, without collectives, and failing.
"""

from __future__ import annotations

import inspect
import io
import multiprocessing
import os
import warnings
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
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckptd.agent import Checkpoint, StorageReader, StorageWriter
from ckptd.agent.dcp.targets import leave_all
from tests.support import ranks as rank_processes
from tests.support.ranks import HERE, Lend, RankFailed, Ranks
from tests.support.sharded import build, differing, together, train, whole

pytestmark = pytest.mark.usefixtures("processes")


pool = rank_processes.new_ranks

Base = tuple[Path, Path | None]
"""Where saves go, and the daemon's socket."""


@pytest.fixture(params=["alone", "daemon"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Base:
    if request.param == "alone":
        return tmp_path, None
    daemon = request.getfixturevalue("daemon")
    return daemon.home.root / "gpt", daemon.home.socket


# -- what ranks run


def states() -> dict[str, Any]:
    model, optimizer = HERE["model"], HERE["optimizer"]
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "count": HERE["count"],
    }


def save(base: Base, name: str, how: str = "save", planner: Any = None, **options: Any) -> None:
    writer = StorageWriter(base[0] / name, socket=base[1], **options)
    kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # so that DCP may start one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "save":
            dcp.save(states(), storage_writer=writer, planner=planner and planner())
        elif how == "no_collectives":
            dcp.save(states(), storage_writer=writer, use_collectives=False)
        else:
            dcp.async_save(states(), storage_writer=writer, async_checkpointer_type=kind).result()  # type: ignore[union-attr]


def save_over(base: Base, name: str) -> None:
    save(base, name, overwrite=True)


def load(base: Base, name: str) -> None:
    found = states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=StorageReader(base[0] / name))
    set_model_state_dict(HERE["model"], found["model"])
    set_optimizer_state_dict(HERE["model"], HERE["optimizer"], found["optim"])
    HERE["count"] = found["count"]


def refused_save(base: Base, name: str, planner: Any) -> list[str]:
    """Return the ranks that each rank's error names."""
    try:
        save(base, name, planner=planner)
    except dcp.CheckpointException as error:
        return [f"{rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())]
    return []


def leave() -> None:
    leave_all()


def changed(found: Any, wanted: Any) -> list[str]:
    """Return what differs, except buffers: each rank has its own, and DCP saves one of
    them.
    """
    return [name for name in differing(found, wanted) if not name.startswith("model.norm.running")]


# -- tests


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp", "tp", "2d"])
def test_a_save_is_loaded_on_another_number_of_ranks(base: Base, kind: str, pool: Lend) -> None:
    with pool(4) as ranks:
        ranks.call(build, kind, 1)
        ranks.call(train, 2)
        ranks.call(save, base, "first")
        wanted = together(ranks.call(whole))
        ranks.call(train, 1)
        ranks.call(load, base, "first")
        assert changed(together(ranks.call(whole)), wanted) == []
        ranks.call(leave)
    others = {"hsdp": ("ddp", 3), "tp": ("fsdp2", 2), "2d": ("tp", 2)}
    with pool(others.get(kind, (kind, 2))[1]) as ranks:
        ranks.call(build, others.get(kind, (kind, 2))[0], 2)
        ranks.call(train, 1)
        ranks.call(load, base, "first")
        assert changed(together(ranks.call(whole)), wanted) == []


@pytest.mark.parametrize("how", ["thread", "process"])
def test_async_save_of_several_ranks_is_loaded(base: Base, how: str) -> None:
    with Ranks(2) as ranks:
        ranks.call(build, "fsdp2", 1)
        for name in ("one", "two"):
            ranks.call(train, 1)
            ranks.call(save, base, name, how, timeout=200)
            wanted = together(ranks.call(whole))
        ranks.call(train, 1)
        ranks.call(load, base, "two")
        assert changed(together(ranks.call(whole)), wanted) == []


def test_ranks_that_overwrite_leave_nothing_of_the_older_checkpoint(base: Base, pool: Lend) -> None:
    """Each rank keeps its part locked until the next save, and no longer."""
    with pool(2) as ranks:
        ranks.call(build, "fsdp2", 1)
        for _ in range(3):
            ranks.call(train, 1)
            ranks.call(save_over, base, "latest")
        wanted = together(ranks.call(whole))
        ranks.call(train, 1)
        ranks.call(load, base, "latest")
        assert changed(together(ranks.call(whole)), wanted) == []
        ranks.call(leave)
    # The fourth is the marker.
    assert len(list(base[0].glob("latest*/*"))) == (4 if base[1] is None else 3)


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="DCP of torch 2.8 has no use_collectives",
)
def test_each_rank_saves_and_loads_without_collectives(base: Base, pool: Lend) -> None:
    """With `use_collectives=False` each rank has a checkpoint of its own, and reads
    that one.
    """
    with pool(2) as ranks:
        ranks.call(build, "ddp", 1)
        ranks.call(train, 1)
        ranks.call(save, base, "own", "no_collectives")
        wanted = together(ranks.call(whole))
        ranks.call(train, 1)
        ranks.call(load, base, "own")
        assert changed(together(ranks.call(whole)), wanted) == []
    assert sorted(os.listdir(base[0] / "own")) == ["rank-00000", "rank-00001"]


def test_plans_that_are_cached(base: Base, pool: Lend) -> None:
    with pool(2) as ranks:
        ranks.call(build, "fsdp2", 1)
        for n in range(3):
            ranks.call(train, 1)
            ranks.call(save, base, f"save-{n}", "save", Cached)
            wanted = together(ranks.call(whole))
        ranks.call(train, 1)
        ranks.call(load, base, "save-2")
        assert changed(together(ranks.call(whole)), wanted) == []


class Cached(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


class FailsOnRank1(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == 1:
            raise OSError("the planner's own")
        return super().resolve_data(write_item)


class DropsOnRank1(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if dist.get_rank() == 1:
            new_plan.items.pop(0)
        return super().finish_plan(new_plan)


class DoublesEverything(DefaultSavePlanner):
    """All ranks write what all ranks have."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for plan in plans:
            plan.items[:] = all_plans[0].items
        return plans, metadata


@pytest.mark.parametrize(
    ("kind", "planner", "reason"),
    [
        ("fsdp2", FailsOnRank1, "1: StorageError("),
        ("fsdp2", DropsOnRank1, "0: InvalidRequest('the planner has dropped "),
        ("ddp", DoublesEverything, "0: InvalidRequest('the planner writes more than once "),
    ],
)
def test_a_failure_on_one_rank_fails_the_save(
    base: Base, kind: str, planner: type, reason: str, pool: Lend
) -> None:
    """pytorch#191391: a writer failed on one rank, and the checkpoint lacked its
    tensors.
    """
    with pool(2) as ranks:
        ranks.call(build, kind, 1)
        ranks.call(train, 1)
        heard = ranks.call(refused_save, base, "wrong", planner)
        assert heard[0] == heard[1]
        # Rank 0 may have heard of rank 1's failure, too.
        assert any(failure.startswith(reason) for failure in heard[0]), heard[0]
        ranks.call(save, base, "right")
        wanted = together(ranks.call(whole))
        ranks.call(train, 1)
        ranks.call(load, base, "right")
        assert changed(together(ranks.call(whole)), wanted) == []
        ranks.call(leave)
    assert not list(base[0].glob("wrong*/manifest.json"))
    with Checkpoint.open(base[0] / "right") as checkpoint:
        assert checkpoint.manifest.world_size == 2
        assert checkpoint.verify() > 0


def test_a_rank_that_dies_leaves_no_checkpoint(base: Base) -> None:
    with Ranks(2, armed={1: "agent.copying=kill" if base[1] else "persist.writing=kill"}) as ranks:
        ranks.call(build, "fsdp2", 1)
        ranks.begin(save, base, "dead")
        with pytest.raises((RankFailed, EOFError)):
            ranks.results(timeout=60)
    assert not list(base[0].glob("dead*/manifest.json"))
