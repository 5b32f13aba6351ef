"""Tests what a stage uploads next, which local copies it deletes, and what it tells the
ranks, as pure decisions.
"""

from __future__ import annotations

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.stage_decisions import (
    needless,
    next_job,
    next_upload,
    spare,
    uploads,
    waiting,
)
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.wire import messages as m
from tests.support.cases import each_case


def checkpoint(step: int, attempt: int = 1) -> StoredCheckpoint:
    return StoredCheckpoint(
        "gpt", f"step-{step:08d}.a{attempt:04d}", attempt, step, step, 10, (), False
    )


def job(stage: list[int], root: list[int], retiring: list[int] | None = None) -> Job:
    """Return a job with these steps on the stage and in the root."""
    made = Job("gpt")
    made.checkpoints = {c.tag: c for c in map(checkpoint, stage)}
    made.in_root = {c.tag: c for c in map(checkpoint, root)}
    made.retiring = {checkpoint(step).tag for step in retiring or []}
    return made


def steps(checkpoints: list[StoredCheckpoint]) -> list[int | None]:
    return [c.step for c in checkpoints]


@each_case(
    ("stage", "root", "wait", "upload"),
    [
        ([], [1], [], None),
        ([3], [1, 3], [], None),
        ([3], [1], [3], 3),
        ([4, 3], [1], [3, 4], 3),  # in order
        ([3, 5, 4], [1], [3, 4, 5], 5),  # it has fallen behind: the newest first
        ([3, 4, 5], [5], [3, 4], 3),
    ],
)
def test_what_is_uploaded_next(
    stage: list[int], root: list[int], wait: list[int], upload: int | None
) -> None:
    found = waiting(job(stage, root))
    assert steps(found) == wait
    following = next_upload(found)
    assert (following and following.step) == upload


def test_what_cannot_be_uploaded_or_is_being_deleted_does_not_wait() -> None:
    assert steps(waiting(job([3, 4, 5], [], retiring=[4]), {checkpoint(3).tag})) == [5]


@each_case(
    ("stage", "root", "may_go", "may_go_on_a_full_disk"),
    [
        ([1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3]),
        ([1, 2, 3], [1, 3], [1], [1, 3]),
        ([1, 2, 3], [1, 2], [1, 2], [1, 2]),
        ([3], [3], [], [3]),
        ([3], [1, 2], [], []),  # it is nowhere else
        ([], [1, 2], [], []),
    ],
)
def test_only_what_is_in_the_root_may_leave_the_stage(
    stage: list[int], root: list[int], may_go: list[int], may_go_on_a_full_disk: list[int]
) -> None:
    assert steps(needless(job(stage, root))) == may_go
    assert steps(spare(job(stage, root))) == may_go_on_a_full_disk


def test_jobs_take_turns() -> None:
    assert [next_job(["a", "b", "c"], last) for last in ("", "a", "b", "c", "d")] == [
        "a",
        "b",
        "c",
        "a",
        "a",
    ]
    assert next_job(["b"], "b") == "b"
    assert next_job([], "b") is None


def test_ranks_are_told_of_their_own_attempt() -> None:
    here = job([3, 4], [1, 3])
    here.checkpoints |= {c.tag: c for c in [checkpoint(9, attempt=2)]}
    assert uploads(here, 1) == m.Uploads(re=0, attempt=1, uploaded=[1, 3], waiting=[4])
    assert uploads(here, 2) == m.Uploads(re=0, attempt=2, uploaded=[], waiting=[9])
    assert uploads(here, 1, {checkpoint(4).tag}) == m.Uploads(
        re=0, attempt=1, uploaded=[1, 3], waiting=[]
    )
