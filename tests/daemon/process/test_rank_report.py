"""Tests what is told of the ranks of a job and their slots, in each state of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.ranks import Owner, Process
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.process.rank_report import (
    MAX_ALL_RANKS,
    MAX_RANKS,
    all_ranks_report,
    ranks_report,
)
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.support.cases import each_case


def slot(
    name: str, rank: int, number: int = 0, attempt: int = 2, *, peer_replica: bool = False
) -> Any:
    header = SimpleNamespace(
        job="gpt", attempt=attempt, rank=rank, slot=number, peer_replica=peer_replica
    )
    return SimpleNamespace(name=name, nbytes=100 + number, header=header)


def made(*owners: Owner, name: str = "gpt") -> Job:
    job = Catalog().job(name)
    job.attempt = 2
    for owner in owners:
        job.ranks.join(owner)
    return job


def owner(rank: int, *, connected: bool = True, pid: int = 0) -> Owner:
    notify = cast(Any, print) if connected else None
    return Owner("gpt", 2, rank, 2, notify, Process(pid))


def test_ranks_come_by_number_with_their_processes() -> None:
    job = made(owner(1, pid=4711), owner(0, connected=False))
    first: dict[str, Any] = {"rank": 0, "pid": None, "connected": False, "slots": []}
    second: dict[str, Any] = {"rank": 1, "pid": 4711, "connected": True, "slots": []}
    assert ranks_report(job, [], 64) == {"ranks": [first, second], "ranks_not_shown": 0}
    assert ranks_report(job, [], 1) == {"ranks": [first], "ranks_not_shown": 1}


def test_jobs_with_connected_ranks_get_their_ranks_first_and_the_others_are_counted() -> None:
    names = [f"job{number:02d}" for number in range(20)]
    jobs = [
        made(*(owner(rank, connected=name == "job19") for rank in range(70)), name=name)
        for name in names
    ]
    found = all_ranks_report(jobs, {"job19": [slot("a", 70)]})
    assert sorted(found) == names
    shown = {name: len(found[name]["ranks"]) for name in names}
    assert shown["job19"] == shown["job00"] == MAX_RANKS
    assert (sum(shown.values()), shown["job18"]) == (MAX_ALL_RANKS, 0)
    assert [found[name]["ranks_not_shown"] for name in ("job19", "job00", "job18")] == [7, 6, 70]


def test_slots_of_others_are_left_out_and_those_without_an_owner_are_told() -> None:
    job = made(owner(0))
    earlier, copy = slot("d", 0, 2, 1), slot("e", 0, 3, peer_replica=True)
    found = ranks_report(job, [slot("b", 0, 1), slot("a", 0), slot("c", 3), earlier, copy], 64)[
        "ranks"
    ]
    free = {"state": "free", "step": None}
    assert [(each["rank"], each["connected"], each["slots"]) for each in found] == [
        (0, True, [{"bytes": 100, **free}, {"bytes": 101, **free}]),
        (3, False, [{"bytes": 100, **free}]),
    ]


@each_case(
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
    (first, _) = ranks_report(job, [slot("a", 0)], 64)["ranks"]
    assert first["slots"] == [{"bytes": 100, "state": told, "step": 7}]
