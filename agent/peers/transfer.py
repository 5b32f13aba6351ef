"""Copies a sealed slot to a peer, chunk by chunk, over a pair (PROTOCOL.md, *Copies
between agents*).

The sender reads its own slot. The receiver gets the bytes straight into a segment of its
daemon, and compares each chunk with the checksum of the seal while the next one is on
its way. If the slot is filled again meanwhile, because the daemon has freed it, its bytes
arrive damaged: the receiver says so, and the sender knows the reason. Nothing that a peer
sends is trusted: lengths are checked before memory is touched.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from crc32c import crc32c

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.peers.pair import Pair, finish
from ckptd.shared.errors import IntegrityError, PeerLost
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.plan import MAX_DOCUMENT, ChunkRange, Plan, chunk_ranges, with_values
from ckptd.shared.formats.segment import Extent, SegmentHeader, SlotState
from ckptd.shared.formats.snapshot_request import SnapshotRequest

OFFER, ACCEPT, REFUSE, RESEND, SEALED, READY, DAMAGED = 1, 2, 3, 4, 5, 6, 7
"""The kinds of messages. Chunks have none."""
STALL_SECONDS = 60.0
"""Timeout in seconds of each message."""
ANSWER_SECONDS = 180.0
"""Timeout in seconds of the answers of a receiver. It first waits for its daemon, which
waits up to 60 s for a segment to be free, and then needs time to make it.
"""
_HEAD = struct.Struct("<IIQ")
_MOST_ANSWER = 1 << 20
_MOST_TRIES = 3
_UNDER_WAY = 2
"""The most chunks that are on their way at the same time: one is compared while the next
one is sent.
"""


class SendingPace:
    """A limit of bytes a second, or none if `rate` is 0."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._next = time.monotonic()

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` more bytes may be sent."""
        if self._rate:
            now = time.monotonic()
            self._next = max(self._next, now)
            if self._next > now:
                time.sleep(self._next - now)
            self._next += nbytes / self._rate


@dataclass(frozen=True, slots=True)
class SlotOffer:
    """The offer of a slot: its header, and the crc32c of each chunk."""

    header: SegmentHeader
    checks: Sequence[int]

    @property
    def used(self) -> int:
        """The bytes of the data up to the end of the last document."""
        header = self.header
        ends = (each.offset + each.length for each in (header.plan, header.request, header.values))
        return max(ends)

    def encode(self) -> bytes:
        return self.header.encode() + struct.pack(f"<{len(self.checks)}I", *self.checks)

    @classmethod
    def decode(cls, data: bytes) -> SlotOffer:
        """Return the offer in `data`. Raises IntegrityError, NewerFormat."""
        header = SegmentHeader.decode(data[:ALIGN])
        count, rest = divmod(len(data) - ALIGN, 4)
        if rest or header.state is not SlotState.SEALED or header.step is None:
            raise IntegrityError("a peer has offered a slot that is not sealed")
        return cls(header, struct.unpack(f"<{count}I", data[ALIGN:]))


# -- the sender


@dataclass(frozen=True, slots=True)
class SlotToSend:
    """A sealed slot that can be sent.

    It keeps the memory of the slot mapped, so that it can still be read after the slot
    was replaced by a larger one. `header` is that of the snapshot to send; the slot has
    another one once it is filled again. `checks` is None if the slot has no checksums, as
    after a copy from an accelerator.
    """

    slot: MappedSlot
    header: SegmentHeader
    checks: Sequence[int] | None
    data: torch.Tensor

    @classmethod
    def of(cls, slot: MappedSlot) -> SlotToSend:
        """Return the slot as it is to be sent.

        Raises IntegrityError if it is not sealed or is filled again meanwhile, and
        PeerLost if another thread has forgotten it.
        """
        data, header = slot.data, slot.header
        gone = PeerLost(f"the slot of step {header.step} is no longer in memory")
        if not len(data):  # its descriptors will be closed next
            raise gone
        try:
            checks = slot.checks()
        except ValueError:  # its descriptors are closed
            raise gone from None
        if header.state is not SlotState.SEALED:
            raise IntegrityError(f"the slot of step {header.step} is not sealed")
        source = cls(slot, header, checks, data)
        source.check_not_refilled()
        return source

    @property
    def is_refilled(self) -> bool:
        """True once the slot is being filled again, or has been.

        It stays False for a slot that was replaced: nothing fills its memory again.
        """
        return self.slot.header.generation != self.header.generation

    def check_not_refilled(self) -> None:
        """Raise IntegrityError if the slot has been filled again."""
        if self.is_refilled:
            raise IntegrityError(f"the slot of step {self.header.step} has been filled again")

    @property
    def request(self) -> SnapshotRequest:
        """The request document of the slot. Raises IntegrityError."""
        return SnapshotRequest.decode(_part(self.data, self.header.request).numpy().tobytes())


def send_slot(pair: Pair, source: SlotToSend, pace: SendingPace) -> None:
    """Copy a sealed slot to the peer, and return once the peer has sealed its copy.

    Raises PeerLost if the peer refuses it, or if the connection fails; IntegrityError if
    the slot is damaged or has been filled again. The pair can still be used after an
    IntegrityError.
    """
    header, checks, data = source.header, source.checks, source.data
    ranges = ranges_of(header, data)
    if checks is None:
        checks = [crc32c(_chunk(data, chunk).numpy().data) for chunk in ranges]
    if len(ranges) != len(checks):
        raise IntegrityError(f"the slot of step {header.step} has checksums of another snapshot")
    source.check_not_refilled()  # else the checksums may be those of the bytes of two snapshots
    _say(pair, OFFER, SlotOffer(header, checks).encode())
    _hear(pair, ACCEPT, seconds=ANSWER_SECONDS)
    for extent in (header.plan, header.request):
        pace.wait(extent.length)
        pair.send(_part(data, extent), STALL_SECONDS)
    kind, said = _hear(pair, READY, DAMAGED, seconds=ANSWER_SECONDS)
    if kind == DAMAGED:
        raise IntegrityError(f"a document of step {header.step} has arrived damaged at the peer")
    if said != digest(ranges):
        raise PeerLost(
            "a peer divides a slot into other chunks: install the same ckptd on all nodes"
        )
    numbers: Sequence[int] = range(len(ranges))
    for _ in range(_MOST_TRIES):
        _send_chunks(pair, data, [ranges[number] for number in numbers], pace)
        kind, said = _hear(pair, RESEND, SEALED, DAMAGED, seconds=ANSWER_SECONDS)
        if kind == SEALED:
            return
        if kind == DAMAGED:
            raise IntegrityError(
                f"a chunk of step {header.step} has arrived damaged at the peer {_MOST_TRIES} times"
            )
        numbers = _numbers(said, len(ranges))
    raise PeerLost(f"a peer has asked for chunks again more than {_MOST_TRIES - 1} times")


def _send_chunks(
    pair: Pair, data: torch.Tensor, ranges: Sequence[ChunkRange], pace: SendingPace
) -> None:
    sending = []
    for chunk in ranges:
        pace.wait(chunk.length)
        sending.append(pair.begin_send(_chunk(data, chunk)))
        if len(sending) == _UNDER_WAY:
            finish(sending.pop(0), STALL_SECONDS)
    for each in sending:
        finish(each, STALL_SECONDS)


def _numbers(said: bytes, count: int) -> Sequence[int]:
    """Return the numbers of the chunks that a peer wants again. Raises PeerLost."""
    if not said or len(said) % 4:
        raise PeerLost("a peer has asked for chunks in a way that cannot be understood")
    numbers = struct.unpack(f"<{len(said) // 4}I", said)
    if max(numbers) >= count:
        raise PeerLost(f"a peer has asked for chunk {max(numbers)} of {count}")
    return numbers


# -- the receiver


def receive_offer(pair: Pair, wanted: Callable[[], bool] = lambda: True) -> bytes:
    """Wait for an offer, as long as `wanted()` is True, and return it encoded.

    Raises PeerLost if the connection fails or no offer is wanted any more.
    """
    head = bytearray(_HEAD.size)
    pair.receive_while(wanted, _bytes(head), STALL_SECONDS)
    return _rest(pair, head, OFFER, most=MAX_DOCUMENT)[1]


def refuse(pair: Pair, reason: str) -> None:
    """Refuse an offer, for a reason. Raises PeerLost."""
    _say(pair, REFUSE, reason.encode()[:_MOST_ANSWER])


def receive_slot(pair: Pair, offer: SlotOffer, segment: MappedSlot) -> bool:
    """Accept an offer, and receive the slot into a segment. Return True once the segment
    is sealed.

    Return False if a document has arrived damaged, or a chunk `_MOST_TRIES` times. The
    caller then tells the peer: by `confirm`, or by `report_damage`.

    Raises PeerLost; IntegrityError if the slot does not fit into the segment, or its
    plan is not sound; OSError.
    """
    header, data = offer.header, segment.data
    mine = segment.header
    if not mine.peer_replica or _identity(mine) != _identity(header):
        raise IntegrityError(f"segment {segment.name[:8]} is not for copies of rank {header.rank}")
    if offer.used > mine.capacity:
        raise IntegrityError(
            f"a copy of {offer.used} bytes does not fit into a segment of {mine.capacity} bytes"
        )
    assert header.step is not None
    segment.begin_copy(header.step)
    _say(pair, ACCEPT)
    documents = header.plan, header.request
    for extent in documents:
        pair.receive(_part(data, extent), STALL_SECONDS)
    if any(crc32c(_part(data, extent).numpy().data) != extent.crc for extent in documents):
        return False
    ranges = ranges_of(header, data)
    if len(ranges) != len(offer.checks):
        raise IntegrityError(
            f"rank {header.rank} has offered {len(offer.checks)} checksums for {len(ranges)} chunks"
        )
    _say(pair, READY, digest(ranges))
    numbers: Sequence[int] = range(len(ranges))
    for left in reversed(range(_MOST_TRIES)):
        numbers = list(_damaged(pair, data, ranges, offer.checks, numbers))
        if not numbers:
            break
        if not left:
            return False
        _say(pair, RESEND, struct.pack(f"<{len(numbers)}I", *numbers))
    segment.seal_copy(header, list(offer.checks))
    return True


def confirm(pair: Pair) -> None:
    """Tell the peer that its slot is copied. Raises PeerLost."""
    _say(pair, SEALED)


def report_damage(pair: Pair) -> None:
    """Tell the peer that its slot has arrived damaged. Raises PeerLost."""
    _say(pair, DAMAGED)


def _damaged(
    pair: Pair,
    data: torch.Tensor,
    ranges: Sequence[ChunkRange],
    checks: Sequence[int],
    numbers: Sequence[int],
) -> Iterator[int]:
    """Receive these chunks, and yield the numbers of those that do not match their
    checksum.
    """
    views = [_chunk(data, ranges[number]) for number in numbers]
    receiving = [pair.begin_receive(view) for view in views[:_UNDER_WAY]]
    for place, number in enumerate(numbers):
        finish(receiving[place], STALL_SECONDS)
        if place + _UNDER_WAY < len(views):
            receiving.append(pair.begin_receive(views[place + _UNDER_WAY]))
        if crc32c(views[place].numpy().data) != checks[number]:
            yield number


# -- both


def digest(ranges: Sequence[ChunkRange]) -> bytes:
    """Return a digest of the places of all chunks.

    The two ranks compare it before the first chunk, because a chunk that is longer than
    its receiver expects would end the receiver's process (see `Pair`).
    """
    places = [number for chunk in ranges for number in (chunk.offset, chunk.length)]
    return hashlib.sha256(struct.pack(f"<{len(places)}Q", *places)).digest()


def _identity(header: SegmentHeader) -> tuple[object, ...]:
    """Return the fields of a header that a slot and its copies share, for every step."""
    return header.job, header.attempt, header.rank, header.world_size, header.chunk_size


def ranges_of(header: SegmentHeader, data: torch.Tensor) -> Sequence[ChunkRange]:
    """Return the chunks of a slot, by the plan in its data.

    Raises IntegrityError if the plan is not sound, or names bytes outside the data.
    """
    plan = Plan.decode(bytes(_part(data, header.plan).numpy()))
    values = (header.values.offset, header.values.length)
    if values[0] < plan.data_length or plan.data_length > header.capacity:
        raise IntegrityError(f"the documents of rank {header.rank} overlap its tensors")
    ranges = chunk_ranges(with_values(plan.regions, values), header.chunk_size)
    if ranges and ranges[-1].offset + ranges[-1].length > len(data):
        raise IntegrityError(f"a chunk of rank {header.rank} lies outside its slot")
    return ranges


def _chunk(data: torch.Tensor, chunk: ChunkRange) -> torch.Tensor:
    return data[chunk.offset : chunk.offset + chunk.length]


def _part(data: torch.Tensor, extent: Extent) -> torch.Tensor:
    return data[extent.offset : extent.offset + extent.length]


def _say(pair: Pair, kind: int, said: bytes = b"") -> None:
    message = bytearray(_HEAD.pack(kind, 0, len(said)))
    pair.send(_bytes(message), STALL_SECONDS)
    if said:
        pair.send(_bytes(bytearray(said)), STALL_SECONDS)


def _hear(pair: Pair, *kinds: int, seconds: float = STALL_SECONDS) -> tuple[int, bytes]:
    """Return the kind and the content of the next message.

    kinds: the kinds that may come. Raises PeerLost for a refusal or any other kind.
    """
    head = bytearray(_HEAD.size)
    pair.receive(_bytes(head), seconds)
    return _rest(pair, head, *kinds, most=_MOST_ANSWER)


def _rest(pair: Pair, head: bytearray, *kinds: int, most: int) -> tuple[int, bytes]:
    """Return the kind and the content of the message that begins with `head`.

    most: the most bytes that the content may have.
    """
    kind, zero, length = _HEAD.unpack(head)
    if zero or length > most:
        raise PeerLost("a peer has sent a message that cannot be understood")
    said = bytearray(length)
    if length:
        pair.receive(_bytes(said), STALL_SECONDS)
    if kind == REFUSE:
        raise PeerLost(said.decode(errors="replace"))
    if kind not in kinds:
        raise PeerLost(f"a peer has sent a message of kind {kind}; expected {kinds}")
    return kind, bytes(said)


def _bytes(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)
