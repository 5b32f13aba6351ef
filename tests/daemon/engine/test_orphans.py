"""When a trainer counts as dead, and what becomes of its slots: after its death, a
restart, a deletion, and at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ckptd.daemon.engine.orphans import BEHALF_SECONDS, CHECK_SECONDS, RETRY_SECONDS
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, StorageError
from ckptd.shared.formats.membership import Membership
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.support.core import MEMORY_TTL, ConnectedRanks, Core


@pytest.fixture
def ranks() -> Iterator[ConnectedRanks]:
    made = ConnectedRanks(1)
    yield made
    made.core.close()


def guard(ranks: ConnectedRanks, owner: Owner) -> int:
    process = os.eventfd(0)
    ranks.call(lambda: ranks.core.orphans.guard(owner, process))
    return process


def die(ranks: ConnectedRanks, process: int) -> None:
    """Let the kernel tell that a process has ended."""
    ranks.core.loop.call_soon(ranks.core.loop.readers[process])
    ranks.core.finish()


def hold_copy(ranks: ConnectedRanks, step: int) -> Snapshot:
    """Hold a whole copy of a snapshot of another node."""
    copy = Snapshot(
        "gpt", 1, step, names.tag_directory(step, None, 1), 2, persist=False,
        state=SnapshotState.SEALED, node=Membership(run_id="0" * 32, ranks=[1]), peer_replica=True,
    )  # fmt: skip
    copy.seals[1] = RankSeal(1, f"copy of step {step}", 1, b"", checks=[])
    ranks.job.peer_replicas[copy.key, 1] = copy
    return copy


def end_save(ranks: ConnectedRanks, snapshot: Snapshot, result: Exception | None) -> None:
    """End the save of a snapshot that is under way, and run what follows."""
    ranks.core.finish("read", "check")
    for work in [each for each in ranks.core.work if each.subject is snapshot]:
        work.end(result)
    ranks.core.tick(4)


def test_a_trainer_is_dead_when_the_kernel_says_so(ranks: ConnectedRanks) -> None:
    owner = ranks.owner(ranks.clients[0])
    process = guard(ranks, owner)
    ranks.lose(0)
    ranks.call(lambda: ranks.core.orphans.connection_lost(owner))
    ranks.core.advance(10 * CHECK_SECONDS)
    assert ranks.job.ranks.is_here(owner)
    die(ranks, process)
    assert (ranks.job.ranks.owners, ranks.core.segments.slots, ranks.core.loop.readers) == (
        {},
        {},
        {},
    )
    assert (ranks.core.orphans.busy, ranks.core.changes > 0) == (False, True)


def test_a_trainer_that_comes_back_is_watched_once(ranks: ConnectedRanks) -> None:
    first = guard(ranks, ranks.owner(ranks.clients[0]))
    again = ranks.begin(0, 1)
    second = guard(ranks, ranks.owner(again))
    assert list(ranks.core.loop.readers) == [second]
    with pytest.raises(OSError):
        os.fstat(first)
    ranks.call(lambda: ranks.core.orphans.unguard(ranks.owner(again).identity))
    assert ranks.core.loop.readers == {}


def test_the_memory_of_a_dead_trainer_is_tried_again_until_it_can_be_read(
    ranks: ConnectedRanks, caplog: pytest.LogCaptureFixture
) -> None:
    slot = ranks.grant(0, 5)
    ranks.write_seal(slot, 5)
    process = guard(ranks, ranks.owner(ranks.clients[0]))
    ranks.lose(0)
    slot.unreadable = True
    die(ranks, process)
    for _ in range(3):
        ranks.core.advance(CHECK_SECONDS)
    assert [record.getMessage() for record in caplog.records if record.name == "ckptd.orphans"] == [
        f"job gpt rank 0: the trainer is gone; cannot read the segment {slot.name}; it is tried "
        f"again every second"
    ]
    slot.unreadable = False
    ranks.core.advance(CHECK_SECONDS)
    ranks.core.finish()
    assert ranks.job.is_durable(1, 5)
    ranks.core.advance(CHECK_SECONDS)
    assert not ranks.core.orphans.busy


@pytest.mark.parametrize("how", ["connection_lost", "moved_on"])
def test_an_owner_of_an_earlier_attempt_is_forgotten_with_its_connection(
    ranks: ConnectedRanks, how: str
) -> None:
    before = ranks.owner(ranks.clients[0])
    ranks.begin(0, 0)
    assert ranks.job.ranks.former == [before]
    ranks.call(lambda: getattr(ranks.core.orphans, how)(before))
    ranks.core.finish()
    assert (before.notify, ranks.job.ranks.former) == (None, [])


def test_the_lock_counts_where_there_is_no_process_to_watch(ranks: ConnectedRanks) -> None:
    owner = ranks.owner(ranks.clients[0])
    ranks.call(lambda: ranks.core.orphans.connection_lost(owner))
    for _ in range(3):
        ranks.core.advance(CHECK_SECONDS)
    assert (ranks.job.ranks.is_here(owner), ranks.core.orphans.busy) == (True, True)
    ranks.lose(0)
    ranks.core.advance(CHECK_SECONDS)
    assert (ranks.job.ranks.owners, ranks.core.segments.slots) == ({}, {})
    ranks.core.advance(CHECK_SECONDS)
    assert (ranks.core.orphans.busy, ranks.core.loop.timers()) == (False, [])


def test_a_trainer_that_reconnects_is_no_longer_polled(ranks: ConnectedRanks) -> None:
    ranks.core = core = Core(ranks.core.close())
    core.start()
    assert core.orphans.busy
    ranks.begin(0, 1)
    core.advance(CHECK_SECONDS)
    assert not core.orphans.busy


def test_the_memory_of_a_dead_trainer_is_kept_for_its_time(ranks: ConnectedRanks) -> None:
    process = guard(ranks, ranks.owner(ranks.clients[0]))
    ranks.seal(0, 5)
    ranks.core.finish()
    ranks.lose(0)
    die(ranks, process)
    ranks.core.advance(MEMORY_TTL - 1)
    assert len(ranks.job.snapshots) == 1
    ranks.core.advance(2)
    assert (ranks.job.snapshots, ranks.core.segments.slots, ranks.core.loop.timers()) == (
        [],
        {},
        [],
    )


def test_memory_that_could_not_be_saved_is_kept_for_another_time(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.core.finish("read", "check")
    owner = ranks.lose(0)
    ranks.call(lambda: ranks.core.orphans.connection_lost(owner))
    ranks.core.finish("check")
    next(work for work in ranks.core.work if work.what == "save").end(StorageError("full"))
    ranks.core.finish()
    assert [snapshot.state for snapshot in ranks.job.snapshots] == [SnapshotState.FAILED]
    ranks.core.advance(MEMORY_TTL)
    ranks.core.finish()
    assert [snapshot.state for snapshot in ranks.job.snapshots] == [SnapshotState.DURABLE]
    ranks.core.advance(MEMORY_TTL)
    assert (ranks.job.snapshots, ranks.core.loop.timers()) == ([], [])


def test_a_full_disk_is_tried_again_soon_if_no_trainer_is_left(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.core.finish("read", "check")
    owner = ranks.lose(0)
    ranks.call(lambda: ranks.core.orphans.connection_lost(owner))
    ranks.core.finish("check")

    def fail() -> None:
        next(work for work in ranks.core.work if work.what == "save").end(StorageError("full"))

    fail()
    ranks.core.finish()
    for seconds in (RETRY_SECONDS, 2 * RETRY_SECONDS):
        ranks.core.advance(seconds - 1)
        assert [work.what for work in ranks.core.work] == []
        ranks.core.advance(1)
        ranks.core.finish("read", "check")
        fail()
        ranks.core.finish()
    ranks.core.advance(4 * RETRY_SECONDS)
    ranks.core.finish()
    assert [snapshot.state for snapshot in ranks.job.snapshots] == [SnapshotState.DURABLE]
    assert ranks.core.orphans._retries == {}


def test_a_full_disk_is_tried_again_soon_for_a_copy(ranks: ConnectedRanks) -> None:
    copy, owner = hold_copy(ranks, 5), ranks.lose(0)
    ranks.call(lambda: ranks.core.orphans.connection_lost(owner))
    ranks.core.tick(4)
    ranks.core.advance(BEHALF_SECONDS)
    end_save(ranks, copy, StorageError("full"))
    states = [copy.state]
    ranks.core.advance(RETRY_SECONDS)
    end_save(ranks, copy, None)
    assert [*states, copy.state] == [SnapshotState.FAILED, SnapshotState.DURABLE]
    assert ranks.core.orphans._retries == {}


@pytest.mark.parametrize("result", [None, StorageError("full"), IntegrityError("damaged")])
def test_the_save_of_a_copy_does_not_put_off_the_next_try_of_another_snapshot(
    ranks: ConnectedRanks, result: Exception | None
) -> None:
    copy = hold_copy(ranks, 4)
    ranks.seal(0, 5)
    ranks.core.finish("read", "check")
    owner, own = ranks.lose(0), ranks.job.snapshot((1, 5))
    assert own is not None
    ranks.call(lambda: ranks.core.orphans.connection_lost(owner))
    ranks.core.tick(4)
    end_save(ranks, own, StorageError("full"))
    ranks.core.advance(BEHALF_SECONDS)
    end_save(ranks, copy, result)
    assert copy.state is (SnapshotState.DURABLE if result is None else SnapshotState.FAILED)
    ranks.core.advance(RETRY_SECONDS - BEHALF_SECONDS)
    ranks.core.finish()
    assert own.state is SnapshotState.DURABLE


def test_a_rank_that_begins_stops_the_time(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.core.finish()
    ranks.core.run(ranks.core.orphans._end_owner(ranks.lose(0)))
    ranks.call(lambda: ranks.core.orphans.ensure_timer(ranks.job))
    (timer,) = ranks.core.loop.timers()
    ranks.core.advance(1.0)
    ranks.call(lambda: ranks.core.orphans.ensure_timer(ranks.job))
    assert ranks.core.loop.timers() == [timer]  # it runs already
    ranks.call(lambda: ranks.core.orphans.start_timer(ranks.job))
    assert ranks.core.loop.timers()[0].when() == timer.when() + 1.0
    ranks.core.orphans.cancel_timer("gpt")
    assert ranks.core.loop.timers() == []


def test_a_forgotten_checkpoint_of_a_dead_trainer_needs_no_time(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.core.finish()
    ranks.lose(0)
    assert ranks.core.run(ranks.core.orphans.let_go(ranks.job, "step-00000005.a0001")) == ""
    assert (ranks.core.segments.slots, ranks.core.loop.timers()) == ({}, [])


def test_nothing_is_watched_once_the_daemon_stops(ranks: ConnectedRanks) -> None:
    guard(ranks, ranks.owner(ranks.clients[0]))
    ranks.seal(0, 5)
    ranks.core.finish("read")
    ranks.call(ranks.core.orphans.watch)
    ranks.core.run(ranks.core.orphans.drain())
    ranks.core.tick(3)
    assert (ranks.core.loop.readers, ranks.core.loop.timers(), ranks.core.orphans.busy) == (
        {},
        [],
        False,
    )
    assert ranks.job.is_durable(1, 5)


TAG = "step-00000005.a0001"


@pytest.fixture
def two() -> Iterator[ConnectedRanks]:
    made = ConnectedRanks()
    yield made
    made.core.close()


def complete(two: ConnectedRanks, step: int, *, persist: bool = True) -> None:
    for rank in range(two.size):
        slot = two.grant(rank, step)
        slot.persist = persist
        two.write_seal(slot, step)
        two.core.spawn(two.core.engine.seal(two.owner(two.clients[rank]), slot.name, 1, step))
    two.core.finish()


def test_the_unreported_seals_of_a_dead_trainer_count(two: ConnectedRanks) -> None:
    two.seal(0, 5)
    two.write_seal(two.grant(1, 5), 5)
    two.grant(1, 6)
    owner = two.lose(1)
    assert two.core.run(two.core.orphans._end_owner(owner)) is two.job
    assert two.job.is_durable(1, 5)
    assert two.clients[0].failures(1, 6) == [
        "step 6 failed: rank 1 ended before it sealed the step"
    ]
    assert len(two.core.segments.of(*owner.identity)) == 1  # that of step 5
    assert (two.job.ranks.gone, two.core.run(two.core.orphans._end_owner(owner))) == (
        {1: "ended"},
        None,
    )


def test_an_owner_whose_memory_cannot_be_read_stays_until_it_can(two: ConnectedRanks) -> None:
    two.seal(0, 5)
    slot = two.grant(1, 5)
    two.write_seal(slot, 5)
    owner = two.lose(1)
    slot.unreadable = True
    with pytest.raises(StorageError, match="cannot read the segment"):
        two.core.run(two.core.orphans._end_owner(owner))
    assert two.job.ranks.is_here(owner)
    assert slot.name in two.core.segments.slots
    slot.unreadable = False
    assert two.core.run(two.core.orphans._end_owner(owner)) is two.job
    assert two.job.is_durable(1, 5)


def test_a_new_daemon_leaves_a_slot_alone_that_it_cannot_read(two: ConnectedRanks) -> None:
    two.seal(0, 5)
    slot = two.grant(1, 5)
    two.write_seal(slot, 5)
    two.core.finish("journal")
    two.core = core = Core(two.core.close())
    slot.unreadable = True
    core.start()
    assert slot.name in core.segments.slots
    slot.unreadable = False
    (owner,) = (owner for owner in two.job.ranks.owners.values() if owner.rank == 1)
    core.run(core.orphans._end_owner(owner))
    assert two.job.is_durable(1, 5)


def test_a_daemon_that_stops_leaves_a_slot_that_it_cannot_read_to_the_next_one(
    two: ConnectedRanks,
) -> None:
    complete(two, 5, persist=False)
    slot = two.grant(1, 6)
    two.write_seal(slot, 6)
    slot.unreadable = True
    two.core.run(two.core.orphans.drain())
    assert two.job.is_durable(1, 5)
    assert slot.name in two.core.segments.slots


def test_a_memory_only_snapshot_is_saved_when_its_trainer_is_dead(two: ConnectedRanks) -> None:
    complete(two, 5, persist=False)
    assert not two.job.is_durable(1, 5)
    two.core.run(two.core.orphans._end_owner(two.lose(0)))
    snapshot = two.job.snapshot((1, 5))
    assert snapshot is not None
    assert (two.job.is_durable(1, 5), snapshot.unasked) == (True, True)


def test_a_save_that_a_rank_has_requested_is_not_called_unasked(
    two: ConnectedRanks, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        two.seal(rank, 5)
    with caplog.at_level("INFO"):
        two.core.orphans._save_owed(two.job)
        two.core.run(two.core.orphans._end_owner(two.lose(0)))
    snapshot = two.job.snapshot((1, 5))
    assert snapshot is not None
    assert not snapshot.unasked
    assert "unasked" not in caplog.text


def test_a_failed_save_is_tried_again_and_only_then_the_memory_is_freed(
    two: ConnectedRanks,
) -> None:
    for rank in (0, 1):
        two.seal(rank, 5)
    two.core.finish("read", "check")
    for rank in (0, 1):
        two.core.spawn(two.core.orphans._end_owner(two.lose(rank)))
    two.core.finish("read", "check")
    next(work for work in two.core.work if work.what == "save").end(StorageError("full"))
    two.core.finish()
    snapshot = two.job.snapshot((1, 5))
    assert snapshot is not None
    assert snapshot.state is SnapshotState.FAILED
    for expected in (1, 0):  # the first time saves it, the second frees it
        two.core.advance(MEMORY_TTL)
        two.core.finish()
        assert (two.job.is_durable(1, 5), len(two.job.snapshots)) == (True, expected)


def test_a_new_daemon_goes_on_with_what_is_in_memory(two: ConnectedRanks) -> None:
    two.seal(0, 5)
    two.write_seal(two.grant(1, 5), 5)
    two.grant(0, 6)
    two.core.finish("journal")
    two.core = core = Core(two.core.close())
    core.start()
    assert [(owner.rank, owner.attempt) for owner in two.job.ranks.owners.values()] == [
        (0, 1),
        (1, 1),
    ]
    assert two.job.is_durable(1, 5)
    assert two.job.step((1, 6)).slots == {"gpt1r0n2": 0}
    assert two.job.step((1, 6)).snapshot is None


def test_a_new_daemon_keeps_no_unsealed_slot_of_an_attempt_that_is_over(
    two: ConnectedRanks,
) -> None:
    two.grant(0, 5)
    left = two.core.close()
    # The record of the next attempt was the last that the daemon did.
    left.journal.jobs["gpt"].attempt = 2
    two.core = core = Core(left)
    core.start()
    assert (core.segments.slots, two.job.steps, two.job.ranks.owners) == ({}, {}, {})


def test_a_checkpoint_is_forgotten_in_memory_if_nobody_uses_it(two: ConnectedRanks) -> None:
    complete(two, 5)
    forget = two.core.orphans.let_go
    assert "is still in the memory of a running trainer" in two.core.run(forget(two.job, TAG))
    for rank in (0, 1):
        two.lose(rank)
    snapshot = two.job.snapshot((1, 5))
    assert snapshot is not None
    with snapshot.held():
        assert "is being read" in two.core.run(forget(two.job, TAG))
    assert two.core.run(forget(two.job, TAG)) == ""
    assert (two.job.snapshots, two.core.segments.slots) == ([], {})
    assert two.core.run(forget(two.job, "no tag of ours")) == ""


@pytest.mark.parametrize("own", [True, False])
def test_the_copies_of_a_forgotten_checkpoint_are_freed(ranks: ConnectedRanks, own: bool) -> None:
    ranks.seal(0, 5 if own else 6)
    ranks.core.finish()
    ranks.lose(0)
    copy, other = hold_copy(ranks, 5), hold_copy(ranks, 4)
    with copy.held():
        reason = ranks.core.run(ranks.core.orphans.let_go(ranks.job, TAG))
    assert reason == f"the copy of checkpoint gpt/{TAG} in memory is being read"
    assert copy.in_memory
    assert ranks.core.run(ranks.core.orphans.let_go(ranks.job, TAG)) == ""
    assert list(ranks.job.peer_replicas.values()) == [other]
    assert not copy.in_memory


def test_a_copy_is_forgotten_once_its_save_has_ended(ranks: ConnectedRanks) -> None:
    ranks.core.run(ranks.core.orphans._end_owner(ranks.lose(0)))
    copy = hold_copy(ranks, 5)
    ranks.call(lambda: ranks.core.orphans._save_on_behalf(ranks.job))
    ranks.core.finish("check")
    forgetting = ranks.core.spawn(ranks.core.orphans.let_go(ranks.job, TAG))
    ranks.core.tick(4)
    assert (copy.state, forgetting.done()) == (SnapshotState.WRITING, False)
    end_save(ranks, copy, StorageError("full"))
    ranks.core.tick(4)
    assert forgetting.result() == ""
    assert ranks.job.peer_replicas == {}


def test_a_daemon_that_stops_saves_the_newest_of_each_job(two: ConnectedRanks) -> None:
    complete(two, 5, persist=False)
    two.seal(0, 6)  # rank 1 does not seal it
    two.core.run(two.core.orphans.drain())
    assert (
        [checkpoint.step for checkpoint in two.job.checkpoints.values()],
        two.core.loop.timers(),
    ) == ([5], [])


def test_a_step_that_is_sealed_while_the_daemon_stops_is_saved_too(two: ConnectedRanks) -> None:
    complete(two, 5, persist=False)
    slots = [two.grant(rank, 6) for rank in range(two.size)]
    draining = two.core.spawn(two.core.orphans.drain())
    two.core.tick(4)  # the save of step 5 is under way
    for rank, slot in enumerate(slots):
        slot.persist = False
        two.write_seal(slot, 6)
        two.core.spawn(two.core.engine.seal(two.owner(two.clients[rank]), slot.name, 1, 6))
    two.core.finish()
    assert draining.done()
    assert [checkpoint.step for checkpoint in two.job.checkpoints.values()] == [5, 6]


def test_a_daemon_that_stops_saves_its_copies_beside_its_own_snapshots(
    ranks: ConnectedRanks,
) -> None:
    """An own snapshot may wait for the receipt that only the save of a copy writes."""
    copy = hold_copy(ranks, 4)
    ranks.seal(0, 5)
    ranks.core.finish("read", "check")
    owner, own = ranks.lose(0), ranks.job.snapshot((1, 5))
    ranks.call(lambda: ranks.core.orphans.connection_lost(owner))
    ranks.core.tick(4)
    draining = ranks.core.spawn(ranks.core.orphans.drain())
    ranks.core.finish("read", "check")
    saving = [work.subject for work in ranks.core.work if work.what == "save"]
    assert saving == [own, copy]
    ranks.core.finish()
    assert draining.done()
    assert copy.state is SnapshotState.DURABLE
    assert ranks.core.loop.timers() == []


def test_a_copy_whose_last_rank_ends_while_the_daemon_stops_is_saved_too(
    ranks: ConnectedRanks,
) -> None:
    copy = hold_copy(ranks, 4)
    ranks.seal(0, 5)
    ranks.core.finish("read", "check")
    draining = ranks.core.spawn(ranks.core.orphans.drain())
    ranks.core.tick(4)
    assert copy.state is SnapshotState.SEALED
    ranks.core.spawn(ranks.core.orphans._end_owner(ranks.lose(0)))
    ranks.core.tick(4)
    own = ranks.job.snapshot((1, 5))
    assert own is not None
    end_save(ranks, own, StorageError("full"))  # otherwise step 5 makes the copy needless
    ranks.core.finish()
    assert draining.done()
    assert (copy.state, ranks.core.loop.timers()) == (SnapshotState.DURABLE, [])
