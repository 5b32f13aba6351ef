"""Tests states that several ranks hold together, split in every way that torch has:
saved on four ranks, recovered on as many, fewer and more.

Everything is compared as bytes, gathered from its shards, with what the ranks had when
they saved. It is recovered from the memory of killed ranks, or from storage by a new
daemon. `test_resharding.py` tests values of each rank, and what cannot be saved.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ckptd.shared.system import failpoints
from tests.support import ranks as rank_processes
from tests.support.daemons import Daemon
from tests.support.ranks import Lend, Ranks
from tests.support.sharded import (
    KINDS,
    Net,
    Saved,
    Tied,
    build,
    differing,
    is_tied,
    optimizer_entries,
    parts,
    plain,
    recover,
    recover_another,
    save,
    saved,
    set_rate,
    together,
    train,
    whole,
)

pytestmark = pytest.mark.usefixtures("processes")


pool = rank_processes.new_ranks


@pytest.fixture(
    scope="module",
    params=[(kind, source) for kind in KINDS for source in ("memory", "storage")],
    ids="-".join,
)
def kept(request: pytest.FixtureRequest, pool: Lend) -> Iterator[Saved]:
    kind, source = request.param
    world_size = 4 if source == "memory" or kind in ("hsdp", "2d") else 2
    with saved(kind, world_size, source, pool=pool) as made:
        yield made


def test_on_as_many_ranks_training_continues_bit_for_bit(kept: Saved, pool: Lend) -> None:
    with pool(kept.world_size) as ranks:
        assert_recovered(ranks, kept, kept.kind)
        # The optimizer then has a state to be overwritten, and DDP has its final
        # buckets, hence the same rounding.
        ranks.call(train, 2)
        assert differing(together(ranks.call(whole)), kept.wanted) != []
        assert set(ranks.call(recover, kept.place.socket)) == {(kept.source, 2)}
        assert differing(together(ranks.call(whole)), kept.wanted) == []
        ranks.call(train, 1)
        assert differing(together(ranks.call(whole)), kept.later) == []


@pytest.mark.parametrize("part", [1 / 2, 3 / 2], ids=["fewer", "more"])
def test_a_state_is_recovered_on_fewer_and_on_more_ranks(
    kept: Saved, part: float, pool: Lend
) -> None:
    with pool(int(kept.world_size * part)) as ranks:
        assert_recovered(ranks, kept, kept.kind)


OTHERS = {
    "ddp": ("2d", 4), "fsdp2": ("tp", 2), "hsdp": ("ddp", 3), "tp": ("hsdp", 4), "2d": ("fsdp2", 3),
    "fsdp1": ("fsdp2", 3), "fsdp1-flat": ("fsdp1", 3), "pipeline": ("pipeline", 1),
}  # fmt: skip


def test_a_state_is_recovered_on_another_mesh(kept: Saved, pool: Lend) -> None:
    kind, world_size = OTHERS[kept.kind]
    with pool(world_size) as ranks:
        assert_recovered(ranks, kept, kind)


@pytest.mark.parametrize(("kind", "world_size"), [("2d", 4), ("fsdp1", 2)])
def test_fsdp2_is_recovered_from_memory_on_another_mesh(
    kind: str, world_size: int, pool: Lend
) -> None:
    with saved("fsdp2", 4, "memory") as kept, pool(world_size) as ranks:
        assert_recovered(ranks, kept, kind)


def assert_recovered(
    ranks: Ranks, kept: Saved, kind: str, optimizer: str = "adamw", model: type[nn.Module] = Net
) -> None:
    """Check that every rank gets the whole state back, into a model of other random
    numbers. Stages of a pipeline are taken together.
    """
    ranks.call(build, kind, 2, optimizer, model)
    assert ranks.call(recover, kept.place.socket) == [(kept.source, 2)] * ranks.world_size
    found = ranks.call(whole)
    for one in [together(found)] if kind == "pipeline" else found:
        assert differing(one, kept.wanted) == []


def test_buffers_of_batchnorm_are_those_of_rank_0(pool: Lend) -> None:
    buffers = ["model.norm.running_mean", "model.norm.running_var"]
    with saved("ddp", 4, "memory") as kept, pool(4) as ranks:
        for name in buffers:
            assert len({one[name] for one in kept.ranks}) == 4
        assert_recovered(ranks, kept, "ddp")
        for one in ranks.call(whole):
            assert [one[name] for name in buffers] == [kept.ranks[0][name] for name in buffers]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_tied_weights_are_recovered_tied(kind: str, pool: Lend) -> None:
    with saved(kind, 4, "memory", model=Tied) as kept:
        assert kept.wanted["model.head.weight"] == kept.wanted["model.embedding.weight"]
        for world_size in (4, 2):
            with pool(world_size) as ranks:
                assert_recovered(ranks, kept, kind, "adamw", Tied)
                assert ranks.call(is_tied) == [True] * world_size


def test_tied_weights_are_written_once() -> None:
    with saved("ddp", 2, "memory", model=Tied) as kept:
        items = [
            item
            for plan in parts(kept.place, 2)
            for item in plan.items
            if item.fqn.startswith("model.") and "weight" in item.fqn
        ]
        assert sum(item.length for item in items) == len(kept.wanted["model.embedding.weight"][2])


@pytest.mark.parametrize("optimizer", ["sgd", "groups"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
def test_optimizers_with_momentum_and_with_groups_are_recovered(
    kind: str, optimizer: str, pool: Lend
) -> None:
    with saved(kind, 3, "memory", optimizer=optimizer) as kept, pool(2) as ranks:
        if optimizer == "sgd":
            assert any(name.endswith(".momentum_buffer") for name in kept.wanted)
        else:
            rates = {
                kept.wanted[f"group.{name}.lr"]
                for name in ("up.weight", "up.bias", "down.weight", "norm.bias")
            }
            assert rates == {0.3 * 0.75 * 0.75, 0.05 * 0.75 * 0.75}
        assert_recovered(ranks, kept, kind, optimizer)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1", "fsdp1-flat"])
def test_an_optimizer_without_state_is_captured_and_recovered_as_empty(
    daemon: Daemon, kind: str, world_size: int, pool: Lend
) -> None:
    with pool(2) as ranks:
        ranks.call(build, kind, 1)
        ranks.call(set_rate, 0.02)
        ranks.call(save, daemon.home.socket, 1)
        assert ranks.call(optimizer_entries) == [0] * 2
        wanted = ranks.call(whole)[0]
    with pool(world_size) as ranks:
        ranks.call(build, kind, 2)
        ranks.call(recover, daemon.home.socket)
        assert ranks.call(optimizer_entries) == [0] * world_size
        assert differing(ranks.call(whole)[0], wanted) == []


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat"])
def test_an_optimizer_without_state_is_recovered_by_a_model_that_is_not_flat(
    daemon: Daemon, kind: str, pool: Lend
) -> None:
    """FSDP1 then names no parameter of the optimizer, on one rank either."""
    with pool(1) as ranks:
        ranks.call(build, kind, 1)
        ranks.call(set_rate, 0.02)
        ranks.call(save, daemon.home.socket, 1)
    with pool(1) as ranks:
        ranks.call(build, "fsdp2", 2)
        ranks.call(recover, daemon.home.socket)
        assert ranks.call(optimizer_entries) == [0]
        rates = {
            value
            for name, value in ranks.call(whole)[0].items()
            if name.startswith("group.") and name.endswith(".lr")
        }
        assert rates == {0.02}


def test_the_steps_of_parameters_that_were_flat_are_counted_apart(pool: Lend) -> None:
    """DCP gives all parameters of a flat one the same tensor `step`.

    In a model that is not flat, each parameter would raise it.
    """
    with saved("fsdp1-flat", 2, "memory") as kept, pool(2) as ranks:
        assert_recovered(ranks, kept, "ddp")
        ranks.call(train, 2)
        steps = {value for name, value in ranks.call(whole)[0].items() if name.endswith(".step")}
        assert steps == {plain(torch.tensor(4.0))}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1", "fsdp1-flat"])
def test_recovering_an_optimizer_without_state_removes_its_state(
    daemon: Daemon, kind: str, pool: Lend
) -> None:
    with pool(2) as ranks:
        ranks.call(build, kind, 1)
        ranks.call(save, daemon.home.socket, 1)
        ranks.call(train, 2)
        trained = ranks.call(whole)[0]
        assert ranks.call(recover, daemon.home.socket) == [("memory", 1)] * 2
        assert ranks.call(optimizer_entries) == [0] * 2
        ranks.call(train, 2)
        assert differing(ranks.call(whole)[0], trained) == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1", "fsdp1-flat"])
def test_a_refused_recovery_leaves_the_optimizer_without_state(kind: str, pool: Lend) -> None:
    with saved(kind, 2, "memory") as kept, pool(2) as ranks:
        ranks.call(build, kind, 2)
        for refusal in ranks.call(recover_another, kept.place.socket):
            assert refusal.startswith(
                "key more is in the state and not in the checkpoint; nothing was written. "
            )
        assert ranks.call(optimizer_entries) == [0] * 2


@pytest.mark.parametrize("point", ["agent.recover.loading", "agent.recover.opened"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat"])
def test_no_rank_waits_for_one_that_cannot_read(
    daemon: Daemon, kind: str, point: str, pool: Lend
) -> None:
    """FSDP1 makes its ranks wait for each other when they load.

    The rank that cannot load does not take part.
    """
    with Ranks(2) as ranks:
        ranks.call(build, kind, 1)
        ranks.call(train, 2)
        ranks.call(save, daemon.home.socket, 2)
        wanted = together(ranks.call(whole))
    with pool(2) as ranks:
        ranks.call(build, kind, 7)
        ranks.call(failpoints.arm, f"{point}=error(EIO)@1", only=[1])
        assert ranks.call(recover, daemon.home.socket, timeout=60) == [("storage", 2)] * 2
        assert differing(together(ranks.call(whole)), wanted) == []
