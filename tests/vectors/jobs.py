"""The test vectors of whole jobs. A reader finds the newest of several checkpoints
(FORMAT.md, sections 5 and 17).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptd.shared.formats import sealed_json
from tests.vectors.build import JOB, Checkpoint, Files, Part, Tensor, resealed, whole
from tests.vectors.sound import Vector, expected, floats, reference, state_of


@dataclass(frozen=True)
class JobVector:
    """The files of a job's directory, and the entry of the job in `vectors.json`."""

    files: Files
    entry: dict[str, Any]


def saved(attempt: int, step: int | None, tag: str, seq: int, value: float = 0.0) -> Vector:
    """Return a checkpoint with one tensor, which has this value."""
    tensors = [Tensor("x", "float32", (1,), floats(value))]
    user_tag = None if tag.startswith("step-") else tag.partition(".")[0]
    part = Part(
        tensors,
        state_of(["x"]),
        attempt=attempt,
        step=step,
        tag=tag,
        metadata=whole(tensors),
        request={"tag": user_tag},
    )
    checkpoint = Checkpoint([part], attempt=attempt, step=step, tag=tag, members={"seq": seq})
    return Vector("", checkpoint, expected(tensors), {"x": reference("x")})


def inside(tag: str, files: Files) -> Files:
    return {f"{tag}/{name}": data for name, data in files.items()}


def built(vectors: Sequence[Vector]) -> Files:
    return {
        name: data
        for vector in vectors
        for name, data in inside(vector.checkpoint.tag, vector.checkpoint.built()).items()
    }


def damaged_manifest(tag: str, attempt: int, step: int) -> Files:
    """Return a checkpoint whose manifest has a bit that is another."""
    files = saved(attempt, step, tag, 9).checkpoint.built()
    return inside(
        tag, files | {"manifest.json": files["manifest.json"].replace(b'"seq": 9', b'"seq": 8')}
    )


def without_part(tag: str, attempt: int, step: int) -> Files:
    """Return a checkpoint whose part file is missing."""
    return inside(
        tag, {"manifest.json": saved(attempt, step, tag, 9).checkpoint.built()["manifest.json"]}
    )


def uncommitted(tag: str, attempt: int, step: int) -> Files:
    """Return the part of a checkpoint that was never committed."""
    return inside(
        tag,
        {
            name: data
            for name, data in saved(attempt, step, tag, 9).checkpoint.built().items()
            if name != "manifest.json"
        },
    )


def abandoned(tag: str, attempt: int, step: int) -> Files:
    members = {
        "format": "ckptd-abandonment",
        "version": 1,
        "job": JOB,
        "attempt": attempt,
        "step": step,
        "tag": tag,
    }
    return inside(
        tag,
        {
            "manifest.json": sealed_json.encode(
                members | {"code": "storage", "reason": "rank 1 on node2: disk full"}
            )
        },
    )


def newer(tag: str, attempt: int, step: int) -> Files:
    """Return a checkpoint whose manifest has version 3."""
    files = saved(attempt, step, tag, 9).checkpoint.built()
    return inside(
        tag,
        files
        | {
            "manifest.json": resealed(
                files["manifest.json"].replace(b'"version": 1', b'"version": 3')
            )
        },
    )


def jobs() -> dict[str, JobVector]:
    def read(
        about: str, order: Sequence[Vector], more: Files, damaged: Sequence[str] = ()
    ) -> JobVector:
        """Return a job whose sound checkpoints are in `order`, the newest first.

        `damaged`: the directories that are passed over.
        """
        newest = order[0]
        entry = {
            "about": about,
            "expect": "read",
            "newest": newest.checkpoint.tag,
            "order": [vector.checkpoint.tag for vector in order],
            "damaged": list(damaged),
        }
        told = newest.entry()
        return JobVector(
            built(order) | more,
            entry
            | {name: told[name] for name in ("step", "tag", "world_size", "tensors", "state")},
        )

    def refused(about: str, why: str, check: str, files: Files) -> JobVector:
        return JobVector(
            files, {"about": about, "expect": "refused", "why": why, "at": "open", "check": check}
        )

    first, second = (
        saved(1, 2000, "step-00002000.a0001", 1, 1),
        saved(2, 500, "step-00000500.a0002", 2, 2),
    )
    best, last = saved(2, 800, "best.a0002", 4, 3), saved(2, 950, "step-00000950.a0002.t2", 6, 4)
    without_step, without_step_too = (
        saved(2, None, "a-copy.a0002", 7, 5),
        saved(2, None, "copied.a0002", 3, 6),
    )
    hint = {"newest": b"step-00000500.a0002\n"}
    rubbish = {
        "notes/readme.txt": b"no checkpoint",
        "step-7.a0002/manifest.json": b"{}",
        "newest.tmp": b"step",
    }
    return {
        "newest": read(
            "tags with and without a step, two attempts, a stale hint, an abandoned try and the "
            "next try of its step, a save that was "
            "never committed, and two damaged checkpoints, which would be the newest",
            [last, best, second, without_step, without_step_too, first],
            hint
            | rubbish
            | abandoned("step-00000950.a0002", 2, 950)
            | uncommitted("step-00002000.a0002", 2, 2000)
            | without_part("step-00000980.a0002", 2, 980)
            | damaged_manifest("step-00001000.a0002", 2, 1000),
            ["step-00001000.a0002", "step-00000980.a0002"],
        ),
        "own-tag-is-newest": read(
            "a tag of the user's own has the highest step, and no hint is there",
            [saved(2, 900, "best.a0002", 4, 3), second, first],
            {},
        ),
        "own-tag-is-damaged": read(
            "the manifest of a tag of the user's own is damaged, so that its step is not known",
            [second, first],
            damaged_manifest("best.a0002", 2, 900),
            ["best.a0002"],
        ),
        "newer-in-an-older-attempt": read(
            "a newer ckptd has written a checkpoint of an older attempt, with a tag of the user's "
            "own",
            [second],
            newer("best.a0001", 1, 900),
        ),
        "newer-own-tag": refused(
            "a newer ckptd has written a checkpoint of the last attempt, with a tag of the user's "
            "own: it may be the newest",
            "newer",
            "manifest-version",
            built([first, second]) | newer("best.a0002", 2, 400),
        ),
        "newer-step": refused(
            "a newer ckptd has written the last step",
            "newer",
            "manifest-version",
            built([first, second]) | newer("step-00000600.a0002", 2, 600),
        ),
        "all-damaged": refused(
            "the only checkpoint is damaged",
            "damaged",
            "manifest-digest",
            hint | damaged_manifest("step-00000500.a0002", 2, 500),
        ),
        "nothing": JobVector(
            hint
            | abandoned("step-00000500.a0002", 2, 500)
            | uncommitted("step-00000600.a0002", 2, 600),
            {
                "about": "an abandoned try that the hint names, and a save that was never "
                "committed",
                "expect": "nothing",
            },
        ),
    }
