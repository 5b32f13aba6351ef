"""Gathers the figures of a daemon from its parts, on the event loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptd.daemon.composition import Components
from ckptd.daemon.engine.recoveries import SOURCES
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.telemetry.figures import DaemonFigures, JobFigures
from ckptd.shared.wire.lifecycle import SnapshotState

MAX_JOBS = 1000
"""The most jobs with figures of their own, so that what Prometheus stores is bounded."""
_KINDS = ("whole", "delta", "linked")
"""The ways in which a chunk is stored, as `Pipeline.chunks` counts it."""
_RESULTS = {"durable": "persisted", "failed": "failed", "skipped": "skipped"}
"""The counter of each result of a snapshot."""
_PENDING = (SnapshotState.SEALED, SnapshotState.WRITING, SnapshotState.WRITTEN)


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest durable checkpoint of a job, and the newest that is here: with a stage,
    on the stage. `marks`: a change of the job's checkpoints changes them.
    """

    marks: tuple[int, ...]
    durable: StoredCheckpoint | None
    here: StoredCheckpoint | None


class Gatherer:
    """Gathers the figures of one daemon.

    To look at all checkpoints of a job takes long if there are thousands. It is done
    only after one has come or gone.
    """

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        self._newest: dict[str, _Newest] = {}

    def figures(self, disk_free: int | None, refused: int = 0) -> DaemonFigures:
        """Return the figures of this moment.

        disk_free: the free bytes under the root, or None if they are not known. refused:
        the living processes that have been refused for long.
        """
        parts, jobs = self._parts, list(self._parts.catalog.jobs.values())
        saver, counters = parts.saver, parts.saver.counters
        shown = jobs
        if len(jobs) > MAX_JOBS:
            shown = sorted(jobs, key=self._importance, reverse=True)[:MAX_JOBS]
        return DaemonFigures(
            jobs=tuple(self._job(job, disk_free) for job in shown),
            jobs_known=len(jobs),
            snapshots={
                result: counters[name] + counters[f"recounted_{name}"]
                for result, name in _RESULTS.items()
            },
            sealed=counters["sealed"],
            verify_failures=counters["verify_failures"],
            uncompared=counters["uncompared"],
            stalls=saver.stalls.distribution(),
            saves=saver.saves.distribution(),
            persisted={
                "raw": sum(pipeline.bytes_read for pipeline in parts.pipelines),
                "stored": sum(pipeline.bytes_written for pipeline in parts.pipelines),
            },
            chunks={
                kind: sum(pipeline.chunks[kind] for pipeline in parts.pipelines) for kind in _KINDS
            },
            recoveries={source: parts.recoveries.counts[source] for source in SOURCES},
            recovery_times=parts.recoveries.times.distribution(),
            pending=sum(
                self._left(snapshot)
                for job in jobs
                for snapshot in job.snapshots
                if snapshot.persist and snapshot.state in _PENDING
            ),
            shm_used=parts.slots.used,
            replica_bytes=sum(
                slot.nbytes for slot in parts.slots.slots.values() if slot.header.peer_replica
            ),
            disk_free=disk_free,
            refused=refused,
        )

    def _importance(self, job: Job) -> tuple[int, float]:
        """Return the key by which jobs are chosen: first those with connected ranks,
        then those that were saved last.
        """
        newest = self._newest_of(job).durable
        known = newest is not None and not math.isnan(newest.created)
        return job.ranks.connected, newest.created if newest is not None and known else -math.inf

    def _job(self, job: Job, disk_free: int | None) -> JobFigures:
        found = self._newest_of(job)
        newest = found.durable
        return JobFigures(
            name=job.name,
            checkpoints=len(job.checkpoints),
            last_step=None if newest is None else newest.step,
            last_created=None if newest is None or math.isnan(newest.created) else newest.created,
            room=None if found.here is None else job.room_for(disk_free, found.here),
            ranks=job.ranks.connected,
            damaged=len(job.damaged),
            non_finite=None if newest is None else newest.non_finite,
            chain=None if newest is None else newest.chain,
            replicated=max(job.answer.replicated, default=None),
            replicas_off=None if job.node is None else int(bool(job.answer.alone)),
            unlocked=job.ranks.unlocked,
        )

    def _newest_of(self, job: Job) -> _Newest:
        marks = (job.seq, len(job.checkpoints), len(job.in_root), len(job.retiring))
        known = self._newest.get(job.name)
        if known is None or known.marks != marks:
            known = _Newest(marks, job.newest_durable(), job.newest_checkpoint())
            self._newest[job.name] = known
        return known

    def _left(self, snapshot: Snapshot) -> int:
        """Return the bytes of a snapshot that are not written yet."""
        if snapshot.state is SnapshotState.WRITTEN:
            return 0
        slots = (self._parts.slots.slots.get(seal.segment) for seal in snapshot.seals.values())
        values = (slot.header.values for slot in slots if slot is not None)
        size = sum(each.offset + each.length for each in values)
        if snapshot.progress is None or snapshot.state is not SnapshotState.WRITING:
            return size
        return max(0, size - snapshot.progress.done)
