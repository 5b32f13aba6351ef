"""Tests recoveries on real ranks and with a real daemon: every shard comes back, and
what would be lost is refused before a write.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptd.agent import Agent, per_rank
from ckptd.agent.copy import lanes
from ckptd.agent.read import loader, upload
from ckptd.agent.read.upload import Upload
from ckptd.agent.recover import conversions
from ckptd.shared.errors import CkptdError, InvalidRequest, StructureMismatch
from tests.gpu.simulated import SimulatedLane
from tests.oracle.prints import text
from tests.support import ranks as rank_processes
from tests.support import sharded
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Lend
from tests.support.refusals import exit_of
from tests.support.storage import part_in

pytestmark = pytest.mark.usefixtures("processes")


pool = rank_processes.new_ranks


@pytest.mark.parametrize("kind", sharded.KINDS)
def test_every_sharding_comes_back(kind: str, pool: Lend) -> None:
    with sharded.saved(kind, 4, "storage", pool=pool) as saved, pool(4) as ranks:
        ranks.call(sharded.build, kind, 2)
        assert ranks.call(sharded.recover, saved.place.socket, True) == [("storage", 2)] * 4
        assert sharded.differing(sharded.together(ranks.call(sharded.whole)), saved.wanted) == []


def test_shards_come_back_from_memory(pool: Lend) -> None:
    with sharded.saved("fsdp2", 2, "memory") as saved, pool(2) as ranks:
        ranks.call(sharded.build, "fsdp2", 2)
        assert ranks.call(sharded.recover, saved.place.socket, True) == [("memory", 2)] * 2
        assert sharded.differing(sharded.together(ranks.call(sharded.whole)), saved.wanted) == []


def recover_through_buffers(socket: Path) -> tuple[str, int]:
    """Recover as if each tensor were on a device, and fail if one is copied past the
    buffers.
    """
    with ExitStack() as stack:
        for target, name, value in (
            (upload, "StreamLane", SimulatedLane),
            (upload, "lock_pages", lambda *_: True),
            (lanes, "unlock_pages", lambda *_: None),
            (upload, "BUFFER", 256),
            (Upload, "goes_to", staticmethod(lambda device: True)),
            (loader, "copy_any", None),
        ):
            stack.enter_context(patch.object(target, name, value))
        return sharded.recover(socket)


@pytest.mark.parametrize(
    ("before", "after"), [(("fsdp2", 4), ("fsdp2", 3)), (("2d", 4), ("tp", 3))], ids=str
)
def test_another_sharding_is_recovered_through_the_buffers(
    before: tuple[str, int], after: tuple[str, int], pool: Lend
) -> None:
    with sharded.saved(*before, "storage", pool=pool) as saved, pool(after[1]) as ranks:
        ranks.call(sharded.build, after[0], 2)
        ranks.call(sharded.train, 1)  # so that the optimizer has its state in DTensors
        assert ranks.call(recover_through_buffers, saved.place.socket) == [("storage", 2)] * 3
        assert sharded.differing(sharded.together(ranks.call(sharded.whole)), saved.wanted) == []


def refused(socket: Path) -> tuple[str, bool]:
    """Return the error of a recovery with the same partition, and True if the model is
    as it was.
    """
    before = [part.detach().clone() for part in HERE["model"].parameters()]
    try:
        sharded.recover(socket, True)
    except StructureMismatch as error:
        after = list(HERE["model"].parameters())
        return str(error), all(
            torch.equal(one.to_local(), other.to_local())
            for one, other in zip(before, after, strict=True)
        )
    return "", False


def test_another_number_of_ranks_is_refused(pool: Lend) -> None:
    with sharded.saved("fsdp2", 4, "storage", pool=pool) as saved, pool(2) as ranks:
        ranks.call(sharded.build, "fsdp2", 2)
        for error, same in ranks.call(refused, saved.place.socket):
            assert error.endswith(
                "saved on 4 ranks, and this job has 2: recover without same_partition"
            )
            assert same


def test_another_sharding_is_refused_by_name(pool: Lend) -> None:
    with sharded.saved("fsdp2", 4, "storage", pool=pool) as saved, pool(4) as ranks:
        ranks.call(sharded.build, "2d", 2)
        for error, same in ranks.call(refused, saved.place.socket):
            assert "which was not saved as one: recover without same_partition" in error
            assert "model." in error
            assert same
        assert ranks.call(sharded.recover, saved.place.socket) == [("storage", 2)] * 4


def test_shards_of_the_same_shape_at_another_place_are_not_mixed_up(
    daemon: Daemon, pool: Lend
) -> None:
    with pool(2) as ranks:
        ranks.call(save_on_mesh, daemon.home.socket, [0, 1])
    with pool(2) as ranks:
        assert ranks.call(recover_on_mesh, daemon.home.socket, [1, 0], True) == ["", ""]
        assert ranks.call(recover_on_mesh, daemon.home.socket, [1, 0], False) == ["", ""]


def on_mesh(order: list[int], value: torch.Tensor) -> Any:
    return distribute_tensor(value, DeviceMesh("cpu", order), [Shard(0)], src_data_rank=None)


def save_on_mesh(socket: Path, order: list[int]) -> None:
    agent = Agent("job", socket=socket)
    agent.snapshot(
        {"w": on_mesh(order, torch.arange(8.0)), "own": per_rank(agent.rank)}, step=1
    ).wait("durable", timeout=60)


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


def test_ranks_must_agree_on_the_promise(daemon: Daemon, pool: Lend) -> None:
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot({"w": torch.ones(2)}, step=1).wait("durable", timeout=60)
    with pool(2) as ranks:
        for error in ranks.call(recover_unlike, daemon.home.socket):
            assert error.endswith(
                "some ranks recover with same_partition and others without: pass the same on all "
                "ranks"
            )


def test_a_planner_has_its_own_way(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket, load_planner=DefaultLoadPlanner())
    with pytest.raises(
        InvalidRequest, match="^keep and same_partition cannot be combined with a load_planner"
    ):
        agent.recover({}, same_partition=True)
    agent.close()


def test_keys_without_a_place_are_refused(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"a": torch.ones(2), "b": 3}, step=1).wait("durable", timeout=60)
    with pytest.raises(
        StructureMismatch,
        match="^key b is in the checkpoint and not in the state; nothing was written",
    ):
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


# -- what the values decide, and where the recovery is called


def trained(dtype: torch.dtype = torch.float32, fill: float = 1.0) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, fill)
    state = {"model": model, "optim": torch.optim.Adam(model.parameters(), lr=0.1), "epoch": 0}
    train(state)
    return state


def train(state: dict[str, Any]) -> None:
    dtype = next(state["model"].parameters()).dtype
    state["model"](
        torch.arange(8.0, device="cpu").reshape(4, 2).to(dtype)
    ).square().mean().backward()
    state["optim"].step()
    state["optim"].zero_grad()
    state["epoch"] += 1


@pytest.mark.parametrize(
    "where", [torch.inference_mode, lambda: torch.device("meta"), torch.no_grad]
)
@pytest.mark.parametrize("stepped", [False, True], ids=["before its first step", "after it"])
def test_a_recovery_does_not_depend_on_where_it_is_called(
    daemon: Daemon, where: Callable[[], Any], stepped: bool
) -> None:
    saved, state = trained(), trained(fill=0.0)
    if not stepped:
        state["optim"] = torch.optim.Adam(state["model"].parameters(), lr=0.5)
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(saved, step=1).wait("durable", timeout=60)
        with where():
            agent.recover(state)
        for _ in range(2):
            assert text(state) == text(saved)
            train(state)
            train(saved)
        with where():
            agent.snapshot(state, step=2).wait("durable", timeout=60)
            agent.recover(saved)
        assert text(saved) == text(state)


def test_a_default_dtype_changes_nothing(daemon: Daemon) -> None:
    saved, state = trained(), trained(fill=0.0)
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(saved, step=1).wait("durable", timeout=60)
        torch.set_default_dtype(torch.float64)
        try:
            agent.recover(state)
        finally:
            torch.set_default_dtype(torch.float32)
    assert text(state) == text(saved)


def failure(agent: Agent, state: dict[str, Any], **options: Any) -> StructureMismatch:
    """Return the refusal of a recovery. Asserts that no bit of the state has changed."""
    before = text(state)
    with pytest.raises(StructureMismatch) as caught:
        agent.recover(state, **options)
    assert text(state) == before
    return caught.value


def test_what_would_become_infinite_is_refused_before_anything_is_written(daemon: Daemon) -> None:
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(
            {"a": torch.ones(3), "w": torch.tensor([1.0, 1e6]), "epoch": 4}, step=1
        ).wait("durable", timeout=60)
        state = {"a": torch.zeros(3), "w": torch.zeros(2, dtype=torch.float16), "epoch": 0}
        error = failure(agent, state)
        words = (
            "w: the checkpoint has float32, the state float16, and finite values would become "
            "infinite in float16; nothing was written"
        )
        assert str(error) == f"{words}. To recover the rest, call recover(state, keep=['w'])"
        agent.recover(state, **exit_of(error))
        assert (state["a"].tolist(), state["w"].tolist(), state["epoch"]) == (  # type: ignore[attr-defined]
            [1.0] * 3,
            [0.0] * 2,
            4,
        )


def fold(key: str, values: list[Any]) -> Any:
    return values[0]


def test_the_call_of_a_refusal_repeats_the_arguments_of_the_caller(daemon: Daemon) -> None:
    """Otherwise it would bring back the newest step, and not the one that was asked
    for.
    """
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        for step in (1, 2):
            agent.snapshot(
                {"a": torch.full((3,), float(step)), "t": torch.ones(2), "more": 1}, step=step
            ).wait("durable", timeout=60)
        state = {"a": torch.zeros(3), "t": torch.zeros(5)}
        error = failure(agent, state, step=1, on_reshape=fold)
        assert str(error).endswith("call recover(state, step=1, keep=['t'], on_reshape=fold)")
        error = failure(agent, state, step=1, keep=["t"], on_reshape=fold, same_partition=True)
        call = (
            "recover(state, step=1, strict=False, keep=['t'], on_reshape=fold, same_partition=True)"
        )
        assert (
            str(error)
            == f"key more is in the checkpoint and not in the state; nothing was written. To "
            f"recover the rest, call {call}"
        )
        # As its reader would.
        assert eval(call, {"recover": agent.recover, "state": state, "fold": fold}) is not None
        assert state["a"].tolist() == [1.0] * 3


def test_untied_into_tied_is_refused_with_both_keys_and_the_calls_lead_to_the_end(
    daemon: Daemon,
) -> None:
    def program(tied: bool) -> dict[str, Any]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "ab"})
        if tied:
            model["b"].weight = model["a"].weight
        return {"net": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}

    saved, state = program(False), program(True)
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(saved, step=1).wait("durable", timeout=60)
        error = failure(agent, state)
        assert str(error).startswith(
            "net.a.weight and net.b.weight share memory in the state, and differ in the "
            "checkpoint: "
        )
        error = failure(agent, state, **exit_of(error))
        assert str(error).startswith(
            "key optim.param_groups.b.weight is in the checkpoint and not in the state; "
        )
        agent.recover(state, **exit_of(error))
        assert torch.equal(state["net"]["b"].weight, saved["net"]["a"].weight)


def test_memory_that_was_saved_as_one_is_not_read_for_a_comparison(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(6.0)
    other = torch.zeros(6)
    state = {"head": other[:4], "tail": other[2:]}
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot({"head": whole[:4], "tail": whole[2:]}, step=1).wait("durable", timeout=60)
        monkeypatch.setattr(conversions, "_overwritten", lambda *args: pytest.fail("was compared"))
        agent.recover(state)
    assert other.tolist() == whole.tolist()


def test_a_state_of_which_nothing_matches_is_refused_although_strict_is_off(daemon: Daemon) -> None:
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot({"a": torch.ones(3), "epoch": 4}, step=1).wait("durable", timeout=60)
        error = failure(agent, {"b": torch.zeros(3)}, strict=False)
        assert str(error) == (
            "no key of the state (b) is in the checkpoint, which has a, epoch; nothing was "
            "written: compare the keys of the state with "
            "those that `ckptd show` lists, or use another job name if this training is not the "
            "one that saved the checkpoint"
        )
        with closing(Agent("another", socket=daemon.home.socket)) as another:
            assert another.recover({"b": torch.zeros(3)}, strict=False) is None


def test_a_grown_vocabulary_goes_on_from_a_checkpoint(daemon: Daemon) -> None:
    def program(rows: int) -> dict[str, Any]:
        model = torch.nn.ModuleDict(
            {"emb": torch.nn.Embedding(rows, 2), "head": torch.nn.Linear(2, rows)}
        )
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def step(state: dict[str, Any]) -> None:
        state["model"]["head"](state["model"]["emb"](torch.arange(3))).square().mean().backward()
        state["optim"].step()

    saved, state, alone = program(3), program(4), program(4)
    step(saved)
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        agent.snapshot(saved, step=1).wait("durable", timeout=60)
        error = failure(agent, state)
        grown = ["model.emb.weight", "model.head.weight", "model.head.bias"]
        assert exit_of(error) == {"keep": grown}
        agent.recover(state, keep=grown)
        assert len(state["optim"].state) == 0
        step(state)
    with closing(Agent("optimizer", socket=daemon.home.socket)) as agent:
        agent.snapshot({"optim": saved["optim"]}, step=1).wait("durable", timeout=60)
        error = failure(agent, {"optim": alone["optim"]})
        assert str(error).startswith(
            "optim.state.0: the parameter had shape [3, 2] when it was saved, and has [4, 2] now; "
        )
        agent.recover({"optim": alone["optim"]}, **exit_of(error))
        step(alone)


def test_settings_that_the_checkpoint_overrides_are_told_once(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Three runs: the second has another rate, and the third is the second again."""

    def run(rate: float, step: int) -> list[str]:
        caplog.clear()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        agent = Agent("gpt", socket=daemon.home.socket)
        agent.recover({"optim": optimizer})
        optimizer.param_groups[0]["lr"] *= 0.5  # a schedule that is written by hand
        agent.snapshot({"optim": optimizer}, step=step).wait("durable", timeout=60)
        agent.recover({"optim": optimizer})
        agent.close()
        return [one.getMessage() for one in caplog.records if one.module == "loading"]

    caplog.set_level("WARNING", "ckptd.agent")
    assert run(0.5, 1) == run(0.5, 2) == []
    (told,) = run(0.75, 3)
    assert "optim.param_groups.0.lr 0.125 (was 0.75)" in told
    assert run(0.75, 4) == []
    caplog.set_level("INFO", "ckptd.agent")
    assert "restored from the checkpoint" in run(0.75, 5)[0]
