"""Tests the copies of slots of other nodes: which segments they get, when a copy is
recorded, overwritten and freed, and what the ranks are told.

The segments are real. `tests/crash/peers.py` has whole daemons and ranks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.engine import peer_copies
from ckptd.daemon.engine.peer_copies import PeerCopies
from ckptd.daemon.engine.steps import Steps
from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import RankSeal, SlotContents, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.memory.slots import Slot, Slots
from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import SegmentHeader, SlotState, read_header, write_header
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.shared.samples import sample_plan, seal
from tests.support.events import logged
from tests.support.tmpfs import seal_with_checks, tmpfs

CLAIM = "0" * 32
HERE = Membership(run_id=CLAIM, ranks=[2, 3])
PEER = Membership(run_id=CLAIM, ranks=[0, 1])
CAPACITY = 1 << 16


class Gate:
    """A gate that is open, until `shut`. `reached` is set once a call waits for it."""

    def __init__(self) -> None:
        self._open, self.reached = asyncio.Event(), asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.reached.set()
        await self._open.wait()


class Node:
    """The daemon of ranks 2 and 3 in attempt 2 of a job of four ranks.

    `told` has what each rank is told. `making` is the gate before a segment is made, and
    `reading` the one before a sealed slot is read.
    """

    def __init__(self, directory: Path, quota: int = 1 << 30) -> None:
        self._directory, self._quota = directory, quota
        self.start(2)

    def start(self, attempt: int) -> None:
        self.slots = Slots(PosixFileSystem(), self._directory, "ckptd-test", self._quota)
        self.catalog, self.making, self.reading = Catalog(), Gate(), Gate()
        self.job = self.catalog.job("gpt")
        self.job.attempt, self.job.world_size, self.job.node = attempt, 4, HERE
        saver = cast(Any, SimpleNamespace(counters=Counter[str](), start=lambda snapshot: None))
        self.steps = Steps(self.catalog, self.slots, saver, 60.0)
        self.copies = PeerCopies(self.catalog, self.slots, self.steps, self._make, self._read)
        self.told: dict[int, list[m.Notification]] = {rank: [] for rank in HERE.ranks}
        self.owners = [self.join(rank) for rank in HERE.ranks]
        self.owner = self.owners[0]

    async def restart(self, attempt: int = 2) -> None:
        """End, and start the next daemon in this attempt of the job."""
        self.slots.close()
        self.start(attempt)
        slots = self.slots.adopt()
        for slot in slots:
            self.copies.adopt(slot)
        await self.copies.record_adopted(slots)

    def join(self, rank: int) -> Owner:
        owner = Owner("gpt", self.job.attempt, rank, 4, self.told[rank].append)
        self.job.ranks.join(owner)
        return owner

    async def _make(self, make: Callable[[], Slot]) -> Slot:
        await self.making.passed()
        return make()

    async def _read(self, fd: int, header: SegmentHeader) -> tuple[SealedSlot, SlotContents]:
        await self.reading.passed()
        sealed = SealedSlot.read(fd, header)
        return sealed, SlotContents(header.signature, sealed.plan, ())

    # -- what the ranks do

    async def host(
        self,
        rank: int = 0,
        step: int = 5,
        *,
        attempt: int = 2,
        capacity: int = CAPACITY,
        chunk_size: int = MIN_CHUNK,
    ) -> Slot | str:
        request = m.Host(
            id=1, rank=rank, attempt=attempt, step=step, capacity=capacity, chunk_size=chunk_size
        )
        return await self.copies.host(self.owner, request)

    async def receive(self, rank: int = 0, step: int = 5, **request: Any) -> Slot:
        """Get a segment, and let the agent receive a whole copy into it."""
        slot = await self.host(rank, step)
        assert isinstance(slot, Slot), slot
        fill(slot, step, **request)
        return slot

    async def copy(self, step: int, ranks: tuple[int, ...] = (0, 1)) -> list[Slot]:
        """Receive and record the copies of these ranks."""
        slots = [await self.receive(rank, step) for rank in ranks]
        for slot in slots:
            await self.copies.hosted(self.owner, slot.name)
        return slots

    def hold(self, step: int, state: SnapshotState = SnapshotState.SEALED) -> Snapshot:
        """Hold a whole snapshot of the ranks of this node."""
        made = Snapshot(
            "gpt", self.job.attempt, step, self.tag(step), 4, persist=False, node=HERE,
            state=state, replicate=True,
        )  # fmt: skip
        made.seals = {
            rank: RankSeal(rank, f"{step}/{rank}", 1, b"", checks=[]) for rank in HERE.ranks
        }
        self.job.step(made.key).snapshot = made
        return made

    def follow(self, **answer: Any) -> None:
        """Take an answer from the board, as the engine does."""
        before = self.job.answer
        self.steps.take_answer(self.job, Answer(**answer))
        self.copies.follow(self.job, before)

    def commit(self, step: int) -> None:
        """Have a checkpoint of a step on the storage."""
        attempt, tag = self.job.attempt, self.tag(step)
        self.job.commit(StoredCheckpoint("gpt", tag, attempt, step, step, 1, (), user_tag=False))

    def tag(self, step: int) -> str:
        return names.tag_directory(step, None, self.job.attempt)

    def begin_attempt(self, attempt: int) -> None:
        """Begin a later attempt, as the engine does."""
        self.job.attempt, self.job.answer = attempt, Answer()
        self.copies.end_attempt(self.job)
        self.job.ranks.retire(attempt)
        self.owners = [self.join(rank) for rank in HERE.ranks]
        self.owner = self.owners[0]

    def news(self, rank: int) -> list[m.PeerReplicas]:
        return [message for message in self.told[rank] if isinstance(message, m.PeerReplicas)]

    # -- what is there

    def replicas(self) -> dict[int, SnapshotState]:
        """Return the state of each peer replica, by its step."""
        return {key[1]: each.state for (key, _), each in self.job.peer_replicas.items()}

    def held(self, rank: int = 0) -> list[Slot]:
        return self.slots.of("gpt", self.job.attempt, rank)


def fill(slot: Slot, step: int, *, node: Membership | None = PEER, tag: str | None = None) -> None:
    """Receive a whole copy into a segment, as an agent does."""
    seal_with_checks(
        slot.fd, sample_plan(), SnapshotRequest(node=node, tag=tag, replicate=True), step=step
    )


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs() as made:
        yield made.directory


@pytest.fixture
def node(shm: Path) -> Iterator[Node]:
    made = Node(shm)
    yield made
    made.slots.close()


async def wait_until_blocked(task: asyncio.Task[Any]) -> None:
    """Run the loop until a task can go on by nothing but a change."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done(), task


# -- a segment for a copy


async def test_a_segment_for_a_copy_is_made(node: Node) -> None:
    slot = await node.host(rank=1, step=5)
    assert isinstance(slot, Slot)
    header = read_header(slot.fd)
    assert (header.job, header.attempt, header.rank) == ("gpt", 2, 1)
    assert (header.world_size, header.capacity, header.chunk_size) == (4, CAPACITY, MIN_CHUNK)
    assert header.peer_replica
    assert header.state is SlotState.FREE
    assert node.slots.get(slot.name) is slot


async def test_a_segment_that_is_given_back_is_used_for_the_next_copy(node: Node) -> None:
    slot = await node.host(step=5)
    assert isinstance(slot, Slot)
    node.copies.give_back(node.owner, slot.name)
    assert await node.host(step=6, capacity=CAPACITY - 1) is slot


async def test_a_copy_that_its_rank_has_given_up_frees_its_segment(node: Node) -> None:
    assert await node.host(step=5) is await node.host(step=6)


async def test_ranks_have_segments_of_their_own(node: Node) -> None:
    assert await node.host(rank=0) is not await node.host(rank=1)


@pytest.mark.parametrize("needs", [{"capacity": 2 * CAPACITY}, {"chunk_size": 2 * MIN_CHUNK}])
async def test_a_free_segment_that_does_not_fit_is_replaced(
    node: Node, needs: dict[str, int]
) -> None:
    (whole,), unfit = await node.copy(5, ranks=(0,)), await node.host(step=6)
    assert isinstance(unfit, Slot)
    fitting = await node.host(step=6, **needs)
    assert isinstance(fitting, Slot)
    assert unfit.released
    assert node.held() == [whole, fitting]
    assert {name: getattr(fitting.header, name) for name in needs} == needs


async def test_a_needed_copy_is_not_overwritten(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_copies, "WAIT_SECONDS", 0.01)
    await node.copy(5)
    await node.copy(6)
    assert await node.host(step=7) == (
        "both segments for copies of rank 0 are needed: they hold step 5 and step 6"
    )
    assert node.replicas() == {5: SnapshotState.SEALED, 6: SnapshotState.SEALED}


async def test_a_needless_copy_is_overwritten(node: Node) -> None:
    old = await node.copy(5)
    await node.copy(6)
    node.follow(replicated=[5, 6])
    assert await node.host(step=7) is old[0]
    assert node.replicas() == {6: SnapshotState.SEALED}
    assert await node.host(rank=1, step=7) is old[1]


async def test_a_rank_waits_until_a_copy_is_needless(node: Node) -> None:
    old = await node.copy(5)
    await node.copy(6)
    waiting = asyncio.create_task(node.host(step=7))
    await wait_until_blocked(waiting)
    node.follow(replicated=[5, 6], replicating=7)
    assert await waiting is old[0]


async def test_two_requests_of_a_rank_get_two_segments(node: Node) -> None:
    node.making.shut()
    hosts = [asyncio.create_task(node.host(step=5)) for _ in range(2)]
    await wait_until_blocked(hosts[1])
    node.making.open()
    slots = [await host for host in hosts]
    assert slots[0] is not slots[1]
    assert {slot.header.slot for slot in slots if isinstance(slot, Slot)} == {0, 1}


async def test_a_rank_waits_until_a_segment_is_given_back(node: Node) -> None:
    await node.copy(5, ranks=(0,))
    node.making.shut()
    first, second = [asyncio.create_task(node.host(step=6)) for _ in range(2)]
    await wait_until_blocked(second)
    node.making.open()
    slot = await first
    assert isinstance(slot, Slot)
    await wait_until_blocked(second)
    node.copies.give_back(node.owner, slot.name)
    assert await second is slot


async def test_a_quota_that_is_too_small_is_a_reason(shm: Path) -> None:
    node = Node(shm, quota=1 << 12)
    reason = await node.host()
    assert isinstance(reason, str)
    assert "0 B of the quota of 4.1 kB are taken" in reason
    assert node.job.receiving == {}
    node.slots.close()


@pytest.mark.parametrize("rank", [2, 3, 4])
async def test_only_a_rank_of_another_node_can_have_a_copy(node: Node, rank: int) -> None:
    with pytest.raises(InvalidRequest, match=f"rank {rank} cannot have a copy on this node"):
        await node.host(rank=rank)


async def test_a_job_of_one_node_has_no_copies(node: Node) -> None:
    node.job.node = None
    with pytest.raises(InvalidRequest, match="a job of several nodes"):
        await node.host()


async def test_a_chunk_size_that_no_slot_can_have_is_refused(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="no segment can be made for this copy"):
        await node.host(chunk_size=1)


@pytest.mark.parametrize("attempt", [1, 3])
async def test_another_attempt_gets_no_segment(node: Node, attempt: int) -> None:
    reason = await node.host(attempt=attempt)
    assert reason == f"attempt {attempt} is not the newest one here, 2"


async def test_a_segment_that_is_made_for_an_attempt_that_ends_is_released(node: Node) -> None:
    node.making.shut()
    host = asyncio.create_task(node.host())
    await wait_until_blocked(host)
    node.begin_attempt(3)
    node.making.open()
    assert await host == "attempt 2 has ended"
    assert node.slots.slots == {}
    assert node.job.receiving == {}


async def test_a_segment_that_is_made_for_a_rank_that_leaves_is_released(node: Node) -> None:
    node.making.shut()
    host = asyncio.create_task(node.host())
    await wait_until_blocked(host)
    node.job.ranks.leave(node.owner, "ended")
    node.making.open()
    assert isinstance(await host, str)
    assert node.slots.slots == {}
    assert node.job.receiving == {}


# -- a copy is whole


async def test_a_replica_is_whole_once_all_ranks_of_its_node_are_copied(node: Node) -> None:
    first, second = await node.receive(0), await node.receive(1)
    await node.copies.hosted(node.owner, first.name)
    assert node.replicas() == {5: SnapshotState.FILLING}
    await node.copies.hosted(node.owner, second.name)
    assert node.replicas() == {5: SnapshotState.SEALED}
    replica = node.job.peer_replicas[(2, 5), 0]
    assert (replica.tag, replica.node, replica.peer_replica) == ("step-00000005.a0002", PEER, True)
    assert [seal.segment for seal in replica.seals.values()] == [first.name, second.name]
    assert replica.checked
    shown = node.owner.shown
    assert shown is not None
    assert shown.hosted == {5: [0]}


async def test_a_report_that_comes_again_changes_nothing(node: Node) -> None:
    (slot,) = await node.copy(5, ranks=(0,))
    await node.copies.hosted(node.owner, slot.name)
    assert list(node.job.peer_replicas[(2, 5), 0].seals) == [0]


async def test_a_report_that_comes_again_while_the_copy_is_read_is_answered(node: Node) -> None:
    slot = await node.receive()
    node.reading.shut()
    reports = [asyncio.create_task(node.copies.hosted(node.owner, slot.name)) for _ in range(2)]
    await wait_until_blocked(reports[1])
    node.reading.open()
    await asyncio.gather(*reports)
    assert list(node.job.peer_replicas[(2, 5), 0].seals) == [0]


async def test_a_copy_that_is_given_up_while_it_is_read_is_not_recorded(node: Node) -> None:
    slot = await node.receive()
    node.reading.shut()
    report = asyncio.create_task(node.copies.hosted(node.owner, slot.name))
    await wait_until_blocked(report)
    assert await node.host() is slot  # for the same step
    node.reading.open()
    with pytest.raises(NotFound, match="no copy is received into segment"):
        await report
    assert node.replicas() == {}
    fill(slot, 5)
    await node.copies.hosted(node.owner, slot.name)
    assert node.replicas() == {5: SnapshotState.FILLING}


async def test_a_copy_whose_attempt_ends_while_it_is_read_is_not_recorded(node: Node) -> None:
    slot = await node.receive()
    node.reading.shut()
    report = asyncio.create_task(node.copies.hosted(node.owner, slot.name))
    await wait_until_blocked(report)
    node.begin_attempt(3)
    node.reading.open()
    with pytest.raises(NotFound):
        await report
    assert slot.released
    assert node.replicas() == {}


def unsealed(slot: Slot) -> None:
    pass


def another_step(slot: Slot) -> None:
    fill(slot, 6)


def without_checksums(slot: Slot) -> None:
    seal(slot.fd, read_header(slot.fd), sample_plan(), request=SnapshotRequest(node=PEER))


def without_node(slot: Slot) -> None:
    fill(slot, 5, node=None)


def of_another_node(slot: Slot) -> None:
    fill(slot, 5, node=Membership(run_id=CLAIM, ranks=[1]))


@pytest.mark.parametrize(
    ("receive", "reason"),
    [
        (unsealed, "does not hold a sealed copy of step 5 of rank 0"),
        (another_step, "does not hold a sealed copy of step 5 of rank 0"),
        (without_checksums, "it has no checksums, or no node"),
        (without_node, "it has no checksums, or no node"),
        (of_another_node, "rank 0 is not among the ranks of its node: rank 1"),
    ],
)
async def test_an_unsound_copy_is_refused_and_its_segment_is_free(
    node: Node, receive: Callable[[Slot], None], reason: str
) -> None:
    slot = await node.host()
    assert isinstance(slot, Slot)
    receive(slot)
    with pytest.raises(IntegrityError, match=reason):
        await node.copies.hosted(node.owner, slot.name)
    assert node.replicas() == {}
    assert node.job.receiving == {}
    assert await node.host() is slot


async def test_the_copies_of_a_replica_have_one_tag(node: Node) -> None:
    await node.copy(5, ranks=(0,))
    slot = await node.receive(1, tag="best")
    with pytest.raises(IntegrityError, match="of another node or tag than those of rank 0"):
        await node.copies.hosted(node.owner, slot.name)
    assert node.replicas() == {5: SnapshotState.FILLING}


async def test_a_segment_into_which_nothing_is_received_is_not_found(node: Node) -> None:
    with pytest.raises(NotFound, match="there is no segment 'unknown'"):
        await node.copies.hosted(node.owner, "unknown")
    slot = await node.receive()
    node.copies.give_back(node.owner, slot.name)
    with pytest.raises(NotFound, match="no copy is received into segment"):
        await node.copies.hosted(node.owner, slot.name)


# -- this node copies its slots


def test_the_slots_are_kept_until_the_nodes_copy_another_step(node: Node) -> None:
    kept, _ = node.hold(5, SnapshotState.DURABLE), node.hold(6)
    node.follow(common=[5], replicating=5)
    assert kept.in_memory
    before = node.job.changed.count
    node.follow(common=[5, 6], replicating=6, replicated=[5])
    assert not kept.in_memory
    assert node.job.changed.count > before


def test_a_rank_that_cannot_copy_its_slot_ends_all_copies(node: Node) -> None:
    node.hold(5)
    node.follow(common=[5], replicating=5)
    node.copies.failed(node.owners[1], 1, "an earlier attempt")
    assert node.job.alone == ""
    node.copies.failed(node.owners[1], 2, "the peer is gone")
    node.copies.failed(node.owners[0], 2, "another reason")
    assert node.job.alone == f"rank 3 on {machine.host()}: the peer is gone"
    assert node.owner.shown is not None
    assert node.owner.shown.alone == f"rank 3 on {machine.host()}: the peer is gone"


def test_other_nodes_are_shown_a_failure_that_comes_late(node: Node) -> None:
    node.copies.failed(node.owner, 2, "the peer is gone")
    assert node.owner.shown is not None
    assert node.owner.shown.alone == f"rank 2 on {machine.host()}: the peer is gone"


def test_the_ranks_are_told_each_change_once(node: Node) -> None:
    node.follow(common=[5], replicating=5)
    node.follow(common=[5, 6], replicating=5)
    node.follow(common=[5, 6], replicated=[5])
    expected = [
        m.PeerReplicas(re=0, attempt=2, replicating=5),
        m.PeerReplicas(re=0, attempt=2, replicated=[5]),
    ]
    assert node.news(2) == expected
    assert node.news(3) == expected


def test_the_end_of_the_copies_is_logged_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node.follow(alone="the peer is gone")
    node.follow(common=[5], alone="the peer is gone")
    assert [event["reason"] for event in logged(caplog, "replicas.off")] == ["the peer is gone"]
    assert node.news(3) == [m.PeerReplicas(re=0, attempt=2, alone="the peer is gone")]


def test_a_rank_that_resumes_is_told_how_far_the_copies_are(node: Node) -> None:
    node.copies.tell(node.owner)
    assert node.news(2) == []
    node.follow(replicated=[5])
    resumed = node.join(3)
    node.told[3].clear()
    node.copies.tell(resumed)
    assert node.news(3) == [m.PeerReplicas(re=0, attempt=2, replicated=[5])]
    resumed.notify = None
    node.copies.tell(resumed)  # it has gone again


# -- the next daemon


async def test_whole_copies_outlive_the_daemon(node: Node) -> None:
    slots = await node.copy(5)
    await node.restart()
    assert node.replicas() == {5: SnapshotState.SEALED}
    await node.copies.hosted(node.owner, slots[0].name)  # the report comes again


def begin_to_fill(slot: Slot, step: int) -> None:
    header = read_header(slot.fd)
    write_header(slot.fd, header.next(SlotState.FILLING, step=step))


async def test_a_copy_is_received_further_after_a_restart(node: Node) -> None:
    slot = await node.host()
    assert isinstance(slot, Slot)
    begin_to_fill(slot, 5)
    await node.restart()
    again = node.slots.get(slot.name)
    fill(again, 5)
    await node.copies.hosted(node.owner, again.name)
    assert node.replicas() == {5: SnapshotState.FILLING}


async def test_segments_without_a_copy_are_released_at_a_restart(node: Node) -> None:
    free, damaged, late = await node.host(0), await node.host(1), await node.receive(0, step=6)
    assert isinstance(free, Slot)
    assert isinstance(damaged, Slot)
    without_node(damaged)
    assert late is free
    await node.restart()
    assert node.replicas() == {6: SnapshotState.FILLING}
    assert list(node.slots.slots) == [late.name]


async def test_a_sealed_copy_of_no_step_is_released_at_a_restart(node: Node) -> None:
    slot = await node.receive(0)
    header = read_header(slot.fd)
    write_header(slot.fd, replace(header, generation=header.generation + 1, step=None))
    await node.restart()
    assert node.replicas() == {}
    assert list(node.slots.slots) == []


async def test_what_an_earlier_attempt_was_receiving_is_released_at_a_restart(node: Node) -> None:
    filling, _ = await node.host(0, 6), await node.copy(5, ranks=(1,))
    assert isinstance(filling, Slot)
    begin_to_fill(filling, 6)
    await node.restart(attempt=3)
    assert node.replicas() == {5: SnapshotState.FILLING}
    assert filling.name not in node.slots.slots
    assert node.job.receiving == {}


# -- memory is freed


async def test_a_new_attempt_keeps_whole_copies_and_releases_the_rest(node: Node) -> None:
    whole, (half,) = await node.copy(5), [await node.receive(0, step=6)]
    node.hold(6)
    node.follow(common=[6], replicating=6)
    node.copies.failed(node.owner, 2, "the peer is gone")
    node.begin_attempt(3)
    assert node.replicas() == {5: SnapshotState.SEALED}
    assert set(node.slots.slots) == {slot.name for slot in whole}
    assert half.released
    assert node.job.alone == ""


async def test_copies_of_an_earlier_attempt_go_once_a_newer_snapshot_is_safe(node: Node) -> None:
    await node.copy(5)
    node.begin_attempt(3)
    node.copies.settle(node.job)
    assert node.replicas() == {5: SnapshotState.SEALED}
    node.hold(6)
    node.commit(6)
    node.copies.settle(node.job)
    assert node.replicas() == {}
    assert node.slots.slots == {}


async def test_needless_copies_go_once_the_ranks_have_closed_their_agents(node: Node) -> None:
    await node.copy(5)
    await node.copy(6)
    node.follow(replicated=[5, 6])
    node.copies.settle(node.job)
    assert sorted(node.replicas()) == [5, 6]  # a rank here overwrites it
    for owner in node.owners:
        node.job.ranks.leave(owner, "closed")
    node.copies.settle(node.job)
    assert node.replicas() == {6: SnapshotState.SEALED}
    assert len(node.slots.slots) == 2
    node.commit(6)
    node.copies.settle(node.job)
    assert node.slots.slots == {}


async def test_a_replica_that_nobody_completes_any_more_is_freed(node: Node) -> None:
    await node.copy(5, ranks=(0,))
    half = await node.receive(1)
    node.job.ranks.leave(node.owners[0], "ended")
    node.copies.settle(node.job)
    assert node.replicas() == {5: SnapshotState.FILLING}  # the other rank may complete it
    assert not half.released
    node.job.ranks.leave(node.owners[1], "ended")
    node.copies.settle(node.job)
    assert node.replicas() == {}
    assert node.slots.slots == {}


async def test_a_new_attempt_frees_replicas_that_are_not_whole(node: Node) -> None:
    whole = [*await node.copy(5), *await node.copy(6, ranks=(0,))][:2]
    node.begin_attempt(3)
    assert node.replicas() == {5: SnapshotState.SEALED}
    assert set(node.slots.slots) == {slot.name for slot in whole}


async def test_a_copy_that_is_read_is_not_freed(node: Node) -> None:
    await node.copy(5)
    replica = node.job.peer_replicas[(2, 5), 0]
    node.commit(5)
    for owner in node.owners:
        node.job.ranks.leave(owner, "closed")
    with replica.held():
        node.copies.settle(node.job)
        assert node.replicas() == {5: SnapshotState.SEALED}
    node.copies.settle(node.job)
    assert node.replicas() == {}


async def test_free_says_whether_it_has_freed_a_replica(node: Node) -> None:
    await node.copy(5)
    assert not node.copies.free(node.job, [])
    assert node.copies.free(node.job, [node.job.peer_replicas[(2, 5), 0]])
    assert node.replicas() == {}
