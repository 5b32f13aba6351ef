"""Tests what is told of a tensor's numbers against torch's own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from ckptd.agent import Agent
from ckptd.shared import array_statistics
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.array_statistics import BINS, TensorStatistics, tensor_statistics
from ckptd.shared.errors import InvalidRequest, NotFound
from tests.support.cases import each_case
from tests.support.daemons import home, running

torch.manual_seed(1)
_NUMBERS = torch.randn(300, 7) * 9
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32)
NARROW = {
    "least": torch.full((3,), torch.finfo(torch.float32).min),
    "1e16": torch.full((3,), 1e16),
    "bfloat16 1e17": torch.full((3,), 1e17, dtype=torch.bfloat16),
    "int64": torch.tensor([2**60, 2**60 + 1]),
    "ints": torch.tensor([2**60, 2**60 + 512]),
    "thirds": torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64),
    "greatest": torch.full((2,), 1.7e308, dtype=torch.float64),
    "denormal": torch.tensor([0.0, 5e-324], dtype=torch.float64),
}
TENSORS = {
    **NARROW,
    **{str(dtype): _NUMBERS.to(dtype) for dtype in DTYPES},
    "holes": torch.tensor([1.0, math.nan, -math.inf, 3.0, math.inf]),
    "nan": torch.full((3,), math.nan),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(4.0),
    "wide": torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64),
    "complex": torch.tensor([3 + 4j, 0j]),
    "rows": torch.arange(60.0).reshape(20, 3) - 7,
    "line": torch.arange(50.0),
    "flipped": torch.arange(600.0).reshape(20, 30).t(),
    "row": torch.ones(1, 600),
}


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[ArrayCheckpoint]:
    """A checkpoint with all tensors of this file."""
    with home() as place, running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        agent.snapshot(dict(TENSORS), step=1).wait("durable", timeout=60)
        agent.close()
        with ArrayCheckpoint.open(place.root / "gpt") as opened:
            yield opened


@each_case("dtype", DTYPES)
def test_the_figures_are_those_of_torch(checkpoint: ArrayCheckpoint, dtype: torch.dtype) -> None:
    found, wide = tensor_statistics(checkpoint, str(dtype)), TENSORS[str(dtype)].double()
    assert (found.elements, found.non_finite, found.magnitudes) == (2100, 0, False)
    assert found.norm == pytest.approx(wide.norm().item())
    assert found.mean == pytest.approx(wide.mean().item())
    assert (found.minimum, found.maximum) == (wide.min().item(), wide.max().item())
    expected, _ = np.histogram(wide.numpy(), BINS)
    assert found.bins == tuple(expected)
    assert sum(found.bins) == 2100


def test_values_that_are_not_finite_are_counted_and_left_out(checkpoint: ArrayCheckpoint) -> None:
    found = tensor_statistics(checkpoint, "holes")
    assert (found.elements, found.non_finite, found.norm) == (5, 3, math.sqrt(10))
    assert (found.minimum, found.maximum, found.mean) == (1.0, 3.0, 2.0)
    assert (found.bins[0], found.bins[-1], sum(found.bins)) == (1, 1, 2)


def test_tensors_with_nothing_to_tell(checkpoint: ArrayCheckpoint) -> None:
    for name, elements in (("nan", 3), ("empty", 0)):
        assert tensor_statistics(checkpoint, name) == TensorStatistics(
            elements, elements, None, None, None, None, (), magnitudes=False
        )


def test_equal_values_have_one_bin_and_a_span_beyond_floats_none(
    checkpoint: ArrayCheckpoint,
) -> None:
    assert tensor_statistics(checkpoint, "scalar").bins == (1,)
    wide = tensor_statistics(checkpoint, "wide")
    assert (wide.bins, wide.minimum) == ((), -1.7e308)


@each_case("name", NARROW)
def test_values_with_no_room_between_them_have_one_bin(
    checkpoint: ArrayCheckpoint, name: str
) -> None:
    wide = NARROW[name].double()
    found = tensor_statistics(checkpoint, name)
    assert (found.bins, found.minimum, found.maximum) == (
        (len(wide),), wide.min().item(), wide.max().item(),
    )  # fmt: skip


def test_complex_numbers_are_told_by_their_magnitudes(checkpoint: ArrayCheckpoint) -> None:
    found = tensor_statistics(checkpoint, "complex")
    assert (found.minimum, found.maximum, found.norm, found.magnitudes) == (0.0, 5.0, 5.0, True)


def test_blocks_and_pieces_give_the_figures_of_the_whole(
    checkpoint: ArrayCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("rows", "line")
    whole = [tensor_statistics(checkpoint, name) for name in names]
    monkeypatch.setattr(array_statistics, "BLOCK", 40)
    monkeypatch.setattr(array_statistics, "PIECE", 4)
    found = [tensor_statistics(checkpoint, name) for name in names]
    assert [one.norm for one in found] == pytest.approx([one.norm for one in whole])
    assert [replace(one, norm=None) for one in found] == [replace(one, norm=None) for one in whole]


def test_a_tensor_that_cannot_be_read_by_rows_may_be_too_large(
    checkpoint: ArrayCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_statistics, "BLOCK", 40)
    assert tensor_statistics(checkpoint, "flipped").maximum == 599.0
    monkeypatch.setattr(array_statistics, "MOST_WHOLE", 2000)
    for name in ("flipped", "row"):
        with pytest.raises(InvalidRequest) as raised:
            tensor_statistics(checkpoint, name)
        assert str(raised.value) == (
            f"{name} cannot be read in parts of less than 2.4 kB, and at most 2.0 kB are read "
            f"at once: read it with ArrayCheckpoint"
        )


def test_the_work_ends_when_nobody_wants_it(checkpoint: ArrayCheckpoint) -> None:
    asked = list[int]()

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 1

    with pytest.raises(InterruptedError, match="line is not looked at any more"):
        tensor_statistics(checkpoint, "line", stopped)
    with pytest.raises(NotFound, match="no tensor 'x'"):
        tensor_statistics(checkpoint, "x")
    assert len(asked) == 2
