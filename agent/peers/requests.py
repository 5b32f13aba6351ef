"""Requests for the chunks of slots in the memory of a peer, and the service of such
requests (PROTOCOL.md, *Recovery from peers between agents*).
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Protocol

import torch
from torch.distributed import Work

from ckptd.agent.copy.checked_copy import copy_pieces
from ckptd.agent.peers.pair import Pair, finish
from ckptd.agent.plan.layout import memory
from ckptd.shared.errors import IntegrityError, PeerLost
from ckptd.shared.formats.part import Chunk
from ckptd.shared.formats.plan import ChunkRange
from ckptd.shared.system.failpoints import failpoint

SECONDS = 60.0
"""Timeout in seconds of the connection with a peer, and of each message."""
_UNDER_WAY = 8
"""The most chunks that are requested at the same time over one connection."""
_REQUEST = struct.Struct("<IIQ")
_END = _REQUEST.pack(0, 0, 0)


class ServedSlot(Protocol):
    """A slot whose chunks are sent to a peer."""

    ranges: list[ChunkRange]

    def unchecked_chunk(self, number: int) -> torch.Tensor: ...


def serve(pair: Pair, slots: Mapping[int, ServedSlot], *, patience: float) -> None:
    """Send each chunk that the peer requests, until it wants no more.

    slots: by rank. patience: how many seconds the peer may let pass between two
    requests.

    Raises PeerLost if the connection fails or the peer requests a chunk that is not
    there; IntegrityError or OSError if a slot cannot be read. The caller then drops the
    pair, from which the peer sees that it gets nothing more.
    """
    sending = deque[tuple[Work, torch.Tensor]]()
    asked = deque(_asked(pair) for _ in range(_UNDER_WAY))
    while True:
        work, request = asked.popleft()
        finish(work, patience)
        rank, number, length = _REQUEST.unpack(memory(request, _REQUEST.size))
        if not length:
            break
        asked.append(_asked(pair))
        failpoint("agent.recover.serving")
        # A longer or shorter answer than the peer expects must not be sent: gloo ends a process
        # that gets a longer one.
        slot = slots.get(rank)
        if slot is None or number >= len(slot.ranges) or slot.ranges[number].length != length:
            raise PeerLost(
                f"a peer requests {length} bytes as chunk {number} of the slot of rank {rank}, "
                f"which is not in this memory"
            )
        data = slot.unchecked_chunk(number)
        sending.append((pair.begin_send(data), data))
        if len(sending) > _UNDER_WAY:
            finish(sending.popleft()[0], SECONDS)
    for work, _ in sending:
        finish(work, SECONDS)


def _asked(pair: Pair) -> tuple[Work, torch.Tensor]:
    """Begin to receive a request, before the ones before it are answered: gloo lets the
    peer send it only once this is known there, and says so behind the chunks under way.
    """
    request = torch.empty(_REQUEST.size, dtype=torch.uint8, device="cpu")
    return pair.begin_receive(request), request


class Requests:
    """The requests of this rank to one peer, over a pair that nothing else uses.

    Any number of threads may request chunks at once. After an error the connection is
    closed.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair: Pair | None = pair
        self._lock = threading.Lock()
        # The free places. A semaphore would stay locked if Ctrl-C came inside it.
        self._places = SimpleQueue[None]()
        for _ in range(_UNDER_WAY):
            self._places.put(None)

    def read(self, rank: int, number: int, into: torch.Tensor) -> None:
        """Fill `into` with the bytes of a chunk of a rank's slot, unchecked.

        Raises PeerLost if the peer does not send the chunk. Nothing writes to `into`
        after that.
        """
        request = _tensor(_REQUEST.pack(rank, number, len(into)))
        self._places.get()
        try:
            # The peer answers in the order of the requests.
            with self._lock:
                pair = self._connected()
                receiving = pair.begin_receive(into)
                sending = pair.begin_send(request)
            del pair  # the last reference closes the connection
            finish(receiving, SECONDS)
            finish(sending, SECONDS)
        except PeerLost:
            self._pair = None
            raise
        finally:
            self._places.put(None)

    def end(self) -> None:
        """Tell the peer that this rank wants no more, and close the connection.

        No request may be under way. May be called again.
        """
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.send(_tensor(_END), SECONDS)
            pair.close()

    def _connected(self) -> Pair:
        pair = self._pair
        if pair is None:
            raise PeerLost("the connection with the peer has ended")
        return pair


class PeerSlot:
    """A slot in the memory of a peer, whose chunks are read instead of those of the part
    that was written from it.

    `bytes_read` is the length of all chunks that were found sound.
    """

    def __init__(self, requests: Requests, peer: int, rank: int, chunks: Sequence[Chunk]) -> None:
        """Refer to the slot.

        peer: the rank that sends the chunks. rank: the rank that filled the slot.
        chunks: those of the part.
        """
        self._requests = requests
        self._peer, self._rank = peer, rank
        self._chunks = chunks
        self._sound: set[int] = set()
        self._local = threading.local()

    @property
    def bytes_read(self) -> int:
        return sum(self._chunks[number].raw_length for number in self._sound)

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        """Read and verify a chunk. Return True.

        Raises IntegrityError if it is not that of the part, and PeerLost.
        """
        chunk = self._chunks[number]
        length = chunk.raw_length
        direct = len(pieces) == 1
        data = torch.frombuffer(pieces[0], dtype=torch.uint8) if direct else self._buffer(length)
        try:
            self._requests.read(self._rank, number, data)
        except PeerLost as error:
            raise PeerLost(f"rank {self._peer} does not send it: {error}") from None
        # To its own place, a copy only computes the checksum.
        if copy_pieces(data.data_ptr(), pieces) != chunk.raw_crc:
            raise IntegrityError(
                f"rank {self._peer} has sent other bytes as chunk {number} than were saved"
            )
        self._sound.add(number)
        return True

    def _buffer(self, length: int) -> torch.Tensor:
        """Return a buffer of this thread, which is used again for its next chunk."""
        found: torch.Tensor | None = getattr(self._local, "buffer", None)
        if found is None or len(found) < length:
            found = self._local.buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
        return found[:length]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
