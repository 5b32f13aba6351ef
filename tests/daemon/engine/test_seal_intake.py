"""How seals are read and recorded, one after the other and at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.journal import records as r
from ckptd.shared.errors import (
    AlreadyExists,
    InvalidName,
    NotFound,
    SnapshotFailed,
    StorageError,
    StructureChanged,
)
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.support.core import ConnectedRanks, Segment


@pytest.fixture
def ranks() -> Iterator[ConnectedRanks]:
    made = ConnectedRanks()
    yield made
    made.core.close()


def journaled(ranks: ConnectedRanks) -> list[tuple[int, int]]:
    """The step and the rank of each seal in the journal."""
    return [
        (record.step, record.rank)
        for record in ranks.core.journal.records
        if isinstance(record, r.RankSealed)
    ]


def sealed(ranks: ConnectedRanks, rank: int, step: int) -> Segment:
    """A slot that is sealed and not reported."""
    slot = ranks.grant(rank, step)
    ranks.write_seal(slot, step)
    slot.refresh()
    return slot


def test_the_save_begins_with_the_last_seal(ranks: ConnectedRanks) -> None:
    snapshot: Snapshot = ranks.core.run(ranks.core.seals.record(sealed(ranks, 0, 5)))  # type: ignore[arg-type]
    assert (snapshot.state, snapshot.missing, ranks.core.saver.running) == (
        SnapshotState.FILLING,
        [1],
        {},
    )
    last = ranks.seal(1, 5)
    ranks.core.finish("read")
    assert (last.result(), snapshot.state, list(ranks.core.saver.running)) == (
        False,
        SnapshotState.SEALED,
        [snapshot],
    )
    assert journaled(ranks) == [(5, 0), (5, 1)]
    assert [seal.segment for seal in snapshot.seals.values()] == list(ranks.job.step((1, 5)).slots)


@pytest.mark.parametrize("adopted", [False, True])
def test_checksums_that_came_with_the_seal_count_unless_it_is_old(
    ranks: ConnectedRanks, adopted: bool
) -> None:
    slot = sealed(ranks, 0, 5)
    slot.crcs = [1, 2]
    snapshot: Snapshot = ranks.core.run(ranks.core.seals.record(slot, adopted=adopted))  # type: ignore[arg-type]
    assert snapshot.seals[0].checks == (None if adopted else [ChunkCheck(1), ChunkCheck(2)])


def test_a_seal_that_two_tasks_read_is_recorded_once(ranks: ConnectedRanks) -> None:
    slot = sealed(ranks, 0, 5)
    tasks = [ranks.core.spawn(ranks.core.seals.record(slot)) for _ in range(2)]  # type: ignore[arg-type]
    ranks.core.tick()
    assert ranks.job.step((1, 5)).reading == [slot.name] * 2
    ranks.core.finish()
    assert tasks[0].result() is tasks[1].result()
    assert journaled(ranks) == [(5, 0)]
    assert ranks.job.step((1, 5)).reading == []


def test_a_second_read_that_fails_does_not_undo_the_first(ranks: ConnectedRanks) -> None:
    slot = sealed(ranks, 0, 5)
    tasks = [ranks.core.spawn(ranks.core.seals.record(slot)) for _ in range(2)]  # type: ignore[arg-type]
    ranks.core.tick()
    first, second = [work for work in ranks.core.work if work.what == "read"]
    first.end()
    ranks.core.tick(2)
    second.end(NotFound("gone"))
    ranks.core.finish()
    assert tasks[1].result() is tasks[0].result()
    assert (ranks.job.step_in(slot.name), ranks.clients[0].told) == (ranks.job.step((1, 5)), [])


def test_a_seal_that_cannot_be_read_now_stays(ranks: ConnectedRanks) -> None:
    slot = sealed(ranks, 0, 5)
    slot.unreadable = True
    with pytest.raises(StorageError, match="cannot read the segment"):
        ranks.core.run(ranks.core.seals.record(slot))  # type: ignore[arg-type]
    assert (ranks.job.step_in(slot.name), ranks.clients[0].told) == (ranks.job.step((1, 5)), [])
    slot.unreadable = False
    assert ranks.core.run(ranks.core.seals.record_unreported(slot)) is True  # type: ignore[arg-type]
    assert journaled(ranks) == [(5, 0)]


def test_a_damaged_seal_fails_the_step_on_all_ranks(ranks: ConnectedRanks) -> None:
    slot = sealed(ranks, 0, 5)
    slot.damaged = True
    assert ranks.core.run(ranks.core.seals.record_unreported(slot)) is False  # type: ignore[arg-type]
    assert ranks.job.step_in(slot.name) is None
    assert [client.failures(1, 5) for client in ranks.clients] == [[f"{slot.name} is damaged"]] * 2
    assert journaled(ranks) == []


def test_the_ranks_are_compared_once_the_last_of_them_has_sealed(ranks: ConnectedRanks) -> None:
    ranks.core.run(ranks.core.seals.record(sealed(ranks, 0, 5)))  # type: ignore[arg-type]
    assert ranks.core.compared == []
    snapshot: Snapshot = ranks.core.run(ranks.core.seals.record(sealed(ranks, 1, 5)))  # type: ignore[arg-type]
    assert ranks.core.compared == [[0, 1]]
    # A large plan is kept no longer than needed.
    assert [seal.contents for seal in snapshot.seals.values()] == [None, None]


def test_ranks_that_do_not_fit_together_fail_the_step_before_the_seal_is_journaled(
    ranks: ConnectedRanks,
) -> None:
    first, last = sealed(ranks, 0, 5), sealed(ranks, 1, 5)
    ranks.core.run(ranks.core.seals.record(first))  # type: ignore[arg-type]
    last.misfit = True
    tasks = [ranks.core.spawn(ranks.core.seals.record(last)) for _ in range(2)]  # type: ignore[arg-type]
    ranks.core.finish()
    assert [str(task.exception()) for task in tasks] == ["'w' has a hole"] * 2
    assert [client.failures(1, 5) for client in ranks.clients] == [["'w' has a hole"]] * 2
    assert journaled(ranks) == [(5, 0)]
    assert (ranks.job.step_in(first.name), ranks.job.step_in(last.name), ranks.job.snapshots) == (
        None,
        None,
        [],
    )


def test_a_step_that_fails_while_its_seal_is_read_does_not_come_back(ranks: ConnectedRanks) -> None:
    """The slot has been granted for the next step by then, and stays in it."""
    sealing, slot = ranks.seal(0, 5), ranks.core.segments.slots["gpt1r0n1"]
    ranks.call(
        lambda: ranks.core.engine.pass_over(
            ranks.owner(ranks.clients[1]), 5, "no memory left", "storage"
        )
    )
    assert ranks.job.step_in(slot.name) is None
    reading = next(work for work in ranks.core.work if work.what == "read")
    ranks.job.occupy(slot.name, 0, (1, 6))
    reading.end()
    ranks.core.finish()
    assert str(sealing.exception()) == "rank 1: no memory left"
    assert ranks.job.step_in(slot.name) is ranks.job.step((1, 6))
    assert (journaled(ranks), ranks.job.snapshots) == ([], [])


def test_a_job_of_one_rank_whose_slot_is_taken_back_while_its_seal_is_read() -> None:
    ranks = ConnectedRanks(1)
    sealing = ranks.seal(0, 5)
    ranks.call(
        lambda: ranks.core.engine.pass_over(ranks.owner(ranks.clients[0]), 5, "interrupted", "")
    )
    ranks.core.finish()
    assert isinstance(sealing.exception(), NotFound)
    assert (journaled(ranks), ranks.job.snapshots, ranks.job.steps) == ([], [], {})
    ranks.core.close()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("plan", b"another", StructureChanged),
        ("persist", False, SnapshotFailed),
        ("tag", "best", SnapshotFailed),
        ("tag", "../x", InvalidName),
    ],
)
def test_a_rank_that_differs_fails_the_step(
    ranks: ConnectedRanks, name: str, value: object, error: type[Exception]
) -> None:
    ranks.seal(0, 5)
    ranks.core.finish("read")
    slot = sealed(ranks, 1, 5)
    setattr(slot, name, value)
    with pytest.raises(error):
        ranks.core.run(ranks.core.seals.record(slot))  # type: ignore[arg-type]
    assert (ranks.job.snapshots, ranks.job.step_in(slot.name)) == ([], None)
    assert [len(client.failures(1, 5)) for client in ranks.clients] == [1, 1]


def test_a_taken_tag_fails_the_step(ranks: ConnectedRanks) -> None:
    for rank in (0, 1):
        ranks.seal(rank, 5)
    ranks.core.finish()
    slot = sealed(ranks, 0, 6)
    slot.tag = "5"
    (known,) = ranks.job.checkpoints.values()
    ranks.job.checkpoints["5.a0001"] = known
    with pytest.raises(AlreadyExists, match="tag '5.a0001' of job 'gpt' is taken"):
        ranks.core.run(ranks.core.seals.record(slot))  # type: ignore[arg-type]


def test_what_is_not_sealed_or_not_granted_is_not_recorded(ranks: ConnectedRanks) -> None:
    filling = ranks.grant(0, 5)
    free = next(
        slot for slot in ranks.core.segments.slots.values() if ranks.job.step_in(slot.name) is None
    )
    ranks.write_seal(free, 6)
    released = ranks.grant(1, 5)
    ranks.write_seal(released, 5)
    ranks.core.segments.release(released)
    assert [
        ranks.core.run(ranks.core.seals.record_unreported(slot))  # type: ignore[arg-type]
        for slot in (filling, free, released)
    ] == [False] * 3
