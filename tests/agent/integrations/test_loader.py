"""Tests that the position in a loader is found again, with the same batches after it."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from ckptd.agent.state.capture import rng_state, set_rng_state
from ckptd.integrations.loader import (
    Position,
    PositionedBatches,
    moved,
    of_first_rank,
    replay,
    size_of,
)
from ckptd.shared.errors import InvalidRequest


class Noisy(Dataset[torch.Tensor]):
    """Samples with noise.

    loud: draw the noise of each sample from every generator, and not only of sample 19.
    own: draw from a generator of the data set, too. loaded: the number of samples that
    were loaded, by workers too.
    """

    def __init__(self, *, loud: bool = True, own: bool = False) -> None:
        self._loud = loud
        self._own = random.Random(5) if own else None
        self.loaded = multiprocessing.Value("q")

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.loaded.get_lock():
            self.loaded.value += 1
        noise = [float(index)]
        if self._own is not None:
            noise.append(self._own.random())
        if self._loud or index == 19:
            noise += [random.random(), float(np.random.rand())]
            noise.append(torch.rand(1, device="cpu", dtype=torch.float32).item())
        return torch.tensor((noise + [0.0] * 4)[:5], device="cpu", dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Noisy()[index] for index in range(20))


def loader_of(kind: str) -> Any:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=3)
    if kind == "workers":
        return DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2)
    if kind == "quiet workers":  # only the last batch is drawn, which is not loaded early
        return DataLoader(Noisy(loud=False), batch_size=3, num_workers=2, prefetch_factor=1)
    if kind == "generator":
        own = torch.Generator(device="cpu").manual_seed(7)
        return DataLoader(Noisy(), batch_size=3, sampler=RandomSampler(Noisy(), generator=own))
    plain = DataLoader(Noisy(own="own" in kind), batch_size=3, shuffle=True)
    if "accelerate" in kind:
        from accelerate.data_loader import prepare_data_loader

        return prepare_data_loader(plain, use_seedable_sampler="seeded" in kind)
    return plain


def train() -> None:
    """Draw what a step draws."""
    torch.rand(5, device="cpu", dtype=torch.float32)
    random.random()


def begun(kind: str, epoch: int) -> Any:
    """Return a loader in its epoch 0 or 1. The first loads nothing here."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    loader = loader_of(kind)
    for number in range(epoch):
        for _ in loader:
            train()
        set_epoch(loader, number + 1)
    return loader


def set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore")  # that the machine has fewer processors than workers
@pytest.mark.parametrize(
    ("kind", "epoch", "again"),
    [
        ("plain", 1, 0),
        ("generator", 1, 0),
        ("accelerate", 1, 0),
        ("seeded accelerate", 1, 0),
        ("quiet workers", 1, 1),  # one batch of a round of two workers
        ("workers", 1, 3),  # the workers draw
        ("own", 0, 3),  # the data set has a generator
        ("own accelerate", 0, 3),
        ("stream", 1, None),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_the_batches_after_a_position_are_the_same_again(
    kind: str, epoch: int, again: int | None, before: int
) -> None:
    loader = begun(kind, epoch)
    position = Position.at(loader, epoch)
    batches = PositionedBatches(iter(loader), position, loader)
    for _ in range(before):
        next(batches)
        train()
    values, at_snapshot = position.values(), rng_state()
    rest = []
    for batch in batches:
        rest.append(batch)
        train()

    torch.manual_seed(99)
    random.seed(99)
    other = loader_of(kind)
    set_epoch(other, epoch)
    position = Position(**values)
    batches = PositionedBatches(
        replay(other, position, lambda: set_rng_state(at_snapshot)), position, other
    )
    same = []
    for number, batch in enumerate(batches):
        same.append(torch.equal(batch, rest[number]))
        train()
    assert same == [True] * (7 - before)
    assert position.batches == 7
    if again is not None:
        assert other.dataset.loaded.value == 20 - 3 * (before - min(again, before))


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["plain", "accelerate", "quiet workers", "own"])
def test_a_position_of_a_resumed_pass_is_found_again(kind: str) -> None:
    loader = begun(kind, 0)
    position = Position.at(loader, 0)
    given = iter(loader)
    rest = []
    for before in (2, 1, 1):
        batches = PositionedBatches(given, position, loader)
        for _ in range(before):
            rest.append(next(batches))
            train()
        values, at_snapshot = position.values(), rng_state()
        loader, position = loader_of(kind), Position(**values)
        given = replay(loader, position, partial(set_rng_state, at_snapshot))
    for batch in PositionedBatches(given, position, loader):
        rest.append(batch)
        train()
    loader = begun(kind, 0)
    whole = []
    for batch in loader:
        whole.append(batch)
        train()
    assert [torch.equal(one, batch) for one, batch in zip(rest, whole, strict=True)] == [True] * 7


def test_a_batch_that_is_loaded_ahead_has_the_numbers_of_its_time() -> None:
    # Of batches that accelerate has loaded ahead, the position has the generators.
    loader = begun("accelerate", 0)
    position = Position.at(loader, 0)
    batches = PositionedBatches(iter(loader), position, loader)
    next(batches)
    assert position.order is None
    order = position.values()["order"]
    assert len(order["ahead"]) == 1
    assert order["ahead"][0] != order["began"]["global"]


def test_data_that_end_too_early_are_refused() -> None:
    loader = loader_of("plain")
    position = Position.at(loader, 2)
    position.batches = 8
    with pytest.raises(
        InvalidRequest,
        match="^the data end after 7 batches of epoch 2, but 8 were trained when the snapshot "
        "was taken: give the loader the same data, or start another job",
    ):
        replay(loader, position, lambda: None)


def test_a_position_moves_to_batches_of_another_size() -> None:
    loader = loader_of("plain")
    then, now = size_of(loader, 3, 1), size_of(loader, 4, 2)
    assert then == {"length": 20, "samples": 3, "accumulated": 1}
    position = Position.at(loader, 0, skipped=3)
    position.batches = 2
    assert moved(position, then, then, 9, "") is position
    found = moved(position, then, now, 9, "")
    # 15 samples are 3 batches of 4; a step takes two of them
    assert (found.skipped, found.batches, found.begin) == (0, 2, position.begin)
    assert (found.ahead, found.order) == (None, None)


def test_a_pass_with_batches_of_another_size_has_the_same_order() -> None:
    loader = begun("plain", 0)
    position = Position.at(loader, 0)
    batches = PositionedBatches(iter(loader), position, loader)
    seen = [int(row[0]) for _ in range(4) for row in next(batches)]
    data = Noisy()
    other = DataLoader(data, batch_size=5, shuffle=True)
    now = size_of(other, 5, 1)
    found = moved(Position(**position.values()), size_of(loader, 3, 1), now, 4, "")
    rest = [int(row[0]) for batch in replay(other, found, lambda: None) for row in batch]
    assert found.batches == 2
    assert data.loaded.value == 10
    assert sorted(seen[:10] + rest) == list(range(20))


def test_the_first_rank_gives_its_position_without_its_samples() -> None:
    order = {"digest": "a", "drawn": False}
    values = [{"position": {"batches": 3, "order": order}, "step": 4}, {"step": 5}]
    assert of_first_rank("run", values) == {
        "position": {"batches": 3, "order": {"digest": None, "drawn": False}},
        "step": 4,
    }
    assert of_first_rank("loss", [1.5, 2.5]) == 1.5


def test_a_stream_has_no_length() -> None:
    assert size_of(loader_of("stream"), 3, 1)["length"] is None


def test_data_of_another_length_are_refused() -> None:
    loader = loader_of("plain")
    then = size_of(loader, 3, 1)
    with pytest.raises(
        InvalidRequest,
        match="^the training data have 19 samples, and had 20 when step 9 was saved, so that the "
        "position in them is lost: try again$",
    ):
        moved(Position.at(loader, 0), then, then | {"length": 19}, 9, "try again")
