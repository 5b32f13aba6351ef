"""Tests what the catalog knows of snapshots and checkpoints, and the decisions that
follow from it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ckptd.daemon.job.catalog import Catalog, Job, LastPart, SlotDecision, Step
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.receipt import Abandonment
from ckptd.shared.formats.reuse import StoredPart
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.names import part_file
from ckptd.shared.wire.lifecycle import Event, IllegalStep, SnapshotState
from tests.support.cases import each_case


def rank_seal(rank: int) -> RankSeal:
    return RankSeal(rank, f"{rank}.seg", 1, bytes(32))


def snapshot(
    step: int,
    state: SnapshotState = SnapshotState.SEALED,
    attempt: int = 1,
    world_size: int = 1,
    seals: int | None = None,
    persist: bool = True,
) -> Snapshot:
    made = Snapshot(
        "gpt", attempt, step, f"step-{step:08d}.a{attempt:04d}", world_size, persist, state
    )
    made.seals = {rank: rank_seal(rank) for rank in range(world_size if seals is None else seals)}
    return made


def checkpoint(
    step: int | None, attempt: int = 1, seq: int = 1, tag: str | None = None
) -> StoredCheckpoint:
    return StoredCheckpoint(
        "gpt",
        tag or f"step-{step or 0:08d}.a{attempt:04d}",
        attempt,
        step,
        seq,
        10,
        ("x",),
        tag is not None,
        100.0,
    )


def job(*snapshots: Snapshot) -> Job:
    made = Job("gpt")
    for each in snapshots:
        made.step(each.key).snapshot = each
    return made


def test_jobs_are_made_when_asked_for() -> None:
    catalog = Catalog()
    assert catalog.job("gpt") is catalog.job("gpt")
    assert catalog.job("gpt") is not catalog.job("bert")
    assert list(catalog.jobs) == ["gpt", "bert"]


# -- snapshots


def test_a_snapshot_is_complete_with_all_its_ranks() -> None:
    assert [snapshot(1, world_size=3, seals=n).complete for n in range(4)] == [
        False,
        False,
        False,
        True,
    ]
    assert snapshot(7, attempt=2).key == (2, 7)


@each_case("state", SnapshotState)
def test_a_complete_snapshot_is_in_memory_until_its_release(state: SnapshotState) -> None:
    assert snapshot(1, state).in_memory is (
        state not in (SnapshotState.FILLING, SnapshotState.RELEASED)
    )
    assert snapshot(1, state, world_size=2, seals=1).in_memory is False


def test_moves_follow_the_table_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = snapshot(5, SnapshotState.FILLING)
    with caplog.at_level(logging.DEBUG, "ckptd.catalog"):
        made.move(Event.SEAL)
        made.move(Event.WRITE)
    assert made.state is SnapshotState.WRITING
    assert caplog.messages == [
        "snapshot gpt/step-00000005.a0001: filling -> sealed",
        "snapshot gpt/step-00000005.a0001: sealed -> writing",
    ]
    with pytest.raises(IllegalStep):
        made.move(Event.COMMIT)
    assert made.state is SnapshotState.WRITING
    assert repr(made) == "<Snapshot gpt/step-00000005.a0001 writing 1/1>"


# -- steps


def last_part(attempt: int) -> LastPart:
    header = SegmentHeader(
        job="gpt", attempt=attempt, rank=0, world_size=1, slot=0, capacity=4096, chunk_size=65536
    )
    return LastPart(StoredPart(attempt, 1, [], [], []), "segment", header)


def test_the_room_for_more_checkpoints_follows_from_the_newest() -> None:
    job = Job("gpt")
    assert job.room_for(100) is None
    job.commit(checkpoint(5))
    assert (job.room_for(105), job.room_for(9), job.room_for(None)) == (10, 0, None)
    job.commit(dataclasses.replace(checkpoint(6), new_bytes=2))
    assert job.room_for(105) == 10, "the next checkpoint stores every chunk"
    job.stored[0] = last_part(checkpoint(6).attempt)
    assert job.room_for(105) == 52
    job.stored[0] = last_part(checkpoint(6).attempt + 1)
    assert job.room_for(105) == 10


def test_the_room_allows_for_the_whole_checkpoint_after_a_chain() -> None:
    job = Job("gpt")
    job.stored[0] = last_part(checkpoint(6).attempt)
    job.commit(dataclasses.replace(checkpoint(6), nbytes=1000, new_bytes=1, chain=14))
    found = [job.room_for(free) for free in (1, 2, 1001, 1002, 1003, 1018, 2018, 2019)]
    assert found == [1, 2, 2, 3, 4, 19, 20, 21]
    job.commit(dataclasses.replace(checkpoint(7), nbytes=1000, new_bytes=1, chain=60))
    assert [job.room_for(free) for free in (999, 1000)] == [0, 1], "of a version with more"


def test_a_segment_is_in_one_step() -> None:
    made = Job("gpt")
    first = made.occupy("a", 0, (1, 5))
    assert (made.step_in("a"), made.step_in("b")) == (first, None)
    second = made.occupy("a", 0, (1, 6))
    assert (made.step_in("a"), first.slots, second.slots) == (second, {}, {"a": 0})
    assert made.step((1, 6)) is second


def test_which_ranks_plan_a_step_again() -> None:
    step = Job("gpt").step((1, 5))
    step.keep_plan(0)
    step.plan_again(1, "w grew")
    step.keep_plan(1)  # its request for a slot
    assert (step.planned, step.kept) == ({1: "w grew"}, {0})
    step.plan_again(0, "b grew")
    assert (step.planned, step.kept) == ({1: "w grew", 0: "b grew"}, set())


@each_case(
    ("state", "seals", "incomplete", "filling", "sealed"),
    [
        (None, 0, True, False, False),
        (SnapshotState.FILLING, 0, True, True, False),
        (SnapshotState.FILLING, 1, True, True, True),
        (SnapshotState.SEALED, 2, False, False, True),
        (SnapshotState.FAILED, 2, False, False, True),
    ],
)
def test_how_far_a_step_is(
    state: SnapshotState | None, seals: int, incomplete: bool, filling: bool, sealed: bool
) -> None:
    step = Job("gpt").step((1, 5))
    step.snapshot = None if state is None else snapshot(5, state, world_size=2, seals=seals)
    assert step.incomplete is incomplete
    assert (step.filling, step.sealed_by(0)) == (
        step.snapshot if filling else None,
        step.snapshot if sealed else None,
    )


def test_a_record_goes_when_nothing_needs_it() -> None:
    made = Job("gpt")
    keeping: dict[str, Callable[[Step], object]] = {
        "slots": lambda step: made.occupy("a", 0, step.key),
        "reading": lambda step: step.reading.append("b"),
        "timer": lambda step: setattr(step, "timer", SimpleNamespace(cancel=lambda: None)),
        "snapshot": lambda step: setattr(step, "snapshot", snapshot(3)),
        "decision": lambda step: setattr(
            step,
            "decision",
            SlotDecision(SimpleNamespace(done=lambda: False)),  # type: ignore[arg-type]
        ),
        "failure": lambda step: setattr(step, "failure", ("storage", "full")),
        "refusal": lambda step: setattr(step, "refusal", "busy"),
    }
    for number, keep in enumerate(keeping.values()):
        keep(made.step((1, number)))
    made.step((2, 0))
    made.step((2, 1)).decision = SlotDecision(SimpleNamespace(done=lambda: True))  # type: ignore[arg-type]
    made.tidy()
    assert list(made.steps) == [(1, number) for number in range(len(keeping))]
    assert [step.idle for step in made.steps.values()] == [False] * 5 + [True] * 2


def test_the_reasons_of_the_last_64_steps_are_kept() -> None:
    made = Job("gpt")
    for number in range(100):
        made.step((1, number)).failure = ("storage", "full")
    made.occupy("a", 0, (1, 3))
    made.tidy()
    assert list(made.steps) == [(1, 3), *((1, number) for number in range(36, 100))]


# -- checkpoints


def test_a_checkpoint_has_the_fields_of_its_manifest() -> None:
    parts = [
        PartEntry(
            rank=rank,
            file=part_file(rank, bytes(16)),
            bytes=100 + rank,
            raw_bytes=5,
            items=1,
            index_sha256="0" * 64,
            linked_bytes=60,
            chain=3 * rank,
            read_bytes=200 * (1 - rank),
        )
        for rank in (0, 1)
    ]
    manifest = Manifest(
        job="gpt", attempt=2, step=1000, tag="best.a0002", seq=7, world_size=2,
        created="1970-01-01T00:01:40+00:00", parts=parts, metadata={}, metrics={},
        user_content=None, writer={},
    )  # fmt: skip
    made = StoredCheckpoint.of(manifest)
    assert made == StoredCheckpoint(
        "gpt",
        "best.a0002",
        2,
        1000,
        7,
        201,
        (parts[0].file, parts[1].file),
        True,
        100.0,
        new_bytes=81,
        chain=3,
        restored_bytes=301,
    )
    assert made.order == (2, 1000, 7) == manifest.order
    assert checkpoint(None, seq=4).order == (1, -1, 4)


def test_the_newest_checkpoint_is_by_attempt_and_step() -> None:
    made = Job("gpt")
    assert made.newest_checkpoint() is None
    for c in (
        checkpoint(900, 1, 8),
        checkpoint(10, 2, 9),
        checkpoint(20, 2, 3),
        checkpoint(15, 2, 11, "best.a0002"),
    ):
        made.commit(c)
    assert made.newest_checkpoint() == checkpoint(20, 2, 3)
    assert made.seq == 11
    made.retiring.add("step-00000020.a0002")
    assert made.newest_checkpoint() == checkpoint(15, 2, 11, "best.a0002")
    assert checkpoint(20, 2, 3) not in made.live_checkpoints()


def test_an_attempt_has_sealed_nothing_until_a_seal_or_a_checkpoint_of_it_is_known() -> None:
    job = Job("gpt")
    assert not job.has_sealed_nothing()  # no attempt has begun
    job.attempt = 2
    assert job.has_sealed_nothing()
    job.sealed = (2, 5)
    assert not job.has_sealed_nothing()
    job.attempt = 3
    assert job.has_sealed_nothing()
    # Of a daemon that was started again, which has heard of no seal.
    job.commit(StoredCheckpoint("gpt", "step-00000006.a0003", 3, 6, 1, 10, (), False))
    assert not job.has_sealed_nothing()


def test_a_retiring_checkpoint_is_not_durable() -> None:
    made = Job("gpt")
    made.commit(checkpoint(5))
    assert made.is_durable(1, 5)
    assert not made.is_durable(2, 5)
    assert not made.is_durable(1, 6)
    made.retiring.add("step-00000005.a0001")
    assert not made.is_durable(1, 5)


# -- decisions


def test_the_newest_in_memory_is_complete() -> None:
    assert job().newest_in_memory() is None
    four, five = snapshot(4), snapshot(5)
    assert (
        job(
            four, snapshot(6, world_size=2, seals=1), five, snapshot(7, SnapshotState.FILLING)
        ).newest_in_memory()
        is five
    )
    assert job(snapshot(900, attempt=1), snapshot(3, attempt=2)).newest_in_memory() is not None
    newest = job(snapshot(900, attempt=1), snapshot(3, attempt=2)).newest_in_memory()
    assert newest is not None
    assert newest.key == (2, 3)


@each_case(
    ("state", "persist", "settled"),
    [
        (SnapshotState.FILLING, True, False),
        (SnapshotState.SEALED, True, False),
        (SnapshotState.SEALED, False, True),
        (SnapshotState.WRITING, True, False),
        (SnapshotState.WRITING, False, False),
        (SnapshotState.WRITTEN, True, False),
        (SnapshotState.DURABLE, True, True),
        (SnapshotState.FAILED, True, True),
        (SnapshotState.FAILED, False, True),
        (SnapshotState.RELEASED, True, False),
    ],
)
def test_slots_are_released_only_behind_a_newer_seal_and_once_durable(
    state: SnapshotState, persist: bool, settled: bool
) -> None:
    old = snapshot(4, state, persist=persist)
    made = job(old, snapshot(5))
    assert made.is_settled(old) is settled
    assert made.releasable() == ([old] if settled else [])
    assert job(old).releasable() == []  # no newer snapshot is sealed
    assert job(old, snapshot(5, world_size=2, seals=1)).releasable() == []
    assert job(old, snapshot(5, SnapshotState.FILLING)).releasable() == []


def test_only_abandoned_tries_of_later_steps_than_the_best_candidate_are_named() -> None:
    made = job()
    for attempt, step in ((1, 9), (2, 4), (2, 5)):
        tag = f"step-{step:08d}.a{attempt:04d}"
        made.abandoned[tag] = Abandonment(
            job="gpt", attempt=attempt, step=step, tag=tag, code="snapshot-failed", reason="late"
        )
    assert [(one.attempt, one.step) for one in made.abandoned_beyond((2, 4))] == [(2, 5)]
    assert [(one.attempt, one.step) for one in made.abandoned_beyond((1, 9))] == [(2, 4), (2, 5)]
    assert len(made.abandoned_beyond((0, -1))) == 3
    assert made.abandoned_beyond((3, -1)) == []


def test_a_step_of_which_two_tries_were_abandoned_is_named_once() -> None:
    made = job()
    for number, tag in enumerate(("step-00000005.a0002", "step-00000005.a0002.t2")):
        made.abandoned[tag] = Abandonment(
            job="gpt", attempt=2, step=5, tag=tag, code="snapshot-failed", reason=f"reason {number}"
        )
    assert [one.reason for one in made.abandoned_beyond((2, 4))] == ["reason 0"]


def test_slots_that_are_being_read_are_not_released() -> None:
    old = snapshot(4, SnapshotState.DURABLE)
    made = job(old, snapshot(5))
    with old.held(), old.held():
        assert made.releasable() == []
    assert made.releasable() == [old]
    with pytest.raises(RuntimeError), old.held():
        raise RuntimeError
    assert made.releasable() == [old]


def test_slots_of_a_detached_rank_are_released_once_durable() -> None:
    for state in (
        SnapshotState.SEALED,
        SnapshotState.WRITING,
        SnapshotState.FAILED,
        SnapshotState.DURABLE,
    ):
        newest = snapshot(5, state)
        newest.unwanted = True
        assert job(newest).releasable() == ([newest] if state is SnapshotState.DURABLE else [])


def test_the_newest_copy_in_memory_is_never_released() -> None:
    made = job(*(snapshot(step, SnapshotState.DURABLE) for step in (3, 4, 5)))
    assert [s.step for s in made.releasable()] == [3, 4]


@each_case(
    "state",
    [
        s
        for s in SnapshotState
        if s not in (SnapshotState.NEW, SnapshotState.STAGED, SnapshotState.SKIPPED)
    ],
)
def test_the_newest_complete_snapshot_is_owed_when_the_trainer_is_gone(
    state: SnapshotState,
) -> None:
    newest = snapshot(5, state, persist=False)
    made = job(snapshot(4), newest)
    expected: list[Snapshot | None] = (
        [newest] if state in (SnapshotState.SEALED, SnapshotState.FAILED) else []
    )
    if state in (SnapshotState.FILLING, SnapshotState.RELEASED):
        # The newest is not in memory, so the one before it counts.
        expected = [made.snapshot((1, 4))]
    assert made.owed() == expected
    made.commit(checkpoint(5))
    made.commit(checkpoint(4))
    assert made.owed() == []


def test_nothing_is_owed_by_an_empty_job() -> None:
    assert job().owed() == []
