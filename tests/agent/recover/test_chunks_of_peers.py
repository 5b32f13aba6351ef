"""Recoveries in which ranks read from the memory of other nodes what their own node has
lost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptd.agent import Recovered
from ckptd.agent.peers import requests
from ckptd.shared import names
from ckptd.shared.formats import manifest as manifests
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.segment import SlotState, read_header
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import failpoints
from tests.agent.test_several_nodes import JOB, begin, sockets, take
from tests.crash.node_trainer import COLUMNS, DRIFT, ROWS, check, state_of
from tests.support.nodes import Nodes, nodes
from tests.support.ranks import HERE, Ranks

TAG = names.tag_directory(5, None, 1)
SHARD = (ROWS + DRIFT) * COLUMNS * 4 // 4
"""The bytes of the two shards that each of four ranks has."""


def _large_manifests() -> None:
    """Make this daemon put the metadata of checkpoints into an object, so that parts are
    opened on demand.
    """
    manifests.MOST_INLINE = 0


@pytest.fixture(params=[False])
def two(processes: None, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Two nodes after a job of four ranks has saved step 5. The second one is replaced.

    The parameter is True for a checkpoint whose parts are opened on demand.
    """
    first = _large_manifests if request.param else None
    with nodes(2, first=first) as made:
        with Ranks(4) as ranks:
            ranks.call(begin, sockets(made, 0, 0, 1, 1))
            assert ranks.call(take, 5) == [""] * 4
        made[1].lose()
        made[1].start(first=first)
        yield made


def recovered(
    two: Nodes,
    *where: int,
    armed: dict[int, str] | None = None,
    seconds: float | None = None,
    same_partition: bool = False,
) -> tuple[list[int], list[int], list[list[str]]]:
    """Recover on ranks of these nodes.

    Return the bytes that each rank has read from the memory of its own node, those from the
    memory of other nodes, and its warnings about memory.
    """
    with Ranks(len(where)) as ranks:
        found = ranks.call(_recover, sockets(two, *where), armed or {}, seconds, same_partition)
    own, peers, warned = zip(*found, strict=True)
    return list(own), list(peers), list(warned)


def _recover(
    where: list[Path], armed: dict[int, str], seconds: float | None, same_partition: bool
) -> tuple[int, int, list[str]]:
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    begin(where)
    logging.getLogger("ckptd.agent").addHandler(handler)
    failpoints.arm(armed.get(dist.get_rank(), ""))
    if seconds is not None:
        requests.SECONDS = seconds
    state = state_of(-1)
    found: Recovered = HERE["agent"].recover(
        state, on_reshape=lambda key, values: values[-1], same_partition=same_partition
    )
    check(state, 5)
    assert (found.tag, found.source, found.passed_over) == (TAG, "storage", [])
    about_memory = [text for text in warned if "memory" in text]
    return found.memory_bytes, found.peer_bytes, about_memory


def damage(repository: Repository, rank: int) -> None:
    """Flip a byte of every chunk with tensors in the part of a rank, and leave its values
    document, which is read before a rank knows what it lacks.
    """
    manifest = repository.read_manifest(JOB, TAG)
    part = next(part for part in manifest.parts if part.rank == rank)
    reader: PartReader = repository.open_part(JOB, TAG, part.file, part.index_sha256)
    chunks = [chunk for chunk in reader.index.chunks if chunk.raw_offset < reader.values[0]]
    reader.close()
    path = Path(repository.where(JOB, TAG)) / part.file
    data = bytearray(path.read_bytes())
    for chunk in chunks:
        data[chunk.offset] ^= 0xFF
    path.write_bytes(data)


def damage_slots(two: Nodes, *ranks: int) -> None:
    damaged = set[int]()
    for segment in two[0].shm.rglob("*.seg"):
        # The empty slots of a recovery that has just ended may go meanwhile.
        with suppress(FileNotFoundError), segment.open("r+b") as file:
            header = read_header(file.fileno())
            if header.rank in ranks and (header.state, header.step) == (SlotState.SEALED, 5):
                os.pwrite(file.fileno(), b"\xa5" * 8, header.data_offset + 64)
                damaged.add(header.rank)
    assert damaged == set(ranks)


@pytest.mark.parametrize(
    ("two", "same_partition"), [(False, False), (True, True)], indirect=["two"]
)
def test_ranks_of_a_replaced_node_read_their_parts_from_the_memory_of_another(
    two: Nodes, same_partition: bool
) -> None:
    """The ranks have changed places, so that the node that is left has the parts of the ranks
    on the replaced one. The damaged chunks show that storage is not read.
    """
    repository = open_root(two.root)
    on_demand = repository.read_manifest(JOB, TAG).metadata_object is not None
    assert on_demand == same_partition
    for rank in (0, 1):
        damage(repository, rank)
    own, peers, warned = recovered(two, 1, 1, 0, 0, same_partition=same_partition)
    assert min(peers[:2]) >= SHARD
    assert own[:2] == [0, 0]
    assert warned == [[]] * 4


def test_a_rank_reads_from_its_own_node_what_that_has_and_the_rest_from_another(
    two: Nodes,
) -> None:
    """Three ranks recover what four have saved, so that each needs parts of two ranks."""
    repository = open_root(two.root)
    for rank in (0, 1):
        damage(repository, rank)
    own, peers, warned = recovered(two, 0, 1, 1)
    assert own[0] >= SHARD
    assert own[1:] == [0, 0]
    assert peers[0] == 0
    assert peers[1] > 0
    assert warned == [[]] * 3


def test_a_damaged_slot_is_replaced_by_storage_and_others_are_still_read(two: Nodes) -> None:
    _, before, _ = recovered(two, 1, 1, 0, 0)
    damage_slots(two, 0)
    _, peers, warned = recovered(two, 1, 1, 0, 0)
    assert peers[0] <= before[0] - SHARD
    assert peers[1] >= SHARD
    (text,) = warned[0]
    assert "rank-00000" in text
    assert "is read from storage, because its copy in memory is lost: rank " in text
    assert text.endswith("has sent other bytes as chunk 0 than were saved")


@pytest.mark.parametrize(
    ("failure", "seconds"), [("error(EIO)", None), ("error(EIO)@2", None), ("sleep(4)", 0.5)]
)
def test_ranks_that_do_not_send_are_replaced_by_storage(
    two: Nodes, failure: str, seconds: float | None
) -> None:
    armed = dict.fromkeys((2, 3), f"agent.recover.serving={failure}")
    _, _, warned = recovered(two, 1, 1, 0, 0, armed=armed, seconds=seconds)
    told = "is read from storage, because its copy in memory is lost: rank "
    assert [
        text for text in warned[0] + warned[1] if told in text and " does not send it: " in text
    ]
    assert warned[2:] == [[], []]


def _take_and_copy() -> str:
    pending = HERE["agent"].snapshot(state_of(5), step=5)
    pending.wait("durable", timeout=60)
    pending.wait("replicated", timeout=60)
    return str(pending.error or "")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_of_a_replaced_node_read_their_own_parts_from_peer_replicas(lost: int) -> None:
    """No chunk of their parts is sound on storage, except those of values documents."""
    where = (0, 0, 1, 1)
    with nodes(2, environ={"CKPTD_REPLICAS": "1"}) as two:
        with Ranks(4) as ranks:
            ranks.call(begin, sockets(two, *where))
            assert ranks.call(_take_and_copy) == [""] * 4
        two[lost].lose()
        two[lost].start()
        replaced = [rank for rank, node in enumerate(where) if node == lost]
        for rank in replaced:
            damage(open_root(two.root), rank)
        own, peers, warned = recovered(two, *where)
    assert [own[rank] for rank in replaced] == [0, 0]
    assert min(peers[rank] for rank in replaced) >= SHARD
    assert warned == [[]] * 4
