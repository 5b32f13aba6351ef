"""Copies the slots of this rank to its peer, and receives the slots of the ranks that it
is the peer of, on threads beside the training.

The daemon says which step is to be copied. A failure never reaches the training: it is
logged once, and reported to the daemon, and the nodes then make no more copies in this
attempt.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.link.client import Client, Make
from ckptd.agent.peers.pair import Pair
from ckptd.agent.peers.transfer import (
    SendingPace,
    SlotOffer,
    SlotToSend,
    confirm,
    receive_offer,
    receive_slot,
    refuse,
    report_damage,
    send_slot,
)
from ckptd.agent.threads.flag import Waiters
from ckptd.shared.errors import (
    CkptdError,
    DaemonUnreachable,
    IntegrityError,
    InternalError,
    PeerLost,
)
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.system import machine
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.wire import messages as m

log = logging.getLogger("ckptd.agent")

PAIR_SECONDS = 60.0
"""Timeout in seconds of the connection of two ranks."""
HOST_SECONDS = 90.0
"""Timeout in seconds of a Host request. The daemon itself waits up to 60 s for a segment
to be free.
"""
DONE_SECONDS = 60.0
"""Timeout in seconds of the other requests to the daemon."""
EXIT_SECONDS = 5.0
"""Seconds for which the end of the process waits for the threads."""
AWAY_SECONDS = 60.0
"""Seconds for which a copy waits until a lost daemon is back."""


class Replicator:
    """The threads that copy the slots of one rank, and receive those of others, in one
    attempt.

    client: the connection to the daemon. store: makes a client of the job's store that
    nothing else uses. prefix: the prefix of the names of pairs in the store. peer: the
    rank that this rank sends its slots to. sources: the ranks that send their slots to
    this one. find: returns the sealed slot of a step, or None.
    """

    def __init__(
        self,
        client: Client,
        store: Callable[[], Store],
        prefix: str,
        rank: int,
        attempt: int,
        peer: int,
        sources: Sequence[int],
        find: Callable[[int], MappedSlot | None],
    ) -> None:
        self._client, self._store = client, store
        self._prefix = prefix
        self._rank, self._attempt = rank, attempt
        self._find = find
        self._step = -1  # the step to be copied now, or -1
        # Sealed slots that larger ones have replaced, by step, until they are copied.
        self._kept: dict[int, SlotToSend] = {}
        self._news = Waiters()
        self._ended = self._failed = False
        self._failing = threading.Lock()
        self._pairs: list[Pair] = []
        self._threads: list[threading.Thread] = []
        _all.add(self)
        self._start("send", partial(self._send, peer))
        for source in sources:
            self._start(f"receive-{source}", partial(self._receive, source))

    def follow(self, news: m.PeerReplicas) -> None:
        """Copy the step that the daemon names. Return at once."""
        if news.attempt == self._attempt:
            self._step = news.replicating
            past = max([news.replicating - 1, *news.replicated])
            for step in [step for step in tuple(self._kept) if step <= past or news.alone]:
                self._kept.pop(step, None)
            self._news.notify()

    def keep(self, slot: MappedSlot) -> None:
        """Keep the memory of a slot that is about to be replaced by a larger one, if it
        holds a snapshot that is to be copied and may not have been copied yet.
        """
        header = slot.header
        if self._ended or self._failed or header.state is not SlotState.SEALED:
            return
        if header.step is not None and header.step >= self._step:
            with suppress(CkptdError, OSError):  # as if the slot were no longer in memory
                source = SlotToSend.of(slot)
                if source.request.replicate:
                    self._kept[header.step] = source

    def end(self) -> None:
        """End the copies, and do not wait for the threads. May be called again.

        A copy that is under way goes on.
        """
        self._ended = True
        self._kept.clear()
        self._news.notify()

    def stop(self, until: float) -> None:
        """End the copies, even one that is under way, and wait for the threads.

        until: how long to wait, in the time of `time.monotonic`.
        """
        self.end()
        for pair in self._pairs:
            pair.end()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except (CkptdError, OSError) as error:
                self._fail(error)
            except Exception as error:
                log.exception("copying snapshots to other nodes has failed unexpectedly")
                self._fail(InternalError(f"{error!r}; the log of the training has more"))

        thread = threading.Thread(target=run, name=f"ckptd-peer-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fail(self, error: CkptdError | OSError) -> None:
        """Log and report the first failure, after which no more copies are made."""
        with self._failing:
            if self._ended or self._failed:
                return
            self._failed = True
        self._kept.clear()
        log.warning(
            "no further copies of snapshots are made in the memory of other nodes in this attempt: "
            "%s; the training and its saves go on",
            error,
        )
        reason = str(error)[:_MOST_REASON]
        try:
            self._call(
                lambda n: m.CopyFailed(id=n, attempt=self._attempt, reason=reason),
                m.Done,
                DONE_SECONDS,
            )
        except CkptdError as unreported:
            log.debug("the daemon was not told that copies have failed: %s", unreported)

    def _call(self, make: Make, kind: type[R], seconds: float) -> tuple[R, Sequence[Descriptor]]:
        """Call the daemon, again if it is restarted meanwhile. Raises its errors."""
        for _ in range(_MOST_RESTARTS):
            try:
                return self._client.call(make, kind, seconds)
            except DaemonUnreachable:
                if self._ended or not self._client.wait_connected(AWAY_SECONDS):
                    raise
        return self._client.call(make, kind, seconds)

    def _pair(self, sender: int, receiver: int) -> Pair:
        pair = Pair(
            self._store(),
            f"{self._prefix}/{sender}-{receiver}",
            first=self._rank == sender,
            seconds=PAIR_SECONDS,
        )
        self._pairs.append(pair)
        return pair

    # -- this rank sends

    def _send(self, peer: int) -> None:
        pair, settings = self._pair(self._rank, peer), self._client.welcome.copies
        pace = SendingPace(0 if settings is None else settings.bandwidth)
        sent = -1

        def is_news() -> bool:
            return self._ended or self._step > sent

        while True:
            self._news.wait_for(is_news)
            if self._ended:
                return
            if (step := self._step) <= sent:
                continue  # the step was taken back meanwhile
            sent = step
            if (source := self._source(step)) is None:
                log.debug("the slot of step %d is no longer in memory: it is not copied", step)
                continue
            try:
                send_slot(pair, source, pace)
            except IntegrityError as error:
                if not source.is_refilled:
                    raise
                log.debug("step %d is not copied, its slot is filled again: %s", step, error)
                continue
            failpoint("agent.copy.confirmed")

    def _source(self, step: int) -> SlotToSend | None:
        """Return the sealed slot of a step, or None if the daemon has freed it before it
        heard that the step is to be copied. The nodes then copy another step.
        """
        slot = self._find(step)
        if slot is not None:
            # The slot has just been replaced by a larger one, or is being filled again.
            with suppress(PeerLost, IntegrityError):
                source = SlotToSend.of(slot)
                if source.header.step == step:
                    return source
        return self._kept.pop(step, None)

    # -- this rank receives

    def _receive(self, source: int) -> None:
        pair = self._pair(source, self._rank)
        segments: dict[str, MappedSlot] = {}
        try:
            received = -1

            def is_news() -> bool:
                return self._ended or self._step > received

            while True:
                self._news.wait_for(is_news)
                if self._ended:
                    return
                try:
                    offer = receive_offer(pair, lambda: not self._ended)
                except PeerLost as error:  # the attempt has ended, or the peer is lost
                    log.debug("rank %d offers no more copies: %s", source, error)
                    return
                failpoint("agent.copy.offered")
                received = self._take(pair, source, offer, segments)
        finally:
            for segment in segments.values():
                segment.forget()

    def _take(self, pair: Pair, source: int, said: bytes, segments: dict[str, MappedSlot]) -> int:
        """Receive the slot that was offered, into a segment of the daemon, and tell the
        peer whether it has arrived whole or damaged. Return its step.

        said: the encoded offer. segments: those that are mapped, by name. Raises
        CkptdError or OSError, after the peer was told.
        """
        segment: MappedSlot | None = None
        try:
            offer = SlotOffer.decode(said)
            header = offer.header
            if (header.attempt, header.rank) != (self._attempt, source):
                raise PeerLost(
                    f"a peer offers a slot of rank {header.rank} in attempt {header.attempt}; "
                    f"expected rank {source} in attempt {self._attempt}"
                )
            segment = self._segment(offer, segments)
            if whole := receive_slot(pair, offer, segment):
                name = segment.name
                self._call(lambda n: m.Hosted(id=n, segment=name), m.Done, DONE_SECONDS)
        except (CkptdError, OSError) as error:
            if segment is not None:
                self._give_back(segment)
            # The peer reports the failure, too, and its node is not the one to look at.
            why = f"rank {self._rank} on {machine.host()} has not taken the copy: {error}"
            with suppress(PeerLost):  # the reason is the first error
                refuse(pair, why)
            raise
        if whole:
            confirm(pair)
        else:
            self._give_back(segment)
            report_damage(pair)
        assert header.step is not None
        return header.step

    def _give_back(self, segment: MappedSlot) -> None:
        self._client.post(lambda n: m.Abandon(id=n, segment=segment.name), lambda _: None)

    def _segment(self, offer: SlotOffer, segments: dict[str, MappedSlot]) -> MappedSlot:
        """Return a segment of the daemon for the slot that was offered.

        Raises PeerLost if the daemon has none, and its errors.
        """
        header = offer.header
        assert header.step is not None
        step, mapped = header.step, list(segments)
        reply, descriptors = self._call(
            lambda n: m.Host(
                id=n, rank=header.rank, attempt=header.attempt, step=step,
                capacity=header.capacity, chunk_size=header.chunk_size, mapped=mapped,
            ),
            m.Reply,
            HOST_SECONDS,
        )  # fmt: skip
        match reply:
            case m.Granted() if reply.segment in segments:
                return segments[reply.segment]
            case m.Segments(segments=[held]):
                for name in [name for name, one in segments.items() if one.is_unlinked]:
                    segments.pop(name).forget()
                try:
                    segment = MappedSlot(held.segment, *descriptors)
                except BaseException:
                    for descriptor in descriptors:
                        descriptor.close()
                    raise
                segments[segment.name] = segment
                segment.populate()
                return segment
            case m.Refused():
                raise PeerLost(reply.reason)
            case _:
                raise InternalError(f"the daemon has answered {type(reply).__name__} to Host")


R = TypeVar("R", bound=m.Reply)
_MOST_REASON = 4096
_MOST_RESTARTS = 3
_all: weakref.WeakSet[Replicator] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all threads, because CPython ends a thread that returns from gloo while the
    interpreter exits, and the process then aborts.
    """
    until = time.monotonic() + EXIT_SECONDS
    for replicator in tuple(_all):
        replicator.stop(until)
