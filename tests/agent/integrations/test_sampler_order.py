"""Tests that the order of a data loader is repeated after a recovery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from ckptd.integrations.sampler_order import SamplerOrder
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
