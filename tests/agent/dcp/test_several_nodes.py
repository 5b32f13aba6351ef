"""Saves of `dcp.save` and `dcp.async_save` by ranks that are on several nodes, each
with a daemon of its own.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckptd.agent import StorageReader, StorageWriter
from ckptd.agent.dcp import targets
from ckptd.agent.link import attempt as begins
from ckptd.shared import names
from ckptd.shared.storage.locate import open_root
from tests.agent.test_several_nodes import JOB, Sockets, begin, sockets, take, two
from tests.crash.node_trainer import state_of
from tests.support.daemons import until
from tests.support.nodes import Node, Nodes, become
from tests.support.ranks import HERE, Ranks

pytestmark = pytest.mark.usefixtures("processes")

__all__ = ["two"]  # a fixture


def save_through_dcp(where: Sockets, path: Path, **options: Any) -> str:
    """Save the state of a step with `dcp.save`.

    Return the reasons of all ranks if it fails.
    """
    writer = StorageWriter(path, socket=where[dist.get_rank()], **options)
    try:
        dcp.save(_state_of_dcp(int(path.name.removeprefix("step-"))), storage_writer=writer)
    except dcp.CheckpointException as error:
        return "; ".join(
            f"{rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())
        )
    return ""


def _state_of_dcp(step: int) -> dict[str, Any]:
    return {key: value for key, value in state_of(step).items() if isinstance(value, torch.Tensor)}


def load_through_dcp(path: Path) -> None:
    step = int(path.name.removeprefix("step-"))
    state, saved = _state_of_dcp(-1), _state_of_dcp(step)
    dcp.load(state, storage_reader=StorageReader(path))
    assert all(torch.equal(state[key], saved[key]) for key in saved)


def test_dcp_saves_and_loads_on_several_nodes(two: Nodes) -> None:
    where = sockets(two, 0, 0, 1, 1)
    job = two.root / JOB
    with Ranks(4) as ranks:
        for step in (5, 6, 7):
            assert ranks.call(save_through_dcp, where, job / f"step-{step}") == [""] * 4
            ranks.call(load_through_dcp, job / f"step-{step}")
        assert "already exists" in ranks.call(save_through_dcp, where, job / "step-7")[0]
        assert ranks.call(_save_again, where, job / "step-7") == [""] * 4
        assert ranks.call(save_through_dcp, where, job / "step-8") == [""] * 4
    repository = open_root(two.root)
    manifests = {
        tag: repository.read_manifest(JOB, tag)
        for tag in repository.tags(JOB)
        if repository.is_committed(JOB, tag)
    }
    assert list(manifests) == [
        names.tag_directory(*each)
        for each in ((5, None, 1), (6, None, 1), (7, None, 2), (8, None, 2))
    ]
    assert all(
        [part.rank for part in manifest.parts] == [0, 1, 2, 3] for manifest in manifests.values()
    )
    with Ranks(3) as ranks:
        assert ranks.call(_recover_planned_from, sockets(two, 0, 1, 1)) == [8] * 3


def _save_again(where: Sockets, path: Path) -> str:
    return save_through_dcp(where, path, overwrite=True)


def _recover_planned_from(where: Sockets) -> int:
    begin(where, load_planner=DefaultLoadPlanner())
    state = _state_of_dcp(-1)
    found = HERE["agent"].recover(state)
    assert torch.equal(state["replicated"], state_of(8)["replicated"])
    return int(found.step)


@pytest.mark.parametrize(
    "kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS], ids=["thread", "process"]
)
def test_dcp_saves_in_the_background_on_several_nodes(
    two: Nodes, kind: AsyncCheckpointerType
) -> None:
    where = sockets(two, 0, 1)
    with Ranks(2) as ranks:
        for step in (5, 6):
            assert (
                ranks.call(save_in_the_background, where, two.root / JOB / f"step-{step}", kind)
                == [""] * 2
            )
            ranks.call(load_through_dcp, two.root / JOB / f"step-{step}")


def save_in_the_background(where: Sockets, path: Path, kind: AsyncCheckpointerType) -> str:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # so that DCP may start one
    writer = StorageWriter(path, socket=where[dist.get_rank()])
    saved = dcp.async_save(
        _state_of_dcp(int(path.name.removeprefix("step-"))),
        storage_writer=writer,
        async_checkpointer_type=kind,
    )
    cast("Future[Any]", saved).result(120)
    return ""


def test_dcp_saves_in_the_attempt_of_the_agents(two: Nodes) -> None:
    where = sockets(two, 0, 1)
    with Ranks(2) as ranks:
        ranks.call(begin, where)
        assert ranks.call(take, 5) == [""] * 2
        assert ranks.call(save_through_dcp, where, two.root / JOB / "step-6") == [""] * 2
        assert ranks.call(take, 7) == [""] * 2
    assert open_root(two.root).tags(JOB) == [
        names.tag_directory(step, None, 1) for step in (5, 6, 7)
    ]


def test_a_save_through_dcp_that_one_node_cannot_take_is_no_checkpoint(two: Nodes) -> None:
    where = sockets(two, 0, 1)
    with Ranks(2) as ranks:
        assert ranks.call(save_through_dcp, where, two.root / JOB / "step-5") == [""] * 2
        found = ranks.call(_save_with_a_failing_planner, where, two.root / JOB / "step-6")
        assert all("no room in the planner" in reason for reason in found), found
        assert ranks.call(save_through_dcp, where, two.root / JOB / "step-7") == [""] * 2
    assert open_root(two.root).tags(JOB) == [names.tag_directory(step, None, 1) for step in (5, 7)]


def test_the_coordinator_that_fails_before_it_writes_keeps_no_other_rank_waiting(
    two: Nodes,
) -> None:
    where, job = sockets(two, 0, 1), two.root / JOB
    with Ranks(2) as ranks:
        assert ranks.call(save_through_dcp, where, job / "step-4") == [""] * 2
        assert "twice on one rank" in ranks.call(_save_twice, where, job / "step-5")[0]
        # Long before `rank_timeout`.
        until(lambda: "twice on one rank" in _last_error(two[1]), "failed step")
        assert ranks.call(save_through_dcp, where, job / "step-6") == [""] * 2


def _last_error(node: Node) -> str:
    assert node.daemon is not None
    (job,) = node.daemon.status()["jobs"]
    return str(job["last_error"]["reason"]) if job["last_error"] else ""


def _save_twice(where: Sockets, path: Path) -> str:
    writer = StorageWriter(path, socket=where[dist.get_rank()])
    try:
        dcp.save(_state_of_dcp(5), storage_writer=writer, planner=_Twice())
    except dcp.CheckpointException as error:
        return "; ".join(str(failure[0]) for failure in error.failures.values())
    return ""


class _Twice(DefaultSavePlanner):
    """A planner that writes each item twice on rank 0, which ckptd refuses before it
    asks for a slot.
    """

    def finish_plan(self, new_plan: Any) -> Any:
        found = super().finish_plan(new_plan)
        if dist.get_rank() == 0:
            found.items[:] = [*found.items, *found.items]
        return found


class _Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no room in the planner")
        return super().resolve_data(write_item)


def _save_with_a_failing_planner(where: Sockets, path: Path) -> str:
    writer = StorageWriter(path, socket=where[dist.get_rank()])
    try:
        dcp.save(_state_of_dcp(6), storage_writer=writer, planner=_Failing())
    except dcp.CheckpointException as error:
        return "; ".join(str(failure[0]) for failure in error.failures.values())
    return ""


def test_a_node_without_a_daemon_is_named(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(_move_to_other_machines)
        (found, _) = ranks.call(
            save_through_dcp, [two[0].home.socket, two.path / "nowhere"], two.root / JOB / "step-5"
        )
    assert (
        f"rank 1 on host-1 cannot save to {two.root}/{JOB}/step-5: no daemon listens at "
        f"{two.path}/nowhere on host-1" in found
    )


def _move_to_other_machines() -> None:
    boot = bytes([dist.get_rank()] * 16)
    become(f"host-{dist.get_rank()}")
    for module in (targets, begins):
        vars(module)["this_boot"] = lambda: boot
