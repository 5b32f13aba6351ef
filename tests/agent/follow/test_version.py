"""Tests the order of versions, and which of them go back."""

from __future__ import annotations

from contextlib import closing

import torch

from ckptd.agent import Agent, Checkpoint, Version
from ckptd.agent.follow.version import goes_back, order_of
from ckptd.agent.read.checkpoint import opened_of
from ckptd.agent.read.sources import open_checkpoint
from ckptd.agent.read.staged_source import ChunkMemory
from ckptd.shared.storage.locate import open_root
from tests.support.cases import each_case
from tests.support.daemons import Daemon


def test_versions_are_ordered_by_attempt_and_step_and_those_without_steps_by_their_number() -> None:
    assert order_of(2, 1) > order_of(1, 9) > order_of(1, 8)
    assert order_of(1, None, 4) > order_of(1, None, 3)
    assert order_of(1, 4, 7) == order_of(1, 4, 8)


@each_case(
    ("order", "before", "back"),
    [
        ((1, 5, 0), None, False),
        ((1, 5, 0), (1, 4, 0), False),
        ((2, 5, 0), (1, 4, 0), False),
        ((2, 4, 0), (1, 4, 0), True),
        ((2, 3, 0), (1, 4, 0), True),
        ((2, -1, 8), (1, -1, 7), False),
    ],
)
def test_a_version_goes_back_if_a_later_attempt_has_no_higher_step(
    order: tuple[int, int, int], before: tuple[int, int, int] | None, back: bool
) -> None:
    assert goes_back(order, before) is back


def test_keys_select_what_is_listed_and_pulled(daemon: Daemon) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    state = {"model": {"a": torch.ones(9), "b": torch.ones(9)}, "optim": torch.zeros(50_000)}
    agent.snapshot(state, step=1).wait("durable", timeout=60)
    agent.close()
    repository = open_root(daemon.home.root)
    kept = ChunkMemory()
    opened = open_checkpoint(repository, "gpt", "step-00000001.a0001", kept=kept)
    with closing(Version("gpt", opened, ["model.*"])) as version:
        assert version.keys() == ["model.a", "model.b"]
        assert {name: tensor.tolist() for name, tensor in version.tensors().items()} == {
            "model.a": [1.0] * 9, "model.b": [1.0] * 9,
        }  # fmt: skip
        assert version.pull() == kept.nbytes > 0
        assert version.pull() == 0
        assert version.tensor("optim").sum() == 0, "others can be read, too"
        assert isinstance(version, Checkpoint)
        assert len(Version("gpt", opened_of(version)).keys()) == 3
