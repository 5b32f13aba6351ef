"""Lets the ranks of a recovery read chunks from each other's memory."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ckptd.agent.link.rounds import Exchange
from ckptd.agent.peers.assignment import assign
from ckptd.agent.peers.pair import Pair
from ckptd.agent.peers.requests import SECONDS, PeerSlot, Requests, serve
from ckptd.agent.read.slot_source import PartWithSlot, SlotSource
from ckptd.agent.read.sources import Opened
from ckptd.shared.errors import CkptdError, PeerLost

log = logging.getLogger("ckptd.agent")

_MOST_WANTED = 64
"""The most parts that one rank names as lacking, so that the message stays short."""
_END_SECONDS = 5.0
"""Seconds for which `close` waits for the threads that serve readers.

They have usually ended by then. A thread whose connection is interrupted ends by itself
later, and holds the memory of the slots until then.
"""


class ChunkExchange:
    """The part of one rank in an exchange of chunks.

    All ranks call `offer`, tell each other what it returns, and call `begin` with it.
    This rank then reads, and calls `end_reading`. Once all ranks have done so, it calls
    `close`.

    Nothing depends on the exchange. What a peer does not send is read from storage.
    """

    def __init__(
        self,
        ranks: Exchange,
        job: str,
        opened: Opened,
        slots: Mapping[int, SlotSource],
        patience: float,
    ) -> None:
        """Prepare the exchange.

        opened: a checkpoint that was opened with `slots_later`. slots: the slots in
        the memory of this node, by rank, which stay open until `close`. patience: how
        many seconds a reader may let pass between two requests.
        """
        self._ranks, self._job = ranks, job
        self._opened, self._slots = opened, slots
        self._patience = patience
        self._requests: list[Requests] = []
        self._peer_slots: list[PeerSlot] = []
        self._threads: list[threading.Thread] = []

    def offer(self, needed: Mapping[int, int]) -> dict[str, Any]:
        """Return what this rank can send and what it lacks.

        needed: how many bytes this rank reads of each part, by the rank that saved it.
        Raises IntegrityError, OSError if a part cannot be opened.
        """
        lacking = [
            (part, nbytes)
            for part, nbytes in needed.items()
            if isinstance(found := self._opened.part(part), PartWithSlot) and found.slot is None
        ]
        lacking.sort(key=lambda one: (-one[1], one[0]))
        return {
            "serves": sorted(self._slots),
            "wants": lacking[:_MOST_WANTED],
            "nonce": secrets.token_hex(8),
        }

    def begin(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Connect with the ranks that this rank reads from, and begin to serve those
        that read from it.

        said: what `offer` has returned on each rank.
        """
        reads = assign([one["serves"] for one in said], [one["wants"] for one in said])
        name = f"{self._job}/from-peer/{said[0]['nonce']}"
        me = self._ranks.rank
        for reader in [reader for reader, parts in enumerate(reads) if me in parts.values()]:
            if (store := self._new_client()) is not None:
                self._start(store, f"{name}/{me}-{reader}")
        parts = defaultdict[int, list[int]](list)  # by server
        for part, server in reads[me].items():
            parts[server].append(part)
        stores = {server: self._new_client() for server in sorted(parts)}
        if not stores:
            return
        with ThreadPoolExecutor(len(stores), "ckptd-connect") as threads:
            pairs = threads.map(
                lambda server: _connected(stores[server], f"{name}/{server}-{me}", server), stores
            )
            for server, pair in zip(stores, pairs, strict=True):
                if pair is not None:
                    self._read_from(server, parts[server], Requests(pair))

    def _start(self, store: Store, name: str) -> None:
        thread = threading.Thread(
            target=self._serve, args=(store, name), name="ckptd-serve", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _serve(self, store: Store, name: str) -> None:
        try:
            with closing(Pair(store, name, first=True, seconds=SECONDS)) as pair:
                serve(pair, self._slots, patience=self._patience)
        except (CkptdError, OSError) as error:  # the reader has another way
            log.debug("stopped serving chunks over %s: %s", name, error)

    def _read_from(self, server: int, parts: Sequence[int], requests: Requests) -> None:
        self._requests.append(requests)
        for rank in parts:
            part = self._opened.part(rank)
            assert isinstance(part, PartWithSlot)
            part.slot = PeerSlot(requests, server, rank, part.part.index.chunks)
            # So that as many chunks are requested at once as a connection takes.
            part.remote = True
            self._peer_slots.append(part.slot)

    def _new_client(self) -> Store | None:
        try:
            return self._ranks.new_client()
        except CkptdError as error:
            log.warning("this rank exchanges no chunks with a peer, and reads storage: %s", error)
            return None

    @property
    def bytes_read(self) -> int:
        """The number of bytes that this rank has read from its peers."""
        return sum(slot.bytes_read for slot in self._peer_slots)

    def end_reading(self) -> None:
        """Tell the peers that this rank wants no more. No read may be under way."""
        while self._requests:
            try:
                self._requests.pop().end()
            except PeerLost as error:
                log.debug("a peer was not told that this rank has read all: %s", error)

    def close(self) -> None:
        """End the exchange. May be called again."""
        self.end_reading()
        deadline = time.monotonic() + _END_SECONDS
        while self._threads:
            self._threads.pop().join(max(0.0, deadline - time.monotonic()))


def _connected(store: Store | None, name: str, server: int) -> Pair | None:
    """Return a connection with a rank that serves this one, or None without one."""
    if store is None:
        return None
    try:
        return Pair(store, name, first=False, seconds=SECONDS)
    except PeerLost as error:
        log.warning("nothing is read from the memory of rank %d: %s", server, error)
        return None
