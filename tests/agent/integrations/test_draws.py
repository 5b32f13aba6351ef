"""Tests that draws of random numbers are found which nothing can set again."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from ckptd.integrations.draws import WorkerWatch, keeps_generator
from tests.support.cases import each_case

pytestmark = pytest.mark.filterwarnings("ignore")  # fewer processors than workers


def own() -> random.Random:
    return random.Random(1)


class Squares(Dataset[int]):
    """Numbers, with something that is called for each of them."""

    def __init__(self, called: Callable[[int], object] = lambda index: None) -> None:
        self._called = called
        self.kept: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self._called(index)
        return index * index


class Transform:
    """A transformation that makes its generator when it is first called."""

    def __init__(self) -> None:
        self.made: random.Random | None = None

    def __call__(self, index: int) -> object:
        self.made = self.made or own()
        return self.made.random()


@each_case(
    ("kept", "found"),
    [
        (own(), True),
        ([1, {"a": (np.random.default_rng(1),)}], True),
        (np.random.RandomState(1), True),
        (torch.Generator(device="cpu"), True),
        (partial(print, own()), True),
        (own().random, True),
        ((lambda drawn: lambda: drawn.random())(own()), True),
        (Subset(Squares(), [1]), False),
        ([1, "a", {"random": random}, random.Random, torch.zeros(1, device="cpu")], False),
        (lambda: random.random(), False),
    ],
)
def test_a_generator_in_the_data_set_is_found(kept: Any, found: bool) -> None:
    data = Squares()
    data.kept = kept
    assert keeps_generator(None, Subset(data, [0])) is found


def test_a_data_set_that_holds_itself_is_searched_once() -> None:
    data = Squares()
    data.kept = [data]
    assert not keeps_generator(data)


def rarely(index: int) -> object:
    return np.random.rand() if index == 9 else None


def begins(number: int) -> None:
    torch.manual_seed(number)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("called", "drawn"),
    [
        (abs, False),
        (lambda index: random.random(), True),
        (lambda index: torch.rand((), device="cpu", dtype=torch.float32), True),
        (rarely, True),
        (Transform(), True),
    ],
)
def test_draws_of_workers_are_noted(called: Callable[[int], object], drawn: bool) -> None:
    loader = DataLoader(Squares(called), batch_size=2, num_workers=2, worker_init_fn=begins)
    watch = WorkerWatch(loader)
    batches = [batch.tolist() for batch in loader]
    assert batches[:2] == [[0, 1], [4, 9]]
    assert watch.drawn is drawn


@pytest.mark.usefixtures("processes")
def test_a_draw_is_known_with_its_batch() -> None:
    loader = DataLoader(Squares(rarely), batch_size=1, num_workers=1, prefetch_factor=1)
    watch = WorkerWatch(loader)
    known = []
    for _ in loader:
        known.append(watch.drawn)
    assert known[:7] == [False] * 7
    assert known[9:] == [True] * 3


@pytest.mark.usefixtures("processes")
def test_workers_that_are_spawned_are_watched() -> None:
    loader = DataLoader(
        Squares(rarely), batch_size=6, num_workers=1, multiprocessing_context="spawn"
    )
    watch = WorkerWatch(loader)
    assert [batch.tolist()[0] for batch in loader] == [0, 36]
    assert watch.drawn


@pytest.mark.usefixtures("processes")
def test_workers_that_exist_already_may_have_drawn() -> None:
    loader = DataLoader(Squares(abs), num_workers=1, persistent_workers=True)
    next(iter(loader))
    assert WorkerWatch(loader).drawn


def test_the_loader_gets_its_functions_back() -> None:
    loader = DataLoader(Squares(), num_workers=1, worker_init_fn=begins)
    before = loader.collate_fn
    watch = WorkerWatch(loader)
    assert loader.worker_init_fn == watch.worker_begins
    watch.remove(loader)
    assert (loader.worker_init_fn, loader.collate_fn) == (begins, before)
