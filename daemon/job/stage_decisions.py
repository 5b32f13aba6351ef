"""Decides what a stage uploads next and which local copies it may delete, and says what
has been uploaded. Does no I/O.

A stage is a POSIX root on a local disk, in front of the root. Checkpoints are committed
there first, and are uploaded afterwards.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.wire.messages import Uploads

MOST_IN_ORDER = 2
"""The most checkpoints of a job that wait and are uploaded in order. If more wait, the
upload has fallen behind.
"""


def waiting(job: Job, refused: Collection[str] = ()) -> list[StoredCheckpoint]:
    """Return the checkpoints that are on the stage and not in the root, oldest first.

    refused: the tags of the checkpoints that cannot be uploaded.
    """
    found = [c for c in job.live_checkpoints() if c.tag not in job.in_root and c.tag not in refused]
    return sorted(found, key=lambda c: c.order)


def next_upload(waiting: list[StoredCheckpoint]) -> StoredCheckpoint | None:
    """Return the checkpoint of a job to upload next: the oldest one, or the newest one
    if the upload has fallen behind.

    The newest checkpoint is what the loss of the node would cost. waiting: the
    checkpoints that wait, oldest first.
    """
    if not waiting:
        return None
    return waiting[0] if len(waiting) <= MOST_IN_ORDER else waiting[-1]


def needless(job: Job) -> list[StoredCheckpoint]:
    """Return the local copies that may be deleted, oldest first: those of checkpoints
    that are in the root, except the newest of the job.

    The newest checkpoint stays, so that a recovery reads it from the local disk.
    """
    newest = job.newest_durable()
    return [c for c in spare(job) if c is not newest]


def spare(job: Job) -> list[StoredCheckpoint]:
    """Return the local copies that may be deleted if the disk is full, oldest first:
    those of all checkpoints that are in the root.
    """
    return sorted(
        (c for c in job.live_checkpoints() if c.tag in job.in_root), key=lambda c: c.order
    )


def next_job(names: Collection[str], last: str) -> str | None:
    """Return the job whose turn it is: the one that follows the job of the last upload,
    in the order of their names.
    """
    return min(names, key=lambda name: (name <= last, name), default=None)


def uploads(job: Job, attempt: int, refused: Collection[str] = ()) -> Uploads:
    """Return the message that says which steps of an attempt are in the root, and which
    wait for their upload.
    """
    there = [c.step for c in job.in_root.values() if c.attempt == attempt and c.step is not None]
    wait = [c.step for c in waiting(job, refused) if c.attempt == attempt and c.step is not None]
    return Uploads(re=0, attempt=attempt, uploaded=sorted(there), waiting=wait)
