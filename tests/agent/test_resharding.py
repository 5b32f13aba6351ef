"""Tests values of each rank and shared values, recovered on the same and on another
number of ranks.

`per_rank` values and random generators come back to the rank that had them, or are
refused, reshaped or left alone. Shared tensors are written once, in equal shares. Where
ranks differ, the snapshot fails on all of them and names the place, and the next
snapshot is sound again. `test_sharding.py` tests how tensors are split and put
together. The first functions run on ranks.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ckptd.agent import CkptdError, per_rank
from ckptd.shared.errors import StructureMismatch
from tests.support import ranks as rank_processes
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Lend
from tests.support.sharded import Plain, agent, build, parts, plain, saved

pool = rank_processes.new_ranks


class Loader:
    """A data loader's position, which differs between ranks, as does the length of what
    is left to read.
    """

    def __init__(self, position: int) -> None:
        self.position, self.left = position, torch.arange(position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.left = state["position"], state["left"]


class Cursor:
    """A position alone, without a tensor."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def own_state(position: int) -> dict[str, Any]:
    """Return a state with values of this rank in a dict and in an object.

    `shared` is the same on all ranks.
    """
    rank = dist.get_rank()
    return {
        "own": per_rank(
            {"rank": position + rank, "data": torch.full((2 + rank,), float(position + rank))}
        ),
        "loader": per_rank(Loader(position + rank)),
        "shared": position,
    }


def save_own(socket: Path) -> None:
    agent(socket).snapshot(own_state(10), step=1).wait("durable", timeout=60)


def recover_own(socket: Path, reshape: bool) -> tuple[str, list[tuple[str, Any]], Any]:
    """Return the error, if any, the arguments of `on_reshape`, and the state after the
    recovery.
    """
    state, calls, refusal = own_state(0), [], ""
    loader = state["loader"].value

    def on_reshape(key: str, values: list[Any]) -> Any:
        calls.append(
            (key, [{name: plain(value) for name, value in of_rank.items()} for of_rank in values])
        )
        return values[-1 - dist.get_rank() % len(values)]

    try:
        agent(socket).recover(state, on_reshape=on_reshape if reshape else None)
    except StructureMismatch as error:
        refusal = str(error)
    own = state["own"].value  # the per_rank mark stays
    if not refusal:
        assert state["loader"].value is loader
    return (
        refusal,
        calls,
        (
            {name: plain(value) for name, value in own.items()},
            loader.position,
            plain(loader.left),
            state["shared"],
        ),
    )


def save_nested(socket: Path) -> None:
    agent(socket).snapshot(
        {"readers": per_rank({"train": Cursor(10 + dist.get_rank())})}, step=1
    ).wait("durable", timeout=60)


def recover_nested(socket: Path) -> list[str]:
    """Return as text what `on_reshape` was given for an object inside a `per_rank`
    value.
    """
    given: list[Any] = []

    def on_reshape(key: str, values: list[Any]) -> Any:
        given.extend(values)
        return values[0]

    agent(socket).recover({"readers": per_rank({"train": Cursor(0)})}, on_reshape=on_reshape)
    return [repr(value) for value in given]


# -- random generators


def seed(number: int) -> None:
    """Seed Python, NumPy and torch, differently on each rank."""
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(number + dist.get_rank())


def draw() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), float(torch.rand(())), float(torch.randn(()))


def save_random(socket: Path) -> None:
    agent(socket).snapshot({"x": 1}, step=1).wait("durable", timeout=60)


def recover_random(socket: Path) -> list[str]:
    """Return the warnings that the agent logs meanwhile, but for those about a rank that
    is late, which a busy machine may bring.
    """
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptd.agent").addHandler(handler)
    try:
        agent(socket).recover({"x": 0})
    finally:
        logging.getLogger("ckptd.agent").removeHandler(handler)
    return [text for text in heard if "every rank must call it" not in text]


# -- what cannot be saved


def attempt(socket: Path, step: int, case: str) -> tuple[str, str]:
    """Return the kind and the message of the error with which a snapshot ends, or "" if
    it is durable.
    """
    rank, optimizer = dist.get_rank(), HERE["optimizer"]
    if case == "setting":
        optimizer.param_groups[0]["lr"] = 0.5 if rank == 1 else 0.1
    new_each_step = {f"step{step}": torch.zeros(1)}  # ranks compare their values when they plan
    cases: dict[str, Any] = {
        "value": {"rate": 0.1 if rank < 2 else 0.2},
        "nested": {"config": {"layers": [1, {"width": 64 if rank != 1 else 65}]}},
        "tensor": {"mask": torch.tensor([1.0, 0.0 if rank != 2 else -0.0])},
        "dtype": {"mask": torch.zeros(3, dtype=torch.float32 if rank != 2 else torch.float64)},
        "shape": {"mask": torch.zeros(3 if rank != 1 else 4)},
        "setting": {"model": HERE["model"], "optimizer": optimizer},
        "numbered": {"model": HERE["model"], "optimizer": optimizer.state_dict()},
        "sound": {"rate": 0.1},
    }
    pending = agent(socket).snapshot({**cases[case], **new_each_step}, step=step, on_error="log")
    try:
        pending.wait("durable", timeout=60)
    except CkptdError as error:
        return type(error).__name__, str(error)
    return "", ""


# -- what is expected


def own(rank: int) -> Plain:
    """Return the dict of rank `rank` of those that called `save_own`."""
    return {"rank": 10 + rank, "data": plain(torch.full((2 + rank,), 10.0 + rank))}


def loader(rank: int) -> Plain:
    return {"position": 10 + rank, "left": plain(torch.arange(10 + rank))}


def blank(rank: int) -> tuple[Plain, int, object, int]:
    """Return the state with which `recover_own` begins."""
    return (
        {"rank": rank, "data": plain(torch.full((2 + rank,), float(rank)))},
        rank,
        plain(torch.arange(rank)),
        0,
    )


def test_per_rank_values_come_back_to_their_ranks_or_are_reshaped(
    daemon: Daemon, pool: Lend
) -> None:
    with pool(4) as ranks:
        ranks.call(save_own, daemon.home.socket)
    with pool(4) as ranks:
        for rank, (refusal, calls, state) in enumerate(
            ranks.call(recover_own, daemon.home.socket, True)
        ):
            assert (refusal, calls) == ("", [])
            assert state == (own(rank), loader(rank)["position"], loader(rank)["left"], 10)
    for world_size in (2, 5):
        with pool(world_size) as ranks:
            for rank, (refusal, calls, state) in enumerate(
                ranks.call(recover_own, daemon.home.socket, False)
            ):
                assert "own is each rank's own, was saved on 4 ranks" in refusal
                assert "nothing was written" in refusal
                assert (calls, state) == ([], blank(rank))
            for rank, (refusal, calls, state) in enumerate(
                ranks.call(recover_own, daemon.home.socket, True)
            ):
                assert refusal == ""
                assert calls == [
                    ("own", [own(n) for n in range(4)]),
                    ("loader", [loader(n) for n in range(4)]),
                ]
                taken = 3 - rank % 4
                assert state == (own(taken), loader(taken)["position"], loader(taken)["left"], 10)


def test_on_reshape_gets_objects_as_their_state_dicts(daemon: Daemon, pool: Lend) -> None:
    with pool(2) as ranks:
        ranks.call(save_nested, daemon.home.socket)
    with pool(1) as ranks:
        assert ranks.call(recover_nested, daemon.home.socket) == [
            ["{'train': {'position': 10}}", "{'train': {'position': 11}}"]
        ]


def test_random_generators_come_back_on_as_many_ranks_and_are_left_alone_otherwise(
    daemon: Daemon, pool: Lend
) -> None:
    with pool(4) as ranks:
        ranks.call(seed, 100)
        ranks.call(draw)
        ranks.call(save_random, daemon.home.socket)
        wanted = ranks.call(draw)
        assert len(set(wanted)) == 4
    with pool(4) as ranks:
        ranks.call(seed, 200)
        assert ranks.call(recover_random, daemon.home.socket) == [[]] * 4
        assert ranks.call(draw) == wanted
    # The third run that begins at this step says so on rank 0.
    again = "step 1 of attempt 1 is recovered again: attempts 2 and 3 have left no newer snapshot. "
    for world_size, more in ((2, []), (5, [again])):
        with pool(world_size) as ranks:
            ranks.call(seed, 300)
            untouched = ranks.call(draw)
            ranks.call(seed, 300)
            heard = ranks.call(recover_random, daemon.home.socket)
            warning = (
                f"random generators are left as they are: they were saved on 4 ranks, and this "
                f"job has {world_size}"
            )
            assert [text[: len(again)] for text in heard[0][1:]] == more
            assert [texts[:1] for texts in heard] == [[warning]] * world_size
            assert [len(texts) for texts in heard[1:]] == [1] * (world_size - 1)
            assert ranks.call(draw) == untouched


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp", "tp"])
def test_replicated_tensors_are_written_once_in_equal_shares(kind: str) -> None:
    with saved(kind, 4, "memory") as kept:
        plans = parts(kept.place, 2)
    assert len(plans) == 4
    shards = [(item.fqn, item.offsets) for plan in plans for item in plan.items]
    assert len(set(shards)) == len(shards)
    whole = sum(
        len(value[2])
        for value in kept.wanted.values()
        if isinstance(value, tuple) and isinstance(value[-1], bytes)
    )
    lengths = [[item.length for item in plan.items] for plan in plans]
    assert sum(map(sum, lengths)) == whole
    # In other cases torch has split the parameters, unequally where 4 does not divide
    # them.
    if kind == "ddp":
        assert max(map(sum, lengths)) <= whole / 4 + max(map(max, lengths))


def test_where_ranks_differ_the_snapshot_fails_on_all_of_them(daemon: Daemon, pool: Lend) -> None:
    socket = daemon.home.socket
    with pool(3) as ranks:
        ranks.call(build, "ddp", 1)
        for step, (case, message) in enumerate([
            ("value", "rate differs between ranks 0 and 2"),
            ("nested", "config.layers.1.width differs between ranks 0 and 1"),
            ("tensor", "mask differs between ranks 0 and 2"),
            ("dtype", "mask is float32 [3] on rank 0 and float64 [3] on rank 2"),
            ("shape", "mask is float32 [3] on rank 0 and float32 [4] on rank 1"),
            ("setting", "optimizer.param_groups.up.weight differs between ranks 0 and 1"),
            ("numbered", "optimizer: each rank numbers the parameters of this optimizer state by "
                "itself"),
        ]):  # fmt: skip
            for kind, said in ranks.call(attempt, socket, 2 * step, case):
                # The second if the daemon's report of rank 0's error comes first.
                assert kind in ("UnsavableValue", "SnapshotFailed")
                assert message in said
            assert ranks.call(attempt, socket, 2 * step + 1, "sound") == [("", "")] * 3
    assert not list((daemon.home.root / "job").glob("step-*[02468].a*"))
