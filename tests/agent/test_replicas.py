"""Tests that ranks which hold the same tensors are compared at every snapshot, and that
a step in which they differ never comes back.

The first functions run on ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptd.agent import Agent, CkptdError, per_rank
from ckptd.agent.copy.replica_samples import ReplicaSamples
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Ranks

State = dict[str, Any]


def make(socket: Path, job: str, build: Callable[[], State], every: int | None = None) -> None:
    HERE["agent"] = Agent(job, socket=socket, compare_replicas=every)
    HERE["state"] = build()


def snap(
    step: int, change: Callable[[State, int], object] | None = None, persist: bool = True
) -> str:
    """Change the state of this rank, snapshot it, and return why that failed, or ""."""
    state = HERE["state"]
    if change is not None:
        with torch.no_grad():
            change(state, dist.get_rank())
    pending = HERE["agent"].snapshot(state, step=step, persist=persist)
    try:
        pending.wait("durable" if persist else "sealed", timeout=60)
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def back(socket: Path, job: str, build: Callable[[], State]) -> tuple[int, str, list[float]]:
    """Recover into a new state. Return the step, its source, and the first tensor."""
    HERE["agent"] = Agent(job, socket=socket, takeover=True)
    state = build()
    recovered = HERE["agent"].recover(state)
    first = next(value for value in state.values() if isinstance(value, torch.Tensor))
    return recovered.step, recovered.source, first.flatten()[:3].tolist()


def shut() -> None:
    HERE.pop("agent").close()


def experts() -> State:
    """Experts that each rank trains on its own, under equal names."""
    torch.manual_seed(7)
    return {f"experts.{number}.weight": torch.randn(40, 30) for number in range(3)} | {
        "router": torch.randn(30)
    }


def train_experts(state: State, rank: int) -> None:
    for number in (0, 2):
        state[f"experts.{number}.weight"] += 0.001 * (rank + 1)
    state["router"] += 1


def train_alike(state: State, rank: int) -> None:
    for value in state.values():
        value += 0.5


def adapter() -> State:
    """A layer with an adapter whose second matrix starts at zero, with an optimizer."""
    torch.manual_seed(7)
    model = nn.ParameterDict(
        {"base": nn.Parameter(torch.randn(50, 50)), "lora_B": nn.Parameter(torch.zeros(50, 4))}
    )
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train_adapter(state: State, rank: int) -> None:
    state["model"]["lora_B"] += rank + 1


def batch_norm() -> State:
    torch.manual_seed(7)
    return {"model": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))}


def batch_norm_dict() -> State:
    return {"model": batch_norm()["model"].state_dict()}


def run_batch(state: State, rank: int) -> None:
    state["model"](torch.randn(16, 8) + rank)


def run_batch_of_dict(state: State, rank: int) -> None:
    state["model"]["1.running_mean"] += rank


def large() -> State:
    torch.manual_seed(7)
    return {
        "a": torch.randn(100_000),
        "b": torch.randn(300, 200).t(),
        "c": torch.arange(5),
        "d": torch.randn(8, 3, 5, 5),
    }


class Flip:
    """Flips one bit of a tensor on rank 1."""

    def __init__(self, key: str, at: int) -> None:
        self.key, self.at = key, at

    def __call__(self, state: State, rank: int) -> None:
        if rank == 1:
            tensor = state[self.key]
            tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)[self.at] ^= 4


def replicated() -> State:
    """A tensor that is replicated over two ranks, and one that is divided between them."""
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (2,))
    return {
        "whole": DTensor.from_local(torch.randn(64, 3), mesh, [Replicate()], run_check=False),
        "shard": DTensor.from_local(
            torch.randn(64, 3) + dist.get_rank(), mesh, [Shard(0)], run_check=False
        ),
    }


def change_whole(state: State, rank: int) -> None:
    state["whole"]._local_tensor.add_(rank)


def hybrid() -> State:
    """Shards that two pairs of four ranks hold, as HSDP has them."""
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = torch.full((6, 3), float(mesh.get_local_rank("shard")))
    return {
        "w": DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False),
        "same": torch.ones(20),
    }


def change_of_rank_three(state: State, rank: int) -> None:
    state["w"]._local_tensor.add_(1 + (rank == 3))


def own() -> State:
    return {"own": per_rank(torch.zeros(30)), "w": torch.zeros(30)}


def train_own(state: State, rank: int) -> None:
    state["own"].value.add_(rank)
    state["w"].add_(1)


def conjugates() -> State:
    torch.manual_seed(7)
    values = torch.complex(torch.arange(40.0), torch.ones(40))
    return {
        "conj": values.conj(),
        "imag": values.clone().conj().imag,
        "channels": torch.randn(2, 3, 4, 4),
    }


def other_layout(state: State, rank: int) -> None:
    """Replace a tensor by one with the same values in another order of memory on one
    rank.
    """
    if rank:
        state["channels"] = state["channels"].contiguous(memory_format=torch.channels_last)


def different_experts() -> State:
    """Experts that are another one on each rank from the start, beside a layer that all
    ranks have.
    """
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(4, 3)
    state = {"experts": module, "optim": torch.optim.Adam(module.parameters(), lr=0.1)}
    return {key: per_rank(value) for key, value in state.items()} | {"router": torch.zeros(5)}


def without_marks() -> State:
    return {key: getattr(value, "value", value) for key, value in different_experts().items()}


def train_marked(state: State, rank: int) -> None:
    optimizer, module = state["optim"].value, state["experts"].value
    for parameter in module.parameters():
        parameter.grad = parameter.detach() + rank
    optimizer.step()


def first_snapshot(step: int) -> str:
    try:
        HERE["agent"].snapshot(HERE["state"], step=step)
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def snap_on_full_device(step: int) -> str:
    """Snapshot while the device of rank 1 has no memory for the samples."""

    def take(*_: object) -> Any:
        raise torch.OutOfMemoryError("full")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(ReplicaSamples, "take", take)
        return snap(step, train_alike)


def nothing_to_recover(socket: Path, job: str) -> bool:
    HERE["agent"] = Agent(job, socket=socket, takeover=True)
    return HERE["agent"].recover(without_marks()) is None


def all_of_experts(state: State) -> list[Any]:
    moments = [entry["exp_avg"].tolist() for entry in state["optim"].value.state.values()]
    return [*(parameter.tolist() for parameter in state["experts"].value.parameters()), *moments]


def experts_of_this_rank() -> list[Any]:
    return all_of_experts(HERE["state"])


def experts_after_recovery(socket: Path, job: str) -> list[Any]:
    HERE["agent"] = Agent(job, socket=socket, takeover=True)
    state = different_experts()
    with torch.no_grad():
        for parameter in state["experts"].value.parameters():
            parameter.zero_()
    assert HERE["agent"].recover(state) is not None
    return all_of_experts(state)


@pytest.fixture(scope="module")
def ranks() -> Any:
    with Ranks(2) as made:
        yield made


def fails(ranks: Ranks, step: int, change: Callable[[State, int], object] | None) -> str:
    """Snapshot on all ranks, and return the sentence with which the step has failed on
    all of them.
    """
    first, *others = ranks.call(snap, step, change)
    assert others == [first] * len(others)
    assert first.startswith(f"SnapshotFailed: step {step} failed: "), first
    return str(first)


def test_experts_under_equal_names_fail_the_step_by_name(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "experts", experts)
    assert ranks.call(snap, 1, train_alike) == ["", ""]
    said = fails(ranks, 2, train_experts)
    assert "experts.0.weight, experts.2.weight are not the same on ranks 0 and 1" in said
    assert "router" not in said
    assert "per_rank(...)" in said
    assert "experts.0.weight" in fails(ranks, 3, None)
    assert (
        "step 3 failed: experts.0.weight, experts.2.weight are not the same on ranks 0 and 1"
        in daemon.home.log_text()
    )
    ranks.call(shut)


def test_a_full_device_costs_the_comparison_and_not_the_step(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "full", experts)
    assert ranks.call(snap, 1, train_alike) == ["", ""]
    assert ranks.call(snap_on_full_device, 2) == ["", ""]
    assert ranks.call(snap, 3, train_alike) == ["", ""]
    assert daemon.status()["counters"]["uncompared"] == 1
    assert "are not the same on ranks" in fails(ranks, 4, train_experts)
    ranks.call(shut)


def test_experts_that_differ_from_the_start_are_refused_at_the_first_snapshot(
    ranks: Ranks, daemon: Daemon
) -> None:
    ranks.call(make, daemon.home.socket, "apart", without_marks)
    for step in (1, 2):
        for said in ranks.call(first_snapshot, step):
            assert said.removeprefix("UnsavableValue: ").removeprefix("rank 0: ") == (
                "experts.weight differs between ranks 0 and 1, and is not split between them: "
                "make it a DTensor over all ranks, give "
                "different tensors different keys, or mark it as each rank's own with per_rank(...)"
            )
    assert ranks.call(nothing_to_recover, daemon.home.socket, "apart") == [True, True]
    ranks.call(shut)


def test_marked_experts_come_back_to_each_rank(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "marked", different_experts, 1)
    assert ranks.call(snap, 1, train_marked) == ["", ""]
    saved = ranks.call(experts_of_this_rank)
    assert saved[0] != saved[1]
    assert len(saved[0]) == 4
    assert ranks.call(experts_after_recovery, daemon.home.socket, "marked") == saved
    ranks.call(shut)


def test_an_adapter_that_starts_at_zero_fails_the_step(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "adapter", adapter)
    assert ranks.call(snap, 1) == ["", ""]
    assert "model.lora_B is not the same on ranks 0 and 1" in fails(ranks, 2, train_adapter)
    ranks.call(shut)


def test_buffers_of_modules_may_differ(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "buffers", batch_norm, 1)
    for step in range(4):
        assert ranks.call(snap, step, run_batch) == ["", ""]
    ranks.call(shut)


def test_buffers_in_a_plain_dict_are_told_apart_with_a_remedy(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "dict", batch_norm_dict)
    assert ranks.call(snap, 1) == ["", ""]
    said = fails(ranks, 2, run_batch_of_dict)
    assert "model.1.running_mean is not the same on ranks 0 and 1" in said
    assert "pass the module itself instead of its state_dict()" in said
    ranks.call(shut)


@pytest.mark.parametrize(("key", "at"), [("a", 123_457), ("b", 99_999), ("c", 3), ("d", 600)])
def test_a_flipped_bit_is_found_within_a_full_comparison(
    ranks: Ranks, daemon: Daemon, key: str, at: int
) -> None:
    every = 5
    ranks.call(make, daemon.home.socket, f"flip-{key}", large, every)
    assert ranks.call(snap, 10) == ["", ""]
    failed = []
    for number, step in enumerate(range(20, 20 + 10 * every, 10)):
        found = ranks.call(snap, step, Flip(key, at) if number == 0 else None)
        assert len(set(found)) == 1
        failed += [said for said in found if said]
    assert failed
    assert all(f"{key} is not the same on ranks 0 and 1" in said for said in failed)
    ranks.call(shut)


def test_replicas_of_dtensors_are_compared_and_shards_are_not(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "dtensors", replicated)
    assert ranks.call(snap, 1) == ["", ""]
    said = fails(ranks, 2, change_whole)
    assert "whole is not the same on ranks 0 and 1" in said
    ranks.call(shut)


def test_a_rank_of_several_replicas_is_named(daemon: Daemon) -> None:
    with Ranks(4) as four:
        four.call(make, daemon.home.socket, "hybrid", hybrid)
        assert four.call(snap, 1) == [""] * 4
        assert "w is not the same on ranks 1 and 3" in fails(four, 2, change_of_rank_three)
        four.call(make, daemon.home.socket, "four", experts, 1)
        assert four.call(snap, 1, train_alike) == [""] * 4
        said = fails(four, 2, Flip("router", 2))
        assert "router is not the same on rank 1 as on ranks 0, 2, 3" in said


def test_values_of_each_rank_may_differ(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "own", own, 1)
    for step in range(3):
        assert ranks.call(snap, step, train_own) == ["", ""]
    ranks.call(shut)


def test_equal_values_in_another_form_are_equal(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "forms", conjugates, 1)
    assert ranks.call(snap, 1, other_layout) == ["", ""]
    assert ranks.call(snap, 2, None) == ["", ""]
    ranks.call(shut)


def test_nothing_is_compared_with_zero(ranks: Ranks, daemon: Daemon) -> None:
    ranks.call(make, daemon.home.socket, "zero", experts, 0)
    assert ranks.call(snap, 1, train_alike) == ["", ""]
    assert ranks.call(snap, 2, train_experts) == ["", ""]
    ranks.call(shut)


@pytest.mark.parametrize("persist", [True, False])
def test_a_step_that_failed_so_never_comes_back(daemon: Daemon, persist: bool) -> None:
    """Everything is killed right after the seals, so that only the slots know of the
    step.
    """
    with Ranks(2) as ranks:
        ranks.call(make, daemon.home.socket, "killed", experts)
        assert ranks.call(snap, 1, train_alike, persist) == ["", ""]
        wanted = ranks.call(first_values)
        ranks.call(snap, 2, train_experts, persist)
        for rank in range(2):
            ranks.kill(rank)
    daemon.kill()
    restarted = Daemon(daemon.home, forked=True).wait_ready()
    try:
        with Ranks(2) as ranks:
            assert (
                ranks.call(back, restarted.home.socket, "killed", blank)
                == [(1, "memory", wanted[0])] * 2
            )
    finally:
        restarted.stop()
    assert "step 2 failed: experts.0.weight" in daemon.home.log_text()


def first_values() -> list[float]:
    return HERE["state"]["experts.0.weight"].flatten()[:3].tolist()  # type: ignore[no-any-return]


def blank() -> State:
    return {key: torch.zeros_like(value) for key, value in experts().items()}
