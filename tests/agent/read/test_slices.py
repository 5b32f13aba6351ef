"""Tests that slices of saved tensors equal what indexing gives, bit for bit, and that
only the chunks which hold them are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.read.saved import Saved
from ckptd.agent.read.slices import read_slice
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plan import MIN_CHUNK, Item, Plan, Region
from tests.shared.samples import WRITER, encode_part, values_after
from tests.support.daemons import Daemon
from tests.support.storage import source

BIG = torch.arange(2 * 7 * 5 * 9.0).reshape(2, 7, 5, 9)
STATE = {
    "plain": BIG,
    "turned": torch.randn(5, 7, 3).permute(2, 0, 1),
    "view": BIG[1, :, 1:4, ::2],
    "expanded": torch.randn(6, 1).expand(6, 4),
    "number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "half": torch.randn(9, 8).bfloat16(),
    "eighth": torch.randn(9, 8).to(torch.float8_e4m3fn),
    "complex": torch.randn(4, 4, dtype=torch.complex64),
    "flags": torch.rand(3, 11) > 0.5,
}


@pytest.fixture
def checkpoint(daemon: Daemon) -> Iterator[Checkpoint]:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot(STATE, step=1).wait("durable", timeout=60)
    agent.close()
    with Checkpoint.open(daemon.home.root / "job") as opened:
        yield opened


def some_index(size: tuple[int, ...], chance: Random) -> tuple[int | slice, ...]:
    index: list[int | slice] = []
    for extent in size[: chance.randrange(len(size) + 1)]:
        if extent and chance.random() < 0.3:
            index.append(chance.randrange(-extent, extent))
        else:
            start, stop = (
                chance.choice([None, chance.randrange(-extent - 2, extent + 3)]) for _ in range(2)
            )
            index.append(slice(start, stop, chance.choice([None, 1, 2, 3])))
    return tuple(index)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(
        tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
    )


@pytest.mark.parametrize("name", STATE)
def test_a_slice_equals_what_indexing_gives(checkpoint: Checkpoint, name: str) -> None:
    chance, whole = Random(name), STATE[name]
    for _ in range(100):
        index = some_index(tuple(whole.shape), chance)
        got, wanted = checkpoint.tensor(name, slices=index), whole[index]
        assert (got.dtype, got.shape, as_bytes(got)) == (
            wanted.dtype,
            wanted.shape,
            as_bytes(wanted),
        ), index


def test_a_slice_can_be_read_in_another_dtype(checkpoint: Checkpoint) -> None:
    got = checkpoint.tensor("half", slices=[slice(2, 5), 3], dtype=torch.float64)
    assert got.dtype is torch.float64
    assert torch.equal(got, STATE["half"][2:5, 3].double())


@pytest.mark.parametrize(
    ("slices", "why"),
    [
        ([0, 0, 0, 0, 0], "plain has 4 dimensions, and 5 slices were given"),
        ([2], "plain has 2 elements in dimension 0: there is no element 2"),
        ([0, -8], "plain has 7 elements in dimension 1: there is no element -8"),
        (
            [slice(None, None, -1)],
            r"slice 0 of plain is slice\(None, None, -1\); expected a number, or a slice of "
            r"numbers with a step of 1",
        ),
        ([slice(None, None, 0)], "slice 0 of plain is slice"),
        ([0, True], "slice 1 of plain is True; expected a number"),
        ([None], "slice 0 of plain is None; expected a number"),
        ([...], "slice 0 of plain is Ellipsis; expected a number"),
        ([slice(0.5, 2)], "slice 0 of plain is slice"),
    ],
)
def test_an_index_out_of_range_is_refused(
    checkpoint: Checkpoint, slices: list[Any], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{why}"):
        checkpoint.tensor("plain", slices=slices)


def test_an_unknown_name_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(NotFound, match="no tensor 'nope'"):
        checkpoint.tensor("nope", slices=[0])


class Counting(PartReader):
    read = 0

    def read_chunk(self, number: int, raw: memoryview) -> None:
        self.read += 1
        super().read_chunk(number, raw)


ROWS, COLUMNS = 64, MIN_CHUNK // 8
"""A float32 matrix with two rows in a chunk."""


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[tuple[torch.Tensor, list[Counting]]]:
    """Return a matrix and the parts of two ranks, which hold its left and its right
    half.
    """
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    readers = []
    with ExitStack() as stack:
        for rank in (0, 1):
            half = whole[:, rank * COLUMNS // 2 : (rank + 1) * COLUMNS // 2].contiguous()
            item = Item(
                "w",
                "float32",
                (ROWS, COLUMNS),
                (0, rank * COLUMNS // 2),
                (ROWS, COLUMNS // 2),
                None,
                0,
            )
            plan = Plan([Region(0, 4 * half.numel(), 4)], [item], [], None, WRITER, bytes(32))
            values = values_after(plan)
            slot = bytearray(sum(values))
            slot[: 4 * half.numel()] = half.numpy().tobytes()
            (tmp_path / str(rank)).write_bytes(
                encode_part(slot, plan, values, rank=rank, world_size=2)[0]
            )
            readers.append(Counting(source(os.open(tmp_path / str(rank), os.O_RDONLY)), str(rank)))
            stack.callback(readers[-1].close)
        yield whole, readers


@pytest.mark.parametrize(
    ("index", "chunks"),
    [
        ((slice(None), slice(None)), [16, 16]),
        ((5,), [1, 1]),
        ((slice(8, 16), slice(0, 10)), [2, 0]),
        ((slice(8, 17), slice(COLUMNS // 2 - 1, COLUMNS // 2 + 1)), [3, 3]),
        ((slice(3, 3),), [0, 0]),
        ((slice(0, 64, 63), -1), [0, 2]),
        ((slice(0, 63, 63),), [1, 1]),
        ((slice(1, None, 1000), slice(None, None, COLUMNS - 1)), [1, 1]),
    ],
)
def test_of_a_sharded_tensor_only_the_chunks_of_the_slice_are_read(
    halves: tuple[torch.Tensor, list[Counting]], index: tuple[int | slice, ...], chunks: list[int]
) -> None:
    whole, readers = halves
    got, wanted = read_slice(Saved.of(readers), "w", index), whole[index]
    assert torch.equal(got, wanted)
    assert got.untyped_storage().nbytes() == 4 * wanted.numel()
    assert [reader.read for reader in readers] == chunks


def test_a_missing_shard_is_an_error_and_not_zeros(
    halves: tuple[torch.Tensor, list[Counting]],
) -> None:
    with pytest.raises(
        IntegrityError,
        match=f"w: only {ROWS * COLUMNS // 2} of {ROWS * COLUMNS} elements are stored",
    ):
        read_slice(Saved.of(halves[1][:1]), "w", [0])
