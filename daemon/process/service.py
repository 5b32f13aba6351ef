"""Answers questions about the whole daemon: which version and features it has, which
snapshots can be recovered, what `status` prints; and deletes on request.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ckptd.daemon import recovery
from ckptd.daemon.composition import Components
from ckptd.daemon.job import peer_replicas
from ckptd.daemon.job.catalog import EarlierAttempt, Job
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.journal.journal import JournalBroken
from ckptd.daemon.memory.slots import Slot
from ckptd.daemon.process.rank_report import all_ranks_report
from ckptd.daemon.process.vitals import Vitals, rss_bytes
from ckptd.daemon.telemetry.overdue import Late
from ckptd.shared import __version__, names
from ckptd.shared.errors import CkptdError, StorageError, VersionMismatch
from ckptd.shared.system import machine, settings
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.frames import MAX_FRAME
from ckptd.shared.wire.lifecycle import SnapshotState
from ckptd.shared.wire.session import (
    DRAIN,
    LENDING,
    MAX_VERSION,
    NODES,
    PEERS,
    RECOVERIES,
    REPLICAS,
    STAGE,
)

log = logging.getLogger("ckptd")

MAX_CANDIDATES, MAX_DAMAGED_FOUND = 1000, 100
"""The most checkpoints in one answer to Find: as many as fit into a frame."""
_DELETED_SECONDS = 0.5  # how long a status waits to hear which checkpoints are gone
MAX_JOBS, MAX_DAMAGED, MAX_TEXT = 500, 5, 200
"""The most jobs, damaged checkpoints of each job, and characters of a text in one
status report.
"""
MAX_REPORT = MAX_FRAME - 4096
"""The most bytes of a status report, whose frame has a few more."""
COUNTERS = (
    "sealed", "persisted", "failed", "skipped", "retired", "rewrites", "saved_unasked",
    "verify_failures", "tidy_failures", "uploaded", "failed_uploads",
    "uncompared",
)  # fmt: skip


class Service:
    """The requests of clients and of the command line to a daemon.

    The engine handles the other requests, which are those of a rank about its own
    snapshots. `socket` is where the daemon listens now, or None before it does.
    """

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        self._instance = secrets.token_hex(16)
        self.socket: Path | None = None
        # Looks for checkpoints that were deleted by hand; never ends while the disk hangs.
        self._look: asyncio.Future[None] | None = None

    def welcome(self, hello: m.Hello) -> m.Welcome:
        """Return the answer to Hello. Raises VersionMismatch for too old a client."""
        config = self._parts.config
        if config.stage is not None and STAGE not in hello.features:
            raise VersionMismatch(
                f"{hello.client or 'this client'} knows nothing of stages, and would miss the "
                f"newest checkpoints: "
                "install the same ckptd in both places"
            )
        features = [NODES, REPLICAS, RECOVERIES, LENDING, DRAIN, PEERS]
        features += [] if config.stage is None else [STAGE]
        return m.Welcome(
            re=hello.id, version=MAX_VERSION, features=features, daemon=__version__,
            root=str(config.root), private=config.private, slots=config.slots,
            chunk_size=config.chunk_size, stall_budget=config.stall_budget, instance=self._instance,
            identity=self._parts.identity, stage=str(config.stage or ""),
            settings=settings.given(os.environ) if config.private else None,
            copies=m.CopySettings(domain=config.domain, bandwidth=config.replica_bandwidth)
            if config.replicas
            else None,
        )  # fmt: skip

    async def find(self, job_name: str, step: int | None, delivered: int = 0) -> m.Found:
        """Return the candidates for a recovery, best first: by (attempt, step), memory
        before storage.

        step: list the candidates of this step only. delivered: an attempt whose nodes
        have all delivered what they hold, or 0. Raises StorageError, also if
        this user may not read the newest checkpoint; ForeignMemory if another root is
        there now; NewerFormat if only a newer ckptd can read the newest checkpoint.
        """
        parts = self._parts
        job = parts.catalog.job(job_name)
        await parts.served.check(job)
        in_memory = parts.engine.memory_candidates(job_name)
        try:
            await recovery.scan_job(parts.repository, job, parts.calls, fresh=True)
            if job.node is None or job.node.leads:
                await self._deliver(job, _of_nodes_before(job))
            in_root = await self._in_root(job, delivered)
            # Other nodes see no stage.
            stored = (
                []
                if parts.uploader is not None and job.node is not None
                else job.live_checkpoints()
            )
        except StorageError as error:
            offered = max((s.key for s in in_memory), default=None)
            if (
                error.errno != errno.ETIMEDOUT
                or job.node is not None
                or offered is None
                or any((c.attempt, c.step or 0) > offered for c in job.durable_checkpoints())
            ):
                raise
            log.warning(
                "job %s: %s; the snapshots in memory are newer than every known checkpoint, and "
                "only they are offered",
                job.name,
                error,
            )
            stored, in_root = [], []
        found = [
            m.RecoveryCandidate(attempt=s.attempt, step=s.step, tag=s.tag, source="memory")
            for s in in_memory
        ]
        kept = "storage" if parts.uploader is None else "stage"
        found += [
            m.RecoveryCandidate(attempt=c.attempt, step=c.step, tag=c.tag, source=kept)
            for c in stored
        ]
        found += [
            m.RecoveryCandidate(attempt=c.attempt, step=c.step, tag=c.tag, source="storage")
            for c in in_root
        ]
        found = [c for c in found if step is None or c.step == step]
        order = {c.tag: c.seq for c in (*job.in_root.values(), *job.checkpoints.values())}
        near = {"storage": 0, "stage": 1, "memory": 2}
        found.sort(
            key=lambda c: (
                c.attempt,
                -1 if c.step is None else c.step,
                near[c.source],
                order.get(c.tag, 0),
            ),
            reverse=True,
        )
        places = [job] if parts.uploader is None else [job, parts.uploader.jobs.job(job_name)]
        best = (
            (found[0].attempt, -1 if found[0].step is None else found[0].step) if found else (0, -1)
        )
        for place in places:
            if refusal := place.unreadable_beyond(best, step):
                raise refusal
        incomplete = (
            [f"{job_name}/{one.tag}: {one.reason}"[:MAX_TEXT] for one in job.abandoned_beyond(best)]
            if step is None
            else []
        )
        damaged = [
            f"{tag}: {why}"[:MAX_TEXT]
            for place in places
            for tag, why in sorted(place.damaged.items())
        ]
        if parts.uploader is not None and job.node is not None:
            damaged += [
                f"{tag}: {why}"[:MAX_TEXT]
                for tag, why in sorted(parts.uploader.refused[job.name].items())
            ]
        return m.Found(
            re=0,
            candidates=found[:MAX_CANDIDATES],
            damaged=damaged[:MAX_DAMAGED_FOUND],
            incomplete=incomplete[:MAX_DAMAGED_FOUND],
        )

    async def _in_root(self, job: Job, delivered: int) -> list[StoredCheckpoint]:
        """Decide what is undecided in the root.

        Return the checkpoints in the root behind the stage, or [] if there is no stage.

        If the root behind a stage cannot be read, return [] if all ranks are on this
        node, and the newest checkpoint that is known is on the stage. Otherwise raises
        StorageError: without the root, a recovery could go back behind a checkpoint
        that is there.
        """
        uploader, joint = self._parts.uploader, self._parts.saver.joint
        try:
            if uploader is not None:
                there = await uploader.scan(job.name, fresh=True)
                there.uncommitted -= job.checkpoints.keys()  # their uploads are under way
            if job.node is None or job.node.leads:
                await joint.decide_past(job, delivered)
        except StorageError as error:
            newest = job.newest_checkpoint()
            if (
                uploader is None
                or job.node is not None
                or newest is None
                or any(c.order > newest.order for c in job.in_root.values())
            ):
                raise
            log.warning(
                "job %s: %s; only what is in memory and on the stage is offered", job.name, error
            )
            return []
        return [] if uploader is None else uploader.jobs.job(job.name).live_checkpoints()

    async def deliver(self, job_name: str) -> EarlierAttempt:
        """Save what is in memory of a job of several nodes, so that all its ranks can
        read it from storage. If the newest attempt is on this node alone, save only the
        parts of this node in attempts before that were on several.

        Returns the attempt before, as this node knows it, once each snapshot of the
        newest attempt is durable and each older one is delivered, or its save has
        failed. With a stage, the newest checkpoint is then in the root. Raises
        StorageError if it cannot be uploaded.
        """
        job = self._parts.catalog.job(job_name)
        await self._deliver(job, _of_nodes_before(job) if job.node is None else job.snapshots)
        if self._parts.uploader is not None and job.node is not None:
            await self._parts.uploader.upload_newest(job)
        return job.earlier

    async def deliver_copies(self, job_name: str) -> list[int]:
        """Save the peer replicas of the attempts before on behalf of nodes that have not
        delivered: they are lost, or have lost their memory. Saves that have begun before
        are waited for.

        Return the ranks whose peer replicas this node holds, and that are delivered.
        """
        job = self._parts.catalog.job(job_name)
        unsaved = [s for s in peer_replicas.unsaved(job) if s.attempt < job.attempt]
        held = [s for s in job.peer_replicas.values() if s.attempt < job.attempt]
        await self._deliver(job, unsaved)
        return sorted(
            {rank for s in held if s.delivered or job.is_durable(*s.key) for rank in s.ranks}
        )

    async def _deliver(self, job: Job, snapshots: Sequence[Snapshot]) -> None:
        """Save these snapshots, all at the same time: another node may not hold the
        oldest of them, and would never deliver it.
        """
        asked = {
            snapshot: snapshot.persist for snapshot in snapshots if self._is_owed(job, snapshot)
        }
        saving = dict[Snapshot, asyncio.Task[None]]()
        for snapshot in asked:
            snapshot.persist = True
            saving[snapshot] = self._parts.saver.start(snapshot)
        for snapshot in sorted(asked, key=lambda s: s.key, reverse=True):
            await self._until_delivered(job, snapshot, saving[snapshot], asked=asked[snapshot])

    @staticmethod
    def _is_owed(job: Job, snapshot: Snapshot) -> bool:
        saved = snapshot.state is SnapshotState.DURABLE or job.is_durable(*snapshot.key)
        return snapshot.in_memory and not saved and not job.is_dead(snapshot)

    async def _until_delivered(
        self, job: Job, snapshot: Snapshot, saving: asyncio.Task[None], *, asked: bool
    ) -> None:
        """Wait until a snapshot of the newest attempt is durable, or one of an older
        attempt is delivered, or until its save has failed.

        asked: True if it was to be saved anyway. Otherwise it is not waited for once a
        newer one is durable. A save that has failed on the storage of any node is tried
        once more, because the step would be lost.
        """

        def is_replaced() -> bool:
            newest = job.newest_durable()
            return not asked and newest is not None and newest.order[:2] > snapshot.key

        def is_delivered() -> bool:
            return snapshot.delivered and snapshot.attempt < job.attempt

        def is_over() -> bool:
            return saving.done() or is_replaced() or is_delivered()

        tries = 1
        while True:
            saving.add_done_callback(lambda _: job.changed.notify())
            await job.changed.wait_until(is_over)
            if not saving.done():
                if is_replaced() or not await self._parts.saver.joint.abandon_refused(snapshot):
                    return
                # It learns at its next look that its try is abandoned.
                await asyncio.wait([saving])
            if tries == 2 or not self._is_owed(job, snapshot) or snapshot.code != StorageError.code:
                return
            tries, saving = 2, self._parts.saver.start(snapshot)

    async def forget(self, job_name: str, tags: Sequence[str]) -> dict[str, str]:
        """Delete these checkpoints from storage and from memory.

        Return the reason for each one that stays. Raises StorageError.
        """
        parts = self._parts
        if parts.uploader is not None:
            await parts.uploader.scan(names.check_name("job", job_name))
        elif job_name not in parts.catalog.jobs and job_name not in await parts.calls.read(
            "list the jobs", parts.repository.jobs
        ):
            return dict.fromkeys(tags, f"there is no job {job_name!r} in {parts.config.root}")
        job, refused = parts.catalog.job(job_name), {}
        await recovery.scan_job(parts.repository, job, parts.calls)
        for tag in tags:
            try:
                why = await parts.orphans.let_go(job, tag)
                why = why or await (
                    parts.saver.front.deleter if parts.uploader is None else parts.uploader
                ).forget(job, tag)
            except JournalBroken:
                raise
            except OSError as error:
                why = str(StorageError.of(f"delete {job_name}/{tag}", error))
            except CkptdError as error:
                why = str(error)
            if why:
                refused[tag] = why
        return refused

    def remark(self, slots: Sequence[Slot], disk_free: int | None) -> str:
        """Return a warning for the owner of new slots, or "": the slots are on the
        disk, or few checkpoints fit under the root.

        Only rank 0 is told of the root. Before the first checkpoint of a job, its size
        is that of the slots of all ranks. disk_free: the free bytes under the root, or
        those under the stage, which a job of several nodes does not use.
        """
        parts, told = self._parts, [self._parts.slots.remark(slots)]
        if slots and (header := slots[0].header).rank == 0 and disk_free is not None:
            job = parts.catalog.job(header.job)
            fit = job.room_for(disk_free)
            if fit is None:
                fit = disk_free // max(1, header.capacity * header.world_size)
            if parts.uploader is None or job.node is None:
                told.append(parts.saver.front.remark(job, fit, disk_free))
        return "; ".join(filter(None, told))

    async def status(self, vitals: Vitals, clients: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `ckptd status --json` prints. Sizes are bytes, times are seconds.

        clients: the part about the clients, from `Server.report`.
        """
        await self.drop_deleted()
        parts, config = self._parts, self._parts.config
        report = self.report(vitals.disk_free)
        return {
            "ready": not parts.engine.stopping,
            "version": __version__,
            "pid": os.getpid(),
            "root": str(config.root),
            "identity": parts.identity,
            "foreign_memory": [held.report() for held in parts.foreign.held()],
            "refused": [one.report() for one in vitals.refusals.lasting(time.monotonic())],
            "memory_elsewhere": [found.report() for found in parts.foreign.missed()],
            "stage": None
            if parts.uploader is None
            else {"directory": str(config.stage), **parts.uploader.report()},
            "socket": str(self.socket or config.socket),
            "private": config.private,
            "log_file": str(config.log_file) if config.log_file else None,
            "history": str(machine.history_file(config.state_dir, config.root))
            if config.history
            else None,
            "uptime_seconds": round(vitals.uptime, 3),
            "rss_bytes": rss_bytes(),
            "cpu_seconds": round(time.process_time(), 3),
            "event_loop_lag_seconds": round(vitals.lag, 6),
            "disk_free_bytes": vitals.disk_free,
            "root_quota": parts.saver.root.quota.report(parts.saver.root.catalog.jobs.values()),
            **clients,
            **report,
            "jobs": [
                {**job, "overdue": _overdue(vitals.overdue.late.get(job["job"]))}
                for job in report["jobs"]
            ],
            "counters": report["counters"] | clients["counters"],
        }

    async def drop_deleted(self) -> None:
        """Forget the checkpoints that were deleted by hand, as far as the storage says
        so in time. A status must not wait for a disk that hangs.
        """
        parts = self._parts
        if self._look is None or self._look.done():
            jobs = list(parts.catalog.jobs.values())
            self._look = asyncio.ensure_future(
                recovery.drop_deleted(parts.repository, jobs, parts.calls)
            )
            await asyncio.wait([self._look], timeout=_DELETED_SECONDS)

    def report(self, disk_free: int | None) -> dict[str, Any]:
        """Return the part of `ckptd status --json` that is about jobs, shared memory
        and counters. Sizes are bytes, times are seconds.

        disk_free: the free bytes under the root, or None if they are not known.
        """
        parts = self._parts
        jobs = sorted(parts.catalog.jobs.values(), key=_rank_in_report)
        shown = sorted(jobs[:MAX_JOBS], key=lambda job: job.name)
        slots = defaultdict[str, list[Slot]](list)
        for slot in parts.slots.slots.values():
            slots[slot.header.job].append(slot)
        ranks = all_ranks_report(shown, slots)
        return {
            "jobs": [self._job(job, disk_free) | ranks[job.name] for job in shown],
            "jobs_not_shown": max(0, len(jobs) - MAX_JOBS),
            "shared_memory": {
                "used_bytes": parts.slots.used,
                "on_disk_bytes": parts.slots.on_disk,
                "replica_bytes": sum(
                    slot.nbytes for slot in parts.slots.slots.values() if slot.header.peer_replica
                ),
                "quota_bytes": parts.slots.quota,
                "segments": len(parts.slots.slots),
                "directory": str(parts.slots.path),
                "disk_directory": parts.slots.disk_directory,
            },
            "counters": {
                **{name: parts.saver.counters[name] for name in COUNTERS},
                "persist_seconds": round(parts.saver.saves.seconds, 3),
                "persist_raw_bytes": sum(pipeline.bytes_read for pipeline in parts.pipelines),
                "persist_stored_bytes": sum(pipeline.bytes_written for pipeline in parts.pipelines),
                "journal_torn_tails": parts.journal.torn,
                "journal_corrupt": parts.journal.corrupt,
            },
        }

    def _job(self, job: Job, disk_free: int | None) -> dict[str, object]:
        governor = self._parts.saver.governor(job.name)
        uploader = self._parts.uploader
        sealed, failure = job.newest_in_memory(), job.last_failure
        durable = job.newest_durable()
        uploaded = max(job.in_root.values(), key=lambda c: c.order, default=None)
        return {
            "job": job.name,
            "attempt": job.attempt,
            "last_sealed": _where(sealed.attempt, sealed.step, sealed.tag) if sealed else None,
            "last_durable": _where(durable.attempt, durable.step, durable.tag)
            | _age(durable.created)
            | _sizes(durable)
            if durable
            else None,
            "last_uploaded": _where(uploaded.attempt, uploaded.step, uploaded.tag)
            | _age(uploaded.created)
            if uploaded
            else None,
            "waiting": [] if uploader is None else [c.tag for c in uploader.waiting(job)],
            "non_finite": None if durable is None else durable.non_finite,
            "room_for": job.room_for(disk_free),
            "last_error": {"step": failure.step, "reason": failure.reason[:MAX_TEXT]}
            | _age(failure.when)
            if failure
            else None,
            "saving": [
                {**_where(s.attempt, s.step, s.tag), **s.progress.report(time.monotonic())}
                for s in job.snapshots
                if s.state is SnapshotState.WRITING and s.progress is not None
            ],
            "pending": sorted(s.tag for s in job.snapshots if s.persist and not job.is_settled(s)),
            "host": machine.host(),
            "ranks_here": list(job.ranks_here) if job.node is not None else None,
            "delivered": sorted(
                s.directory
                for s in job.snapshots
                if s.delivered and s.state is SnapshotState.WRITTEN
            ),
            "replicated": max(job.answer.replicated, default=None),
            "replicas_off": job.answer.alone[:MAX_TEXT] or None,
            "peer_replicas": [
                {**_where(s.attempt, s.step, s.tag), "ranks": sorted(s.seals)}
                for _, s in sorted(job.peer_replicas.items())
            ],
            "ranks_connected": job.ranks.connected,
            "running_seconds": _running(job),
            "unlocked_bytes": job.ranks.unlocked,
            "training_cost": msgspec.to_builtins(governor.cost),
            "writers": governor.threads,
            "announced": (
                job.announced or ("" if uploader is None else uploader.jobs.job(job.name).announced)
            )[:MAX_TEXT],
            "damaged": {
                tag: why[:MAX_TEXT] for tag, why in list(job.damaged.items())[:MAX_DAMAGED]
            },
            "newer": {tag: why[:MAX_TEXT] for tag, why in list(job.newer.items())[-1:]},
            "denied": {tag: why[:MAX_TEXT] for tag, why in list(job.denied.items())[-1:]},
        }


def report_text(status: dict[str, Any]) -> str:
    """Return the JSON of a status report.

    If it has too many bytes for a frame, such as when many jobs have long errors, some
    jobs are left out, and counted in `jobs_not_shown`: first those that do not run and
    have no error.
    """
    text = json.dumps(status)
    kept = sorted(
        status["jobs"],
        key=lambda job: (not job["ranks_connected"], not (job["last_error"] or job["damaged"])),
    )
    while len(text) > MAX_REPORT and kept:
        kept = kept[: len(kept) * 3 // 4]
        shown = sorted(kept, key=lambda job: str(job["job"]))
        left_out = status["jobs_not_shown"] + len(status["jobs"]) - len(shown)
        text = json.dumps(status | {"jobs": shown, "jobs_not_shown": left_out})
    return text


def _of_nodes_before(job: Job) -> list[Snapshot]:
    """Return the snapshots of this node in older attempts that were on several nodes."""
    return [s for s in job.snapshots if s.node is not None and s.attempt < job.attempt]


def _rank_in_report(job: Job) -> tuple[bool, bool, str]:
    """Return the key that sorts first the jobs that a status report must have: those that
    run, then those with an error.
    """
    return not job.ranks.connected, not (job.last_failure or job.damaged), job.name


def _overdue(late: Late | None) -> dict[str, object] | None:
    """Return the part of a job's report that says that it is overdue."""
    if late is None:
        return None
    return {
        "seconds": round(late.seconds, 1),
        "usual_seconds": round(late.usual, 1),
        "message": str(late),
    }


def _running(job: Job) -> float | None:
    """Return the seconds since the last rank of a job that is connected was started, or
    None if no rank is connected or the time is not known.
    """
    started = [
        owner.process.started for owner in job.ranks.owners.values() if owner.notify is not None
    ]
    known = all(started) and started
    return max(0.0, round(time.time() - max(known), 1)) if known else None


def _where(attempt: int, step: int | None, tag: str) -> dict[str, object]:
    return {"attempt": attempt, "step": step, "tag": tag}


def _sizes(checkpoint: StoredCheckpoint) -> dict[str, object]:
    """Return what a checkpoint takes, and what a restore of it reads."""
    return {
        "bytes": checkpoint.nbytes,
        "new_bytes": checkpoint.new_bytes,
        "chain": checkpoint.chain,
        "restored_bytes": checkpoint.restored_bytes,
    }


def _age(when: float) -> dict[str, float | None]:
    """Return the seconds since a time in Unix seconds, at least 0, or None if the time
    is not known.
    """
    return {"age_seconds": None if math.isnan(when) else max(0.0, round(time.time() - when, 1))}
