"""Tests the position in the data: the batches after a recovery are those that an
uninterrupted run would have seen, bit for bit.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from ckptd.agent import Agent
from ckptd.agent.batches import Batches
from ckptd.shared.errors import InvalidRequest
from tests.support.daemons import Daemon

SAMPLES = 23


class Numbers(Dataset[torch.Tensor]):
    """The numbers from 0, and how often each one was loaded."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        self.loaded.append(number)
        return torch.tensor(number)


class Stream(IterableDataset[torch.Tensor]):
    """Random numbers, as a data set without numbered samples yields them."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(SAMPLES):
            yield torch.rand(()) + random.random()


class Shuffled(Sampler[int]):
    """A sampler that draws while it is iterated over, from all three generators."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            drawn = random.random() + np.random.random() + torch.rand(()).item()
            yield int(drawn * 1e6) % SAMPLES

    def __len__(self) -> int:
        return SAMPLES


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "the last batch dropped": lambda: DataLoader(Numbers(), 4, shuffle=True, drop_last=True),
    "a generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=generator()),
    "a sampler with a generator": lambda: DataLoader(
        Numbers(), 4, sampler=RandomSampler(Numbers(), generator=generator())
    ),
    "weighted": lambda: DataLoader(
        Numbers(), 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    ),
    "a batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 4, False)
    ),
    "single samples": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "a sampler of the user": lambda: DataLoader(Numbers(), 4, sampler=Shuffled()),
    "one of two ranks": lambda: DataLoader(
        Numbers(), 4, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1)
    ),
    "workers": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a stream with a worker": lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
}


def taken(batches: Batches, count: int) -> list[list[float]]:
    return [batch.reshape(-1).tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("before", [1, 4, 6, 13])
def test_the_batches_after_a_recovery_are_those_of_an_uninterrupted_run(
    kind: str, before: int
) -> None:
    """With 23 samples in batches of 4, an epoch has 5 or 6 batches, or 3 on a rank."""
    whole = taken(Batches(LOADERS[kind]()), 20)
    killed = Batches(LOADERS[kind]())
    assert taken(killed, before) == whole[:before]
    random.seed(before)
    torch.manual_seed(before)
    again = Batches(LOADERS[kind]())
    again.load_state_dict(killed.state_dict())
    assert taken(again, 20 - before) == whole[before:]


@pytest.mark.parametrize("kind", ["shuffled", "a sampler of the user", "weighted"])
def test_epochs_and_seeds_have_orders_of_their_own(kind: str) -> None:
    batches = Batches(LOADERS[kind]())
    first, second = taken(batches, len(batches)), taken(batches, len(batches))
    assert (batches.epoch, batches.batch) == (1, len(batches))
    other = taken(Batches(LOADERS[kind](), seed=1), len(batches))
    assert len({str(order) for order in (first, second, other)}) == 3


@pytest.mark.parametrize("kind", ["shuffled", "a sampler of the user", "a stream"])
def test_the_random_numbers_of_the_training_are_left_alone(kind: str) -> None:
    def draw() -> tuple[float, ...]:
        return (random.random(), float(np.random.random()), torch.rand(()).item())

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = [draw() for _ in range(8)]
    seed()
    found = [draw() for _ in itertools.islice(Batches(LOADERS[kind]()), 8)]
    assert found == expected


def test_nothing_is_loaded_to_find_the_position() -> None:
    killed = Batches(DataLoader(Numbers(), 4, shuffle=True))
    taken(killed, 3)
    data = Numbers()
    again = Batches(DataLoader(data, 4, shuffle=True))
    again.load_state_dict(killed.state_dict())
    (batch,) = taken(again, 1)
    assert data.loaded == batch


def test_a_stream_says_that_it_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    killed, again = Batches(LOADERS["a stream"]()), Batches(LOADERS["a stream"]())
    taken(killed, 2)
    again.load_state_dict(killed.state_dict())
    caplog.set_level(logging.WARNING, "ckptd.agent")
    taken(again, 1)
    assert caplog.messages == [
        "the data set is iterable: 2 batches are loaded again to find the position"
    ]


def on_ranks(ranks: int, batch_size: int) -> list[Batches]:
    return [
        Batches(
            DataLoader(
                Numbers(48),
                batch_size,
                sampler=DistributedSampler(Numbers(48), num_replicas=ranks, rank=rank),
            )
        )
        for rank in range(ranks)
    ]


def test_the_position_is_kept_in_samples_when_ranks_and_batches_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "ckptd.agent")
    before, after = on_ranks(2, 6), on_ranks(4, 3)
    seen = [number for batches in before for batch in taken(batches, 2) for number in batch]
    for batches in after:
        batches.load_state_dict(before[0].state_dict())
    assert [(batches.epoch, batches.batch) for batches in after] == [(0, 2)] * 4
    rest = [number for batches in after for batch in taken(batches, 2) for number in batch]
    assert sorted(seen + rest) == list(range(48))
    assert caplog.messages == []


def test_a_position_inside_a_batch_is_rounded_down_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "ckptd.agent")
    (before,), (after,) = on_ranks(1, 6), on_ranks(1, 8)
    taken(before, 3)
    after.load_state_dict(before.state_dict())
    assert after.batch == 2
    assert caplog.messages == [
        "the saved position is sample 18 of epoch 0, and a batch of all ranks has 8 samples now: 2 "
        "samples are trained on twice"
    ]


def test_another_data_set_is_refused() -> None:
    before = Batches(DataLoader(Numbers(), 4))
    taken(before, 2)
    with pytest.raises(
        InvalidRequest,
        match="^the data set had 23 samples when this position was saved, and has 24 now, ",
    ):
        Batches(DataLoader(Numbers(24), 4)).load_state_dict(before.state_dict())


def test_another_seed_is_refused() -> None:
    before = Batches(DataLoader(Numbers(), 4), seed=7)
    with pytest.raises(
        InvalidRequest,
        match=r"saved with seed 7, and this run has seed 0: use Batches\(loader, seed=7\)$",
    ):
        Batches(DataLoader(Numbers(), 4)).load_state_dict(before.state_dict())


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="^list is neither a torch DataLoader nor a loader "):
        Batches([1, 2])


def test_a_loader_without_a_batch_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="^the data loader has no batch: "):
        next(iter(Batches(DataLoader(Numbers(), 24, drop_last=True))))


class Stateful:
    """A loader that saves its position itself."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 5:
            self.position += 1
            yield torch.tensor(self.position)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("before", [1, 5, 7])
def test_a_loader_with_a_position_of_its_own_keeps_it(before: int) -> None:
    whole = taken(Batches(Stateful()), 12)
    killed, again = Batches(Stateful()), Batches(Stateful())
    taken(killed, before)
    again.load_state_dict(killed.state_dict())
    assert taken(again, 12 - before) == whole[before:]


def test_the_position_is_saved_and_recovered_with_the_state(daemon: Daemon) -> None:
    whole = taken(Batches(LOADERS["shuffled"]()), 10)
    agent, batches = Agent("job", socket=daemon.home.socket), Batches(LOADERS["shuffled"]())
    taken(batches, 7)
    agent.snapshot({"data": batches}, step=6).wait("durable", timeout=60)
    agent.close()
    agent, batches = Agent("job", socket=daemon.home.socket), Batches(LOADERS["shuffled"]())
    recovered = agent.recover({"data": batches})
    assert recovered is not None
    assert (batches.epoch, batches.batch) == (1, 1)
    assert taken(batches, 3) == whole[7:]
    agent.close()


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (RandomSampler(range(8)), 1),
        (DistributedSampler(Numbers(8), num_replicas=2, rank=0), 0),
        (WeightedRandomSampler([1.0] * 8, 8), 0),
    ],
)
def test_equal_batches_on_all_ranks_are_told(
    sampler: Any, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order depends on the seed alone, and all ranks have the same."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    Batches(DataLoader(Numbers(8), batch_size=2, sampler=sampler))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    Batches(DataLoader(Numbers(8), batch_size=2, sampler=sampler))
    found = [one for one in caplog.messages if "all 2 ranks get the same batches" in one]
    assert len(found) == told
