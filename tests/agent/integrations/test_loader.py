"""Tests that the position in a loader is found again, with the same batches after it."""

from __future__ import annotations

import random
from collections.abc import Iterator
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


loaded: list[int] = []
"""The samples that this process has loaded."""


class Noisy(Dataset[torch.Tensor]):
    """Samples with noise of every generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        loaded.append(index)
        noise = [random.random(), float(np.random.rand())]
        drawn = torch.rand(1, device="cpu", dtype=torch.float32)
        return torch.cat([torch.tensor([index, *noise], device="cpu", dtype=torch.float32), drawn])


class Stream(IterableDataset[torch.Tensor]):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Noisy()[index] for index in range(20))


def loader_of(kind: str) -> Any:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=3)
    if kind == "workers":
        return DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2)
    if kind == "generator":
        own = torch.Generator(device="cpu").manual_seed(7)
        return DataLoader(Noisy(), batch_size=3, sampler=RandomSampler(Noisy(), generator=own))
    if kind == "accelerate":
        from accelerate.data_loader import prepare_data_loader

        plain = DataLoader(Noisy(), batch_size=3, shuffle=True)
        return prepare_data_loader(plain, use_seedable_sampler=True)
    return DataLoader(Noisy(), batch_size=3, shuffle=True)


def train() -> None:
    """Draw what a step draws."""
    torch.rand(5, device="cpu", dtype=torch.float32)
    random.random()


@pytest.mark.filterwarnings("ignore")  # that the machine has fewer processors than workers
@pytest.mark.parametrize("kind", ["plain", "stream", "workers", "generator", "accelerate"])
@pytest.mark.parametrize("before", [0, 1, 4])
def test_the_batches_after_a_position_are_the_same_again(kind: str, before: int) -> None:
    torch.manual_seed(3)
    loader = loader_of(kind)
    for _ in loader:  # the first epoch
        train()
    position = Position.at(loader, 1)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(1)
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
    again = loader_of(kind)
    if kind == "accelerate":
        again.set_epoch(1)
    loaded.clear()
    found = replay(again, Position(**values), lambda: set_rng_state(at_snapshot))
    same = []
    for number, batch in enumerate(found):
        same.append(torch.equal(batch, rest[number]))
        train()
    assert same == [True] * (7 - before)
    if before and kind not in ("stream", "workers", "own"):  # the workers draw
        assert len(loaded) == 20 - 3 * before


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
    position = Position.at(loader, 0)
    position.batches = 5
    assert moved(position, then, then, 9, "") is position
    found = moved(position, then, now, 9, "")
    # 15 samples are 3 batches of 4; a step takes two of them
    assert (found.batches, found.ahead, found.begin) == (2, None, position.begin)


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
