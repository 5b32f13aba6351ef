"""Tests that the order of a data loader is repeated after a recovery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from ckptd.agent.state.capture import rng_state
from ckptd.integrations.sampler_order import (
    SamplerOrder,
    held_states,
    order_of,
    set_held_states,
)
from ckptd.shared.errors import InvalidRequest


class FromGlobal(Sampler[int]):
    """A sampler that draws each sample from the global generator when it is asked."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield int(torch.randint(0, 20, ()))


def loader(samples: int = 20, **options: Any) -> DataLoader[Any]:
    chosen = {} if "sampler" in options else {"shuffle": True}
    return DataLoader(list(range(samples)), **{"batch_size": 3, **chosen, **options})  # type: ignore[arg-type]


def batches(found: Iterator[Any], number: int) -> list[list[int]]:
    """Return the next batches, with a draw of the training after each of them."""
    return [[*next(found).tolist(), int(torch.randint(0, 1000, ()))] for _ in range(number)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


@pytest.mark.parametrize("own", [False, True])
def test_the_batches_after_the_position_are_those_of_the_saved_pass(own: bool) -> None:
    torch.manual_seed(1)
    plain = batches(iter(loader(generator=generator(5) if own else None)), 7)
    torch.manual_seed(1)
    given = loader(generator=generator(5) if own else None)
    order = SamplerOrder(given)
    found = iter(given)
    first = batches(found, 4)
    saved, training = order.state(4), torch.get_rng_state()
    rest = batches(found, 3)
    assert first + rest == plain  # the order draws nothing by itself
    torch.manual_seed(2)
    other = loader(generator=generator(6) if own else None)
    again = SamplerOrder(other)
    again.repeat(saved, 4)
    found = iter(other)
    torch.set_rng_state(training)
    assert batches(found, 3) == rest
    assert again.state(7)["began"] == saved["began"]
    with pytest.raises(StopIteration):
        next(found)


def test_a_position_at_the_end_of_a_pass_leaves_no_batch() -> None:
    given = loader()
    order = SamplerOrder(given)
    assert len(list(given)) == 7
    other = loader()
    SamplerOrder(other).repeat(order.state(7), 7)
    assert [list(other), len(list(other))] == [[], 7]


@pytest.mark.parametrize(
    "changed",
    [
        {"batch_size": 4},
        {"sampler": FromGlobal()},
        {"shuffle": False},
        {"batch_size": 10},
    ],
)
def test_other_samples_are_refused(changed: dict[str, Any]) -> None:
    given = loader()
    order = SamplerOrder(given)
    found = iter(given)
    batches(found, 3)
    other = loader(**changed)
    SamplerOrder(other).repeat(order.state(3), 3)
    with pytest.raises(InvalidRequest, match="does not repeat the 3 batches of this epoch"):
        next(iter(other))


def test_a_sampler_that_draws_during_the_training_is_refused() -> None:
    torch.manual_seed(1)
    given = loader(sampler=FromGlobal())
    order = SamplerOrder(given)
    batches(iter(given), 3)
    other = loader(sampler=FromGlobal())
    SamplerOrder(other).repeat(order.state(3), 3)
    with pytest.raises(InvalidRequest, match=r"needs a torch\.Generator of its own"):
        next(iter(other))


def test_another_length_is_refused_before_a_batch_is_made() -> None:
    given = loader()
    order = SamplerOrder(given)
    next(iter(given))
    with pytest.raises(InvalidRequest, match="had 20 samples .* and has 21 now"):
        SamplerOrder(loader(21)).repeat(order.state(1), 1)


def test_a_changed_batch_size_may_be_allowed() -> None:
    given = loader(generator=generator(5))
    order = SamplerOrder(given)
    found = iter(given)
    first = [one for batch in (next(found), next(found)) for one in batch.tolist()]
    other = loader(generator=generator(6), batch_size=2)
    SamplerOrder(other).repeat(order.state(2), 3, same=False)
    seen = first + [one for batch in other for one in batch.tolist()]
    assert sorted(seen) == list(range(20))
    assert order.state(2)["samples"] == 6


def test_the_generators_come_back_at_the_end_of_a_pass() -> None:
    given = loader(generator=generator(5))
    order = SamplerOrder(given)
    list(given)
    saved = order.state(7)
    rest = [batch.tolist() for batch in given]
    other = loader(generator=generator(6))
    SamplerOrder(other).set_generators(saved)
    assert [batch.tolist() for batch in other] == rest


def test_the_loader_gets_its_sampler_back() -> None:
    given = loader(batch_size=None)
    sampler = given.sampler
    order = SamplerOrder(given)
    assert SamplerOrder(given).given is sampler
    assert given.sampler is not sampler
    order.remove()
    assert given.sampler is sampler


def test_an_attribute_that_is_set_is_that_of_the_given_sampler() -> None:
    given = loader()
    order = SamplerOrder(given)
    order.drop_last = True
    assert (order.given.drop_last, "drop_last" in vars(order)) == (True, False)
    assert len(list(given)) == 6


def test_then_is_called_once_before_a_batch_that_was_not_asked_for() -> None:
    given = loader(shuffle=False)
    order = SamplerOrder(given)
    asked = iter(order)
    for _ in range(3):  # the training has got 2 batches, and the third is loaded ahead
        next(asked)
        torch.rand(3, device="cpu", dtype=torch.float32)
    saved = order.state(2)
    assert len(saved["ahead"]) == 1
    other = loader(shuffle=False)
    again = SamplerOrder(other)
    called: list[int] = []
    again.repeat(saved, 2, then=lambda: called.append(1))
    asked = iter(again)
    assert (next(asked), called) == ([6, 7, 8], [])
    assert rng_state() == saved["ahead"][0]
    assert (next(asked), called) == ([9, 10, 11], [1])
    again.go_on()
    assert (next(asked), called) == ([12, 13, 14], [1])


def test_batches_that_are_loaded_again_are_not_left_out() -> None:
    given = loader()
    order = SamplerOrder(given)
    first = batches(iter(given), 4)
    saved = order.state(4)
    other = loader()
    SamplerOrder(other).repeat(saved, 4, skip=1)
    assert [batch.tolist() for _, batch in zip(range(3), other, strict=False)] == [
        row[:-1] for row in first[1:]
    ]


@pytest.mark.parametrize(
    ("workers", "drawn", "again"), [(0, False, 0), (0, True, 7), (2, False, 1), (2, True, 7)]
)
def test_batches_are_loaded_again_only_if_nothing_else_brings_them_back(
    workers: int, drawn: bool, again: int
) -> None:
    order = SamplerOrder(loader(num_workers=workers))
    assert order.loaded_again({"drawn": drawn}, 7) == again


class Stream(IterableDataset[int]):
    """A data set without numbers."""

    def __iter__(self) -> Any:
        return iter(range(4))


class Other(DataLoader[int]):
    """A loader with an iterator of its own."""

    def __iter__(self) -> Any:
        return iter(())


class Stateful(DataLoader[int]):
    """A loader that saves its position itself."""

    def state_dict(self) -> dict[str, int]:
        return {}


class Nameless:
    """A data set without a length."""

    def __getitem__(self, index: int) -> int:
        return index


def test_only_a_loader_of_samples_by_number_has_an_order() -> None:
    from accelerate.data_loader import DataLoaderShard, prepare_data_loader  # takes a second

    given = loader()
    order = order_of(given)
    assert (order, type(order)) == (order_of(given), SamplerOrder)
    prepared = prepare_data_loader(loader())
    assert order_of(prepared) is prepared.base_dataloader.batch_sampler
    numbers: Any = list(range(4))
    nameless: Any = Nameless()
    found = order_of(DataLoader(nameless, sampler=[1, 2], batch_size=2))
    assert found is not None
    assert found.state(0)["length"] is None
    by_batch = DataLoader(numbers, sampler=BatchSampler(numbers, 2, False), batch_size=None)
    assert order_of(by_batch) is not None
    for refused in (
        numbers,
        DataLoader(Stream()),
        Other(numbers),
        Stateful(numbers),
        prepare_data_loader(loader(), put_on_device=True, dispatch_batches=True),
        DataLoaderShard(numbers, sampler=BatchSampler(numbers, 2, False), batch_size=None),
    ):
        assert order_of(refused) is None, refused


def test_generators_and_seeds_of_a_loader_are_set_again() -> None:
    from accelerate.data_loader import prepare_data_loader

    given = prepare_data_loader(loader(generator=generator(5)), use_seedable_sampler=True)
    states = held_states(given)
    given.batch_sampler.sampler.initial_seed = 3
    given.batch_sampler.sampler.generator.manual_seed(1)
    assert held_states(given) != states
    set_held_states(given, states)
    assert held_states(given) == states
    assert order_of(given) is not None
    assert held_states(given) == states


@pytest.mark.parametrize(
    ("own", "same", "warned"), [(True, False, False), (False, False, True), (False, True, False)]
)
def test_an_order_from_another_generator_is_reported(
    own: bool, same: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = loader(generator=generator(5))
    order = SamplerOrder(given)
    next(iter(given))
    other = SamplerOrder(loader(batch_size=2, generator=generator(5) if own else None))
    other.repeat(order.state(1), 1, same=same)
    assert ("are shuffled in another order than before" in caplog.text) is warned
