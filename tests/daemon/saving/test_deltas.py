"""Tests when a real daemon stores deltas, and that every checkpoint is what was saved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from tests.support import daemons
from tests.support.daemons import Home, running

pytestmark = pytest.mark.usefixtures("processes")
SMALL = "--deltas", "small"
"""The options with which no speed of the storage decides about a delta."""


class Training:
    """A training of one tensor, in which a few words change at each step."""

    def __init__(self, place: Home) -> None:
        self.place, self.step = place, 0
        self.agent = Agent(job="gpt", socket=place.socket)
        self.weight = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
        self.saved: dict[int, torch.Tensor] = {}

    def train(self, steps: int, *, every: int = 1) -> None:
        """Take a snapshot after each step, and save each one whose number `every`
        divides.
        """
        for _ in range(steps):
            self.step += 1
            places = torch.randint(len(self.weight), (100,))
            self.weight[places] *= 1.001
            persist = self.step % every == 0
            pending = self.agent.snapshot(
                {"weight": self.weight}, step=self.step, persist=persist, rng=False
            )
            pending.wait("durable" if persist else "sealed")
            if persist:
                self.saved[self.step] = self.weight.clone()

    def chains(self) -> list[int]:
        """Compare each checkpoint with what was saved, and return the lengths of the
        chains, in the order of the steps.
        """
        found = []
        for step, weight in self.saved.items():
            with Checkpoint.open(self.place.root / "gpt", step) as checkpoint:
                assert torch.equal(checkpoint.tensor("weight"), weight)
                found.append(checkpoint.manifest.parts[0].chain)
        return found


@pytest.fixture
def home() -> Iterator[Home]:
    with daemons.home() as place:
        yield place


def test_a_chain_begins_with_the_second_checkpoint_if_retention_deletes_neither(home: Home) -> None:
    with running(home, *SMALL, "--keep", "PreserveAll()", forked=True):
        training = Training(home)
        training.train(7)
        training.agent.close()
        assert training.chains() == [0, 0, 1, 2, 3, 4, 5]


def test_of_few_checkpoints_one_always_lies_outside_the_chain(home: Home) -> None:
    """With three that are kept, each second one is whole."""
    with running(home, *SMALL, "--keep-last", "3", forked=True):
        training = Training(home)
        training.train(8)
        training.agent.close()
        kept = sorted(training.saved)[-3:]
        training.saved = {step: training.saved[step] for step in kept}
        assert sorted(training.chains()) in ([0, 0, 1], [0, 1, 1])


@pytest.mark.parametrize("options", [("--deltas", "off"), ("--codec", "raw")])
def test_a_daemon_without_deltas_stores_whole_chunks(home: Home, options: tuple[str]) -> None:
    with running(home, *options, forked=True):
        training = Training(home)
        training.train(5)
        training.agent.close()
        assert training.chains() == [0] * 5


def test_snapshots_in_memory_leave_the_base_alone_if_there_is_a_third_slot(home: Home) -> None:
    with running(home, *SMALL, "--slots", "3", forked=True):
        training = Training(home)
        training.train(14, every=2)
        training.agent.close()
        assert training.chains() == [0, 0, 1, 2, 3, 4, 5]


def test_with_two_slots_the_log_says_why_there_are_no_deltas(home: Home) -> None:
    with running(home, *SMALL, forked=True):
        training = Training(home)
        training.train(12, every=2)
        training.agent.close()
        assert training.chains() == [0] * 6
    assert home.log.read_text().count("a third slot for each rank (slots = 3)") == 1


def test_a_new_attempt_begins_whole(home: Home) -> None:
    with running(home, *SMALL, forked=True):
        first = Training(home)
        first.train(5)
        first.agent.close()
        assert first.chains() == [0, 0, 1, 2, 3]
        second = Training(home)
        second.step = 5
        second.train(2)
        second.agent.close()
        assert second.chains() == [0, 1]
        assert first.chains() == [0, 0, 1, 2, 3]


def test_a_tensor_whose_deltas_are_too_long_for_a_chain_does_not_keep_others_whole(
    home: Home,
) -> None:
    """Save a moment whose deltas are shorter than a whole chunk, but longer than half."""
    numbers = torch.Generator().manual_seed(2)
    # Of another size of words, and therefore in chunks of its own.
    moment = torch.randn(1_000_000, generator=numbers, dtype=torch.double)
    lengths, came_back = [], []
    with running(home, *SMALL, "--codec", "planes", forked=True):
        training = Training(home)
        for step in range(1, 7):
            training.weight[step] += 1
            moment *= 1 + 1e-6 * torch.randn(len(moment), generator=numbers)
            state = {"weight": training.weight, "moment": moment}
            training.agent.snapshot(state, step=step, rng=False).wait("durable")
            with Checkpoint.open(home.root / "gpt", step) as checkpoint:
                lengths.append(checkpoint.manifest.parts[0].chain)
                came_back.append(torch.equal(checkpoint.tensor("moment"), moment))
        training.agent.close()
    assert lengths == [0, 0, 0, 1, 2, 3]
    assert came_back == [True] * 6


def test_a_restarted_daemon_begins_whole(home: Home) -> None:
    with running(home, *SMALL, forked=True):
        training = Training(home)
        training.train(5)
    with running(home, *SMALL, forked=True):
        training.train(3)
        training.agent.close()
        assert training.chains() == [0, 0, 1, 2, 3, 0, 1, 2]
