"""The slots of a rank in real shared memory, with a client that answers as told: made,
replaced, lost, interrupted and forgotten.
"""

from __future__ import annotations

import _thread
import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from ckptd.agent.copy import mapped_slot as mapped_slot_module
from ckptd.agent.copy import slots as slots_module
from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.copy.slots import MappedSlots, Preparation
from ckptd.agent.link.client import Client
from ckptd.shared.errors import (
    CkptdError,
    DaemonUnreachable,
    InternalError,
    QuotaExceeded,
    SharedMemoryFull,
    SnapshotFailed,
    StorageError,
)
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.wire import messages as m
from tests.support.clock import Clock
from tests.support.daemons import until
from tests.support.tmpfs import Tmpfs, tmpfs

CUDA = torch.device("cuda", 3)
FAR = 1e9  # a deadline of the monotonic clock that never comes


class FakeClient:
    """In the place of a Client.

    Each Allocate gets two new segments, or the next of `errors`.

    While `answering` is clear, no Allocate is answered. `spoil` runs on the descriptors
    before they are given to the agent.
    """

    def __init__(self, shm: Tmpfs) -> None:
        self.welcome = m.Welcome(re=0, version=1, slots=2, stall_budget=5.0)
        self.shm = shm
        self.asked: list[m.Allocate] = []
        self.errors: list[CkptdError] = []
        self.answering = threading.Event()
        self.answering.set()
        self.given: list[Descriptor] = []
        self.spoil: Callable[[list[Descriptor]], object] = lambda descriptors: None
        self._numbers = itertools.count()

    def call(
        self, make: Callable[[int], m.Allocate], kind: type[m.Segments], timeout: float
    ) -> tuple[m.Segments, list[Descriptor]]:
        self.asked.append(make(0))
        assert self.answering.wait(60)
        if self.errors:
            raise self.errors.pop(0)
        held, descriptors = [], list[Descriptor]()
        for _ in range(self.asked[-1].count):
            name, capacity = f"{next(self._numbers)}.seg", self.asked[-1].capacity
            held.append(m.HeldSegment(segment=name, slot=0, capacity=capacity, generation=1))
            descriptors += self.shm.make(name, capacity)
        self.given += descriptors
        self.spoil(descriptors)
        return m.Segments(re=0, segments=held), descriptors


@pytest.fixture(autouse=True)
def measured_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage sees only the threads of `threading`."""
    monkeypatch.setattr(
        _thread,
        "start_new_thread",
        lambda work, given: threading.Thread(target=work, args=given, daemon=True).start(),
    )


@pytest.fixture
def client() -> Iterator[FakeClient]:
    with tmpfs() as shm:
        yield FakeClient(shm)


@pytest.fixture
def slots(client: FakeClient) -> Iterator[MappedSlots]:
    made = MappedSlots(cast(Client, client), lambda timeout: True)
    yield made
    client.answering.set()
    made.wait()
    made.drop()


def locked(client: FakeClient, name: str) -> bool:
    """True if a process holds the lock by which the daemon sees that the trainer is
    alive.
    """
    descriptor = client.shm.opened(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        descriptor.close()
    return False


def test_slots_are_made_with_room_to_spare_and_are_used_again(
    client: FakeClient, slots: MappedSlots
) -> None:
    assert not slots.fit(0)
    assert slots.ensure(1_000_000, FAR)
    (request,) = client.asked
    assert (request.count, request.capacity) == (2, 1_000_000 + 1_000_000 // 64 + (1 << 16))
    assert (slots.names, [slots.get(name).header.capacity for name in slots.names]) == (
        ["0.seg", "1.seg"],
        [request.capacity] * 2,
    )
    assert [locked(client, name) for name in slots.names] == [True, True]
    assert slots.ensure(request.capacity, FAR)
    assert slots.fit(request.capacity)
    assert not slots.fit(request.capacity + 1)
    assert len(client.asked) == 1


def test_larger_slots_take_the_place_of_all_others_once_no_copy_is_under_way(
    client: FakeClient,
) -> None:
    happened: list[Any] = []

    def wait(timeout: float) -> bool:
        happened.append(("waited", len(client.asked)))
        return True

    slots = MappedSlots(cast(Client, client), wait)
    assert slots.ensure(10, FAR)
    slots.wait()
    assert slots.ensure(1_000_000, FAR)
    assert (slots.names, happened) == (["2.seg", "3.seg"], [("waited", 0), ("waited", 1)])
    assert [descriptor.closed for descriptor in client.given] == [True] * 4 + [False] * 4
    assert [locked(client, f"{n}.seg") for n in range(4)] == [False, False, True, True]
    slots.wait()
    slots.drop()
    assert (slots.names, [descriptor.closed for descriptor in client.given]) == ([], [True] * 8)


def test_no_slot_is_replaced_while_copies_into_it_do_not_end(client: FakeClient) -> None:
    waited: list[float] = []

    def wait(timeout: float) -> bool:
        waited.append(timeout)
        return False

    slots = MappedSlots(cast(Client, client), wait)
    with pytest.raises(SnapshotFailed, match="copies from an accelerator into the present ones"):
        slots.ensure(10, time.monotonic() + 60)
    slots.prepare(10)
    assert (client.asked, waited[1:]) == ([], [5.0])
    assert 0 < waited[0] <= 60


def test_slots_are_dropped_though_the_driver_does_not_lock_them(
    client: FakeClient, slots: MappedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may wait for a device that hangs."""
    begun, answers = threading.Event(), threading.Event()

    def lock(address: int, length: int, device: torch.device) -> bool:
        begun.set()
        assert answers.wait(60)
        return False

    monkeypatch.setattr(mapped_slot_module, "lock_pages", lock)
    monkeypatch.setattr(slots_module, "UNLOCK_SECONDS", 0.01)
    assert slots.ensure(10, FAR, CUDA)
    assert begun.wait(60)
    assert not slots.wait(0.01)
    slots.drop()
    assert (slots.names, [descriptor.closed for descriptor in client.given]) == ([], [True] * 4)
    answers.set()
    assert slots.wait(60)


def test_slots_are_dropped_though_the_driver_does_not_unlock_them(
    client: FakeClient, slots: MappedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may wait for a device that hangs. The daemon frees the segments anyway."""
    assert slots.ensure(10, FAR)
    answers, slot = threading.Event(), slots.get(slots.names[0])
    monkeypatch.setattr(slots_module, "UNLOCK_SECONDS", 0.01)
    slot._unlocks.append(lambda: answers.wait(60))
    slots.drop()
    assert (slots.names, [descriptor.closed for descriptor in client.given]) == ([], [True] * 4)
    assert slot.data.numel()  # still mapped
    answers.set()
    until(lambda: not slot.data.numel(), "slot is forgotten")


def test_a_segment_that_is_not_mapped_cannot_be_granted(slots: MappedSlots) -> None:
    assert slots.find("0.seg") is None
    with pytest.raises(
        InternalError,
        match="^the daemon granted a segment that this rank has not mapped: 0123abcd$",
    ):
        slots.get("0123abcdef.seg")
    slots.ensure(10, FAR)
    assert slots.find("0.seg") is slots.get("0.seg")
    assert "0.seg" in slots


@pytest.mark.parametrize(
    "error", [QuotaExceeded("too much"), SharedMemoryFull("full"), DaemonUnreachable("gone")]
)
def test_an_allocation_that_fails_is_raised_and_tried_again(
    client: FakeClient, slots: MappedSlots, error: CkptdError
) -> None:
    """The present slots are gone, since the daemon may have freed them to make room."""
    assert slots.ensure(10, FAR)
    client.errors = [error]
    with pytest.raises(type(error), match=f"^{error}$"):
        slots.ensure(1_000_000, FAR)
    assert (slots.names, slots.fit(0), [descriptor.closed for descriptor in client.given]) == (
        [],
        False,
        [True] * 4,
    )
    assert slots.ensure(10, FAR)
    assert slots.names == ["2.seg", "3.seg"]


def test_segments_that_cannot_be_mapped_leave_no_descriptor_open(
    client: FakeClient, slots: MappedSlots
) -> None:
    client.spoil = lambda descriptors: os.ftruncate(descriptors[2].fileno(), 8192)
    with pytest.raises(CkptdError, match=r"^segment 1\.seg has been cut short by another process$"):
        slots.ensure(10, FAR)
    assert [descriptor.closed for descriptor in client.given] == [True] * 4


def test_a_bug_in_the_making_of_slots_is_raised_and_not_tried_again_at_once(
    client: FakeClient, slots: MappedSlots
) -> None:
    client.spoil = lambda descriptors: descriptors[2].close()
    with pytest.raises(
        InternalError,
        match=r"^the slots could not be made: ValueError\('I/O operation on closed file'\)$",
    ):
        slots.ensure(10, FAR)
    assert [descriptor.closed for descriptor in client.given] == [True] * 4
    assert len(client.asked) == 1


def test_memory_that_cannot_be_mapped_is_an_error_of_storage(
    client: FakeClient, slots: MappedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("ckptd.agent.copy.mapped_slot.map_segment", refuse)
    with pytest.raises(
        StorageError, match="^cannot map the slots in shared memory: .*Cannot allocate memory"
    ):
        slots.ensure(10, FAR)
    assert [descriptor.closed for descriptor in client.given] == [True] * 4


# -- time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(slots_module, "time", made)
    return made


def test_slots_that_take_too_long_are_made_in_the_background(
    client: FakeClient, slots: MappedSlots, clock: Clock
) -> None:
    client.answering.clear()
    assert not slots.ensure(10, clock.now)
    assert not slots.fit(10)
    client.answering.set()
    assert slots.ensure(10, clock.now + 60)
    assert (slots.fit(10), len(client.asked)) == (True, 1)


def test_a_slow_allocation_holds_the_training_once(
    client: FakeClient, slots: MappedSlots, clock: Clock
) -> None:
    """The time since the request counts, so a later snapshot that may wait as long does
    not wait at all.
    """
    client.answering.clear()
    assert not slots.ensure(10, clock.now)
    until(lambda: client.asked, "request")
    clock.now += 5.0
    assert not slots.ensure(10, clock.now + 5.0)
    slots.prepare(10)  # may wait for the stall budget of 5 s since the request
    assert len(client.asked) == 1


def test_slots_that_turn_out_too_small_are_replaced(client: FakeClient, slots: MappedSlots) -> None:
    """An earlier call needed less memory and has already asked for slots.

    They arrive, and are too small for the later call.
    """
    client.answering.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slots.ensure, 10, FAR)
        until(lambda: client.asked, "request")
        second = pool.submit(slots.ensure, 1_000_000, FAR)
        client.answering.set()
        assert (first.result(60), second.result(60)) == (True, True)
    assert [request.capacity >= 1_000_000 for request in client.asked] == [False, True]
    assert slots.fit(1_000_000)


def test_prepare_makes_slots_in_the_background_unless_the_present_ones_will_do(
    client: FakeClient, slots: MappedSlots
) -> None:
    slots.prepare(1000)
    assert slots.ensure(1000, FAR)
    slots.prepare(1000)
    slots.prepare(1_000_000)
    assert slots.ensure(1_000_000, FAR)
    assert [request.capacity for request in client.asked] == [
        1000 + 15 + (1 << 16),
        1_000_000 + 15625 + (1 << 16),
    ]


# -- accelerators


def test_device_and_node_are_those_of_the_calling_thread(
    client: FakeClient, slots: MappedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device of the thread that makes the slots is device 0."""
    asked: list[Any] = []

    def node(device: torch.device | None) -> int:
        asked.append((device, threading.get_ident()))
        return 7

    monkeypatch.setattr(slots_module, "home_node", node)
    monkeypatch.setattr(MappedSlot, "populate", lambda slot, device: asked.append(device))
    assert slots.ensure(10, FAR, CUDA)
    slots.wait()
    assert asked == [(CUDA, threading.get_ident()), CUDA, CUDA]
    assert client.asked[0].node == 7


def test_slots_for_the_cpu_are_replaced_for_copies_from_a_device(
    client: FakeClient, slots: MappedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[Any] = []

    def populate(slot: MappedSlot, device: torch.device | None) -> None:
        if slots.find(slot.name) is slot:  # an agent of an earlier test may still make its own
            locked.append(device)

    monkeypatch.setattr(MappedSlot, "populate", populate)
    assert slots.ensure(10, FAR)
    slots.wait()
    assert (slots.fit(10), slots.fit(10, CUDA)) == (True, False)
    assert slots.ensure(10, FAR, CUDA)
    assert slots.fit(10, CUDA)
    slots.prepare(10)
    assert slots.ensure(1_000_000, FAR)
    assert slots.fit(10, CUDA)
    slots.wait()
    assert locked == [None] * 2 + [CUDA] * 4


def test_the_first_slot_is_ready_before_the_second_is_faulted_in(
    client: FakeClient, slots: MappedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot need not wait for both."""
    seen: list[Any] = []

    def populate(slot: MappedSlot, device: object) -> None:
        seen.append((slot.name, [slots.get(name).ready.is_set() for name in slots.names]))

    monkeypatch.setattr(MappedSlot, "populate", populate)
    assert slots.ensure(10, FAR, CUDA)
    slots.wait()
    assert seen == [("0.seg", [False, False]), ("1.seg", [True, False])]
    assert [slots.get(name).ready.is_set() for name in slots.names] == [True, True]


def test_no_snapshot_waits_for_slots_whose_preparation_has_ended(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, MappedSlot] = {}
    preparation = Preparation(cast(Client, client), 10, 2, made, device=CUDA)

    def broken(slot: MappedSlot, device: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(MappedSlot, "populate", broken)
    with pytest.raises(RuntimeError, match="is lost"):
        preparation._run()
    assert [slot.ready.is_set() for slot in made.values()] == [True, True]
    for slot in made.values():
        slot.forget()


def test_a_slot_that_the_device_would_not_write_to_is_dropped(
    client: FakeClient,
    slots: MappedSlots,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def populate(slot: MappedSlot, device: object) -> None:
        if slot.name == "0.seg":
            raise InternalError("still locked")

    monkeypatch.setattr(MappedSlot, "populate", populate)
    assert slots.ensure(10, FAR, CUDA)
    slots.wait()
    assert (slots.names, [descriptor.closed for descriptor in client.given]) == (
        ["1.seg"],
        [True, True, False, False],
    )
    assert caplog.messages == ["a slot cannot be used: still locked"]
    # The daemon would skip every snapshot: the other slot holds the newest one.
    assert not slots.fit(10)
    assert slots.ensure(10, FAR, CUDA)
    slots.wait()
    assert slots.names == ["2.seg", "3.seg"]


# -- Ctrl-C and forks


def test_a_preparation_that_ctrl_c_kept_from_starting_is_started_by_the_next_call(
    client: FakeClient, slots: MappedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slots.ensure(10, FAR)
    assert client.asked == []
    assert slots.ensure(10, FAR)
    assert len(client.asked) == 1


def test_a_preparation_runs_once_however_often_it_is_started(client: FakeClient) -> None:
    made: dict[str, MappedSlot] = {}
    preparation = Preparation(cast(Client, client), 10, 2, made)
    client.answering.clear()
    for _ in range(5):
        preparation.start()
    client.answering.set()
    preparation.join()
    preparation.start()
    assert (len(client.asked), preparation.error, list(made)) == (1, None, ["0.seg", "1.seg"])
    for slot in made.values():
        slot.forget()


def test_a_forked_child_closes_every_descriptor_that_it_has_inherited(
    client: FakeClient, slots: MappedSlots
) -> None:
    assert slots.ensure(10, FAR)
    slots.forget()
    assert [descriptor.closed for descriptor in client.given] == [True] * 4
    assert slots.names == ["0.seg", "1.seg"]


def test_a_fork_during_an_allocation_closes_what_has_arrived(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = Preparation(cast(Client, client), 10, 2, {})
    mapped = MappedSlot

    def fork(name: str, data: Descriptor, lock: Descriptor) -> MappedSlot:
        if name == "1.seg":
            preparation.forget()
        return mapped(name, data, lock)

    monkeypatch.setattr(slots_module, "MappedSlot", fork)
    preparation._prepare()
    # The child has no such thread; here it finds its descriptors closed.
    assert isinstance(preparation.error, InternalError)
    assert [descriptor.closed for descriptor in client.given] == [True] * 4


# -- what the daemon still has


def test_slots_that_the_daemon_has_lost_are_forgotten(
    client: FakeClient, slots: MappedSlots, caplog: pytest.LogCaptureFixture
) -> None:
    assert slots.ensure(10, FAR)
    slots.keep({"1.seg", "of another rank"})
    assert (slots.names, [descriptor.closed for descriptor in client.given]) == (
        ["1.seg"],
        [True, True, False, False],
    )
    assert caplog.messages == [
        "a slot has disappeared from shared memory: a snapshot that was only in this slot is lost"
    ]
    slots.keep({"1.seg"})
    assert len(caplog.messages) == 1
    assert not slots.fit(0)
    assert slots.ensure(10, FAR)
    assert (slots.names, slots.fit(10)) == (["2.seg", "3.seg"], True)
