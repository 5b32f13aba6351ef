"""When a trainer counts as dead, and when its memory is freed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ckptd.daemon.engine.orphans import CHECK_SECONDS
from ckptd.daemon.job.ranks import Owner
from ckptd.shared.errors import StorageError
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


def test_the_lock_counts_where_there_is_no_process_to_watch(ranks: ConnectedRanks) -> None:
    owner = ranks.owner(ranks.clients[0])
    owner.notify = None
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


def test_a_rank_that_begins_stops_the_time(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.core.finish()
    ranks.core.run(ranks.core.custody.end_owner(ranks.lose(0)))
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
