"""Tests the figures of a save that is under way."""

from __future__ import annotations

from ckptd.daemon.job.save_progress import SaveProgress


def test_nothing_is_said_of_the_speed_before_the_first_chunk() -> None:
    assert SaveProgress(100, 5.0).report(6.0) == {
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
