"""A sealed slot is copied to a peer bit for bit, or not at all."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.peers.pair import Pair
from ckptd.agent.peers.transfer import (
    ACCEPT,
    DAMAGED,
    OFFER,
    READY,
    REFUSE,
    RESEND,
    SEALED,
    SendingPace,
    SlotOffer,
    SlotToSend,
    confirm,
    digest,
    ranges_of,
    receive_offer,
    receive_slot,
    refuse,
    report_damage,
    send_slot,
)
from ckptd.shared.errors import CkptdError, IntegrityError, PeerLost
from ckptd.shared.formats.segment import Extent, SlotState, read_check, read_header
from tests.support.pairs import (
    FakePair,
    Spoil,
    fake_pairs,
    fill,
    real_pairs,
    sealed_slot,
    segment,
)
from tests.support.tmpfs import tmpfs

FIRST_CHUNK = 4
"""The number of the first chunk among the messages of the sender: the offer is two, the
plan and the request one each.
"""


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs() as made:
        yield made.directory


def copy(sender: Any, receiver: Any, source: SlotToSend, into: MappedSlot) -> tuple[str, str]:
    """Copy a slot. Return the errors of the sender and the receiver, or ""."""

    def receive() -> None:
        try:
            whole = receive_slot(receiver, SlotOffer.decode(receive_offer(receiver)), into)
        except CkptdError as error:
            refuse(receiver, str(error))
            raise
        (confirm if whole else report_damage)(receiver)

    with ThreadPoolExecutor(2) as pool:
        sent, received = (
            pool.submit(send_slot, sender, source, SendingPace(0)),
            pool.submit(receive),
        )
    return said(sent), said(received)


def said(done: Future[Any]) -> str:
    error = done.exception()
    assert error is None or isinstance(error, CkptdError), repr(error)
    return "" if error is None else f"{type(error).__name__}: {error}"


def state_of(slot: MappedSlot) -> SlotState:
    return read_header(slot._fd).state


def assert_copied(slot: MappedSlot, copied: MappedSlot) -> None:
    source, header = slot.header, read_header(copied._fd)
    assert torch.equal(copied.data[: source.request.offset], slot.data[: source.request.offset])
    assert read_check(copied._fd, header) == slot.checks()
    assert header == replace(
        source, slot=1, generation=42, boot_id=header.boot_id, peer_replica=True
    )


@pytest.mark.parametrize("pairs", [real_pairs, fake_pairs])
def test_a_copy_is_equal_to_its_slot_bit_for_bit(
    shm: Path, pairs: Callable[[], tuple[Any, Any]]
) -> None:
    slot, into = sealed_slot(shm, "a"), segment(shm, "b")
    assert copy(*pairs(), SlotToSend.of(slot), into) == ("", "")
    assert_copied(slot, into)


def test_one_pair_carries_one_copy_after_another(shm: Path) -> None:
    slot, into = sealed_slot(shm, "a"), segment(shm, "b")
    sender, receiver = real_pairs()
    assert copy(sender, receiver, SlotToSend.of(slot), into) == ("", "")
    fill(slot, 6)
    assert copy(sender, receiver, SlotToSend.of(slot), into) == ("", "")
    assert (into.header.step, into.header.state) == (6, SlotState.SEALED)


def test_a_slot_without_checksums_is_sent_with_them(shm: Path) -> None:
    """As after a copy from an accelerator, whose bytes no processor has seen."""
    slot, into = sealed_slot(shm, "a"), segment(shm, "b")
    assert copy(*fake_pairs(), replace(SlotToSend.of(slot), checks=None), into) == ("", "")
    assert_copied(slot, into)


def test_a_slot_that_a_larger_one_has_replaced_is_still_sent(shm: Path) -> None:
    slot, twin, into = sealed_slot(shm, "a"), sealed_slot(shm, "c"), segment(shm, "b")
    source = SlotToSend.of(slot)
    slot.forget()
    (shm / "a").unlink()
    assert copy(*fake_pairs(), source, into) == ("", "")
    assert_copied(twin, into)


def test_a_slot_that_cannot_be_sent_says_why(shm: Path) -> None:
    with pytest.raises(IntegrityError, match="^the slot of step None is not sealed$"):
        SlotToSend.of(segment(shm, "b"))
    slot = sealed_slot(shm, "a")
    slot.forget()
    with pytest.raises(PeerLost, match="^the slot of step 5 is no longer in memory$"):
        SlotToSend.of(slot)
    whole = SlotToSend.of(sealed_slot(shm, "c"))
    with pytest.raises(IntegrityError, match="checksums of another snapshot"):
        send_slot(cast(Pair, None), replace(whole, checks=[1, 2]), SendingPace(0))


def test_a_slot_that_is_filled_again_while_it_is_read_is_not_sent(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = sealed_slot(shm, "a")
    monkeypatch.setattr(slot, "checks", lambda: fill(slot, 6))
    with pytest.raises(IntegrityError, match="^the slot of step 5 has been filled again$"):
        SlotToSend.of(slot)


@pytest.mark.parametrize("checked", [True, False])
def test_a_slot_that_is_filled_again_before_it_is_offered_is_not_sent(
    shm: Path, checked: bool
) -> None:
    slot = sealed_slot(shm, "a")
    source = SlotToSend.of(slot)
    fill(slot, 6)  # a sender that computes the checksums itself may have met bytes of both steps
    with pytest.raises(IntegrityError, match="^the slot of step 5 has been filled again$"):
        send_slot(
            cast(Pair, None),
            replace(source, checks=source.checks if checked else None),
            SendingPace(0),
        )


def test_a_slot_knows_whether_it_is_filled_again(shm: Path) -> None:
    slot, replaced = sealed_slot(shm, "a"), sealed_slot(shm, "c")
    source, kept = SlotToSend.of(slot), SlotToSend.of(replaced)
    replaced.forget()
    assert (source.is_refilled, kept.is_refilled) == (False, False)
    slot.begin_copy(6)
    assert source.is_refilled


# -- bytes that are damaged on the way


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def flip(*numbers: int) -> Spoil:
    """Return a function that flips a bit in the messages with these numbers."""
    return lambda number, data: flipped(data) if number in numbers else data


@pytest.mark.parametrize(
    "numbers",
    [[4], [4, 6], [10], [4, 11], [5, 7, 11, 12]],
    ids=["the first", "two", "the values", "one twice", "two twice"],
)
def test_a_chunk_that_arrives_damaged_is_sent_again(shm: Path, numbers: list[int]) -> None:
    slot, into = sealed_slot(shm, "a"), segment(shm, "b")
    assert copy(*fake_pairs(flip(*numbers)), SlotToSend.of(slot), into) == ("", "")
    assert_copied(slot, into)


def test_a_chunk_that_is_damaged_three_times_ends_the_copy_and_not_the_connection(
    shm: Path,
) -> None:
    slot, into = sealed_slot(shm, "a"), segment(shm, "b")
    sent = len(SlotToSend.of(slot).checks or ())
    again = FIRST_CHUNK + sent
    sender, receiver = fake_pairs(flip(FIRST_CHUNK + 1, again, again + 1))
    assert copy(sender, receiver, SlotToSend.of(slot), into) == (
        "IntegrityError: a chunk of step 5 has arrived damaged at the peer 3 times",
        "",
    )
    assert (state_of(into), into.header.step) == (SlotState.FILLING, 5)
    assert copy(sender, receiver, SlotToSend.of(slot), into) == ("", "")


@pytest.mark.parametrize("number", [2, 3], ids=["plan", "request"])
def test_a_document_that_arrives_damaged_ends_the_copy_and_not_the_connection(
    shm: Path, number: int
) -> None:
    slot, into = sealed_slot(shm, "a"), segment(shm, "b")
    sender, receiver = fake_pairs(flip(number))
    assert copy(sender, receiver, SlotToSend.of(slot), into) == (
        "IntegrityError: a document of step 5 has arrived damaged at the peer",
        "",
    )
    assert (state_of(into), into.header.step) == (SlotState.FILLING, 5)
    assert copy(sender, receiver, SlotToSend.of(slot), into) == ("", "")


@pytest.mark.parametrize("message", range(9))
def test_a_sender_that_is_gone_in_the_middle_leaves_no_sealed_copy(shm: Path, message: int) -> None:
    slot, into = sealed_slot(shm, "a"), segment(shm, "b")
    sender, receiver = fake_pairs(lambda number, data: None if number == message else data)
    with ThreadPoolExecutor(2) as pool:
        received = pool.submit(
            lambda: receive_slot(
                cast(Pair, receiver), SlotOffer.decode(receive_offer(cast(Pair, receiver))), into
            )
        )
        sent = pool.submit(send_slot, cast(Pair, sender), SlotToSend.of(slot), SendingPace(0))
        lost = said(received)
        receiver.end()
    assert lost == "PeerLost: the connection with a peer has failed: Connection closed by peer"
    assert said(sent) == lost
    assert state_of(into) is not SlotState.SEALED


@pytest.mark.parametrize("sends", [1, 2, 5])
def test_a_real_peer_that_is_gone_in_the_middle(shm: Path, sends: int) -> None:
    into, source = segment(shm, "b"), SlotToSend.of(sealed_slot(shm, "a"))
    sender, receiver = real_pairs()
    messages = [
        struct.pack("<IIQ", OFFER, 0, len(SlotOffer(source.header, source.checks or ()).encode())),
        SlotOffer(source.header, source.checks or ()).encode(),
        bytes(source.data[source.header.plan.offset :][: source.header.plan.length].numpy()),
        bytes(source.data[source.header.request.offset :][: source.header.request.length].numpy()),
        bytes(source.data[: source.header.chunk_size].numpy()),
    ]
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(
            lambda: receive_slot(receiver, SlotOffer.decode(receive_offer(receiver)), into)
        )
        for number, message in enumerate(messages[:sends]):
            sender.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), 60)
            for length in {1: [16], 3: [16, 32]}.get(number, ()):
                sender.receive(torch.frombuffer(bytearray(length), dtype=torch.uint8), 60)
        del sender
        assert said(received).startswith("PeerLost: the connection with a peer has failed: ")
    assert state_of(into) is not SlotState.SEALED


# -- a copy that does not fit


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job": "other"}, "segment b is not for copies of rank 0"),
        ({"attempt": 2}, "segment b is not for copies of rank 0"),
        ({"rank": 1}, "segment b is not for copies of rank 0"),
        ({"world_size": 3}, "segment b is not for copies of rank 0"),
        ({"chunk_size": 128 << 10}, "segment b is not for copies of rank 0"),
        ({"peer_replica": False}, "segment b is not for copies of rank 0"),
        ({"capacity": 300_000}, "does not fit into a segment of 300000 bytes"),
    ],
)
def test_a_copy_goes_into_a_segment_for_it_only(
    shm: Path, changes: dict[str, Any], reason: str
) -> None:
    into = segment(shm, "b", **changes)
    before = into.header
    sent, received = copy(*fake_pairs(), SlotToSend.of(sealed_slot(shm, "a")), into)
    assert reason in received
    assert sent.startswith("PeerLost: ")
    assert reason in sent
    assert read_header(into._fd) == before


# -- what a hostile peer may send


def offered(source: SlotToSend, **changes: Any) -> bytes:
    return SlotOffer(replace(source.header, **changes), source.checks or ()).encode()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda source: b"", "cut short"),
        (lambda source: bytes(4095), "cut short"),
        (lambda source: bytes(4096), "segment header"),
        (lambda source: offered(source) + b"x", "not sealed"),
        (lambda source: offered(source, state=SlotState.FILLING), "not sealed"),
        (lambda source: offered(source, step=None), "not sealed"),
        (
            lambda source: offered(source, plan=Extent(0, 1 << 61, 1)),
            "segment header",
        ),
        (
            lambda source: offered(source, values=Extent(1 << 62, 8, 1)),
            "segment header",
        ),
    ],
)
def test_an_offer_that_is_not_sound_is_refused(
    shm: Path, make: Callable[[SlotToSend], bytes], reason: str
) -> None:
    data = make(SlotToSend.of(sealed_slot(shm, "a")))
    with pytest.raises(IntegrityError, match=reason):
        SlotOffer.decode(data)


def test_a_plan_that_names_bytes_outside_the_slot_is_refused(shm: Path) -> None:
    """A header that claims a smaller slot than its plan is for."""
    source, into = SlotToSend.of(sealed_slot(shm, "a")), segment(shm, "b")
    header = source.header
    lie = replace(header, values=replace(header.values, offset=0))
    received = hostile(replace(source, header=lie), into)
    assert received == "IntegrityError: the documents of rank 0 overlap its tensors"
    far = replace(header, values=replace(header.values, offset=header.plan.offset + (1 << 20)))
    assert "does not fit" in hostile(replace(source, header=replace(far, capacity=1 << 30)), into)
    many = [*(source.checks or ()), 7]
    assert "has offered 8 checksums for 7 chunks" in hostile(replace(source, checks=many), into)
    assert state_of(into) is not SlotState.SEALED


def hostile(source: SlotToSend, into: MappedSlot) -> str:
    """SlotOffer a slot without a look at it. Return the error of the receiver."""
    sender, receiver = fake_pairs()
    say(sender, OFFER, SlotOffer(source.header, source.checks or ()).encode())
    for extent in (source.header.plan, source.header.request):
        sender.send(source.data[extent.offset : extent.offset + extent.length], 60)
    with pytest.raises(CkptdError) as refused:
        receive_slot(
            cast(Pair, receiver), SlotOffer.decode(receive_offer(cast(Pair, receiver))), into
        )
    return f"{type(refused.value).__name__}: {refused.value}"


def say(pair: FakePair, kind: int, data: bytes = b"", length: int | None = None) -> None:
    head = struct.pack("<IIQ", kind, 0, len(data) if length is None else length)
    pair.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), 60)
    if data:
        pair.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 60)


@pytest.mark.parametrize(
    ("kind", "length", "reason"),
    [
        (OFFER, 1 << 63, "a message that cannot be understood"),
        (OFFER, (256 << 20) + 1, "a message that cannot be understood"),
        (ACCEPT, 0, r"a message of kind 2; expected \(1,\)"),
        (99, 0, r"a message of kind 99; expected \(1,\)"),
    ],
)
def test_a_message_that_is_no_offer_ends_the_connection(
    kind: int, length: int, reason: str
) -> None:
    sender, receiver = fake_pairs()
    say(sender, kind, length=length)
    with pytest.raises(PeerLost, match=reason):
        receive_offer(cast(Pair, receiver))


SAME = b"the digest of the chunks of the sender"
BEGUN = [(ACCEPT, b""), (READY, SAME)]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([(REFUSE, b"no room")], "^no room$"),
        ([(REFUSE, b"\xff")], "^\ufffd$"),
        ([(ACCEPT, b""), (READY, bytes(32))], "divides a slot into other chunks: install the same"),
        ([(SEALED, b"")], r"a message of kind 5; expected \(2,\)"),
        ([(DAMAGED, b"")], r"a message of kind 7; expected \(2,\)"),
        ([*BEGUN, (RESEND, b"")], "in a way that cannot be understood"),
        ([*BEGUN, (RESEND, b"12345")], "in a way that cannot be understood"),
        (
            [*BEGUN, (RESEND, struct.pack("<2I", 1, 7))],
            "asked for chunk 7 of 7",
        ),
        (
            [*BEGUN, *[(RESEND, bytes(4))] * 3],
            "asked for chunks again more than 2 times",
        ),
    ],
)
def test_a_receiver_that_answers_nonsense_ends_the_copy(
    shm: Path, answers: list[tuple[int, bytes]], reason: str
) -> None:
    sender, receiver = fake_pairs()
    source = SlotToSend.of(sealed_slot(shm, "a"))
    for kind, data in answers:
        same = data is SAME
        say(receiver, kind, digest(ranges_of(source.header, source.data)) if same else data)
    with pytest.raises(PeerLost, match=reason):
        send_slot(cast(Pair, sender), source, SendingPace(0))


# -- pace


class Sleeps:
    """A clock on which time passes only in sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_pace_limits_the_bytes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Sleeps(monkeypatch)
    pace = SendingPace(1000)
    times = []
    for _ in range(4):
        pace.wait(500)
        times.append(clock.now)
    assert times == [100.0, 100.5, 101.0, 101.5]
    clock.now = 200.0  # time without a copy cannot be saved up
    pace.wait(500)
    pace.wait(500)
    assert clock.now == 200.5


def test_no_pace_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Sleeps(monkeypatch)
    pace = SendingPace(0)
    pace.wait(1 << 40)
    pace.wait(1 << 40)
    assert clock.now == 100.0
