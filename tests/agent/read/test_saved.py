"""Tests tensors that are stored in several parts: they are whole, or refused by name on
every way to read a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.agent import Agent, Checkpoint, StorageReader
from ckptd.daemon.commands import report
from ckptd.shared.errors import IntegrityError, RecoveryFailed
from tests.support.cases import each_case
from tests.support.daemons import Home, running
from tests.support.forged import Shards, forge
from tests.support.storage import part_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FORGED: dict[str, tuple[tuple[int, ...], list[Shards], str]] = {
    "two shards over each other": (
        (8,),
        [[((0,), (4,))], [((2,), (4,))]],
        r"w: the shards \[4\] at \[0\] and \[4\] at \[2\] overlap",
    ),
    "a hole in the middle": (
        (4, 4),
        [
            [((0, 0), (4, 2)), ((0, 1), (2, 2))],
            [((3, 2), (1, 2)), ((2, 3), (1, 1)), ((2, 3), (2, 1))],
        ],
        r"w: the shards .* overlap",
    ),
    "the same shard twice instead of both": (
        (8,),
        [[((0,), (4,))], [((0,), (4,))]],
        r"w: only 4 of 8 elements are stored",
    ),
    "a shard is missing": (
        (8,),
        [[((0,), (4,))], [((4,), (3,))]],
        r"w: only 7 of 8 elements are stored",
    ),
}


def planner_reads(place: Path) -> None:
    dcp.load(
        {"w": torch.zeros(torch.Size(SIZES[place]))},
        storage_reader=StorageReader(place),
        no_dist=True,
    )


SIZES: dict[Path, tuple[int, ...]] = {}


def opened(use: Callable[[Checkpoint], Any]) -> Callable[[Path], Any]:
    def call(place: Path) -> Any:
        with Checkpoint.open(place) as checkpoint:
            return use(checkpoint)

    return call


WAYS: dict[str, Callable[[Path], Any]] = {
    "verify": opened(lambda checkpoint: checkpoint.verify()),
    "load": opened(lambda checkpoint: checkpoint.load()),
    "tensor": opened(lambda checkpoint: checkpoint.tensor("w")),
    "tensor of another dtype": opened(
        lambda checkpoint: checkpoint.tensor("w", dtype=torch.float64)
    ),
    "slice": opened(lambda checkpoint: checkpoint.tensor("w", slices=(slice(0, 1),))),
    "dcp": planner_reads,
}


@each_case("way", WAYS)
@each_case("forged", FORGED)
def test_shards_that_are_not_the_whole_tensor_are_refused(
    tmp_path: Path, way: str, forged: str
) -> None:
    size, ranks, reason = FORGED[forged]
    place = forge(tmp_path / "root", size, ranks)
    SIZES[place] = size
    with pytest.raises((IntegrityError, dcp.CheckpointException), match=reason):
        WAYS[way](place)


@pytest.mark.parametrize("forged", FORGED)
def test_verify_names_the_damaged_tensor(tmp_path: Path, forged: str) -> None:
    size, ranks, reason = FORGED[forged]
    place = forge(tmp_path / "root", size, ranks)
    (result,) = report.verification(place)
    assert not result["ok"]
    assert result["error"].startswith("gpt/step-00000001.a0001: ")
    with pytest.raises(IntegrityError, match=reason):
        raise IntegrityError(result["error"])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("forged", FORGED)
def test_recover_passes_over_such_a_checkpoint_before_it_writes(place: Home, forged: str) -> None:
    size, ranks, reason = FORGED[forged]
    forge(place.root, size, ranks)
    with (
        running(place, forked=True) as daemon,
        closing(Agent(job="gpt", socket=daemon.home.socket)) as agent,
    ):
        state = {"w": torch.full(size, 5.0)}
        with pytest.raises(RecoveryFailed, match=reason) as caught:
            agent.recover(state)
        assert not caught.value.overwritten
        assert torch.equal(state["w"], torch.full(size, 5.0))


@pytest.mark.usefixtures("processes")
def test_a_tensor_may_be_stored_twice_as_a_replica(place: Home) -> None:
    path = forge(
        place.root,
        (4, 4),
        [[((0, 0), (4, 2)), ((0, 2), (4, 2))], [((0, 2), (4, 2)), ((0, 0), (4, 2))]],
    )
    assert [result["ok"] for result in report.verification(path)] == [True]
    ones = torch.ones(4, 4)
    with Checkpoint.open(path) as checkpoint:
        checkpoint.verify()
        assert torch.equal(checkpoint.load()["w"], ones)
        assert torch.equal(
            checkpoint.tensor("w", slices=(slice(1, 3), slice(1, 3))), ones[1:3, 1:3]
        )
    with (
        running(place, forked=True) as daemon,
        closing(Agent(job="gpt", socket=daemon.home.socket)) as agent,
    ):
        state = {"w": torch.zeros(4, 4)}
        assert agent.recover(state) is not None
        assert torch.equal(state["w"], ones)


@pytest.mark.usefixtures("processes")
def test_recover_does_not_mix_a_damaged_checkpoint_with_an_older_one(place: Home) -> None:
    """The older one lacks a tensor that the damaged one may have overwritten, which
    `strict=False` would leave as it is.
    """
    with running(place, "--codec", "raw", forked=True) as daemon:
        with closing(Agent(job="gpt", socket=daemon.home.socket)) as agent:
            agent.snapshot({"a": torch.ones(4)}, step=1).wait("durable", timeout=60)
            agent.snapshot({"a": torch.ones(4), "x": torch.ones(50_000)}, step=2).wait(
                "durable", timeout=60
            )
        part = part_in(place.root / "gpt" / "step-00000002.a0001")
        with part.open("r+b") as file:
            file.seek(4096 + 150_000)
            file.write(b"?")
        with closing(Agent(job="gpt", socket=daemon.home.socket)) as agent:
            state = {"a": torch.zeros(4), "x": torch.zeros(50_000)}
            with pytest.raises(
                RecoveryFailed,
                match="^the next sound checkpoint lacks x, which a damaged one has overwritten",
            ) as caught:
                agent.recover(state, strict=False)
            assert caught.value.overwritten
            state = {"a": torch.zeros(4)}
            recovered = agent.recover(state, step=1)
            assert recovered is not None
            assert (recovered.step, state["a"].tolist()) == (1, [1.0] * 4)
