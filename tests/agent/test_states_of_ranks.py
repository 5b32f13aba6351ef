"""Tests states that two ranks may give, saved and recovered: what belongs together,
what is tied, and what each rank marks as its own.

Each of the `CASES` is made with its values, and blank. After the recovery the blank one
must equal the other. The first functions run on ranks.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ckptd.agent import Agent, Checkpoint, CkptdError, LatestN, per_rank
from ckptd.agent.recover import recovery
from ckptd.agent.state.tree import PerRank
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Lend, Ranks

Make = Callable[[bool, int], Any]
CASES: dict[str, Make] = {}


def case(make: Make) -> Make:
    CASES[make.__name__] = make
    return make


def arange(count: int, blank: bool, start: float = 0.0) -> torch.Tensor:
    return torch.zeros(count) if blank else torch.arange(float(start), start + count)


@case
def tied_to_each_ranks_own(blank: bool, rank: int) -> Any:
    weight = arange(6, blank)
    return {"model": weight, "own": per_rank({"w": weight})}


@case
def tied_inside_each_ranks_own(blank: bool, rank: int) -> Any:
    """As metrics of a training: one tensor under several keys, on one rank or on all."""
    loss, last = arange(3, blank, rank), arange(5, blank, 10 * rank)
    more = {"last": last, "first": last[:2]} if rank == 1 else {}
    return {
        "w": arange(4, blank),
        "own": per_rank({"loss": loss, "loss_step": loss, "scalar": loss[1]}),
        "logged": per_rank({"loss": loss, **more}),
    }


@case
def tied_on_one_rank(blank: bool, rank: int) -> Any:
    weight = arange(6, blank)
    if rank == 0:
        return {"embed": weight}
    return {"embed": weight, "head": weight, "view": weight[2:4], "much": arange(1000, blank)}


@case
def parts_of_one_storage(blank: bool, rank: int) -> Any:
    base = arange(15, blank)
    return {"a": base[:10], "own": per_rank({"b": base[5:]})}


@case
def marks_in_a_list(blank: bool, rank: int) -> Any:
    return {
        "places": [per_rank(0 if blank else 10 + rank), per_rank(arange(2, blank, rank))],
        "pair": (per_rank(0 if blank else rank), 5),
    }


@case
def marks_where_nothing_is_yet(blank: bool, rank: int) -> Any:
    return {
        "readers": {}
        if blank
        else {
            "train": per_rank(10 + rank),
            "deep": [{"w": per_rank(torch.full((2,), float(rank)))}],
        }
    }


class Reader:
    """An object that marks its own position with `per_rank`."""

    def __init__(self, position: int) -> None:
        self.position, self.seen = position, torch.full((2,), float(position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": per_rank(self.position), "seen": per_rank(self.seen), "epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.seen = state["position"], state["seen"]


@case
def an_object_that_marks_its_own(blank: bool, rank: int) -> Any:
    return {"reader": Reader(0 if blank else 10 + rank)}


@case
def containers(blank: bool, rank: int) -> Any:
    history, numbers = deque([arange(2, blank), arange(2, blank, 5.0)], maxlen=4), deque([1, (2,)])
    return {
        "history": deque(maxlen=4) if blank else history,
        "w": OrderedDict(w=arange(3, blank)),
        "n": deque() if blank else numbers,
    }


class AppState:
    """A Stateful that asks torch for both state dicts, as in PyTorch's tutorial of DCP."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


@case
def a_stateful_of_sharded_tensors(blank: bool, rank: int) -> Any:
    torch.manual_seed(99 if blank else 7)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return {"app": AppState(model, optimizer)}


@case
def a_stateful_of_each_stage(blank: bool, rank: int) -> Any:
    """The stages of a pipeline.

    Each rank's object must get its own layers and groups, and no others.
    """
    torch.manual_seed(99 if blank else rank)
    model = nn.Sequential(OrderedDict({f"layer{rank}": nn.Linear(6, 6)}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + rank), foreach=False)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return {"app": AppState(model, optimizer)}


@case
def conjugates_and_negatives(blank: bool, rank: int) -> Any:
    values = (
        torch.zeros(4, dtype=torch.complex64) if blank else torch.tensor([1 + 2j, 3 - 1j, 5j, 7])
    )
    sharded = DTensor.from_local(
        values[:2].conj() if rank == 0 else values[2:].conj(),
        init_device_mesh("cpu", (2,)),
        [Shard(0)],
    )
    return {
        "plain": values.clone().conj(),
        "imaginary": values.clone().conj().imag,
        "sharded": sharded,
        "replicated": values.conj(),
    }


@case
def small_and_odd(blank: bool, rank: int) -> Any:
    return {
        "scalar": torch.tensor(0.0 if blank else 3.0), "empty": torch.empty(0, 5),
        "own": per_rank(torch.tensor(0 if blank else rank)), 1: arange(2, blank), "1": arange(2,
        blank, 5.0), (1, 2): 0 if blank else 5, "x": per_rank(arange(3, blank, rank)),
        "channels": arange(96, blank).view(2, 3, 4,
        4).contiguous(memory_format=torch.channels_last),
    }  # fmt: skip


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return everything in it as plain values, by path.

    Of sharded tensors, return this rank's part.
    """
    if isinstance(tree, PerRank):
        return {f"{path}*": None, **flat(tree.value, path)}
    if isinstance(tree, Reader):
        return {f"{path}.position": tree.position, **flat(tree.seen, f"{path}.seen")}
    if isinstance(tree, AppState):
        return flat(tree.state_dict(), path)
    if isinstance(tree, DTensor):
        return {f"{path}.placements": str(tree.placements), **flat(tree.to_local(), path)}
    if isinstance(tree, torch.Tensor):
        plain = tree.detach().resolve_conj().resolve_neg()
        return {path: (str(tree.dtype), tuple(tree.shape), plain.tolist())}
    if isinstance(tree, (dict, list, tuple, deque)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        found = {f"{path} kind": type(tree).__name__}
        for key, value in items:
            found |= flat(value, f"{path}.{key!r}")
        return found
    return {path: tree}


def save(socket: Path, name: str) -> tuple[str, dict[str, Any]]:
    agent = HERE["agent"] = Agent(name, socket=socket)
    state = CASES[name](False, dist.get_rank())
    try:
        agent.snapshot(state, step=1).wait("durable", timeout=60)
    except CkptdError as error:
        return str(error), {}
    return "", flat(state)


def recover(socket: Path, name: str) -> dict[str, Any]:
    agent = HERE["agent"] = Agent(name, socket=socket)
    state = CASES[name](True, dist.get_rank())
    assert agent.recover(state) is not None
    found = flat(state)
    # A recovered state can be saved as it is.
    agent.snapshot(state, step=2).wait("sealed", timeout=60)
    return found


def refused(socket: Path, name: str, states: list[Any]) -> str:
    """Return why the state of this rank cannot be saved."""
    agent = Agent(name, socket=socket)
    pending = agent.snapshot(states[dist.get_rank()], step=1, on_error="log")
    try:
        pending.wait("durable", timeout=60)
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_as(socket: Path, name: str, persist: list[bool]) -> str:
    agent = HERE["agent"] = Agent(name, socket=socket)
    pending = agent.snapshot({"w": torch.ones(3)}, step=1, persist=persist[dist.get_rank()])
    try:
        pending.wait("durable", timeout=60)
    except CkptdError as error:
        return str(error)
    return ""


def recover_step(name: str, steps: list[int | None]) -> str:
    try:
        HERE["agent"].recover({"w": torch.ones(3)}, step=steps[dist.get_rank()])
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Log:
    """Keeps the state that it is given."""

    def __init__(self, entries: dict[str, int]) -> None:
        self.entries = entries

    def state_dict(self) -> dict[str, Any]:
        return {"entries": self.entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state["entries"]


def drift(socket: Path) -> tuple[Any, ...]:
    """Values that are the same on all ranks when they plan, and differ later.

    Each rank gets its own back nevertheless.
    """
    rank = dist.get_rank()
    agent = Agent("drift", socket=socket)
    for step, own in ((1, {}), (2, {f"only {rank}": rank})):
        state = {
            "counts": Counter(own),
            "plain": dict(own),
            "log": Log(dict(own)),
            "w": torch.ones(2),
        }
        agent.snapshot(state, step=step).wait("durable", timeout=60)
    state = {"counts": Counter(), "plain": {}, "log": Log({}), "w": torch.ones(2)}
    agent.recover(state)
    return state["counts"], state["plain"], state["log"].entries  # type: ignore[attr-defined]


def recover_alone(seconds: float) -> str:
    vars(recovery)["RANKS_SECONDS"] = seconds
    return recover_step("alone", [None, None])


def stages(socket: Path) -> str:
    """Two stages of a pipeline, each sharded over two ranks, with the same names for
    different layers.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["shard"])
    return refused(socket, "stages", [{"model": model}] * 4)


def retain(socket: Path, bad: int) -> str:
    """Make an agent, with a retention that is invalid on one rank."""
    try:
        Agent(
            "retention", socket=socket, retention=[] if dist.get_rank() == bad else LatestN(1)
        ).close()
    except (CkptdError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def ranks() -> Any:
    with Ranks(2) as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_each_case_comes_back(ranks: Ranks, daemon: Daemon, name: str) -> None:
    saved = ranks.call(save, daemon.home.socket, name)
    assert [why for why, _ in saved] == ["", ""]
    with Checkpoint.open(daemon.home.root / name) as checkpoint:
        checkpoint.load()  # every key that the metadata has
    for (_, wanted), found in zip(
        saved, ranks.call(recover, daemon.home.socket, name), strict=True
    ):
        assert found == wanted


def test_the_same_name_on_other_meshes_is_refused(daemon: Daemon, pool: Lend) -> None:
    with pool(4) as ranks:
        for why in ranks.call(stages, daemon.home.socket):
            assert "UnsavableValue: " in why
            assert (
                "model.weight differs between ranks 0 and 2, and is not split between them" in why
            )


def test_parts_of_one_storage_that_differ_are_refused(ranks: Ranks, daemon: Daemon) -> None:
    bases = [torch.arange(15.0) + 100 * rank for rank in range(2)]
    for why in ranks.call(
        refused, daemon.home.socket, "parts", [{"a": base[:10], "b": base[5:]} for base in bases]
    ):
        assert "a differs between ranks 0 and 1" in why


def test_a_key_that_is_too_long_is_refused_by_name(ranks: Ranks, daemon: Daemon) -> None:
    for why in ranks.call(refused, daemon.home.socket, "long", [{"k" * 20_000: torch.ones(2)}] * 2):
        assert why.startswith("UnsavableValue: ")
        assert "kkkk...: this key has 20,000 characters" in why


def test_ranks_with_different_persist_fail_the_step(ranks: Ranks, daemon: Daemon) -> None:
    for why in ranks.call(save_as, daemon.home.socket, "persist", [True, False]):
        said = (
            r"step 1 has persist=(True on rank 0, but persist=False on rank 1|False on rank 1, "
            r"but persist=True on rank 0): "
            "pass the same on all ranks"
        )
        assert re.fullmatch(said, why)
    assert ranks.call(save_as, daemon.home.socket, "persist", [True, True]) == ["", ""]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_invalid_retention_of_one_rank_is_an_error_on_all(
    ranks: Ranks, daemon: Daemon, bad: int
) -> None:
    for why in ranks.call(retain, daemon.home.socket, bad):
        assert "InvalidRequest: " in why
        assert "retention has 0 policies" in why


def test_ranks_that_want_different_steps_back_fail(ranks: Ranks, daemon: Daemon) -> None:
    assert ranks.call(save_as, daemon.home.socket, "steps", [True, True]) == ["", ""]
    for steps, said in (([None, 1], "1 and None"), ([99, 1], "1 and 99")):
        wanted = (
            f"InvalidRequest: the ranks want to recover step {said}: pass the same step on all "
            f"ranks"
        )
        assert ranks.call(recover_step, "steps", steps) == [wanted] * 2
    assert ranks.call(recover_step, "steps", [1, 1]) == ["", ""]


def test_each_rank_gets_its_own_plain_values_back(ranks: Ranks, daemon: Daemon) -> None:
    for rank, found in enumerate(ranks.call(drift, daemon.home.socket)):
        assert found == ({f"only {rank}": rank},) * 3


def test_a_failed_recovery_on_one_rank_does_not_disturb_a_later_one(
    ranks: Ranks, daemon: Daemon
) -> None:
    assert ranks.call(save_as, daemon.home.socket, "alone", [True, True]) == ["", ""]
    first, second = ranks.call(recover_step, "alone", [None, True])
    assert first == "InvalidRequest: rank 1: step is True; expected an integer from 0 to 10**18 - 1"
    assert second == "InvalidRequest: step is True; expected an integer from 0 to 10**18 - 1"
    assert ranks.call(recover_step, "alone", [None, None]) == ["", ""]
    for alone, said in (
        (1, "rank 0 has not answered within 1 s"),
        (0, "rank 1 sent nothing within 1 s"),
    ):
        said += ": every rank must call recover(), not only some of them"
        assert ranks.call(recover_alone, 1.0, only=[alone]) == [f"SnapshotFailed: {said}"]
        assert ranks.call(recover_alone, 60.0) == ["", ""]


def save_without_collectives(socket: str, place: str) -> tuple[int, str, float]:
    """Save and recover in a process group whose backend exchanges nothing."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(place, world_size)  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    weight = torch.ones(4)
    state = {"w": weight, "own": per_rank({"rank": rank})}
    agent = Agent("gpt", socket=socket)
    saved = agent.snapshot(state, step=3)
    saved.wait("durable", timeout=60)
    weight.zero_()
    recovered = agent.recover(state)
    agent.close()
    assert recovered is not None
    return recovered.step or 0, repr(saved), float(weight.sum())


def test_the_ranks_need_no_backend_for_the_cpu(daemon: Daemon, tmp_path: Path, pool: Lend) -> None:
    with pool(2) as ranks:
        found = ranks.call(save_without_collectives, daemon.home.socket, str(tmp_path / "store"))
    durable = "<Pending step 3 of attempt 1: durable (on storage)>"
    assert found == [(3, durable, 4.0)] * 2
