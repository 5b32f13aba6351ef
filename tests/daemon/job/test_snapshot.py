"""Snapshots of one node, and of one node of several."""

from __future__ import annotations

import pytest

from ckptd.daemon.job.snapshot import RankSeal, SaveProgress, Snapshot
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.wire.lifecycle import Event, IllegalStep, SnapshotState

NODE = Membership(run_id="0" * 32, ranks=[2, 5])


def snapshot(
    *sealed: int, node: Membership | None = None, state: SnapshotState = SnapshotState.SEALED
) -> Snapshot:
    made = Snapshot("gpt", 1, 7, "best.a0001", 6, persist=True, state=state, node=node)
    made.seals = {rank: RankSeal(rank, f"{rank}", 1, b"") for rank in sealed}
    return made


def test_a_snapshot_is_complete_with_the_ranks_of_its_node() -> None:
    assert [snapshot(*range(count)).complete for count in (5, 6)] == [False, True]
    assert snapshot(0, 3).missing == [1, 2, 4, 5]
    assert [snapshot(*ranks, node=NODE).complete for ranks in ([2], [2, 5])] == [False, True]
    assert snapshot(5, node=NODE).missing == [2]
    assert not snapshot(2, 5, node=NODE, state=SnapshotState.FILLING).in_memory


def test_a_snapshot_is_checked_once_all_checksums_are_known() -> None:
    made = snapshot(2, 5, node=NODE)
    made.seals[2].checks = [ChunkCheck(1)]
    assert not made.checked
    made.seals[5].checks = []
    assert made.checked


def test_the_directory_is_that_of_the_first_try_at_first() -> None:
    assert snapshot().directory == "best.a0001"


def test_holds_count() -> None:
    made = snapshot()
    with made.held():
        with made.held():
            assert made.holds == 2
        assert made.holds == 1
    assert made.holds == 0


def test_a_move_that_is_not_in_the_table_changes_nothing() -> None:
    made = snapshot()
    with pytest.raises(IllegalStep):
        made.move(Event.WROTE)
    assert made.state is SnapshotState.SEALED


def test_nothing_is_said_of_the_speed_before_the_first_chunk() -> None:
    assert SaveProgress(100, 5.0).report(6.0) == {
        "age_seconds": 1.0,
        "done_bytes": 0,
        "total_bytes": 100,
        "bytes_per_second": None,
        "seconds_left": None,
    }


def test_the_parts_of_all_ranks_count() -> None:
    progress = SaveProgress(400, 10.0)
    for rank, nbytes in ((0, 30), (0, 30), (1, 40)):
        if rank not in progress._done:
            progress.begin_part(rank)
        progress.add(rank, nbytes)
    assert progress.report(12.0) == {
        "age_seconds": 2.0,
        "done_bytes": 100,
        "total_bytes": 400,
        "bytes_per_second": 50,
        "seconds_left": 6.0,
    }


def test_a_part_that_is_written_again_counts_once() -> None:
    progress = SaveProgress(100, 0.0)
    for _ in range(2):
        progress.begin_part(0)
        progress.add(0, 100)
    assert progress.report(1.0)["done_bytes"] == 100
