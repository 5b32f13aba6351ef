"""Tests optimizers over FSDP1's flat parameters on two ranks whose shards are not
alike. `test_sharding.py` tests those that are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptd.agent.state.flat_optimizers import _checked
from tests.support.daemons import Daemon
from tests.support.ranks import Ranks
from tests.support.sharded import (
    One,
    Three,
    build,
    differing,
    optimizer_entries,
    recover,
    refusal_of_recovery,
    refusal_of_save,
    save,
    train,
    whole,
)

QUANTIZED = (
    "optimizer: FullyShardedDataParallel cannot gather state that consists of several tensors, "
    "such as quantized moments; rank 0 has such "
    "state: use fully_shard, or an optimizer with plain tensors"
)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat"])
def test_a_quantized_shard_on_one_rank_is_refused_on_all(daemon: Daemon, kind: str) -> None:
    """FSDP1 raises on the rank whose shard is quantized, and the other rank waits for
    it in the gather.
    """
    with Ranks(2) as ranks:
        ranks.call(build, kind, 1, "eight-bit", Three)
        ranks.call(train, 1)
        # Its own, or that of another rank.
        for refusal in ranks.call(refusal_of_save, daemon.home.socket, 1, timeout=60):
            assert refusal.startswith("UnsavableValue: "), refusal
            assert refusal.endswith(QUANTIZED), refusal


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat"])
def test_a_recovery_into_a_quantized_shard_on_one_rank_is_refused_on_all(
    daemon: Daemon, kind: str
) -> None:
    with Ranks(2) as ranks:
        ranks.call(build, "ddp", 1, "eight-bit", Three)
        ranks.call(train, 1)
        ranks.call(save, daemon.home.socket, 1)
    with Ranks(2) as ranks:
        ranks.call(build, kind, 1, "eight-bit", Three)
        for refusal in ranks.call(refusal_of_recovery, daemon.home.socket, timeout=60):
            assert refusal.startswith(f"StructureMismatch: {QUANTIZED}; nothing was written. "), (
                refusal
            )
        assert ranks.call(optimizer_entries) == [0] * 2


def test_quantized_moments_of_one_rank_are_not_gathered_and_come_back(daemon: Daemon) -> None:
    with Ranks(1) as ranks:
        ranks.call(build, "fsdp1", 1, "eight-bit")
        ranks.call(train, 1)
        ranks.call(save, daemon.home.socket, 1)
        entries = ranks.call(optimizer_entries)
    with Ranks(1) as ranks:
        ranks.call(build, "fsdp1", 2, "eight-bit")
        assert ranks.call(recover, daemon.home.socket) == [("memory", 1)]
        assert ranks.call(optimizer_entries) == entries


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat"])
def test_a_rank_whose_shard_is_empty_takes_part(daemon: Daemon, kind: str) -> None:
    """Gathering the state of one rank needs both, although the optimizer of the other
    has no state.
    """
    with Ranks(2) as ranks:
        ranks.call(build, kind, 1, "sgd", One)
        ranks.call(train, 2)
        entries = ranks.call(optimizer_entries)
        ranks.call(save, daemon.home.socket, 2, timeout=60)
        assert ranks.call(optimizer_entries) == entries
        wanted = ranks.call(whole)[0]
    with Ranks(2) as ranks:
        ranks.call(build, kind, 7, "sgd", One)
        ranks.call(recover, daemon.home.socket, timeout=60)
        assert differing(ranks.call(whole)[0], wanted) == []


class Outer(torch.optim.Optimizer):
    """Wraps an optimizer, and never calls the constructor of its base class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()


def test_an_optimizer_is_checked_while_it_makes_its_state() -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    seen = []
    with _checked(plain, lambda optimizer, state: seen.append(state)):
        state = plain.state_dict()
    plain.state_dict()
    assert seen == [state]


def test_an_optimizer_without_the_hooks_of_its_base_class_is_left_alone() -> None:
    outer = Outer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
    with _checked(outer, lambda optimizer, state: pytest.fail("called")):
        assert outer.state_dict()["param_groups"][0]["lr"] == 0.1
