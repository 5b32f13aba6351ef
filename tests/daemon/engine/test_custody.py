"""What becomes of slots without a request of their rank: after a death, a restart, a
deletion, and at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd.shared.errors import StorageError
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.support.core import ConnectedRanks, Core

TAG = "step-00000005.a0001"


@pytest.fixture
def ranks() -> Iterator[ConnectedRanks]:
    made = ConnectedRanks()
    yield made
    made.core.close()


def complete(ranks: ConnectedRanks, step: int, *, persist: bool = True) -> None:
    for rank in range(ranks.size):
        slot = ranks.grant(rank, step)
        slot.persist = persist
        ranks.write_seal(slot, step)
        ranks.core.spawn(
            ranks.core.engine.seal(ranks.owner(ranks.clients[rank]), slot.name, 1, step)
        )
    ranks.core.finish()


def test_the_unreported_seals_of_a_dead_trainer_count(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.write_seal(ranks.grant(1, 5), 5)
    ranks.grant(1, 6)
    owner = ranks.lose(1)
    assert ranks.core.run(ranks.core.custody.end_owner(owner)) is ranks.job
    assert ranks.job.is_durable(1, 5)
    assert ranks.clients[0].failures(1, 6) == [
        "step 6 failed: rank 1 ended before it sealed the step"
    ]
    assert len(ranks.core.segments.of(*owner.identity)) == 1  # that of step 5
    assert (ranks.job.ranks.gone, ranks.core.run(ranks.core.custody.end_owner(owner))) == (
        {1: "ended"},
        None,
    )


def test_an_owner_whose_memory_cannot_be_read_stays_until_it_can(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    slot = ranks.grant(1, 5)
    ranks.write_seal(slot, 5)
    owner = ranks.lose(1)
    slot.unreadable = True
    with pytest.raises(StorageError, match="cannot read the segment"):
        ranks.core.run(ranks.core.custody.end_owner(owner))
    assert ranks.job.ranks.is_here(owner)
    assert slot.name in ranks.core.segments.slots
    slot.unreadable = False
    assert ranks.core.run(ranks.core.custody.end_owner(owner)) is ranks.job
    assert ranks.job.is_durable(1, 5)


def test_a_new_daemon_leaves_a_slot_alone_that_it_cannot_read(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    slot = ranks.grant(1, 5)
    ranks.write_seal(slot, 5)
    ranks.core.finish("journal")
    ranks.core = core = Core(ranks.core.close())
    slot.unreadable = True
    core.start()
    assert slot.name in core.segments.slots
    slot.unreadable = False
    (owner,) = (owner for owner in ranks.job.ranks.owners.values() if owner.rank == 1)
    core.run(core.custody.end_owner(owner))
    assert ranks.job.is_durable(1, 5)


def test_a_daemon_that_stops_leaves_a_slot_that_it_cannot_read_to_the_next_one(
    ranks: ConnectedRanks,
) -> None:
    complete(ranks, 5, persist=False)
    slot = ranks.grant(1, 6)
    ranks.write_seal(slot, 6)
    slot.unreadable = True
    ranks.core.run(ranks.core.custody.drain())
    assert ranks.job.is_durable(1, 5)
    assert slot.name in ranks.core.segments.slots


def test_a_memory_only_snapshot_is_saved_when_its_trainer_is_dead(ranks: ConnectedRanks) -> None:
    complete(ranks, 5, persist=False)
    assert not ranks.job.is_durable(1, 5)
    ranks.core.run(ranks.core.custody.end_owner(ranks.lose(0)))
    snapshot = ranks.job.snapshot((1, 5))
    assert snapshot is not None
    assert (ranks.job.is_durable(1, 5), snapshot.unasked) == (True, True)


def test_a_save_that_a_rank_has_requested_is_not_called_unasked(
    ranks: ConnectedRanks, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        ranks.seal(rank, 5)
    with caplog.at_level("INFO"):
        ranks.core.custody.save_owed(ranks.job)
        ranks.core.run(ranks.core.custody.end_owner(ranks.lose(0)))
    snapshot = ranks.job.snapshot((1, 5))
    assert snapshot is not None
    assert not snapshot.unasked
    assert "unasked" not in caplog.text


def test_a_failed_save_is_tried_again_and_only_then_the_memory_is_freed(
    ranks: ConnectedRanks,
) -> None:
    for rank in (0, 1):
        ranks.seal(rank, 5)
    ranks.core.finish("read", "check")
    next(work for work in ranks.core.work if work.what == "save").end(StorageError("full"))
    ranks.core.finish()
    snapshot = ranks.job.snapshot((1, 5))
    assert snapshot is not None
    assert snapshot.state is SnapshotState.FAILED
    for expected in (1, 0):  # the first time saves it, the second frees it
        ranks.call(lambda: ranks.core.custody.release_expired(ranks.job))
        ranks.core.finish()
        assert (ranks.job.is_durable(1, 5), len(ranks.job.snapshots)) == (True, expected)


def test_a_new_daemon_goes_on_with_what_is_in_memory(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.write_seal(ranks.grant(1, 5), 5)
    ranks.grant(0, 6)
    ranks.core.finish("journal")
    ranks.core = core = Core(ranks.core.close())
    core.start()
    assert [(owner.rank, owner.attempt) for owner in ranks.job.ranks.owners.values()] == [
        (0, 1),
        (1, 1),
    ]
    assert ranks.job.is_durable(1, 5)
    assert ranks.job.step((1, 6)).slots == {"gpt1r0n2": 0}
    assert ranks.job.step((1, 6)).snapshot is None


def test_a_new_daemon_keeps_no_unsealed_slot_of_an_attempt_that_is_over(
    ranks: ConnectedRanks,
) -> None:
    ranks.grant(0, 5)
    left = ranks.core.close()
    # The record of the next attempt was the last that the daemon did.
    left.journal.jobs["gpt"].attempt = 2
    ranks.core = core = Core(left)
    core.start()
    assert (core.segments.slots, ranks.job.steps, ranks.job.ranks.owners) == ({}, {}, {})


def test_a_checkpoint_is_forgotten_in_memory_if_nobody_uses_it(ranks: ConnectedRanks) -> None:
    complete(ranks, 5)
    forget = ranks.core.custody.forget_copy
    assert "is still in the memory of a running trainer" in ranks.core.run(forget(ranks.job, TAG))
    for rank in (0, 1):
        ranks.lose(rank)
    snapshot = ranks.job.snapshot((1, 5))
    assert snapshot is not None
    with snapshot.held():
        assert "is being read" in ranks.core.run(forget(ranks.job, TAG))
    assert ranks.core.run(forget(ranks.job, TAG)) == ""
    assert (ranks.job.snapshots, ranks.core.segments.slots) == ([], {})
    assert ranks.core.run(forget(ranks.job, "no tag of ours")) == ""


def test_a_daemon_that_stops_saves_the_newest_of_each_job(ranks: ConnectedRanks) -> None:
    complete(ranks, 5, persist=False)
    ranks.seal(0, 6)  # rank 1 does not seal it
    ranks.core.run(ranks.core.custody.drain())
    assert (
        [checkpoint.step for checkpoint in ranks.job.checkpoints.values()],
        ranks.core.loop.timers(),
    ) == ([5], [])


def test_a_step_that_is_sealed_while_the_daemon_stops_is_saved_too(ranks: ConnectedRanks) -> None:
    complete(ranks, 5, persist=False)
    slots = [ranks.grant(rank, 6) for rank in range(ranks.size)]
    draining = ranks.core.spawn(ranks.core.custody.drain())
    ranks.core.tick(4)  # the save of step 5 is under way
    for rank, slot in enumerate(slots):
        slot.persist = False
        ranks.write_seal(slot, 6)
        ranks.core.spawn(ranks.core.engine.seal(ranks.owner(ranks.clients[rank]), slot.name, 1, 6))
    ranks.core.finish()
    assert draining.done()
    assert [checkpoint.step for checkpoint in ranks.job.checkpoints.values()] == [5, 6]


def test_who_is_absent_and_who_holds_a_lock(ranks: ConnectedRanks) -> None:
    first, second = (ranks.owner(client) for client in ranks.clients)
    assert (ranks.core.custody.absent(), ranks.core.custody.holds_lock(first)) == ([], True)
    ranks.lose(0)
    assert (
        ranks.core.custody.absent(),
        ranks.core.custody.holds_lock(first),
        ranks.core.custody.holds_lock(second),
    ) == (
        [first],
        False,
        True,
    )
