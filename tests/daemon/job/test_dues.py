"""Tests which snapshots a job owes before a node goes, and how each is described."""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.daemon.job import dues
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.dues import SnapshotDebt, UploadDebt, UploadProgress
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import RankSeal, SaveProgress, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.errors import IntegrityError, StorageError
from ckptd.shared.formats.membership import Membership
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import SnapshotState as S
from tests.support.cases import each_case

CLAIM = "0" * 32
HERE = Membership(run_id=CLAIM, ranks=[0, 1])
PEER = Membership(run_id=CLAIM, ranks=[2, 3])
COMMON = Answer(common=[5, 6])


def tag(step: int) -> str:
    return f"step-{step:08d}.a0002"


def held(step: int, state: S = S.SEALED, *, node: Membership | None = None, **fields: Any) -> Any:
    """Return a snapshot that all its ranks have sealed."""
    world_size = 4 if node else 2
    made = Snapshot(
        "gpt", 2, step, tag(step), world_size, persist=False, state=state, node=node, **fields
    )
    made.seals = {rank: RankSeal(rank, f"{step}/{rank}", 1, b"") for rank in made.ranks}
    return made


def checkpoint(step: int) -> StoredCheckpoint:
    return StoredCheckpoint("gpt", tag(step), 2, step, step, 1, (), user_tag=False)


def job(*snapshots: Snapshot, durable: int = -1, owners: bool = True, **fields: Any) -> Job:
    """Return a job in attempt 2, whose trainers are here unless `owners` is False."""
    made = Job("gpt", attempt=2, **fields)
    for snapshot in snapshots:
        if snapshot.peer_replica:
            made.peer_replicas[snapshot.key, snapshot.ranks[0]] = snapshot
        else:
            made.step(snapshot.key).snapshot = snapshot
    if durable >= 0:
        made.commit(checkpoint(durable))
    if owners:
        made.ranks.join(Owner("gpt", 2, 0, 2))
    return made


def steps(of: Job) -> list[int]:
    return [snapshot.step for snapshot in dues.owed(of)]


# -- what is owed


def test_the_newest_snapshot_of_one_node_is_owed_unless_it_is_durable() -> None:
    assert steps(job()) == []
    assert steps(job(held(5), held(6))) == [6]
    assert steps(job(held(5), held(6), held(7, S.FILLING))) == [6]
    assert steps(job(held(5), held(6), durable=5)) == [6]
    assert steps(job(held(5), held(6), durable=6)) == []


@pytest.mark.parametrize("state", [S.WRITING, S.WRITTEN, S.FAILED])
def test_a_snapshot_that_is_being_saved_or_has_failed_is_owed(state: S) -> None:
    assert steps(job(held(5, state))) == [5]


def test_all_that_is_held_of_several_nodes_is_owed() -> None:
    assert steps(job(held(5, node=HERE), held(6, node=HERE), node=HERE)) == [5, 6]
    assert steps(job(held(5, node=HERE), held(6, node=HERE), node=HERE, durable=5)) == [6]


@pytest.mark.parametrize(
    ("answer", "owners", "owed"),
    [
        (COMMON, True, [6]),  # the others can deliver
        (Answer(common=[5]), True, []),  # they may never hold it
        (COMMON, False, []),  # the next attempt decides
    ],
)
def test_a_step_that_this_node_has_delivered_waits_for_others_that_hold_it(
    answer: Answer, owners: bool, owed: list[int]
) -> None:
    delivered = held(6, S.WRITTEN, node=HERE, delivered=True)
    assert steps(job(delivered, node=HERE, answer=answer, owners=owners)) == owed


def test_a_step_that_can_never_be_complete_is_not_owed() -> None:
    dead = Answer(dead={6: ("snapshot-failed", "rank 3 has no such step")})
    snapshot = held(6, node=HERE)
    made = job(snapshot, node=HERE, answer=dead)
    assert (steps(made), SnapshotDebt(made, snapshot).now(None)) == ([], None)


@pytest.mark.parametrize(("owners", "owed"), [(True, []), (False, [5])])
def test_copies_of_other_nodes_are_owed_once_the_trainers_are_gone(
    owners: bool, owed: list[int]
) -> None:
    copy = held(5, node=PEER, peer_replica=True)
    assert steps(job(copy, node=HERE, owners=owners)) == owed
    assert steps(job(copy, node=HERE, owners=owners, durable=5)) == []


# -- what it becomes


def test_a_snapshot_is_owed_until_it_or_a_later_one_is_durable() -> None:
    snapshot = held(5)
    made = job(snapshot)
    debt = SnapshotDebt(made, snapshot)
    assert (debt.now(None), debt.is_saved, debt.place) == (debt, False, f"gpt/{tag(5)}")
    made.commit(checkpoint(6))
    assert (debt.now(None), debt.is_saved) == (None, False)
    made.commit(checkpoint(5))
    assert (debt.now(None), debt.is_saved) == (None, True)


def test_a_snapshot_that_was_replaced_before_it_was_saved_becomes_its_successor() -> None:
    failed, newer = held(5, S.FAILED), held(6)
    made = job(failed, newer)
    failed.state = S.RELEASED
    assert SnapshotDebt(made, failed).now(None) == SnapshotDebt(made, newer)


def test_a_step_is_saved_once_its_copies_of_other_nodes_are_too() -> None:
    own, copy = held(5, S.FAILED, node=HERE), held(5, node=PEER, peer_replica=True)
    made = job(own, copy, node=HERE, owners=False)
    debts: list[dues.Debt] = [SnapshotDebt(made, own), SnapshotDebt(made, copy)]
    assert dues.still_owed(debts, None) == (debts, [])
    copy.state, copy.delivered = S.WRITTEN, True
    assert dues.still_owed(debts, None) == (debts[:1], [])
    own.state, own.delivered = S.WRITTEN, True
    assert dues.still_owed(debts[:1], None) == ([], [f"gpt/{tag(5)}"])
    assert dues.still_owed(debts, None) == ([], [f"gpt/{tag(5)}"])


def test_two_snapshots_that_one_has_replaced_are_owed_once() -> None:
    first, second, newer = held(5, S.RELEASED), held(6, S.RELEASED), held(7)
    made = job(first, second, newer)
    debts = [SnapshotDebt(made, first), SnapshotDebt(made, second)]
    assert dues.still_owed(debts, None) == ([SnapshotDebt(made, newer)], [])


def test_a_snapshot_that_was_deleted_is_not_owed() -> None:
    assert SnapshotDebt(job(), held(5, S.RELEASED)).now(None) is None


def test_with_a_stage_a_snapshot_that_is_saved_becomes_an_upload() -> None:
    snapshot, uploads = held(5, S.DURABLE), UploadProgress()
    made = job(snapshot, durable=5)
    upload = SnapshotDebt(made, snapshot).now(uploads)
    assert upload == UploadDebt(made, made.checkpoints[tag(5)])
    assert (upload.now(uploads), upload.is_saved) == (upload, False)
    made.in_root = {tag(5): checkpoint(5)}
    assert (upload.now(uploads), upload.is_saved) == (None, True)
    assert SnapshotDebt(made, snapshot).now(uploads) is None


def test_a_later_checkpoint_on_the_stage_or_in_the_root_will_do() -> None:
    snapshot, uploads = held(5), UploadProgress()
    made = job(snapshot, durable=6)
    assert SnapshotDebt(made, snapshot).now(uploads) == UploadDebt(made, checkpoint(6))
    made.in_root = {tag(6): checkpoint(6)}
    assert SnapshotDebt(made, snapshot).now(uploads) is None


def test_a_checkpoint_that_was_deleted_from_the_stage_is_not_owed() -> None:
    assert UploadDebt(job(), checkpoint(5)).now(UploadProgress()) is None


# -- what is said


def progress(total: int, done: int) -> SaveProgress:
    made = SaveProgress(total, 0.0)
    made.begin_part(0)
    made.add(0, done)
    return made


@each_case(
    ("snapshot", "state", "reason", "bytes_"),
    [
        (held(5), "waiting", "", (0, 0)),
        (held(5, S.WRITING), "waiting", "", (0, 0)),
        (held(5, S.WRITING, progress=progress(8, 3)), "saving", "", (3, 8)),
        (held(5, S.FAILED, progress=progress(8, 3), reason="full"), "failed", "full", (0, 0)),
        (held(5, S.WRITTEN, node=HERE, delivered=True), "delivered", "", (0, 0)),
        (held(5, S.FAILED, reason="x" * 999), "failed", "x" * 400, (0, 0)),
    ],
)
def test_what_keeps_a_snapshot_on_this_node(
    snapshot: Snapshot, state: str, reason: str, bytes_: tuple[int, int]
) -> None:
    due = SnapshotDebt(job(snapshot), snapshot).due(None)
    assert (due.job, due.attempt, due.step, due.tag) == ("gpt", 2, 5, tag(5))
    assert (due.state, due.reason, (due.done, due.total)) == (state, reason, bytes_)


@each_case(
    ("uploads", "state", "reason", "bytes_", "hopeless"),
    [
        (UploadProgress(), "uploading", "", (0, 0), False),
        (UploadProgress(problem="no network"), "uploading", "no network", (0, 0), False),
        (UploadProgress(current=("gpt", tag(5)), done=3, total=8), "uploading", "", (3, 8), False),
        (UploadProgress(current=("gpt", tag(4)), done=3, total=8), "uploading", "", (0, 0), False),
        (UploadProgress({"gpt": {tag(5): "damaged"}}), "failed", "damaged", (0, 0), True),
    ],
)
def test_what_keeps_a_checkpoint_on_the_stage(
    uploads: UploadProgress, state: str, reason: str, bytes_: tuple[int, int], hopeless: bool
) -> None:
    debt = UploadDebt(job(durable=5), checkpoint(5))
    due = debt.due(uploads)
    assert (due.state, due.reason, (due.done, due.total)) == (state, reason, bytes_)
    assert (debt.is_hopeless(uploads), debt.to_save) == (hopeless, None)


@pytest.mark.parametrize(
    ("state", "code", "is_to_save", "hopeless"),
    [
        (S.SEALED, "", True, False),
        (S.WRITING, "", False, False),
        (S.FAILED, StorageError.code, True, False),
        (S.FAILED, IntegrityError.code, False, True),
    ],
)
def test_a_failure_of_the_storage_is_tried_again_and_no_other_one(
    state: S, code: str, is_to_save: bool, hopeless: bool
) -> None:
    snapshot = held(5, state, code=code)
    debt = SnapshotDebt(job(snapshot), snapshot)
    assert (debt.to_save is snapshot, debt.is_hopeless(None)) == (is_to_save, hopeless)
