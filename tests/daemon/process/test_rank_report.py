"""Tests what is told of the ranks of a job and their slots, in each state of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.ranks import Owner, Process
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.process.rank_report import ranks_report
from ckptd.shared.wire.lifecycle import SnapshotState


def slot(name: str, rank: int, number: int = 0, attempt: int = 2) -> Any:
    header = SimpleNamespace(job="gpt", attempt=attempt, rank=rank, slot=number)
    return SimpleNamespace(name=name, nbytes=100 + number, header=header)


def made(*owners: Owner) -> Job:
    job = Catalog().job("gpt")
    job.attempt = 2
    for owner in owners:
        job.ranks.join(owner)
    return job


def owner(rank: int, *, connected: bool = True, pid: int = 0) -> Owner:
    notify = cast(Any, print) if connected else None
    return Owner("gpt", 2, rank, 2, notify, Process(pid))


def test_ranks_come_by_number_with_their_processes() -> None:
    job = made(owner(1, pid=4711), owner(0, connected=False))
    assert ranks_report(job, [], 64) == [
        {"rank": 0, "pid": None, "connected": False, "slots": []},
        {"rank": 1, "pid": 4711, "connected": True, "slots": []},
    ]
    assert [found["rank"] for found in ranks_report(job, [], 1)] == [0]


def test_slots_of_earlier_attempts_are_left_out_and_those_without_an_owner_are_told() -> None:
    job = made(owner(0))
    found = ranks_report(job, [slot("b", 0, 1), slot("a", 0), slot("c", 3), slot("d", 0, 2, 1)], 64)
    free = {"state": "free", "step": None}
    assert [(each["rank"], each["connected"], each["slots"]) for each in found] == [
        (0, True, [{"bytes": 100, **free}, {"bytes": 101, **free}]),
        (3, False, [{"bytes": 100, **free}]),
    ]


@pytest.mark.parametrize(
    ("sealed", "state", "told"),
    [
        ((), None, "filling"),
        ((), SnapshotState.FILLING, "filling"),
        ((0,), SnapshotState.FILLING, "sealed"),
        ((0, 1), SnapshotState.WRITING, "writing"),
        ((0, 1), SnapshotState.DURABLE, "durable"),
        ((0, 1), SnapshotState.FAILED, "failed"),
    ],
)
def test_a_slot_has_the_state_of_its_snapshot(
    sealed: tuple[int, ...], state: SnapshotState | None, told: str
) -> None:
    job = made(owner(0), owner(1))
    step = job.occupy("a", 0, (2, 7))
    if state is not None:
        step.snapshot = Snapshot("gpt", 2, 7, "t", 2, persist=True, state=state)
        step.snapshot.seals = {rank: RankSeal(rank, "", 1, b"") for rank in sealed}
    (first, _) = ranks_report(job, [slot("a", 0)], 64)
    assert first["slots"] == [{"bytes": 100, "state": told, "step": 7}]
