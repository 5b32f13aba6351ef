"""Recoveries of jobs on several nodes: each rank reads from the memory of its node what
that still holds, and the rest from storage.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptd.agent import Recovered
from ckptd.shared import names
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.segment import SlotState, read_header
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository
from tests.agent.test_several_nodes import JOB, begin, sockets, take
from tests.crash.node_trainer import COLUMNS, ROWS, check, state_of
from tests.support.nodes import Nodes, nodes
from tests.support.ranks import HERE, Ranks

pytestmark = pytest.mark.usefixtures("processes")

TAG = names.tag_directory(5, None, 1)
SHARD = ROWS * COLUMNS * 4 // 4
"""The bytes of the shard that each of four ranks has."""


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes(2) as made:
        yield made


def saved(two: Nodes, *, persist: bool = True) -> Repository:
    """Save step 5 of four ranks on two nodes, and kill all trainers."""
    with Ranks(4) as ranks:
        ranks.call(begin, sockets(two, 0, 0, 1, 1))
        assert ranks.call(_take, persist) == [""] * 4
    return open_root(two.root)


def _take(persist: bool) -> str:
    return take(5, persist=persist)


def recovered(two: Nodes, *where: int) -> list[int]:
    """Recover on ranks of these nodes.

    Return the bytes that each rank has read from memory.
    """
    with Ranks(len(where)) as ranks:
        return ranks.call(_recover, sockets(two, *where))


def _recover(where: list[Path]) -> int:
    begin(where)
    state = state_of(-1)
    found: Recovered = HERE["agent"].recover(state, on_reshape=lambda key, values: values[-1])
    check(state, 5)
    if len(where) == 4:
        assert state["own"].value == (dist.get_rank(), 5)
    assert (found.tag, found.source, found.passed_over) == (TAG, "storage", [])
    return found.memory_bytes


def damage(repository: Repository, rank: int) -> None:
    """Flip a byte of every chunk in the part of a rank."""
    manifest = repository.read_manifest(JOB, TAG)
    part = next(part for part in manifest.parts if part.rank == rank)
    reader: PartReader = repository.open_part(JOB, TAG, part.file, part.index_sha256)
    chunks = reader.index.chunks
    reader.close()
    path = Path(repository.where(JOB, TAG)) / part.file
    data = bytearray(path.read_bytes())
    for chunk in chunks:
        data[chunk.offset] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("persist", [True, False])
def test_ranks_on_the_same_nodes_read_their_shards_from_memory(two: Nodes, persist: bool) -> None:
    saved(two, persist=persist)
    assert min(recovered(two, 0, 0, 1, 1)) >= SHARD


def test_a_node_that_reads_from_memory_does_not_depend_on_its_parts(two: Nodes) -> None:
    """The values documents of all ranks are read by all of them, so that the parts of
    the other node must be sound.
    """
    repository = saved(two)
    for rank in (0, 1):
        damage(repository, rank)
    two[1].lose()
    two[1].start()
    assert min(recovered(two, 0, 0)) >= SHARD


def test_a_node_that_was_replaced_reads_from_storage_and_the_other_one_from_memory(
    two: Nodes,
) -> None:
    saved(two)
    two[1].lose()
    two[1].start()
    first, second, third, fourth = recovered(two, 0, 0, 1, 1)
    assert min(first, second) >= SHARD
    assert (third, fourth) == (0, 0)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_step_that_was_only_in_the_memory_of_a_lost_node_is_named_on_all_ranks(
    two: Nodes, aborted: bool
) -> None:
    """Also if a launch between the two runs has ended before it recovered."""
    with Ranks(4) as ranks:
        ranks.call(begin, sockets(two, 0, 0, 1, 1))
        assert ranks.call(take, 5) == [""] * 4
        assert ranks.call(_take_six) == [""] * 4
        two[1].lose()  # before the trainers end: at their end it would save step 6
    two[1].start()
    if aborted:
        with Ranks(4) as ranks:
            ranks.call(begin, sockets(two, 0, 0, 1, 1))
    with Ranks(4) as ranks:
        told = ranks.call(_told, sockets(two, 0, 0, 1, 1))
    assert told == [told[0]] * 4
    (text,) = told[0]
    assert text.startswith(f"{JOB}/{names.tag_directory(6, None, 1)}: ranks 2, 3 did not deliver")
    assert text.endswith("this step is not complete, and cannot be recovered")


def _take_six() -> str:
    return take(6, persist=False)


def _told(where: list[Path]) -> list[str]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptd.agent").addHandler(handler)
    _recover(where)
    return [text for text in found if "is not complete" in text]


def test_a_daemon_that_was_killed_still_has_the_slots(two: Nodes) -> None:
    saved(two)
    two[0].kill()
    two[0].start()
    assert min(recovered(two, 0, 0, 1, 1)) >= SHARD


def test_one_damaged_slot_costs_the_others_nothing_even_after_a_restart(two: Nodes) -> None:
    saved(two)
    before = recovered(two, 0, 0, 1, 1)
    two[0].kill()
    for segment in two[0].shm.rglob("*.seg"):
        with segment.open("r+b") as file:
            header = read_header(file.fileno())
            if (header.rank, header.state, header.step) == (1, SlotState.SEALED, 5):
                os.pwrite(file.fileno(), b"\xa5" * 8, header.data_offset + 64)
    two[0].start()
    after = recovered(two, 0, 0, 1, 1)
    assert min(after[0], after[2], after[3]) >= SHARD
    assert after[1] <= before[1] - SHARD


@pytest.mark.parametrize("where", [(1, 1, 0, 0), (0, 1, 0), (1, 0), (0,)])
def test_other_nodes_and_other_numbers_of_ranks_read_what_their_node_holds(
    two: Nodes, where: tuple[int, ...]
) -> None:
    saved(two)
    found = recovered(two, *where)
    if len(where) < 4:  # every rank needs shards that its node holds
        assert min(found) > 0
