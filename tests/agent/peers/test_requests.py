"""Chunks that one rank sends another, over a real connection: they are sound, or the
part is read from storage.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptd.agent.copy import checked_copy
from ckptd.agent.peers import requests
from ckptd.agent.peers.pair import Pair
from ckptd.agent.peers.requests import PeerSlot, Requests, serve
from ckptd.agent.read import slot_source
from ckptd.agent.read.slot_source import PartWithSlot, SlotSource
from ckptd.shared.errors import CkptdError, IntegrityError, PeerLost
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.scatter import scatter
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system import failpoints
from ckptd.shared.system.descriptor import Descriptor
from tests.shared.samples import encode_part, memory_file, packed_slot, sample_plan, values_after
from tests.support.ranks import Ranks
from tests.support.storage import source
from tests.support.tmpfs import sealed_slot

PLAN = sample_plan(200_000)
VALUES = values_after(PLAN)
PACKED = bytes(packed_slot(PLAN, VALUES))
TENSOR = slice(64, 64 + 800_000)
RANK = 7
"""The rank that filled the slot."""


@pytest.fixture
def slot() -> Iterator[Descriptor]:
    with sealed_slot(PLAN, SnapshotRequest()) as sealed:
        yield sealed


@contextmanager
def part(*, damaged: bool = False) -> Iterator[PartReader]:
    """Context manager.

    Yields the part that was written from the slot. If it is damaged, no chunk of it can
    be read.
    """
    encoded, index = encode_part(PACKED, PLAN, VALUES, attempt=1, step=5)
    data = bytearray(encoded)
    for chunk in index.chunks if damaged else ():
        data[chunk.offset] ^= 0xFF
    with memory_file(data) as fd:
        yield PartReader(source(fd), "gpt/x")


class Peers:
    """Two ends of a connection, in one process: a thread that serves, and the requests
    to it. `error` has the error that has ended the thread.
    """

    def __init__(self, slots: dict[int, SlotSource]) -> None:
        self.error: Exception | None = None
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._serve, args=(client, slots))
        self._thread.start()
        self.requests = Requests(Pair(store, "pair", first=False, seconds=30.0))

    def _serve(self, store: Any, slots: dict[int, SlotSource]) -> None:
        try:
            serve(Pair(store, "pair", first=True, seconds=30.0), slots, patience=30.0)
        except (CkptdError, OSError) as error:
            self.error = error.with_traceback(None)

    def ended(self) -> bool:
        self._thread.join(60.0)
        return not self._thread.is_alive()


@contextmanager
def peers(slots: dict[int, SlotSource]) -> Iterator[Peers]:
    """Context manager. At its end, the thread that serves must end."""
    made = Peers(slots)
    try:
        yield made
    finally:
        made.requests.end()
        assert made.ended()


def read(reader: PartWithSlot, *lengths: int) -> bytes:
    """Read the tensor into buffers of these lengths."""
    raw = bytearray(TENSOR.stop - TENSOR.start)
    at, targets = 0, []
    for length in lengths or (len(raw),):
        targets.append((TENSOR.start + at, memoryview(raw)[at : at + length]))
        at += length
    assert at == len(raw)
    scatter(reader, targets)
    return bytes(raw)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("lengths", [(), (20_000,) * 40])
def test_a_part_is_read_from_the_memory_of_a_peer_and_not_from_storage(
    slot: Descriptor, monkeypatch: pytest.MonkeyPatch, compiled: bool, lengths: tuple[int, ...]
) -> None:
    if not compiled:
        monkeypatch.setattr(slot_source, "copy_bytes", None)
        monkeypatch.setattr(checked_copy, "copy_bytes", None)
    near = SlotSource(slot.fileno(), 1, 5)
    with peers({RANK: near}) as made, part(damaged=True) as reader:
        far = PeerSlot(made.requests, 0, RANK, reader.index.chunks)
        paired = PartWithSlot(reader, far)
        assert read(paired, *lengths) == PACKED[TENSOR]
        assert read(paired, *lengths) == PACKED[TENSOR]
    assert far.bytes_read == 800_000
    assert near.bytes_read == 0
    assert made.error is None


def test_a_damaged_chunk_comes_from_storage_and_so_does_the_rest_of_the_part(
    slot: Descriptor, caplog: pytest.LogCaptureFixture
) -> None:
    near = SlotSource(slot.fileno(), 1, 5)
    for place in range(0, 800_000, 1000):
        os.pwrite(slot.fileno(), b"\xa5", near.header.data_offset + place)
    with peers({RANK: near}) as made, part() as reader:
        far = PeerSlot(made.requests, 3, RANK, reader.index.chunks)
        with caplog.at_level(logging.WARNING, "ckptd.agent"):
            assert read(PartWithSlot(reader, far)) == PACKED[TENSOR]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "gpt/x is read from storage, because its copy in memory is lost: rank 3 has sent other "
        "bytes as chunk "
    )
    assert far.bytes_read == 0


def test_damage_in_the_peers_memory_and_on_storage_is_never_returned(slot: Descriptor) -> None:
    near = SlotSource(slot.fileno(), 1, 5)
    os.pwrite(slot.fileno(), b"\xa5", near.header.data_offset + 100_000)
    with peers({RANK: near}) as made, part(damaged=True) as reader:
        far = PeerSlot(made.requests, 3, RANK, reader.index.chunks)
        with pytest.raises(IntegrityError, match="does not match its checksum"):
            read(PartWithSlot(reader, far))


@pytest.mark.parametrize(
    ("rank", "number", "length"), [(6, 0, 1 << 16), (RANK, 10_000, 1 << 16), (RANK, 0, 100)]
)
def test_a_request_for_what_is_not_there_ends_the_connection(
    slot: Descriptor, rank: int, number: int, length: int
) -> None:
    into = torch.zeros(length, dtype=torch.uint8)
    with peers({RANK: SlotSource(slot.fileno(), 1, 5)}) as made:
        for _ in range(2):
            with pytest.raises(PeerLost):
                made.requests.read(rank, number, into)
        assert made.ended()
    assert not into.any()
    assert str(made.error) == (
        f"a peer requests {length} bytes as chunk {number} of the slot of rank {rank}, which is "
        f"not in this memory"
    )


@pytest.mark.parametrize("mapped", [True, False])
def test_a_slot_that_is_cut_short_ends_the_connection_and_not_the_process(
    slot: Descriptor, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    if not mapped:
        monkeypatch.setattr(slot_source, "copy_bytes", None)
    near = SlotSource(slot.fileno(), 1, 5)
    os.ftruncate(slot.fileno(), near.header.data_offset)
    with peers({RANK: near}) as made, part() as reader:
        paired = PartWithSlot(reader, PeerSlot(made.requests, 3, RANK, reader.index.chunks))
        assert read(paired) == PACKED[TENSOR]
        assert made.ended()
    assert isinstance(made.error, PeerLost | IntegrityError)


class SlowSlot:
    """A slot whose chunks from number 2 on are given once `go` is set."""

    def __init__(self, slot: SlotSource) -> None:
        self.ranges, self._slot = slot.ranges, slot
        self.go = threading.Event()

    def unchecked_chunk(self, number: int) -> torch.Tensor:
        if number >= 2:
            self.go.wait(60.0)
        return self._slot.unchecked_chunk(number)


def test_a_peer_that_is_slow_is_replaced_by_storage_and_writes_nothing_later(
    slot: Descriptor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(requests, "SECONDS", 0.3)
    slow = SlowSlot(SlotSource(slot.fileno(), 1, 5))
    with peers({RANK: cast(SlotSource, slow)}) as made, part() as reader:
        far = PeerSlot(made.requests, 3, RANK, reader.index.chunks)
        with caplog.at_level(logging.WARNING, "ckptd.agent"):
            raw = bytearray(800_000)
            scatter(PartWithSlot(reader, far), [(TENSOR.start, memoryview(raw))])
        assert raw == PACKED[TENSOR]
        raw[:] = bytes(800_000)
        slow.go.set()
        assert made.ended()
    assert not any(raw)
    (record,) = caplog.records
    assert "its copy in memory is lost: rank 3 does not send it: " in record.getMessage()


def test_many_threads_request_chunks_at_once(slot: Descriptor) -> None:
    near = SlotSource(slot.fileno(), 1, 5)
    numbers = [number for number in range(len(near.ranges)) for _ in range(20)]
    with (
        peers({RANK: near}) as made,
        part() as reader,
        ThreadPoolExecutor(32) as threads,
    ):
        far = PeerSlot(made.requests, 0, RANK, reader.index.chunks)

        def one(number: int) -> bool:
            chunk = near.ranges[number]
            raw = bytearray(chunk.length)
            far.read_pieces(number, [memoryview(raw)])
            return raw == PACKED[chunk.offset : chunk.offset + chunk.length]

        assert all(threads.map(one, numbers))


class Script:
    """A pair whose peer requests these chunks one after another, and then no more.

    waiting: how many receives were under way when each chunk was sent.
    """

    def __init__(self, asked: list[bytes]) -> None:
        self._asked = [*asked, requests._END]
        self._receives = 0
        self.waiting: list[int] = []

    def begin_receive(self, into: torch.Tensor) -> Any:
        self._receives += 1

        def wait(limit: object) -> None:
            into.copy_(torch.tensor(list(self._asked.pop(0)), dtype=torch.uint8))
            self._receives -= 1

        return SimpleNamespace(wait=wait)

    def begin_send(self, data: torch.Tensor) -> Any:
        self.waiting.append(self._receives)
        return SimpleNamespace(wait=lambda limit: None)


def test_requests_are_received_while_a_chunk_is_sent(slot: Descriptor) -> None:
    """Gloo sends a message only once the other side receives it, and says so behind the
    chunks that it sends.
    """
    near = SlotSource(slot.fileno(), 1, 5)
    script = Script(
        [requests._REQUEST.pack(RANK, n, place.length) for n, place in enumerate(near.ranges)]
    )
    serve(cast(Pair, script), {RANK: near}, patience=30.0)
    assert script.waiting == [8] * len(near.ranges)


# -- a rank that dies


def _serve_on_rank_0(store: tuple[str, int], fd_path: str) -> None:
    with open(fd_path, "rb") as file:
        failpoints.arm("agent.recover.serving=kill@4")
        client = TCPStore(*store, is_master=False)
        pair = Pair(client, "killed", first=True, seconds=30.0)
        serve(pair, {RANK: SlotSource(file.fileno(), 1, 5)}, patience=30.0)


@pytest.mark.usefixtures("processes")
def test_a_rank_that_is_killed_is_replaced_by_storage(
    slot: Descriptor, caplog: pytest.LogCaptureFixture
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.readlink(f"/proc/self/fd/{slot.fileno()}")
    with Ranks(1) as ranks, part() as reader:
        ranks.begin(_serve_on_rank_0, ("127.0.0.1", store.port), path)
        mine = Requests(Pair(store, "killed", first=False, seconds=60.0))
        far = PeerSlot(mine, 3, RANK, reader.index.chunks)
        with caplog.at_level(logging.WARNING, "ckptd.agent"):
            assert read(PartWithSlot(reader, far)) == PACKED[TENSOR]
        with pytest.raises(EOFError):
            ranks.results()
    (record,) = caplog.records
    text = record.getMessage()
    assert "its copy in memory is lost: rank 3 does not send it: the connection with a" in text
    assert ".cc:" not in text
    assert far.bytes_read < 800_000
