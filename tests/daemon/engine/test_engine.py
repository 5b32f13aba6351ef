"""Tests the requests of ranks, one by one, and all that the engine moves in two hundred
random orders of events. No processes, no files. `make trust` tries other orders.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptd.daemon.engine.engine import MOST_JOBS
from ckptd.daemon.job.ranks import Process
from ckptd.daemon.journal import records as r
from ckptd.daemon.log_events import Fact, event_of, facts_of
from ckptd.shared.errors import (
    AlreadyExists,
    Busy,
    CkptdError,
    Fenced,
    InvalidRequest,
    JobRunning,
    NotFound,
    SnapshotFailed,
    StorageError,
)
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.support import interleavings
from tests.support.core import MEMORY_TTL, RANK_TIMEOUT, Client, ConnectedRanks

LIVES = 200


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_invariants_hold_in_every_order_of_events() -> None:
    counts, violated = interleavings.run(LIVES, 0, float("inf"))
    assert violated == []
    kinds = ("granted", "skipped", "steps failed", "seal", "commit", "release")
    assert min(counts[f" {kind}"] for kind in kinds) > LIVES  # they do get somewhere


# -- requests, one by one


@pytest.fixture
def ranks() -> Iterator[ConnectedRanks]:
    made = ConnectedRanks()
    yield made
    made.core.close()


def refused(ranks: ConnectedRanks, work: Callable[[], Any]) -> CkptdError:
    """Make a request that the engine refuses, and return the error."""

    async def run() -> Any:
        made = work()
        return await made if asyncio.iscoroutine(made) else made

    with pytest.raises(CkptdError) as caught:
        ranks.core.run(run())
    return caught.value


@pytest.mark.parametrize(
    ("rank", "size", "attempt", "error", "text"),
    [
        (2, 2, 1, InvalidRequest, "rank 2 does not exist: the job has 2 ranks"),
        (0, 3, 1, InvalidRequest, "attempt 1 of job 'gpt' has 2 ranks, but this rank says 3"),
    ],
)
def test_what_a_rank_cannot_begin(
    ranks: ConnectedRanks, rank: int, size: int, attempt: int, error: type[CkptdError], text: str
) -> None:
    found = refused(
        ranks, lambda: ranks.core.engine.begin("gpt", rank, size, attempt, lambda message: None)
    )
    assert (type(found), str(found).startswith(text)) == (error, True)


def brought(ranks: ConnectedRanks, rank: int, size: int = 2, attempt: int = 2) -> Any:
    return ranks.core.engine.begin("gpt", rank, size, attempt, lambda message: None)


def test_an_attempt_of_which_this_daemon_knows_nothing_is_brought_by_its_ranks(
    ranks: ConnectedRanks,
) -> None:
    for rank in (1, 0):
        assert ranks.core.run(brought(ranks, rank)).attempt == 2
    assert (ranks.job.attempt, ranks.job.world_size) == (2, 2)
    assert sorted(ranks.job.ranks.owners) == [0, 1]
    begun = [one.attempt for one in ranks.core.journal.records if isinstance(one, r.Begun)]
    assert begun == [1, 2]
    assert isinstance(refused(ranks, lambda: brought(ranks, 0, attempt=1)), Fenced)
    other = refused(ranks, lambda: brought(ranks, 0, size=3))
    assert isinstance(other, InvalidRequest)


def test_an_attempt_that_is_brought_after_another_run_has_taken_over_is_refused(
    ranks: ConnectedRanks,
) -> None:
    ranks.core.claims.newest = 3
    assert isinstance(refused(ranks, lambda: brought(ranks, 0)), Fenced)
    assert ranks.job.attempt == 1


def test_an_attempt_of_which_only_checkpoints_tell_gets_its_ranks_from_the_first_of_them(
    ranks: ConnectedRanks,
) -> None:
    """A daemon with a stage knows an attempt by the checkpoints on the stage."""
    ranks.job.attempt, ranks.job.world_size = 2, 0
    assert ranks.core.run(brought(ranks, 1)).attempt == 2
    assert ranks.job.world_size == 2
    assert isinstance(refused(ranks, lambda: brought(ranks, 0, size=3)), InvalidRequest)


def other_run(ranks: ConnectedRanks, pid: int, wait: float | None, run: str = "") -> Any:
    """Begin the next attempt from a process, with `wait` seconds for the end of the run
    that is alive.
    """
    return ranks.core.engine.begin(
        "gpt", 0, 2, 0, lambda message: None, Process(pid, run=run), wait
    )


def test_another_run_is_refused_while_the_ranks_of_a_job_are_alive(ranks: ConnectedRanks) -> None:
    for rank, client in enumerate(ranks.clients):
        ranks.owner(client).process = Process(10 + rank, run="launch")
    found = refused(ranks, lambda: other_run(ranks, 20, 0.0))
    assert isinstance(found, JobRunning)
    assert str(found).startswith(
        "job 'gpt' is running already, in processes 10, 11: stop that run, give this one "
        "another job name"
    )
    assert ranks.job.attempt == 1
    # Torchrun has started its workers again.
    assert ranks.core.run(other_run(ranks, 20, 0.0, "launch")).attempt == 2


def test_taking_over_is_logged(ranks: ConnectedRanks, caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    for rank, client in enumerate(ranks.clients):
        ranks.owner(client).process = Process(10 + rank)
    assert ranks.core.run(other_run(ranks, 20, None)).attempt == 2
    assert caplog.messages == [
        "job 'gpt' is running already, in processes 10, 11; pid 20 takes over, and that run can "
        "no longer save"
    ]


def test_another_run_begins_as_soon_as_the_last_rank_has_left(ranks: ConnectedRanks) -> None:
    async def meet() -> int:
        waiting = asyncio.ensure_future(other_run(ranks, 20, 3600.0))
        for client in ranks.clients:
            await asyncio.sleep(0)
            assert not waiting.done()
            ranks.core.engine.detach(ranks.owner(client))
        owner = await waiting
        return int(owner.attempt)

    assert ranks.core.run(meet()) == 2


def test_of_two_runs_that_wait_one_is_refused(ranks: ConnectedRanks) -> None:
    async def meet() -> list[Any]:
        waiting = [asyncio.ensure_future(other_run(ranks, pid, 3600.0)) for pid in (20, 30)]
        await asyncio.sleep(0)
        for client in ranks.clients:
            ranks.core.engine.detach(ranks.owner(client))
        return await asyncio.gather(*waiting, return_exceptions=True)

    first, second = ranks.core.run(meet())
    assert (first.attempt, type(second)) == (2, JobRunning)
    assert "in process 20: stop that run" in str(second)


def test_a_new_attempt_ends_the_older_one(ranks: ConnectedRanks) -> None:
    """What all ranks have sealed is saved, even if a seal was not reported.

    The rest fails, and the slots are unlinked.
    """
    ranks.seal(0, 5)
    ranks.write_seal(ranks.grant(1, 5), 5)
    ranks.grant(0, 6)
    before = ranks.clients[0]
    ranks.begin(0, 0)
    assert (ranks.job.attempt, ranks.job.is_durable(1, 5), before.failures(1, 6)) == (
        2,
        True,
        [
            "a newer attempt of job 'gpt' has begun: this run can no longer save; stop it, or use "
            "another job name"
        ],
    )
    assert {slot.written.step for slot in ranks.core.segments.slots.values()} == {5}
    assert [type(record) for record in ranks.core.journal.records] == [
        r.Begun,
        r.RankSealed,
        r.Begun,
        r.RankSealed,
    ]
    assert "attempt 1 of job 'gpt' has ended, because attempt 2 has begun" in str(
        refused(ranks, lambda: ranks.core.engine.plan(ranks.owner(before), 7, ""))
    )


def test_attempts_that_seal_nothing_are_told_from_the_third_on(
    ranks: ConnectedRanks, caplog: pytest.LogCaptureFixture
) -> None:
    logging.disable(logging.NOTSET)

    def told() -> list[Fact]:
        found = [
            facts_of(record)["attempts"]
            for record in caplog.records
            if event_of(record) == "attempt.repeats"
        ]
        caplog.clear()
        return found

    for rank in (0, 1):
        ranks.seal(rank, 5)
    ranks.core.finish()
    counts = []
    for _ in range(5):
        ranks.begin(0, 0)
        counts.append(told())
    assert counts == [[], [], [], [3], [4]]
    ranks.job.sealed = (ranks.job.attempt, 6)
    ranks.begin(0, 0)
    assert told() == []


def test_a_daemon_that_stops_begins_nothing_and_takes_seals(ranks: ConnectedRanks) -> None:
    sealing, owner = ranks.seal(0, 5), ranks.owner(ranks.clients[1])
    ranks.core.engine.stopping = True
    assert isinstance(
        refused(ranks, lambda: ranks.core.engine.begin("gpt", 0, 2, 1, lambda message: None)), Busy
    )
    assert isinstance(refused(ranks, lambda: ranks.core.engine.acquire(owner, 5, None, 0.0)), Busy)
    assert sealing.result() is False


def test_a_daemon_knows_only_so_many_jobs(ranks: ConnectedRanks) -> None:
    for number in range(MOST_JOBS):
        ranks.core.catalog.job(f"job{number}")
    assert isinstance(
        refused(ranks, lambda: ranks.core.engine.begin("new", 0, 1, 0, lambda message: None)), Busy
    )


def test_an_attempt_that_another_daemon_has_claimed_ends_and_its_memory_is_freed_in_time(
    ranks: ConnectedRanks,
) -> None:
    ranks.seal(0, 5)
    ranks.seal(1, 5)
    ranks.core.finish()
    ranks.call(lambda: ranks.core.lose_claim(ranks.job, 1))
    assert (ranks.job.attempt, ranks.job.ranks.owners, len(ranks.job.snapshots)) == (2, {}, 1)
    ranks.core.advance(MEMORY_TTL)
    assert (ranks.job.snapshots, ranks.core.segments.slots) == ([], {})


def test_a_seal_that_is_reported_again_counts_once_as_not_compared(ranks: ConnectedRanks) -> None:
    for rank, uncompared in ((0, True), (1, False)):
        owner, slot = ranks.owner(ranks.clients[rank]), ranks.grant(rank, 5)
        ranks.write_seal(slot, 5)
        for _ in range(2):
            engine = ranks.core.engine
            ranks.core.run(engine.seal(owner, slot.name, 1, 5, uncompared=uncompared))
    assert ranks.core.engine._saver.counters["uncompared"] == 1


def test_a_seal_that_is_reported_again_counts_its_stall_once(ranks: ConnectedRanks) -> None:
    for rank, held in ((0, 0.25), (1, 0.0)):
        owner, slot = ranks.owner(ranks.clients[rank]), ranks.grant(rank, 5)
        ranks.write_seal(slot, 5)
        for _ in range(2):
            ranks.core.run(ranks.core.engine.seal(owner, slot.name, 1, 5, held))
    found = ranks.core.engine._saver.stalls.distribution()
    assert (sum(found.counts), found.seconds) == (1, 0.25), "0.0 means that it is not known"


def test_the_newest_seal_of_a_rank_says_how_much_of_its_slot_is_not_locked(
    ranks: ConnectedRanks,
) -> None:
    for rank, unlocked in ((0, 7), (1, 5)):
        owner, slot = ranks.owner(ranks.clients[rank]), ranks.grant(rank, 5)
        ranks.write_seal(slot, 5)
        ranks.core.run(ranks.core.engine.seal(owner, slot.name, 1, 5, unlocked=unlocked))
    assert ranks.job.ranks.unlocked == 12
    ranks.owner(ranks.clients[0]).notify = None
    assert ranks.job.ranks.unlocked == 5


def test_larger_slots_take_back_what_was_granted_and_not_sealed(ranks: ConnectedRanks) -> None:
    owner = ranks.owner(ranks.clients[0])
    sealed, granted = ranks.grant(0, 5), ranks.grant(0, 6)
    ranks.write_seal(sealed, 5)  # its Seal message may still be on its way
    made = ranks.core.run(ranks.core.engine.allocate(owner, 2000, 2, -1))
    assert (sealed.released, granted.released, ranks.job.snapshot((1, 6))) == (False, True, None)
    assert ranks.core.run(ranks.core.engine.seal(owner, sealed.name, 1, 5)) is False
    assert ranks.core.segments.of(*owner.identity) == [sealed, *made]


def test_durable_snapshots_of_older_attempts_make_room(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.seal(1, 5)
    ranks.core.finish()
    owner, ranks.core.segments.room = ranks.owner(ranks.begin(0, 0)), 2
    assert len(ranks.core.segments.slots) == 2
    made = ranks.core.run(ranks.core.engine.allocate(owner, 1000, 2, -1))
    assert (list(ranks.core.segments.slots.values()), ranks.job.snapshots) == (made, [])
    other = ranks.owner(ranks.begin(1, 2))
    assert "no room" in str(refused(ranks, lambda: ranks.core.engine.allocate(other, 1000, 1, -1)))


def test_a_rank_that_asked_twice_gives_one_slot_back_and_the_step_goes_on(
    ranks: ConnectedRanks,
) -> None:
    owner, slots = ranks.owner(ranks.clients[0]), [ranks.grant(0, 5), ranks.grant(0, 5)]
    # It is not granted for that step.
    ranks.call(lambda: ranks.core.engine.abandon(owner, slots[0].name, 4))
    assert list(ranks.job.step((1, 5)).slots) == [slot.name for slot in slots]
    ranks.call(lambda: ranks.core.engine.abandon(owner, slots[0].name, 5))
    assert list(ranks.job.step((1, 5)).slots) == [slots[1].name]
    ranks.call(lambda: ranks.core.engine.abandon(owner, slots[1].name, 5))
    assert ranks.clients[1].failures(1, 5) == ["rank 0 could not copy its state"]


def test_a_slot_that_was_cleared_while_the_daemon_was_down_is_free_again(
    ranks: ConnectedRanks,
) -> None:
    slot = ranks.grant(0, 5)
    slot.write(SlotState.FREE)
    ranks.begin(0, 1)
    assert (ranks.job.step_in(slot.name), ranks.clients[1].failures(1, 5)) == (
        None,
        ["rank 0 could not copy its state"],
    )


def test_a_seal_needs_the_ranks_own_slot_with_that_step(ranks: ConnectedRanks) -> None:
    owner, other, slot = ranks.owner(ranks.clients[0]), ranks.grant(1, 5), ranks.grant(0, 5)
    seal = ranks.core.engine.seal
    errors = [
        refused(ranks, lambda: seal(owner, "unknown", 1, 5)),
        refused(ranks, lambda: seal(owner, other.name, 1, 5)),
        refused(ranks, lambda: seal(owner, slot.name, 1, 5)),
        refused(ranks, lambda: seal(owner, slot.name, 0, 4)),
    ]
    assert [type(error) for error in errors] == [NotFound, NotFound, InvalidRequest, NotFound]
    for rank in (0, 1):
        ranks.core.finish()
        ranks.write_seal((slot, other)[rank], 5)
        ranks.core.run(seal(ranks.owner(ranks.clients[rank]), (slot, other)[rank].name, 1, 5))
    assert ranks.core.run(seal(owner, slot.name, 1, 5)) is True


def test_a_seal_that_is_reported_again_after_its_save_failed_is_told_so(
    ranks: ConnectedRanks,
) -> None:
    ranks.seal(0, 5)
    ranks.seal(1, 5)
    ranks.core.finish("read", "check")
    next(work for work in ranks.core.work if work.what == "save").end(StorageError("full"))
    ranks.core.finish()
    slot = next(name for name, rank in ranks.job.step((1, 5)).slots.items() if rank == 0)
    assert (
        ranks.core.run(ranks.core.engine.seal(ranks.owner(ranks.clients[0]), slot, 1, 5)) is False
    )
    assert ranks.clients[0].failures(1, 5) == ["full", "full"]


def test_a_tag_is_refused_before_a_slot_is_granted(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    owner = ranks.owner(ranks.clients[0])
    known = ranks.job.step((1, 5)).snapshot
    assert known is not None
    known.tag = "best.a0001"
    assert isinstance(
        refused(ranks, lambda: ranks.core.engine.acquire(owner, 6, "best", 0.0)), AlreadyExists
    )
    assert ranks.job.step_in("gpt1r0n2") is None


def test_persist_waits_for_the_other_ranks_until_their_time_is_over(ranks: ConnectedRanks) -> None:
    ranks.seal(0, 5)
    ranks.core.finish()
    waiting = ranks.core.spawn(ranks.core.engine.persist(ranks.owner(ranks.clients[0])))
    ranks.core.advance(RANK_TIMEOUT - 1)
    assert not waiting.done()
    ranks.core.advance(2)
    assert waiting.result() is None  # nothing is sealed by all ranks, so nothing is owed
    assert ranks.clients[0].failures(1, 5) == [
        "step 5 failed: rank 1 did not seal it within 60 s: every rank must call "
        "snapshot(step=5), not only some of them"
    ]


def test_persist_of_a_snapshot_that_a_newer_one_has_replaced_meanwhile() -> None:
    ranks = ConnectedRanks(1)
    owner, newer = ranks.owner(ranks.clients[0]), ranks.grant(0, 6)
    ranks.job.step((1, 6)).snapshot = None
    older = ranks.grant(0, 5)
    for slot, step in ((older, 5), (newer, 6)):
        ranks.write_seal(slot, step)
        ranks.core.spawn(ranks.core.engine.seal(owner, slot.name, 1, step))
        if step == 5:
            ranks.core.finish("read", "check")
            waiting = ranks.core.spawn(ranks.core.engine.persist(owner))
    ranks.core.finish("read")
    next(work for work in ranks.core.work if work.what == "save").end(StorageError("full"))
    ranks.core.finish()
    assert isinstance(waiting.exception(), SnapshotFailed)
    assert ranks.core.errors == []
    assert [checkpoint.step for checkpoint in ranks.job.checkpoints.values()] == [6]
    ranks.core.close()


def test_a_snapshot_in_memory_is_checked_before_it_is_read(ranks: ConnectedRanks) -> None:
    fetch = ranks.core.engine.fetch
    ranks.seal(0, 5)
    assert isinstance(refused(ranks, lambda: fetch(ranks.owner(ranks.clients[0]), 1, 5)), NotFound)
    ranks.seal(1, 5)
    ranks.core.finish()
    assert [snapshot.step for snapshot in ranks.core.engine.memory_candidates("gpt")] == [5]
    opened = ranks.core.run(fetch(ranks.owner(ranks.clients[0]), 1, 5))
    assert [rank for rank, _ in opened] == [0, 1]
    for _, fd in opened:
        os.close(fd)
    checks = len([work for work in ranks.core.work if work.what == "check"])
    (snapshot,) = ranks.job.snapshots
    for seal in snapshot.seals.values():
        seal.checks = None  # as after a restart of the daemon
    for _, fd in ranks.core.run(fetch(ranks.owner(ranks.clients[0]), 1, 5, check=False)):
        os.close(fd)
    assert len([work for work in ranks.core.work if work.what == "check"]) == checks


def test_a_rank_that_detaches_frees_what_is_durable(ranks: ConnectedRanks) -> None:
    for rank in (0, 1):
        ranks.seal(rank, 5)
    ranks.core.finish()
    ranks.grant(1, 6)
    ranks.call(lambda: ranks.core.engine.detach(ranks.owner(ranks.clients[0])))
    assert (ranks.job.snapshots, ranks.job.ranks.gone) == ([], {0: "closed"})
    assert ranks.clients[1].failures(1, 6) == [
        "step 6 failed: rank 0 closed before it sealed the step"
    ]
    assert {slot.owner[2] for slot in ranks.core.segments.slots.values()} == {1}
    assert "rank 0 of attempt 1 of job 'gpt' has closed" in str(
        refused(
            ranks, lambda: ranks.core.engine.acquire(ranks.owner(ranks.clients[1]), 7, None, 0.0)
        )
    )


def test_a_replaced_connection_is_fenced(ranks: ConnectedRanks) -> None:
    before: Client = ranks.clients[0]
    ranks.begin(0, 1)
    assert isinstance(
        refused(ranks, lambda: ranks.core.engine.acquire(ranks.owner(before), 5, None, 0.0)), Fenced
    )


def test_a_state_that_was_released_is_not_in_memory(ranks: ConnectedRanks) -> None:
    for step in (5, 6):
        for rank in (0, 1):
            ranks.seal(rank, step)
        ranks.core.finish()
    assert [(s.step, s.state) for s in ranks.job.snapshots] == [(6, SnapshotState.DURABLE)]


def test_a_step_that_all_ranks_skip_counts_once(ranks: ConnectedRanks) -> None:
    for step in (5, 6):
        for rank in (0, 1):
            ranks.seal(rank, step)
    for rank in (0, 1):
        said = ranks.core.run(
            ranks.core.engine.acquire(ranks.owner(ranks.clients[rank]), 7, None, 0.0)
        )
        assert isinstance(said, str), said
    assert ranks.core.steps.counters["skipped"] == 1


def test_a_step_that_is_skipped_while_ranks_plan_it_counts_as_failed_alone(
    ranks: ConnectedRanks,
) -> None:
    for step in (5, 6):
        for rank in (0, 1):
            ranks.seal(rank, step)
    ranks.call(lambda: ranks.core.engine.plan(ranks.owner(ranks.clients[0]), 7, "a key is new"))
    said = ranks.core.run(ranks.core.engine.acquire(ranks.owner(ranks.clients[0]), 7, None, 0.0))
    assert isinstance(said, str), said
    counters = ranks.core.steps.counters
    assert (counters["skipped"], counters["failed"]) == (0, 1)
