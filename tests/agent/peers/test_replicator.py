"""Copies run beside the training, and their failures are reported, not raised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.link.client import Client
from ckptd.agent.peers import replicator, transfer
from ckptd.agent.peers.replicator import Replicator
from ckptd.shared.errors import CkptdError, DaemonUnreachable, IntegrityError
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system import machine
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.wire import messages as m
from tests.support.daemons import until
from tests.support.pairs import CAPACITY, descriptors, fill, new_store, sealed_slot
from tests.support.scripts import Python
from tests.support.tmpfs import tmpfs


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs() as made:
        yield made.directory


class FakeClient:
    """A daemon that makes the segments that it is asked for, and keeps the requests.

    errors: raised by the next calls, in order. answer: replaces the answer to Host.
    released: whether the segments made before are gone.
    """

    def __init__(self, shm: Path) -> None:
        self.welcome = m.Welcome(re=0, version=1)
        self.shm = shm
        self.requests: list[m.Request] = []
        self.errors: list[CkptdError] = []
        self.answer: Callable[[m.Host], m.Reply] | None = None
        self.released = False
        self.made = 0
        self.last: list[Descriptor] = []

    def call(self, make: Any, kind: Any, timeout: float) -> tuple[m.Reply, Sequence[Descriptor]]:
        request: m.Request = make(len(self.requests))
        if self.errors:
            raise self.errors.pop(0)
        self.requests.append(request)
        if not isinstance(request, m.Host):
            return m.Done(re=0), ()
        if self.answer is not None:
            return self.answer(request), ()
        if request.mapped and not self.released:
            return m.Granted(re=0, segment=request.mapped[0]), ()
        return self.new_segment(request)

    def new_segment(self, request: m.Host) -> tuple[m.Reply, Sequence[Descriptor]]:
        self.made += 1
        name = f"copy-{self.made}"
        header = SegmentHeader(
            job="gpt", attempt=1, rank=0, world_size=2, slot=0, capacity=request.capacity,
            chunk_size=request.chunk_size, peer_replica=True,
        )  # fmt: skip
        self.last = list(descriptors(self.shm / name, header))
        return m.Segments(
            re=0,
            segments=[m.HeldSegment(segment=name, slot=0, capacity=request.capacity, generation=0)],
        ), self.last

    def post(self, make: Any, answered: Any) -> None:
        self.requests.append(make(len(self.requests)))

    def wait_connected(self, budget: float) -> bool:
        return True

    def of(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]


class World:
    """Rank 0, which sends to rank 1."""

    def __init__(self, shm: Path) -> None:
        self.shm, self.store = shm, new_store()
        self.slots: dict[int, MappedSlot] = {}
        self.clients = FakeClient(shm), FakeClient(shm)
        self.found: Callable[[int], MappedSlot | None] = self.slots.get
        self.sender = self.begin(0, 1, ())
        self.receiver = self.begin(1, -1, (0,))

    def begin(self, rank: int, peer: int, sources: Sequence[int]) -> Replicator:
        return Replicator(
            cast(Client, self.clients[rank]), self.store, "peers", rank, 1, peer, sources,
            lambda step: self.found(step),
        )  # fmt: skip

    def copy(self, step: int, **news: Any) -> None:
        for each in (self.sender, self.receiver):
            each.follow(m.PeerReplicas(re=0, attempt=1, replicating=step, **news))

    def copied(self, number: int) -> None:
        until(lambda: len(self.clients[1].of(m.Hosted)) >= number, "copies")
        assert len(self.clients[1].of(m.Hosted)) == number
        assert self.reports() == self.reports(1) == []

    def reports(self, rank: int = 0) -> list[str]:
        return [each.reason for each in self.clients[rank].of(m.CopyFailed)]

    def reported(self, reason: str, rank: int = 0) -> None:
        until(lambda: bool(self.reports(rank)), "a report")
        assert self.reports(rank) == [reason]

    def end(self) -> None:
        self.sender.end()
        self.receiver.end()


@pytest.fixture
def world(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(replicator, "PAIR_SECONDS", 20.0)
    made = World(shm)
    made.slots[5] = sealed_slot(shm, "a")
    yield made
    made.end()


def test_the_step_that_the_daemon_names_is_copied(world: World) -> None:
    world.copy(5)
    world.copied(1)
    (host,), (hosted,) = world.clients[1].of(m.Host), world.clients[1].of(m.Hosted)
    assert (host.rank, host.attempt, host.step, host.chunk_size) == (0, 1, 5, MIN_CHUNK)
    assert host.capacity == CAPACITY  # with the slack of the slot, so that its state may grow
    assert (host.mapped, hosted.segment) == ([], "copy-1")
    with open(world.shm / "copy-1", "rb") as file:
        header = SegmentHeader.decode(file.read(4096))
        file.seek(header.data_offset)
        data = bytearray(file.read(1000))
    assert torch.equal(torch.frombuffer(data, dtype=torch.uint8), world.slots[5].data[:1000])


def test_a_segment_that_is_mapped_is_used_again(world: World) -> None:
    world.copy(5)
    world.copied(1)
    world.copy(-1)
    fill(world.slots[5], 6)
    world.slots[6] = world.slots[5]
    world.copy(6)
    world.copied(2)
    assert [host.mapped for host in world.clients[1].of(m.Host)] == [[], ["copy-1"]]


def test_a_segment_that_the_daemon_has_released_is_unmapped(world: World) -> None:
    world.copy(5)
    world.copied(1)
    first = world.clients[1].last
    (world.shm / "copy-1").unlink()
    world.clients[1].released = True
    fill(world.slots[5], 6)
    world.slots[6] = world.slots[5]
    world.copy(6)
    world.copied(2)
    assert [descriptor.closed for descriptor in first] == [True, True]


def test_news_of_another_attempt_and_a_step_that_is_copied_change_nothing(world: World) -> None:
    world.sender.follow(m.PeerReplicas(re=0, attempt=2, replicating=5))
    world.copy(5)
    world.copied(1)
    world.copy(5)
    world.copy(3)
    world.copy(-1)
    fill(world.slots[5], 6)
    world.slots[6] = world.slots[5]
    world.copy(6)
    world.copied(2)


def test_a_slot_that_was_replaced_before_its_copy_began_is_copied(world: World) -> None:
    slot = world.slots.pop(5)
    world.sender.keep(slot)
    slot.forget()
    world.copy(5)
    world.copied(1)


@pytest.mark.parametrize(
    "news",
    [{"replicated": [7]}, {"replicating": 7}, {"alone": "the rank is alone"}],
    ids=["a newer one is copied", "a newer one is being copied", "no more copies"],
)
def test_a_replaced_slot_is_kept_only_while_it_may_be_copied(
    world: World, news: dict[str, Any]
) -> None:
    world.sender.keep(world.slots[5])
    assert list(world.sender._kept) == [5]
    world.sender.follow(m.PeerReplicas(re=0, attempt=1, **{"replicating": -1, **news}))
    assert list(world.sender._kept) == []


def test_a_replaced_slot_that_is_not_to_be_copied_is_not_kept(world: World) -> None:
    fill(world.slots[5], 5, request=SnapshotRequest().encode())
    world.sender.keep(world.slots[5])
    assert list(world.sender._kept) == []


def test_a_daemon_that_is_restarted_meanwhile_is_asked_again(world: World) -> None:
    world.clients[1].errors = [DaemonUnreachable("gone"), DaemonUnreachable("gone")]
    world.clients[0].errors = [DaemonUnreachable("gone")]
    world.copy(5)
    world.copied(1)


# -- slots that are filled again


OTHERS = [{"values": b"others"}, {"request": SnapshotRequest(persist=False).encode()}]
"""Documents of another snapshot: their bytes arrive as a damaged chunk, or document."""


@pytest.mark.parametrize("documents", OTHERS, ids=["a chunk", "a document"])
def test_a_slot_that_is_filled_again_during_its_copy_is_passed_over(
    world: World, documents: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    slot, make = world.slots[5], world.clients[1].new_segment

    def refill(request: m.Host) -> tuple[m.Reply, Sequence[Descriptor]]:
        fill(slot, 6, **documents)
        return make(request)

    world.clients[1].new_segment = refill  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "ckptd.agent"):
        world.copy(5)
        until(lambda: bool(world.clients[1].of(m.Abandon)), "the return of the segment")
        world.slots[6] = slot
        world.copy(6)
        world.copied(1)
    assert [host.step for host in world.clients[1].of(m.Host)] == [5, 6]
    assert [each.segment for each in world.clients[1].of(m.Abandon)] == ["copy-1"]
    assert caplog.text == ""


def test_a_slot_that_is_filled_again_while_its_checksums_are_read_is_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = world.slots[5]

    def refill() -> None:
        monkeypatch.undo()
        fill(slot, 6)
        world.slots[6] = slot

    monkeypatch.setattr(slot, "checks", refill)
    assert_only_step_6_is_copied(world)


def test_a_slot_that_is_filled_again_while_its_plan_is_read_is_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = world.slots[5]

    def refill(header: SegmentHeader, data: torch.Tensor) -> None:
        monkeypatch.undo()
        fill(slot, 6)
        world.slots[6] = slot
        raise IntegrityError("the plan cannot be read")

    monkeypatch.setattr(transfer, "ranges_of", refill)
    assert_only_step_6_is_copied(world)


def test_a_slot_that_is_sealed_again_after_it_was_found_is_passed_over(world: World) -> None:
    def find(step: int) -> MappedSlot | None:
        if step == 5:
            fill(world.slots[5], 6)
            world.slots[6] = world.slots[5]
        return world.slots.get(step)

    world.found = find
    assert_only_step_6_is_copied(world)


def assert_only_step_6_is_copied(world: World) -> None:
    """Copy step 5, whose slot is filled with step 6 at that instant, and then step 6."""
    world.copy(5)
    until(lambda: 6 in world.slots, "another snapshot in the slot")
    world.copy(6)
    world.copied(1)
    assert [host.step for host in world.clients[1].of(m.Host)] == [6]


@pytest.mark.parametrize(
    ("extent", "reason"),
    [
        ("values", "a chunk of step 5 has arrived damaged at the peer 3 times"),
        ("request", "a document of step 5 has arrived damaged at the peer"),
    ],
)
def test_a_slot_that_is_damaged_and_not_filled_again_ends_the_copies_with_one_sentence(
    world: World, extent: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    slot = world.slots[5]
    slot.data[getattr(slot.header, extent).offset] ^= 1
    with caplog.at_level(logging.WARNING, "ckptd.agent"):
        world.copy(5)
        world.reported(reason)
        world.copy(6)
    assert world.reports(1) == []
    assert caplog.text.count("no further copies of snapshots") == 1
    assert [each.segment for each in world.clients[1].of(m.Abandon)] == ["copy-1"]
    assert world.clients[1].of(m.Hosted) == []


# -- failures


def not_taken(reason: str) -> str:
    """Return the reason that rank 0 reports: it names the rank and the node that failed."""
    return f"rank 1 on {machine.host()} has not taken the copy: {reason}"


def refused(host: m.Host) -> m.Reply:
    return m.Refused(re=0, reason="both segments are needed")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refused, "both segments are needed"),
        (
            lambda host: m.Granted(re=0, segment="never-mapped"),
            "the daemon has answered Granted to Host",
        ),
        (lambda host: m.Segments(re=0, segments=[]), "the daemon has answered Segments to Host"),
    ],
    ids=["refused", "unknown", "none"],
)
def test_a_copy_without_a_segment_is_reported_once_by_both(
    world: World,
    answer: Callable[[m.Host], m.Reply],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world.clients[1].answer = answer
    with caplog.at_level(logging.WARNING, "ckptd.agent"):
        world.copy(5)
        world.reported(not_taken(reason))
        world.reported(reason, rank=1)
        world.copy(6)
        world.copy(7)
        until(lambda: not threads("ckptd-peer-"), "the end of the threads")
    assert [len(world.reports(rank)) for rank in (0, 1)] == [1, 1]
    assert caplog.text.count("no further copies of snapshots") == 2
    assert world.clients[1].of(m.Abandon) == []


def threads(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_a_segment_that_cannot_be_mapped_is_closed_and_reported(world: World) -> None:
    make = world.clients[1].new_segment

    def cut(request: m.Host) -> tuple[m.Reply, Sequence[Descriptor]]:
        answer = make(request)
        with open(world.shm / "copy-1", "r+b") as file:
            file.truncate(8192)
        return answer

    world.clients[1].new_segment = cut  # type: ignore[method-assign]
    world.copy(5)
    reason = "segment copy-1 has been cut short by another process"
    world.reported(reason, rank=1)
    world.reported(not_taken(reason))
    assert [descriptor.closed for descriptor in world.clients[1].last] == [True, True]


def test_a_segment_for_another_rank_is_given_back(world: World) -> None:
    make = world.clients[1].new_segment

    def other(request: m.Host) -> tuple[m.Reply, Sequence[Descriptor]]:
        answer, _ = make(request)
        header = SegmentHeader(
            job="other", attempt=1, rank=0, world_size=2, slot=0, capacity=request.capacity,
            chunk_size=request.chunk_size, peer_replica=True,
        )  # fmt: skip
        path = world.shm / "copy-1"
        path.unlink()
        return answer, descriptors(path, header)

    world.clients[1].new_segment = other  # type: ignore[method-assign]
    world.copy(5)
    world.reported(not_taken("segment copy-1 is not for copies of rank 0"))
    until(lambda: bool(world.clients[1].of(m.Abandon)), "the return of the segment")
    assert [each.segment for each in world.clients[1].of(m.Abandon)] == ["copy-1"]


def test_a_slot_that_the_daemon_has_freed_is_passed_over(world: World) -> None:
    world.copy(4)
    world.copy(5)
    world.copied(1)
    assert [host.step for host in world.clients[1].of(m.Host)] == [5]


def test_a_bug_is_logged_and_reported(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.found = lambda step: cast(MappedSlot, 1 // 0)
    world.copy(5)
    world.reported(
        "ZeroDivisionError('integer division or modulo by zero'); the log of the training has more"
    )
    assert "Traceback" in caplog.text


def test_a_peer_that_does_not_come_is_reported(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "PAIR_SECONDS", 0.5)
    client = FakeClient(shm)
    alone = Replicator(cast(Client, client), new_store(), "peers", 0, 1, 1, [1], lambda step: None)
    until(lambda: bool(client.of(m.CopyFailed)), "a report")
    (report,) = client.of(m.CopyFailed)
    assert report.reason.startswith("the connection with a peer has failed: ")
    alone.end()


def test_nothing_is_reported_after_the_end(world: World) -> None:
    world.copy(5)
    world.copied(1)
    world.end()
    world.end()
    world.copy(6)
    until(lambda: not threads("ckptd-peer-"), "the end of the threads")
    assert [world.reports(rank) for rank in (0, 1)] == [[], []]
    assert len(world.clients[1].of(m.Hosted)) == 1


def test_a_daemon_that_stays_away_does_not_hear_of_a_failure(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.clients[0].wait_connected = lambda budget: False  # type: ignore[method-assign]
    world.clients[0].errors = [DaemonUnreachable("gone")]
    world.found = lambda step: cast(MappedSlot, 1 // 0)
    world.copy(5)
    until(lambda: not threads("ckptd-peer-send"), "the end of the thread")
    assert world.reports() == []
    assert "ZeroDivisionError" in caplog.text


# -- the end of a process

PROCESS = """
import os, sys, time
from pathlib import Path
from torch.distributed import TCPStore
from ckptd.agent.peers.replicator import Replicator
from tests.agent.peers.test_replicator import FakeClient

rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
peer = 1 - rank
copies = Replicator(FakeClient(Path()), store, "peers", rank, 1, peer, [peer], lambda step: None)
meeting = store()
def meet(name):
    meeting.set(f"{name}/{rank}", b"")
    meeting.wait([f"{name}/{1 - rank}"])
time.sleep(1.0)  # until both threads wait
meet("ready")
if how == "fork":
    child = os.fork()
    if not child:
        copies = None
        sys.exit(7)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if how == "error":
    raise ValueError("a bug of the user")
if how == "exit":
    sys.exit(3)
if how == "end":
    copies.end()
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("how", "code"), [("return", 0), ("end", 0), ("exit", 3), ("error", 1), ("fork", 7)]
)
def test_a_process_with_receivers_that_wait_ends_with_its_own_exit_code(
    how: str, code: int, tmp_path: Path
) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    client = new_store()  # the server ends with it
    store = cast(Any, client())
    processes = [
        Python("-c", PROCESS, rank, store.port, how, place=tmp_path / str(rank), finalized=True)
        for rank in range(2)
    ]
    assert [process.communicate().returncode for process in processes] == [code, code]
