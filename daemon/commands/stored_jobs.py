"""Reports what a root has while no daemon serves it, for `ckptd status`: the jobs on
storage, and the snapshots that a dead daemon has left in memory.
"""

from __future__ import annotations

import os
from typing import Any

from ckptd.daemon.commands.report import as_table
from ckptd.daemon.memory import unsaved
from ckptd.shared.errors import StorageError
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import existing_root, manifests
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.units import size_text


def stored_jobs(root: Location) -> dict[str, Any]:
    """Return the jobs of a root, each with its newest checkpoint, and the snapshots that
    are in the memory of this node only.

    `ckptd status` prints this as `storage` with `--json`
    (docs/reference/command-line.md). Raises NotFound, StorageError.
    """
    repository = existing_root(root)
    try:
        jobs = [_row(repository, job) for job in repository.jobs()]
    except OSError as error:
        raise StorageError.of(f"list {root}", error) from None
    directory = os.environ.get("CKPTD_SHM_DIR") or "/dev/shm"
    segments = os.path.join(directory, machine.segment_directory(root))
    left = unsaved.left_behind({
        "root": str(root), "jobs": [], "shared_memory": {"directory": segments},
    })  # fmt: skip
    return {
        "root": str(root),
        "jobs": [job for job in jobs if job["checkpoints"] or job["damaged"]],
        "in_memory_only": [
            {"job": one.job, "attempt": one.attempt, "step": one.step} for one in left
        ],
    }


def _row(repository: Repository, job: str) -> dict[str, Any]:
    found = dict(manifests(repository, job))
    intact = [manifest for manifest in found.values() if isinstance(manifest, Manifest)]
    newest = max(intact, key=lambda manifest: manifest.order, default=None)
    return {
        "job": job,
        "checkpoints": len(intact),
        "damaged": len(found) - len(intact),
        "newest": newest and newest.tag,
        "step": newest and newest.step,
        "bytes": newest and newest.nbytes,
        "created": newest and newest.created,
    }


def stored_jobs_text(found: dict[str, Any]) -> str:
    """Return what `stored_jobs` has found as text for people."""
    table = [("JOB", "CHECKPOINTS", "NEWEST", "SIZE", "CREATED", "")]
    table += [
        (
            job["job"],
            str(job["checkpoints"]),
            job["newest"] or "-",
            size_text(job["bytes"]) if job["newest"] else "-",
            job["created"] or "-",
            f"DAMAGED: {job['damaged']}" if job["damaged"] else "",
        )
        for job in found["jobs"]
    ]
    lines = as_table(table) if found["jobs"] else ["no checkpoints yet"]
    lines += [
        f"step {one['step']} of job {one['job']} (attempt {one['attempt']}) is in the memory of "
        f"this node only: the next daemon of this root saves it"
        for one in found["in_memory_only"]
    ]
    return "\n".join(lines)
