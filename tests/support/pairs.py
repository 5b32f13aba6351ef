"""Pairs of ranks in one process, and slots to send over them."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ckptd.agent.copy.mapped_slot import Documents, MappedSlot
from ckptd.agent.peers.pair import Pair, finish
from ckptd.agent.plan.layout import layout_of, plan_locally
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import SegmentHeader, write_header
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system.descriptor import Descriptor

CAPACITY = 600_000
STATE = {"weights": torch.arange(75_000.0), "halves": torch.ones(3000, dtype=torch.bfloat16)}
"""A state of five chunks: 300,000 bytes, 6,000 bytes, and its plain values."""
Spoil = Callable[[int, bytes], bytes | None]


class FakePair:
    """One end of a connection of two queues, which a test may damage.

    spoil: takes the number and the bytes of a message that is sent here, and returns the
    bytes that arrive, or None if the connection fails instead.
    """

    def __init__(
        self, out: queue.Queue[bytes | None], into: queue.Queue[bytes | None], spoil: Spoil
    ) -> None:
        self._out, self._into, self._spoil = out, into, spoil
        self._sent = 0

    def begin_send(self, data: torch.Tensor) -> FakeWork:
        assert (data.dtype, data.dim()) == (torch.uint8, 1)
        arrives = self._spoil(self._sent, data.numpy().tobytes())
        self._sent += 1
        self._out.put(arrives)
        return FakeWork(lambda seconds: None)

    def begin_receive(self, into: torch.Tensor) -> FakeWork:
        def wait(seconds: float) -> None:
            try:
                arrived = self._into.get(timeout=seconds)
            except queue.Empty:
                raise RuntimeError("Timed out") from None
            if arrived is None or len(arrived) != len(into):
                self._into.put(None)  # the pair cannot be used any more
                raise RuntimeError("Connection closed by peer")
            into.copy_(torch.frombuffer(bytearray(arrived), dtype=torch.uint8))

        return FakeWork(wait)

    def send(self, data: torch.Tensor, seconds: float) -> None:
        self.begin_send(data).wait(timedelta(seconds=seconds))

    def receive(self, into: torch.Tensor, seconds: float) -> None:
        finish(cast(Any, self.begin_receive(into)), seconds)

    def receive_while(self, wanted: Callable[[], bool], into: torch.Tensor, seconds: float) -> None:
        self.receive(into, seconds)

    def end(self) -> None:
        """End the connection, as the death of this process does."""
        self._out.put(None)


class FakeWork:
    def __init__(self, end: Callable[[float], None]) -> None:
        self._end = end

    def wait(self, limit: timedelta) -> None:
        self._end(limit.total_seconds())


def fake_pairs(spoil: Spoil = lambda number, data: data) -> tuple[FakePair, FakePair]:
    """Return both ends. `spoil` is applied to what the first one sends."""
    one, other = queue.Queue[bytes | None](), queue.Queue[bytes | None]()
    return FakePair(one, other, spoil), FakePair(other, one, lambda number, data: data)


def new_store() -> Callable[[], Store]:
    """Start a store. Return a function that makes a client of it."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client() -> Store:
        return TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    return client


def real_pairs() -> tuple[Pair, Pair]:
    """Return both ends of a connection of gloo."""
    client = new_store()
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(Pair, client(), "pair", first=first, seconds=60) for first in (True, False)
        )
    return first.result(), second.result()


def segment(directory: Path, name: str, **changes: Any) -> MappedSlot:
    """Make a free segment for copies of rank 0, and map it.

    changes: fields of its header.
    """
    fields: dict[str, Any] = {
        "job": "gpt", "attempt": 1, "rank": 0, "world_size": 2, "slot": 1, "capacity": CAPACITY,
        "chunk_size": MIN_CHUNK, "peer_replica": True, "generation": 40, **changes,
    }  # fmt: skip
    return MappedSlot(name, *descriptors(directory / name, SegmentHeader(**fields)))


def descriptors(path: Path, header: SegmentHeader) -> tuple[Descriptor, Descriptor]:
    """Make a segment. Return its descriptors: one to map, and one to hold a lock on."""
    data = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    os.posix_fallocate(data.fileno(), 0, header.file_length)
    write_header(data.fileno(), header)
    return data, Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))


def sealed_slot(directory: Path, name: str, step: int = 5, **changes: Any) -> MappedSlot:
    """Make a segment of rank 0, and seal `STATE` in it."""
    slot = segment(directory, name, slot=0, peer_replica=False, generation=0, **changes)
    fill(slot, step)
    return slot


REQUEST = SnapshotRequest(replicate=True).encode()


def fill(slot: MappedSlot, step: int, values: bytes = b"values", request: bytes = REQUEST) -> None:
    local = plan_locally(STATE)
    layout = layout_of(local.rows, local.aliases, metadata=None, global_plan=bytes(32))

    def carry(targets: object, sources: object) -> Any:
        raise AssertionError("no source is on an accelerator")

    slot.fill([STATE[item.fqn] for item in layout.plan.items], layout, step, carry)
    slot.seal(layout, Documents(values, request))
