"""Reports what retention policies would do to a job before they are set: which
checkpoints stay and which are deleted, with the reason of each. Deletes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptd.daemon.commands.forgetting import place_in_root
from ckptd.daemon.commands.report import as_table
from ckptd.daemon.job.retention import judged, obstacle, policies_of
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.errors import IntegrityError, InvalidConfig, InvalidRequest, NewerFormat
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location
from ckptd.shared.retention import Policy, brief
from ckptd.shared.storage.locate import manifests
from ckptd.shared.units import count_text, size_text


def explained(path: Location, policies: Sequence[Policy]) -> dict[str, Any]:
    """Return what `policies` would do to the job DIR/JOB, or what its own policies do
    if there are none.

    Raises InvalidRequest, NotFound, StorageError; InvalidConfig if a policy cannot
    choose, because no checkpoint has its metric.
    """
    repository, job, tag = place_in_root(path)
    if tag is not None:
        raise InvalidRequest(
            f"{path} is one checkpoint, and --explain needs a job: name {path.parent}"
        )
    return explanation(job, dict(manifests(repository, job)), repository.pins(job), policies)


def explanation(
    job: str,
    found: Mapping[str, Manifest | IntegrityError],
    pinned: Collection[str],
    policies: Sequence[Policy],
) -> dict[str, Any]:
    """Return what `policies` would do to a job with these manifests, by tag, and pins.

    The errors are those of `explained`.
    """
    checkpoints = [StoredCheckpoint.of(one) for one in found.values() if isinstance(one, Manifest)]
    in_force = tuple(policies) or policies_of(checkpoints, ())
    if not in_force:
        raise InvalidRequest(
            f"job {job!r} has no retention policies of its own: say which to explain, like "
            f"--keep 'Daily(7)'"
        )
    if why := obstacle(checkpoints, in_force, insisted=True):
        raise InvalidConfig(f"no checkpoint of job {job!r} would be deleted, because {why}")
    rows = [
        _row(one.checkpoint.tag, one.checkpoint.nbytes, kept=one.kept, reason=one.reason)
        for one in judged(checkpoints, in_force, pinned, insisted=True)
    ]
    rows += [
        _row(tag, None, kept=True, reason="its manifest cannot be read, and retention leaves it")
        for tag, one in found.items()
        if not isinstance(one, Manifest | NewerFormat)
    ]
    newer = sorted(tag for tag, one in found.items() if isinstance(one, NewerFormat))
    rows += [_row(tag, None, kept=True, reason="a newer ckptd has written it") for tag in newer]
    return {
        "job": job,
        "policies": [brief(policy) for policy in in_force],
        "checkpoints": rows,
        "kept_bytes": sum(row["bytes"] or 0 for row in rows if row["kept"]),
        "deleted_bytes": sum(row["bytes"] or 0 for row in rows if not row["kept"]),
        "note": f"retention deletes nothing in this job while it has {newer[0]}, which a newer "
        f"ckptd has written; `ckptd forget --keep` does"
        if newer
        else "",
    }


def _row(tag: str, nbytes: int | None, *, kept: bool, reason: str) -> dict[str, Any]:
    return {"tag": tag, "bytes": nbytes, "kept": kept, "reason": reason}


def explanation_text(found: dict[str, Any]) -> str:
    """Return the report for people: a line for each checkpoint, oldest first, and the
    sums.
    """
    rows = found["checkpoints"]
    lines = [("CHECKPOINT", "SIZE", "THEN", "WHY")] + [
        (
            f"{found['job']}/{row['tag']}",
            "-" if row["bytes"] is None else size_text(row["bytes"]),
            "stays" if row["kept"] else "deleted",
            row["reason"],
        )
        for row in rows
    ]
    deleted = sum(not row["kept"] for row in rows)
    sums = (
        f"{deleted} of {count_text(len(rows), 'checkpoint')} would be deleted "
        f"({size_text(found['deleted_bytes'])}), and {len(rows) - deleted} would stay "
        f"({size_text(found['kept_bytes'])}), with {', '.join(found['policies'])}"
    )
    return "\n".join([*as_table(lines), sums, *([found["note"]] if found["note"] else [])])
