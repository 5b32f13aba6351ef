"""Decides what of a job is owed before this node goes, and says of each thing whether it
has left the node, and what keeps it here. Does no I/O.

A `Debt` is one thing that is owed: a snapshot in memory that must come to storage, or a
checkpoint on the stage that must come to the root. A further kind of debt is a further
class; `daemon/process/drain.py` makes the debts and waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ckptd.daemon.job import peer_replicas
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.snapshot import Key, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.errors import StorageError
from ckptd.shared.wire.lifecycle import SnapshotState
from ckptd.shared.wire.messages import Due

WAITING, SAVING, FAILED = "waiting", "saving", "failed"
DELIVERED, UPLOADING = "delivered", "uploading"
"""The states of a due (PROTOCOL.md, section 3)."""
MOST_TEXT = 400
"""The most characters of the reason of a due."""


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """The progress of the uploads of a daemon with a stage.

    refused: by job and tag, the reason why a checkpoint cannot be uploaded. problem: the
    reason why nothing is uploaded at present, or "". current: job and tag of the
    checkpoint that is being uploaded, `done` of whose `total` bytes are in the root.
    """

    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    problem: str = ""
    current: tuple[str, str] | None = None
    done: int = 0
    total: int = 0


class Debt(Protocol):
    """A thing that must leave this node."""

    @property
    def place(self) -> str:
        """The job and the tag, as in `gpt/best.a0001`."""

    @property
    def key(self) -> tuple[str, int]:
        """The place, and the lowest rank of the snapshot that is to be saved, or -1.

        A node may owe several parts of one step: its own, and copies of others.
        """

    @property
    def is_saved(self) -> bool:
        """True if it is saved, False if it is merely no longer needed."""

    def now(self, uploads: UploadProgress | None) -> Debt | None:
        """Return the debt that this one has become: itself, its successor, or None if
        nothing is owed any more.

        uploads: how far the uploads are, or None if there is no stage.
        """

    @property
    def to_save(self) -> Snapshot | None:
        """The snapshot in memory whose save is to be begun, or None if there is none, or
        if its save is under way.
        """

    def due(self, uploads: UploadProgress | None) -> Due:
        """Return the entry for this debt in the reply to Drain."""

    def is_hopeless(self, uploads: UploadProgress | None) -> bool:
        """Return True if the save has failed, and no further try can succeed."""


def owed(job: Job) -> list[Snapshot]:
    """Return the snapshots of a job that have not left this node.

    These are the snapshots of `Job.unsaved`. Of a job of several nodes, they are also
    those that this node has delivered and that wait for other nodes. If none of the
    trainers is on this node any more, they are also the peer replicas that nobody has
    delivered.
    """
    found = job.unsaved()
    found += [s for s in job.snapshots if s not in found and s.delivered and not has_left(job, s)]
    if not job.ranks.owners:
        found += peer_replicas.unsaved(job)
    return found


def has_left(job: Job, snapshot: Snapshot) -> bool:
    """Return True if a snapshot need not stay in the memory of this node.

    It, or a later one, is durable; or another node will never seal the step. A step
    that this node has delivered waits for other nodes only if all of them hold it, and
    trainers are here: otherwise the next attempt decides whether it is a checkpoint.
    """
    if snapshot.state is SnapshotState.DURABLE or job.is_durable(*snapshot.key):
        return True
    if job.is_durable_after(snapshot.key) or job.is_dead(snapshot):
        return True
    waits = snapshot.attempt == job.attempt and snapshot.step in job.answer.common
    return snapshot.delivered and not (waits and job.ranks.owners)


@dataclass(frozen=True, slots=True)
class SnapshotDebt:
    """A snapshot in memory that must come to storage."""

    job: Job
    snapshot: Snapshot

    @property
    def place(self) -> str:
        return f"{self.job.name}/{self.snapshot.directory}"

    @property
    def key(self) -> tuple[str, int]:
        return self.place, self.snapshot.ranks[0]

    @property
    def is_saved(self) -> bool:
        return self.snapshot.delivered or self.job.is_durable(*self.snapshot.key)

    def now(self, uploads: UploadProgress | None) -> Debt | None:
        """Return the debt of the upload if the snapshot is on the stage, and the debt of
        its successor if the snapshot was freed unsaved.
        """
        job, snapshot = self.job, self.snapshot
        if has_left(job, snapshot):
            staged = None if uploads is None else _staged(job, snapshot.key)
            return None if staged is None else UploadDebt(job, staged)
        if snapshot.in_memory:
            return self
        newer = job.unsaved()
        return SnapshotDebt(job, newer[-1]) if newer else None  # it was deleted on request

    @property
    def to_save(self) -> Snapshot | None:
        waits = self.snapshot.state in (SnapshotState.SEALED, SnapshotState.FAILED)
        return self.snapshot if waits and not self.is_hopeless(None) else None

    def due(self, uploads: UploadProgress | None) -> Due:
        snapshot, progress = self.snapshot, self.snapshot.progress
        failed = snapshot.state is SnapshotState.FAILED
        writing = snapshot.state is SnapshotState.WRITING and progress is not None
        return Due(
            job=self.job.name,
            attempt=snapshot.attempt,
            step=snapshot.step,
            tag=snapshot.directory,
            state=FAILED
            if failed
            else DELIVERED
            if snapshot.delivered
            else SAVING
            if writing
            else WAITING,
            reason=snapshot.reason[:MOST_TEXT] if failed else "",
            done=progress.done if writing and progress else 0,
            total=progress.total if writing and progress else 0,
        )

    def is_hopeless(self, uploads: UploadProgress | None) -> bool:
        snapshot = self.snapshot
        return snapshot.state is SnapshotState.FAILED and snapshot.code != StorageError.code


@dataclass(frozen=True, slots=True)
class UploadDebt:
    """A checkpoint on the stage that must come to the root."""

    job: Job
    checkpoint: StoredCheckpoint

    @property
    def place(self) -> str:
        return f"{self.job.name}/{self.checkpoint.tag}"

    @property
    def key(self) -> tuple[str, int]:
        return self.place, -1

    @property
    def is_saved(self) -> bool:
        return self.checkpoint.tag in self.job.in_root

    def now(self, uploads: UploadProgress | None) -> Debt | None:
        job, tag = self.job, self.checkpoint.tag
        gone = uploads is None or tag in job.in_root or tag not in job.checkpoints
        return None if gone else self

    @property
    def to_save(self) -> Snapshot | None:
        return None

    def due(self, uploads: UploadProgress | None) -> Due:
        assert uploads is not None
        job, tag = self.job.name, self.checkpoint.tag
        refused = uploads.refused.get(job, {}).get(tag, "")
        is_current = uploads.current == (job, tag)
        return Due(
            job=job,
            attempt=self.checkpoint.attempt,
            step=self.checkpoint.step,
            tag=tag,
            state=FAILED if refused else UPLOADING,
            reason=(refused or uploads.problem)[:MOST_TEXT],
            done=uploads.done if is_current else 0,
            total=uploads.total if is_current else 0,
        )

    def is_hopeless(self, uploads: UploadProgress | None) -> bool:
        return self.due(uploads).state == FAILED


def still_owed(
    debts: Iterable[Debt], uploads: UploadProgress | None
) -> tuple[list[Debt], list[str]]:
    """Return the debts that are still owed, and the places that were saved.

    A place counts as saved once nothing is owed of it any more.

    uploads: how far the uploads are, or None if there is no stage.
    """
    left, saved = dict[tuple[str, int], Debt](), dict[str, None]()
    for debt in debts:
        now = debt.now(uploads)
        if now is not None:
            left[now.key] = now
        elif debt.is_saved:
            saved[debt.place] = None
    owed = {debt.place for debt in left.values()}
    return list(left.values()), [place for place in saved if place not in owed]


def _staged(job: Job, key: Key) -> StoredCheckpoint | None:
    """Return the checkpoint on the stage by which a snapshot comes to the root: its own,
    or else the first one after it. Return None if it, or a later one, is in the root.
    """
    if any(c.order[:2] >= key for c in job.in_root.values()):
        return None
    later = [c for c in job.live_checkpoints() if c.order[:2] >= key]
    return min(later, key=lambda c: c.order, default=None)
