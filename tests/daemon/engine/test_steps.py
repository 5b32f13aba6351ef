"""What each action does to a step, its slots, its timer and the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ckptd.daemon.engine import steps
from ckptd.daemon.job import decisions as d
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.shared.errors import SnapshotFailed
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import Event, SnapshotState
from ckptd.shared.wire.messages import Progress, Waiting
from tests.support.core import RANK_TIMEOUT, Client, Core, Segment
from tests.support.events import logged

KEY = (1, 5)


class Made:
    """A job of two ranks, both connected.

    Each has two slots, and one of them is in step 5.
    """

    def __init__(self) -> None:
        self.core = Core()
        self.job: Job = self.core.catalog.job("gpt")
        self.job.attempt, self.job.world_size = 1, 2
        self.clients = [Client(self.core), Client(self.core)]
        self.slots: list[Segment] = []
        for rank, client in enumerate(self.clients):
            client.owner = Owner("gpt", 1, rank, 2, client.notify)
            self.job.ranks.join(client.owner)
            for number in range(2):
                header = SegmentHeader(
                    job="gpt",
                    attempt=1,
                    rank=rank,
                    world_size=2,
                    slot=number,
                    capacity=1000,
                    chunk_size=MIN_CHUNK,
                )
                self.slots.append(self.core.segments.add(self.core.segments.create(header, -1)))
            self.job.occupy(self.slots[-1].name, rank, KEY)
        self.step = self.job.step(KEY)

    def snapshot(self, *sealed: int, state: SnapshotState = SnapshotState.FILLING) -> Snapshot:
        self.step.snapshot = Snapshot(
            "gpt", *KEY, "step-00000005.a0001", 2, persist=True, state=state
        )
        self.step.snapshot.seals = {
            rank: RankSeal(rank, self.slots[2 * rank + 1].name, 1, bytes(32)) for rank in sealed
        }
        return self.step.snapshot

    def perform(self, *actions: d.Action) -> None:
        async def run() -> None:
            self.core.steps.perform(self.job, actions)

        self.core.loop.run_until_complete(run())


@pytest.fixture
def made() -> Iterator[Made]:
    here = Made()
    yield here
    here.core.close()


def test_the_ranks_are_not_told_that_the_save_of_a_copy_has_failed(made: Made) -> None:
    copy = made.snapshot(0, 1, state=SnapshotState.FAILED)
    copy.peer_replica = True
    made.core.steps.tell(copy)
    assert [client.told for client in made.clients] == [[], []]
    assert made.job.last_failure is None


def test_a_timer_fails_its_step_when_it_ends(made: Made) -> None:
    made.perform(d.StartTimer(KEY, 15.0))
    made.core.advance(RANK_TIMEOUT + 14.0)
    assert made.step.failure is None
    made.core.advance(2.0)
    reason = (
        "step 5 failed: ranks 0, 1 did not seal it within 60 s: every rank must call "
        "snapshot(step=5), not only some of them"
    )
    assert made.step.failure == ("snapshot-failed", reason)
    assert [client.failures(1, 5) for client in made.clients] == [[reason]] * 2
    assert (made.step.slots, made.step.timer, made.core.loop.timers()) == ({}, None, [])


def test_ranks_are_told_once_which_rank_has_not_come(made: Made) -> None:
    made.job.occupy(made.slots[3].name, 1, (1, 4))  # rank 1 is at step 4 still
    made.perform(d.StartTimer(KEY))
    made.core.advance(steps.WAIT_SECONDS - 0.1)
    assert [client.warned for client in made.clients] == [[], []]
    made.core.advance(0.2)
    assert [client.warned for client in made.clients] == [
        [Waiting(re=0, attempt=1, step=5, ranks=[1])]
    ] * 2
    made.core.advance(steps.WAIT_SECONDS + 1)
    assert [len(client.warned) for client in made.clients] == [1, 1]
    assert (made.step.failure, [client.told for client in made.clients]) == (None, [[], []])


def test_a_rank_that_has_a_slot_and_copies_is_not_missing(made: Made) -> None:
    made.perform(d.StartTimer(KEY))
    made.core.advance(RANK_TIMEOUT - 1)
    assert [client.warned for client in made.clients] == [[], []]


def test_nobody_is_missing_in_a_step_that_all_ranks_have_sealed_or_that_has_failed(
    made: Made,
) -> None:
    made.job.occupy(made.slots[3].name, 1, (1, 4))
    made.perform(d.StartTimer(KEY))
    made.perform(d.EndWait(KEY))
    assert (made.step.watch, made.core.loop.timers()) == (None, [])
    made.perform(d.StartTimer(KEY), *d.fail(made.step, SnapshotFailed("no")))
    made.core.advance(RANK_TIMEOUT)
    assert [client.warned for client in made.clients] == [[], []]


def shown(made: Made) -> list[tuple[dict[int, list[int]], list[int]]]:
    """Return, for each holding that was sent to the board, the ranks that have not come
    and the overdue steps.
    """
    return [(each.begun, each.overdue) for each in made.clients[0].holdings]


def test_a_node_shows_others_that_it_has_begun_a_step_and_later_that_it_waits(made: Made) -> None:
    """The other nodes must know that the node has begun, before they may ask for its
    ranks.
    """
    made.job.node, made.job.world_size = Membership(run_id="0a" * 16, ranks=[0, 1]), 4
    made.job.occupy(made.slots[3].name, 1, (1, 4))
    made.perform(d.StartTimer(KEY))
    made.core.advance(steps.BEGUN_SECONDS + 0.1)
    made.core.advance(steps.WAIT_SECONDS - 0.2)
    assert shown(made) == [({}, []), ({5: [1]}, [])]
    made.perform(d.EndWait(KEY))  # the other node may be missing
    made.core.advance(0.2)
    assert shown(made)[2:] == [({5: [1]}, [5])]
    assert [client.warned for client in made.clients] == [[], []]


def test_the_answer_from_the_board_says_which_ranks_of_all_nodes_have_not_come(made: Made) -> None:
    made.job.node, made.job.world_size = Membership(run_id="0a" * 16, ranks=[0, 1]), 4

    async def hear(*answers: Answer) -> None:
        for answer in answers:
            made.core.steps.take_answer(made.job, answer)

    missing = Answer(missing={5: [1, 2, 3]})
    made.core.loop.run_until_complete(hear(missing, missing, Answer(missing={5: [3]})))
    assert [client.warned for client in made.clients] == [
        [Waiting(re=0, attempt=1, step=5, ranks=[1, 2, 3])]
    ] * 2


def test_a_settled_step_has_no_timer_and_nobody_plans_it(made: Made) -> None:
    made.perform(d.StartTimer(KEY))
    made.step.plan_again(0, "w grew")
    made.step.keep_plan(1)
    before = made.job.changed.count
    made.perform(d.EndWait(KEY))
    assert (made.step.timer, made.step.planned, made.step.kept, made.core.loop.timers()) == (
        None,
        {},
        set(),
        [],
    )
    assert made.job.changed.count > before


def test_the_last_seal_moves_the_watermark_of_the_job(made: Made) -> None:
    snapshot = made.snapshot(0, 1)
    before = made.job.changed.count
    made.perform(d.Move(KEY, Event.SEAL))
    assert made.job.changed.count > before
    assert (snapshot.state, made.job.sealed, made.core.steps.counters["sealed"]) == (
        SnapshotState.SEALED,
        KEY,
        1,
    )
    made.perform(d.Move(KEY, Event.COMMIT))
    assert (snapshot.state, made.core.steps.counters["sealed"]) == (SnapshotState.DURABLE, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_the_reason_of_a_failure_is_kept_for_late_ranks(made: Made, size: int) -> None:
    made.job.world_size = size
    snapshot = made.snapshot(0)
    made.perform(d.Fail(KEY, "storage", "full"))
    assert (snapshot.state, snapshot.reason, snapshot.code) == (
        SnapshotState.FAILED,
        "full",
        "storage",
    )
    assert made.step.failure == (("storage", "full") if size > 1 else None)
    assert made.core.steps.counters["failed"] == 1


def test_every_connected_rank_is_told(made: Made) -> None:
    made.clients[1].owner.notify = None  # type: ignore[union-attr]
    message = Progress(re=0, attempt=1, step=5, state="durable")
    made.perform(d.Tell(message))
    assert [client.told for client in made.clients] == [[message], []]


def test_a_freed_slot_stays_with_its_owner(made: Made) -> None:
    slot = made.slots[1]
    before = made.job.changed.count
    made.perform(d.Free(KEY, slot.name))
    assert (slot.released, made.job.step_in(slot.name)) == (False, None)
    assert made.job.changed.count > before


def test_a_freed_slot_is_unlinked_if_a_larger_one_has_replaced_it_or_its_owner_has_left(
    made: Made,
) -> None:
    outgrown, ownerless = made.slots[1], made.slots[3]
    outgrown.outgrown = True
    made.job.ranks.owners.pop(1)
    made.perform(d.Free(KEY, outgrown.name), d.Free(KEY, ownerless.name))
    assert (outgrown.released, ownerless.released) == (True, True)
    assert made.job.steps == {}


def test_a_slot_that_is_in_another_step_by_now_is_not_freed(made: Made) -> None:
    slot = made.slots[1]
    made.job.occupy(slot.name, 0, (1, 6))
    made.perform(d.Free(KEY, slot.name))
    assert made.job.step_in(slot.name) is made.job.step((1, 6))


def test_a_released_snapshot_leaves_memory_with_all_its_slots(made: Made) -> None:
    snapshot = made.snapshot(0, 1, state=SnapshotState.DURABLE)
    made.perform(d.Release(KEY))
    assert (snapshot.state, made.job.snapshots, made.job.steps) == (SnapshotState.RELEASED, [], {})
    assert [slot.released for slot in made.slots] == [False] * 4


def test_a_step_in_memory_that_is_sealed_after_another_node_has_failed_it_fails(made: Made) -> None:
    """The answer of the board came before the step began here, so that there was
    nothing to fail then.
    """
    made.job.node = Membership(run_id="0a" * 16, ranks=[0, 1])
    made.job.answer = Answer(dead={5: ("storage", "rank 2 on node1: disk full")})
    snapshot = made.snapshot(0, 1, state=SnapshotState.SEALED)
    snapshot.persist = False
    made.core.steps.release_replaced(made.job)
    assert (snapshot.state, snapshot.reason) == (
        SnapshotState.RELEASED,
        "rank 2 on node1: disk full",
    )
    assert [(message.step, message.state, message.code) for message in made.clients[0].told] == [
        (5, "failed", "storage")
    ]
    assert made.job.step_in(made.slots[1].name) is None


def test_a_save_is_started_once(made: Made) -> None:
    snapshot = made.snapshot(0, 1, state=SnapshotState.SEALED)
    made.perform(d.Save(KEY), d.Save(KEY))
    assert list(made.core.saver.running) == [snapshot]
    made.core.finish()
    assert (snapshot.state, [len(client.told) for client in made.clients]) == (
        SnapshotState.DURABLE,
        [1, 1],
    )


def test_an_error_is_raised_after_the_actions_before_it(made: Made) -> None:
    error = SnapshotFailed("no")
    with pytest.raises(SnapshotFailed) as caught:
        made.perform(
            d.Free(KEY, made.slots[1].name), d.Free(KEY, made.slots[3].name), d.Raise(error)
        )
    assert caught.value is error
    assert made.job.steps == {}


def test_an_owner_that_ends_leaves_no_free_slot(made: Made) -> None:
    owner = made.clients[0].owner
    assert owner is not None
    made.snapshot(0)

    async def end() -> None:
        made.core.steps.end(made.job, owner, "ended")

    made.core.loop.run_until_complete(end())
    # The other one holds a seal.
    assert [slot.released for slot in made.slots] == [True, False, False, False]
    assert made.job.ranks.gone == {0: "ended"}


def test_all_timers_end_with_the_daemon(made: Made) -> None:
    made.perform(d.StartTimer(KEY), d.StartTimer((1, 6)))
    made.core.steps.close()
    assert made.core.loop.timers() == []


def test_a_job_whose_snapshots_fail_one_after_another_is_told_once(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[object]:
        return [event["step"] for event in logged(caplog, "steps.failing")]

    caplog.set_level(logging.INFO)
    for number in (1, 2):
        made.core.steps.count_failure(made.job, number, "a slot does not fit")
    assert told() == []
    made.core.steps.count_skip(made.job, 3, "no slot is free")
    made.core.steps.count_failure(made.job, 4, "a slot does not fit")
    assert told() == [3]
    assert [event["step"] for event in logged(caplog, "step.failed")] == [1, 2, 4]
    assert caplog.messages[2].endswith(
        "job gpt: the last 3 snapshots have failed or were skipped before they were in memory: "
        "no slot is free"
    )
    made.snapshot(0, 1, state=SnapshotState.STAGED)
    made.perform(d.Move(KEY, Event.SEAL))
    assert made.job.unsealed == 0
    for number in (6, 7, 8):
        made.core.steps.count_failure(made.job, number, "a slot does not fit")
    assert told() == [3, 8]
