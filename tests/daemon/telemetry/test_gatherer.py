"""Tests what is gathered from the parts of a daemon, and that the checkpoints of a job
are looked at only after a change.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.daemon.engine.recoveries import Recoveries
from ckptd.daemon.job.catalog import Catalog, Job, Step
from ckptd.daemon.job.durations import SAVES, STALLS, Durations
from ckptd.daemon.job.snapshot import RankSeal, SaveProgress, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.telemetry import gatherer
from ckptd.daemon.telemetry.figures import JobFigures
from ckptd.daemon.telemetry.gatherer import Gatherer
from ckptd.shared.formats.membership import Membership
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import SnapshotState


@pytest.fixture
def parts() -> Any:
    chunks = Counter(whole=2, delta=1)
    pipelines = [SimpleNamespace(bytes_read=5, bytes_written=3, chunks=chunks) for _ in range(2)]
    saver = SimpleNamespace(counters=Counter(), saves=Durations(SAVES), stalls=Durations(STALLS))
    slots = SimpleNamespace(used=77, slots={})
    return SimpleNamespace(
        catalog=Catalog(), saver=saver, pipelines=pipelines, slots=slots, recoveries=Recoveries()
    )


def commit(job: Job, step: int, **others: Any) -> StoredCheckpoint:
    tag = f"step-{step:08d}.a0001"
    found = StoredCheckpoint(job.name, tag, 1, step, job.seq + 1, 10, (), False, **others)
    job.commit(found)
    return found


def connect(job: Job, *notify: object) -> None:
    for rank, each in enumerate(notify):
        job.ranks.owners[rank] = cast(Any, SimpleNamespace(notify=each, unlocked=50 + rank))


def hold(parts: Any, job: Job, step: int, size: int, state: SnapshotState) -> Snapshot:
    """Put a snapshot of one rank into memory."""
    snapshot = Snapshot(job.name, 1, step, f"t{step}", 1, persist=True, state=state)
    snapshot.seals[0] = RankSeal(0, f"segment{step}", 1, b"")
    values = SimpleNamespace(offset=size - 1, length=1)
    parts.slots.slots[f"segment{step}"] = SimpleNamespace(
        header=SimpleNamespace(values=values, peer_replica=False), nbytes=size
    )
    job.steps[1, step] = Step((1, step), snapshot=snapshot)
    return snapshot


def test_a_daemon_without_jobs(parts: Any) -> None:
    found = Gatherer(parts).figures(None)
    assert (found.jobs, found.jobs_known, found.disk_free) == ((), 0, None)
    assert found.chunks == {"whole": 4, "delta": 2, "linked": 0}
    assert (found.persisted, found.shm_used) == ({"raw": 10, "stored": 6}, 77)
    assert found.snapshots == {"durable": 0, "failed": 0, "skipped": 0}
    assert found.recoveries == {"memory": 0, "stage": 0, "storage": 0}


def test_recoveries_are_counted_by_source(parts: Any) -> None:
    report = m.ReportRecovery(
        id=1, step=1, attempt=1, tag="t", source="stage", seconds=2.0, bytes=3
    )
    parts.recoveries.add("gpt", 0, report)
    found = Gatherer(parts).figures(None)
    assert found.recoveries == {"memory": 0, "stage": 1, "storage": 0}
    assert (sum(found.recovery_times.counts), found.recovery_times.seconds) == (1, 2.0)


def test_the_figures_of_a_job(parts: Any) -> None:
    job = parts.catalog.job("gpt")
    assert Gatherer(parts).figures(100).jobs == (JobFigures("gpt"),)
    commit(job, 10, created=1000.0)
    commit(job, 20, created=2000.0)
    connect(job, None, print, print)
    job.damaged["x"] = "why"
    assert Gatherer(parts).figures(105).jobs == (
        JobFigures("gpt", 2, 20, 2000.0, 10, 2, 1, chain=0, unlocked=103),
    )
    commit(job, 30, non_finite=4, chain=3)
    assert Gatherer(parts).figures(None).jobs == (
        JobFigures("gpt", 3, 30, None, None, 2, 1, 4, chain=3, unlocked=103),
    )


def test_the_copies_on_other_nodes_are_counted(parts: Any) -> None:
    job = parts.catalog.job("gpt")
    hold(parts, job, 20, 7, SnapshotState.SEALED)
    hold(parts, job, 30, 9, SnapshotState.SEALED)
    parts.slots.slots["segment30"].header.peer_replica = True
    job.node = Membership(run_id="0" * 32, ranks=[0])
    job.answer = Answer(replicated=[10, 20])
    found = Gatherer(parts).figures(None)
    assert found.replica_bytes == 9
    assert [(each.replicated, each.replicas_off) for each in found.jobs] == [(20, 0)]
    job.answer = Answer(replicated=[10, 20], alone="the network is cut")
    assert [each.replicas_off for each in Gatherer(parts).figures(None).jobs] == [1]


def test_the_room_is_that_of_the_place_where_it_is_saved_first(parts: Any) -> None:
    job = parts.catalog.job("gpt")
    commit(job, 10)
    job.in_root["y"] = StoredCheckpoint("gpt", "y", 1, 20, 9, 50, (), False, created=3.0)
    (found,) = Gatherer(parts).figures(100).jobs
    assert (found.last_step, found.last_created, found.room) == (20, 3.0, 10)


def test_the_checkpoints_are_looked_at_only_after_a_change(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, found, looked = parts.catalog.job("gpt"), Gatherer(parts), list[str]()
    look = Job.newest_durable

    def newest_durable(self: Job) -> StoredCheckpoint | None:
        looked.append(self.name)
        return look(self)

    monkeypatch.setattr(Job, "newest_durable", newest_durable)
    last: list[int | None] = []

    def gather() -> None:
        last.append(found.figures(1).jobs[0].last_step)

    gather()
    gather()
    old, new = commit(job, 10), commit(job, 20)
    gather()
    gather()
    job.retiring.add(new.tag)
    gather()
    job.retiring.clear()
    del job.checkpoints[new.tag]
    commit(job, 15)
    del job.checkpoints[old.tag]
    gather()
    gather()
    assert (last, len(looked)) == ([None, None, 20, 20, 10, 15, 15], 4)


def test_results_never_fall_when_a_failed_snapshot_is_saved_later(parts: Any) -> None:
    parts.saver.counters.update(failed=1, persisted=4, recounted_failed=2, skipped=3)
    assert Gatherer(parts).figures(1).snapshots == {"durable": 4, "failed": 3, "skipped": 3}


def test_pending_bytes_are_those_that_are_sealed_and_not_written(parts: Any) -> None:
    job, found = parts.catalog.job("gpt"), Gatherer(parts)
    hold(parts, job, 1, 1000, SnapshotState.SEALED)
    writing = hold(parts, job, 2, 500, SnapshotState.WRITING)
    assert found.figures(1).pending == 1500
    writing.progress = SaveProgress(500, 0.0)
    writing.progress.begin_part(0)
    writing.progress.add(0, 200)
    assert found.figures(1).pending == 1300
    for step, state in enumerate(
        (SnapshotState.WRITTEN, SnapshotState.DURABLE, SnapshotState.FAILED, SnapshotState.FILLING)
    ):
        hold(parts, job, 10 + step, 9999, state)
    hold(parts, job, 20, 9999, SnapshotState.SEALED).persist = False
    assert found.figures(1).pending == 1300
    parts.slots.slots.clear()
    assert found.figures(1).pending == 0


def test_of_too_many_jobs_those_that_run_and_those_saved_last_are_shown(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gatherer, "MAX_JOBS", 3)
    for number in range(6):
        job = parts.catalog.job(f"job{number}")
        if number % 2:
            commit(job, 1, created=float(number))
    connect(parts.catalog.job("job0"), print)
    found = Gatherer(parts).figures(1)
    assert ({job.name for job in found.jobs}, found.jobs_known) == ({"job0", "job3", "job5"}, 6)
